package router

import (
	"fmt"

	"holdfast/router/prefix"
	"holdfast/router/quota"
)

// Core is the whole state of one pool's router. It is owned by one goroutine:
// feed it events with Step.
type Core struct {
	cfg       Config
	quotaRule quota.Rule
	now       Nanos

	sessions  map[SessionID]*session
	groups    map[GroupID]*group
	classes   map[ClassID]*class
	classList []*class
	// instances are ordered by id, so that loops over them are deterministic.
	instances  []*instance
	byInstance map[InstanceID]*instance
	index      *prefix.Index

	// limits are the distinct context limits of joined instances, ascending.
	limits        []int64
	newestVersion int64
	// footprintTokens is the pool's reference footprint for base caps.
	// confidence is how far every class has a history of its own, 0 to 1.
	confidence      float64
	footprintTokens float64

	// queued counts held sessions in queues, waitingCount all held and unplaced.
	queued, waitingCount int
	// warming are the groups whose siblings wait for a leader.
	warming []*group
	// demandStamp changes whenever waiting demand or a reference does.
	demandStamp  uint64
	nextSeq      uint64
	admissionSeq uint64
	nextJudgeAt  Nanos
	nextLearnAt  Nanos

	// dirty: something may have made room for a held session.
	dirty bool
	// passedOver: the latest cycle left out a session that waits of its own accord,
	// which time or a shorter backlog may end.
	passedOver bool
	// answer is the session whose request this Step must answer.
	answer *session

	freeSessions []*session
	freeGroups   []*group
	freePlaces   []*place
	freeSlots    []int

	// Scratch, valid within one evaluation.
	passing, short  []*instance
	candidates      []Candidate
	chosen          int
	request         Request
	matches         []int
	demands         []quota.Demand
	divider         quota.Divider
	topOpenLevel    int
	scratchSessions []*session
}

// New returns the core of an empty pool.
func New(cfg Config) (*Core, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("making a router core: %w", err)
	}
	return &Core{
		cfg: cfg,
		quotaRule: quota.Rule{
			Time:          cfg.Admission != AdmitSpace,
			FloorPermille: int64(cfg.ClassFloorShare * 1000),
			Lend:          cfg.Borrow,
		},
		sessions:        make(map[SessionID]*session),
		groups:          make(map[GroupID]*group),
		classes:         make(map[ClassID]*class),
		byInstance:      make(map[InstanceID]*instance),
		index:           prefix.NewIndex(cfg.MaxIndexBlocks),
		footprintTokens: cfg.Footprint.PriorTokens,
		demands:         make([]quota.Demand, cfg.MaxClasses+1),
	}, nil
}

// Step takes one event and appends the decisions that follow from it to out.
// Decisions are to be carried out in order. Equal states and equal events give
// equal decisions.
//
// After a failover, feed every SessionRestored before anything else but
// InstanceJoined: nobody is admitted while sessions are being restored, because
// the room may belong to the next one.
func (c *Core) Step(ev Event, out []Decision) []Decision {
	c.now = max(c.now, ev.at())
	out = c.advance(out)
	switch ev := ev.(type) {
	case *TurnRequested:
		out = c.turnRequested(ev, out)
	case *TurnStarted:
		c.turnStarted(ev)
	case *TurnEnded:
		c.turnEnded(ev)
	case *SessionEnded:
		out = c.sessionEnded(ev, out)
	case *Snapshot:
		c.snapshot(ev)
	case *BlocksStored:
		c.blocksStored(ev)
	case *BlocksRemoved:
		if w := c.findInstance(ev.Instance); w != nil {
			c.index.Remove(w.slot, ev.Rank, ev.Group, ev.Blocks)
		}
	case *BlocksCleared:
		if w := c.findInstance(ev.Instance); w != nil {
			c.forgetCache(w)
		}
	case *InstanceJoined:
		out = c.instanceJoined(ev, out)
	case *InstanceLeft:
		out = c.instanceLeft(ev, out)
	case *InstanceDraining:
		c.instanceDraining(ev)
	case *InstanceReset:
		c.instanceReset(ev)
	case *ObservabilityChanged:
		if w := c.findInstance(ev.Instance); w != nil {
			w.observability = ev.State
			c.refitAll(w)
		}
	case *SessionRestored:
		c.sessionRestored(ev)
	case *Tick:
		c.dirty = true
	}
	if _, restoring := ev.(*SessionRestored); c.dirty && !restoring {
		c.dirty = false
		out = c.reconsider(out)
	}
	if s := c.answer; s != nil {
		c.answer = nil
		if s.phase == held {
			out = append(out, c.holdDecision(s))
		}
	}
	return out
}

// advance runs what is due by now.
func (c *Core) advance(out []Decision) []Decision {
	if c.now >= c.nextLearnAt {
		c.nextLearnAt = c.now + nanos(c.cfg.Caps.PeriodSeconds)
		out = c.relearn(out)
	}
	if c.now >= c.nextJudgeAt {
		c.nextJudgeAt = c.now + nanos(c.cfg.Pressure.WindowSeconds)
		out = c.judge(out)
	}
	if len(c.warming) > 0 {
		c.expireLeaders()
	}
	return out
}

func (c *Core) blocksStored(ev *BlocksStored) {
	w := c.findInstance(ev.Instance)
	if w == nil {
		return
	}
	c.index.Store(w.slot, ev.Rank, ev.Group, ev.Blocks)
	w.indexSeen = true
	if float64(c.index.InstanceBlocks(w.slot)) > overfullShare*float64(w.capacityBlocks) && w.joined {
		c.forgetCache(w)
	}
}

// overfullShare of an instance's capacity in the index shows that removals were
// lost. What is indexed of it is then forgotten and learned anew, from events and
// from the turns that end, because nothing tells the stale entries from the others.
const overfullShare = 1.5

// growScratch keeps the scratch as large as the pool.
func (c *Core) growScratch() {
	for len(c.matches) < len(c.instances) {
		c.matches = append(c.matches, 0)
	}
}
