package chart

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

// wellFormed reads the whole document.
func wellFormed(t *testing.T, svg []byte) {
	t.Helper()
	d := xml.NewDecoder(bytes.NewReader(svg))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatalf("the SVG is not well-formed: %v\n%s", err, svg)
		}
	}
}

func TestLinesAreDrawnInsideTheFrame(t *testing.T) {
	svg := SVG(Panel{Title: "a < b & c", XLabel: "x", YLabel: "y", YMin: 0, YMax: 10, Lines: []Line{
		{Name: "one", X: []float64{0, 1, 2}, Y: []float64{0, 5, 40}, Points: true},
		{Name: "two", X: []float64{0, 2}, Y: []float64{3, 3}, Dashed: true, Color: 1},
	}})
	wellFormed(t, svg)
	text := string(svg)
	// The first line runs from the bottom left corner to the top right one; the
	// last value lies above the axis and is cut off there.
	if want := `points="70.0,250.0 370.0,145.0 670.0,40.0"`; !strings.Contains(text, want) {
		t.Errorf("no %s in\n%s", want, text)
	}
	for _, want := range []string{"a &lt; b &amp; c", ">one<", ">two<", "stroke-dasharray"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in the chart", want)
		}
	}
}

func TestBarsHangFromZero(t *testing.T) {
	svg := SVG(Panel{YMin: -10, YMax: 10, Labels: []string{"up", "down"}, Bars: []Bars{{Name: "g", Values: []float64{10, -10}}}})
	wellFormed(t, svg)
	text := string(svg)
	// Zero is in the middle, at 145: one bar above it and one below, equally high.
	for _, want := range []string{`y="40.0" width="240.0" height="105.0"`, `y="145.0" width="240.0" height="105.0"`} {
		if !strings.Contains(text, want) {
			t.Errorf("no bar %s in\n%s", want, text)
		}
	}
}

func TestTicksAreRound(t *testing.T) {
	s := scale{min: 0, max: 0.7}
	var got []string
	for _, v := range s.ticks(6) {
		got = append(got, number(v))
	}
	if want := "0 0.2 0.4 0.6"; strings.Join(got, " ") != want {
		t.Errorf("ticks %v, want %s", got, want)
	}
}

func TestEmptyPanelsDoNotBreak(t *testing.T) {
	wellFormed(t, SVG(Panel{Title: "nothing"}, Panel{Lines: []Line{{Name: "flat", X: []float64{1, 1}, Y: []float64{2, 2}}}}))
}
