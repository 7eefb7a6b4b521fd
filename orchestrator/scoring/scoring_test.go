package scoring

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"holdfast/orchestrator/environment/command"
	"holdfast/orchestrator/environment/exchange"
	"holdfast/orchestrator/environment/failure"
	"holdfast/orchestrator/environment/spec"
)

func newScorer(t *testing.T, s spec.Scorer, config Config) Scorer {
	t.Helper()
	config.FirstRetryDelay = time.Millisecond
	scorer, err := New(s, config)
	if err != nil {
		t.Fatal(err)
	}
	return scorer
}

func scoreOne(t *testing.T, scorer Scorer, sample Sample) Outcome {
	t.Helper()
	outcomes := scorer.Score(t.Context(), []Sample{sample})
	if len(outcomes) != 1 {
		t.Fatalf("%d outcomes for one sample", len(outcomes))
	}
	return outcomes[0]
}

func wantFailure(t *testing.T, outcome Outcome, kind failure.Kind, says string) {
	t.Helper()
	if outcome.Failure == nil || outcome.Failure.Kind != kind || !strings.Contains(outcome.Failure.Error(), says) || outcome.Reward != 0 {
		t.Errorf("got %+v, want %v with %q", outcome, kind, says)
	}
}

func TestMatches(t *testing.T) {
	answers := func(answers ...string) spec.Scorer {
		return spec.Scorer{Kind: spec.ScorerExactMatch, Answers: answers}
	}
	with := func(s spec.Scorer, extract spec.Extract, ignoreCase bool) spec.Scorer {
		s.Extract, s.IgnoreCase = extract, ignoreCase
		return s
	}
	numeric := func(target string, absolute, relative float64) spec.Scorer {
		return spec.Scorer{Kind: spec.ScorerNumericMatch, Target: target, AbsoluteTolerance: absolute, RelativeTolerance: relative}
	}
	ids := spec.Scorer{Kind: spec.ScorerExactMatch, TokenIDs: []int32{7, 8}}
	for name, c := range map[string]struct {
		scorer spec.Scorer
		sample Sample
		reward float64
	}{
		"ids at the end":              {ids, Sample{TokenIDs: []int32{1, 7, 8}}, 1},
		"ids elsewhere":               {ids, Sample{TokenIDs: []int32{7, 8, 1}}, 0},
		"fewer ids":                   {ids, Sample{TokenIDs: []int32{8}}, 0},
		"text":                        {answers("no", " yes"), Sample{Text: "yes\n"}, 1},
		"more text":                   {answers("yes"), Sample{Text: "yes, but"}, 0},
		"another case":                {answers("yes"), Sample{Text: "Yes"}, 0},
		"the case ignored":            {with(answers("JA ÄH"), "", true), Sample{Text: "ja äh"}, 1},
		"the last line":               {with(answers("42"), spec.ExtractLastLine, false), Sample{Text: "So:\n\n 42 \n\n"}, 1},
		"not the last line":           {with(answers("42"), spec.ExtractLastLine, false), Sample{Text: "42\nbye"}, 0},
		"boxed":                       {with(answers("x+1"), spec.ExtractBoxed, false), Sample{Text: `\boxed{2} no, \boxed{ x+1 }.`}, 1},
		"not boxed":                   {with(answers(""), spec.ExtractBoxed, false), Sample{Text: ""}, 0},
		"the number":                  {numeric("1000", 0, 0), Sample{Text: "It is 1,000."}, 1},
		"another number":              {numeric("1000", 0, 0), Sample{Text: "It is 1,000.1"}, 0},
		"no number":                   {numeric("0", 0, 0), Sample{Text: "none"}, 0},
		"a fraction is exact":         {numeric("1/3", 0, 0), Sample{Text: `\boxed{\frac{2}{6}}`}, 1},
		"a decimal of it is not":      {numeric("1/3", 0, 0), Sample{Text: "0.3333333333333333333"}, 0},
		"within absolute tolerance":   {numeric("1/3", 0.001, 0), Sample{Text: "0.333"}, 1},
		"within relative tolerance":   {numeric("-1e6", 0, 0.01), Sample{Text: "-1,010,000"}, 1},
		"beyond relative tolerance":   {numeric("-1e6", 0, 0.01), Sample{Text: "-1,010,001"}, 0},
		"the larger tolerance counts": {numeric("1", 0.5, 0.01), Sample{Text: "1.5"}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			if got := scoreOne(t, newScorer(t, c.scorer, Config{}), c.sample); got.Failure != nil || got.Reward != c.reward {
				t.Errorf("got %+v, want %v", got, c.reward)
			}
		})
	}
}

func TestEnvironmentReward(t *testing.T) {
	scorer := newScorer(t, spec.Scorer{Kind: spec.ScorerEnvironment}, Config{})
	reward := 0.25
	if got := scoreOne(t, scorer, Sample{EnvironmentReward: &reward}); got.Failure != nil || got.Reward != 0.25 {
		t.Errorf("got %+v", got)
	}
	wantFailure(t, scoreOne(t, scorer, Sample{ID: "s1"}), failure.Malformed, "scoring session s1: malformed: the environment gave no reward")
}

// judge is a scorer's server: the reward is the text's length.
func judge(t *testing.T, change func(n int, w http.ResponseWriter, results []map[string]any) bool) (url string, sizes *[]int) {
	t.Helper()
	sizes = new([]int)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var request samplesDocument
		if err := json.NewDecoder(r.Body).Decode(&request); err != nil || string(request.Task) != `{"rubric":1}` || r.Header.Get("Authorization") != "Bearer secret" {
			t.Errorf("got %+v, %v", request, err)
		}
		*sizes = append(*sizes, len(request.Samples))
		var results []map[string]any
		for _, sample := range request.Samples {
			results = append(results, map[string]any{"id": sample.ID, "reward": len(sample.Text), "detail": map[string]any{"text": sample.Text}})
		}
		if change != nil && change(len(*sizes), w, results) {
			return
		}
		if err := json.NewEncoder(w).Encode(map[string]any{"results": results}); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(server.Close)
	return server.URL, sizes
}

func httpScorerOf(t *testing.T, url string, timeoutSeconds float64) Scorer {
	t.Helper()
	return newScorer(t, spec.Scorer{Kind: spec.ScorerHTTP, HTTP: &spec.HTTPScorer{
		URL: url, BatchSamples: 2, TimeoutSeconds: timeoutSeconds, Credential: "judge", Task: json.RawMessage(`{"rubric":1}`),
	}}, Config{Access: exchange.Access{Credentials: map[string]string{"judge": "secret"}}})
}

func fiveSamples() []Sample {
	samples := make([]Sample, 5)
	for i := range samples {
		samples[i] = Sample{ID: fmt.Sprintf("s%d", i), Text: strings.Repeat("x", i)}
	}
	return samples
}

func TestHTTPScorerBatches(t *testing.T) {
	url, sizes := judge(t, func(_ int, _ http.ResponseWriter, results []map[string]any) bool {
		if len(results) == 2 { // order is the server's affair
			results[0], results[1] = results[1], results[0]
		}
		return false
	})
	for i, outcome := range httpScorerOf(t, url, 0).Score(t.Context(), fiveSamples()) {
		want := fmt.Sprintf(`{"text":"%s"}`, strings.Repeat("x", i))
		if outcome.Failure != nil || outcome.Reward != float64(i) || string(outcome.Detail) != want {
			t.Errorf("sample %d got %+v", i, outcome)
		}
	}
	if fmt.Sprint(*sizes) != "[2 2 1]" {
		t.Errorf("the batches had %v samples", *sizes)
	}
}

// TestHTTPScorerFailsSampleBySample has each of five samples fare differently.
func TestHTTPScorerFailsSampleBySample(t *testing.T) {
	url, sizes := judge(t, func(n int, w http.ResponseWriter, results []map[string]any) bool {
		switch n {
		case 1:
			w.WriteHeader(http.StatusServiceUnavailable)
			return true
		case 2: // the same batch again
			results[1]["error"] = "no reference\nanswer"
		case 3:
			results[0]["id"] = "another"
			delete(results[1], "reward")
		case 4:
			http.Error(w, "overlong", http.StatusRequestEntityTooLarge)
			return true
		}
		return false
	})
	got := httpScorerOf(t, url, 0).Score(t.Context(), fiveSamples())
	if got[0].Failure != nil || got[0].Reward != 0 {
		t.Errorf("sample 0 got %+v", got[0])
	}
	wantFailure(t, got[1], failure.Refused, "scoring session s1: refused: the scorer says: no reference answer")
	wantFailure(t, got[2], failure.Malformed, "no result with this id")
	wantFailure(t, got[3], failure.Malformed, "neither reward nor error")
	wantFailure(t, got[4], failure.Refused, "status 413): overlong")
	if fmt.Sprint(*sizes) != "[2 2 2 1]" {
		t.Errorf("the requests had %v samples", *sizes)
	}
}

func TestHTTPScorerIsHeldToItsSchema(t *testing.T) {
	for name, c := range map[string]struct {
		answer string
		kind   failure.Kind
		says   string
	}{
		"NaN":      {`{"results":[{"id":"s","reward":NaN}]}`, failure.Malformed, "not as documented"},
		"infinity": {`{"results":[{"id":"s","reward":1e999}]}`, failure.Malformed, "not as documented"},
		"detail":   {`{"results":[{"id":"s","reward":1,"detail":[1]}]}`, failure.Malformed, "detail must be a JSON object"},
		"twice":    {`{"results":[{"id":"s","reward":1},{"id":"s","reward":2}]}`, failure.Malformed, "more than one result with this id"},
		"flood":    {`{"results":[{"id":"s","reward":1,"detail":{"x":"` + strings.Repeat("x", 5<<20) + `"}}]}`, failure.TooLarge, "more than 4194304"},
		"big":      {`{"results":[{"id":"s","reward":1,"detail":{"x":"` + strings.Repeat("x", 65<<10) + `"}}]}`, failure.Malformed, "detail has"},
	} {
		t.Run(name, func(t *testing.T) {
			url, _ := judge(t, func(_ int, w http.ResponseWriter, _ []map[string]any) bool {
				_, _ = io.WriteString(w, c.answer) // a client that has read enough hangs up
				return true
			})
			wantFailure(t, scoreOne(t, httpScorerOf(t, url, 0), Sample{ID: "s"}), c.kind, c.says)
		})
	}
}

func TestHTTPScorerThatHangs(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	hanging, _ := judge(t, func(int, http.ResponseWriter, []map[string]any) bool {
		<-release
		return true
	})
	// On a busy machine the time may be over before the call arrives.
	wantFailure(t, scoreOne(t, httpScorerOf(t, hanging, 0.2), Sample{ID: "s"}), failure.Timeout, "no answer within 200ms")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	leaving, _ := judge(t, func(int, http.ResponseWriter, []map[string]any) bool {
		cancel() // the caller leaves once its call has arrived
		<-release
		return true
	})
	for _, outcome := range httpScorerOf(t, leaving, 0).Score(ctx, fiveSamples()) {
		wantFailure(t, outcome, failure.Cancelled, "")
	}
}

func newCommands(t *testing.T) *command.Runner {
	t.Helper()
	root := t.TempDir()
	if err := os.Chmod(filepath.Dir(root), 0o755); err != nil {
		t.Fatal(err)
	}
	runner, err := command.NewRunner(t.Context(), command.Config{Root: root})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if left, err := filepath.Glob(filepath.Join(root, "owner-*", "*", "work")); err != nil || len(left) > 0 {
			t.Errorf("directories %v are left, %v", left, err)
		}
		if err := runner.Close(); err != nil {
			t.Error(err)
		}
	})
	return runner
}

func TestExecScorer(t *testing.T) {
	commands := newCommands(t)
	for name, c := range map[string]struct {
		script string
		limits spec.Limits
		reward float64
		kind   failure.Kind
		says   string
	}{
		"scores":         {`grep -q '"id":"s1","text":"yes"' && echo '{"reward":0.5,"detail":{"why":"yes"}}'`, spec.Limits{}, 0.5, 0, ""},
		"gives up":       {`echo '{"error":"no reference"}'`, spec.Limits{}, 0, failure.Refused, "the scorer says: no reference"},
		"breaks":         {`echo cannot >&2; exit 4`, spec.Limits{}, 0, failure.Died, "status 4: cannot"},
		"hangs":          {`sleep 1000`, spec.Limits{WallSeconds: 0.2}, 0, failure.Timeout, "was ended after"},
		"floods":         {`yes`, spec.Limits{OutputBytes: 1 << 20}, 0, failure.LimitReached, "its limit of output"},
		"says nothing":   {`:`, spec.Limits{}, 0, failure.Malformed, "not as documented"},
		"says NaN":       {`echo '{"reward":NaN}'`, spec.Limits{}, 0, failure.Malformed, "not as documented"},
		"has no program": {"", spec.Limits{}, 0, failure.Died, "no folder of PATH"},
	} {
		t.Run(name, func(t *testing.T) {
			program := []string{"sh", "-c", c.script}
			if c.script == "" {
				program = []string{"no-such-program"}
			}
			scorer := newScorer(t, spec.Scorer{Kind: spec.ScorerExec, Program: &spec.Program{Command: program, Limits: c.limits}}, Config{Commands: commands})
			got := scoreOne(t, scorer, Sample{ID: "s1", Text: "yes"})
			if c.kind != 0 {
				wantFailure(t, got, c.kind, c.says)
				return
			}
			if got.Failure != nil || got.Reward != c.reward || string(got.Detail) != `{"why":"yes"}` {
				t.Errorf("got %+v", got)
			}
		})
	}
}

// TestSamplesFollowTheSchema holds what a scorer is sent to the documented schema.
func TestSamplesFollowTheSchema(t *testing.T) {
	raw, err := os.ReadFile("../../docs/environments.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(raw), "```json schema\n")
	text, _, _ = strings.Cut(text, "\n```")
	document, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource("environments.json", document); err != nil {
		t.Fatal(err)
	}
	schema, err := compiler.Compile("environments.json#/$defs/samples")
	if err != nil {
		t.Fatal(err)
	}
	reward := 0.5
	sent, err := json.Marshal(samplesDocument{Task: json.RawMessage(`{}`), Samples: []Sample{{ID: "s0"}, {
		ID: "s1", Text: "x", TokenIDs: []int32{1}, Messages: json.RawMessage(`[]`), Metadata: json.RawMessage(`{}`), EnvironmentReward: &reward,
	}}})
	if err != nil {
		t.Fatal(err)
	}
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(sent))
	if err != nil {
		t.Fatal(err)
	}
	if err := schema.Validate(value); err != nil {
		t.Error(err)
	}
}

func TestNewRefuses(t *testing.T) {
	program := spec.Scorer{Kind: spec.ScorerExec, Program: &spec.Program{Command: []string{"true"}}}
	server := spec.Scorer{Kind: spec.ScorerHTTP, HTTP: &spec.HTTPScorer{URL: "http://a.example"}}
	for name, c := range map[string]struct {
		scorer spec.Scorer
		config Config
		kind   failure.Kind
	}{
		"a bad spec":                {spec.Scorer{Kind: "judge"}, Config{}, failure.Refused},
		"programs without a runner": {program, Config{}, failure.Disabled},
		"a host":                    {server, Config{Access: exchange.Access{AllowedHosts: []string{"b.example"}}}, failure.Disabled},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := New(c.scorer, c.config)
			var known *failure.Error
			if !errors.As(err, &known) || known.Kind != c.kind {
				t.Errorf("got %v, want %v", err, c.kind)
			}
		})
	}
}
