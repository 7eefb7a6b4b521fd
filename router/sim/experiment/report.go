package experiment

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// published is what the paper reports for a policy: gain in samples over its
// swept baseline, and prefix hit, both in percent, 0 where it says nothing.
type published struct{ gainPercent, hitPercent float64 }

// paperFigures are from Tables 4 and 5 of arXiv 2608.11152.
var paperFigures = map[string]map[string]published{
	"qwen": {
		"request-ceiling": {0, 92.4}, "safe-128k": {-12.2, 0}, "permissive": {-55.2, 4.5},
		"session-admission": {19.3, 0}, "misa": {30.9, 79.2}, "misa-t-paper": {43.6, 95.3},
	},
	"step": {
		"safe-128k": {-21.7, 0}, "session-admission": {11.7, 0}, "misa": {23.3, 0}, "misa-t-paper": {53.3, 97.8},
	},
}

// paperEndToEnd are the paper's figures for MISA-T against its baseline.
const (
	paperIterationPercent = -22.8
	paperEndToEndPercent  = 35.6
)

// WriteText prints one table per configuration and regime, and the bars.
func (r *PaperResult) WriteText(w io.Writer) error {
	for _, b := range r.Bounds {
		if err := r.writeTable(w, b); err != nil {
			return err
		}
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "config\tregime\tbar\tmeasured\tasked\tmet\tnote")
	for _, b := range r.Bars {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%t\t%s\n", b.Config, b.Regime, b.Name, figure(b.Measured), b.Want, b.Met, b.Note)
	}
	return t.Flush()
}

func (r *PaperResult) writeTable(w io.Writer, b Bounds) error {
	seeds := 0
	for i := range r.Rows {
		if r.Rows[i].Config == b.Config && r.Rows[i].Regime == b.Regime {
			seeds = r.Rows[i].Seeds
		}
	}
	fmt.Fprintf(w, "\n%s, %s: %d seeds, bound %.2f balanced samples/min\n", b.Config, b.Regime, seeds, b.SamplesPerMinute)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	head := "policy\tceiling\tbal/min\tsd\tsamples/min\tvs request\tvs session\t±95%\tof oracle\tof bound\thit\town hit\tTV pp\tp95 agent\trlvr\trlhf\tp99 agent\trlvr\trlhf\tgroup p99\toldest hold\tpreempt\treversals/h\tpaper\t"
	if b.Regime == EndToEnd {
		head += "iteration s\tconsumed TV\t"
	}
	fmt.Fprintln(t, head)
	for i := range r.Rows {
		row := &r.Rows[i]
		if row.Config != b.Config || row.Regime != b.Regime {
			continue
		}
		fmt.Fprintf(t, "%s\t%s\t%.2f\t%.2f\t%.2f\t%+.1f %%\t%+.1f %%\t%.1f\t%.1f %%\t%.1f %%\t%.3f\t%.3f\t%.2f\t",
			row.Policy, row.Ceiling, row.BalancedPerMinute, row.SD, row.SamplesPerMinute, row.GainVsRequestPercent,
			row.GainVsSessionPercent, row.GainVsSessionHalfWidth, row.OfOraclePercent, row.OfBoundPercent, row.PrefixHit, row.OwnHit, row.TVPoints)
		for _, of := range []map[string]float64{row.P95Seconds, row.P99Seconds} {
			fmt.Fprintf(t, "%.0f\t%.0f\t%.0f\t", of["agent"], of["rlvr"], of["rlhf"])
		}
		fmt.Fprintf(t, "%.0f\t%.0f\t%.0f\t%.1f\t%s\t", row.GroupP99Seconds, row.OldestHoldSeconds, row.Preemptions, row.CapReversalsPerHour, row.published())
		if b.Regime == EndToEnd {
			fmt.Fprintf(t, "%.0f\t%.2f\t", row.IterationSeconds, row.ConsumedTVPoints)
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}

// published is what the paper says beside this row.
func (r *Row) published() string {
	if r.Regime == EndToEnd {
		if r.Policy == "misa-t-paper" {
			return fmt.Sprintf("%+.1f %%, iteration %+.1f %%", paperEndToEndPercent, paperIterationPercent)
		}
		return ""
	}
	p, ok := paperFigures[r.Config][r.Policy]
	if !ok || r.Regime != Stationary && r.Regime != Ungrouped {
		return ""
	}
	text := fmt.Sprintf("%+.1f %%", p.gainPercent)
	if p.hitPercent > 0 {
		text += fmt.Sprintf(", hit %.1f %%", p.hitPercent)
	}
	return text
}
