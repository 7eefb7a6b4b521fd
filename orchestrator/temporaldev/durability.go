package main

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.temporal.io/api/serviceerror"
	"google.golang.org/grpc"
)

// One turn of a workflow makes the server commit six times, one after the
// other, and each commit waits for the disk. Most of these waits protect
// nothing: a commit that nobody outside has been told of may be lost in a
// crash, as long as everything that came after it is lost as well. That is so
// here, because all state of the server is in one Postgres, whose crash
// recovery restores a prefix of what was committed.
//
// With --batch-commits the server's own sessions therefore commit without
// waiting, and the frontend waits once, before each of its replies, until
// everything committed so far is on disk. What a client or worker was told thus
// survives a kill of every process, and of the machine, exactly as before; what
// nobody was told yet may be gone. Two conditions hold in `holdfast dev` and are
// why this is a flag: Postgres ends rather than restarts after a crash, and this
// process ends with it, so that no memory of lost commits lives on.

// flusher makes durable what is committed, once for all who ask meanwhile.
type flusher struct {
	flush func(context.Context) error

	mu   sync.Mutex
	next *flushRound   // those who have asked since the last flush began
	wake chan struct{} // holds one token when next is not nil
}

// flushRound is the one flush that a group of callers waits for.
type flushRound struct {
	done chan struct{}
	err  error // valid once done is closed
}

func newFlusher(flush func(context.Context) error) *flusher {
	return &flusher{flush: flush, wake: make(chan struct{}, 1)}
}

// run flushes for as long as the context lives.
func (f *flusher) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-f.wake:
		}
		// Whoever asks from here on may have committed after this flush looks
		// at the log, and belongs to the next round.
		f.mu.Lock()
		round := f.next
		f.next = nil
		f.mu.Unlock()
		round.err = f.flush(ctx)
		close(round.done)
	}
}

// wait returns once everything that was committed before the call is durable.
func (f *flusher) wait(ctx context.Context) error {
	f.mu.Lock()
	round := f.next
	if round == nil {
		round = &flushRound{done: make(chan struct{})}
		f.next = round
		f.wake <- struct{}{} // never blocks: its token was taken before next became nil
	}
	f.mu.Unlock()
	select {
	case <-round.done:
		return round.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// intercept holds back the reply of a call until it is true for good.
func (f *flusher) intercept(ctx context.Context, request any, call *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	response, err := handler(ctx, request)
	if err != nil || handsOutTask(call.FullMethod) {
		return response, err
	}
	if err := f.wait(ctx); err != nil {
		return nil, serviceerror.NewUnavailable("waiting for the reply to become durable: " + err.Error())
	}
	return response, nil
}

// handsOutTask tells whether the call is a worker's poll for tasks. A task that
// was handed out and forgotten is handed out again, and its first result is
// refused: nothing is lost, so polls need not wait.
func handsOutTask(method string) bool {
	name := method[strings.LastIndexByte(method, '/')+1:]
	return strings.HasPrefix(name, "Poll") && strings.HasSuffix(name, "TaskQueue")
}

// flushTransaction is the smallest transaction whose commit waits until the log
// is on disk, and with it every commit before. It has to write a record of its
// own besides that of its commit: Postgres takes a commit that had nothing to
// log (SELECT pg_current_xact_id()) for one that need not wait.
const flushTransaction = "SELECT pg_logical_emit_message(true, 'holdfast-temporal', ''::text)"

// newPostgresFlusher returns a flusher for the commits of the whole server.
func newPostgresFlusher(ctx context.Context, postgres *url.URL) (*flusher, error) {
	config, err := pgxpool.ParseConfig(databaseURL(postgres, mainDatabase))
	if err != nil {
		return nil, fmt.Errorf("configuring the connection for flushes: %w", err)
	}
	config.MaxConns = 1 // rounds follow each other
	config.ConnConfig.RuntimeParams["synchronous_commit"] = "on"
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("connecting for flushes: %w", err)
	}
	return newFlusher(func(ctx context.Context) error {
		_, err := pool.Exec(ctx, flushTransaction)
		return err
	}), nil
}
