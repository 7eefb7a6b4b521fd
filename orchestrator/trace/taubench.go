package trace

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io"

	strictjson "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// tauTrajectory is one run of one task.
type tauTrajectory struct {
	TaskID   *int64       `json:"task_id"`
	Trial    *int64       `json:"trial"`
	Reward   *float64     `json:"reward"`
	Messages []tauMessage `json:"traj"`
}

type tauMessage struct {
	Role      string  `json:"role"`
	Content   *string `json:"content"`
	ToolCalls []struct {
		Function struct {
			Name      string `json:"name"`
			Arguments string `json:"arguments"`
		} `json:"function"`
	} `json:"tool_calls"`
}

// readTauBench reads tau-bench's result files: an array of trajectories, read
// one at a time. Every assistant message is a model call; what stands before
// the first is the prompt, what stands between two is appended, what follows
// the last is left out. The trials of one task are one group. The system
// message is the shared prefix; the tools' schemas, which the model saw as
// well, are not in the file and not counted. There are no times. Trajectories
// without an assistant message are runs that failed before one; they are
// skipped and counted.
func readTauBench(src *source, yield yieldFunc) error {
	window := &windowReader{r: src.file}
	decoder := jsontext.NewDecoder(window, jsontext.AllowInvalidUTF8(true))
	token, err := decoder.ReadToken()
	if err != nil {
		return tauReadError(src.name, "", err)
	}
	if token.Kind() != '[' {
		return fileErrorf(src.name, 0, "", "must be an array of trajectories")
	}
	for i := 0; ; i++ {
		path := fmt.Sprintf("[%d]", i)
		window.reset()
		if decoder.PeekKind() == ']' {
			break
		}
		raw, err := decoder.ReadValue()
		if err != nil {
			return tauReadError(src.name, path, err)
		}
		if i >= maxRows {
			return fileErrorf(src.name, 0, path, "file has more than %d trajectories", maxRows)
		}
		session, err := tauSession(src.name, path, raw, decoder.InputOffset()-int64(len(raw)))
		if err != nil {
			return err
		}
		if session == nil {
			src.report.SkippedRows++
			continue
		}
		if err := yield(session, 0); err != nil {
			return prefixPath(err, path)
		}
	}
	if _, err := decoder.ReadToken(); err != nil {
		return tauReadError(src.name, "", err)
	}
	if _, err := decoder.ReadToken(); !errors.Is(err, io.EOF) {
		return fileErrorf(src.name, 0, "", "has something after the array of trajectories (at byte %d)", decoder.InputOffset())
	}
	return nil
}

// tauReadError tells a file that ends too soon from one that is not JSON. The
// decoder's own pointer already starts at the file's root.
func tauReadError(name, path string, err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		return fileErrorf(name, 0, path, "the file ends before the array of trajectories does")
	}
	if errors.Is(err, errRecordTooLong) {
		return fileErrorf(name, 0, path, "%v", errRecordTooLong)
	}
	return jsonFileError(name, 0, "", err, 0)
}

// prefixPath puts the trajectory's place before the field that is wrong.
func prefixPath(err error, path string) error {
	var fileError *FileError
	if errors.As(err, &fileError) {
		if fileError.Path != "" {
			path += "." + fileError.Path
		}
		fileError.Path = path
	}
	return err
}

// tauSession turns one trajectory into a session, nil if it holds no call.
func tauSession(name, path string, raw jsontext.Value, offset int64) (*Session, error) {
	if raw.Kind() != '{' {
		return nil, fileErrorf(name, 0, path, "must be an object (at byte %d)", offset)
	}
	var t tauTrajectory
	if err := strictjson.Unmarshal(raw, &t, jsontext.AllowInvalidUTF8(true)); err != nil {
		return nil, jsonFileError(name, 0, path, err, offset)
	}
	switch {
	case t.TaskID == nil:
		return nil, fileErrorf(name, 0, path+".task_id", "is required")
	case t.Trial == nil:
		return nil, fileErrorf(name, 0, path+".trial", "is required")
	case t.Messages == nil:
		return nil, fileErrorf(name, 0, path+".traj", "is required")
	}
	s := Session{
		ID:     fmt.Sprintf("task-%d/trial-%d", *t.TaskID, *t.Trial),
		Group:  fmt.Sprintf("task-%d", *t.TaskID),
		Reward: t.Reward,
	}
	for i, m := range t.Messages {
		if err := s.addTauMessage(m, i); err != nil {
			return nil, fileErrorf(name, 0, fmt.Sprintf("%s.traj[%d]", path, i), "%v", err)
		}
	}
	if len(s.Turns) == 0 {
		return nil, nil
	}
	return &s, nil
}

// addTauMessage counts one message into the prompt, into a turn's output, or
// into what was appended after the last turn.
func (s *Session) addTauMessage(m tauMessage, place int) error {
	tokens, err := tauTokens(m)
	if err != nil {
		return err
	}
	switch m.Role {
	case "assistant":
		if tokens == 0 {
			tokens = Unknown
		}
		s.Turns = append(s.Turns, Turn{OutputTokens: tokens, GapSeconds: UnknownSeconds, IntervalSeconds: UnknownSeconds})
		return nil
	case "system", "user", "tool":
		if n := len(s.Turns); n > 0 {
			s.Turns[n-1].AppendTokens += tokens
			return nil
		}
		s.PromptTokens += tokens
		if m.Role == "system" && place == 0 && m.Content != nil && tokens > 0 {
			h := fnv.New32a()
			io.WriteString(h, *m.Content)
			s.SharedTokens, s.SharedKey = tokens, fmt.Sprintf("system-%08x", h.Sum32())
		}
		return nil
	}
	return fmt.Errorf("role must be one of system, user, assistant, tool, is %.40q", m.Role)
}

func tauTokens(m tauMessage) (int, error) {
	var texts []string
	if m.Content != nil {
		texts = append(texts, *m.Content)
	}
	for _, call := range m.ToolCalls {
		texts = append(texts, call.Function.Name, call.Function.Arguments)
	}
	total := 0
	for _, text := range texts {
		tokens, err := countTokens(text)
		if err != nil {
			return 0, fmt.Errorf("cannot be counted: %w", err)
		}
		total += tokens
	}
	return total, nil
}
