package experiment

import (
	"fmt"
	"math"
)

// Bar is one thing that the comparison of policies was asked to show, with what
// it found. Bars are judged on means over seeds.
type Bar struct {
	Config string `json:"config"`
	Regime Regime `json:"regime"`
	// Name says what is measured, Want what is asked of it.
	Name     string  `json:"name"`
	Want     string  `json:"want"`
	Measured float64 `json:"measured"`
	Met      bool    `json:"met"`
	// Note tells what decided, or where to look.
	Note string `json:"note,omitempty"`
}

// leastGain is what Holdfast is asked to gain over the best session ceiling, in percent;
// nowhere may it be below 0.
var leastGain = map[string]map[Regime]float64{
	"qwen": {Stationary: 8, Drifting: 10},
	"step": {Drifting: 8},
}

// leastRequestGain is what misa-t is asked to gain over the best request ceiling.
var leastRequestGain = map[string]float64{"qwen": 40, "step": 60}

// barList collects the bars of one regime.
type barList struct {
	config string
	regime Regime
	bars   []Bar
}

func (l *barList) atLeast(name string, measured, want float64, note string) {
	l.bars = append(l.bars, Bar{l.config, l.regime, name, fmt.Sprintf("at least %g", want), measured, measured >= want, note})
}

func (l *barList) atMost(name string, measured, want float64, note string) {
	l.bars = append(l.bars, Bar{l.config, l.regime, name, fmt.Sprintf("at most %g", want), measured, measured <= want, note})
}

// judge compares the rows of every regime with what was asked.
func (r *PaperResult) judge() []Bar {
	var bars []Bar
	for _, b := range r.Bounds {
		l := barList{config: b.Config, regime: b.Regime}
		rows := map[string]*Row{}
		for i := range r.Rows {
			if row := &r.Rows[i]; row.Config == b.Config && row.Regime == b.Regime {
				rows[row.Policy] = row
			}
		}
		r.judgeBaselines(&l, rows)
		if h := rows["holdfast"]; h != nil {
			l.judgeHoldfast(h, rows)
		}
		l.judgeOracle(r.Rows, rows["oracle"])
		bars = append(bars, l.bars...)
	}
	return bars
}

// judgeBaselines looks at the sweep, the collapse and the paper's policy.
func (r *PaperResult) judgeBaselines(l *barList, rows map[string]*Row) {
	if request := rows["request-ceiling"]; request != nil && l.regime != EndToEnd {
		var swept []SweepPoint
		for _, p := range r.Sweeps {
			if p.Config == l.config && p.Regime == l.regime && p.Policy == "request-ceiling" {
				swept = append(swept, p)
			}
		}
		if n := len(swept); n > 2 {
			ends := math.Max(swept[0].BalancedPerMinute, swept[n-1].BalancedPerMinute)
			over := request.BalancedPerMinute / ends
			l.bars = append(l.bars, Bar{l.config, l.regime, "request ceiling: best over the ends of its sweep", "above 1", over, over > 1, "best at " + request.Ceiling})
		}
	}
	if p := rows["permissive"]; p != nil && (l.regime == Stationary || l.regime == Ungrouped) {
		l.atMost("overload: prefix hit", p.PrefixHit, 0.1, "what is left are prompts that sessions share")
		l.atMost("overload: prefix hit on sessions' own contexts", p.OwnHit, 0.1, "")
	}
	if m := rows["misa-t"]; m != nil && l.regime == Stationary {
		if rows["request-ceiling"] != nil {
			l.atLeast("misa-t over the request ceiling, %", m.GainVsRequestPercent, leastRequestGain[l.config], "")
		}
		l.atLeast("misa-t: prefix hit", m.PrefixHit, 0.95, "")
	}
}

// judgeHoldfast compares the product's policy with every honest rival.
func (l *barList) judgeHoldfast(h *Row, rows map[string]*Row) {
	if session := rows["session-ceiling"]; session != nil {
		note := "one seed"
		if h.Seeds > 1 {
			note = fmt.Sprintf("± %.1f", h.GainVsSessionHalfWidth)
		}
		l.atLeast("holdfast over the session ceiling, %", h.GainVsSessionPercent, leastGain[l.config][l.regime], note)
		worst95, class95 := worst(h.P95Seconds, session.P95Seconds)
		worst99, class99 := worst(h.P99Seconds, session.P99Seconds)
		l.atMost("holdfast: worst p95 of a class against the session ceiling's, %", worst95, 5, class95)
		l.atMost("holdfast: worst p99 of a class against the session ceiling's, %", worst99, 10, class99)
	}
	for _, rival := range []string{"class-ceilings", "partitioned", "thunderagent-like", "prime-rl-like"} {
		if o := rows[rival]; o != nil {
			l.atLeast("holdfast over "+rival+", %", 100*(h.BalancedPerMinute/o.BalancedPerMinute-1), 0, "")
		}
	}
	if rows["oracle"] != nil {
		l.atLeast("holdfast of the oracle, %", h.OfOraclePercent, 95, "")
	}
	l.atMost("holdfast: TV, points", h.TVPoints, 1, "")
}

// judgeOracle demands that nothing beats the oracle: it would be none.
func (l *barList) judgeOracle(all []Row, oracle *Row) {
	if oracle == nil {
		return
	}
	best, name := 0.0, ""
	for i := range all {
		if row := &all[i]; row.Config == l.config && row.Regime == l.regime && row.Policy != "oracle" && row.BalancedPerMinute > best {
			best, name = row.BalancedPerMinute, row.Policy
		}
	}
	if name != "" {
		l.atMost("best other policy of the oracle, %", 100*best/oracle.BalancedPerMinute, 100, name)
	}
}

// worst is the largest excess of one policy's quantile over another's, in percent.
func worst(of, base map[string]float64) (percent float64, class string) {
	percent = math.Inf(-1)
	for _, c := range []string{"agent", "rlvr", "rlhf"} {
		if b := base[c]; b > 0 {
			if excess := 100 * (of[c]/b - 1); excess > percent {
				percent, class = excess, c
			}
		}
	}
	return percent, class
}
