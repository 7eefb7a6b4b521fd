package trace

import (
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"holdfast/router/sim/workload"
	"holdfast/workflows/task"
)

func originOf(t *testing.T, spec task.Spec) Origin {
	t.Helper()
	var o Origin
	if err := json.Unmarshal(spec.Metadata, &o); err != nil {
		t.Fatal(err)
	}
	return o
}

func ofClass(specs []task.Spec, class string) []task.Spec {
	return slices.DeleteFunc(slices.Clone(specs), func(s task.Spec) bool { return s.Class != class })
}

// What the demonstration promises must hold for any seed that a user picks.
func TestDemoBatchKeepsItsPromisesForEverySeed(t *testing.T) {
	for seed := range uint64(200) {
		specs, err := DemoBatch(seed)
		if err != nil {
			t.Fatal(err)
		}
		totals := Summarise(specs)
		if len(totals) != 3 || totals[0].Sessions != 60 || totals[1].Sessions != 22 || totals[2].Sessions != 40 {
			t.Fatalf("seed %d: %+v", seed, totals)
		}
		if totals[0].Turns < 900 {
			t.Errorf("seed %d: agent sessions have %d turns, want at least 900", seed, totals[0].Turns)
		}
		var outputTokens int64
		for _, c := range totals {
			outputTokens += c.OutputTokens
			if c.MaxContextTokens > DemoContextTokens {
				t.Errorf("seed %d: %s reaches %d tokens", seed, c.Class, c.MaxContextTokens)
			}
		}
		// Decoded at 15 ms a step with a dozen sessions side by side, more than
		// this would not fit the demonstration's minutes.
		if outputTokens > 1_000_000 {
			t.Errorf("seed %d: %d tokens to generate", seed, outputTokens)
		}
	}
}

func TestDemoBatchIsAValidBatchOfDistinctTasks(t *testing.T) {
	specs, err := DemoBatch(1)
	if err != nil {
		t.Fatal(err)
	}
	ids := map[string]bool{}
	for _, spec := range specs {
		raw, err := json.Marshal(spec)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := task.Decode(raw, spec.ID); err != nil {
			t.Errorf("the service would refuse it: %v", err)
		}
		if ids[spec.ID] {
			t.Errorf("id %s twice", spec.ID)
		}
		ids[spec.ID] = true
		if spec.Environment.TimeScale != DemoTimeScale {
			t.Errorf("%s has time scale %v", spec.ID, spec.Environment.TimeScale)
		}
	}
}

func TestCompositionIsAFunctionOfItsSeed(t *testing.T) {
	first, _ := DemoBatch(7)
	again, _ := DemoBatch(7)
	other, _ := DemoBatch(8)
	if !reflect.DeepEqual(first, again) {
		t.Error("the same seed gave another batch")
	}
	if reflect.DeepEqual(first, other) {
		t.Error("another seed gave the same batch")
	}
}

// Agent tasks must carry the recorded numbers, and their metadata must lead to
// the record and name everything that is not in it.
func TestAgentTasksReplayWhatWasRecorded(t *testing.T) {
	specs, err := DemoBatch(3)
	if err != nil {
		t.Fatal(err)
	}
	used := map[string]int{}
	for _, spec := range ofClass(specs, workload.Agent) {
		o := originOf(t, spec)
		recorded := findSession(t, o)
		used[o.Trace]++
		if o.Source == "" || o.Commit == "" || o.Licence == "" {
			t.Errorf("%s does not say where it is from: %+v", spec.ID, o)
		}
		prompt := recorded.PromptTokens
		if slices.Contains(o.Composed, "system_prompt") {
			prompt += Demo(3).AgentSystemTokens
		}
		if spec.Prompt.Synthetic.Tokens != prompt || spec.Prompt.Synthetic.SharedTokens == 0 {
			t.Errorf("%s starts with %+v, recorded %d", spec.ID, spec.Prompt.Synthetic, recorded.PromptTokens)
		}
		if len(spec.Environment.Turns)+o.TurnsCut != len(recorded.Turns) {
			t.Errorf("%s has %d turns and %d cut of %d", spec.ID, len(spec.Environment.Turns), o.TurnsCut, len(recorded.Turns))
		}
		last := len(spec.Environment.Turns) - 1
		for i, turn := range spec.Environment.Turns {
			want := recorded.Turns[i]
			if turn.OutputTokens != want.OutputTokens || i < last && turn.AppendTokens != want.AppendTokens {
				t.Errorf("%s turn %d is %+v, recorded %+v", spec.ID, i, turn, want)
			}
			if want.IntervalSeconds != UnknownSeconds && turn.GapSeconds > want.IntervalSeconds {
				t.Errorf("%s turn %d waits %v s within an interval of %v s", spec.ID, i, turn.GapSeconds, want.IntervalSeconds)
			}
		}
		switch o.Trace {
		case MiniSWE:
			if !slices.Equal(o.Derived, []string{"gap_seconds"}) || !slices.Equal(o.Composed, []string{"system_prompt"}) || spec.Scorer != nil {
				t.Errorf("%s: %+v, scorer %+v", spec.ID, o, spec.Scorer)
			}
		case TauBench:
			if !slices.Equal(o.Composed, []string{"gap_seconds"}) || o.Basis == "" || o.Group == "" || *spec.Environment.Reward != *recorded.Reward || spec.Scorer == nil {
				t.Errorf("%s: %+v, scorer %+v", spec.ID, o, spec.Scorer)
			}
		}
	}
	if used[MiniSWE] != 30 || used[TauBench] != 30 {
		t.Errorf("sessions by trace: %v", used)
	}
}

func findSession(t *testing.T, o Origin) Session {
	t.Helper()
	tr, err := LoadShipped(o.Trace)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range tr.Sessions {
		if s.ID == o.Session {
			return s
		}
	}
	t.Fatalf("no session %s in %s", o.Session, o.Trace)
	return Session{}
}

// Every session of a trace is used once before one is used twice.
func TestDecksAreDealtWhole(t *testing.T) {
	c := Demo(5)
	c.AgentTraces, c.Agent.Sessions, c.MinAgentTurns = []string{MiniSWE}, 25, 0
	specs, err := Compose(c)
	if err != nil {
		t.Fatal(err)
	}
	used := map[string]int{}
	for _, spec := range ofClass(specs, workload.Agent) {
		used[originOf(t, spec).Session]++
	}
	if len(used) != 10 {
		t.Errorf("%d of 10 sessions used", len(used))
	}
	for id, n := range used {
		if n < 2 || n > 3 {
			t.Errorf("session %s used %d times in 25", id, n)
		}
	}
}

// Prompts of one source must share their system prompt token by token and
// nothing after it, or a prefix cache would see another structure.
func TestPromptsShareTheirSystemPromptAndNoMore(t *testing.T) {
	specs, err := DemoBatch(1)
	if err != nil {
		t.Fatal(err)
	}
	byTrace := map[string][][]int32{}
	shared := map[string]int{}
	for _, spec := range ofClass(specs, workload.Agent) {
		o := originOf(t, spec)
		byTrace[o.Trace] = append(byTrace[o.Trace], spec.Prompt.Synthetic.AppendTokens(nil))
		shared[o.Trace] = spec.Prompt.Synthetic.SharedTokens
	}
	for name, prompts := range byTrace {
		for i, p := range prompts[1:] {
			if got := commonPrefix(prompts[0], p); got != shared[name] {
				t.Errorf("%s: prompts 0 and %d have %d tokens in common, want %d", name, i+1, got, shared[name])
			}
		}
	}
	if got := commonPrefix(byTrace[MiniSWE][0], byTrace[TauBench][0]); got > 2 {
		t.Errorf("two sources share %d tokens", got)
	}
}

func commonPrefix(a, b []int32) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// madeUp is a trace with everything that must be filled in or cut.
func madeUp(sessions ...Session) Trace {
	return Trace{Header: Header{Name: "made-up", Repository: "nobody/nothing", Commit: "0", Licence: "MIT"}, Sessions: sessions}
}

func agentsOnly(sessions int) Composition {
	return Composition{Agent: ClassMix{Sessions: sessions}, AgentTraces: []string{"made-up"}, MaxContextTokens: 8_192}
}

func TestUnknownLengthsAreDrawnAndLabelled(t *testing.T) {
	recorded := Session{ID: "s", PromptTokens: 50, Turns: []Turn{
		{Unknown, Unknown, UnknownSeconds, UnknownSeconds}, {3, 4, 0.5, UnknownSeconds}, {3, 0, 0, UnknownSeconds},
	}}
	specs, err := ComposeFrom(agentsOnly(200), []Trace{madeUp(recorded)})
	if err != nil {
		t.Fatal(err)
	}
	outputs := map[int]bool{}
	for _, spec := range specs {
		turns := spec.Environment.Turns
		outputs[turns[0].OutputTokens] = true
		if turns[0].OutputTokens < 1 || turns[0].AppendTokens < 1 || turns[0].GapSeconds <= 0 {
			t.Errorf("%s: %+v", spec.ID, turns[0])
		}
		if len(turns) > 1 && turns[1] != (task.ReplayTurn{OutputTokens: 3, AppendTokens: 4, GapSeconds: 0.5}) {
			t.Errorf("%s changed what was recorded: %+v", spec.ID, turns[1])
		}
		if o := originOf(t, spec); !slices.Equal(o.Composed, []string{"output_tokens", "append_tokens", "gap_seconds"}) || o.Basis == "" {
			t.Errorf("%s: %+v", spec.ID, o)
		}
	}
	if len(outputs) < 50 {
		t.Errorf("only %d different lengths were drawn for 200 tasks", len(outputs))
	}
}

func TestGapsAreDerivedFromIntervals(t *testing.T) {
	recorded := Session{ID: "s", PromptTokens: 50, Turns: []Turn{
		{100, 1, UnknownSeconds, 2}, {1_000, 1, UnknownSeconds, 2}, {3, 0, 0, UnknownSeconds},
	}}
	specs, err := ComposeFrom(agentsOnly(1), []Trace{madeUp(recorded)})
	if err != nil {
		t.Fatal(err)
	}
	turns := specs[0].Environment.Turns
	if math.Abs(turns[0].GapSeconds-(2-100*secondsPerOutputToken)) > 1e-3 || turns[1].GapSeconds != 0 || turns[2].GapSeconds != 0 {
		t.Errorf("gaps %v %v %v", turns[0].GapSeconds, turns[1].GapSeconds, turns[2].GapSeconds)
	}
}

// The slope by which gaps are derived is that of the shipped trace.
func TestSecondsPerOutputTokenIsTheMeasuredSlope(t *testing.T) {
	tr, err := LoadShipped(MiniSWE)
	if err != nil {
		t.Fatal(err)
	}
	var n, sx, sy, sxx, sxy float64
	for _, s := range tr.Sessions {
		for _, turn := range s.Turns[:len(s.Turns)-1] {
			x, y := float64(turn.OutputTokens), turn.IntervalSeconds
			n, sx, sy, sxx, sxy = n+1, sx+x, sy+y, sxx+x*x, sxy+x*y
		}
	}
	if slope := (n*sxy - sx*sy) / (n*sxx - sx*sx); math.Abs(slope-secondsPerOutputToken) > 5e-5 {
		t.Errorf("slope is %.5f s a token", slope)
	}
}

func TestSessionsAreCutAtTheContextLimit(t *testing.T) {
	turn := Turn{1_000, 1_000, 0, UnknownSeconds}
	long := Session{ID: "long", PromptTokens: 1_000, Turns: []Turn{turn, turn, turn, turn, turn, {1, 0, 0, UnknownSeconds}}}
	tooLong := Session{ID: "too long", PromptTokens: 8_000, Turns: []Turn{turn}}
	specs, err := ComposeFrom(agentsOnly(4), []Trace{madeUp(long, tooLong)})
	if err != nil {
		t.Fatal(err)
	}
	for _, spec := range specs {
		o := originOf(t, spec)
		// 1,000 + 3 x 2,000 is 7,000; the fourth answer ends at 8,000, the fifth
		// would at 10,000.
		if o.Session != "long" || len(spec.Environment.Turns) != 4 || o.TurnsCut != 2 {
			t.Errorf("%s: %d turns, %+v", spec.ID, len(spec.Environment.Turns), o)
		}
		if last := spec.Environment.Turns[3]; last.AppendTokens != 0 {
			t.Errorf("something is appended after the last turn: %+v", last)
		}
	}
}

func TestLengthScale(t *testing.T) {
	recorded := Session{ID: "s", PromptTokens: 101, SharedTokens: 40, SharedKey: "k", Turns: []Turn{{1, 3, 2, UnknownSeconds}, {8, 0, 0, UnknownSeconds}}}
	c := agentsOnly(1)
	c.AgentLengthScale = 0.5
	specs, err := ComposeFrom(c, []Trace{madeUp(recorded)})
	if err != nil {
		t.Fatal(err)
	}
	p, turns := specs[0].Prompt.Synthetic, specs[0].Environment.Turns
	if p.Tokens != 51 || p.SharedTokens != 20 || turns[0] != (task.ReplayTurn{OutputTokens: 1, AppendTokens: 2, GapSeconds: 2}) || turns[1].OutputTokens != 4 {
		t.Errorf("%+v %+v", p, turns)
	}
	if o := originOf(t, specs[0]); o.LengthScale != 0.5 {
		t.Errorf("%+v", o)
	}
}

func TestComposedClassesFollowTableTwo(t *testing.T) {
	specs, err := Compose(Composition{
		Seed: 1, RLVR: ClassMix{Sessions: 8_000, GroupSize: 2}, RLHF: ClassMix{Sessions: 2_000},
		ComposedLengthScale: 0.25, MaxContextTokens: DemoContextTokens,
	})
	if err != nil {
		t.Fatal(err)
	}
	rlvr := ofClass(specs, workload.RLVR)
	if len(rlvr) != 4_000 || rlvr[0].GroupSize != 2 {
		t.Fatalf("%d tasks of %d members", len(rlvr), rlvr[0].GroupSize)
	}
	var outputs []int
	for _, spec := range rlvr {
		outputs = append(outputs, spec.Environment.Turns[0].OutputTokens)
		if o := originOf(t, spec); o.Source != SourceComposed || o.LengthScale != 0.25 || !slices.Equal(o.Composed, []string{"prompt_tokens", "output_tokens"}) {
			t.Fatalf("%s: %+v", spec.ID, o)
		}
	}
	slices.Sort(outputs)
	if got, want := float64(outputs[len(outputs)/2]), 47_583.0/4; math.Abs(got/want-1) > 0.05 {
		t.Errorf("RLVR output p50 %v, want a quarter of Table 2's, %v", got, want)
	}
	if got, want := float64(outputs[len(outputs)*95/100]), 130_815.0/4; math.Abs(got/want-1) > 0.01 {
		t.Errorf("RLVR output p95 %v, want a quarter of Table 2's, %v", got, want)
	}
	if n := Summarise(specs); n[1].Sessions != 8_000 || n[0].Sessions != 2_000 {
		t.Errorf("%+v", n)
	}
}

func TestComposeRefuses(t *testing.T) {
	cases := map[string]struct {
		change func(*Composition)
		want   string
	}{
		"nothing":           {func(c *Composition) { *c = Composition{MaxContextTokens: 1_000} }, "no sessions are asked for"},
		"negative":          {func(c *Composition) { c.RLVR.Sessions = -1 }, "RLVR.Sessions: must be from 0 to 100000, is -1"},
		"too many":          {func(c *Composition) { c.RLVR.Sessions, c.RLHF.Sessions = 60_000, 60_000 }, "must ask for at most 100000 sessions, asks for 120060"},
		"uneven groups":     {func(c *Composition) { c.RLHF.GroupSize = 4 }, "RLHF.GroupSize: 4 must divide the 22 sessions"},
		"absurd group":      {func(c *Composition) { c.RLHF.GroupSize = 5_000 }, "RLHF.GroupSize: must be from 0 to 1024, is 5000"},
		"NaN scale":         {func(c *Composition) { c.TimeScale = math.NaN() }, "TimeScale: must be from 0.001 to 1e+06, is NaN"},
		"negative scale":    {func(c *Composition) { c.AgentLengthScale = -1 }, "AgentLengthScale: must be from 0.001 to 1000, is -1"},
		"tiny context":      {func(c *Composition) { c.MaxContextTokens = 5 }, "MaxContextTokens: must be from 256 to 1048576, is 5"},
		"system too long":   {func(c *Composition) { c.AgentSystemTokens = 40_000 }, "AgentSystemTokens: must be from 0 to below the context's 32768, is 40000"},
		"no trace":          {func(c *Composition) { c.AgentTraces = nil }, "AgentTraces: agent sessions need at least one trace"},
		"unknown trace":     {func(c *Composition) { c.AgentTraces = []string{"swe"} }, `unknown trace "swe"; shipped are ` + strings.Join(Shipped(), ", ")},
		"all too short":     {func(c *Composition) { c.MinAgentTurns = 31 }, "trace lmcache-miniswe has no session of at least 31 turns that starts within 32768 tokens"},
		"none in so little": {func(c *Composition) { c.MaxContextTokens, c.AgentSystemTokens = 300, 0 }, "trace lmcache-miniswe has no session of at least 8 turns that starts within 300 tokens"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			composition := Demo(1)
			c.change(&composition)
			specs, err := Compose(composition)
			if err == nil || err.Error() != "composing a batch: "+c.want || specs != nil {
				t.Errorf("got %d tasks, %v\nwant %s", len(specs), err, c.want)
			}
		})
	}
}

// The shipped traces are data of others: each must name its origin, all must
// stay small, and the counts pin that an import lost nothing.
func TestShippedTraces(t *testing.T) {
	want := map[string]struct {
		sessions, turns int
		repository      string
	}{
		MiniSWE:      {10, 206, "LMCache/lmcache-agent-trace"},
		LMCacheTau:   {24, 249, "LMCache/lmcache-agent-trace"},
		TauBench:     {100, 1_163, "sierra-research/tau-bench"},
		MooncakeChat: {1_925, 5_460, "kvcache-ai/Mooncake"},
		TraceLab:     {2, 19, "uw-syfi/TraceLab"},
		TraceLabCSVs: {48, 303, "uw-syfi/TraceLab"},
	}
	if got := Shipped(); len(got) != len(want) {
		t.Fatalf("shipped are %v", got)
	}
	for name, w := range want {
		tr, err := LoadShipped(name)
		if err != nil {
			t.Fatal(err)
		}
		turns := 0
		for _, s := range tr.Sessions {
			turns += len(s.Turns)
		}
		if len(tr.Sessions) != w.sessions || turns != w.turns || tr.Header.Repository != w.repository || tr.Header.Name != name {
			t.Errorf("%s: %d sessions, %d turns, %+v", name, len(tr.Sessions), turns, tr.Header)
		}
		if tr.Header.Synthetic != (name == TraceLabCSVs) {
			t.Errorf("%s: synthetic is %v", name, tr.Header.Synthetic)
		}
	}
	size := 0
	for _, name := range Shipped() {
		text, err := shippedFiles.ReadFile("data/" + name + ".jsonl")
		if err != nil {
			t.Fatal(err)
		}
		size += len(text)
	}
	if size > 500_000 {
		t.Errorf("shipped traces have %d bytes", size)
	}
}

// tau-bench's trials are the only real groups: 25 tasks of four rollouts.
func TestShippedGroups(t *testing.T) {
	tr, err := LoadShipped(TauBench)
	if err != nil {
		t.Fatal(err)
	}
	members := map[string]int{}
	for _, s := range tr.Sessions {
		members[s.Group]++
	}
	if len(members) != 25 {
		t.Errorf("%d groups", len(members))
	}
	for group, n := range members {
		if n != 4 {
			t.Errorf("group %s has %d members", group, n)
		}
	}
}
