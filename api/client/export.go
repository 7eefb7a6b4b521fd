package client

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/google/uuid"

	"holdfast/api/wire"
)

// ExportQuery says what an export holds and how. The zero value is all samples as JSON Lines.
type ExportQuery struct {
	// Format is jsonl or parquet.
	Format string
	// After is a cursor: only the samples after it.
	After string
	// Start is where to begin without a cursor: beginning, which is refused once samples
	// are pruned, or available.
	Start string
	// Statuses to write; none means all.
	Statuses []string
}

// Export writes a run's samples to w and returns how many bytes. It is not repeated:
// after an error what w has got is not whole. It moves no consumer's place. ctx alone
// bounds it.
func (c *Client) Export(ctx context.Context, run uuid.UUID, query ExportQuery, w io.Writer) (int64, error) {
	k := c.get("runs", run.String(), "export")
	k.query = values("format", query.Format, "after", query.After, "start", query.Start, "status", strings.Join(query.Statuses, ","))
	response, err := c.send(ctx, &k, nil)
	if err != nil {
		return 0, fmt.Errorf("%s %s: %w", k.method, c.url(&k), err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("%s %s: %w", k.method, c.url(&k), readRefusal(response))
	}
	n, err := io.Copy(w, response.Body)
	if err != nil {
		return n, fmt.Errorf("reading an export after %d bytes: %w", n, err)
	}
	return n, nil
}

// RemoveConsumer forgets a reader: its acknowledgements are waited for no longer.
func (c *Client) RemoveConsumer(ctx context.Context, run uuid.UUID, consumer string) error {
	_, err := do[struct{}](ctx, c, call{method: http.MethodDelete, path: []string{"runs", run.String(), "consumers", consumer}, repeatable: true})
	return err
}

// Audit reads everything that is known of a session and its sample.
func (c *Client) Audit(ctx context.Context, session uuid.UUID) (wire.Audit, error) {
	return do[wire.Audit](ctx, c, c.get("sessions", session.String(), "audit"))
}

// PutColumns adds further arrays to the sample that a session is to become.
func (c *Client) PutColumns(ctx context.Context, session uuid.UUID, columns []wire.Column) error {
	_, err := do[struct{}](ctx, c, call{
		method: http.MethodPost, path: []string{"sessions", session.String(), "columns"}, body: jsonBody(wire.NewColumns{Columns: columns}), repeatable: true,
	})
	return err
}
