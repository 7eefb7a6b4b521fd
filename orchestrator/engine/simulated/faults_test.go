package simulated

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/orchestrator/engine/simulated/fault"
	"holdfast/orchestrator/engine/simulated/publish"
)

// patience bounds every wait of these tests in real time; none takes a noticeable part.
const patience = time.Minute

// spin waits for something that no signal tells.
func spin(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !done(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// receive waits for what other goroutines send.
func receive[T any](t *testing.T, what string, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(patience):
		t.Fatalf("waited in vain for %s", what)
	}
	panic("not reached")
}

// started is a server on loopback.
func started(t *testing.T, cfg Config) *Server {
	t.Helper()
	s := newTestServer(t, cfg)
	if err := s.Start("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		// What still runs is none of the test's business.
		_ = s.Stop(ctx)
	})
	return s
}

// setFaults puts faults over HTTP and returns the state that came back.
func setFaults(t *testing.T, s *Server, settings string) (state faultState) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPut, s.URL()+"/simulated/faults", strings.NewReader(settings))
	if err != nil {
		t.Fatal(err)
	}
	response, err := impatient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(response.Body)
		t.Fatalf("%s: %s", settings, text)
	}
	if err := json.NewDecoder(response.Body).Decode(&state); err != nil {
		t.Fatal(err)
	}
	return state
}

// impatient is a client that does not wait for ever.
var impatient = http.Client{Timeout: 2 * patience}

func send(s *Server, body string) (*http.Response, error) {
	return impatient.Post(s.URL()+"/v1/completions", "application/json", strings.NewReader(body))
}

func TestRefusalsOnDemand(t *testing.T) {
	s := started(t, Config{TimeScale: 1e5})
	setFaults(t, s, `{"refusals":[{"status":429,"next":1,"retry_after_seconds":0.5},{"status":503,"next":1},{"status":504,"next":1},{"status":500,"next":1}]}`)
	var got []string
	for range 5 {
		r, err := send(s, `{"prompt":[1],"max_tokens":2}`)
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		got = append(got, fmt.Sprint(r.StatusCode, r.Header.Get("Retry-After")))
	}
	if want := []string{"4290.5", "503", "504", "500", "200"}; !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	if _, c := s.Faults(); c.Refused[429] != 1 || c.Refused[504] != 1 || s.Stats().Submitted != 1 {
		t.Errorf("%+v", c)
	}
	for _, nonsense := range []string{`{"refusals":[{"status":404}]}`, `{"unknown":1}`, `[]`} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPut, s.URL()+"/simulated/faults", strings.NewReader(nonsense))
		if err != nil {
			t.Fatal(err)
		}
		response, err := impatient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != http.StatusBadRequest {
			t.Errorf("%s: %d", nonsense, response.StatusCode)
		}
	}
}

// TestDroppedStreams bring exactly the tokens before the fault, and leave nothing running.
func TestDroppedStreams(t *testing.T) {
	s := started(t, Config{TimeScale: 100, StreamTick: time.Millisecond})
	setFaults(t, s, `{"drops":{"next":2,"after_tokens":37}}`)
	r, err := send(s, `{"prompt":[1,2,3],"max_tokens":400,"ignore_eos":true,"temperature":0,"return_token_ids":true,"stream":true}`)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	var ids []int32
	lines := bufio.NewScanner(r.Body)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if ok && data != "[DONE]" {
			for _, choice := range decode(t, []byte(data)).Choices {
				ids = append(ids, choice.TokenIDs...)
			}
		}
	}
	if err := lines.Err(); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the stream ends with %v", err)
	}
	if !slices.Equal(ids, greedy("default").Continue([]int32{1, 2, 3}, 37, 16)) {
		t.Errorf("%d tokens came", len(ids))
	}
	if r, err := send(s, `{"prompt":[1,2,3],"max_tokens":400,"ignore_eos":true}`); err == nil {
		r.Body.Close()
		t.Error("an answer without stream did not break off")
	}
	if _, c := s.Faults(); c.StreamsDropped != 2 || len(s.Requests()) != 0 || s.Stats().Aborted != 2 {
		t.Errorf("%+v, %d left", c, len(s.Requests()))
	}
}

// TestCrash breaks what is in flight, refuses while it is down, and comes back in place
// with nothing of what was.
func TestCrash(t *testing.T) {
	s := started(t, Config{TimeScale: 1, KVEvents: KVEvents{Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0", Encoding: publish.Map}})
	r, err := send(s, `{"prompt":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],"max_tokens":1,"return_token_ids":true}`)
	if err != nil {
		t.Fatal(err)
	}
	r.Body.Close()
	before := s.KVEndpoints()[0]
	if before.Published == 0 || len(s.ResidentBlocks()) != 1 {
		t.Fatalf("%+v", before)
	}
	url, old := s.URL(), s.life.Load()
	old.setWeights("v9")
	ended := make(chan error, 6)
	for i := range 6 {
		go func() {
			r, err := send(s, fmt.Sprintf(`{"prompt":[1,2],"max_tokens":900,"ignore_eos":true,"stream":%v}`, i%2 == 0))
			if err == nil {
				_, err = io.Copy(io.Discard, r.Body)
				r.Body.Close()
			}
			ended <- err
		}()
	}
	spin(t, "the requests to arrive", func() bool { return len(s.Requests()) == 6 })
	const down = 200 * time.Millisecond
	began := time.Now()
	setFaults(t, s, fmt.Sprintf(`{"crash":{"down_seconds":%v}}`, down.Seconds()))
	for range 6 {
		if err := receive(t, "a request to break off", ended); err == nil {
			t.Error("a request got a whole answer from a crashed engine")
		}
	}
	for _, c := range old.cores {
		c.mu.Lock()
		if stats := c.model.Stats(); len(c.calls)+len(c.streams) != 0 || stats.UsedBlocks() != 0 || stats.Running() != 0 || c.closed != crashed {
			t.Errorf("the crash leaves %+v", stats)
		}
		c.mu.Unlock()
	}
	spin(t, "it to come back", func() bool {
		r, err := impatient.Get(url + "/health")
		if err != nil {
			return false
		}
		r.Body.Close()
		return true
	})
	if back := time.Since(began); back < down {
		t.Errorf("it was back after %s", back)
	}
	after := s.KVEndpoints()[0]
	if s.URL() != url || after.Endpoint != before.Endpoint || after.ReplayEndpoint != before.ReplayEndpoint || after.Published != 0 {
		t.Errorf("before %+v, after %+v", before, after)
	}
	if len(s.ResidentBlocks()) != 0 || s.WeightVersion() != "default" || s.Stats().Submitted != 0 {
		t.Error("something survived the crash")
	}
	r, err = send(s, `{"prompt":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],"max_tokens":1}`)
	if err != nil {
		t.Fatal(err)
	}
	r.Body.Close()
	f := newFollower(t)
	f.catchUp(s.KVEndpoints()[0]) // From number 0 on.
	if len(f.blocks) != 1 {
		t.Errorf("%d blocks", len(f.blocks))
	}
	if _, c := s.Faults(); c.Crashes != 1 {
		t.Errorf("%+v", c)
	}
}

// TestStopWhileDown: nothing comes back.
func TestStopWhileDown(t *testing.T) {
	s := started(t, Config{})
	s.Crash(time.Millisecond)
	if err := s.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	url := s.URL()
	deadline := time.Now().Add(50 * time.Millisecond)
	for time.Now().Before(deadline) {
		if l := s.life.Load(); l != nil {
			// It may have come back just before the stop, and must be stopped then.
			l.cores[0].look(func() {
				if l.cores[0].closed == running {
					t.Error("it runs after Stop")
				}
			})
		}
		if r, err := impatient.Get(url + "/health"); err == nil {
			r.Body.Close()
			t.Fatal("it serves after Stop")
		}
	}
}

func TestStalledMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTestServer(t, Config{})
		defer s.core().close(shutDown)
		page := func() string {
			w := &page{header: http.Header{}}
			s.Handler().ServeHTTP(w, httpGet(t, "/metrics"))
			return w.String()
		}
		const idle, busy = `vllm:num_requests_running{engine="0",model_name="simulated"} 0`, `vllm:num_requests_running{engine="0",model_name="simulated"} 1`
		if err := s.SetFaults(fault.Settings{Metrics: fault.Metrics{Mode: fault.Frozen, Seconds: 10}}); err != nil {
			t.Fatal(err)
		}
		answer := background(t, s, []int32{1}, 900)
		if got := page(); !strings.Contains(got, idle) {
			t.Error("a frozen page moves")
		}
		pass(10 * time.Second)
		if got := page(); !strings.Contains(got, busy) {
			t.Error("a page is frozen for too long")
		}
		if err := s.SetFaults(fault.Settings{Metrics: fault.Metrics{Mode: fault.Hang, Seconds: 60}}); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if got := page(); time.Since(began) != time.Minute || !strings.Contains(got, idle) {
			t.Errorf("a hanging page came after %s", time.Since(began))
		}
		<-answer
		if _, c := s.Faults(); c.MetricsStalled != 2 {
			t.Errorf("%+v", c)
		}
	})
}

func httpGet(t *testing.T, path string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestSlowAndStormyEngines take longer and bring the same tokens.
func TestSlowAndStormyEngines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTestServer(t, Config{})
		defer s.core().close(shutDown)
		run := func(settings fault.Settings) (time.Duration, []int32) {
			if err := s.SetFaults(settings); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			c := <-background(t, s, []int32{1, 2, 3}, 300)
			return time.Since(began), c.Choices[0].TokenIDs
		}
		sound, want := run(fault.Settings{})
		slow, got := run(fault.Settings{SlowFactor: 4})
		if ratio := float64(slow) / float64(sound); ratio < 3.99 || ratio > 4.01 || !slices.Equal(got, want) {
			t.Errorf("%.2f times slower", ratio)
		}
		stormy, got := run(fault.Settings{Preemptions: fault.Preemptions{Times: 5, IntervalSeconds: 0.3}})
		_, c := s.Faults()
		if stormy <= sound || !slices.Equal(got, want) || s.Stats().Preemptions < 4 || c.Preempted != s.Stats().Preemptions {
			t.Errorf("%s, %s in a storm of %d", sound, stormy, c.Preempted)
		}
	})
}

func TestRefusedFlushes(t *testing.T) {
	s := newSGLang(t, Config{Faults: fault.Settings{RefuseFlushes: 1}})
	control(t, s, "POST", "/flush_cache", "", 400)
	control(t, s, "POST", "/flush_cache", "", 200)
	v := newTestServer(t, Config{Faults: fault.Settings{RefuseFlushes: 1}})
	if control(t, v, "POST", "/reset_prefix_cache", "", 200)["success"] != false || control(t, v, "POST", "/reset_prefix_cache", "", 200)["success"] != true {
		t.Error("the flush is not refused once")
	}
}

// TestLostEventsAreInTheReplay: faults befall what subscribers get, not the history.
func TestLostEventsAreInTheReplay(t *testing.T) {
	s := newTestServer(t, Config{TimeScale: 3000, Faults: fault.Settings{Seed: 1, Events: fault.Events{Lost: 0.5, Duplicated: 0.3, Reordered: 0.3}}, KVEvents: KVEvents{
		Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0", FlushIdle: true,
	}})
	defer s.Stop(t.Context())
	load(t, s, 3, 80, "/v1/completions", vllmBody)
	f := newFollower(t)
	resident := s.ResidentBlocks()
	f.catchUp(s.KVEndpoints()[0])
	if _, c := s.Faults(); !slices.Equal(f.resident(), resident) || c.EventsLost == 0 || c.EventsDuplicated == 0 || c.EventsReordered == 0 {
		t.Errorf("%d blocks of %d, %+v", len(f.blocks), len(resident), c)
	}
}

// TestCrashesUnderLoad: whatever a crash meets, every call ends, and the engine is whole
// and idle afterwards.
func TestCrashesUnderLoad(t *testing.T) {
	s := started(t, Config{TimeScale: 200, StreamTick: time.Millisecond, Ranks: 2, Faults: fault.Settings{
		Seed: 4, Drops: fault.Drops{Probability: 0.1, AfterTokens: 20}, Refusals: []fault.Refusal{{Status: 503, Probability: 0.1}},
		Preemptions: fault.Preemptions{Times: 100, IntervalSeconds: 0.005},
	}, KVEvents: KVEvents{Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0", FlushIdle: true}})
	const clients, each, crashes = 8, 20, 4
	answers := make(chan int, clients*each)
	for i := range clients {
		go func() {
			for k := range each {
				ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
				if k%3 == 0 {
					time.AfterFunc(time.Duration(i*k%7)*time.Millisecond, cancel)
				}
				body := fmt.Sprintf(`{"prompt":%s,"max_tokens":%d,"ignore_eos":true,"stream":%v,"return_token_ids":true}`, jsonInts(make([]int32, 1+i*20+k)), 1+k*20, k%2 == 0)
				request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+"/v1/completions", strings.NewReader(body))
				if err != nil {
					t.Error(err)
				}
				for ctx.Err() == nil && s.life.Load() == nil {
					runtime.Gosched()
				}
				status := 0
				if r, err := impatient.Do(request); err == nil {
					if _, err = io.Copy(io.Discard, r.Body); err == nil {
						status = r.StatusCode
					}
					r.Body.Close()
				}
				cancel()
				answers <- status
			}
		}()
	}
	count := map[int]int{}
	for n := range clients * each {
		count[receive(t, "an answer", answers)]++
		if n%(clients*each/(crashes+1)) == 1 {
			s.Crash(2 * time.Millisecond)
		}
	}
	spin(t, "it to come back", func() bool { return s.life.Load() != nil })
	spin(t, "the requests to end", func() bool { return len(s.Requests()) == 0 })
	if stats := s.Stats(); stats.UsedBlocks() != 0 || stats.Waiting+stats.Running() != 0 || stats.Finished+stats.Aborted != stats.Submitted {
		t.Errorf("left over: %+v", stats)
	}
	if count[200] == 0 || count[0] == 0 {
		t.Errorf("answers by status: %v", count)
	}
	for rank, e := range s.KVEndpoints() {
		f := newFollower(t)
		resident := s.RankResidentBlocks(rank)
		f.catchUp(s.KVEndpoints()[rank])
		if !slices.Equal(f.resident(), resident) {
			t.Errorf("rank %d at %s: events leave %d blocks, %d are resident", rank, e.Endpoint, len(f.blocks), len(resident))
		}
	}
}
