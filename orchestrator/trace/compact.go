package trace

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"

	strictjson "github.com/go-json-experiment/json"
)

// CompactVersion is the version of the compact trace format that is written
// and read. A file of another version is refused.
const CompactVersion = 1

// Header is the first line of a compact trace.
type Header struct {
	Version int `json:"holdfast_trace"`
	// Name is what a composition asks for the trace by.
	Name string `json:"name"`
	// Repository, Commit and Licence say where the numbers come from.
	Repository string `json:"repository"`
	Commit     string `json:"commit"`
	Licence    string `json:"licence"`
	// Format is the format that was imported.
	Format string `json:"format"`
	// TokenCounts is "recorded", or the vocabulary by which text was counted.
	TokenCounts string `json:"token_counts"`
	// Synthetic is set where the source itself is not a record of real work.
	Synthetic bool `json:"synthetic,omitempty"`
	// Selection says which sessions of the source were left out; empty is none.
	Selection string `json:"selection,omitempty"`
	// Turn names the numbers of each turn, in order.
	Turn []string `json:"turn"`
}

// turnColumns are the numbers of one turn in a session line.
var turnColumns = []string{"output_tokens", "append_tokens", "gap_ms", "interval_ms"}

// compactSession is one session line. Null in a turn means unknown.
type compactSession struct {
	ID        *string     `json:"id"`
	Group     string      `json:"group"`
	StartMS   int64       `json:"start_ms"`
	Prompt    int         `json:"prompt"`
	Shared    int         `json:"shared"`
	SharedKey string      `json:"shared_key"`
	Reward    *float64    `json:"reward"`
	Dropped   int         `json:"dropped"`
	Turns     [][4]*int64 `json:"turns"`
}

// footer is the last line: it shows that nothing was cut off.
type footer struct {
	Sessions *int `json:"sessions"`
	Turns    *int `json:"turns"`
}

// Trace is a compact trace in memory.
type Trace struct {
	Header   Header
	Sessions []Session
}

// Load reads a compact trace from a file.
func Load(path string) (Trace, error) {
	file, err := os.Open(path)
	if err != nil {
		return Trace{}, fmt.Errorf("opening trace: %w", err)
	}
	defer file.Close() // read only: nothing is lost with the error
	return loadFrom(path, file)
}

func loadFrom(name string, r io.Reader) (Trace, error) {
	var t Trace
	var report Report
	header, err := readCompact(name, r, checked(name, map[string]string{}, &report, func(s Session) error {
		t.Sessions = append(t.Sessions, s)
		return nil
	}))
	if err != nil {
		return Trace{}, err
	}
	t.Header = header
	return t, nil
}

// readCompactSessions is the reader of FormatHoldfast.
func readCompactSessions(src *source, yield yieldFunc) error {
	_, err := readCompact(src.name, src.file, yield)
	return err
}

// readCompact reads header, sessions and footer. Unlike the readers of other
// people's formats it refuses members that it does not know.
func readCompact(name string, r io.Reader, yield yieldFunc) (Header, error) {
	var header Header
	var end footer
	lines, sessions, turns := 0, 0, 0
	err := eachLine(name, r, func(l line) error {
		lines++
		switch {
		case lines == 1:
			return decodeHeader(name, l, &header)
		case end.Sessions != nil:
			return fileErrorf(name, l.number, "", "stands after the footer")
		case bytes.HasPrefix(l.text, []byte(`{"sessions"`)):
			return decodeFooter(name, l, &end)
		}
		s, err := decodeCompactSession(name, l)
		if err != nil {
			return err
		}
		sessions++
		turns += len(s.Turns)
		return yield(s, l.number)
	})
	switch {
	case err != nil:
		return header, err
	case end.Sessions == nil:
		return header, fileErrorf(name, 0, "", "ends without the footer that counts its sessions; it was cut off")
	case *end.Sessions != sessions || *end.Turns != turns:
		return header, fileErrorf(name, 0, "", "has %d sessions with %d turns where its footer counts %d with %d", sessions, turns, *end.Sessions, *end.Turns)
	}
	return header, nil
}

func decodeStrictly(name string, l line, into any) error {
	err := strictjson.Unmarshal(bytes.TrimRight(l.text, "\r\n"), into, strictjson.RejectUnknownMembers(true))
	if err != nil {
		return jsonFileError(name, l.number, "", err, 0)
	}
	return nil
}

func decodeHeader(name string, l line, header *Header) error {
	// The version is looked at first: a later version may have other members.
	var version struct {
		Version *int `json:"holdfast_trace"`
	}
	if err := decodeLine(name, l, &version); err != nil {
		return err
	}
	switch {
	case version.Version == nil:
		return fileErrorf(name, l.number, "holdfast_trace", "is required: this is not a compact trace")
	case *version.Version != CompactVersion:
		return fileErrorf(name, l.number, "holdfast_trace", "must be version %d, is %d", CompactVersion, *version.Version)
	}
	if err := decodeStrictly(name, l, header); err != nil {
		return err
	}
	if !slices.Equal(header.Turn, turnColumns) {
		return fileErrorf(name, l.number, "turn", "must be %q", turnColumns)
	}
	return header.check(name, l.number)
}

// check asks for what a trace must say of its origin.
func (h *Header) check(name string, number int) error {
	for _, f := range []struct{ path, value string }{
		{"name", h.Name}, {"repository", h.Repository}, {"commit", h.Commit},
		{"licence", h.Licence}, {"format", h.Format}, {"token_counts", h.TokenCounts},
	} {
		if f.value == "" {
			return fileErrorf(name, number, f.path, "is required")
		}
	}
	return nil
}

func decodeFooter(name string, l line, end *footer) error {
	if err := decodeStrictly(name, l, end); err != nil {
		return err
	}
	if end.Sessions == nil || end.Turns == nil {
		return fileErrorf(name, l.number, "sessions, turns", "are required")
	}
	return nil
}

func decodeCompactSession(name string, l line) (*Session, error) {
	var c compactSession
	if err := decodeStrictly(name, l, &c); err != nil {
		return nil, err
	}
	if c.ID == nil {
		return nil, fileErrorf(name, l.number, "id", "is required")
	}
	s := &Session{
		ID: *c.ID, Group: c.Group, StartSeconds: float64(c.StartMS) / 1e3,
		PromptTokens: c.Prompt, SharedTokens: c.Shared, SharedKey: c.SharedKey,
		Reward: c.Reward, DroppedTokens: c.Dropped,
	}
	for _, t := range c.Turns {
		s.Turns = append(s.Turns, Turn{
			OutputTokens:    knownInt(t[0]),
			AppendTokens:    knownInt(t[1]),
			GapSeconds:      secondsFromMS(t[2]),
			IntervalSeconds: secondsFromMS(t[3]),
		})
	}
	return s, nil
}

func knownInt(v *int64) int {
	if v == nil {
		return Unknown
	}
	return int(*v)
}

func secondsFromMS(v *int64) float64 {
	if v == nil {
		return UnknownSeconds
	}
	return float64(*v) / 1e3
}

// compactWriter writes a compact trace.
type compactWriter struct {
	w        *bufio.Writer
	sessions int
	turns    int
}

func newCompactWriter(w io.Writer, header Header) (*compactWriter, error) {
	header.Version, header.Turn = CompactVersion, turnColumns
	text, err := json.Marshal(header)
	if err != nil {
		return nil, fmt.Errorf("writing trace header: %w", err)
	}
	c := &compactWriter{w: bufio.NewWriter(w)}
	c.w.Write(append(text, '\n')) // bufio keeps the first error until Flush
	return c, nil
}

// add writes one session; members without a value are left out.
func (c *compactWriter) add(s *Session) error {
	c.sessions++
	c.turns += len(s.Turns)
	id, err := json.Marshal(s.ID)
	if err != nil {
		return fmt.Errorf("writing session: %w", err)
	}
	line := append([]byte(`{"id":`), id...)
	line = appendString(line, "group", s.Group)
	line = appendInt(line, "start_ms", int64(math.Round(s.StartSeconds*1e3)))
	line = appendInt(line, "prompt", int64(s.PromptTokens))
	line = appendInt(line, "shared", int64(s.SharedTokens))
	line = appendString(line, "shared_key", s.SharedKey)
	if s.Reward != nil {
		line = append(line, `,"reward":`...)
		line = strconv.AppendFloat(line, *s.Reward, 'g', -1, 64)
	}
	line = appendInt(line, "dropped", int64(s.DroppedTokens))
	line = append(line, `,"turns":[`...)
	for i, turn := range s.Turns {
		if i > 0 {
			line = append(line, ',')
		}
		line = turn.append(line)
	}
	_, err = c.w.Write(append(line, "]}\n"...))
	return err
}

// append writes a turn's four numbers.
func (t Turn) append(line []byte) []byte {
	separator := byte('[')
	for _, v := range []float64{
		float64(t.OutputTokens), float64(t.AppendTokens),
		math.Round(t.GapSeconds * 1e3), math.Round(t.IntervalSeconds * 1e3),
	} {
		line = append(line, separator)
		separator = ','
		if v < 0 {
			line = append(line, "null"...)
			continue
		}
		line = strconv.AppendInt(line, int64(v), 10)
	}
	return append(line, ']')
}

func (c *compactWriter) finish() error {
	fmt.Fprintf(c.w, `{"sessions":%d,"turns":%d}`+"\n", c.sessions, c.turns)
	return c.w.Flush()
}

func appendString(line []byte, name, value string) []byte {
	if value == "" {
		return line
	}
	text, _ := json.Marshal(value) // a string always marshals
	return append(append(line, `,"`+name+`":`...), text...)
}

func appendInt(line []byte, name string, value int64) []byte {
	if value == 0 {
		return line
	}
	return strconv.AppendInt(append(line, `,"`+name+`":`...), value, 10)
}
