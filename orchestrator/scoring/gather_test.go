package scoring

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/orchestrator/environment/failure"
	"holdfast/orchestrator/environment/spec"
)

// bench is a scoring server without a network: each call waits for answer to be
// closed, if it is set, and gives a sample its text's length.
type bench struct {
	answer chan struct{}

	mu    sync.Mutex
	calls [][]string
	ended int
}

// RoundTrip implements http.RoundTripper.
func (b *bench) RoundTrip(r *http.Request) (*http.Response, error) {
	var request samplesDocument
	if err := json.NewDecoder(r.Body).Decode(&request); err != nil {
		return nil, err
	}
	var ids []string
	var answer resultsDocument
	for _, sample := range request.Samples {
		ids = append(ids, sample.ID)
		reward := float64(len(sample.Text))
		answer.Results = append(answer.Results, resultDocument{ID: sample.ID, Reward: &reward})
	}
	b.mu.Lock()
	b.calls = append(b.calls, ids)
	b.mu.Unlock()
	if b.answer != nil {
		select {
		case <-b.answer:
		case <-r.Context().Done():
			b.mu.Lock()
			b.ended++
			b.mu.Unlock()
			return nil, r.Context().Err()
		}
	}
	text, err := json.Marshal(answer)
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(text)), Request: r}, err
}

// sizes of the calls so far, in rising order.
func (b *bench) sizes() []int {
	b.mu.Lock()
	defer b.mu.Unlock()
	var sizes []int
	for _, call := range b.calls {
		sizes = append(sizes, len(call))
	}
	slices.Sort(sizes)
	return sizes
}

func httpSpec(rubric string) spec.Scorer {
	return spec.Scorer{Kind: spec.ScorerHTTP, HTTP: &spec.HTTPScorer{URL: "http://judge", BatchSamples: 2, Task: json.RawMessage(rubric)}}
}

func TestSamplesThatComeTogetherShareACall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &bench{}
		scorers := NewScorers(Config{Transport: server})
		began := time.Now()
		var callers sync.WaitGroup
		for i, sample := range fiveSamples() {
			callers.Go(func() {
				if got := scorers.Score(t.Context(), httpSpec(`{"a":1}`), sample); got.Failure != nil || got.Reward != float64(i) {
					t.Errorf("sample %d got %+v", i, got)
				}
			})
		}
		callers.Go(func() { scorers.Score(t.Context(), httpSpec(`{"a":2}`), Sample{ID: "other rubric"}) })
		callers.Wait()
		if got := server.sizes(); !slices.Equal(got, []int{1, 1, 2, 2}) {
			t.Errorf("calls had %v samples", got)
		}
		if waited := time.Since(began); waited != gatherTime {
			t.Errorf("the last call was made after %v", waited)
		}
	})
}

// TestSameSessionTwice: results are told apart by the session's id, so one call
// never holds it twice.
func TestSameSessionTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &bench{}
		scorers := NewScorers(Config{Transport: server})
		var callers sync.WaitGroup
		for range 2 {
			callers.Go(func() {
				if got := scorers.Score(t.Context(), httpSpec(`{}`), Sample{ID: "s", Text: "abc"}); got.Failure != nil || got.Reward != 3 {
					t.Errorf("got %+v", got)
				}
			})
		}
		callers.Wait()
		if got := server.sizes(); !slices.Equal(got, []int{1, 1}) {
			t.Errorf("calls had %v samples", got)
		}
	})
}

func TestCallerThatLeavesASharedCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &bench{answer: make(chan struct{})}
		scorers := NewScorers(Config{Transport: server})
		ctx, leave := context.WithCancel(t.Context())
		var callers sync.WaitGroup
		callers.Go(func() {
			wantFailure(t, scorers.Score(ctx, httpSpec(`{}`), Sample{ID: "leaves"}), failure.Cancelled, "")
		})
		callers.Go(func() {
			if got := scorers.Score(t.Context(), httpSpec(`{}`), Sample{ID: "stays", Text: "ab"}); got.Failure != nil || got.Reward != 2 {
				t.Errorf("the one that stayed got %+v", got)
			}
		})
		synctest.Wait()
		leave()
		synctest.Wait()
		close(server.answer)
		callers.Wait()
	})
}

func TestCallThatNobodyWaitsForIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &bench{answer: make(chan struct{})}
		scorers := NewScorers(Config{Transport: server})
		for _, patience := range []time.Duration{gatherTime / 2, 2 * gatherTime} {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			wantFailure(t, scorers.Score(ctx, httpSpec(`{}`), Sample{ID: "s"}), failure.Timeout, "")
			cancel()
			synctest.Wait()
		}
		if len(server.calls) != 1 || server.ended != 1 {
			t.Errorf("%d calls were made and %d of them ended, want the second caller's only", len(server.calls), server.ended)
		}
	})
}
