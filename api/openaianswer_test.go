package api

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/labstack/echo/v4"

	"holdfast/workflows"
)

// answering is an answer that is written into a recorder.
func answering(stream bool) (*openAIAnswer, *httptest.ResponseRecorder) {
	w := httptest.NewRecorder()
	c := echo.New().NewContext(httptest.NewRequest(http.MethodPost, "/v1/chat/completions", nil), w)
	return newOpenAIAnswer(c, openAIChat, &openAIRequest{Model: "m", Stream: stream}), w
}

func TestOpenAIAnswerThatWaitsKeepsTheConnection(t *testing.T) {
	a, w := answering(false)
	a.keepAlive()
	a.keepAlive()
	a.turn(&workflows.HarnessTurn{Text: "hi", FinishReason: "stop", CachedTokens: -1})
	var document openAIDocument
	if err := json.Unmarshal(w.Body.Bytes(), &document); err != nil || !strings.HasPrefix(w.Body.String(), "\n\n{") || document.Choices[0].Message.Content == nil || document.Usage.Details != nil {
		t.Errorf("%v: %q", err, w.Body)
	}
	a, w = answering(true)
	a.keepAlive()
	a.turn(&workflows.HarnessTurn{FinishReason: "length", CachedTokens: 0})
	if got := w.Body.String(); !strings.HasPrefix(got, ": waiting\n\ndata: {") || !strings.HasSuffix(got, "data: [DONE]\n\n") || w.Header().Get("Content-Type") != eventMediaType {
		t.Errorf("streamed %q", got)
	}
}

// TestOpenAIAnswerThatFailsLateIsCutOff: the status is sent; so a library must see a
// broken connection, and a person the reason.
func TestOpenAIAnswerThatFailsLateIsCutOff(t *testing.T) {
	a, w := answering(false)
	a.keepAlive()
	defer func() {
		if cause := recover(); cause != any(http.ErrAbortHandler) {
			t.Errorf("ended with %v", cause)
		}
		if got := w.Body.String(); !strings.Contains(got, `"message":"the session is over"`) {
			t.Errorf("said %q", got)
		}
	}()
	a.fail(newProblem(http.StatusConflict, kindConflict, "the session is over"))
}
