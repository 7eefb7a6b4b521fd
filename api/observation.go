package api

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"holdfast/api/wire"
	"holdfast/store"
)

// span is a length of time in a query: a Go duration such as 90s, 5m or 1h30m,
// or a plain number of seconds.
type span struct{ time.Duration }

// UnmarshalText reads either form.
func (s *span) UnmarshalText(text []byte) error {
	if seconds, err := strconv.ParseFloat(string(text), 64); err == nil {
		if !(seconds >= 0 && seconds <= maxSpan.Seconds()) {
			return fmt.Errorf("must be between 0 and %s", maxSpan)
		}
		s.Duration = time.Duration(seconds * float64(time.Second))
		return nil
	}
	length, err := time.ParseDuration(string(text))
	if err != nil || length < 0 || length > maxSpan {
		return fmt.Errorf("must be a length of time such as 30s, 5m or 1h, at most %s", maxSpan)
	}
	s.Duration = length
	return nil
}

// Schema documents a span.
func (span) Schema(huma.Registry) *huma.Schema {
	return &huma.Schema{Type: huma.TypeString, Description: "A length of time such as 30s, 5m or 1h, or a number of seconds.", Pattern: `^[0-9.]+[0-9a-zµ.]*$`}
}

const maxSpan = 10 * 365 * 24 * time.Hour

// windowQuery selects a stretch of time.
type windowQuery struct {
	RunPath
	Window span      `query:"window" doc:"The last stretch of that length, such as 5m. Not together with from or to."`
	From   time.Time `query:"from" doc:"Begin of the window, RFC 3339; absent leaves it open."`
	To     time.Time `query:"to" doc:"End of the window, RFC 3339; absent leaves it open."`
}

// window returns what was asked for; given is false if nothing was.
func (q *windowQuery) window() (window store.Window, given bool, err error) {
	bounded := !q.From.IsZero() || !q.To.IsZero()
	switch {
	case q.Window.Duration > 0 && bounded:
		return window, false, invalid("query.window", "stands together with from or to; give one or the other")
	case q.Window.Duration > 0:
		return store.LastSeconds(q.Window.Seconds()), true, nil
	case !q.From.IsZero() && !q.To.IsZero() && q.To.Before(q.From):
		return window, false, invalid("query.to", "lies before from")
	}
	return store.Window{From: q.From, To: q.To}, bounded, nil
}

type backlogOutput struct{ Body wire.Backlog }

type mixtureOutput struct{ Body wire.Mixture }

type metricsOutput struct{ Body wire.Metrics }

func (s *Server) registerObservation() {
	const tag = "observation"
	missing := []int{http.StatusNotFound}
	register(s, operation{
		id: "backlog", method: http.MethodGet, path: "/runs/{run}/backlog", tag: tag,
		summary:     "Read where the released samples are, per class",
		description: "From one snapshot: released = ended + backlog, and backlog = queued + pending + held + active.",
		terms:       terms{roles: anyone}, problems: missing,
	}, s.backlog)
	register(s, operation{
		id: "mixture", method: http.MethodGet, path: "/runs/{run}/mixture", tag: tag,
		summary:     "Compare the mixture asked for with what was released, completed and consumed",
		description: "Over the whole run, and over a window if one is given.",
		terms:       terms{roles: anyone}, problems: missing,
	}, s.mixture)
	register(s, operation{
		id: "metrics", method: http.MethodGet, path: "/runs/{run}/metrics", tag: tag,
		summary:     "Read rates, latencies and use of the engines over a window",
		description: "Of the sessions that ended in the window; without one, over the whole run.",
		terms:       terms{roles: anyone}, problems: missing,
	}, s.runMetrics)
}

func (s *Server) backlog(ctx context.Context, in *RunPath) (*backlogOutput, error) {
	classes, err := s.store.Backlog(ctx, in.Run)
	if err != nil {
		return nil, noRun(err, in.Run)
	}
	answer := wire.Backlog{Run: in.Run, At: time.Now().UTC(), Classes: make([]wire.ClassBacklog, len(classes))}
	for i := range classes {
		answer.Classes[i] = wireBacklog(&classes[i])
	}
	answer.Total = totalBacklog(answer.Classes)
	if err := s.addPressure(ctx, &answer); err != nil {
		return nil, noRun(err, in.Run)
	}
	return &backlogOutput{Body: answer}, nil
}

func wireBacklog(b *store.ClassBacklog) wire.ClassBacklog {
	c := wire.ClassBacklog{
		Class: b.Class, Released: b.Released, Ended: b.Ended, Backlog: b.Backlog,
		Queued: b.Queued, Pending: b.Pending, Held: b.Held, Active: b.Active,
		Completed: b.Completed, Truncated: b.Truncated, Stale: b.Stale, Failed: b.Failed, Cancelled: b.Cancelled,
		OldestHoldSeconds: b.OldestHoldSeconds, DrainSeconds: b.DrainSeconds,
		GroupsEnded: b.GroupsEnded, GroupsWithoutSignal: b.GroupsWithoutSignal,
		OverBound: b.OverBound, Restarts: b.Restarts, Expired: b.Expired,
		OldestQueuedSeconds: b.OldestQueuedSeconds, OldestOutstandingSeconds: b.OldestOutstandingSeconds,
		LiveTokenSeconds: b.LiveTokenSeconds, LiveBlockSeconds: b.LiveBlockSeconds,
	}
	c.FreshnessBudgetSeconds, c.WithinFreshnessBudget = within(b.OldestOutstandingSeconds, b.FreshnessBudgetSeconds)
	return c
}

// within compares with a freshness budget; both are nil without one.
func within(seconds, budgetSeconds float64) (budget *float64, ok *bool) {
	if budgetSeconds == 0 {
		return nil, nil
	}
	fits := seconds <= budgetSeconds
	return &budgetSeconds, &fits
}

// addPressure says what waits for the trainer, and whether that stops dispatch.
func (s *Server) addPressure(ctx context.Context, answer *wire.Backlog) error {
	pressure, err := s.store.BackPressure(ctx, answer.Run)
	if err != nil {
		return err
	}
	answer.Undelivered, answer.UndeliveredLimit, answer.PausedAt = pressure.Undelivered, pressure.Limit, utc(pressure.PausedAt)
	answer.Total.Paused = pressure.Paused()
	for i := range answer.Classes {
		answer.Classes[i].Paused = answer.Total.Paused
	}
	return nil
}

// totalBacklog sums counts; hold and drain are those of the slowest class.
func totalBacklog(classes []wire.ClassBacklog) wire.ClassBacklog {
	total := wire.ClassBacklog{Class: "total"}
	for i := range classes {
		c := &classes[i]
		total.Released += c.Released
		total.Ended += c.Ended
		total.Backlog += c.Backlog
		total.Queued += c.Queued
		total.Pending += c.Pending
		total.Held += c.Held
		total.Active += c.Active
		total.Completed += c.Completed
		total.Truncated += c.Truncated
		total.Stale += c.Stale
		total.Failed += c.Failed
		total.Cancelled += c.Cancelled
		total.GroupsEnded += c.GroupsEnded
		total.GroupsWithoutSignal += c.GroupsWithoutSignal
		total.OverBound += c.OverBound
		total.Restarts += c.Restarts
		total.Expired += c.Expired
		total.LiveTokenSeconds += c.LiveTokenSeconds
		if c.LiveBlockSeconds != nil {
			sum := *c.LiveBlockSeconds
			if total.LiveBlockSeconds != nil {
				sum += *total.LiveBlockSeconds
			}
			total.LiveBlockSeconds = &sum
		}
		total.OldestQueuedSeconds = max(total.OldestQueuedSeconds, c.OldestQueuedSeconds)
		total.OldestOutstandingSeconds = max(total.OldestOutstandingSeconds, c.OldestOutstandingSeconds)
		total.OldestHoldSeconds = max(total.OldestHoldSeconds, c.OldestHoldSeconds)
		if c.DrainSeconds != nil && (total.DrainSeconds == nil || *c.DrainSeconds > *total.DrainSeconds) {
			total.DrainSeconds = c.DrainSeconds
		}
	}
	return total
}

func (s *Server) mixture(ctx context.Context, in *windowQuery) (*mixtureOutput, error) {
	window, given, err := in.window()
	if err != nil {
		return nil, err
	}
	total, err := s.store.Mixture(ctx, in.Run, store.Window{})
	if err != nil {
		return nil, noRun(err, in.Run)
	}
	answer := wire.Mixture{Run: in.Run, Total: wireMixture(&total)}
	if given {
		part, err := s.store.Mixture(ctx, in.Run, window)
		if err != nil {
			return nil, noRun(err, in.Run)
		}
		windowed := wireMixture(&part)
		answer.Window, answer.From, answer.To = &windowed, optionalTime(window.From), optionalTime(window.To)
	}
	return &mixtureOutput{Body: answer}, nil
}

func wireMixture(m *store.Mixture) wire.MixtureSpan {
	span := wire.MixtureSpan{
		Classes: make([]wire.ClassMixture, len(m.Classes)), TVReleasedPP: m.TVReleasedPP, TVConsumedPP: m.TVConsumedPP, TVRhoPP: m.TVRhoPP,
	}
	for i, c := range m.Classes {
		span.Classes[i] = wire.ClassMixture{
			Class: c.Class, Rho: c.Rho, Released: c.Released, ReleasedShare: c.ReleasedShare,
			Completed: c.Completed, CompletedShare: c.CompletedShare, Consumed: c.Consumed, ConsumedShare: c.ConsumedShare,
			Stale: c.Stale, OverBound: c.OverBound,
		}
	}
	return span
}

func (s *Server) runMetrics(ctx context.Context, in *windowQuery) (*metricsOutput, error) {
	window, _, err := in.window()
	if err != nil {
		return nil, err
	}
	found, err := s.store.Metrics(ctx, in.Run, window)
	if err != nil {
		return nil, noRun(err, in.Run)
	}
	answer := wire.Metrics{
		Run: in.Run, From: found.From.UTC(), To: found.To.UTC(),
		Classes: make([]wire.ClassMetrics, len(found.Classes)), Total: wireMetrics(&found.Total),
	}
	for i := range found.Classes {
		answer.Classes[i] = wireMetrics(&found.Classes[i])
	}
	return &metricsOutput{Body: answer}, nil
}

func wireMetrics(m *store.ClassMetrics) wire.ClassMetrics {
	w := wire.ClassMetrics{
		Class: m.Class, Samples: m.Samples, SamplesPerMinute: m.SamplesPerMinute,
		LatencyP50Seconds: m.LatencyP50Seconds, LatencyP95Seconds: m.LatencyP95Seconds, LatencyP99Seconds: m.LatencyP99Seconds,
		HeldP50Seconds: m.HeldP50Seconds, HeldP95Seconds: m.HeldP95Seconds, HeldP99Seconds: m.HeldP99Seconds, HeldSessions: m.HeldSessions,
		Turns: m.Turns, PromptTokens: m.PromptTokens, CachedTokens: m.CachedTokens, OutputTokens: m.OutputTokens,
		PrefixHit: m.PrefixHit, ColdPrefillTokens: m.ColdPrefillTokens, TokenSeconds: m.TokenSeconds, ResidencySeconds: m.ResidencySeconds,
		TokensGenerated: m.OutputTokens + m.TokensRegenerated, TokensRegenerated: m.TokensRegenerated, Resumes: m.Resumes,
		BlockSeconds: m.BlockSeconds, Stale: m.Stale, OverBound: m.OverBound, OverFreshnessBudget: m.OverBudget,
	}
	w.FreshnessBudgetSeconds, w.WithinFreshnessBudget = within(m.LatencyP95Seconds, m.FreshnessBudgetSeconds)
	return w
}

func utc(t *time.Time) *time.Time {
	if t == nil {
		return nil
	}
	inUTC := t.UTC()
	return &inUTC
}

func optionalTime(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return utc(&t)
}
