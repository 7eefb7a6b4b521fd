package store

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// ClassMetrics describes a class's sessions that ended in a window. Rates,
// latencies and hold times count completed and truncated ones, usage counts all.
type ClassMetrics struct {
	Class            string
	Samples          int64
	SamplesPerMinute float64
	// Latencies run from release to end, in seconds.
	LatencyP50Seconds, LatencyP95Seconds, LatencyP99Seconds float64
	// Held is the total time a session was held.
	HeldP50Seconds, HeldP95Seconds, HeldP99Seconds float64
	Turns                                          int64
	PromptTokens, CachedTokens, OutputTokens       int64
	// PrefixHit is cached over prompt tokens; ColdPrefillTokens is their difference.
	PrefixHit         float64
	ColdPrefillTokens int64
	// TokenSeconds over the tokens per block are block-seconds.
	TokenSeconds float64
	// BlockSeconds are nil while no instance tells its block size.
	BlockSeconds     *float64
	ResidencySeconds float64
	// FreshnessBudgetSeconds is the class's, 0 for none; OverBudget usable samples took
	// longer from release to end.
	FreshnessBudgetSeconds float64
	OverBudget             int64
	// Stale ended as such; OverBound are usable and older than the contract allows.
	Stale, OverBound int64
	// HeldSessions were held at least once.
	HeldSessions int64
	// TokensRegenerated and Resumes are sums over the sessions; see TurnEffort.
	TokensRegenerated int64
	Resumes           int64
}

// Metrics is a run's account over a window.
type Metrics struct {
	From, To time.Time
	Classes  []ClassMetrics
	Total    ClassMetrics
}

const (
	// A grouping set without columns gives the total, named by null.
	selectMetricsSQL = `
with budgets as (
    select c.class, coalesce(c.freshness_budget_seconds, v.freshness_budget_seconds) as seconds
    from runs r join contract_versions v on v.run_id = r.run_id and v.version = r.contract_version
         join contract_classes c on c.run_id = v.run_id and c.version = v.version where r.run_id = $1
)
select m.class, count(*) filter (where usable),
       coalesce(percentile_cont(array[0.5, 0.95, 0.99]) within group (order by extract(epoch from m.ended_at - s.released_at)::float8) filter (where usable), '{0,0,0}'),
       coalesce(percentile_cont(array[0.5, 0.95, 0.99]) within group (order by s.held_seconds) filter (where usable), '{0,0,0}'),
       coalesce(sum(s.turns), 0)::bigint, coalesce(sum(s.prompt_tokens), 0)::bigint, coalesce(sum(s.cached_tokens), 0)::bigint,
       coalesce(sum(s.output_tokens), 0)::bigint, coalesce(sum(s.token_seconds), 0), coalesce(sum(s.residency_seconds), 0),
       count(*) filter (where s.holds > 0),
       coalesce(sum(s.tokens_regenerated), 0)::bigint, coalesce(sum(s.resumes), 0)::bigint,
       coalesce(sum(s.token_seconds), 0) / (select max(i.block_tokens) from instances i join runs r using (pool) where r.run_id = $1 and i.state <> 'removed'),
       coalesce(max(b.seconds), 0), count(*) filter (where usable and extract(epoch from m.ended_at - s.released_at) > b.seconds),
       count(*) filter (where m.status = 'stale'), count(*) filter (where m.over_bound)
from samples m join sessions s using (session_id) left join budgets b on b.class = m.class, lateral (select m.status in ('completed', 'truncated') as usable) u
where m.run_id = $1 and m.ended_at > $2 and m.ended_at <= $3
group by grouping sets ((m.class), ()) order by m.class nulls last`

	selectRunTimesSQL = `select created_at - interval '1 microsecond', clock_timestamp() from runs where run_id = $1`
)

// Metrics returns the account of the sessions that ended in the window. The zero
// Window is the whole run, from its creation to now.
func (s *Store) Metrics(ctx context.Context, runID uuid.UUID, window Window) (Metrics, error) {
	var m Metrics
	err := s.read(ctx, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, selectRunTimesSQL, runID).Scan(&m.From, &m.To); err != nil {
			return err
		}
		if !window.From.IsZero() {
			m.From = window.From
		}
		if !window.To.IsZero() {
			m.To = window.To
		}
		if !m.From.Before(m.To) {
			return &FieldError{Path: "window", Problem: "must end after it begins"}
		}
		rows, err := tx.Query(ctx, selectMetricsSQL, runID, m.From, m.To)
		if err != nil {
			return err
		}
		minutes := m.To.Sub(m.From).Minutes()
		all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (ClassMetrics, error) { return scanMetrics(row, minutes) })
		if err != nil {
			return err
		}
		m.Classes, m.Total = all[:len(all)-1], all[len(all)-1]
		return nil
	})
	var field *FieldError
	if errors.As(err, &field) {
		return Metrics{}, err
	}
	return m, found(err, "reading the metrics of run", runID)
}

func scanMetrics(row pgx.CollectableRow, minutes float64) (ClassMetrics, error) {
	var c ClassMetrics
	var class *string
	var latency, held []float64
	err := row.Scan(&class, &c.Samples, &latency, &held, &c.Turns, &c.PromptTokens, &c.CachedTokens, &c.OutputTokens,
		&c.TokenSeconds, &c.ResidencySeconds, &c.HeldSessions,
		&c.TokensRegenerated, &c.Resumes,
		&c.BlockSeconds, &c.FreshnessBudgetSeconds, &c.OverBudget, &c.Stale, &c.OverBound)
	if err != nil {
		return ClassMetrics{}, err
	}
	if class != nil {
		c.Class = *class
	} else {
		// Of all classes together there is no one budget.
		c.FreshnessBudgetSeconds = 0
	}
	c.SamplesPerMinute = float64(c.Samples) / minutes
	c.LatencyP50Seconds, c.LatencyP95Seconds, c.LatencyP99Seconds = latency[0], latency[1], latency[2]
	c.HeldP50Seconds, c.HeldP95Seconds, c.HeldP99Seconds = held[0], held[1], held[2]
	c.PrefixHit = share(c.CachedTokens, c.PromptTokens)
	c.ColdPrefillTokens = c.PromptTokens - c.CachedTokens
	return c, nil
}
