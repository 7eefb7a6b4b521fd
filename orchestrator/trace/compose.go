package trace

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"

	"holdfast/router/sim/workload"
	"holdfast/workflows/task"
)

// Compose makes a batch of tasks from the shipped traces: agent tasks first,
// then RLVR, then RLHF. In what order they are released is the caller's choice.
func Compose(c Composition) ([]task.Spec, error) {
	traces := make([]Trace, len(c.AgentTraces))
	for i, name := range c.AgentTraces {
		var err error
		if traces[i], err = LoadShipped(name); err != nil {
			return nil, fmt.Errorf("composing a batch: %w", err)
		}
	}
	return ComposeFrom(c, traces)
}

// ComposeFrom makes a batch with agent sessions from the given traces, whose
// names c.AgentTraces must not repeat; it is otherwise like Compose.
func ComposeFrom(c Composition, traces []Trace) ([]task.Spec, error) {
	if err := c.validate(); err != nil {
		return nil, fmt.Errorf("composing a batch: %w", err)
	}
	agents, err := c.agentTasks(traces)
	if err != nil {
		return nil, fmt.Errorf("composing a batch: %w", err)
	}
	specs := agents
	specs = append(specs, c.singleTurnTasks(workload.PaperRLVR(), c.RLVR)...)
	specs = append(specs, c.singleTurnTasks(workload.PaperRLHF(), c.RLHF)...)
	for i := range specs {
		if err := specs[i].Validate(fmt.Sprintf("tasks[%d]", i)); err != nil {
			return nil, fmt.Errorf("composing a batch: %w", err)
		}
	}
	return specs, nil
}

// deck deals a trace's eligible sessions in random order, again and again.
type deck struct {
	trace    Trace
	eligible []int
	next     int
	random   *rand.Rand
}

func (c Composition) newDeck(t Trace) (*deck, error) {
	d := &deck{trace: t, random: workload.Source(c.Seed, "deck/"+t.Header.Name, 0)}
	for i := range t.Sessions {
		s := &t.Sessions[i]
		prompt := c.agentPrompt(t.Header.Name, s)
		if len(s.Turns) >= c.MinAgentTurns && prompt.Tokens+c.outputTokens(s.Turns[0]) <= c.MaxContextTokens {
			d.eligible = append(d.eligible, i)
		}
	}
	if len(d.eligible) == 0 {
		return nil, fmt.Errorf("trace %s has no session of at least %d turns that starts within %d tokens",
			t.Header.Name, c.MinAgentTurns, c.MaxContextTokens)
	}
	return d, nil
}

func (d *deck) deal() *Session {
	if d.next == 0 {
		d.random.Shuffle(len(d.eligible), func(i, j int) { d.eligible[i], d.eligible[j] = d.eligible[j], d.eligible[i] })
	}
	s := &d.trace.Sessions[d.eligible[d.next]]
	d.next = (d.next + 1) % len(d.eligible)
	return s
}

func (c Composition) agentTasks(traces []Trace) ([]task.Spec, error) {
	count := c.Agent.tasks()
	if count == 0 {
		return nil, nil
	}
	if len(traces) == 0 {
		return nil, fmt.Errorf("agent sessions need at least one trace")
	}
	decks := make([]*deck, len(traces))
	for i, t := range traces {
		var err error
		if decks[i], err = c.newDeck(t); err != nil {
			return nil, err
		}
	}
	specs := make([]task.Spec, count)
	for i := range specs {
		d := decks[i%len(decks)]
		specs[i] = c.agentTask(i, d.trace.Header, d.deal())
	}
	return specs, nil
}

// agentTask replays one recorded session.
func (c Composition) agentTask(number int, header Header, s *Session) task.Spec {
	random := workload.Source(c.Seed, workload.Agent, int64(number))
	prompt := c.agentPrompt(header.Name, s)
	prompt.Seed = random.Uint64()
	origin := Origin{
		Source: header.Repository, Commit: header.Commit, Licence: header.Licence,
		Trace: header.Name, Session: s.ID, Group: s.Group, LengthScale: orOne(c.AgentLengthScale),
	}
	environment := &task.Environment{Kind: task.EnvironmentReplay, TimeScale: c.TimeScale, Reward: s.Reward}
	environment.Turns = c.replayTurns(prompt.Tokens, s, random, &origin)
	if prompt.SharedTokens > 0 && s.SharedTokens == 0 {
		origin.Composed = append(origin.Composed, "system_prompt")
	}
	spec := task.Spec{
		ID:          fmt.Sprintf("%s-%05d", workload.Agent, number),
		Class:       workload.Agent,
		Prompt:      task.Prompt{Synthetic: &prompt},
		GroupSize:   c.Agent.members(),
		Sampling:    task.Sampling{IgnoreEOS: true},
		Limits:      task.Limits{MaxContextTokens: c.MaxContextTokens},
		Environment: environment,
		Metadata:    origin.metadata(),
	}
	if s.Reward != nil {
		spec.Scorer = &task.Scorer{Kind: task.ScorerEnvironment}
	}
	return spec
}

// agentPrompt is the first prompt without its own seed. A recorded shared prefix
// is kept; where there is none, the system prompt is put before what was recorded.
func (c Composition) agentPrompt(traceName string, s *Session) task.Synthetic {
	p := task.Synthetic{Tokens: c.agentLength(s.PromptTokens, 1)}
	switch {
	case s.SharedTokens > 0:
		p.SharedTokens = min(c.agentLength(s.SharedTokens, 0), p.Tokens)
		p.SharedSeed = nameSeed(traceName, s.SharedKey)
	case c.AgentSystemTokens > 0:
		p.Tokens += c.AgentSystemTokens
		p.SharedTokens = c.AgentSystemTokens
		p.SharedSeed = nameSeed(traceName, "system prompt")
	}
	return p
}

func (c Composition) agentLength(tokens, least int) int {
	return max(least, int(math.Round(float64(tokens)*orOne(c.AgentLengthScale))))
}

// outputTokens is a recorded answer's length as replayed: an engine generates
// at least one token, and an unknown length counts as that here.
func (c Composition) outputTokens(t Turn) int {
	return c.agentLength(max(t.OutputTokens, 1), 1)
}

// secondsPerOutputToken is how long the recorded model took per generated token:
// the least-squares slope of the interval between two requests on the length of
// the answer between them, over lmcache-miniswe. What remains of an interval is
// the tool's time, with the model's reading of the prompt in it.
const secondsPerOutputToken = 0.0056

// replayTurns turns recorded turns into the environment's, fills what is
// unknown, and stops before the turn that would exceed the context.
func (c Composition) replayTurns(context int, s *Session, random *rand.Rand, origin *Origin) []task.ReplayTurn {
	class := workload.PaperAgent(workload.GapsQwen)
	composed, derived := map[string]bool{}, map[string]bool{}
	turns := make([]task.ReplayTurn, 0, len(s.Turns))
	for i, recorded := range s.Turns {
		turn := task.ReplayTurn{
			OutputTokens: c.outputTokens(recorded),
			AppendTokens: c.agentLength(max(recorded.AppendTokens, 0), 0),
			GapSeconds:   recorded.GapSeconds,
		}
		if recorded.OutputTokens == Unknown {
			composed["output_tokens"] = true
			drawn := min(class.OutputTokens.Draw(random), float64(class.MaxOutputTokens))
			turn.OutputTokens = c.agentLength(int(drawn), 1)
		}
		if recorded.AppendTokens == Unknown {
			composed["append_tokens"] = true
			turn.AppendTokens = c.agentLength(int(class.AppendTokens.Draw(random)), 1)
		}
		if recorded.GapSeconds == UnknownSeconds {
			if recorded.IntervalSeconds != UnknownSeconds {
				derived["gap_seconds"] = true
				turn.GapSeconds = max(0, recorded.IntervalSeconds-secondsPerOutputToken*float64(max(recorded.OutputTokens, 0)))
			} else {
				composed["gap_seconds"] = true
				turn.GapSeconds = class.GapSeconds.Draw(random)
			}
			turn.GapSeconds = min(math.Round(turn.GapSeconds*1e3)/1e3, task.MaxGapSeconds)
		}
		if i > 0 && context+turn.OutputTokens > c.MaxContextTokens {
			origin.TurnsCut = len(s.Turns) - i
			break
		}
		turn.OutputTokens = min(turn.OutputTokens, c.MaxContextTokens-context)
		turns = append(turns, turn)
		context += turn.OutputTokens + turn.AppendTokens
	}
	last := &turns[len(turns)-1]
	last.AppendTokens, last.GapSeconds = 0, 0
	for _, name := range []string{"output_tokens", "append_tokens", "gap_seconds"} {
		if composed[name] {
			origin.Composed = append(origin.Composed, name)
		}
		if derived[name] {
			origin.Derived = append(origin.Derived, name)
		}
	}
	if len(origin.Composed) > 0 {
		origin.Basis = basisTableTwo
	}
	return turns
}

// singleTurnTasks composes tasks of a class that has one model call.
func (c Composition) singleTurnTasks(class workload.Class, mix ClassMix) []task.Spec {
	class = class.Scaled(orOne(c.ComposedLengthScale))
	class.MaxContextTokens = min(class.MaxContextTokens, c.MaxContextTokens)
	origin := Origin{
		Source: SourceComposed, Basis: basisTableTwo,
		Composed: []string{"prompt_tokens", "output_tokens"}, LengthScale: orOne(c.ComposedLengthScale),
	}
	specs := make([]task.Spec, mix.tasks())
	for i := range specs {
		random := workload.Source(c.Seed, class.Name, int64(i))
		session := class.Sample(random, workload.Steady)
		specs[i] = task.Spec{
			ID:        fmt.Sprintf("%s-%05d", class.Name, i),
			Class:     class.Name,
			Prompt:    task.Prompt{Synthetic: &task.Synthetic{Tokens: session.PromptTokens, Seed: random.Uint64()}},
			GroupSize: mix.members(),
			Sampling:  task.Sampling{IgnoreEOS: true},
			Limits:    task.Limits{MaxContextTokens: c.MaxContextTokens},
			Environment: &task.Environment{
				Kind:      task.EnvironmentReplay,
				TimeScale: c.TimeScale,
				Turns:     []task.ReplayTurn{{OutputTokens: session.Turns[0].OutputTokens}},
			},
			Metadata: origin.metadata(),
		}
	}
	return specs
}

// metadata cannot fail: an Origin holds strings and finite numbers only.
func (o Origin) metadata() json.RawMessage {
	text, err := json.Marshal(o)
	if err != nil {
		panic("trace: an origin cannot be written: " + err.Error())
	}
	return text
}

// nameSeed makes the seed of a shared prefix from its names, so that batches
// composed apart share it too.
func nameSeed(names ...string) uint64 {
	h := fnv.New64a()
	for _, name := range names {
		h.Write([]byte(name))
		h.Write([]byte{0})
	}
	return h.Sum64()
}
