package activities

import (
	"context"
	"sync/atomic"
	"time"

	"go.temporal.io/sdk/activity"
)

// heartbeatInterval is well below the workflow's heartbeat time-out. A worker that
// Temporal has given up learns it from its next heartbeat, which ends its context.
const heartbeatInterval = 5 * time.Second

// progress is what a heartbeat tells of a turn: counts only. The worker that comes
// after a lost one learns from it how much was generated and not saved.
type progress struct {
	Tokens            int   `json:"tokens"`
	Attempts          int   `json:"attempts"`
	Resumes           int   `json:"resumes"`
	TokensRegenerated int64 `json:"tokens_regenerated"`
}

// earlierProgress is what the last heartbeat of a lost worker said, zero if there
// was none.
func (a *Activities) earlierProgress(ctx context.Context) (earlier progress) {
	if !activity.HasHeartbeatDetails(ctx) {
		return earlier
	}
	if err := activity.GetHeartbeatDetails(ctx, &earlier); err != nil {
		a.cfg.Logger.Warn("a lost worker's last heartbeat cannot be read; what it lost is not counted", "error", err)
		return progress{}
	}
	return earlier
}

// pulse keeps an activity alive and tells what it has done.
type pulse struct {
	earlier progress
	out     atomic.Pointer[output]
}

// follow makes the next heartbeats tell of the output.
func (p *pulse) follow(out *output) { p.out.Store(out) }

func (p *pulse) progress() progress {
	if out := p.out.Load(); out != nil {
		return out.progress()
	}
	// A heartbeat without details would erase the earlier worker's.
	return p.earlier
}

// beat sends heartbeats until the returned function is called.
func (p *pulse) beat(ctx context.Context) (stop func()) {
	done := make(chan struct{})
	go func() {
		ticker := time.NewTicker(heartbeatInterval)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				activity.RecordHeartbeat(ctx, p.progress())
			case <-done:
				return
			case <-ctx.Done():
				return
			}
		}
	}()
	return func() { close(done) }
}
