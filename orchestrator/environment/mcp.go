package environment

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"holdfast/orchestrator/environment/command"
	"holdfast/orchestrator/environment/excerpt"
	"holdfast/orchestrator/environment/exchange"
	"holdfast/orchestrator/environment/failure"
	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/toolcall"
)

// maxMCPMessageBytes bounds one message of a server.
const maxMCPMessageBytes = 4 << 20

// mcpDriver offers the tools of an MCP server. An error that a tool reports is
// its result; an error of the connection or of the protocol ends the episode.
type mcpDriver struct {
	id        string
	spec      spec.MCPServer
	keepBytes int
	commands  *command.Runner
	transport http.RoundTripper
	bearer    string

	directory *command.Directory
	service   *command.Service
	session   *mcp.ClientSession
	tools     []toolcall.Tool
	// watch remembers what the client library does not tell.
	watch watch
}

func (m *mcpDriver) remote() bool { return false }

func (m *mcpDriver) timeout() time.Duration {
	return seconds(m.spec.TimeoutSeconds, spec.DefaultTimeoutSeconds)
}

// reset connects and lists the tools, within the time of one call.
func (m *mcpDriver) reset(ctx context.Context, _ ResetRequest) (Observation, error) {
	limited, cancel := context.WithTimeout(ctx, m.timeout())
	defer cancel()
	// What an attempt before this one left has been closed.
	m.directory, m.service, m.session = nil, nil, nil
	m.watch.forget()
	err := m.connect(limited)
	if err == nil {
		m.tools, err = m.list(limited)
	}
	if err != nil {
		err = m.explain(ctx, limited, err)
		return Observation{}, errors.Join(err, m.close(context.WithoutCancel(ctx)))
	}
	return Observation{Tools: m.tools}, nil
}

func (m *mcpDriver) connect(ctx context.Context) error {
	transport, err := m.newTransport(ctx)
	if err != nil {
		return err
	}
	client := mcp.NewClient(&mcp.Implementation{Name: "holdfast", Version: "1"}, &mcp.ClientOptions{
		// Nothing is offered to the server: no roots, no sampling, no questions.
		Capabilities: &mcp.ClientCapabilities{},
	})
	m.session, err = client.Connect(ctx, transport, nil)
	return err
}

func (m *mcpDriver) newTransport(ctx context.Context) (mcp.Transport, error) {
	if m.spec.Program == nil {
		return &mcp.StreamableClientTransport{
			Endpoint: m.spec.URL,
			HTTPClient: &http.Client{
				Transport:     &mcpRoundTripper{base: m.transport, bearer: m.bearer, watch: &m.watch},
				CheckRedirect: exchange.NoRedirect, Timeout: m.timeout(),
			},
			// A broken stream is a broken episode; requests are few and small.
			MaxRetries: -1, DisableStandaloneSSE: true, MaxEventSize: -1,
		}, nil
	}
	var err error
	if m.directory, err = m.commands.NewDirectory(m.id); err != nil {
		return nil, err
	}
	if m.service, err = m.directory.Start(ctx, *m.spec.Program); err != nil {
		return nil, err
	}
	return &mcp.IOTransport{
		Reader: m.watch.limitLines(m.service.Output()), Writer: m.service.Input(), MaxLineLength: -1,
	}, nil
}

func (m *mcpDriver) list(ctx context.Context) ([]toolcall.Tool, error) {
	var tools []toolcall.Tool
	for tool, err := range m.session.Tools(ctx, nil) {
		if err != nil {
			return nil, err
		}
		if len(m.spec.Tools) > 0 && !slices.Contains(m.spec.Tools, tool.Name) {
			continue
		}
		if len(tools) >= maxTools {
			return nil, failure.Newf(failure.Malformed, "", "the server has more than %d tools", maxTools)
		}
		parameters, err := json.Marshal(tool.InputSchema)
		if err != nil {
			return nil, fmt.Errorf("reading the schema of %s: %w", tool.Name, err)
		}
		tools = append(tools, toolcall.Tool{Name: tool.Name, Description: tool.Description, Parameters: parameters})
	}
	for _, name := range m.spec.Tools {
		if !slices.ContainsFunc(tools, func(t toolcall.Tool) bool { return t.Name == name }) {
			return nil, failure.Newf(failure.Refused, "", "the server has no tool %q", name)
		}
	}
	return tools, nil
}

// step calls the tools one after another. A message without calls ends the
// episode: the model has said what it had to say.
func (m *mcpDriver) step(ctx context.Context, action Action) (Observation, error) {
	observation := Observation{Done: len(action.Calls) == 0}
	for _, call := range action.Calls {
		result, err := m.call(ctx, call)
		if err != nil {
			return Observation{}, err
		}
		observation.Results = append(observation.Results, result)
	}
	observation.shorten(m.keepBytes)
	return observation, nil
}

func (m *mcpDriver) call(ctx context.Context, call toolcall.Call) (toolcall.Result, error) {
	result := toolcall.Result{CallID: call.ID, Name: call.Name}
	if !slices.ContainsFunc(m.tools, func(t toolcall.Tool) bool { return t.Name == call.Name }) {
		result.Content, result.IsError = fmt.Sprintf("Error: there is no tool %q; there are %s", call.Name, m.names()), true
		return result, nil
	}
	limited, cancel := context.WithTimeout(ctx, m.timeout())
	defer cancel()
	answer, err := m.session.CallTool(limited, &mcp.CallToolParams{Name: call.Name, Arguments: call.Arguments})
	var refusal *jsonrpc.Error
	switch {
	case errors.As(err, &refusal) && refusal.Code == jsonrpc.CodeInvalidParams:
		result.Content, result.IsError = "Error: "+refusal.Message, true
		return result, nil
	case err != nil:
		return result, m.explain(ctx, limited, err)
	case answer.NeedsInput():
		return result, failure.Newf(failure.Refused, "", "the tool %s asks for input from a person", call.Name)
	}
	result.Content, result.IsError = contentText(answer), answer.IsError
	return result, nil
}

func (m *mcpDriver) names() string {
	names := make([]string, len(m.tools))
	for i, tool := range m.tools {
		names[i] = tool.Name
	}
	return strings.Join(names, ", ")
}

// contentText gives a result as text; what is no text is named.
func contentText(answer *mcp.CallToolResult) string {
	var parts []string
	for _, content := range answer.Content {
		switch c := content.(type) {
		case *mcp.TextContent:
			parts = append(parts, c.Text)
		case *mcp.ImageContent:
			parts = append(parts, fmt.Sprintf("[image %s, %d bytes]", c.MIMEType, len(c.Data)))
		case *mcp.AudioContent:
			parts = append(parts, fmt.Sprintf("[audio %s, %d bytes]", c.MIMEType, len(c.Data)))
		case *mcp.ResourceLink:
			parts = append(parts, fmt.Sprintf("[resource %s]", c.URI))
		case *mcp.EmbeddedResource:
			parts = append(parts, resourceText(c.Resource))
		}
	}
	if len(parts) == 0 && answer.StructuredContent != nil {
		if raw, err := json.Marshal(answer.StructuredContent); err == nil {
			parts = append(parts, string(raw))
		}
	}
	return strings.Join(parts, "\n")
}

func resourceText(resource *mcp.ResourceContents) string {
	switch {
	case resource == nil:
		return "[resource]"
	case resource.Text != "":
		return resource.Text
	}
	return fmt.Sprintf("[resource %s %s, %d bytes]", resource.URI, resource.MIMEType, len(resource.Blob))
}

// explain gives an error of the client library a kind. limited is the context of
// the call and ctx the caller's.
func (m *mcpDriver) explain(ctx, limited context.Context, err error) error {
	var known *failure.Error
	var refusal *jsonrpc.Error
	var dial *net.OpError
	switch {
	case errors.As(err, &known):
		return err
	case ctx.Err() != nil:
		return failure.New(failure.OfContext(ctx), "", ctx.Err())
	case m.watch.flooded():
		return failure.Newf(failure.TooLarge, "", "a message of more than %d bytes", maxMCPMessageBytes)
	case limited.Err() != nil || isTimeout(err):
		return failure.Newf(failure.Timeout, "", "no answer within %v", m.timeout())
	case m.service == nil && m.watch.status() != 0:
		return refusedStatus(m.watch.status(), err)
	case errors.As(err, &dial) && dial.Op == "dial":
		return failure.New(failure.Unreachable, "", dial)
	case errors.Is(err, mcp.ErrSessionMissing):
		return failure.New(failure.Lost, "", err)
	case errors.As(err, &refusal) && dial == nil:
		return failure.Newf(failure.Refused, "", "error %d: %s", refusal.Code, refusal.Message)
	}
	died := failure.New(failure.Died, "", err)
	if m.service != nil {
		const complaintBytes = 300
		// Its output can end before all of its complaints are read.
		timer := time.NewTimer(lastWordsWait)
		defer timer.Stop()
		select {
		case <-m.service.Done():
		case <-timer.C:
		case <-ctx.Done():
		}
		died.Message = excerpt.Line(m.service.Complaints(), complaintBytes)
	}
	return died
}

// lastWordsWait is how long a program whose output has ended may take to end itself.
const lastWordsWait = time.Second

// refusedStatus sorts the statuses like package exchange does.
func refusedStatus(status int, err error) error {
	kind := failure.Refused
	switch status {
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		kind = failure.Unreachable
	case http.StatusNotFound, http.StatusGone:
		kind = failure.Lost
	}
	return &failure.Error{Kind: kind, Status: status, Err: err}
}

func isTimeout(err error) bool {
	var timeout interface{ Timeout() bool }
	return errors.As(err, &timeout) && timeout.Timeout()
}

// close ends the protocol's session and then the program.
func (m *mcpDriver) close(context.Context) error {
	if m.service != nil {
		// The program is stopped first: the library waits for it without a bound.
		// Its own Close then finds the connection gone, which is no news.
		err := m.service.Stop()
		if m.session != nil {
			_ = m.session.Close()
		}
		return errors.Join(err, m.directory.Remove())
	}
	if m.directory != nil {
		return m.directory.Remove()
	}
	if m.session != nil {
		// A server that cannot be told will forget the session by itself.
		_ = m.session.Close()
	}
	return nil
}
