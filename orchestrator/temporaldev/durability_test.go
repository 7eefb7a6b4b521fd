package main

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
)

// committed stands for a log: what is written, and what has reached the disk.
type committed struct {
	mu      sync.Mutex
	written int
	durable int
	flushes int
}

func (c *committed) write() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.written++
	return c.written
}

func (c *committed) durableAt() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.durable
}

// flush takes time, and reaches what was written before it began.
func (c *committed) flush(context.Context) error {
	c.mu.Lock()
	reach := c.written
	c.mu.Unlock()
	time.Sleep(time.Millisecond) // the disk, in virtual time
	c.mu.Lock()
	defer c.mu.Unlock()
	c.durable = max(c.durable, reach)
	c.flushes++
	return nil
}

// Whoever returns from wait must find durable what was written before, however
// many others write and wait at the same time; and they must share flushes.
func TestFlusherCoversEveryCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := &committed{}
		flusher := newFlusher(log.flush)
		ctx, stop := context.WithCancel(t.Context())
		go flusher.run(ctx)
		const callers, calls = 32, 200
		var all sync.WaitGroup
		for caller := range callers {
			all.Go(func() {
				for call := range calls {
					time.Sleep(time.Duration((caller*7+call*13)%29) * 50 * time.Microsecond)
					position := log.write()
					if err := flusher.wait(ctx); err != nil {
						t.Error(err)
					}
					if durable := log.durableAt(); durable < position {
						t.Errorf("replied at %d while only %d is durable", position, durable)
					}
				}
			})
		}
		all.Wait()
		if log.flushes >= callers*calls/4 {
			t.Errorf("%d flushes for %d calls: they are not shared", log.flushes, callers*calls)
		}
		stop()
	})
}

func TestFlusherGivesEachCallerItsError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("no disk")
		failing := true
		flusher := newFlusher(func(context.Context) error {
			if failing {
				return broken
			}
			return nil
		})
		ctx, stop := context.WithCancel(t.Context())
		go flusher.run(ctx)
		if err := flusher.wait(ctx); !errors.Is(err, broken) {
			t.Errorf("the caller is told %v", err)
		}
		failing = false
		if err := flusher.wait(ctx); err != nil {
			t.Errorf("an error outlives its round: %v", err)
		}
		stop()
	})
}

func TestFlusherLetsGoOfACallerWhoGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		flusher := newFlusher(func(context.Context) error { <-hang; return nil })
		ctx, stop := context.WithCancel(t.Context())
		go flusher.run(ctx)
		impatient, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if err := flusher.wait(impatient); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the caller is told %v", err)
		}
		close(hang)
		if err := flusher.wait(ctx); err != nil {
			t.Error(err)
		}
		stop()
	})
}

func TestInterceptorWaitsForRepliesThatPromiseSomething(t *testing.T) {
	failed := errors.New("refused")
	for name, test := range map[string]struct {
		method    string
		err       error
		wantFlush bool
	}{
		"a start":             {"/temporal.api.workflowservice.v1.WorkflowService/StartWorkflowExecution", nil, true},
		"a completed turn":    {"/temporal.api.workflowservice.v1.WorkflowService/RespondActivityTaskCompleted", nil, true},
		"a read":              {"/temporal.api.workflowservice.v1.WorkflowService/GetWorkflowExecutionHistory", nil, true},
		"an update's outcome": {"/temporal.api.workflowservice.v1.WorkflowService/PollWorkflowExecutionUpdate", nil, true},
		"a task":              {"/temporal.api.workflowservice.v1.WorkflowService/PollWorkflowTaskQueue", nil, false},
		"a refused start":     {"/temporal.api.workflowservice.v1.WorkflowService/StartWorkflowExecution", failed, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				flushed := false
				flusher := newFlusher(func(context.Context) error { flushed = true; return nil })
				ctx, stop := context.WithCancel(t.Context())
				go flusher.run(ctx)
				handler := func(context.Context, any) (any, error) { return "reply", test.err }
				_, err := flusher.intercept(ctx, nil, &grpc.UnaryServerInfo{FullMethod: test.method}, handler)
				if !errors.Is(err, test.err) {
					t.Errorf("the error is %v", err)
				}
				synctest.Wait()
				if flushed != test.wantFlush {
					t.Errorf("flushed before the reply: %v, want %v", flushed, test.wantFlush)
				}
				stop()
			})
		})
	}
}
