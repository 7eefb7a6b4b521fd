package client

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/google/uuid"

	"holdfast/api/wire"
)

// turnTimeout bounds a harness's call, which may be held for hours.
const turnTimeout = 24 * time.Hour

// Generate makes one model call in a session whose loop runs outside. It returns
// when the call is through, however long the session is held; the tokens come in
// TokenIDs and Logprobs, whatever the encoding. Trying again is safe under the
// same RequestID, and is done here.
func (c *Client) Generate(ctx context.Context, session uuid.UUID, turn wire.NewTurn) (wire.HarnessTurn, error) {
	turn.Encoding, turn.Stream = "packed", false
	made, err := do[wire.HarnessTurn](ctx, c, call{
		method: http.MethodPost, path: []string{"sessions", session.String(), "generate"}, body: jsonBody(turn), repeatable: true, timeout: turnTimeout,
	})
	switch {
	case err != nil:
		return made, err
	case made.Problem != nil:
		return made, fmt.Errorf("generating in session %s: %w", session, made.Problem)
	}
	made.TokenIDs, made.Logprobs = wire.UnpackIDs(made.PackedIDs), wire.UnpackFloats(made.PackedLogprobs)
	made.PackedIDs, made.PackedLogprobs = nil, nil
	return made, nil
}

// CompleteSession ends a session whose loop runs outside. Asking again is harmless.
func (c *Client) CompleteSession(ctx context.Context, session uuid.UUID, end wire.FinishSession) (wire.Session, error) {
	return do[wire.Session](ctx, c, call{
		method: http.MethodPost, path: []string{"sessions", session.String(), "complete"}, body: jsonBody(end), repeatable: true,
	})
}
