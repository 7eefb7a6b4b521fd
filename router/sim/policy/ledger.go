package policy

import (
	"slices"

	"holdfast/router"
)

// ledger is what every policy here keeps: instances in order of id, and sessions
// with the turn that waits or runs.
type ledger struct {
	nodes    []*node
	sessions map[router.SessionID]*session
	out      []router.Decision
	now      router.Nanos
}

// node is one instance.
type node struct {
	id             router.InstanceID
	capacityTokens int64
	blockTokens    int
	// sessions are those homed here, in order of arrival; inFlight of them have a
	// turn at the engine.
	sessions []*session
	inFlight int
	byClass  map[router.ClassID]int
	// tokens is the context of all sessions homed here.
	tokens int64
}

// session is one rollout.
type session struct {
	id    router.SessionID
	class router.ClassID
	group router.GroupID
	// shared is the length of the group's prompt.
	shared int64
	home   *node
	turn   int
	tokens int64
	// waiting: the turn is not sent yet. inFlight: it is at home's engine.
	waiting, inFlight bool
	askedAt           router.Nanos
	// paused is for policies that pause sessions between turns.
	paused bool
}

func newLedger() ledger { return ledger{sessions: make(map[router.SessionID]*session)} }

// scheduler is what a policy adds to the ledger.
type scheduler interface {
	// ask places s's turn now (with send) or keeps it waiting.
	ask(s *session)
	// changed comes after anything that may free a place.
	changed()
	// left comes when a session is over or its home is gone, before the ledger
	// forgets the home.
	left(s *session)
}

// observer is a scheduler that reads snapshots itself.
type observer interface {
	observed(ev *router.Snapshot)
}

// driven makes a Policy of a ledger and a scheduler.
type driven struct {
	*ledger
	scheduler
}

// Step implements sim.Policy.
func (p driven) Step(ev router.Event, out []router.Decision) []router.Decision {
	l := p.ledger
	l.out = out
	switch ev := ev.(type) {
	case *router.InstanceJoined:
		l.join(ev)
		p.changed()
	case *router.InstanceLeft:
		p.lose(ev.Instance)
		p.changed()
	case *router.TurnRequested:
		l.now = ev.At
		p.ask(l.request(ev))
	case *router.TurnEnded:
		l.now = ev.At
		l.ended(ev)
		p.changed()
	case *router.SessionEnded:
		l.now = ev.At
		if s := l.sessions[ev.Session]; s != nil {
			p.left(s)
			l.moveHome(s, nil)
			delete(l.sessions, ev.Session)
		}
		p.changed()
	case *router.Snapshot:
		l.now = max(l.now, ev.At)
		l.observe(ev)
		if o, ok := p.scheduler.(observer); ok {
			o.observed(ev)
		}
		p.changed()
	case *router.Tick:
		l.now = ev.At
		p.changed()
	}
	out, l.out = l.out, nil
	return out
}

func (l *ledger) join(ev *router.InstanceJoined) {
	n := l.find(ev.Instance)
	if n == nil {
		n = &node{id: ev.Instance, byClass: make(map[router.ClassID]int)}
		at, _ := slices.BinarySearchFunc(l.nodes, n, func(a, b *node) int {
			if a.id < b.id {
				return -1
			}
			if a.id > b.id {
				return 1
			}
			return 0
		})
		l.nodes = slices.Insert(l.nodes, at, n)
	}
	n.capacityTokens = ev.CapacityBlocks * int64(ev.BlockTokens)
	n.blockTokens = ev.BlockTokens
}

func (p driven) lose(id router.InstanceID) {
	n := p.find(id)
	if n == nil {
		return
	}
	for _, s := range slices.Clone(n.sessions) {
		p.left(s)
		p.moveHome(s, nil)
		s.inFlight = false
	}
	p.nodes = slices.DeleteFunc(p.nodes, func(o *node) bool { return o == n })
}

func (l *ledger) find(id router.InstanceID) *node {
	for _, n := range l.nodes {
		if n.id == id {
			return n
		}
	}
	return nil
}

func (l *ledger) request(ev *router.TurnRequested) *session {
	s := l.sessions[ev.Session]
	if s == nil {
		s = &session{id: ev.Session, class: ev.Class, group: ev.Group, shared: ev.SharedTokens}
		l.sessions[ev.Session] = s
	}
	s.turn = ev.Turn
	s.waiting = true
	s.askedAt = ev.At
	l.resize(s, ev.PromptTokens)
	return s
}

func (l *ledger) ended(ev *router.TurnEnded) {
	s := l.sessions[ev.Session]
	if s == nil || !s.inFlight {
		return
	}
	s.inFlight = false
	s.home.inFlight--
	if !ev.Failed {
		l.resize(s, ev.PromptTokens+ev.OutputTokens)
	}
}

// resize records the context of a session.
func (l *ledger) resize(s *session, tokens int64) {
	if s.home != nil {
		s.home.tokens += tokens - s.tokens
	}
	s.tokens = tokens
}

// observe learns from a snapshot how far the sessions that generate have grown.
func (l *ledger) observe(ev *router.Snapshot) {
	for i := range ev.Sessions {
		seen := &ev.Sessions[i]
		s := l.sessions[seen.Session]
		if s != nil && s.inFlight && s.home.id == ev.Instance {
			l.resize(s, max(s.tokens, seen.Tokens))
		}
	}
}

// moveHome homes a session at n, which may be nil.
func (l *ledger) moveHome(s *session, n *node) {
	if s.home == n {
		return
	}
	if old := s.home; old != nil {
		i := slices.Index(old.sessions, s)
		old.sessions = slices.Delete(old.sessions, i, i+1)
		old.byClass[s.class]--
		old.tokens -= s.tokens
		if s.inFlight {
			old.inFlight--
			s.inFlight = false
		}
	}
	s.home = n
	if n != nil {
		n.sessions = append(n.sessions, s)
		n.byClass[s.class]++
		n.tokens += s.tokens
	}
}

// send admits a waiting turn to n.
func (l *ledger) send(s *session, n *node) {
	reason := router.Continuation
	if s.home != n {
		reason = router.NewSession
		if s.home != nil {
			reason = router.ColdReroute
		}
	}
	l.moveHome(s, n)
	s.waiting, s.inFlight = false, true
	n.inFlight++
	l.out = append(l.out, router.Decision{
		Kind: router.Admit, Reason: reason, At: l.now, Session: s.id, Class: s.class, Turn: s.turn, Instance: n.id,
	})
}

// least is the node with the smallest key, the first of equals; nil without nodes.
func (l *ledger) least(key func(*node) int64) *node {
	var best *node
	var bestKey int64
	for _, n := range l.nodes {
		if k := key(n); best == nil || k < bestKey {
			best, bestKey = n, k
		}
	}
	return best
}

func inFlight(n *node) int64 { return int64(n.inFlight) }
func sessions(n *node) int64 { return int64(len(n.sessions)) }
func tokens(n *node) int64   { return n.tokens }

// groupHome is the node that already serves a member of the session's group and
// so holds its prompt, nil if none or no group.
func (l *ledger) groupHome(s *session) *node {
	if s.group == (router.GroupID{}) {
		return nil
	}
	for _, n := range l.nodes {
		for i := len(n.sessions) - 1; i >= 0; i-- {
			if n.sessions[i].group == s.group && n.sessions[i] != s {
				return n
			}
		}
	}
	return nil
}

// fifo is a queue of sessions whose turn waits; those that left are skipped.
type fifo struct {
	items []*session
	head  int
}

func (q *fifo) push(s *session) { q.items = append(q.items, s) }

// peek is the first session still waiting, nil if none.
func (q *fifo) peek() *session {
	for q.head < len(q.items) && q.items[q.head] == nil {
		q.head++
	}
	if q.head == len(q.items) {
		q.items, q.head = q.items[:0], 0
		return nil
	}
	if q.head > 1024 && q.head > len(q.items)/2 {
		n := copy(q.items, q.items[q.head:])
		q.items, q.head = q.items[:n], 0
	}
	return q.items[q.head]
}

func (q *fifo) pop() *session {
	s := q.peek()
	if s != nil {
		q.items[q.head] = nil
		q.head++
	}
	return s
}

// drop takes a session out, wherever it is.
func (q *fifo) drop(s *session) {
	for i := q.head; i < len(q.items); i++ {
		if q.items[i] == s {
			q.items[i] = nil
			return
		}
	}
}
