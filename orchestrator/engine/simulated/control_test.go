package simulated

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// control makes a control call and returns the document that came, if any.
func control(t *testing.T, s *Server, method, path, body string, status int) map[string]any {
	t.Helper()
	recorder := httptest.NewRecorder()
	s.Handler().ServeHTTP(recorder, httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body)))
	if recorder.Code != status {
		t.Fatalf("%s %s: %d %s, want %d", method, path, recorder.Code, recorder.Body, status)
	}
	var document map[string]any
	// Some answers are text or empty.
	_ = json.Unmarshal(recorder.Body.Bytes(), &document)
	return document
}

// background starts a generation whose document comes over the channel.
func background(t *testing.T, s *Server, prompt []int32, output int) <-chan completion {
	t.Helper()
	answer := make(chan completion, 1)
	body := fmt.Sprintf(`{"prompt":%s,"max_tokens":%d,"ignore_eos":true,"return_token_ids":true,"temperature":0}`, jsonInts(prompt), output)
	go func() { answer <- decode(t, post(t, s, body).Body.Bytes()) }()
	synctest.Wait()
	return answer
}

// pass lets the bubble's time go by.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func isOpen[T any](c <-chan T) bool {
	select {
	case <-c:
		return false
	default:
		return true
	}
}

func greedy(version string) Sampling {
	return Sampling{VocabularySize: 151_936, WeightVersion: version}
}

// TestPauseModes: what each mode of vLLM's pause does to a running request, to a
// new one, and to the cache.
func TestPauseModes(t *testing.T) {
	prompt := []int32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17}
	const output = 400
	for mode, want := range map[string]struct {
		partial, preempted, cached bool
	}{
		"":                             {partial: true},
		"?mode=abort":                  {partial: true},
		"?mode=abort&clear_cache=no0":  {},
		"?mode=wait":                   {},
		"?mode=wait&clear_cache=false": {cached: true},
		"?mode=keep":                   {preempted: true},
		"?mode=keep&clear_cache=false": {cached: true},
	} {
		t.Run(mode, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newTestServer(t, Config{})
				defer s.core().close(shutDown)
				if mode == "?mode=abort&clear_cache=no0" {
					control(t, s, "POST", "/pause"+mode, "", 400)
					return
				}
				first := background(t, s, prompt, output)
				pass(2 * time.Second)
				paused := make(chan map[string]any, 1)
				go func() { paused <- control(t, s, "POST", "/pause"+mode, "", 200) }()
				synctest.Wait()
				if control(t, s, "GET", "/is_paused", "", 200)["is_paused"] != true {
					t.Error("it does not say that it is paused")
				}
				second := background(t, s, []int32{9, 9}, 10)
				pass(time.Minute)
				var kept []int32
				switch {
				case want.partial:
					c := (<-first).Choices[0]
					if n := len(c.TokenIDs); *c.FinishReason != "abort" || n == 0 || n == output {
						t.Errorf("%d tokens, finish %s", n, *c.FinishReason)
					}
					kept = c.TokenIDs
				case strings.HasPrefix(mode, "?mode=wait"):
					c := (<-first).Choices[0]
					kept = c.TokenIDs
					if len(kept) != output || *c.FinishReason != "length" {
						t.Errorf("%d tokens, finish %s", len(kept), *c.FinishReason)
					}
				default:
					if !isOpen(first) {
						t.Error("a kept request ended")
					}
				}
				if (<-paused)["status"] != "paused" || !isOpen(second) {
					t.Error("not paused, or a new request ran")
				}
				if cached := len(s.ResidentBlocks()) > 0; cached != want.cached {
					t.Errorf("blocks cached: %v", cached)
				}
				if got := s.Stats().Preemptions > 0; got != want.preempted {
					t.Errorf("preempted: %v", got)
				}
				control(t, s, "POST", "/resume", "", 200)
				pass(time.Minute)
				if c := <-second; len(c.Choices[0].TokenIDs) != 10 {
					t.Error("the new request does not end after the pause")
				}
				if kept == nil {
					kept = (<-first).Choices[0].TokenIDs
				}
				if !slices.Equal(kept, greedy("default").Continue(prompt, len(kept), 16)) {
					t.Error("a pause changes tokens")
				}
				if s := s.Stats(); s.UsedBlocks() != 0 || s.Waiting != 0 {
					t.Errorf("left over: %+v", s)
				}
			})
		})
	}
}

// TestWeightsChangeInMidGeneration: what is generated before is the old weights', what
// comes after the new ones'.
func TestWeightsChangeInMidGeneration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTestServer(t, Config{})
		defer s.core().close(shutDown)
		prompt := []int32{1, 2, 3}
		answer := background(t, s, prompt, 300)
		pass(3 * time.Second)
		control(t, s, "POST", "/pause?mode=keep", "", 200)
		cut := s.Requests()[0].Progress.OutputTokens
		control(t, s, "POST", "/update_weights", `{}`, 200)
		control(t, s, "POST", "/finish_weight_update", `{"weight_version":"v2"}`, 200)
		control(t, s, "POST", "/resume", "", 200)
		got := (<-answer).Choices[0].TokenIDs
		old := greedy("default").Continue(prompt, cut, 16)
		want := append(old, greedy("v2").Continue(append(slices.Clone(prompt), old...), 300-cut, 16)...)
		if cut < 10 || cut > 290 || !slices.Equal(got, want) {
			t.Errorf("cut at %d: %d tokens are not what the two versions make", cut, len(got))
		}
		// The next turn of the session finds the blocks of both.
		context := append(slices.Clone(prompt), got...)
		again := <-background(t, s, context, 1)
		if cached, want := *again.Usage.Details.CachedTokens, (len(context)-1)/16*16; cached != want {
			t.Errorf("%d tokens cached, want %d", cached, want)
		}
	})
}

// TestResetIsRefusedSilently as vLLM does while requests run, unless they are preempted.
func TestResetIsRefusedSilently(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTestServer(t, Config{})
		defer s.core().close(shutDown)
		answer := background(t, s, make([]int32, 40), 300)
		pass(time.Second)
		if control(t, s, "POST", "/reset_prefix_cache", "", 200)["success"] != false || len(s.ResidentBlocks()) == 0 {
			t.Error("the cache was reset under a running request")
		}
		if control(t, s, "POST", "/reset_prefix_cache?reset_running_requests=true", "", 200)["success"] != true || s.Stats().Preemptions != 1 {
			t.Error("the running request was not preempted")
		}
		if c := <-answer; len(c.Choices[0].TokenIDs) != 300 {
			t.Error("the preempted request does not end")
		}
		if control(t, s, "POST", "/reset_prefix_cache", "", 200)["success"] != true || len(s.ResidentBlocks()) != 0 {
			t.Error("an idle engine does not reset")
		}
	})
}

func TestSleepGivesTheCacheUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTestServer(t, Config{})
		defer s.core().close(shutDown)
		answer := background(t, s, make([]int32, 40), 300)
		pass(time.Second)
		control(t, s, "POST", "/sleep?level=9", "", 400)
		control(t, s, "POST", "/sleep?level=2", "", 200)
		if c := <-answer; *c.Choices[0].FinishReason != "abort" || len(s.ResidentBlocks()) != 0 {
			t.Error("a sleeping engine holds on to something")
		}
		if page := string(s.metricsPage()); !strings.Contains(page, `sleep_state="awake"} 0`) || !strings.Contains(page, `sleep_state="discard_all"} 1`) {
			t.Error("the metrics page does not say that it sleeps")
		}
		second := background(t, s, []int32{1}, 5)
		pass(time.Minute)
		if control(t, s, "GET", "/is_sleeping", "", 200)["is_sleeping"] != true || !isOpen(second) {
			t.Error("it does not sleep")
		}
		control(t, s, "POST", "/wake_up", "", 200)
		if c := <-second; len(c.Choices[0].TokenIDs) != 5 {
			t.Error("it does not wake up")
		}
	})
}

func TestAbortByName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTestServer(t, Config{})
		defer s.core().close(shutDown)
		answer := background(t, s, make([]int32, 40), 300)
		pass(time.Second)
		control(t, s, "POST", "/abort_requests", `{"request_ids":["other"]}`, 200)
		if !isOpen(answer) {
			t.Error("another request was aborted")
		}
		control(t, s, "POST", "/abort_requests", `{"request_ids":["cmpl-r7"]}`, 200)
		if c := <-answer; *c.Choices[0].FinishReason != "abort" {
			t.Error("not aborted")
		}
	})
}
