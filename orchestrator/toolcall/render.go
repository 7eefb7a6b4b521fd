package toolcall

import (
	"bytes"
	"encoding/json"
	"strings"
)

// Render gives results as the messages that go on with the chat: in OpenAI's
// format one message of role tool for each, in Hermes's one message of role user
// that holds all of them between tags. No results give no message.
func Render(format Format, results []Result) []Message {
	if len(results) == 0 {
		return nil
	}
	if format == Hermes {
		return []Message{{Role: "user", Content: hermesText(results)}}
	}
	messages := make([]Message, len(results))
	for i, result := range results {
		messages[i] = Message{Role: "tool", Content: result.Content, Name: result.Name, ToolCallID: result.CallID}
	}
	return messages
}

// RenderProblems gives malformed calls as messages in which the model reads what
// was wrong with them.
func RenderProblems(format Format, problems []*MalformedError) []Message {
	return Render(format, ProblemResults(problems))
}

// ProblemResults gives malformed calls as results, for a caller that has results
// of well-formed calls of the same message beside them.
func ProblemResults(problems []*MalformedError) []Result {
	results := make([]Result, len(problems))
	for i, problem := range problems {
		results[i] = Result{CallID: problem.CallID, Name: problem.Name, Content: "Error: " + problem.Error(), IsError: true}
	}
	return results
}

func hermesText(results []Result) string {
	var b strings.Builder
	for i, result := range results {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(hermesAnswer + "\n")
		b.WriteString(hermesObject(result))
		b.WriteString("\n" + hermesAnswerEnd)
	}
	return b.String()
}

// hermesObject writes a result on one line. A tool's text cannot end the element
// it stands in: the slash of a closing tag is escaped, which JSON allows.
func hermesObject(result Result) string {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	// Markup in a tool's text stays readable for the model.
	encoder.SetEscapeHTML(false)
	// Two strings always encode.
	_ = encoder.Encode(struct {
		Name    string `json:"name"`
		Content string `json:"content"`
	}{result.Name, result.Content})
	line := strings.TrimSuffix(b.String(), "\n")
	return strings.ReplaceAll(line, hermesAnswerEnd, `<\/tool_response>`)
}
