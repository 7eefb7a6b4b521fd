package transcript

import (
	"strings"

	"holdfast/orchestrator/toolcall"
)

// Screen says what of a text may be shown while it grows: nothing that may yet turn
// out to be a tool call, since what was shown cannot be taken back.
type Screen struct {
	// Format is how the model writes tool calls; empty means that it has no tools, and
	// everything is shown.
	Format toolcall.Format
	shown  int
}

// hermesTag begins a call in the format of that name.
const hermesTag = "<tool_call>"

// Grow returns what can be shown of a text beyond what was shown before.
func (s *Screen) Grow(text string) string {
	safe := s.safe(text)
	if safe <= s.shown {
		return ""
	}
	more := text[s.shown:safe]
	s.shown = safe
	return more
}

// End returns the rest of the message's content. ok is false if the content does not
// begin with what was shown of it.
func (s *Screen) End(text, content string) (rest string, ok bool) {
	return strings.CutPrefix(content, text[:min(s.shown, len(text))])
}

// safe is how much of the text is content for certain.
func (s *Screen) safe(text string) int {
	begin := len(text) - len(strings.TrimLeft(text, " \t\r\n"))
	switch {
	case s.Format == "":
		return len(text)
	case begin == len(text):
		// Blank text before a call is no content.
		return 0
	case s.Format == toolcall.OpenAI && text[begin] == '{':
		return 0
	case s.Format == toolcall.Hermes:
		if at := strings.Index(text, hermesTag); at >= 0 {
			return blankless(text[:at])
		}
		for n := min(len(hermesTag)-1, len(text)); n > 0; n-- {
			if strings.HasSuffix(text, hermesTag[:n]) {
				return blankless(text[:len(text)-n])
			}
		}
	}
	return len(text)
}

// blankless is the length of a text that is more than blank, else 0.
func blankless(text string) int {
	if strings.TrimSpace(text) == "" {
		return 0
	}
	return len(text)
}

// Read splits a message's text into its content and the calls in it. A text in which
// no call can be read is all content.
func Read(format toolcall.Format, text string, turn int) (content string, calls []toolcall.Call) {
	if format == "" {
		return text, nil
	}
	parsed := toolcall.Parse(format, text, turn)
	if len(parsed.Calls) == 0 {
		return text, nil
	}
	if strings.TrimSpace(parsed.Content) == "" {
		return "", parsed.Calls
	}
	return parsed.Content, parsed.Calls
}
