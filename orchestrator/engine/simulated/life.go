package simulated

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"holdfast/orchestrator/engine/simulated/publish"
)

// life is what an engine loses in a crash: its ranks with their caches and calls,
// and the weights it was given.
type life struct {
	cfg     *Config
	cores   []*core
	started time.Time

	mu sync.Mutex
	// version is the weights'; updates counts how often they were said to have changed.
	version string
	updates int
	// sleep is the level at which the engine sleeps, 0 if it is awake.
	sleep int
}

// newLife starts the ranks and opens their sockets.
func (s *Server) newLife() (*life, error) {
	l := &life{cfg: &s.cfg, started: time.Now(), version: s.cfg.WeightVersion}
	publishers, err := s.openPublishers()
	if err != nil {
		return nil, err
	}
	for rank := range s.cfg.Ranks {
		var log *kvLog
		if publishers != nil {
			log = newKVLog(publishers[rank], &s.cfg)
		}
		c, err := newCore(&s.cfg, rank, log)
		if err != nil {
			closeAll(publishers)
			return nil, err
		}
		l.cores = append(l.cores, c)
	}
	return l, nil
}

func (l *life) close(why ending) {
	for _, c := range l.cores {
		c.close(why)
	}
}

// each runs f on every rank.
func (l *life) each(f func(*core)) {
	for _, c := range l.cores {
		f(c)
	}
}

func (l *life) abortAll(match func(*call) bool) (n int) {
	l.each(func(c *core) { n += c.abortAll(match) })
	return n
}

func anyCall(*call) bool { return true }

// reset forgets the prefix caches of the ranks that run no call, and reports whether
// that was all of them. With preempt it is.
func (l *life) reset(preempt bool) bool {
	done := true
	l.each(func(c *core) { done = c.reset(preempt) && done })
	return done
}

// drain waits until no rank has a call in flight; then all are paused.
func (l *life) drain(ctx context.Context) error {
	l.each((*core).shut)
	for _, c := range l.cores {
		if err := c.drain(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (l *life) resume() { l.each((*core).resume) }

// weightVersion is the version of the weights.
func (l *life) weightVersion() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.version
}

// setWeights says that the weights are another version. An empty one keeps the name, and
// counts as an update nevertheless.
func (l *life) setWeights(version string) {
	l.mu.Lock()
	l.updates++
	if version != "" {
		l.version = version
	}
	version = l.version
	l.mu.Unlock()
	l.each(func(c *core) { c.setWeights(version) })
}

var errNoRank = errors.New("no such data-parallel rank")

// choose is the rank for a call: the one asked for by its global number, or the one
// with the least to do, where a waiting call counts four times, as in vLLM.
func (l *life) choose(asked string) (*core, error) {
	if asked != "" {
		rank, err := strconv.Atoi(strings.TrimSpace(asked))
		if err != nil || rank < l.cfg.FirstRank || rank >= l.cfg.FirstRank+len(l.cores) {
			return nil, fmt.Errorf("%w: %q, this server has %d to %d", errNoRank, asked, l.cfg.FirstRank, l.cfg.FirstRank+len(l.cores)-1)
		}
		return l.cores[rank-l.cfg.FirstRank], nil
	}
	best := l.cores[0]
	if len(l.cores) == 1 {
		return best, nil
	}
	least := 0
	for i, c := range l.cores {
		load := 0
		c.look(func() {
			stats := c.model.Stats()
			load = 4*stats.Waiting + stats.Running()
		})
		if i == 0 || load < least {
			best, least = c, load
		}
	}
	return best, nil
}

// openPublishers binds a port per rank. A restart gets the ports that the first start got.
func (s *Server) openPublishers() ([]*publish.Publisher, error) {
	k := &s.cfg.KVEvents
	if k.Endpoint == "" {
		return nil, nil
	}
	const tries = 20 // Free ports in a row may be taken.
	var err error
	for range tries {
		var list []*publish.Publisher
		if list, err = s.tryPublishers(); err == nil {
			return list, nil
		}
		if !publish.FreePort(k.Endpoint) && !publish.FreePort(k.ReplayEndpoint) {
			break
		}
	}
	return nil, err
}

func (s *Server) tryPublishers() (list []*publish.Publisher, err error) {
	k := &s.cfg.KVEvents
	endpoint, replay := s.boundEvents, s.boundReplay
	if endpoint == "" {
		endpoint, replay = k.Endpoint, k.ReplayEndpoint
	}
	for rank := range s.cfg.Ranks {
		p, err := s.newPublisher(endpoint, replay, rank)
		if err != nil {
			closeAll(list)
			return nil, err
		}
		list = append(list, p)
		// The others follow the first one's ports.
		endpoint, replay = list[0].Endpoint(), list[0].ReplayEndpoint()
	}
	s.boundEvents, s.boundReplay = endpoint, replay
	return list, nil
}

func (s *Server) newPublisher(endpoint, replay string, rank int) (*publish.Publisher, error) {
	endpoint, err := publish.AtRank(endpoint, rank)
	if err != nil {
		return nil, err
	}
	if replay, err = publish.AtRank(replay, rank); err != nil {
		return nil, err
	}
	k := &s.cfg.KVEvents
	return publish.New(publish.Config{
		Endpoint: endpoint, Connect: k.Connect, ReplayEndpoint: replay, Topic: k.Topic, Encoding: k.Encoding,
		OldReplies: k.OldReplies, HistoryBatches: k.HistoryBatches, Rank: s.cfg.FirstRank + rank, Fate: s.faults.EventFate(rank),
	})
}

func closeAll(publishers []*publish.Publisher) {
	for _, p := range publishers {
		p.Close()
	}
}

// now is the current life, or an error while the engine is down.
func (s *Server) now() (*life, error) {
	l := s.life.Load()
	if l == nil {
		return nil, errCrashed
	}
	return l, nil
}

// live passes the engine's current life to a handler. While there is none the connection breaks.
func (s *Server) live(handle func(*life, http.ResponseWriter, *http.Request)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		l, err := s.now()
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		handle(l, w, r)
	}
}
