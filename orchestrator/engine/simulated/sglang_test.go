package simulated

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func newSGLang(t *testing.T, cfg Config) *Server {
	cfg.Dialect = SGLang
	return newTestServer(t, cfg)
}

// generated is SGLang's answer as a client would declare it.
type generated struct {
	Text      *string `json:"text"`
	OutputIDs []int32 `json:"output_ids"`
	Meta      struct {
		ID           string         `json:"id"`
		Finish       map[string]any `json:"finish_reason"`
		Prompt       int            `json:"prompt_tokens"`
		Completion   int            `json:"completion_tokens"`
		Cached       int            `json:"cached_tokens"`
		Rank         int            `json:"dp_rank"`
		Version      string         `json:"weight_version"`
		Logprobs     [][]any        `json:"output_token_logprobs"`
		TotalSeconds float64        `json:"e2e_latency"`
	} `json:"meta_info"`
	Error *struct {
		Message string `json:"message"`
	} `json:"error"`
}

func generate(t *testing.T, s *Server, body string) *httptest.ResponseRecorder {
	t.Helper()
	recorder := httptest.NewRecorder()
	s.Handler().ServeHTTP(recorder, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/generate", strings.NewReader(body)))
	return recorder
}

func document(t *testing.T, text []byte) (g generated) {
	t.Helper()
	if err := json.Unmarshal(text, &g); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return g
}

// TestGenerateDocument compares a whole answer with one written by hand.
func TestGenerateDocument(t *testing.T) {
	s := newSGLang(t, Config{TimeScale: 1e5, WeightVersion: "step-3"})
	body := `{"input_ids":[1,2,3],"rid":"r1","sampling_params":{"max_new_tokens":2,"ignore_eos":true,"temperature":0,"top_p":0.9,"min_new_tokens":1},"return_logprob":true}`
	text := generate(t, s, body).Body.String()
	ids := greedy("step-3").Continue([]int32{1, 2, 3}, 2, 16)
	got := document(t, []byte(text))
	logprobs := got.Meta.Logprobs
	want := fmt.Sprintf(`{"text":"","output_ids":[%d,%d],"meta_info":{"id":"r1","finish_reason":{"type":"length","length":2},"prompt_tokens":3,"completion_tokens":2,"cached_tokens":0,`+
		`"total_retractions":0,"dp_rank":0,"weight_version":"step-3","output_token_logprobs":[[%.3f,%d,null],[%.3f,%d,null]],"e2e_latency":`,
		ids[0], ids[1], logprobs[0][0], ids[0], logprobs[1][0], ids[1])
	if !strings.HasPrefix(text, want) {
		t.Errorf("got  %s\nwant %s", text, want)
	}
	if logprobs[0][0].(float64) > 0 || got.Meta.TotalSeconds <= 0 {
		t.Errorf("%v, %v s", logprobs, got.Meta.TotalSeconds)
	}
	stop := document(t, generate(t, s, fmt.Sprintf(`{"input_ids":[1,2,3],"sampling_params":{"max_new_tokens":9,"temperature":0,"stop_token_ids":[%d]}}`, ids[1])).Body.Bytes())
	if !slices.Equal(stop.OutputIDs, ids) || stop.Meta.Finish["type"] != "stop" || stop.Meta.Finish["matched"] != float64(ids[1]) || stop.Meta.Logprobs != nil {
		t.Errorf("%+v", stop)
	}
	words := document(t, generate(t, s, `{"text":"one two three","sampling_params":{"max_new_tokens":4,"ignore_eos":true}}`).Body.Bytes())
	if words.Text == nil || len(strings.Fields(*words.Text)) != 4 || words.Meta.ID == "" {
		t.Errorf("%+v", words)
	}
}

func TestGenerateRefuses(t *testing.T) {
	s := newSGLang(t, Config{TimeScale: 1e5})
	for body, want := range map[string]string{
		`{}`: "prompt is missing",
		`{"input_ids":[1],"sampling_params":{"n":2}}`:                 "one completion",
		`{"input_ids":[1],"sampling_params":[]}`:                      "malformed",
		`{"input_ids":[1],"data_parallel_rank":3}`:                    "rank",
		`{"input_ids":[1],"data_parallel_rank":"x"}`:                  "data_parallel_rank",
		`{"input_ids":[1],"sampling_params":{"max_new_tokens":5000}}`: "maximum context length",
	} {
		r := generate(t, s, body)
		if g := document(t, r.Body.Bytes()); r.Code != 400 || g.Error == nil || !strings.Contains(g.Error.Message, want) {
			t.Errorf("%s: %d %s", body, r.Code, r.Body)
		}
	}
}

// TestStreamsRepeatOrAdd: SGLang's events hold all so far, or with incremental streaming
// what is new.
func TestStreamsRepeatOrAdd(t *testing.T) {
	for _, incremental := range []bool{false, true} {
		s := newSGLang(t, Config{TimeScale: 100, IncrementalStream: incremental, StreamIntervalTokens: 16, StreamTick: time.Millisecond})
		body := `{"input_ids":[1,2,3],"stream":true,"return_logprob":true,"sampling_params":{"max_new_tokens":200,"ignore_eos":true,"temperature":0}}`
		response := generate(t, s, body)
		if got := response.Header().Get("Content-Type"); !strings.HasPrefix(got, "text/event-stream") {
			t.Errorf("content type %q", got)
		}
		events := strings.Split(strings.TrimSuffix(response.Body.String(), "\n\n"), "\n\n")
		if len(events) < 4 || events[len(events)-1] != "data: [DONE]" {
			t.Fatalf("%d events, the last is %q", len(events), events[len(events)-1])
		}
		var all []int32
		for i, event := range events[:len(events)-1] {
			g := document(t, []byte(strings.TrimPrefix(event, "data: ")))
			if incremental {
				all = append(all, g.OutputIDs...)
			} else {
				if !slices.Equal(all, g.OutputIDs[:len(all)]) {
					t.Fatalf("event %d takes back what was said", i)
				}
				all = g.OutputIDs
			}
			last := i == len(events)-2
			if g.Meta.Completion != len(all) || len(g.Meta.Logprobs) != len(g.OutputIDs) || last != (g.Meta.Finish != nil) {
				t.Errorf("event %d: %d tokens of %d, %d logprobs, finish %v", i, len(g.OutputIDs), g.Meta.Completion, len(g.Meta.Logprobs), g.Meta.Finish)
			}
		}
		if !slices.Equal(all, greedy("default").Continue([]int32{1, 2, 3}, 200, 16)) {
			t.Errorf("incremental %v: other tokens", incremental)
		}
	}
}

func TestServerInfoAndMetrics(t *testing.T) {
	s := newSGLang(t, Config{Model: "m", TimeScale: 1e5, Ranks: 2, KVEvents: KVEvents{Endpoint: "tcp://127.0.0.1:0", Topic: "x"}})
	defer s.Stop(t.Context())
	for range 2 {
		generate(t, s, `{"input_ids":[`+strings.Repeat("7,", 39)+`7],"routed_dp_rank":1,"sampling_params":{"max_new_tokens":3,"ignore_eos":true}}`)
	}
	info := control(t, s, "GET", "/server_info", "", 200)
	events := info["kv_events"].(map[string]any)
	for key, want := range map[string]any{
		"publisher": "zmq", "endpoint_host": "127.0.0.1", "topic": "x", "block_size": 16.0, "dp_size": 2.0,
	} {
		if events[key] != want {
			t.Errorf("kv_events.%s = %v", key, events[key])
		}
	}
	if e := s.KVEndpoints()[1].Endpoint; e != fmt.Sprintf("tcp://127.0.0.1:%v", events["endpoint_port_base"].(float64)+1) {
		t.Errorf("rank 1 is at %s, rank 0 at %v", e, events["endpoint_port_base"])
	}
	if info["max_total_num_tokens"] != 1024.0 || info["page_size"] != 16.0 || info["context_length"] != 1024.0 || info["dp_size"] != 2.0 {
		t.Errorf("%v", info)
	}
	loads := control(t, s, "GET", "/v1/loads", "", 200)["loads"].([]any)
	if len(loads) != 2 || loads[1].(map[string]any)["dp_rank"] != 1.0 || loads[1].(map[string]any)["cache_hit_rate"] != 0.4 || loads[0].(map[string]any)["cache_hit_rate"] != 0.0 {
		t.Errorf("%v", loads)
	}
	page := string(s.metricsPage())
	const labels = `{dp_rank="1",engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} `
	for _, line := range []string{
		"sglang:num_running_reqs" + labels + "0", "sglang:num_queue_reqs" + labels + "0", "sglang:token_usage" + labels + "0",
		"sglang:max_total_num_tokens" + labels + "1024", "sglang:page_size" + labels + "16", "sglang:cached_tokens_total" + labels + "32",
		"sglang:prompt_tokens_total" + labels + "80", "sglang:generation_tokens_total" + labels + "6", "sglang:evicted_tokens_total" + labels + "0",
	} {
		if !strings.Contains(page, line+"\n") {
			t.Errorf("the metrics page has no %s", line)
		}
	}
	if got := control(t, s, "GET", "/get_model_info", "", 200); got["weight_version"] != "default" || got["model_path"] != "m" {
		t.Errorf("%v", got)
	}
}

// TestSGLangPauses: what is pending, where it is afterwards, and whether the cache can be flushed.
func TestSGLangPauses(t *testing.T) {
	for mode, want := range map[string]struct {
		flush     int
		preempted int64
	}{"abort": {200, 0}, "retract": {200, 1}, "in_place": {400, 0}} {
		t.Run(mode, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSGLang(t, Config{})
				defer s.core().close(shutDown)
				answer := make(chan generated, 1)
				go func() {
					answer <- document(t, generate(t, s, `{"input_ids":[1,2,3],"rid":"abc-1","sampling_params":{"max_new_tokens":300,"ignore_eos":true,"temperature":0}}`).Body.Bytes())
				}()
				synctest.Wait()
				pass(2 * time.Second)
				control(t, s, "POST", "/flush_cache", "", 400)
				control(t, s, "POST", "/pause_generation", `{"mode":"`+mode+`"}`, 200)
				pass(time.Minute)
				control(t, s, "POST", "/flush_cache", "", want.flush)
				cut := 0
				if list := s.Requests(); len(list) > 0 {
					cut = list[0].Progress.OutputTokens
				}
				body := `{"model_path":"x","weight_version":"v2"`
				if mode == "in_place" {
					control(t, s, "POST", "/update_weights_from_disk", body+`}`, 400)
					body += `,"flush_cache":false`
				}
				control(t, s, "POST", "/update_weights_from_disk", body+`}`, 200)
				control(t, s, "POST", "/continue_generation", "", 200)
				g := <-answer
				if mode == "abort" {
					if g.Meta.Finish["type"] != "abort" || len(g.OutputIDs) == 0 || g.Meta.Version != "default" {
						t.Errorf("%+v", g.Meta)
					}
					return
				}
				old := greedy("default").Continue([]int32{1, 2, 3}, cut, 16)
				all := append(old, greedy("v2").Continue(append([]int32{1, 2, 3}, old...), 300-cut, 16)...)
				if cut == 0 || !slices.Equal(g.OutputIDs, all) || g.Meta.Version != "v2" || s.Stats().Preemptions != want.preempted {
					t.Errorf("cut at %d, %d tokens, %+v, %d preemptions", cut, len(g.OutputIDs), g.Meta, s.Stats().Preemptions)
				}
			})
		})
	}
}

// TestSGLangWeights: an update of an engine that is not paused waits; a mere new version
// aborts everything unless told not to.
func TestSGLangWeights(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSGLang(t, Config{})
		defer s.core().close(shutDown)
		start := func(rid string) <-chan generated {
			answer := make(chan generated, 1)
			go func() {
				answer <- document(t, generate(t, s, `{"input_ids":[1,2,3],"rid":"`+rid+`","sampling_params":{"max_new_tokens":300,"ignore_eos":true}}`).Body.Bytes())
			}()
			synctest.Wait()
			return answer
		}
		first := start("a-1")
		control(t, s, "POST", "/update_weights_from_tensor", `{"weight_version":"2"}`, 200)
		synctest.Wait()
		if isOpen(first) {
			t.Error("the weights changed under a request")
		}
		second := start("a-2")
		control(t, s, "POST", "/update_weight_version", `{"new_version":"3","abort_all_requests":false}`, 200)
		if !isOpen(second) || control(t, s, "GET", "/get_weight_version", "", 200)["weight_version"] != "3" {
			t.Error("a version aborts although told not to, or is not taken")
		}
		pass(time.Second)
		control(t, s, "POST", "/update_weight_version", `{"new_version":"4"}`, 200)
		if g := <-second; g.Meta.Finish["type"] != "abort" || g.Meta.Version != "3" {
			t.Errorf("%+v", g.Meta)
		}
		third, fourth := start("a-3"), start("b-3")
		pass(time.Second)
		control(t, s, "POST", "/abort_request", `{"rid":"a-"}`, 200)
		if g := <-third; g.Meta.Finish["type"] != "abort" || !isOpen(fourth) {
			t.Error("the prefix of a rid does not abort, or aborts too much")
		}
		control(t, s, "POST", "/abort_request", `{"abort_all":true}`, 200)
		if g := <-fourth; g.Meta.Finish["type"] != "abort" {
			t.Errorf("%+v", g.Meta)
		}
	})
}

// TestRanksHaveEventsOfTheirOwn: each rank's events rebuild that rank's table, by SGLang's
// encoding, in which a salt does not change a hash.
func TestRanksHaveEventsOfTheirOwn(t *testing.T) {
	s := newSGLang(t, Config{TimeScale: 3000, Ranks: 2, FirstRank: 4, StreamTick: time.Millisecond, KVEvents: KVEvents{
		Endpoint: "tcp://127.0.0.1:0", ReplayEndpoint: "tcp://127.0.0.1:0", FlushIdle: true,
	}})
	defer s.Stop(t.Context())
	followers := []*follower{newFollower(t), newFollower(t)}
	n := 0
	for round := range 4 {
		load(t, s, uint64(round), 80, "/generate", func(prompt []int32, output int, salt string) string {
			n++
			return fmt.Sprintf(`{"input_ids":%s,"extra_key":%q,"data_parallel_rank":%d,"sampling_params":{"max_new_tokens":%d,"ignore_eos":true}}`, jsonInts(prompt), salt, 4+n%2, output)
		})
		for rank, f := range followers {
			resident := map[uint64]int{}
			c := s.life.Load().cores[rank]
			blocks := s.RankResidentBlocks(4 + rank)
			f.catchUp(s.KVEndpoints()[rank])
			c.look(func() {
				for _, block := range blocks {
					key := blockHash(block)
					for _, ch := range c.chains.byID {
						if i := slices.Index(ch.hashes, key); i >= 0 {
							resident[uint64(key^ch.saltHash)]++
							break
						}
					}
				}
			})
			if !reflect.DeepEqual(f.blocks, resident) || len(blocks) < 20 {
				t.Fatalf("round %d, rank %d: events leave %d blocks, %d are resident", round, rank, len(f.blocks), len(resident))
			}
		}
	}
	if r := s.KVEndpoints(); r[0].Rank != 4 || r[1].Rank != 5 || r[0].Published == 0 || r[1].Published == 0 {
		t.Errorf("%+v", r)
	}
}

func FuzzGenerateRequest(f *testing.F) {
	for _, seed := range []string{
		`{"input_ids":[1,2,3],"sampling_params":{"max_new_tokens":4,"min_new_tokens":1,"stop_token_ids":[3],"sampling_seed":1},"stream":true,"rid":"a"}`,
		`{"text":"text","return_logprob":true,"extra_key":"x","priority":0,"data_parallel_rank":0}`,
		`{"input_ids":[[1]]}`,
	} {
		f.Add([]byte(seed))
	}
	cfg := Config{Engine: smallEngine(), Dialect: SGLang}.withDefaults()
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := parseGenerate(body, nil, &cfg)
		if err != nil {
			return
		}
		if !json.Valid(body) {
			t.Fatalf("accepted %q", body)
		}
		if len(r.Prompt) == 0 || r.MaxTokens < 1 || len(r.Prompt)+r.MaxTokens > cfg.Engine.MaxContextTokens || r.MinTokens > r.MaxTokens {
			t.Fatalf("accepted %q as %+v", body, r)
		}
	})
}
