package kvevents

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"sync/atomic"
	"time"
)

// stream is one rank's sequence of batches: it finds what is missing, heals it by
// replay, and else gives up what was told. Its methods are called by one goroutine;
// table, known and what follows them are also touched by Clear, under Subscriber.mu.
type stream struct {
	sub  *Subscriber
	rank int
	// replay asks for all batches from a number on; nil if there is no replay socket.
	replay  func(ctx context.Context, from uint64, visit func(seq uint64, payload []byte) error) error
	decoder *decoder
	seed    maphash.Seed

	table *table
	// known: next is the number that follows the last batch applied, print and ts are
	// that batch's fingerprint and time.
	known bool
	next  uint64
	print uint64
	ts    float64
	// retry: the whole history is wanted, because the replay socket did not answer or
	// the table was emptied on another rank's account; not before retryAt.
	retry     atomic.Bool
	retryAt   time.Time
	retryWait time.Duration
	// skew is the least (arrival - batch time) seen live, in seconds: the engine's
	// clock against ours, up to the shortest latency.
	skew    float64
	hasSkew bool
	lostAt  time.Time
	dropped bool // since lostAt
}

// Causes by which a replay does not heal; any other error of it is the socket's.
var (
	errOtherHistory = errors.New("the engine's history is not the one followed: it restarted")
	errHistoryGone  = errors.New("the missing batches are no longer in the engine's replay buffer")
	errNoReplay     = errors.New("no replay endpoint")
)

func newStream(s *Subscriber, rank int) *stream {
	st := &stream{sub: s, rank: rank, decoder: newDecoder(s.cfg.Dialect), seed: maphash.MakeSeed(), table: newTable(s, rank)}
	if s.cfg.ReplayEndpoint != "" {
		st.replay = newReplayer(s, rank)
	}
	return st
}

// connected is called on each connection, subscribed, before its first frame.
func (st *stream) connected(ctx context.Context) error {
	st.sub.status.connects.Add(1)
	st.lostAt, st.dropped = time.Time{}, false
	if err := st.settleDebt(ctx); err != nil {
		return err
	}
	if err := st.synchronise(ctx); err != nil {
		return err
	}
	st.sub.status.connected(st.rank, nil)
	return nil
}

// settleDebt repeats a clear that the router could not be told.
func (st *stream) settleDebt(ctx context.Context) error {
	s := st.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.clearOwed {
		return nil
	}
	for _, each := range s.streams {
		each.table.forget()
		each.known = false
		each.retry.Store(true)
		s.status.trust(each.rank, false, "the router did not take an event")
	}
	s.status.resyncs.Add(1)
	return s.tellCleared(ctx)
}

func (st *stream) synchronise(ctx context.Context) error {
	if st.replay == nil {
		if st.isKnown() {
			return st.drop(ctx, "reconnected, and without a replay endpoint nothing shows that no batch was missed")
		}
		st.distrust("joined a stream whose beginning is not known")
		return nil
	}
	if st.isKnown() {
		err := st.catchUp(ctx)
		if err == nil || isFatal(err) {
			return err
		}
		if err := st.lose(ctx, err); err != nil {
			return err
		}
		if !errors.Is(err, errOtherHistory) && !errors.Is(err, errHistoryGone) {
			st.retryLater()
			return nil
		}
	}
	return st.rebuild(ctx)
}

// lose drops everything for a cause found by catchUp.
func (st *stream) lose(ctx context.Context, cause error) error {
	if errors.Is(cause, errOtherHistory) {
		st.sub.status.restarts.Add(1)
	}
	return st.drop(ctx, "a gap could not be healed: "+cause.Error())
}

// tellError marks a failure of Config.Tell, which ends the session: the router then
// knows something else than the table.
type tellError struct{ err error }

func (e tellError) Error() string { return "telling the router: " + e.err.Error() }
func (e tellError) Unwrap() error { return e.err }

func isFatal(err error) bool { return errors.As(err, &tellError{}) }

// frame takes a live batch.
func (st *stream) frame(ctx context.Context, seq uint64, payload []byte) error {
	ts := st.decoder.timestamp(payload)
	st.measureSkew(ts)
	switch {
	case !st.isKnown():
		return st.first(ctx, seq, payload)
	case seq == st.next:
		return st.apply(ctx, seq, payload, false)
	case seq > st.next:
		return st.gap(ctx, seq, payload)
	case ts > st.ts || ts == 0 && seq <= 1 && st.next > 2:
		// A lower number on a younger batch: the engine counts anew.
		st.sub.status.restarts.Add(1)
		if err := st.drop(ctx, "the engine restarted"); err != nil {
			return err
		}
		return st.first(ctx, seq, payload)
	default:
		st.sub.status.duplicates.Add(1)
		return nil
	}
}

// first takes a live batch when nothing is known of the stream.
func (st *stream) first(ctx context.Context, seq uint64, payload []byte) error {
	if seq > 0 && st.replay != nil && !st.retry.Load() {
		if err := st.rebuild(ctx); err != nil {
			return err
		}
		return st.settle(ctx, seq, payload)
	}
	if seq <= 1 {
		// Nothing came before it: vLLM counts from 0, llm-d's simulator from 1.
		st.sub.status.trust(st.rank, true, "")
	} else {
		st.distrust(fmt.Sprintf("joined at batch %d: what was stored before is not known", seq))
	}
	return st.apply(ctx, seq, payload, false)
}

// gap heals a hole before a live batch, or gives up what was told.
func (st *stream) gap(ctx context.Context, seq uint64, payload []byte) error {
	st.sub.status.gaps.Add(1)
	cause := errNoReplay
	if st.replay != nil {
		cause = st.catchUp(ctx)
		if isFatal(cause) {
			return cause
		}
	}
	if cause != nil {
		missing := fmt.Errorf("batches %d to %d are missing: %w", st.next, seq-1, cause)
		if err := st.lose(ctx, missing); err != nil {
			return err
		}
		if errors.Is(cause, errOtherHistory) || errors.Is(cause, errHistoryGone) {
			if err := st.rebuild(ctx); err != nil {
				return err
			}
		} else {
			st.retryLater()
		}
	}
	return st.settle(ctx, seq, payload)
}

// settle applies a live batch after a replay that may or may not have reached it.
func (st *stream) settle(ctx context.Context, seq uint64, payload []byte) error {
	if st.isKnown() && seq < st.next {
		return nil
	}
	if st.isKnown() && seq > st.next {
		if err := st.drop(ctx, fmt.Sprintf("batches %d to %d are missing from the replay", st.next, seq-1)); err != nil {
			return err
		}
	}
	return st.apply(ctx, seq, payload, false)
}

// probe is called at times, quiet if no batch came since the last. It finds a lost
// last batch and an engine that restarted and stays idle.
func (st *stream) probe(ctx context.Context, quiet bool) error {
	if err := st.settleDebt(ctx); err != nil {
		return err
	}
	if st.replay == nil {
		return nil
	}
	if st.retry.Load() && !st.sub.now().Before(st.retryAt) {
		return st.rebuild(ctx)
	}
	if !quiet {
		return nil
	}
	if !st.isKnown() {
		return st.rebuild(ctx)
	}
	err := st.catchUp(ctx)
	switch {
	case err == nil || isFatal(err):
		return err
	case errors.Is(err, errOtherHistory) || errors.Is(err, errHistoryGone):
		if err := st.lose(ctx, err); err != nil {
			return err
		}
		return st.rebuild(ctx)
	}
	// The replay socket does not answer; the live stream shows no gap, so nothing is lost.
	return nil
}

// catchUp asks for the last applied batch and what follows it. Getting that very
// batch is the proof that the engine is still the one followed; the numbers alone
// cannot show it, since a restarted engine may have passed them.
func (st *stream) catchUp(ctx context.Context) error {
	last, want, met := st.next-1, st.print, false
	err := st.ask(ctx, last, func(seq uint64, payload []byte) error {
		switch {
		case !met && seq < last:
			return nil
		case !met && seq > last:
			return errHistoryGone
		case !met:
			met = true
			if maphash.Bytes(st.seed, payload) != want {
				return errOtherHistory
			}
			return nil
		case seq < st.next:
			return nil
		case seq > st.next:
			return errHistoryGone
		}
		return st.apply(ctx, seq, payload, true)
	})
	if err == nil && !met {
		return errOtherHistory
	}
	return err
}

// rebuild reads the whole history into a table that the first answer empties. What
// it gets is right even if the beginning is gone; the picture then only lacks blocks.
func (st *stream) rebuild(ctx context.Context) error {
	st.retry.Store(false)
	complete, begun := true, false
	err := st.ask(ctx, 0, func(seq uint64, payload []byte) error {
		switch {
		case begun && seq < st.next:
			return nil
		case begun && seq > st.next:
			complete = false
			if err := st.drop(ctx, fmt.Sprintf("the replay lacks batches %d to %d", st.next, seq-1)); err != nil {
				return err
			}
		case !begun:
			begun, complete = true, seq <= 1
			if err := st.restartTable(ctx); err != nil {
				return err
			}
		}
		return st.apply(ctx, seq, payload, true)
	})
	if err == nil && !begun {
		err = st.restartTable(ctx)
	}
	switch {
	case isFatal(err):
		return err
	case err != nil:
		st.retryLater()
		st.distrust("asking for the whole history: " + err.Error())
	case complete:
		st.retryWait = 0
		st.sub.status.trust(st.rank, true, "")
	default:
		st.retryWait = 0
		st.distrust("the beginning of the history is gone from the engine's replay buffer")
	}
	return nil
}

// restartTable drops what is known, if anything, before a history is read again.
func (st *stream) restartTable(ctx context.Context) error {
	if !st.isKnown() {
		return nil
	}
	return st.drop(ctx, "reading the whole history again")
}

// retryLater asks for the whole history at a later probe, each time later.
func (st *stream) retryLater() {
	if st.replay == nil {
		return
	}
	st.retry.Store(true)
	st.retryAt = st.sub.now().Add(st.retryWait)
	st.retryWait = min(max(2*st.retryWait, st.sub.timing.probe), maxRetryWait)
}

const maxRetryWait = 5 * time.Minute

func (st *stream) ask(ctx context.Context, from uint64, visit func(seq uint64, payload []byte) error) error {
	st.sub.status.replays.Add(1)
	ctx, cancel := context.WithTimeout(ctx, st.sub.timing.replay)
	defer cancel()
	err := st.replay(ctx, from, visit)
	if err != nil && !isFatal(err) && !errors.Is(err, errHistoryGone) && !errors.Is(err, errOtherHistory) {
		st.sub.status.replaysFailed.Add(1)
		err = fmt.Errorf("replay from %d: %w", from, err)
	}
	return err
}

// disconnected is called after each failed attempt to connect and each connection
// that broke. Locations outlive a short interruption.
func (st *stream) disconnected(ctx context.Context, cause error) {
	st.sub.status.connected(st.rank, cause)
	now := st.sub.now()
	if st.lostAt.IsZero() {
		st.lostAt = now
	}
	if err := st.settleDebt(ctx); err != nil {
		st.sub.cfg.Logger.Warn("KV event locations not cleared yet", "instance", st.sub.cfg.Instance, "error", err)
		return
	}
	if !st.dropped && st.isKnown() && now.Sub(st.lostAt) >= st.sub.timing.lost {
		st.dropped = true
		if err := st.drop(ctx, fmt.Sprintf("disconnected for %s: %v", now.Sub(st.lostAt).Round(time.Second), cause)); err != nil {
			st.sub.cfg.Logger.Warn("KV event locations not cleared yet", "instance", st.sub.cfg.Instance, "error", err)
		}
	}
}
