package cli

import (
	"strings"
	"testing"

	"holdfast/api/wire"
)

// TestRefusalTellsEveryMistakeOnce: the detail of a problem tells its first mistakes
// already.
func TestRefusalTellsEveryMistakeOnce(t *testing.T) {
	problem := &wire.Problem{Status: 422, Detail: "body.a must be b; and 1 more", Errors: []wire.ErrorDetail{
		{Location: "body.a", Message: "must be b"}, {Location: "body.c", Message: "is missing"}, {Location: "body.d", Message: "must be b"},
	}}
	text := refusal(problem).Error()
	if strings.Count(text, "body.a must be b") != 1 || strings.Count(text, "body.d must be b") != 1 || strings.Count(text, "body.c is missing") != 1 {
		t.Errorf("said %q", text)
	}
}
