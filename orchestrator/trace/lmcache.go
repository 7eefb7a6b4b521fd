package trace

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
)

// lmcacheRow is one model call. Pointers tell a missing member from an empty one.
type lmcacheRow struct {
	Timestamp *int64  `json:"timestamp"` // microseconds
	Input     *string `json:"input"`
	Output    *string `json:"output"`
	SessionID *string `json:"session_id"`
}

// lmcacheEntry is where a row stands; the text stays in the file.
type lmcacheEntry struct {
	session   int
	timestamp int64
	line      int
	offset    int64
	bytes     int
}

// readLMCache reads LMCache's agent traces. Rows may stand in any order and
// sessions may be mixed, so a first pass checks every row and keeps its place,
// and a second reads each session's rows in the order of time. Memory holds the
// places of all rows and the text of one session's open conversations.
//
// One session id may carry several conversations: in tau-bench's traces the
// agent's calls and those of the model that plays the user alternate. A row
// continues the conversation whose last input is the longest prefix of its own,
// otherwise it opens one; each conversation becomes a session.
//
// Inputs hold what was said to the model and, in the published files, not what
// it answered. What is appended is therefore the new input beyond the last one,
// without the last answer where it is repeated there. An empty output is a tool
// call whose text was not recorded: its length is unknown, and so is that of the
// tool's result when the input did not grow. Gaps are unknown; the interval
// between two requests is recorded.
func readLMCache(src *source, yield yieldFunc) error {
	entries, names, err := indexLMCache(src)
	if err != nil || len(entries) == 0 {
		return err
	}
	start := slices.MinFunc(entries, func(a, b lmcacheEntry) int { return cmp.Compare(a.timestamp, b.timestamp) }).timestamp
	slices.SortFunc(entries, func(a, b lmcacheEntry) int {
		return cmp.Or(cmp.Compare(a.session, b.session), cmp.Compare(a.timestamp, b.timestamp), cmp.Compare(a.line, b.line))
	})
	for len(entries) > 0 {
		end := 1
		for end < len(entries) && entries[end].session == entries[0].session {
			end++
		}
		if err := readLMCacheSession(src, entries[:end], names[entries[0].session], start, yield); err != nil {
			return err
		}
		entries = entries[end:]
	}
	return nil
}

// indexLMCache is the first pass. Sessions are numbered as they first appear.
func indexLMCache(src *source) ([]lmcacheEntry, []string, error) {
	var entries []lmcacheEntry
	var names []string
	numbers := map[string]int{}
	err := eachLine(src.name, src.file, func(l line) error {
		row, err := decodeLMCacheRow(src.name, l)
		if err != nil {
			return err
		}
		number, known := numbers[*row.SessionID]
		if !known {
			number = len(names)
			numbers[*row.SessionID] = number
			names = append(names, *row.SessionID)
		}
		entries = append(entries, lmcacheEntry{
			session: number, timestamp: *row.Timestamp, line: l.number, offset: l.offset, bytes: len(l.text),
		})
		return nil
	})
	return entries, names, err
}

func decodeLMCacheRow(name string, l line) (lmcacheRow, error) {
	var row lmcacheRow
	if err := decodeLine(name, l, &row); err != nil {
		return row, err
	}
	switch {
	case row.Timestamp == nil:
		return row, fileErrorf(name, l.number, "timestamp", "is required")
	case *row.Timestamp < 0:
		return row, fileErrorf(name, l.number, "timestamp", "must not be negative, is %d", *row.Timestamp)
	case row.Input == nil || *row.Input == "":
		return row, fileErrorf(name, l.number, "input", "is required and must not be empty")
	case row.Output == nil:
		return row, fileErrorf(name, l.number, "output", "is required (empty for a tool call)")
	case row.SessionID == nil || *row.SessionID == "":
		return row, fileErrorf(name, l.number, "session_id", "is required and must not be empty")
	}
	return row, nil
}

// conversation is one open line of calls within a session id.
type conversation struct {
	session   Session
	input     string
	output    string
	timestamp int64
	line      int
}

// maxOpenConversations bounds the text held for one session id. The one that
// was used least recently is closed when another opens.
const maxOpenConversations = 64

func readLMCacheSession(src *source, entries []lmcacheEntry, id string, start int64, yield yieldFunc) error {
	var all, open []*conversation // open is ordered by last use
	for _, entry := range entries {
		l := line{number: entry.line, offset: entry.offset, text: make([]byte, entry.bytes)}
		if _, err := src.file.ReadAt(l.text, entry.offset); err != nil && err != io.EOF {
			return fileErrorf(src.name, entry.line, "", "cannot be read again: %v", err)
		}
		row, err := decodeLMCacheRow(src.name, l)
		if err != nil {
			return err
		}
		at := findConversation(open, *row.Input)
		var c *conversation
		if at < 0 {
			tokens, err := countTokens(*row.Input)
			if err != nil {
				return fileErrorf(src.name, entry.line, "input", "cannot be counted: %v", err)
			}
			c = &conversation{session: Session{PromptTokens: tokens, StartSeconds: float64(*row.Timestamp-start) / 1e6}}
			all = append(all, c)
			if len(open) == maxOpenConversations {
				open[0].input, open[0].output = "", ""
				open = open[1:]
			}
		} else {
			c = open[at]
			open = slices.Delete(open, at, at+1)
			if err := c.link(row); err != nil {
				return fileErrorf(src.name, entry.line, "input", "cannot be counted: %v", err)
			}
		}
		if err := c.call(row, entry.line); err != nil {
			return fileErrorf(src.name, entry.line, "output", "cannot be counted: %v", err)
		}
		open = append(open, c)
	}
	for i, c := range all {
		c.session.ID = id
		if len(all) > 1 {
			c.session.ID = fmt.Sprintf("%s/%d", id, i)
		}
		if err := yield(&c.session, c.line); err != nil {
			return err
		}
	}
	return nil
}

// findConversation returns the index of the open conversation whose last input
// is the longest prefix of the input, the most recently used among equals, or
// -1.
func findConversation(open []*conversation, input string) int {
	best := -1
	for i, c := range open {
		if strings.HasPrefix(input, c.input) && (best < 0 || len(c.input) >= len(open[best].input)) {
			best = i
		}
	}
	return best
}

// link completes the conversation's last turn, now that the next input is known.
func (c *conversation) link(row lmcacheRow) error {
	added := (*row.Input)[len(c.input):]
	if c.output != "" {
		if rest, ok := strings.CutPrefix(strings.TrimLeftFunc(added, unicode.IsSpace), c.output); ok {
			added = rest
		}
	}
	turn := &c.session.Turns[len(c.session.Turns)-1]
	turn.IntervalSeconds = knownSeconds(float64(*row.Timestamp-c.timestamp) / 1e6)
	if added == "" && c.output == "" {
		turn.AppendTokens = Unknown
		return nil
	}
	tokens, err := countTokens(added)
	turn.AppendTokens = tokens
	return err
}

// call appends the row's own turn.
func (c *conversation) call(row lmcacheRow, number int) error {
	turn := Turn{OutputTokens: Unknown, GapSeconds: UnknownSeconds, IntervalSeconds: UnknownSeconds}
	if *row.Output != "" {
		tokens, err := countTokens(*row.Output)
		if err != nil {
			return err
		}
		turn.OutputTokens = tokens
	}
	c.session.Turns = append(c.session.Turns, turn)
	c.input, c.output, c.timestamp, c.line = *row.Input, *row.Output, *row.Timestamp, number
	return nil
}

// knownSeconds takes a time that cannot be one between two turns for unknown:
// clocks that run backwards, and sessions resumed after a day.
func knownSeconds(seconds float64) float64 {
	if !(seconds >= 0 && seconds <= maxGapSeconds) {
		return UnknownSeconds
	}
	return seconds
}
