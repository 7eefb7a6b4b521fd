package store

import (
	"context"
	"time"

	"github.com/google/uuid"
)

// ClassBacklog is where one class's released samples are. Released is A, Ended N,
// Backlog Q: Released = Ended + Backlog; Backlog = Queued + Pending + Held + Active.
type ClassBacklog struct {
	Class                                          string
	Released                                       int64
	Completed, Truncated, Stale, Failed, Cancelled int64
	Ended                                          int64
	Backlog                                        int64
	Queued, Pending, Held, Active                  int64
	OldestHoldSeconds                              float64
	// DrainSeconds is the backlog over the class's rate of endings in the last ten
	// minutes; nil while nothing has ended in them.
	DrainSeconds *float64
}

// Backlog returns one entry per class of the run, by name, from one snapshot.
func (s *Store) Backlog(ctx context.Context, runID uuid.UUID) ([]ClassBacklog, error) {
	return nil, errUnfinished
}

// Window is a stretch of time; a zero From or To leaves that side open.
type Window struct {
	From, To time.Time
}

// LastSeconds is the window that ends now.
func LastSeconds(seconds float64) Window {
	return Window{From: time.Now().Add(-time.Duration(seconds * float64(time.Second)))}
}

// ClassMixture is one class's part in the mixture. Completed counts completed and
// truncated samples; Consumed those of them that a consumer has acknowledged.
type ClassMixture struct {
	Class          string
	Rho            float64
	Released       int64
	ReleasedShare  float64
	Completed      int64
	CompletedShare float64
	Consumed       int64
	ConsumedShare  float64
}

// Mixture compares what was asked for, released, completed and consumed. The TV
// figures are total variation distances D_TV = 1/2 sum |p - q| in percentage
// points, 0 while one side is empty.
type Mixture struct {
	// Classes counts over the window: completed in it, released before its end,
	// acknowledged in it.
	Classes []ClassMixture
	// TVReleasedPP is completed against released: what the service did.
	TVReleasedPP float64
	// TVConsumedPP is consumed against rho: what the trainer got.
	TVConsumedPP float64
	// TVRhoPP is completed against rho.
	TVRhoPP float64
}

// Mixture returns the mixture of the run over the window; the zero Window is the
// whole run.
func (s *Store) Mixture(ctx context.Context, runID uuid.UUID, window Window) (Mixture, error) {
	return Mixture{}, errUnfinished
}

// ClassMetrics describes a class's sessions that ended in a window. Rates and
// latencies count completed and truncated ones, usage counts all.
type ClassMetrics struct {
	Class            string
	Samples          int64
	SamplesPerMinute float64
	// Latencies run from release to end, in seconds.
	LatencyP50Seconds, LatencyP95Seconds, LatencyP99Seconds float64
	HeldP50Seconds, HeldP95Seconds, HeldP99Seconds          float64
	Turns                                                   int64
	PromptTokens, CachedTokens, OutputTokens                int64
	// PrefixHit is cached over prompt tokens; ColdPrefillTokens is their difference.
	PrefixHit         float64
	ColdPrefillTokens int64
	// TokenSeconds over the tokens per block are block-seconds.
	TokenSeconds     float64
	ResidencySeconds float64
	// HeldSessions were held at least once.
	HeldSessions int64
}

// Metrics is a run's account over a window.
type Metrics struct {
	From, To time.Time
	Classes  []ClassMetrics
	Total    ClassMetrics
}

// Metrics returns the account of the sessions that ended in the window. The zero
// Window is the whole run, from its creation to now.
func (s *Store) Metrics(ctx context.Context, runID uuid.UUID, window Window) (Metrics, error) {
	return Metrics{}, errUnfinished
}

// VerifyCounters recomputes A, N and Q of every class from sessions and samples
// and returns an error that names every difference.
func (s *Store) VerifyCounters(ctx context.Context, runID uuid.UUID) error {
	return errUnfinished
}
