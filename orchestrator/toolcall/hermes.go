package toolcall

import (
	"encoding/json"
	"errors"
	"io"
	"strings"
)

const (
	hermesOpen      = "<tool_call>"
	hermesClose     = "</tool_call>"
	hermesAnswer    = "<tool_response>"
	hermesAnswerEnd = "</tool_response>"
	thoughtEnd      = "</think>"
)

// parseHermes reads each call as one JSON value after its opening tag, so that a
// closing tag inside a string of the arguments ends nothing. The last call may
// lack its closing tag, which a stop sequence may have eaten. What a model
// thinks, up to the last </think>, holds no calls.
func parseHermes(text string, turn int) Parsed {
	var p Parsed
	var content strings.Builder
	rest := text
	if end := strings.LastIndex(text, thoughtEnd); end >= 0 {
		end += len(thoughtEnd)
		content.WriteString(text[:end])
		rest = text[end:]
	}
	for {
		if len(p.Problems) >= MaxCalls {
			// Looking for more would cost time in the square of the text's length.
			content.WriteString(rest)
			break
		}
		before, after, found := strings.Cut(rest, hermesOpen)
		content.WriteString(before)
		if !found {
			break
		}
		var call Call
		var problem string
		call, rest, problem = readHermesCall(after, madeID(turn, p.position()))
		p.add(call, problem)
	}
	p.Content = content.String()
	return p
}

// readHermesCall reads one call from a text that begins behind its opening tag
// and returns the text behind its closing tag.
func readHermesCall(text, id string) (call Call, rest, problem string) {
	call = Call{ID: id}
	value, rest, problem := cutHermesValue(text)
	if problem != "" {
		return call, rest, problem
	}
	var read struct {
		ID        string          `json:"id"`
		Name      string          `json:"name"`
		Arguments json.RawMessage `json:"arguments"`
	}
	if err := json.Unmarshal(value, &read); err != nil {
		return call, rest, "the call must be a JSON object with name and arguments: " + err.Error()
	}
	call.Name = read.Name
	if read.ID != "" {
		call.ID = read.ID
	}
	if problem = checkName(call.Name); problem != "" {
		return call, rest, problem
	}
	call.Arguments, problem = readArguments(read.Arguments)
	return call, rest, problem
}

// cutHermesValue cuts the JSON value and the closing tag behind it from text.
// After a problem it goes on behind the next closing tag, or before the next
// opening one, whichever comes first.
func cutHermesValue(text string) (value json.RawMessage, rest, problem string) {
	decoder := json.NewDecoder(strings.NewReader(text))
	if err := decoder.Decode(&value); err != nil {
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return nil, resume(text), "the JSON object between the tags is not complete"
		}
		return nil, resume(text), "between the tags there must be one JSON object: " + err.Error()
	}
	behind := strings.TrimLeft(text[decoder.InputOffset():], " \t\r\n")
	if behind == "" {
		return value, "", ""
	}
	if after, ok := strings.CutPrefix(behind, hermesClose); ok {
		return value, after, ""
	}
	return nil, resume(behind), "the JSON object must be followed by " + hermesClose
}

func resume(text string) string {
	end := strings.Index(text, hermesClose)
	begin := strings.Index(text, hermesOpen)
	switch {
	case end >= 0 && (begin < 0 || end < begin):
		return text[end+len(hermesClose):]
	case begin >= 0:
		return text[begin:]
	}
	return ""
}
