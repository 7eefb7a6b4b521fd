package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"holdfast/api/wire"
	"holdfast/workflows/task"
)

// against makes a client of a server that answers with the handlers in turn, the
// last one again and again. It returns the number of requests so far.
func against(t *testing.T, handlers ...http.HandlerFunc) (*Client, *atomic.Int64) {
	t.Helper()
	asked := new(atomic.Int64)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := int(asked.Add(1))
		handlers[min(n, len(handlers))-1](w, r)
	}))
	t.Cleanup(server.Close)
	c, err := New(Config{BaseURL: server.URL, Attempts: 4, MinDelay: time.Microsecond, MaxDelay: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c, asked
}

func refuse(status int, header ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(status)
		fmt.Fprintf(w, `{"type":"urn:x","title":"t","status":%d,"detail":"no","errors":[{"location":"body.x","message":"m"}]}`, status)
	}
}

func breakOff(w http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) }

func answer(document any) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if err := json.NewEncoder(w).Encode(document); err != nil {
			panic(err)
		}
	}
}

// TestRepetition: what is sent again, and what is not.
func TestRepetition(t *testing.T) {
	read := func(c *Client) error { _, err := c.Run(t.Context(), uuid.New()); return err }
	create := func(c *Client) error { _, err := c.CreateRun(t.Context(), wire.NewRun{}); return err }
	drain := func(c *Client) error { return c.DrainInstance(t.Context(), "p", "i", true) }
	good := answer(wire.Run{Name: "n"})
	for _, c := range []struct {
		name     string
		call     func(*Client) error
		handlers []http.HandlerFunc
		asked    int64
		status   int
	}{
		{"a read after 503", read, []http.HandlerFunc{refuse(503), refuse(503), good}, 3, 0},
		{"a read after a broken connection", read, []http.HandlerFunc{breakOff, good}, 2, 0},
		{"a read that is always refused", read, []http.HandlerFunc{refuse(503)}, 4, 503},
		{"a read of what is not there", read, []http.HandlerFunc{refuse(404)}, 1, 404},
		{"a read after a defect", read, []http.HandlerFunc{refuse(500)}, 1, 500},
		{"a read after 429", read, []http.HandlerFunc{refuse(429, "Retry-After", "1"), good}, 2, 0},
		{"a creation after 429", create, []http.HandlerFunc{refuse(429), good}, 2, 0},
		{"a creation after 503", create, []http.HandlerFunc{refuse(503), good}, 1, 503},
		{"a creation after a broken connection", create, []http.HandlerFunc{breakOff, good}, 1, -1},
		{"a repeatable change after a broken connection", drain, []http.HandlerFunc{breakOff, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }}, 2, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			client, asked := against(t, c.handlers...)
			err := c.call(client)
			if (err == nil) != (c.status == 0) {
				t.Errorf("got %v", err)
			}
			var problem *wire.Problem
			if c.status > 0 && (!errors.As(err, &problem) || problem.Status != c.status || problem.Errors[0].Location != "body.x") {
				t.Errorf("got %v", err)
			}
			if asked.Load() != c.asked {
				t.Errorf("sent %d times, want %d", asked.Load(), c.asked)
			}
		})
	}
}

// TestNobodyListens: a connection that is refused is tried again even for a call
// that is not repeatable, since it was never sent.
func TestNobodyListens(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	listener.Close()
	tries := new(atomic.Int64)
	c, err := New(Config{BaseURL: "http://" + address, Attempts: 3, MinDelay: time.Microsecond, MaxDelay: time.Millisecond,
		Transport: counting{tries, http.DefaultTransport}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.CreateRun(t.Context(), wire.NewRun{}); err == nil || tries.Load() != 3 {
		t.Errorf("tried %d times: %v", tries.Load(), err)
	}
}

type counting struct {
	tries *atomic.Int64
	next  http.RoundTripper
}

func (c counting) RoundTrip(r *http.Request) (*http.Response, error) {
	c.tries.Add(1)
	return c.next.RoundTrip(r)
}

// TestWaitingEndsWithTheContext: a caller that gives up is not kept waiting for
// the next try.
func TestWaitingEndsWithTheContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	c, _ := against(t, func(w http.ResponseWriter, r *http.Request) {
		refuse(503, "Retry-After", "3600")(w, r)
		cancel()
	})
	c.config.MaxDelay = time.Hour
	if _, err := c.Run(ctx, uuid.New()); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestAnswerThatIsNoProblem: something between client and service answered.
func TestAnswerThatIsNoProblem(t *testing.T) {
	c, _ := against(t, func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "<html>bad gateway", http.StatusBadGateway)
	})
	_, err := c.Run(t.Context(), uuid.New())
	var problem *wire.Problem
	if !errors.As(err, &problem) || problem.Status != http.StatusBadGateway || !strings.Contains(problem.Detail, "bad gateway") {
		t.Error(err)
	}
}

func someTasks(n int) iter.Seq2[task.Spec, error] {
	return func(yield func(task.Spec, error) bool) {
		for i := range n {
			if !yield(task.Spec{ID: fmt.Sprint(i), Class: "agent", Prompt: task.Prompt{Text: "<a & b>"}}, nil) {
				return
			}
		}
	}
}

// TestBatchIsSentAnew: a repeated submission carries the same key and the same bytes.
func TestBatchIsSentAnew(t *testing.T) {
	var bodies, keys []string
	keep := func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		bodies, keys = append(bodies, string(body)), append(keys, r.Header.Get("Idempotency-Key"))
		if len(bodies) == 1 {
			panic(http.ErrAbortHandler)
		}
		answer(wire.Batch{Tasks: 3})(w, r)
	}
	c, _ := against(t, keep)
	version := int64(7)
	batch, err := c.SubmitBatch(t.Context(), uuid.New(), "key", NewBatch{PolicyVersion: &version, Tasks: someTasks(3)})
	if err != nil || batch.Tasks != 3 || len(bodies) != 2 || bodies[0] != bodies[1] || keys[0] != "key" || keys[1] != "key" {
		t.Fatalf("%+v, %v, %q, %q", batch, err, bodies, keys)
	}
	var sent struct {
		PolicyVersion int64       `json:"policy_version"`
		Tasks         []task.Spec `json:"tasks"`
	}
	if err := json.Unmarshal([]byte(bodies[0]), &sent); err != nil || sent.PolicyVersion != 7 || len(sent.Tasks) != 3 || sent.Tasks[2].Prompt.Text != "<a & b>" {
		t.Errorf("%+v, %v", sent, err)
	}
}

// TestTasksThatFail: an error of the caller's tasks ends the submission, is not
// tried again, and reaches the service as a body that breaks off.
func TestTasksThatFail(t *testing.T) {
	broken := errors.New("line 7 is not a task")
	read := make(chan error, 1)
	c, asked := against(t, func(_ http.ResponseWriter, r *http.Request) {
		_, err := io.Copy(io.Discard, r.Body)
		read <- err
		panic(http.ErrAbortHandler)
	})
	tasks := func(yield func(task.Spec, error) bool) {
		for spec, err := range someTasks(20_000) {
			if !yield(spec, err) {
				return
			}
		}
		yield(task.Spec{}, broken)
	}
	_, err := c.SubmitBatch(t.Context(), uuid.New(), "key", NewBatch{Tasks: tasks})
	if !errors.Is(err, broken) {
		t.Error(err)
	}
	select {
	case err := <-read:
		if err == nil {
			t.Error("the service took the body for whole")
		}
	case <-time.After(time.Minute):
		t.Error("the service was sent nothing")
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("sent %d times", n)
	}
}

// TestRefusalDuringUpload: a service that refuses early is heard, and the tasks
// are not gone through any further.
func TestRefusalDuringUpload(t *testing.T) {
	c, _ := against(t, refuse(413))
	over := new(atomic.Bool)
	endless := func(yield func(task.Spec, error) bool) {
		for yield(task.Spec{Class: "agent", Prompt: task.Prompt{Text: strings.Repeat("x", 1000)}}, nil) {
		}
		over.Store(true)
	}
	_, err := c.SubmitBatch(t.Context(), uuid.New(), "key", NewBatch{Tasks: endless})
	var problem *wire.Problem
	if !errors.As(err, &problem) || problem.Status != 413 {
		t.Fatal(err)
	}
	if !over.Load() {
		t.Error("the tasks are still being gone through")
	}
}

// TestReader pages through samples, acknowledges what it gave out, and skips
// nothing after an error.
func TestReader(t *testing.T) {
	sample := func(n int) wire.Sample { return wire.Sample{Seq: int64(n), Cursor: fmt.Sprint("c", n)} }
	var afters []string
	var acked []wire.Ack
	handler := func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			var ack wire.Ack
			if err := json.NewDecoder(r.Body).Decode(&ack); err != nil {
				t.Error(err)
			}
			acked = append(acked, ack)
			answer(wire.Consumer{})(w, r)
			return
		}
		after := r.URL.Query().Get("after")
		afters = append(afters, after)
		switch len(afters) {
		case 1:
			answer(wire.SamplePage{Samples: []wire.Sample{sample(1), sample(2)}, Next: "c2"})(w, r)
		case 2:
			refuse(500)(w, r)
		case 3:
			answer(wire.SamplePage{Next: "c2x"})(w, r)
		default:
			answer(wire.SamplePage{Samples: []wire.Sample{sample(3)}, Next: "c3"})(w, r)
		}
	}
	c, _ := against(t, handler)
	reader := c.Read(uuid.New(), SamplesQuery{Consumer: "trainer"})
	next := func() (*wire.Sample, error) { return reader.Next(t.Context()) }
	if got, err := next(); err != nil || got.Seq != 1 {
		t.Fatal(got, err)
	}
	if err := reader.Ack(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, err := next(); err != nil || got.Seq != 2 {
		t.Fatal(got, err)
	}
	if _, err := next(); err == nil {
		t.Fatal("the error was not told")
	}
	if got, err := next(); err != nil || got.Seq != 3 {
		t.Fatal(got, err)
	}
	for range 2 {
		if err := reader.Ack(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if fmt.Sprint(afters) != "[ c2 c2 c2x]" {
		t.Errorf("asked after %q", afters)
	}
	if fmt.Sprint(acked) != "[{trainer c1} {trainer c3}]" {
		t.Errorf("acknowledged %v", acked)
	}
}

// TestConfig refuses what cannot work.
func TestConfig(t *testing.T) {
	for _, config := range []Config{{}, {BaseURL: "localhost:8080"}, {BaseURL: "ftp://x"}, {BaseURL: "http://"}, {BaseURL: "http://x", Attempts: -1}, {BaseURL: "http://x", MinDelay: time.Minute}} {
		if _, err := New(config); err == nil {
			t.Errorf("%+v was accepted", config)
		}
	}
}
