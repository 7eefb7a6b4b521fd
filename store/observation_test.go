package store_test

import (
	"encoding/json"
	"errors"
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
)

// TestObservationCountsOnce: of workers that make one step at the same time one
// leaves its observation and its event, and all go on from that.
func TestObservationCountsOnce(t *testing.T) {
	f := newFixture(t, 10)
	ctx := t.Context()
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	f.decide(f.admit(id, 0, "w1"))
	for step := range 5 {
		made := make([]store.Observation, 4)
		var wait sync.WaitGroup
		for i := range made {
			wait.Go(func() {
				reward := float64(i)
				var err error
				made[i], err = f.SaveObservation(ctx, store.Observation{
					SessionID: id, Step: step, EpisodeStep: step, IDs: []int32{int32(i), 7}, Reward: &reward, Seconds: 2,
				}, json.RawMessage(`{"step":1}`))
				if err != nil {
					t.Error(err)
				}
			})
		}
		wait.Wait()
		stored, ok, err := f.Observation(ctx, id, step)
		must(t, err)
		if !ok || stored.Status != 0 || stored.EpisodeStep != step {
			t.Fatalf("stored %+v, %v", stored, ok)
		}
		for _, m := range made {
			if !slices.Equal(m.IDs, stored.IDs) || *m.Reward != *stored.Reward {
				t.Fatalf("step %d: one worker goes on from %+v, stored is %+v", step, m, stored)
			}
		}
	}
	if session, err := f.Session(ctx, id); err != nil || session.Times.ToolSeconds != 0 {
		t.Fatalf("before a turn the tool time is %v, %v", session.Times.ToolSeconds, err)
	}
	last, err := f.SaveObservation(ctx, store.Observation{SessionID: id, Step: 5, EpisodeStep: 5, Seconds: 3.25, Status: router.Failed, Problem: "timeout: it\x00 hangs"}, nil)
	must(t, err)
	stored, ok, err := f.Observation(ctx, id, 5)
	must(t, err)
	if !ok || stored.Status != router.Failed || stored.Problem != "timeout: it\ufffd hangs" || stored.IDs != nil || stored.Reward != nil || last.Status != router.Failed {
		t.Fatalf("the last observation is %+v", stored)
	}
	reward, err := f.EnvironmentReward(ctx, id)
	must(t, err)
	if fourth, _, err := f.Observation(ctx, id, 4); err != nil || reward == nil || *reward != *fourth.Reward {
		t.Fatalf("the reward is %v, %v", reward, err)
	}
	session, err := f.Session(ctx, id)
	must(t, err)
	page, err := f.SessionEvents(ctx, id, 0, 100)
	must(t, err)
	tools := 0
	for _, e := range page.Events {
		if e.Kind == store.EventTool {
			tools++
		}
	}
	if session.Times.ToolSeconds != 3.25 || tools != 6 {
		t.Fatalf("the tool time is %v s after the end, with %d events", session.Times.ToolSeconds, tools)
	}
	f.end(id, router.Failed)
	must(t, f.DropObservations(ctx, id))
	if _, ok, err := f.Observation(ctx, id, 5); ok || err != nil {
		t.Fatalf("a dropped observation: %v, %v", ok, err)
	}
	f.verify()
}

func TestObservationsAreRefused(t *testing.T) {
	f := newFixture(t, 10)
	ctx := t.Context()
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	f.decide(f.admit(id, 0, "w1"))
	nan := math.NaN()
	var field *store.FieldError
	if _, err := f.SaveObservation(ctx, store.Observation{SessionID: id, Reward: &nan}, nil); !errors.As(err, &field) || field.Path != "reward" {
		t.Errorf("a reward of NaN: %v", err)
	}
	if _, err := f.SaveObservation(ctx, store.Observation{SessionID: id}, json.RawMessage(`{`)); !errors.As(err, &field) || field.Path != "detail" {
		t.Errorf("a detail that is no JSON: %v", err)
	}
	if _, err := f.SaveObservation(ctx, store.Observation{SessionID: uuid.New()}, nil); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("an unknown session: %v", err)
	}
	if reward, err := f.EnvironmentReward(ctx, id); reward != nil || err != nil {
		t.Errorf("a reward before any observation: %v, %v", reward, err)
	}
	f.end(id, router.Completed)
	if _, err := f.SaveObservation(ctx, store.Observation{SessionID: id}, nil); !errors.Is(err, store.ErrSessionEnded) {
		t.Errorf("after the end: %v", err)
	}
}
