package client

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/google/uuid"

	"holdfast/api/wire"
)

// Config sets up a Client. BaseURL is required.
type Config struct {
	// BaseURL is where the service listens, such as http://127.0.0.1:8080.
	BaseURL string
	// Token is the bearer token, if the service wants one.
	Token string
	// Attempts bounds the tries of a call, the first included; 0 means 8, which
	// takes up to about half a minute.
	Attempts int
	// MinDelay and MaxDelay bound the pause before a repetition; 0 means 100 ms
	// and 10 s. Each pause is drawn at random up to a bound that doubles.
	MinDelay time.Duration
	MaxDelay time.Duration
	// CallTimeout bounds one try, waiting for samples not counted; 0 means 60 s.
	// A batch may take UploadTimeout; 0 means 10 min.
	CallTimeout   time.Duration
	UploadTimeout time.Duration
	// Transport is nil for a transport of the client's own.
	Transport http.RoundTripper
}

// Client is safe for concurrent use.
type Client struct {
	base   *url.URL
	config Config
	http   *http.Client
}

const apiPath = "/api/v1"

// New checks the configuration. It does not connect.
func New(config Config) (*Client, error) {
	base, err := url.Parse(strings.TrimRight(config.BaseURL, "/"))
	if err != nil || (base.Scheme != "http" && base.Scheme != "https") || base.Host == "" {
		return nil, fmt.Errorf("service URL %q: must be an http or https URL such as http://127.0.0.1:8080", config.BaseURL)
	}
	setDefault(&config.Attempts, 8)
	setDefault(&config.MinDelay, 100*time.Millisecond)
	setDefault(&config.MaxDelay, 10*time.Second)
	setDefault(&config.CallTimeout, 60*time.Second)
	setDefault(&config.UploadTimeout, 10*time.Minute)
	if config.Attempts < 1 || config.MinDelay < 0 || config.MaxDelay < config.MinDelay || config.CallTimeout < 0 || config.UploadTimeout < 0 {
		return nil, errors.New("client: attempts, delays and timeouts must be positive, and MaxDelay not below MinDelay")
	}
	if config.Transport == nil {
		own := http.DefaultTransport.(*http.Transport).Clone()
		own.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12}
		own.MaxIdleConnsPerHost = 16
		config.Transport = own
	}
	return &Client{base: base, config: config, http: &http.Client{Transport: config.Transport}}, nil
}

func setDefault[T int | time.Duration](value *T, otherwise T) {
	if *value == 0 {
		*value = otherwise
	}
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// call is one request, which may be sent more than once.
type call struct {
	method string
	path   []string
	query  url.Values
	header http.Header
	// body returns the body anew for each try; nil means none.
	body func() (io.ReadCloser, error)
	// repeatable: doing it twice changes nothing more than doing it once.
	repeatable bool
	// timeout bounds one try; 0 means the client's.
	timeout time.Duration
}

func (c *Client) get(path ...string) call {
	return call{method: http.MethodGet, path: path, repeatable: true}
}

// url joins and escapes the path's pieces.
func (c *Client) url(k *call) string {
	pieces := make([]string, len(k.path))
	for i, piece := range k.path {
		pieces[i] = url.PathEscape(piece)
	}
	target := c.base.String() + apiPath + "/" + strings.Join(pieces, "/")
	if len(k.query) > 0 {
		target += "?" + k.query.Encode()
	}
	return target
}

// CreateRun opens a run. It is not repeated after it may have reached the
// service, since a second run would conflict with the first.
func (c *Client) CreateRun(ctx context.Context, run wire.NewRun) (wire.Run, error) {
	return do[wire.Run](ctx, c, call{method: http.MethodPost, path: []string{"runs"}, body: jsonBody(run)})
}

// RunsQuery selects runs; zero values select all.
type RunsQuery struct {
	Pool, State string
	// Before is the Next of the page before.
	Before string
	// Limit is the size of the page; 0 means the service's.
	Limit int
}

// Runs lists runs, newest first.
func (c *Client) Runs(ctx context.Context, query RunsQuery) (wire.RunPage, error) {
	k := c.get("runs")
	k.query = values("pool", query.Pool, "state", query.State, "before", query.Before, "limit", number(query.Limit))
	return do[wire.RunPage](ctx, c, k)
}

// Run reads a run with its current contract.
func (c *Client) Run(ctx context.Context, run uuid.UUID) (wire.Run, error) {
	return do[wire.Run](ctx, c, c.get("runs", run.String()))
}

// EndRun ends a run for good.
func (c *Client) EndRun(ctx context.Context, run uuid.UUID) (wire.Run, error) {
	return do[wire.Run](ctx, c, call{method: http.MethodPost, path: []string{"runs", run.String(), "end"}, repeatable: true})
}

// PutContract makes a new version of the contract current.
func (c *Client) PutContract(ctx context.Context, run uuid.UUID, contract wire.NewContract) (wire.Contract, error) {
	return do[wire.Contract](ctx, c, call{method: http.MethodPut, path: []string{"runs", run.String(), "contract"}, body: jsonBody(contract), repeatable: true})
}

// ContractHistory reads all versions of the contract, oldest first.
func (c *Client) ContractHistory(ctx context.Context, run uuid.UUID) (wire.ContractHistory, error) {
	return do[wire.ContractHistory](ctx, c, c.get("runs", run.String(), "contract", "history"))
}

// Batch reads a batch.
func (c *Client) Batch(ctx context.Context, run, batch uuid.UUID) (wire.Batch, error) {
	return do[wire.Batch](ctx, c, c.get("runs", run.String(), "batches", batch.String()))
}

// Backlog reads where the released samples are, per class.
func (c *Client) Backlog(ctx context.Context, run uuid.UUID) (wire.Backlog, error) {
	return do[wire.Backlog](ctx, c, c.get("runs", run.String(), "backlog"))
}

// Window selects a stretch of time: the last Last, or From and To, of which
// either may be open. The zero Window is the whole run.
type Window struct {
	Last     time.Duration
	From, To time.Time
}

func (w Window) values() url.Values {
	last := ""
	if w.Last > 0 {
		last = w.Last.String()
	}
	return values("window", last, "from", instant(w.From), "to", instant(w.To))
}

// Mixture reads the mixture of the whole run and, if one is given, of a window.
func (c *Client) Mixture(ctx context.Context, run uuid.UUID, window Window) (wire.Mixture, error) {
	k := c.get("runs", run.String(), "mixture")
	k.query = window.values()
	return do[wire.Mixture](ctx, c, k)
}

// Metrics reads rates, latencies and use of the engines over a window.
func (c *Client) Metrics(ctx context.Context, run uuid.UUID, window Window) (wire.Metrics, error) {
	k := c.get("runs", run.String(), "metrics")
	k.query = window.values()
	return do[wire.Metrics](ctx, c, k)
}

// SessionsQuery selects sessions of a run; zero values select all.
type SessionsQuery struct {
	Batch, Task  uuid.UUID
	Class, State string
	// After is the Next of the page before.
	After string
	Limit int
}

// Sessions lists sessions in release order.
func (c *Client) Sessions(ctx context.Context, run uuid.UUID, query SessionsQuery) (wire.SessionPage, error) {
	k := c.get("runs", run.String(), "sessions")
	k.query = values("batch", identifier(query.Batch), "task", identifier(query.Task), "class", query.Class,
		"state", query.State, "after", query.After, "limit", number(query.Limit))
	return do[wire.SessionPage](ctx, c, k)
}

// Session reads where a session stands.
func (c *Client) Session(ctx context.Context, session uuid.UUID) (wire.Session, error) {
	return do[wire.Session](ctx, c, c.get("sessions", session.String()))
}

// Turns reads up to limit model calls of a session after the given turn, -1 for
// the first page; limit 0 means the service's.
func (c *Client) Turns(ctx context.Context, session uuid.UUID, after, limit int) (wire.TurnPage, error) {
	k := c.get("sessions", session.String(), "turns")
	k.query = values("after", fmt.Sprint(after), "limit", number(limit))
	return do[wire.TurnPage](ctx, c, k)
}

// Events reads up to limit entries of a session's history after the given one, 0
// for the first page; limit 0 means the service's.
func (c *Client) Events(ctx context.Context, session uuid.UUID, after int64, limit int) (wire.EventPage, error) {
	k := c.get("sessions", session.String(), "events")
	k.query = values("after", fmt.Sprint(after), "limit", number(limit))
	return do[wire.EventPage](ctx, c, k)
}

// CancelSession asks a session to end as cancelled; reason may be empty.
func (c *Client) CancelSession(ctx context.Context, session uuid.UUID, reason string) (wire.Session, error) {
	return do[wire.Session](ctx, c, call{
		method: http.MethodPost, path: []string{"sessions", session.String(), "cancel"}, body: jsonBody(wire.Cancel{Reason: reason}), repeatable: true,
	})
}
