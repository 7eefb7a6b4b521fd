package trace

import "fmt"

// round is one model call as both TraceLab formats tell it.
type round struct {
	line          int
	contextTokens int // everything that went in
	cachedTokens  int // of it, what a prefix cache held already
	outputTokens  int
	gapSeconds    float64
}

// roundSessions links the rounds of one recorded session. What is appended is
// what a context grew by beyond the last answer; where it grew by less (answers
// hold reasoning that is not repeated, histories are trimmed) nothing is
// appended and the difference is counted as dropped. A context that falls below
// half of what it was, by compaction or because a sub-agent runs under the same
// id, has lost its prefix: what follows is a session of its own, "id#2" and so on.
//
// The part of the first context that a cache held already is the shared prefix:
// nobody but an earlier session can have put it there.
func roundSessions(id, sharedKey string, startSeconds float64, rounds []round) []*Session {
	var sessions []*Session
	var s *Session
	for i, r := range rounds {
		if i > 0 {
			before := rounds[i-1]
			whole := before.contextTokens + before.outputTokens
			last := &s.Turns[len(s.Turns)-1]
			switch {
			case r.contextTokens < whole/2:
				s = nil
			case r.contextTokens < whole:
				s.DroppedTokens += whole - r.contextTokens
				last.AppendTokens = 0
			default:
				last.AppendTokens = r.contextTokens - whole
			}
		}
		if s == nil {
			s = &Session{ID: id, PromptTokens: r.contextTokens, StartSeconds: startSeconds}
			if len(sessions) > 0 {
				s.ID = fmt.Sprintf("%s#%d", id, len(sessions)+1)
			}
			if r.cachedTokens > 0 {
				s.SharedTokens, s.SharedKey = r.cachedTokens, sharedKey
			}
			sessions = append(sessions, s)
		}
		s.Turns = append(s.Turns, Turn{
			OutputTokens: r.outputTokens, GapSeconds: r.gapSeconds, IntervalSeconds: UnknownSeconds,
		})
	}
	return sessions
}
