package trace

import (
	"encoding/csv"
	"errors"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
)

// csvColumns finds the columns of a replay CSV by their names; the published
// files name the session column in two ways.
type csvColumns struct {
	session, round, prefix, input, output, wait int
	arrival                                     int // -1 if absent
}

// readTraceLabCSV reads TraceLab's replay CSV: one row per model call, the rows
// of a session together and in order. Memory holds one session and the ids of
// all. What is appended comes from the contexts (prefix_len + input_len), as in
// the round trace; the gap is tool_wait_after_ms.
func readTraceLabCSV(src *source, yield yieldFunc) error {
	window := &windowReader{r: src.file}
	reader := csv.NewReader(window)
	reader.ReuseRecord = true
	header, err := reader.Read()
	if err != nil {
		return csvError(src.name, err)
	}
	header = slices.Clone(header) // the reader reuses its record
	columns, err := findCSVColumns(src.name, header)
	if err != nil {
		return err
	}
	var current csvSession
	done := map[string]bool{}
	for rows := 0; ; rows++ {
		window.reset()
		record, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return current.yield(yield)
		}
		if err != nil {
			return csvError(src.name, err)
		}
		number, _ := reader.FieldPos(0)
		if rows >= maxRows {
			return fileErrorf(src.name, number, "", "file has more than %d rows", maxRows)
		}
		row := csvRow{name: src.name, line: number, record: record}
		id := strings.Clone(record[columns.session])
		if id != current.id || rows == 0 {
			if err := current.yield(yield); err != nil {
				return err
			}
			if done[id] {
				return fileErrorf(src.name, number, header[columns.session], "session %.80q goes on after another; its rows must stand together", id)
			}
			done[id] = true
			current = csvSession{id: id}
		}
		if err := current.add(&row, columns); err != nil {
			return err
		}
	}
}

func findCSVColumns(name string, header []string) (csvColumns, error) {
	at := map[string]int{}
	for i, title := range header {
		title = strings.TrimSpace(strings.TrimPrefix(title, "\ufeff"))
		if _, twice := at[title]; twice {
			return csvColumns{}, fileErrorf(name, 1, title, "column occurs twice")
		}
		at[title] = i
	}
	c := csvColumns{arrival: -1}
	for _, wanted := range []struct {
		titles []string
		into   *int
	}{
		{[]string{"session_id", "id"}, &c.session},
		{[]string{"round_idx"}, &c.round},
		{[]string{"prefix_len"}, &c.prefix},
		{[]string{"input_len"}, &c.input},
		{[]string{"output_len"}, &c.output},
		{[]string{"tool_wait_after_ms"}, &c.wait},
	} {
		found := false
		for _, title := range wanted.titles {
			if i, ok := at[title]; ok && !found {
				*wanted.into, found = i, true
			}
		}
		if !found {
			return c, fileErrorf(name, 1, strings.Join(wanted.titles, " or "), "column is missing")
		}
	}
	if i, ok := at["arrival_time"]; ok {
		c.arrival = i
	}
	return c, nil
}

// csvRow reads fields and keeps the first error, so that a row is read without
// a check after each.
type csvRow struct {
	name   string
	line   int
	record []string
	err    error
}

func (r *csvRow) int(column int, title string, least int) int {
	text := r.record[column]
	v, err := strconv.ParseInt(text, 10, 64)
	if (err != nil || v < int64(least) || v > maxTokens) && r.err == nil {
		r.err = fileErrorf(r.name, r.line, title, "must be a whole number from %d to %d, is %.40q", least, maxTokens, text)
	}
	return int(v)
}

func (r *csvRow) float(column int, title string) float64 {
	text := r.record[column]
	v, err := strconv.ParseFloat(text, 64)
	if (err != nil || !finiteFrom(v, 0)) && r.err == nil {
		r.err = fileErrorf(r.name, r.line, title, "must be a number of at least 0, is %.40q", text)
	}
	return v
}

// csvSession collects the rows of one session.
type csvSession struct {
	id           string
	startSeconds float64
	rounds       []round
}

func (s *csvSession) add(row *csvRow, c csvColumns) error {
	if s.id == "" {
		return fileErrorf(row.name, row.line, "session_id", "must not be empty")
	}
	if index := row.int(c.round, "round_idx", 0); row.err == nil && index != len(s.rounds) {
		return fileErrorf(row.name, row.line, "round_idx", "must be %d, the next of session %.80s, is %d", len(s.rounds), s.id, index)
	}
	prefix := row.int(c.prefix, "prefix_len", 0)
	input := row.int(c.input, "input_len", 1)
	output := row.int(c.output, "output_len", 0)
	wait := row.float(c.wait, "tool_wait_after_ms")
	if c.arrival >= 0 {
		s.startSeconds = row.float(c.arrival, "arrival_time") / 1e3
	}
	if row.err != nil {
		return row.err
	}
	s.rounds = append(s.rounds, round{
		line: row.line, contextTokens: prefix + input, cachedTokens: prefix, outputTokens: output,
		gapSeconds: knownSeconds(math.Round(wait) / 1e3),
	})
	return nil
}

func (s *csvSession) yield(yield yieldFunc) error {
	if len(s.rounds) == 0 {
		return nil
	}
	for _, session := range roundSessions(s.id, "earlier-sessions", s.startSeconds, s.rounds) {
		if err := yield(session, s.rounds[len(s.rounds)-1].line); err != nil {
			return err
		}
	}
	return nil
}

func csvError(name string, err error) error {
	var parse *csv.ParseError
	switch {
	case errors.As(err, &parse):
		return fileErrorf(name, parse.Line, "", "is not valid CSV: %v", parse.Err)
	case errors.Is(err, io.EOF):
		return fileErrorf(name, 1, "", "the header line is missing")
	case errors.Is(err, errRecordTooLong):
		return fileErrorf(name, 0, "", "%v", errRecordTooLong)
	}
	return fileErrorf(name, 0, "", "cannot be read: %v", err)
}
