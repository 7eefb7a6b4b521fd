package api_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/api"
	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
)

// watched tells when someone asks to be woken.
type watched struct {
	api.Notifications
	asked chan store.Topic
	count atomic.Int64
}

func (w *watched) WaitFor(topic store.Topic) <-chan struct{} {
	woken := w.Notifications.WaitFor(topic)
	w.count.Add(1)
	select {
	case w.asked <- topic:
	default:
	}
	return woken
}

func startWatched(t *testing.T) (*service, *watched) {
	w := &watched{asked: make(chan store.Topic, 1)}
	s := start(t, func(config *api.Config) {
		w.Notifications = config.Notifications
		config.Notifications = w
	})
	return s, w
}

type pageOrError struct {
	page wire.SamplePage
	err  error
}

// poll starts a long poll.
func (s *service) poll(run uuid.UUID, query client.SamplesQuery) <-chan pageOrError {
	answered := make(chan pageOrError, 1)
	go func() {
		page, err := s.client.Samples(s.t.Context(), run, query)
		answered <- pageOrError{page, err}
	}()
	return answered
}

// TestLongPollWakesForASample: a poll that waits is answered by the end of a
// session, and looks no more often than it has to.
func TestLongPollWakesForASample(t *testing.T) {
	s, w := startWatched(t)
	run := s.openRun()
	sessions := s.submit(run.ID, "k", 2)
	answered := s.poll(run.ID, client.SamplesQuery{Consumer: "trainer", Wait: time.Minute, Statuses: []string{"completed"}})
	storetest.Came(t, "a wish to be woken", w.asked)
	// One that is not asked for wakes the poll as well, which then waits on.
	s.finish(&sessions[0], router.Failed)
	storetest.Came(t, "a wish to be woken", w.asked)
	s.finish(&sessions[1], router.Completed)
	got := storetest.Came(t, "the poll's answer", answered)
	if got.err != nil || len(got.page.Samples) != 1 || got.page.Samples[0].ID != sessions[1].ID {
		t.Fatalf("%+v", got)
	}
	if n := w.count.Load(); n > 3 {
		t.Errorf("for two ends of sessions the poll asked to be woken %d times", n)
	}
}

// TestLongPollMissesNothing has samples end while they are read.
func TestLongPollMissesNothing(t *testing.T) {
	s, w := startWatched(t)
	run := s.openRun()
	const n = 40
	sessions := s.submit(run.ID, "k", n)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range sessions {
			s.finish(&sessions[i], router.Completed)
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	reader := s.client.Read(run.ID, client.SamplesQuery{Consumer: "trainer", Limit: 3, Wait: time.Minute})
	seen := map[uuid.UUID]bool{}
	for seq := int64(1); seq <= n; seq++ {
		sample, err := reader.Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if sample.Seq != seq || seen[sample.ID] {
			t.Fatalf("sample %d came as number %d, seen %v", sample.Seq, seq, seen[sample.ID])
		}
		seen[sample.ID] = true
	}
	// The last sample may come before who ended its session hears of it.
	storetest.Came(t, "the end of the last session", done)
	if asked := w.count.Load(); asked > 3*n {
		t.Errorf("for %d samples the polls asked to be woken %d times", n, asked)
	}
}

// TestLongPollEndsWithItsTime answers an empty page with a cursor to go on from.
func TestLongPollEndsWithItsTime(t *testing.T) {
	s := start(t, nil)
	run := s.openRun()
	page, err := s.client.Samples(t.Context(), run.ID, client.SamplesQuery{Wait: 20 * time.Millisecond})
	if err != nil || len(page.Samples) != 0 || page.Next == "" || page.More {
		t.Fatalf("%+v, %v", page, err)
	}
	sessions := s.submit(run.ID, "k", 1)
	s.finish(&sessions[0], router.Completed)
	page, err = s.client.Samples(t.Context(), run.ID, client.SamplesQuery{After: page.Next, Wait: time.Minute})
	if err != nil || len(page.Samples) != 1 {
		t.Fatalf("%+v, %v", page, err)
	}
}

// TestStopAnswersLongPolls: stopping does not wait for polls to run out of time.
func TestStopAnswersLongPolls(t *testing.T) {
	s, w := startWatched(t)
	run := s.openRun()
	answered := s.poll(run.ID, client.SamplesQuery{Wait: time.Minute})
	storetest.Came(t, "a wish to be woken", w.asked)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Second)
	defer cancel()
	if err := s.server.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	got := storetest.Came(t, "the poll's answer", answered)
	if got.err != nil || len(got.page.Samples) != 0 || got.page.Next == "" {
		t.Errorf("%+v", got)
	}
	storetest.Came(t, "the end of the server", s.server.Served())
}
