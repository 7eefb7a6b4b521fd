// Package chart writes line and bar charts as SVG: axes, ticks, a legend, and
// text that stays text. It exists because the documentation needs a handful of
// plain charts that look alike and change only where the figures do; a plotting
// library would bring fonts and a dozen modules into the program for that.
//
// Non-goals: interaction, dates, logarithmic axes.
package chart

import (
	"bytes"
	"fmt"
	"math"
	"strings"
)

// Line is one series of a panel.
type Line struct {
	Name string
	X, Y []float64
	// Dashed draws it broken, Points marks each point.
	Dashed, Points bool
	// Color is an index into the palette; lines of one colour belong together.
	Color int
}

// Panel is one pair of axes.
type Panel struct {
	Title  string
	XLabel string
	YLabel string
	Lines  []Line
	// YMin and YMax fix the axis if YMax is above YMin.
	YMin, YMax float64
	// Bars, if any, make the panel a bar chart of Labels by groups instead.
	Bars   []Bars
	Labels []string
}

// Bars is one group of bars, a value for each label.
type Bars struct {
	Name   string
	Values []float64
	Color  int
}

// palette is Okabe and Ito's, which colour-blind readers can tell apart.
var palette = []string{"#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F"}

const (
	width       = 860.0
	panelHeight = 300.0
	left        = 70.0
	right       = 190.0
	top         = 40.0
	bottom      = 50.0
)

// SVG draws the panels below each other.
func SVG(panels ...Panel) []byte {
	var b bytes.Buffer
	height := panelHeight * float64(len(panels))
	for i := range panels {
		height += panels[i].extraHeight()
	}
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%g" height="%g" fill="white"/>`+"\n", width, height)
	y := 0.0
	for i := range panels {
		p := &panels[i]
		fmt.Fprintf(&b, `<g transform="translate(0 %g)">`+"\n", y)
		if len(p.Bars) > 0 {
			p.drawBars(&b)
		} else {
			p.drawLines(&b)
		}
		b.WriteString("</g>\n")
		y += panelHeight + p.extraHeight()
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

// extraHeight leaves room for slanted labels.
func (p *Panel) extraHeight() float64 {
	if len(p.Bars) > 0 {
		return 70
	}
	return 0
}

// scale maps values to a length.
type scale struct{ min, max, from, to float64 }

func (s scale) at(v float64) float64 {
	return s.from + (v-s.min)/(s.max-s.min)*(s.to-s.from)
}

// ticks are round values within the scale, about n of them.
func (s scale) ticks(n int) []float64 {
	step := niceStep((s.max - s.min) / float64(n))
	var list []float64
	for v := math.Ceil(s.min/step-1e-9) * step; v <= s.max+step*1e-9; v += step {
		list = append(list, v)
	}
	return list
}

func niceStep(raw float64) float64 {
	if raw <= 0 {
		return 1
	}
	unit := math.Pow(10, math.Floor(math.Log10(raw)))
	for _, m := range []float64{1, 2, 5, 10} {
		if raw <= m*unit*1.0001 {
			return m * unit
		}
	}
	return 10 * unit
}

// extent is the smallest round range that holds all values.
func extent(values []float64, fixedMin, fixedMax float64) (low, high float64) {
	if fixedMax > fixedMin {
		return fixedMin, fixedMax
	}
	low, high = math.Inf(1), math.Inf(-1)
	for _, v := range values {
		low, high = min(low, v), max(high, v)
	}
	if len(values) == 0 {
		return 0, 1
	}
	if low == high {
		return low - 1, high + 1
	}
	step := niceStep((high - low) / 5)
	return math.Floor(low/step) * step, math.Ceil(high/step) * step
}

func (p *Panel) drawLines(b *bytes.Buffer) {
	var xs, ys []float64
	for _, l := range p.Lines {
		xs, ys = append(xs, l.X...), append(ys, l.Y...)
	}
	x := scale{from: left, to: width - right}
	x.min, x.max = extent(xs, 0, 0)
	y := scale{from: panelHeight - bottom, to: top}
	y.min, y.max = extent(ys, p.YMin, p.YMax)
	p.frame(b, y)
	for _, v := range x.ticks(8) {
		text(b, x.at(v), panelHeight-bottom+16, "middle", number(v))
	}
	text(b, (left+width-right)/2, panelHeight-12, "middle", p.XLabel)
	for i, l := range p.Lines {
		color := palette[l.Color%len(palette)]
		dash := ""
		if l.Dashed {
			dash = ` stroke-dasharray="6 4"`
		}
		var points strings.Builder
		for j := range l.X {
			fmt.Fprintf(&points, "%.1f,%.1f ", x.at(l.X[j]), y.at(min(max(l.Y[j], y.min), y.max)))
			if l.Points {
				fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`+"\n", x.at(l.X[j]), y.at(l.Y[j]), color)
			}
		}
		fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.6"%s/>`+"\n", strings.TrimSpace(points.String()), color, dash)
		ly := top + 8 + 18*float64(i)
		fmt.Fprintf(b, `<line x1="%g" y1="%g" x2="%g" y2="%g" stroke="%s" stroke-width="2"%s/>`+"\n", width-right+12, ly-4, width-right+38, ly-4, color, dash)
		text(b, width-right+44, ly, "start", l.Name)
	}
}

func (p *Panel) drawBars(b *bytes.Buffer) {
	values := []float64{0}
	for _, g := range p.Bars {
		values = append(values, g.Values...)
	}
	y := scale{from: panelHeight - bottom, to: top}
	y.min, y.max = extent(values, p.YMin, p.YMax)
	p.frame(b, y)
	slot := (width - right - left) / float64(max(1, len(p.Labels)))
	bar := slot * 0.8 / float64(len(p.Bars))
	for g, group := range p.Bars {
		color := palette[group.Color%len(palette)]
		for i, v := range group.Values {
			v = min(max(v, y.min), y.max)
			x := left + slot*(float64(i)+0.1) + bar*float64(g)
			fmt.Fprintf(b, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"/>`+"\n",
				x, min(y.at(v), y.at(0)), bar, math.Abs(y.at(v)-y.at(0)), color)
		}
		ly := top + 8 + 18*float64(g)
		fmt.Fprintf(b, `<rect x="%g" y="%g" width="12" height="12" fill="%s"/>`+"\n", width-right+12, ly-10, color)
		text(b, width-right+30, ly, "start", group.Name)
	}
	for i, label := range p.Labels {
		x := left + slot*(float64(i)+0.5)
		fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="end" transform="rotate(-40 %.1f %.1f)">%s</text>`+"\n",
			x, panelHeight-bottom+14, x, panelHeight-bottom+14, escape(label))
	}
}

// frame draws the axes and what is common to both kinds.
func (p *Panel) frame(b *bytes.Buffer, y scale) {
	for _, v := range y.ticks(6) {
		fmt.Fprintf(b, `<line x1="%g" y1="%.1f" x2="%g" y2="%.1f" stroke="#ddd"/>`+"\n", left, y.at(v), width-right, y.at(v))
		text(b, left-6, y.at(v)+4, "end", number(v))
	}
	fmt.Fprintf(b, `<line x1="%g" y1="%g" x2="%g" y2="%g" stroke="black"/>`+"\n", left, panelHeight-bottom, width-right, panelHeight-bottom)
	fmt.Fprintf(b, `<line x1="%g" y1="%g" x2="%g" y2="%g" stroke="black"/>`+"\n", left, panelHeight-bottom, left, top)
	fmt.Fprintf(b, `<text x="%g" y="22" font-size="14" font-weight="bold">%s</text>`+"\n", left, escape(p.Title))
	middle := (top + panelHeight - bottom) / 2
	fmt.Fprintf(b, `<text x="16" y="%g" text-anchor="middle" transform="rotate(-90 16 %g)">%s</text>`+"\n", middle, middle, escape(p.YLabel))
}

func text(b *bytes.Buffer, x, y float64, anchor, s string) {
	fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="%s">%s</text>`+"\n", x, y, anchor, escape(s))
}

func escape(s string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;").Replace(s)
}

// number prints a tick without the dust of binary fractions.
func number(v float64) string {
	return fmt.Sprintf("%g", math.Round(v*1e6)/1e6+0)
}
