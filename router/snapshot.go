package router

// snapshot takes in what an instance says of itself. Sessions it does not list
// keep their place: a snapshot may be late, and a session in a tool gap may be
// invisible to its engine.
func (c *Core) snapshot(ev *Snapshot) {
	w := c.findInstance(ev.Instance)
	if w == nil || !w.joined || ev.TakenAt < w.lastSnapshotAt {
		return
	}
	w.lastSnapshotAt = ev.TakenAt
	w.running, w.waiting, w.usedBlocks, w.preemptions = ev.Running, ev.Waiting, ev.UsedBlocks, ev.Preemptions
	c.noteQueue(w)
	for i := range ev.Sessions {
		seen := &ev.Sessions[i]
		s := c.sessions[seen.Session]
		if s == nil || s.inst != w {
			continue
		}
		if s.phase == pending {
			s.phase = active
			w.pending--
			c.refit(s)
			c.dirty = true
		}
		if s.sent && seen.Tokens > s.contextTokens {
			c.grow(s, sane(seen.Tokens))
		}
		if seen.CachedBlocks >= 0 && ev.TakenAt >= s.cachedAt {
			s.cachedBlocks, s.cachedAt = sane(seen.CachedBlocks), ev.TakenAt
		}
	}
}
