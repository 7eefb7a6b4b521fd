package trace

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// traceLabRow is one model call of a round trace.
type traceLabRow struct {
	Provider   string  `json:"provider"`
	Model      string  `json:"model"`
	SessionID  *string `json:"session_id"`
	RoundIndex *int64  `json:"round_index"`
	RoundID    string  `json:"round_id"`
	Input      *int64  `json:"input_tokens_total"`
	Prefix     *int64  `json:"prefix_tokens"`
	Appended   *int64  `json:"newly_append_tokens"`
	Output     *int64  `json:"output_tokens"`
	Events     []struct {
		Type      string     `json:"event_type"`
		Timestamp *time.Time `json:"timestamp"`
	} `json:"timing_events"`
	Tools []struct {
		ResultAt *time.Time `json:"result_at"`
	} `json:"tools"`
}

// traceLabSession collects the rounds of one session id.
type traceLabSession struct {
	id        string
	sharedKey string
	start     time.Time
	rounds    []traceLabRound
}

type traceLabRound struct {
	round
	index int64
	id    string
}

// readTraceLab reads TraceLab's round traces. Rounds may stand in any order;
// memory holds the numbers of all of them. A round that occurs twice, as in the
// merged public set, counts once. The gap is the time from the model's last
// event to the last tool's result, so tools that ran side by side count once;
// after a round without a tool a person was asked, and the gap is unknown.
func readTraceLab(src *source, yield yieldFunc) error {
	var sessions []*traceLabSession
	byID := map[string]*traceLabSession{}
	err := eachLine(src.name, src.file, func(l line) error {
		row, err := decodeTraceLabRow(src.name, l)
		if err != nil {
			return err
		}
		key := row.Provider + "\x00" + *row.SessionID
		s := byID[key]
		if s == nil {
			s = &traceLabSession{id: *row.SessionID, sharedKey: row.Provider + "/" + row.Model}
			byID[key] = s
			sessions = append(sessions, s)
		}
		if len(row.Events) > 0 {
			if at := *row.Events[0].Timestamp; s.start.IsZero() || at.Before(s.start) {
				s.start = at
			}
		}
		s.rounds = append(s.rounds, traceLabRound{
			index: *row.RoundIndex,
			id:    row.RoundID,
			round: round{
				line:          l.number,
				contextTokens: int(*row.Input),
				cachedTokens:  int(*row.Prefix),
				outputTokens:  int(*row.Output),
				gapSeconds:    toolGapSeconds(row),
			},
		})
		return nil
	})
	if err != nil {
		return err
	}
	return yieldTraceLab(src, sessions, yield)
}

func yieldTraceLab(src *source, sessions []*traceLabSession, yield yieldFunc) error {
	var first time.Time
	for _, s := range sessions {
		if !s.start.IsZero() && (first.IsZero() || s.start.Before(first)) {
			first = s.start
		}
	}
	for _, s := range sessions {
		slices.SortStableFunc(s.rounds, func(a, b traceLabRound) int { return cmp.Compare(a.index, b.index) })
		var rounds []round
		for i, r := range s.rounds {
			if i > 0 && r.index == s.rounds[i-1].index {
				if r.id != s.rounds[i-1].id {
					return fileErrorf(src.name, r.line, "round_index", "%d occurs twice in session %.80s with different round_id", r.index, s.id)
				}
				src.report.SkippedRows++
				continue
			}
			rounds = append(rounds, r.round)
		}
		startSeconds := 0.0
		if !s.start.IsZero() {
			startSeconds = s.start.Sub(first).Seconds()
		}
		for _, session := range roundSessions(s.id, s.sharedKey, startSeconds, rounds) {
			if err := yield(session, rounds[len(rounds)-1].line); err != nil {
				return err
			}
		}
	}
	return nil
}

func decodeTraceLabRow(name string, l line) (traceLabRow, error) {
	var row traceLabRow
	if err := decodeLine(name, l, &row); err != nil {
		return row, err
	}
	if row.SessionID == nil || *row.SessionID == "" {
		return row, fileErrorf(name, l.number, "session_id", "is required and must not be empty")
	}
	for _, f := range []struct {
		path  string
		value *int64
		least int64
	}{
		{"round_index", row.RoundIndex, 0},
		{"input_tokens_total", row.Input, 1},
		{"prefix_tokens", row.Prefix, 0},
		{"newly_append_tokens", row.Appended, 0},
		{"output_tokens", row.Output, 0},
	} {
		if f.value == nil || *f.value < f.least || *f.value > maxTokens {
			return row, fileErrorf(name, l.number, f.path, "must be from %d to %d%s", f.least, maxTokens, isValue(f.value))
		}
	}
	if *row.Input != *row.Prefix+*row.Appended {
		return row, fileErrorf(name, l.number, "input_tokens_total", "must be prefix_tokens + newly_append_tokens (%d), is %d",
			*row.Prefix+*row.Appended, *row.Input)
	}
	for i, event := range row.Events {
		if event.Timestamp == nil {
			return row, fileErrorf(name, l.number, fmt.Sprintf("timing_events[%d].timestamp", i), "is required")
		}
	}
	return row, nil
}

// toolGapSeconds is the time between a round's last sign of the model and the
// last tool result, or UnknownSeconds without both.
func toolGapSeconds(row traceLabRow) float64 {
	var model, result time.Time
	for _, event := range row.Events {
		switch event.Type {
		case "reasoning", "text", "tool_call":
			if event.Timestamp.After(model) {
				model = *event.Timestamp
			}
		}
	}
	for _, tool := range row.Tools {
		if tool.ResultAt != nil && tool.ResultAt.After(result) {
			result = *tool.ResultAt
		}
	}
	if model.IsZero() || result.IsZero() {
		return UnknownSeconds
	}
	return knownSeconds(result.Sub(model).Seconds())
}
