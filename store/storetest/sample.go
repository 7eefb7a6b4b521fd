package storetest

import (
	"context"

	"github.com/google/uuid"

	"holdfast/store"
)

// SampleOf returns the sample of one session with its tokens, as a trainer would read
// it: store.ErrNotFound for a session that is unknown or has not ended,
// *store.PrunedError once the sample can be read no more.
func SampleOf(ctx context.Context, s *store.Store, sessionID uuid.UUID) (store.Sample, error) {
	session, err := s.Session(ctx, sessionID)
	if err != nil {
		return store.Sample{}, err
	}
	if session.EndedAt == nil {
		return store.Sample{}, store.ErrNotFound
	}
	query := store.SampleQuery{RunID: session.RunID, Start: store.StartAvailable, Limit: 1_000}
	for {
		page, err := s.Samples(ctx, query)
		if err != nil {
			return store.Sample{}, err
		}
		for i := range page.Samples {
			if page.Samples[i].SessionID == sessionID {
				return sampleAfter(ctx, s, query)
			}
			query.After = page.Samples[i].Cursor
		}
		if !page.More {
			break
		}
	}
	// It is before all that is left, which a reader from the beginning is told.
	query.After, query.Start = "", store.StartBeginning
	return sampleAfter(ctx, s, query)
}

// sampleAfter returns the query's next sample with its tokens.
func sampleAfter(ctx context.Context, s *store.Store, query store.SampleQuery) (store.Sample, error) {
	query.Limit, query.WithTokens = 1, true
	page, err := s.Samples(ctx, query)
	if err != nil {
		return store.Sample{}, err
	}
	return page.Samples[0], nil
}
