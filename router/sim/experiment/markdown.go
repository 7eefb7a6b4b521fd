package experiment

import (
	"fmt"
	"io"
	"strings"
)

// WriteMarkdown prints what the documentation shows of a comparison: which bars
// were met, and one table per configuration and regime.
func (r *PaperResult) WriteMarkdown(w io.Writer) error {
	m := &markdown{w: w}
	m.line("# Comparison of policies\n")
	m.line("Written by `holdfast sim paper --markdown`; what it means is in [simulation.md](simulation.md). Judging seeds %v; the longer end-to-end runs use the first of", r.Seeds)
	m.line("them. Gains are on balanced/min = min over classes of N_b / rho_b, paired by seed, with 95 %% intervals. \"Own hit\" leaves out prompts that sessions share.")
	m.line("Latencies run from release to completion.\n")
	m.line("## Bars\n")
	m.row("configuration", "regime", "measured", "value", "asked", "met", "note")
	m.rule(7)
	for _, b := range r.Bars {
		met := "yes"
		if !b.Met {
			met = "**no**"
		}
		m.row(b.Config, string(b.Regime), b.Name, figure(b.Measured), b.Want, met, b.Note)
	}
	for _, b := range r.Bounds {
		r.markdownTable(m, b)
	}
	return m.err
}

func (r *PaperResult) markdownTable(m *markdown, b Bounds) {
	var rows []*Row
	for i := range r.Rows {
		if r.Rows[i].Config == b.Config && r.Rows[i].Regime == b.Regime {
			rows = append(rows, &r.Rows[i])
		}
	}
	if len(rows) == 0 {
		return
	}
	m.line("\n## %s-like, %s: %d seeds, bound %.2f\n", b.Config, b.Regime, rows[0].Seeds, b.SamplesPerMinute)
	head := []string{"policy", "balanced/min (sd)", "samples/min: agent / rlvr / rlhf", "vs request", "vs session", "of oracle", "hit", "own hit", "TV pp",
		"p50 s: agent / rlvr / rlhf", "p95 s", "p99 s", "group p99 s", "oldest hold s", "preemptions", "cold prefill, Mtokens", "block-seconds per sample", "prefill / decode tokens/s", "requests/min", "the paper"}
	if b.Regime == EndToEnd {
		head = append(head, "iteration s", "TV from start pp", "consumed TV pp")
	}
	m.row(head...)
	m.rule(len(head))
	for _, row := range rows {
		name := row.Policy
		if row.Ceiling != "" {
			name += " (" + row.Ceiling + ")"
		}
		cells := []string{name, fmt.Sprintf("%.2f (%.2f)", row.BalancedPerMinute, row.SD),
			fmt.Sprintf("%.2f: %.2f / %.2f / %.2f", row.SamplesPerMinute, row.ByClass["agent"], row.ByClass["rlvr"], row.ByClass["rlhf"]),
			fmt.Sprintf("%+.0f %%", row.GainVsRequestPercent), interval(row.GainVsSessionPercent, row.GainVsSessionHalfWidth, row.Seeds),
			fmt.Sprintf("%.1f %%", row.OfOraclePercent), fmt.Sprintf("%.3f", row.PrefixHit), fmt.Sprintf("%.3f", row.OwnHit), fmt.Sprintf("%.2f", row.TVPoints),
			perClass(row.P50Seconds), perClass(row.P95Seconds), perClass(row.P99Seconds),
			fmt.Sprintf("%.0f", row.GroupP99Seconds), fmt.Sprintf("%.0f", row.OldestHoldSeconds), fmt.Sprintf("%.0f", row.Preemptions),
			fmt.Sprintf("%.0f", row.ColdPrefillTokens/1e6), fmt.Sprintf("%.3g", row.BlockSeconds),
			fmt.Sprintf("%.0f / %.0f", row.PrefillTokensPerSecond, row.DecodeTokensPerSecond), fmt.Sprintf("%.0f", row.RequestsPerMinute), row.published()}
		if b.Regime == EndToEnd {
			cells = append(cells, fmt.Sprintf("%.0f", row.IterationSeconds), fmt.Sprintf("%.2f", row.TVFromStartPoints), fmt.Sprintf("%.2f", row.ConsumedTVPoints))
		}
		m.row(cells...)
	}
}

// interval prints a mean with its half-width; one seed has none.
func interval(mean, halfWidth float64, seeds int) string {
	if seeds < 2 {
		return fmt.Sprintf("%+.1f %%", mean)
	}
	return fmt.Sprintf("%+.1f ± %.1f %%", mean, halfWidth)
}

func perClass(of map[string]float64) string {
	return fmt.Sprintf("%.0f / %.0f / %.0f", of["agent"], of["rlvr"], of["rlhf"])
}

// figure prints a measured value with as many digits as tell something.
func figure(v float64) string {
	if v > -1 && v < 2 {
		return fmt.Sprintf("%.3f", v)
	}
	return fmt.Sprintf("%.1f", v)
}

// markdown writes lines and keeps the first error.
type markdown struct {
	w   io.Writer
	err error
}

func (m *markdown) line(format string, args ...any) {
	if m.err == nil {
		_, m.err = fmt.Fprintf(m.w, format+"\n", args...)
	}
}

func (m *markdown) row(cells ...string) { m.line("| %s |", strings.Join(cells, " | ")) }

func (m *markdown) rule(columns int) { m.line("|%s", strings.Repeat("---|", columns)) }
