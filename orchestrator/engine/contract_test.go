package engine_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/engine/simulated"
	"holdfast/orchestrator/engine/simulated/fault"
	"holdfast/router/sim/instance"
)

// startEngine runs a simulated engine on loopback.
func startEngine(tb testing.TB, cfg simulated.Config) (*simulated.Server, engine.Client) {
	tb.Helper()
	if cfg.Engine.BlockTokens == 0 {
		cfg.Engine = instance.Demo()
	}
	s, err := simulated.New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	if err := s.Start("127.0.0.1:0"); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := s.Stop(ctx); err != nil {
			tb.Error(err)
		}
	})
	c, err := engine.NewClient("simulated", s.URL())
	if err != nil {
		tb.Fatal(err)
	}
	return s, c
}

func tokens(n, seed int) []int32 {
	t := make([]int32, n)
	for i := range t {
		t[i] = int32((i*31 + seed*7919) % 150_000)
	}
	return t
}

func request(prompt []int32, output int) engine.Request {
	return engine.Request{
		RequestID: "r", SessionID: "s", Prompt: prompt, MaxTokens: output, MinTokens: output, IgnoreEOS: true,
		Temperature: 1, TopP: 1, WithLogprobs: true, DataParallelRank: -1,
	}
}

func TestSessionOverHTTP(t *testing.T) {
	_, client := startEngine(t, simulated.Config{TimeScale: 2000})
	ctx := t.Context()
	context := tokens(1000, 1)
	cached := 0
	for turn := range 4 {
		var progress []int
		r, err := client.Generate(ctx, request(context, 700), func(p engine.Progress) {
			progress = append(progress, p.OutputTokens)
			if len(p.OutputIDs) != p.OutputTokens || len(p.Logprobs) != p.OutputTokens {
				t.Errorf("progress of %d tokens with %d ids, %d logprobs", p.OutputTokens, len(p.OutputIDs), len(p.Logprobs))
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		if len(r.OutputIDs) != 700 || len(r.Logprobs) != 700 || r.FinishReason != engine.FinishLength || r.PromptTokens != len(context) {
			t.Fatalf("turn %d: %d ids, %d logprobs, finish %v, prompt %d", turn, len(r.OutputIDs), len(r.Logprobs), r.FinishReason, r.PromptTokens)
		}
		if r.CachedTokens != cached {
			t.Errorf("turn %d: %d tokens cached, want %d", turn, r.CachedTokens, cached)
		}
		if !slices.IsSorted(progress) || progress[len(progress)-1] != 700 {
			t.Errorf("progress %v", progress)
		}
		if r.TimeToFirstTokenSeconds <= 0 || r.TimeToFirstTokenSeconds > r.TotalSeconds {
			t.Errorf("first token after %v of %v s", r.TimeToFirstTokenSeconds, r.TotalSeconds)
		}
		context = append(context, r.OutputIDs...)
		// The last token's KV was never computed.
		cached = (len(context) - 1) / 16 * 16
		context = append(context, tokens(100, turn+2)...)
	}
}

func TestOutputDependsOnSeedAndRequest(t *testing.T) {
	_, client := startEngine(t, simulated.Config{TimeScale: 5000})
	generate := func(change func(*engine.Request)) []int32 {
		r := request(tokens(50, 1), 40)
		change(&r)
		got, err := client.Generate(t.Context(), r, nil)
		if err != nil {
			t.Fatal(err)
		}
		return got.OutputIDs
	}
	seven, eight := int64(7), int64(8)
	base := generate(func(r *engine.Request) { r.Seed = &seven })
	if !slices.Equal(base, generate(func(r *engine.Request) { r.Seed, r.RequestID = &seven, "other" })) {
		t.Error("the same seed gives other tokens")
	}
	for name, change := range map[string]func(*engine.Request){
		"another seed":   func(r *engine.Request) { r.Seed = &eight },
		"another prompt": func(r *engine.Request) { r.Seed, r.Prompt = &seven, tokens(50, 2) },
		"no seed":        func(*engine.Request) {},
	} {
		if slices.Equal(base, generate(change)) {
			t.Errorf("%s gives the same tokens", name)
		}
	}
	// A stop token ends the output where it first comes, and counts.
	stop := generate(func(r *engine.Request) {
		r.Seed, r.StopTokenIDs, r.MinTokens = &seven, []int32{base[9]}, 0
	})
	if want := base[:slices.Index(base, base[9])+1]; !slices.Equal(stop, want) {
		t.Errorf("stopped after %v, want %v", stop, want)
	}
}

func TestSaltKeepsCachesApart(t *testing.T) {
	server, client := startEngine(t, simulated.Config{TimeScale: 5000})
	cached := func(salt string) int {
		r := request(tokens(160, 1), 1)
		r.CacheSalt = salt
		got, err := client.Generate(t.Context(), r, nil)
		if err != nil {
			t.Fatal(err)
		}
		return got.CachedTokens
	}
	if a, b, c := cached("v1"), cached("v2"), cached("v1"); a != 0 || b != 0 || c != 144 {
		t.Errorf("cached %d, %d, %d tokens, want 0, 0, 144", a, b, c)
	}
	server.ResetPrefixCache()
	if n := cached("v1"); n != 0 {
		t.Errorf("%d tokens cached after a reset", n)
	}
}

func TestDiscoveryAndMetrics(t *testing.T) {
	p := instance.Demo()
	_, client := startEngine(t, simulated.Config{Engine: p, Model: "m/x", TimeScale: 1000})
	info, err := client.Discover(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := engine.Info{
		Model: "m/x", Version: simulated.Version, BlockTokens: 16, CapacityBlocks: int64(p.CapacityBlocks), MaxContextTokens: 131072,
		MaxRunning: 256, DataParallelSize: 1, PrefillTokensPerSecond: info.PrefillTokensPerSecond,
	}
	if info != want || info.PrefillTokensPerSecond < 59e6 || info.PrefillTokensPerSecond > 61e6 {
		t.Errorf("got %+v", info)
	}
	if err := client.Health(t.Context()); err != nil {
		t.Error(err)
	}
	for range 2 {
		if _, err := client.Generate(t.Context(), request(tokens(320, 1), 5), nil); err != nil {
			t.Fatal(err)
		}
	}
	m, err := client.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	wantMetrics := engine.Metrics{
		PromptTokens: 640, CachedPromptTokens: 304, GeneratedTokens: 10, PrefixQueries: 640, PrefixHits: 304,
		CapacityBlocks: int64(p.CapacityBlocks), BlockTokens: 16,
	}
	if !reflect.DeepEqual(m, wantMetrics) {
		t.Errorf("got %+v\nwant %+v", m, wantMetrics)
	}
}

// TestAnotherModelBehindTheSameAddress: a client that asked for the name asks again.
func TestAnotherModelBehindTheSameAddress(t *testing.T) {
	var behind atomic.Pointer[simulated.Server]
	serve := func(model string) {
		s, err := simulated.New(simulated.Config{Engine: instance.Demo(), Model: model, TimeScale: 5000})
		if err != nil {
			t.Fatal(err)
		}
		behind.Store(s)
	}
	serve("first")
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { behind.Load().Handler().ServeHTTP(w, r) }))
	defer front.Close()
	client, err := engine.NewClient("simulated", front.URL)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Generate(t.Context(), request(tokens(10, 1), 1), nil); err != nil {
		t.Fatal(err)
	}
	serve("second")
	_, err = client.Generate(t.Context(), request(tokens(10, 1), 1), nil)
	var e *engine.Error
	if !errors.As(err, &e) || e.Class != engine.RetryHere || e.StatusCode != http.StatusNotFound {
		t.Errorf("got %v", err)
	}
	if _, err := client.Generate(t.Context(), request(tokens(10, 1), 1), nil); err != nil {
		t.Error(err)
	}
}

// until polls a condition that other goroutines bring about.
func until(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !condition(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// hurry lets an engine work at its own speed that was slowed down, so that something
// could be looked at in the middle of a request however busy the machine is.
func hurry(t *testing.T, server *simulated.Server) {
	t.Helper()
	if err := server.SetFaults(fault.Settings{}); err != nil {
		t.Fatal(err)
	}
}

func TestCancelReachesTheEngine(t *testing.T) {
	for _, when := range []string{"before the first token", "in the stream"} {
		t.Run(when, func(t *testing.T) {
			server, client := startEngine(t, simulated.Config{TimeScale: map[string]float64{"before the first token": 0.01, "in the stream": 100}[when]})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error, 1)
			go func() {
				r, err := client.Generate(ctx, request(tokens(20_000, 1), 100_000), func(engine.Progress) { cancel() })
				if when == "in the stream" && len(r.OutputIDs) == 0 {
					err = fmt.Errorf("nothing kept: %w", err)
				}
				ended <- err
			}()
			if when == "before the first token" {
				until(t, "the request to arrive", func() bool { return server.Stats().Running() == 1 })
				cancel()
			}
			err := <-ended
			var e *engine.Error
			if !errors.As(err, &e) || e.Class != engine.Cancelled || !errors.Is(err, context.Canceled) {
				t.Errorf("got %v", err)
			}
			until(t, "the engine to abort", func() bool { return len(server.Requests()) == 0 })
			if s := server.Stats(); s.Aborted != 1 || s.UsedBlocks() != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

func TestStopLetsRequestsFinishOrAbortsThem(t *testing.T) {
	server, client := startEngine(t, simulated.Config{TimeScale: 1})
	ended := make(chan error, 1)
	go func() {
		_, err := client.Generate(t.Context(), request(tokens(100, 1), 100_000), nil)
		ended <- err
	}()
	until(t, "the request to arrive", func() bool { return server.Stats().Decoding == 1 })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := server.Stop(ctx); err == nil {
		t.Error("a request had to be aborted and Stop returned nil")
	}
	var e *engine.Error
	if err := <-ended; !errors.As(err, &e) || e.Class != engine.RetryElsewhere {
		t.Errorf("the request ended with %v", err)
	}
	if s := server.Stats(); s.UsedBlocks() != 0 || s.Aborted != 1 {
		t.Errorf("%+v", s)
	}

	// Slow until the request has been seen.
	server, client = startEngine(t, simulated.Config{TimeScale: 1000, Faults: fault.Settings{SlowFactor: 10_000}})
	go func() {
		_, err := client.Generate(t.Context(), request(tokens(100, 1), 2_000), nil)
		ended <- err
	}()
	until(t, "the request to arrive", func() bool { return server.Stats().Running() == 1 })
	hurry(t, server)
	if err := server.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("the request ended with %v", err)
	}
}

func TestBadRequestsGetAnErrorDocument(t *testing.T) {
	server, _ := startEngine(t, simulated.Config{TimeScale: 1000})
	for body, want := range map[string]struct {
		status int
		text   string
	}{
		``:                                   {400, "malformed JSON"},
		`[]`:                                 {400, "malformed JSON"},
		`{"prompt":[1,2],`:                   {400, "malformed JSON"},
		`{}`:                                 {400, "prompt is missing"},
		`{"prompt":[]}`:                      {400, "prompt is missing"},
		`{"prompt":""}`:                      {400, "prompt is missing"},
		`{"prompt":[1,-2]}`:                  {400, "want an integer"},
		`{"prompt":[1,2.5]}`:                 {400, "want an integer"},
		`{"prompt":[99999999]}`:              {400, "out of vocabulary"},
		`{"prompt":[[1],[2]]}`:               {400, "one per request"},
		`{"prompt":["a","b"]}`:               {400, "one per request"},
		`{"prompt":{"a":1}}`:                 {400, "prompt"},
		`{"prompt":[1],"max_tokens":0}`:      {400, "max_tokens"},
		`{"prompt":[1],"max_tokens":"x"}`:    {400, "max_tokens"},
		`{"prompt":[1],"max_tokens":131072}`: {400, "maximum context length"},
		`{"prompt":[1],"max_tokens":9223372036854775807}`:   {400, "maximum context length"},
		`{"prompt":[1],"min_tokens":20}`:                    {400, "min_tokens"},
		`{"prompt":[1],"n":2}`:                              {400, "one completion"},
		`{"prompt":[1],"logprobs":21}`:                      {400, "logprobs"},
		`{"prompt":[1],"temperature":-1}`:                   {400, "temperature"},
		`{"prompt":[1],"priority":3}`:                       {400, "priority"},
		`{"prompt":[1],"stream":true,"stream_interval":-1}`: {400, "stream_interval"},
		`{"prompt":[1],"surprise":{]}`:                      {400, "malformed JSON"},
		`{"prompt":[1],"surprise":nil}`:                     {400, "surprise"},
		`{"prompt":[1],"model":"other"}`:                    {404, "does not exist"},
	} {
		response, err := http.Post(server.URL()+"/v1/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		document, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		if text := string(document); response.StatusCode != want.status || !strings.Contains(text, want.text) || !strings.HasPrefix(text, `{"error":{`) {
			t.Errorf("%s: %d %s", body, response.StatusCode, text)
		}
	}
	if s := server.Stats(); s.Submitted != 0 {
		t.Errorf("%d bad requests reached the engine", s.Submitted)
	}
}

// TestManyRequestsAtOnce cancels half of a thousand requests at random moments.
func TestManyRequestsAtOnce(t *testing.T) {
	server, client := startEngine(t, simulated.Config{TimeScale: 3000})
	var group sync.WaitGroup
	for i := range 400 {
		group.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if i%2 == 0 {
				ctx, cancel = context.WithTimeout(ctx, time.Duration(i%40)*3*time.Millisecond)
				defer cancel()
			}
			r, err := client.Generate(ctx, request(tokens(100+i*7, i%20), 1+i*13%3000), nil)
			if err != nil && ctx.Err() == nil {
				t.Error(err)
			}
			if err == nil && len(r.OutputIDs) != 1+i*13%3000 {
				t.Errorf("%d tokens", len(r.OutputIDs))
			}
		})
	}
	group.Wait()
	until(t, "the engine to be empty", func() bool { return len(server.Requests()) == 0 })
	if s := server.Stats(); s.UsedBlocks() != 0 || s.Finished+s.Aborted != s.Submitted || s.Finished < 200 {
		t.Errorf("%+v", s)
	}
}
