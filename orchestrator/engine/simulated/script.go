package simulated

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
)

// Script is what an engine says instead of noise: of all lines whose After, and With,
// stand in the prompt's text, the one whose After ends last, and of these the last one. Where
// none does, noise it is. So what is said depends on the context alone, and is the same
// on every engine and in every repetition.
//
// A scripted output ends by itself with the token that ends a message in the toy's
// chat template. A prompt that goes on from a part of it gets the rest. The length that
// a request asks for bounds it from above; its other wishes are ignored.
type Script []Line

// Line is one thing to say.
type Line struct {
	// After is text that must stand in the prompt.
	After string `json:"after"`
	// With must stand in it as well, at any place; empty for nothing.
	With string `json:"with,omitempty"`
	Say  string `json:"say"`
}

// Bounds of a script.
const (
	maxScriptLines     = 1_000
	maxScriptLineBytes = 64 << 10
)

func (s Script) validate() error {
	if len(s) > maxScriptLines {
		return fmt.Errorf("%w: a script of %d lines, want at most %d", errConfig, len(s), maxScriptLines)
	}
	for i, line := range s {
		if line.After == "" || len(line.After) > maxScriptLineBytes || len(line.With)+len(line.Say) > maxScriptLineBytes {
			return fmt.Errorf("%w: line %d of the script: after must not be empty, and neither longer than %d bytes", errConfig, i, maxScriptLineBytes)
		}
	}
	return nil
}

// messageEnd ends a message in the toy's chat template.
const messageEnd = "\n"

// outputAfter is what the script has to say after a prompt, nil for nothing.
func (s *Script) outputAfter(prompt []int32, vocabulary int) []int32 {
	if len(*s) == 0 {
		return nil
	}
	text := detokenize(prompt)
	say, last := "", -1
	for _, line := range *s {
		if at := strings.LastIndex(text, line.After); at >= 0 && at+len(line.After) >= last && strings.Contains(text, line.With) {
			say, last = line.Say, at+len(line.After)
		}
	}
	if last < 0 {
		return nil
	}
	output := tokenize(nil, say+messageEnd, vocabulary)
	return output[saidAlready(prompt, output):]
}

// saidAlready is how many tokens of an output a prompt ends with, behind the beginning
// of an answer; never all of them.
func saidAlready(prompt, output []int32) int {
	begin := tokenize(nil, answerBegin, numberBase)
	for n := min(len(output)-1, len(prompt)-len(begin)); n > 0; n-- {
		at := len(prompt) - n
		if slices.Equal(prompt[at:], output[:n]) && slices.Equal(prompt[at-len(begin):at], begin) {
			return n
		}
	}
	return 0
}

// SetScript replaces the script for the requests to come.
func (s *Server) SetScript(script Script) error {
	if err := script.validate(); err != nil {
		return err
	}
	script = slices.Clone(script)
	s.script.Store(&script)
	return nil
}

// putScript serves PUT /simulated/script, an array of lines.
func (s *Server) putScript(_ *life, w http.ResponseWriter, r *http.Request) {
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20))
	decoder.DisallowUnknownFields()
	var script Script
	err := decoder.Decode(&script)
	if err == nil {
		err = s.SetScript(script)
	}
	if err != nil {
		s.writeError(w, badRequest("", "script: %v", err))
		return
	}
	writeJSON(w, http.StatusOK, script)
}
