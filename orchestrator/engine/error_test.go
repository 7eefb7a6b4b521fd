package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

func testClient(t *testing.T, url string, stall time.Duration) *VLLM {
	t.Helper()
	v, err := NewVLLM(VLLMConfig{URL: url, Model: "m", StallTimeout: stall})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// receive waits for something that comes at once where all is well.
func receive[T any](t *testing.T, what string, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(time.Minute):
		t.Fatalf("waited in vain for %s", what)
	}
	panic("not reached")
}

var someRequest = Request{Prompt: []int32{1, 2}, MaxTokens: 4, WithLogprobs: true, DataParallelRank: -1}

// TestFailuresAreSorted runs every way in which a call can fail.
func TestFailuresAreSorted(t *testing.T) {
	status := func(code int, body string, header ...string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			for i := 0; i < len(header); i += 2 {
				w.Header().Set(header[i], header[i+1])
			}
			w.WriteHeader(code)
			fmt.Fprint(w, body)
		}
	}
	chunk := `data: {"choices":[{"index":0,"token_ids":[7,8],"logprobs":{"token_logprobs":[-0.5,-1]},"finish_reason":%s}]}` + "\n\n"
	stream := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, text) }
	}
	open := fmt.Sprintf(chunk, "null")
	closed := fmt.Sprintf(chunk, `"length"`)
	usage := func(n int) string {
		return fmt.Sprintf(`data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":%d}}`+"\n\n", n)
	}
	const done = "data: [DONE]\n\n"
	for _, test := range []struct {
		name    string
		handler http.HandlerFunc
		class   Class
		status  int
		after   float64
		message string
		partial int
	}{
		{"400 nested", status(400, `{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}`), FailTurn, 400, 0, "too long", 0},
		{"400 flat", status(400, `{"object":"error","message":"old form","code":400}`), FailTurn, 400, 0, "old form", 0},
		{"401", status(401, `{"error":"Unauthorized"}`), FailTurn, 401, 0, "Unauthorized", 0},
		{"404", status(404, `{"detail":"Not Found"}`), FailTurn, 404, 0, "Not Found", 0},
		{"422", status(422, `{"detail":[{"loc":["body"]}]}`), FailTurn, 422, 0, "loc", 0},
		{"429", status(429, "slow down", "Retry-After", "7"), RetryHere, 429, 7, "slow down", 0},
		{"429 without a time", status(429, ""), RetryHere, 429, 0, "", 0},
		{"429 with nonsense", status(429, "", "Retry-After", "soon"), RetryHere, 429, 0, "", 0},
		{"500", status(500, "boom"), RetryElsewhere, 500, 0, "boom", 0},
		{"502", status(502, "<html>"), RetryElsewhere, 502, 0, "<html>", 0},
		{"503 asks to wait", status(503, "", "Retry-After", "1.5"), RetryHere, 503, 1.5, "", 0},
		{"503", status(503, "gone"), RetryElsewhere, 503, 0, "gone", 0},
		{"504", status(504, "upstream timed out"), RetryElsewhere, 504, 0, "upstream", 0},
		{"204", status(204, ""), RetryElsewhere, 204, 0, "", 0},
		{"empty stream", stream(""), RetryElsewhere, 0, 0, "stream ends", 0},
		{"dropped after a chunk", stream(open), RetryElsewhere, 0, 0, "stream ends", 2},
		{"done without a finish", stream(open + done), RetryElsewhere, 0, 0, "stream ends", 2},
		{"finish without done", stream(closed), RetryElsewhere, 0, 0, "stream ends", 2},
		{"a lost chunk", stream(closed + usage(3) + done), RetryElsewhere, 0, 0, "counts 3 output tokens", 2},
		{"not JSON", stream("data: {\"choices\":[{]}\n\n" + done), RetryElsewhere, 0, 0, "malformed", 0},
		{"error in the stream", stream(open + `data: {"error":{"message":"engine dead","code":500}}` + "\n\n" + done), RetryElsewhere, 500, 0, "engine dead", 2},
		{"bad request in the stream", stream(`data: {"error":{"message":"no","code":400}}` + "\n\n" + done), FailTurn, 400, 0, "no", 0},
		{"token ids without logprobs", stream(`data: {"choices":[{"token_ids":[1],"finish_reason":"stop"}]}` + "\n\n" + done), FailTurn, 0, 0, "0 log-probabilities for 1", 1},
		{"too few logprobs", stream(`data: {"choices":[{"token_ids":[1,2],"logprobs":{"token_logprobs":[-1]},"finish_reason":"stop"}]}` + "\n\n" + done), FailTurn, 0, 0, "log-probabilities", 2},
		{"a logprob that is none", stream(`data: {"choices":[{"token_ids":[1],"logprobs":{"token_logprobs":[null]},"finish_reason":"stop"}]}` + "\n\n" + done), FailTurn, 0, 0, "NaN", 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			server := httptest.NewServer(test.handler)
			defer server.Close()
			result, err := testClient(t, server.URL, 0).Generate(t.Context(), someRequest, nil)
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("error %v", err)
			}
			if e.Class != test.class || e.StatusCode != test.status || e.RetryAfterSeconds != test.after || !strings.Contains(e.Error(), test.message) {
				t.Errorf("got %v: class %v status %d after %v", e, e.Class, e.StatusCode, e.RetryAfterSeconds)
			}
			if len(result.OutputIDs) != test.partial {
				t.Errorf("kept %d tokens, want %d", len(result.OutputIDs), test.partial)
			}
		})
	}
}

func TestConnectionFailuresAreSorted(t *testing.T) {
	check := func(t *testing.T, err error, class Class, target error) {
		t.Helper()
		var e *Error
		if !errors.As(err, &e) || e.Class != class || target != nil && !errors.Is(err, target) {
			t.Errorf("got %v, want class %v", err, class)
		}
	}
	t.Run("refused", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		url := "http://" + l.Addr().String()
		l.Close()
		_, err = testClient(t, url, 0).Generate(t.Context(), someRequest, nil)
		check(t, err, RetryElsewhere, nil)
		_, err = testClient(t, url, 0).Metrics(t.Context())
		check(t, err, RetryElsewhere, nil)
	})
	t.Run("reset in the stream", func(t *testing.T) {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, `data: {"choices":[{"token_ids":[7],"logprobs":{"token_logprobs":[-1]}}]}`+"\n\n")
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}))
		defer server.Close()
		result, err := testClient(t, server.URL, 0).Generate(t.Context(), someRequest, nil)
		check(t, err, RetryElsewhere, nil)
		if !slices.Equal(result.OutputIDs, []int32{7}) {
			t.Errorf("kept %v", result.OutputIDs)
		}
	})
	silent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			_, _ = io.WriteString(w, `{"data":[{"id":"m"}]}`)
			return
		}
		_, _ = io.Copy(io.Discard, r.Body) // A server notices a closed connection only after the body.
		<-r.Context().Done()
	}))
	defer silent.Close()
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		_, err := testClient(t, silent.URL, 0).Generate(ctx, someRequest, nil)
		check(t, err, Cancelled, context.DeadlineExceeded)
	})
	for _, kind := range []string{"vllm", "sglang", "openai"} {
		t.Run("stalled "+kind, func(t *testing.T) {
			client, err := Connector(20*time.Millisecond)(kind, silent.URL)
			if err != nil {
				t.Fatal(err)
			}
			_, err = client.Generate(t.Context(), someRequest, nil)
			check(t, err, RetryElsewhere, nil)
			if !strings.Contains(err.Error(), "nothing came for 20ms") {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestRequestsThatAreNone(t *testing.T) {
	for _, r := range []Request{{MaxTokens: 1}, {Prompt: []int32{1}}, {Prompt: []int32{1}, MaxTokens: -1}} {
		_, err := testClient(t, "http://127.0.0.1:1", 0).Generate(t.Context(), r, nil)
		var e *Error
		if !errors.As(err, &e) || e.Class != FailTurn {
			t.Errorf("%+v: %v", r, err)
		}
	}
	for _, url := range []string{"", "127.0.0.1:8000", "ftp://x", "http://"} {
		if _, err := NewClient("vllm", url); err == nil {
			t.Errorf("URL %q accepted", url)
		}
	}
	if _, err := NewClient("abacus", "http://x"); err == nil {
		t.Error("an unknown kind was accepted")
	}
}

// TestServerWithoutTokenIDs replays a server that sends text only.
func TestServerWithoutTokenIDs(t *testing.T) {
	capture, err := os.ReadFile("testdata/llmd_sse_completion.txt")
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(capture) }))
	defer server.Close()
	result, err := testClient(t, server.URL, 0).Generate(t.Context(), someRequest, nil)
	var e *Error
	if !errors.As(err, &e) || e.Class != FailTurn || !strings.Contains(e.Error(), "no token ids") {
		t.Fatalf("got %v", err)
	}
	if result.PromptTokens != 40 || result.CachedTokens != 0 || result.FinishReason != FinishStop {
		t.Errorf("got %+v", result)
	}
}

// TestTokenIDsThatDoNotFit replays a stream whose third id is beyond 31 bits: what came
// before it is kept, and nothing is made of it.
func TestTokenIDsThatDoNotFit(t *testing.T) {
	capture, err := os.ReadFile("testdata/llmd_generate_sse.txt")
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(capture) }))
	defer server.Close()
	request := someRequest
	request.WithLogprobs = false
	result, err := testClient(t, server.URL, 0).Generate(t.Context(), request, nil)
	var e *Error
	if !errors.As(err, &e) || e.Class != RetryElsewhere || !slices.Equal(result.OutputIDs, []int32{2062099468, 1831344137}) {
		t.Errorf("%v, %v", result.OutputIDs, err)
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	for header, want := range map[string]float64{
		"":                              -1,
		"3":                             3,
		"0.25":                          0.25,
		"99999999":                      3600,
		"-1":                            -1,
		"NaN":                           -1,
		"Sun, 29 Nov 2026 12:01:00 GMT": 60,
		"Sun, 29 Nov 2026 11:00:00 GMT": 0,
	} {
		got, ok := retryAfter(header, now)
		if !ok {
			got = -1
		}
		if got != want {
			t.Errorf("%q: %v, want %v", header, got, want)
		}
	}
}

func FuzzStream(f *testing.F) {
	capture, err := os.ReadFile("testdata/llmd_sse_completion.txt")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(capture)
	f.Add([]byte("data: {\"choices\":[{\"token_ids\":[1],\"logprobs\":{\"token_logprobs\":[-1]},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		g := generation{collected{request: &someRequest, started: time.Now()}}
		if err := g.read(strings.NewReader(string(text)), func() {}); err == nil && len(g.result.Logprobs) != len(g.result.OutputIDs) {
			t.Fatalf("%+v", g.result)
		}
	})
}
