package api_test

import (
	"fmt"
	"testing"
	"time"

	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/router"
	"holdfast/workflows/task"
)

// TestPace follows the advice through the interface: the first wave in whole groups,
// the same again while nothing has changed, less once it is released, more when a
// step is committed, nothing when the run has ended.
func TestPace(t *testing.T) {
	s := start(t, nil)
	ctx := t.Context()
	contract := threeClasses()
	bound := 1
	contract.StalenessBound, contract.SpareMembers = &bound, 1
	run, err := s.client.CreateRun(ctx, wire.NewRun{Name: "pace", Pool: "main", Contract: contract})
	if err != nil {
		t.Fatal(err)
	}
	question := client.PaceQuestion{GroupSize: 4, StepSamples: 40, AskAgain: 5 * time.Second}
	ask := func() wire.Pace {
		t.Helper()
		pace, err := s.client.Pace(ctx, run.ID, question)
		if err != nil {
			t.Fatal(err)
		}
		var sum int64
		for _, class := range pace.Classes {
			sum += class.ReleaseSessions
			if class.ReleaseSessions != 5*class.ReleaseGroups {
				t.Errorf("%d sessions are %d groups of 4 and a spare one", class.ReleaseSessions, class.ReleaseGroups)
			}
		}
		if sum != pace.ReleaseSessions || pace.Why == "" {
			t.Errorf("the classes sum to %d: %+v", sum, pace)
		}
		return pace
	}
	release := func(pace wire.Pace, key string) {
		t.Helper()
		var tasks []task.Spec
		for _, class := range pace.Classes {
			for i := range class.ReleaseGroups {
				spec := oneTask(fmt.Sprint(class.Class, i), class.Class)
				spec.GroupSize = 4
				tasks = append(tasks, spec)
			}
		}
		if _, err := s.client.SubmitBatch(ctx, run.ID, key, client.NewBatch{Tasks: client.Tasks(tasks)}); err != nil {
			t.Fatal(err)
		}
	}

	first := ask()
	// A step of 40 samples is 50 sessions; the bound would allow two of them.
	if first.LimitedBy != "cold_start" || first.ReleaseSessions != 50 || first.StepSamples != 40 || *first.UndeliveredRoomSessions != 100 {
		t.Errorf("at first: %+v", first)
	}
	again := ask()
	if again.ReleaseSessions != first.ReleaseSessions {
		t.Errorf("asked again it is %d, was %d", again.ReleaseSessions, first.ReleaseSessions)
	}
	release(first, "first")
	if then := ask(); then.ReleaseSessions != 0 || then.Classes[0].Backlog == 0 {
		t.Errorf("after the release: %+v", then)
	}
	page, err := s.client.Sessions(ctx, run.ID, client.SessionsQuery{Limit: 1000})
	if err != nil {
		t.Fatal(err)
	}
	for i := range page.Sessions {
		if page.Sessions[i].State != "ended" {
			s.finish(&page.Sessions[i], router.Completed)
		}
	}
	if then := ask(); then.UnacknowledgedSamples == 0 || then.UndeliveredRoomSessions == nil {
		t.Errorf("with all ended: %+v", then)
	}
	if _, err := s.client.EndRun(ctx, run.ID); err != nil {
		t.Fatal(err)
	}
	if over := ask(); over.LimitedBy != "ended" || over.ReleaseSessions != 0 {
		t.Errorf("after the end: %+v", over)
	}
}
