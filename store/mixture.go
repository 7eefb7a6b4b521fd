package store

import (
	"context"
	"math"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// Window is a stretch of time, from From (exclusive) to To (inclusive); a zero
// From or To leaves that side open.
type Window struct {
	From, To time.Time
}

// LastSeconds is the window that ends now.
func LastSeconds(seconds float64) Window {
	return Window{From: time.Now().Add(-time.Duration(seconds * float64(time.Second)))}
}

// bounds are the window's ends as parameters, nil for an open side.
func (w Window) bounds() (from, to *time.Time) {
	if !w.From.IsZero() {
		from = &w.From
	}
	if !w.To.IsZero() {
		to = &w.To
	}
	return from, to
}

// ClassMixture is one class's part in the mixture. Completed counts completed and
// truncated samples; Consumed those of them that a consumer has acknowledged, the
// one that is furthest if there are several.
type ClassMixture struct {
	Class          string
	Rho            float64
	Released       int64
	ReleasedShare  float64
	Completed      int64
	CompletedShare float64
	Consumed       int64
	ConsumedShare  float64
	// Stale ended as such; OverBound are usable and older than the contract allows.
	Stale, OverBound int64
}

// Mixture compares what was asked for, released, completed and consumed. The TV
// figures are total variation distances D_TV = 1/2 sum |p - q| in percentage
// points, 0 while one side is empty.
type Mixture struct {
	// Classes counts over the window: released up to its end, completed and
	// acknowledged in it. Rho is the current contract's.
	Classes []ClassMixture
	// TVReleasedPP is completed against released: what the service did.
	TVReleasedPP float64
	// TVConsumedPP is consumed against rho: what the trainer got.
	TVConsumedPP float64
	// TVRhoPP is completed against rho.
	TVRhoPP float64
}

const (
	// The counters answer for the whole run, whatever its length.
	selectWholeMixtureSQL = `
select k.class, coalesce(c.share, 0), k.released, k.completed + k.truncated, coalesce(f.consumed, 0), k.stale, k.over_bound
from runs r join class_counters k using (run_id)
     left join contract_classes c on c.run_id = r.run_id and c.version = r.contract_version and c.class = k.class
     left join consumer_classes f on f.run_id = r.run_id and f.class = k.class and f.consumer = (select x.consumer from (` + furthestConsumerSQL + `) x)
where r.run_id = $1 order by k.class`

	// $2 and $3 are the window's ends, null if open. What a consumer acknowledged in
	// the window lies between its last marks before the two ends.
	selectWindowMixtureSQL = `
with furthest as (` + furthestConsumerSQL + `
), acked as (
    select f.grouped, greatest(f.start_seq, max(m.seq) filter (where m.at <= $2)) as after_seq,
           coalesce(max(m.seq) filter (where $3::timestamptz is null or m.at <= $3), 0) as up_to_seq
    from furthest f join consumer_marks m on m.run_id = $1 and m.consumer = f.consumer and m.kind = 'acknowledged'
    group by f.grouped, f.start_seq
), consumed as (
    select m.class, count(*) as n from acked a join samples m on not a.grouped and m.run_id = $1 and m.seq > a.after_seq and m.seq <= a.up_to_seq
    where m.status in ('completed', 'truncated') group by m.class
    union all
    select g.class, sum(g.usable) from acked a join groups g on a.grouped and g.run_id = $1 and g.place > a.after_seq and g.place <= a.up_to_seq
    group by g.class
), completed as (
    select m.class, count(*) filter (where m.status <> 'stale') as n, count(*) filter (where m.status = 'stale') as stale, count(*) filter (where m.over_bound) as over_bound
    from samples m
    where m.run_id = $1 and m.ended_at > coalesce($2, '-infinity') and m.ended_at <= coalesce($3, 'infinity')
      and m.status in ('completed', 'truncated', 'stale') group by m.class
), released as (
    select class, sum(n)::bigint as n from (
        select c.key as class, c.value::bigint as n from batches b, jsonb_each_text(b.classes) c
        where b.run_id = $1 and b.created_at <= coalesce($3, 'infinity')
        union all
        select class, 1 from refills where run_id = $1 and released_at <= coalesce($3, 'infinity')) r group by class
)
select k.class, coalesce(c.share, 0), coalesce(r.n, 0), coalesce(d.n, 0), coalesce(f.n, 0), coalesce(d.stale, 0), coalesce(d.over_bound, 0)
from runs join class_counters k using (run_id)
     left join contract_classes c on c.run_id = runs.run_id and c.version = runs.contract_version and c.class = k.class
     left join released r on r.class = k.class left join completed d on d.class = k.class left join consumed f on f.class = k.class
where runs.run_id = $1 order by k.class`
)

// Mixture returns the mixture of the run over the window; the zero Window is the
// whole run.
func (s *Store) Mixture(ctx context.Context, runID uuid.UUID, window Window) (Mixture, error) {
	var rows pgx.Rows
	var err error
	if from, to := window.bounds(); from == nil && to == nil {
		rows, err = s.pool.Query(ctx, selectWholeMixtureSQL, runID)
	} else {
		rows, err = s.pool.Query(ctx, selectWindowMixtureSQL, runID, from, to)
	}
	if err != nil {
		return Mixture{}, found(err, "reading the mixture of run", runID)
	}
	classes, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (c ClassMixture, err error) {
		err = row.Scan(&c.Class, &c.Rho, &c.Released, &c.Completed, &c.Consumed, &c.Stale, &c.OverBound)
		return c, err
	})
	if err == nil && len(classes) == 0 {
		err = pgx.ErrNoRows
	}
	if err != nil {
		return Mixture{}, found(err, "reading the mixture of run", runID)
	}
	return mixtureOf(classes), nil
}

// mixtureOf fills in shares and distances.
func mixtureOf(classes []ClassMixture) Mixture {
	var released, completed, consumed int64
	for _, c := range classes {
		released += c.Released
		completed += c.Completed
		consumed += c.Consumed
	}
	for i := range classes {
		c := &classes[i]
		c.ReleasedShare = share(c.Released, released)
		c.CompletedShare = share(c.Completed, completed)
		c.ConsumedShare = share(c.Consumed, consumed)
	}
	m := Mixture{Classes: classes}
	for _, c := range classes {
		if completed > 0 && released > 0 {
			m.TVReleasedPP += 50 * math.Abs(c.CompletedShare-c.ReleasedShare)
		}
		if completed > 0 {
			m.TVRhoPP += 50 * math.Abs(c.CompletedShare-c.Rho)
		}
		if consumed > 0 {
			m.TVConsumedPP += 50 * math.Abs(c.ConsumedShare-c.Rho)
		}
	}
	return m
}

func share(part, whole int64) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}
