package scoring

import (
	"context"
	"encoding/json"
	"sync"
	"time"

	"holdfast/orchestrator/environment/spec"
)

// gatherTime is how long a call to a scoring server waits for more samples. It is
// small beside any judge's answer and long beside the time in which the members of
// a group that end together come here.
const gatherTime = 20 * time.Millisecond

// Scorers scores single samples as they come, and sends those that come together for
// the same scorer of kind http to its server in one call. It is safe for concurrent use.
type Scorers struct {
	config Config

	mu   sync.Mutex
	open map[string]*batch
}

// NewScorers returns what scores samples within config.
func NewScorers(config Config) *Scorers {
	return &Scorers{config: config, open: make(map[string]*batch)}
}

// batch is a call to a scoring server that is being gathered or under way.
type batch struct {
	key     string
	scorer  Scorer
	samples []Sample
	ids     map[string]bool
	limit   int
	// timer sends the batch unless it is full before.
	timer *time.Timer
	// interest is the callers that still wait; the call is given up with the last.
	interest int
	ctx      context.Context
	cancel   context.CancelFunc
	done     chan struct{}
	outcomes []Outcome
}

// Score gives the outcome of one sample by the scorer that its task names. When ctx
// ends, the outcome is a failure of kind cancelled, and other samples of the same
// call are scored all the same.
func (s *Scorers) Score(ctx context.Context, wanted spec.Scorer, sample Sample) Outcome {
	scorer, err := New(wanted, s.config)
	if err != nil {
		return failedWith(ctx, sample, err)
	}
	if wanted.Kind != spec.ScorerHTTP {
		return scorer.Score(ctx, []Sample{sample})[0]
	}
	key, err := json.Marshal(wanted.HTTP)
	if err != nil {
		return failedWith(ctx, sample, err)
	}
	b, place := s.join(string(key), scorer, wanted.HTTP.BatchSamples, sample)
	select {
	case <-b.done:
		return b.outcomes[place]
	case <-ctx.Done():
		s.leave(b)
		return failedWith(ctx, sample, ctx.Err())
	}
}

// join puts the sample into the batch that is open for its scorer, or opens one.
func (s *Scorers) join(key string, scorer Scorer, limit int, sample Sample) (b *batch, place int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b = s.open[key]
	if b != nil && b.ids[sample.ID] {
		// The same session twice: results are told apart by its id.
		s.send(b)
		b = nil
	}
	if b == nil {
		if limit == 0 {
			limit = defaultBatchSize
		}
		b = &batch{key: key, scorer: scorer, limit: limit, ids: make(map[string]bool), done: make(chan struct{})}
		b.ctx, b.cancel = context.WithCancel(context.Background())
		s.open[key] = b
		b.timer = time.AfterFunc(gatherTime, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.open[key] == b {
				s.send(b)
			}
		})
	}
	place = len(b.samples)
	b.samples = append(b.samples, sample)
	b.ids[sample.ID] = true
	b.interest++
	if len(b.samples) == b.limit {
		s.send(b)
	}
	return b, place
}

// send makes the call in the background. The caller holds the lock; nobody joins the
// batch from here on.
func (s *Scorers) send(b *batch) {
	b.timer.Stop()
	delete(s.open, b.key)
	go func() {
		defer b.cancel()
		b.outcomes = b.scorer.Score(b.ctx, b.samples)
		close(b.done)
	}()
}

// leave notes that a caller waits no longer.
func (s *Scorers) leave(b *batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.interest--; b.interest == 0 {
		b.cancel()
		// One that was not sent yet never needs to be.
		if s.open[b.key] == b {
			b.timer.Stop()
			delete(s.open, b.key)
		}
	}
}
