package exchange

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"holdfast/orchestrator/environment/failure"
)

// serve answers request n, counted from 1, by handler.
func serve(t *testing.T, handler func(n int64, w http.ResponseWriter, r *http.Request)) (url string, requests *atomic.Int64) {
	t.Helper()
	requests = new(atomic.Int64)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler(requests.Add(1), w, r)
	}))
	t.Cleanup(server.Close)
	return server.URL, requests
}

func drop(w http.ResponseWriter) {
	connection, _, err := w.(http.Hijacker).Hijack()
	if err == nil {
		_ = connection.Close()
	}
}

func TestPost(t *testing.T) {
	for name, c := range map[string]struct {
		handler  func(n int64, w http.ResponseWriter)
		kind     failure.Kind // 0: succeeds
		requests int64
		says     string
	}{
		"answers":       {func(_ int64, w http.ResponseWriter) { fmt.Fprint(w, `{"sum":5,"more":1}`) }, 0, 1, ""},
		"comes back":    {func(n int64, w http.ResponseWriter) { comeBack(n, w) }, 0, 4, ""},
		"stays away":    {func(_ int64, w http.ResponseWriter) { w.WriteHeader(http.StatusServiceUnavailable) }, failure.Unreachable, 5, "status 503"},
		"always breaks": {func(_ int64, w http.ResponseWriter) { drop(w) }, failure.Died, 5, "EOF"},
		"breaks in the middle": {func(_ int64, w http.ResponseWriter) {
			w.Header().Set("Content-Length", "100")
			fmt.Fprint(w, "{")
			drop(w)
		}, failure.Died, 5, "EOF"},
		"refuses":           {func(_ int64, w http.ResponseWriter) { http.Error(w, "no\nsuch task", http.StatusUnprocessableEntity) }, failure.Refused, 1, "status 422): no such task"},
		"fails":             {func(_ int64, w http.ResponseWriter) { w.WriteHeader(http.StatusInternalServerError) }, failure.Refused, 1, "status 500"},
		"too many requests": {func(_ int64, w http.ResponseWriter) { w.WriteHeader(http.StatusTooManyRequests) }, failure.Refused, 1, "status 429"},
		"forgot":            {func(_ int64, w http.ResponseWriter) { w.WriteHeader(http.StatusNotFound) }, failure.Lost, 1, "status 404"},
		"stands elsewhere":  {func(_ int64, w http.ResponseWriter) { w.WriteHeader(http.StatusConflict) }, failure.Conflict, 1, "status 409"},
		"sends elsewhere": {func(_ int64, w http.ResponseWriter) {
			w.Header().Set("Location", "/x")
			w.WriteHeader(http.StatusTemporaryRedirect)
		}, failure.Refused, 1, "status 307"},
		"floods":     {func(_ int64, w http.ResponseWriter) { fmt.Fprintf(w, `{"x":%q}`, strings.Repeat("y", 2000)) }, failure.TooLarge, 1, "more than 1000 bytes"},
		"writes NaN": {func(_ int64, w http.ResponseWriter) { fmt.Fprint(w, `{"sum":NaN}`) }, failure.Malformed, 1, "not as documented"},
	} {
		t.Run(name, func(t *testing.T) {
			url, requests := serve(t, func(n int64, w http.ResponseWriter, r *http.Request) {
				var body map[string]int
				if err := json.NewDecoder(r.Body).Decode(&body); err != nil || body["a"] != 2 || r.Header.Get("Authorization") != "Bearer secret" {
					t.Errorf("request %d holds %v, %v", n, body, err)
				}
				c.handler(n, w)
			})
			p := New(Config{Bearer: "secret", FirstDelay: time.Millisecond, MaxResponseBytes: 1000})
			var answer struct{ Sum int }
			err := p.Post(t.Context(), url, map[string]int{"a": 2}, &answer)
			if requests.Load() != c.requests {
				t.Errorf("%d requests, want %d", requests.Load(), c.requests)
			}
			if c.kind == 0 {
				if err != nil || answer.Sum != 5 {
					t.Errorf("got %+v, %v", answer, err)
				}
				return
			}
			if kind, _ := failure.KindOf(err); kind != c.kind || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want %v with %q", err, c.kind, c.says)
			}
		})
	}
}

func comeBack(n int64, w http.ResponseWriter) {
	switch n {
	case 1:
		w.WriteHeader(http.StatusBadGateway)
	case 2:
		drop(w)
	case 3:
		w.WriteHeader(http.StatusGatewayTimeout)
	default:
		fmt.Fprint(w, `{"sum":5}`)
	}
}

func TestPostToNobody(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	err = New(Config{FirstDelay: time.Millisecond, Retries: 2}).Post(t.Context(), "http://"+address, nil, nil)
	if kind, _ := failure.KindOf(err); kind != failure.Unreachable {
		t.Errorf("got %v", err)
	}
}

func TestTimeIsBounded(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	hanging, requests := serve(t, func(int64, http.ResponseWriter, *http.Request) { <-release })
	// Long enough for the request to arrive on a busy machine.
	err := New(Config{Timeout: 3 * time.Second}).Post(t.Context(), hanging, nil, nil)
	if kind, _ := failure.KindOf(err); kind != failure.Timeout || requests.Load() != 1 {
		t.Errorf("after %d requests: %v", requests.Load(), err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	arrived, _ := serve(t, func(int64, http.ResponseWriter, *http.Request) { cancel(); <-release })
	err = New(Config{}).Post(ctx, arrived, nil, nil)
	if kind, _ := failure.KindOf(err); kind != failure.Cancelled {
		t.Errorf("after a cancel: %v", err)
	}

	away, _ := serve(t, func(_ int64, w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	err = New(Config{Timeout: 2 * time.Second, FirstDelay: time.Hour}).Post(t.Context(), away, nil, nil)
	if kind, _ := failure.KindOf(err); kind != failure.Unreachable || !strings.Contains(err.Error(), "status 503") {
		t.Errorf("between attempts: %v", err)
	}
}
