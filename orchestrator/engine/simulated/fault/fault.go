// Package fault decides what goes wrong in a simulated engine, when, and how often
// it has. Decisions of each kind come from a generator of their own, so that
// equal settings and an equal sequence of requests or batches give equal faults.
//
// It decides only; the engine does the damage.
package fault

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"holdfast/orchestrator/engine/simulated/publish"
)

// Settings are the faults that are switched on. The zero value is a sound engine.
type Settings struct {
	// Seed makes the choices of two engines differ.
	Seed uint64 `json:"seed"`
	// Events befall batches of KV events on their way to subscribers.
	Events Events `json:"events"`
	// Metrics stall from the moment they are set.
	Metrics Metrics `json:"metrics"`
	// Refusals are answers to generation requests; the first that applies is given.
	Refusals []Refusal `json:"refusals,omitempty"`
	// Drops break the connection in the middle of an answer.
	Drops Drops `json:"drops"`
	// SlowFactor is how many times slower the engine computes; 0 and 1 are its own speed.
	SlowFactor float64 `json:"slow_factor"`
	// Preemptions make all running requests lose their blocks again and again.
	Preemptions Preemptions `json:"preemptions"`
	// RefuseFlushes is how many cache resets from now on are refused whatever the
	// engine does. One with requests under way refuses anyway.
	RefuseFlushes int `json:"refuse_flushes"`
	// Crash ends the engine at once.
	Crash *Crash `json:"crash,omitempty"`
}

// Events are probabilities per batch.
type Events struct {
	Lost         float64 `json:"lost"`
	Duplicated   float64 `json:"duplicated"`
	Reordered    float64 `json:"reordered"`
	Delayed      float64 `json:"delayed"`
	DelaySeconds float64 `json:"delay_seconds"`
}

// Metrics stall the metrics page and the load report.
type Metrics struct {
	// Mode is "frozen", which repeats the page as it was when the stall began, or
	// "hang", which answers when the stall is over; empty for no stall.
	Mode    string  `json:"mode,omitempty"`
	Seconds float64 `json:"seconds,omitempty"`
}

// The modes of a stall.
const (
	Frozen = "frozen"
	Hang   = "hang"
)

// Refusal is an answer in the place of a generation: to the Next requests, and to
// others with a probability.
type Refusal struct {
	Status            int     `json:"status"` // 429, 500, 503 or 504
	Probability       float64 `json:"probability,omitempty"`
	Next              int     `json:"next,omitempty"`
	RetryAfterSeconds float64 `json:"retry_after_seconds,omitempty"` // header, if positive
}

// Drops break the connection after AfterTokens output tokens: of the Next
// requests, and of others with a probability.
type Drops struct {
	Probability float64 `json:"probability,omitempty"`
	Next        int     `json:"next,omitempty"`
	AfterTokens int     `json:"after_tokens,omitempty"`
}

// Preemptions happen Times times, IntervalSeconds apart, the first at once.
type Preemptions struct {
	Times           int     `json:"times,omitempty"`
	IntervalSeconds float64 `json:"interval_seconds,omitempty"`
}

// Crash closes all connections and refuses new ones until the engine is back, with
// an empty cache, its first weights, and events numbered from 0.
type Crash struct {
	DownSeconds float64 `json:"down_seconds"`
}

// Counters count what was injected since the engine was made.
type Counters struct {
	EventsLost       int64         `json:"events_lost"`
	EventsDuplicated int64         `json:"events_duplicated"`
	EventsReordered  int64         `json:"events_reordered"`
	EventsDelayed    int64         `json:"events_delayed"`
	MetricsStalled   int64         `json:"metrics_stalled"`
	Refused          map[int]int64 `json:"refused"`
	StreamsDropped   int64         `json:"streams_dropped"`
	Preempted        int64         `json:"preempted"`
	FlushesRefused   int64         `json:"flushes_refused"`
	Crashes          int64         `json:"crashes"`
}

// Injector holds the settings in force and counts.
type Injector struct {
	mu       sync.Mutex
	settings Settings
	counters Counters
	random   map[string]*rand.Rand
}

// New returns an injector of some faults. Settings that start something, such as a
// crash, are the engine's to start.
func New(s Settings) (*Injector, error) {
	i := &Injector{counters: Counters{Refused: map[int]int64{}}}
	if err := i.Set(s); err != nil {
		return nil, err
	}
	return i, nil
}

// ErrSettings marks settings that make no sense.
var ErrSettings = errors.New("invalid faults")

const maxSeconds = 86_400

func (s *Settings) validate() error {
	for name, p := range map[string]float64{
		"events.lost": s.Events.Lost, "events.duplicated": s.Events.Duplicated, "events.reordered": s.Events.Reordered,
		"events.delayed": s.Events.Delayed, "drops.probability": s.Drops.Probability,
	} {
		if !(p >= 0 && p <= 1) {
			return fmt.Errorf("%w: %s = %v, want 0 to 1", ErrSettings, name, p)
		}
	}
	seconds := map[string]float64{"events.delay_seconds": s.Events.DelaySeconds, "metrics.seconds": s.Metrics.Seconds, "preemptions.interval_seconds": s.Preemptions.IntervalSeconds}
	if s.Crash != nil {
		seconds["crash.down_seconds"] = s.Crash.DownSeconds
	}
	for name, v := range seconds {
		if !(v >= 0 && v <= maxSeconds) {
			return fmt.Errorf("%w: %s = %v, want 0 to %d", ErrSettings, name, v, maxSeconds)
		}
	}
	for _, r := range s.Refusals {
		switch r.Status {
		case http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		default:
			return fmt.Errorf("%w: refusal with status %d, want 429, 500, 503 or 504", ErrSettings, r.Status)
		}
		if !(r.Probability >= 0 && r.Probability <= 1) || r.Next < 0 || !(r.RetryAfterSeconds >= 0 && r.RetryAfterSeconds <= maxSeconds) {
			return fmt.Errorf("%w: refusal %+v", ErrSettings, r)
		}
	}
	switch {
	case s.Metrics.Mode != "" && s.Metrics.Mode != Frozen && s.Metrics.Mode != Hang:
		return fmt.Errorf("%w: metrics.mode = %q, want frozen or hang", ErrSettings, s.Metrics.Mode)
	case s.Drops.Next < 0 || s.Drops.AfterTokens < 0 || s.Preemptions.Times < 0 || s.RefuseFlushes < 0:
		return fmt.Errorf("%w: counts must not be negative", ErrSettings)
	case !(s.SlowFactor >= 0 && s.SlowFactor <= 1e6):
		return fmt.Errorf("%w: slow_factor = %v, want 0 to 1,000,000", ErrSettings, s.SlowFactor)
	case s.Preemptions.Times > 1 && s.Preemptions.IntervalSeconds < 0.001:
		return fmt.Errorf("%w: preemptions.interval_seconds = %v, want at least 0.001", ErrSettings, s.Preemptions.IntervalSeconds)
	}
	return nil
}

// Set replaces the settings and starts all choices anew. The counters stay.
func (i *Injector) Set(s Settings) error {
	if err := s.validate(); err != nil {
		return err
	}
	if s.SlowFactor == 0 {
		s.SlowFactor = 1
	}
	s.Refusals = append([]Refusal(nil), s.Refusals...)
	i.mu.Lock()
	defer i.mu.Unlock()
	i.settings = s
	i.random = map[string]*rand.Rand{}
	return nil
}

// State returns the settings, of which counts are what is left, and the counters.
func (i *Injector) State() (Settings, Counters) {
	i.mu.Lock()
	defer i.mu.Unlock()
	s, c := i.settings, i.counters
	s.Refusals = append([]Refusal(nil), s.Refusals...)
	c.Refused = make(map[int]int64, len(i.counters.Refused))
	for status, n := range i.counters.Refused {
		c.Refused[status] = n
	}
	return s, c
}

// Count adds to counters under the injector's lock.
func (i *Injector) Count(f func(*Counters)) {
	i.mu.Lock()
	defer i.mu.Unlock()
	f(&i.counters)
}

// chance draws from the generator of one kind of fault.
func (i *Injector) chance(kind string, probability float64) bool {
	if probability == 0 {
		return false
	}
	r := i.random[kind]
	if r == nil {
		var salt uint64
		for _, b := range []byte(kind) {
			salt = salt*131 + uint64(b)
		}
		r = rand.New(rand.NewPCG(i.settings.Seed, salt))
		i.random[kind] = r
	}
	return r.Float64() < probability
}

// Refusal is the answer that the next generation request gets instead of tokens, if any.
func (i *Injector) Refusal() (Refusal, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for n := range i.settings.Refusals {
		r := &i.settings.Refusals[n]
		hit := i.chance(fmt.Sprint("refusal", n), r.Probability)
		if r.Next > 0 {
			r.Next--
			hit = true
		}
		if hit {
			i.counters.Refused[r.Status]++
			return *r, true
		}
	}
	return Refusal{}, false
}

// DropAfter is the number of tokens after which the next answer breaks off; 0 for never.
func (i *Injector) DropAfter() int {
	i.mu.Lock()
	defer i.mu.Unlock()
	d := &i.settings.Drops
	hit := i.chance("drop", d.Probability)
	if d.Next > 0 {
		d.Next--
		hit = true
	}
	if !hit {
		return 0
	}
	return max(d.AfterTokens, 1)
}

// RefuseFlush says that the next cache reset is refused.
func (i *Injector) RefuseFlush() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.settings.RefuseFlushes == 0 {
		return false
	}
	i.settings.RefuseFlushes--
	i.counters.FlushesRefused++
	return true
}

// EventFate returns what decides about the batches of one rank, in their order.
func (i *Injector) EventFate(rank int) func() publish.Fate {
	name := fmt.Sprint(" of rank ", rank)
	waiting := false // for the next batch to overtake one that was swapped
	return func() (fate publish.Fate) {
		i.mu.Lock()
		defer i.mu.Unlock()
		e := &i.settings.Events
		fate.Lost = i.chance("lost"+name, e.Lost)
		fate.Duplicate = i.chance("duplicated"+name, e.Duplicated)
		fate.Swapped = i.chance("reordered"+name, e.Reordered) && !waiting
		if i.chance("delayed"+name, e.Delayed) {
			fate.Delay = time.Duration(e.DelaySeconds * float64(time.Second))
			i.counters.EventsDelayed++
		}
		switch {
		case fate.Lost:
			fate.Duplicate, fate.Swapped = false, false
			i.counters.EventsLost++
		case fate.Swapped:
			fate.Duplicate = false
			i.counters.EventsReordered++
			waiting = true
		case fate.Duplicate:
			i.counters.EventsDuplicated++
			waiting = false
		default:
			waiting = false
		}
		return fate
	}
}
