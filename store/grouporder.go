package store

import (
	"context"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

const (
	selectGroupsSQL = `
select group_id, members, place from groups where run_id = $1 and place > $2 and place <= $3 order by place limit $4`

	selectSamplesAmongSQL = sampleColumns + `
where m.session_id = any($1) and ($2::text[] is null or m.status = any($2)) order by array_position($1, m.session_id)`
)

func orderName(grouped bool) string {
	if grouped {
		return "whole groups"
	}
	return "samples in completion order"
}

// groupStretch is a piece of the order of whole groups: the sessions from a place
// on, one a place, and the places at which a group ends.
type groupStretch struct {
	from     int64
	sessions []uuid.UUID
	place    map[uuid.UUID]int64
	ends     []int64
}

// to is the last place of the stretch.
func (g *groupStretch) to() int64 { return g.from + int64(len(g.sessions)) }

// wholeUpTo is the last end of a group up to the place, or the place itself if none
// lies within the stretch before it.
func (g *groupStretch) wholeUpTo(place int64) int64 {
	whole := place
	for _, end := range g.ends {
		if end <= place {
			whole = end
		}
	}
	return whole
}

// readGroupStretch reads the places after the given one, at most limit.
func readGroupStretch(ctx context.Context, tx pgx.Tx, runID uuid.UUID, after, end int64, limit int) (*groupStretch, error) {
	stretch := &groupStretch{from: after, place: map[uuid.UUID]int64{}}
	rows, err := tx.Query(ctx, selectGroupsSQL, runID, after, end, limit)
	if err != nil {
		return nil, err
	}
	var groupID uuid.UUID
	var members int
	var last int64
	_, err = pgx.ForEachRow(rows, []any{&groupID, &members, &last}, func() error {
		for member := range members {
			place := last - int64(members-1-member)
			if place <= after || len(stretch.sessions) == limit {
				continue
			}
			id := SessionID(groupID, member)
			stretch.sessions = append(stretch.sessions, id)
			stretch.place[id] = place
			if place == last {
				stretch.ends = append(stretch.ends, place)
			}
		}
		return nil
	})
	return stretch, err
}

// readGroupPage returns the page in (after, end] of the order of whole groups and
// the place where it ends: with a group, unless not even the first one fits.
func readGroupPage(ctx context.Context, tx pgx.Tx, query SampleQuery, after, end int64) (SamplePage, int64, error) {
	limit := pageLimit(query.Limit)
	stretch, err := readGroupStretch(ctx, tx, query.RunID, after, end, limit)
	if err != nil {
		return SamplePage{}, 0, err
	}
	rows, err := tx.Query(ctx, selectSamplesAmongSQL, stretch.sessions, query.statuses())
	if err != nil {
		return SamplePage{}, 0, err
	}
	samples, err := pgx.CollectRows(rows, scanSample)
	if err != nil {
		return SamplePage{}, 0, err
	}
	last := stretch.to()
	if fit := pageFit(samples, limit, query); fit < len(samples) {
		last = stretch.place[samples[fit-1].SessionID]
	}
	last = stretch.wholeUpTo(last)
	page := SamplePage{Next: cursorOf(query.RunID, true, last), More: last < end}
	for i := range samples {
		place := stretch.place[samples[i].SessionID]
		if place > last {
			break
		}
		samples[i].Cursor = cursorOf(query.RunID, true, place)
		page.Samples = append(page.Samples, samples[i])
	}
	if query.WithTokens {
		if err := loadTokens(ctx, tx, page.Samples); err != nil {
			return SamplePage{}, 0, err
		}
	}
	return page, last, nil
}
