package environment

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"sync/atomic"
)

// watch bounds the messages of a server and remembers what was wrong with them:
// the client library reports the end of a connection, not why it came.
type watch struct {
	flood      atomic.Bool
	lastStatus atomic.Int64
}

func (w *watch) forget() {
	w.flood.Store(false)
	w.lastStatus.Store(0)
}

func (w *watch) flooded() bool { return w.flood.Load() }

// status is that of the last answer if it was a refusal, and 0 otherwise.
func (w *watch) status() int { return int(w.lastStatus.Load()) }

var errFlood = errors.New("a message is too long")

// limitLines bounds each line, which is one message.
func (w *watch) limitLines(r io.ReadCloser) io.ReadCloser {
	return &boundedReader{ReadCloser: r, watch: w, perLine: true}
}

// limitAll bounds a body, which is the answer to one request.
func (w *watch) limitAll(r io.ReadCloser) io.ReadCloser {
	return &boundedReader{ReadCloser: r, watch: w}
}

type boundedReader struct {
	io.ReadCloser
	watch   *watch
	perLine bool
	count   int
}

func (b *boundedReader) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.count += n
	if b.perLine {
		if newline := bytes.LastIndexByte(p[:n], '\n'); newline >= 0 {
			b.count = n - newline - 1
		}
	}
	if b.count > maxMCPMessageBytes {
		b.watch.flood.Store(true)
		return 0, errFlood
	}
	return n, err
}

// mcpRoundTripper adds the token and bounds the answers.
type mcpRoundTripper struct {
	base   http.RoundTripper
	bearer string
	watch  *watch
}

func (t *mcpRoundTripper) RoundTrip(request *http.Request) (*http.Response, error) {
	if t.bearer != "" {
		request = request.Clone(request.Context())
		request.Header.Set("Authorization", "Bearer "+t.bearer)
	}
	base := t.base
	if base == nil {
		base = http.DefaultTransport
	}
	response, err := base.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	t.watch.lastStatus.Store(0)
	if response.StatusCode >= http.StatusBadRequest {
		t.watch.lastStatus.Store(int64(response.StatusCode))
	}
	response.Body = t.watch.limitAll(response.Body)
	return response, nil
}
