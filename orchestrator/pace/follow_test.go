package pace_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"holdfast/orchestrator/pace"
)

// world is a pool and a trainer in virtual time. The pool shares its speed among the
// sessions under way, of which any number may be (the contract's concurrency is
// loose), and few use it as well as many do; the trainer consumes samples as they
// end, a step at a time, and each step makes a policy version.
type world struct {
	rng  *rand.Rand
	work map[string]float64 // mean tokens of a session, by class
	// poolTokensPerSecond are shared; no session gets more than sessionTokensPerSecond.
	poolTokensPerSecond, sessionTokensPerSecond float64
	stepSamples                                 int
	trainSeconds                                float64

	now         float64
	underWay    []*rollout
	done        []*rollout // ended and not yet acknowledged
	trainingEnd float64    // 0 while the trainer waits
	version     int
	versionsAt  []float64

	classes    []pace.Class
	ended      []*rollout
	busy       float64
	usedTokens float64
	trained    int
	stale      int
	oldest     int
}

type rollout struct {
	class          int
	version        int
	began, endedAt float64
	// busyAt is how long the pool had been busy when it ended.
	busyAt float64
	left   float64
}

const bound = 1

func newWorld(seed uint64) *world {
	return &world{
		rng: rand.New(rand.NewPCG(seed, 1)), work: map[string]float64{"agent": 3_000, "rlvr": 6_000, "rlhf": 1_500},
		poolTokensPerSecond: 4_000, sessionTokensPerSecond: 125, stepSamples: 128, trainSeconds: 10,
		classes:    []pace.Class{{Name: "agent", Share: 0.486}, {Name: "rlvr", Share: 0.332}, {Name: "rlhf", Share: 0.182}},
		versionsAt: []float64{0},
	}
}

func (w *world) release(class int) {
	c := &w.classes[class]
	c.Released++
	c.Outstanding++
	w.underWay = append(w.underWay, &rollout{class: class, version: w.version, began: w.now, left: w.work[c.Name] * (0.5 + w.rng.Float64())})
}

// until lets time pass up to at, with every ending on the way.
func (w *world) until(at float64) {
	for {
		next := at
		perSession := w.sessionTokensPerSecond
		if n := float64(len(w.underWay)); n > 0 {
			perSession = min(perSession, w.poolTokensPerSecond/n)
		}
		for _, r := range w.underWay {
			next = min(next, w.now+r.left/perSession)
		}
		if w.trainingEnd > 0 {
			next = min(next, w.trainingEnd)
		}
		passed := next - w.now
		w.now = next
		if len(w.underWay) > 0 {
			w.busy += passed
			w.usedTokens += passed * perSession * float64(len(w.underWay))
		}
		w.settle(passed * perSession)
		if next == at {
			return
		}
	}
}

// settle takes off the tokens that were generated and moves what is over on.
func (w *world) settle(tokens float64) {
	left := w.underWay[:0]
	for _, r := range w.underWay {
		if r.left -= tokens; r.left > 1e-6 {
			left = append(left, r)
			continue
		}
		r.endedAt, r.busyAt = w.now, w.busy
		w.classes[r.class].Outstanding--
		w.done = append(w.done, r)
		w.ended = append(w.ended, r)
	}
	w.underWay = left
	if w.trainingEnd > 0 && w.now >= w.trainingEnd {
		// The step is committed: a version comes into force and its samples are acknowledged.
		w.done = w.done[w.stepSamples:]
		w.version++
		w.versionsAt = append(w.versionsAt, w.now)
		w.trainingEnd = 0
	}
	if w.trainingEnd == 0 && len(w.done) >= w.stepSamples {
		w.trainingEnd = w.now + w.trainSeconds
		for _, r := range w.done[:w.stepSamples] {
			age := w.version - r.version
			w.trained++
			w.oldest = max(w.oldest, age)
			if age > bound {
				w.stale++
			}
		}
	}
}

// state is what the store would read: the last endings and the last 8 versions.
func (w *world) state() pace.State {
	s := pace.State{MaxConcurrency: 1_000, StalenessBound: eta(bound), BusySeconds: w.busy, UnderWay: int64(len(w.underWay)), Unacknowledged: int64(len(w.done))}
	s.Classes = append(s.Classes, w.classes...)
	services := make([][]float64, len(w.classes))
	recent := w.ended[max(0, len(w.ended)-window):]
	if len(w.ended) > window {
		s.BusySeconds -= recent[0].busyAt
	}
	for _, r := range recent {
		s.Classes[r.class].EndedInWindow++
		services[r.class] = append(services[r.class], r.endedAt-r.began)
		s.ServiceMeanSeconds += (r.endedAt - r.began) / float64(len(recent))
	}
	for i := range s.Classes {
		if n := len(services[i]); n > 0 {
			slices.Sort(services[i])
			s.Classes[i].ServiceP99Seconds = services[i][n*99/100]
		}
	}
	if n := len(w.versionsAt); n > 1 {
		from := max(0, n-9)
		s.VersionSeconds = (w.versionsAt[n-1] - w.versionsAt[from]) / float64(n-1-from)
	}
	s.VersionAgeSeconds = w.now - w.versionsAt[len(w.versionsAt)-1]
	return s
}

// used is the part of the pool's speed that was used.
func (w *world) used() float64 { return w.usedTokens / (w.now * w.poolTokensPerSecond) }

const (
	steps       = 40
	askEvery    = 2.0
	mostSeconds = 20_000.0
	// window is how many endings are measured; the store takes 1,000.
	window = 300
)

// follow releases what is advised, asking every two seconds.
func follow(w *world, stepSamples int64) {
	for w.version < steps && w.now < mostSeconds {
		state := w.state()
		for i, c := range pace.Advise(&state, pace.Ask{GroupSize: 1, StepSamples: stepSamples, AskAgainSeconds: askEvery}).Classes {
			for range c.Sessions {
				w.release(i)
			}
		}
		w.until(w.now + askEvery)
	}
}

// allAtOnce releases in rho what all the steps need.
func allAtOnce(w *world) {
	for range steps * w.stepSamples {
		next := 0
		for i, c := range w.classes {
			if c.Share*float64(w.classes[next].Released+1) > w.classes[next].Share*float64(c.Released+1) {
				next = i
			}
		}
		w.release(next)
	}
	for w.version < steps && w.now < mostSeconds {
		w.until(w.now + askEvery)
	}
}

// TestFollowingTheAdviceKeepsFreshAndBusy compares a trainer that follows the advice
// under a bound of 1 with one that releases everything at once: the one has no stale
// sample and is as quick, the other's are nearly all stale.
func TestFollowingTheAdviceKeepsFreshAndBusy(t *testing.T) {
	for seed := range uint64(10) {
		paced, flood := newWorld(seed), newWorld(seed)
		follow(paced, int64(paced.stepSamples))
		allAtOnce(flood)
		t.Logf("seed %d: paced %d steps in %.0f s, %d stale of %d, oldest %d, pool used %.1f %%; at once %d steps in %.0f s, %d stale of %d, oldest %d, used %.1f %%", seed,
			paced.version, paced.now, paced.stale, paced.trained, paced.oldest, 100*paced.used(), flood.version, flood.now, flood.stale, flood.trained, flood.oldest, 100*flood.used())
		if paced.version < steps || paced.stale > 0 || paced.used() < 0.9 {
			t.Errorf("seed %d: following the advice made %d steps with %d stale samples and used %.0f %% of the pool", seed, paced.version, paced.stale, 100*paced.used())
		}
		if flood.version < steps || flood.stale < flood.trained/2 {
			t.Errorf("seed %d: releasing all at once left %d of %d samples stale: this shows nothing", seed, flood.stale, flood.trained)
		}
		var total int64
		for _, c := range paced.classes {
			total += c.Released
		}
		for _, c := range paced.classes {
			if off := math.Abs(float64(c.Released) - c.Share*float64(total)); off > 1 {
				t.Errorf("seed %d: %d of %d released are %s, %.2f off its share", seed, c.Released, total, c.Name, off)
			}
		}
	}
}

// TestFollowingWithoutTellingTheStep: the bound is then kept by time alone, and the run
// goes on as fresh and as busy.
func TestFollowingWithoutTellingTheStep(t *testing.T) {
	for seed := range uint64(10) {
		w := newWorld(seed)
		follow(w, 0)
		t.Logf("seed %d: %d steps in %.0f s, %d stale of %d, oldest %d, pool used %.1f %%", seed, w.version, w.now, w.stale, w.trained, w.oldest, 100*w.used())
		if w.version < steps || w.stale > 0 || w.used() < 0.9 {
			t.Errorf("seed %d: %d steps with %d stale samples, %.0f %% of the pool used", seed, w.version, w.stale, 100*w.used())
		}
	}
}
