package activities

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/environment"
	"holdfast/orchestrator/environment/failure"
	"holdfast/orchestrator/environment/spec"
	"holdfast/orchestrator/toolcall"
	"holdfast/router"
	"holdfast/store"
	"holdfast/workflows"
	"holdfast/workflows/task"
)

// Environments keeps the environments of sessions; an environment.Registry.
type Environments interface {
	Open(sessionID string, e spec.Environment) (environment.Environment, error)
	Release(ctx context.Context, sessionID string, e spec.Environment) error
}

const (
	// stepAttempts bounds how often an environment that nobody answers for is asked, on
	// top of the tries that a call to a server makes by itself.
	stepAttempts = 4
	// programsPerProcessor bounds the programs of exec environments that run at once:
	// unlike those of scorers most of them wait for something.
	programsPerProcessor = 4
	// maxProblemBytes is how much of what an environment says of its failure is kept.
	maxProblemBytes = 4 << 10
)

// errNoRoom: as many environments live here as may. It is no failure of the session.
var errNoRoom = errors.New("there is no room for another environment yet")

// Step resets the environment of a session, or has it answer the turn before. The
// observation is stored before it counts, and a repeated step finds it there. What the
// environment does wrong ends the session as failed, which is a reply; errors are those
// that trying again may mend: of the store, and of engines that are away while text
// is needed.
func (a *Activities) Step(ctx context.Context, ref workflows.StepRef) (workflows.TurnReply, error) {
	id, err := uuid.Parse(ref.Session)
	if err != nil {
		return workflows.TurnReply{}, fmt.Errorf("step %d: session id: %w", ref.Step, err)
	}
	ctx, release := a.running.track(ctx, id)
	defer release()
	defer (&pulse{}).beat(ctx)()
	reply, err := a.step(ctx, id, ref.Step)
	if err != nil {
		return workflows.TurnReply{}, fmt.Errorf("session %s, step %d: %w", id, ref.Step, err)
	}
	return reply, nil
}

func (a *Activities) step(ctx context.Context, id uuid.UUID, number int) (workflows.TurnReply, error) {
	work, err := a.cfg.Store.SessionForWork(ctx, id)
	if err != nil {
		return workflows.TurnReply{}, err
	}
	if work.State == store.SessionEnded || work.CancelRequested {
		return over(router.Cancelled, ""), nil
	}
	observation, ok, err := a.cfg.Store.Observation(ctx, id, number)
	if err == nil && !ok {
		observation, err = a.observe(ctx, &work, number)
	}
	if errors.Is(err, store.ErrSessionEnded) {
		return over(router.Cancelled, ""), nil
	}
	if err != nil {
		return workflows.TurnReply{}, err
	}
	if observation.Status == 0 {
		return workflows.TurnReply{Outcome: workflows.OutcomeMore}, nil
	}
	return a.overStepped(ctx, &work, over(observation.Status, observation.Problem))
}

// environmentStep is one step while it is made.
type environmentStep struct {
	a        *Activities
	work     *store.WorkSession
	spec     *spec.Environment
	number   int
	observed store.Observation
	// lastIDs are the message that the environment answers.
	lastIDs []int32
	message toolcall.Parsed
	answer  environment.Observation
	failure failure.Kind
}

// observe makes a step and stores what came of it.
func (a *Activities) observe(ctx context.Context, work *store.WorkSession, number int) (store.Observation, error) {
	s := &environmentStep{a: a, work: work, spec: work.Spec.Stepped(), number: number, observed: store.Observation{SessionID: work.ID, Restarts: work.Restarts, Step: number}}
	switch {
	case s.spec == nil:
		return s.observed, errors.New("the task has no environment to step")
	case number != work.Turns:
		return s.observed, fmt.Errorf("%d turns are committed", work.Turns)
	}
	problem, err := s.make(ctx)
	if err != nil {
		return s.observed, err
	}
	if problem != "" {
		s.observed.Status, s.observed.Problem = router.Failed, shortened(problem)
	}
	detail, err := s.detail()
	if err != nil {
		return s.observed, err
	}
	return a.cfg.Store.SaveObservation(ctx, s.observed, detail)
}

// make reads the model's message, asks the environment, and turns its answer into
// tokens. A problem fails the session.
func (s *environmentStep) make(ctx context.Context) (problem string, err error) {
	if s.number > 0 {
		if problem, err := s.read(ctx); err != nil || problem != "" {
			return problem, err
		}
	}
	left, limited := runTimeLeft(s.work)
	calling, cancel := ctx, context.CancelFunc(func() {})
	if limited {
		calling, cancel = context.WithTimeout(ctx, left)
	}
	defer cancel()
	if len(s.message.Problems) == 0 || len(s.message.Calls) > 0 {
		began := time.Now()
		err = s.ask(calling)
		s.observed.Seconds = time.Since(began).Seconds()
	}
	kind, known := failure.KindOf(err)
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return "", ctx.Err()
	case calling.Err() != nil:
		s.observed.Status = router.Truncated // the session's own time is over
		return "", nil
	case known:
		s.failure = kind
		return err.Error(), nil
	default:
		return "", err
	}
	s.observed.Reward = s.answer.Reward
	if s.answer.Done {
		s.observed.Status = router.Completed
		if s.answer.Truncated {
			s.observed.Status = router.Truncated
		}
		return "", nil
	}
	return s.tokens(ctx)
}

// read makes text, and calls, of the last turn.
func (s *environmentStep) read(ctx context.Context) (problem string, err error) {
	before, ok, err := s.a.cfg.Store.Observation(ctx, s.work.ID, s.number-1)
	switch {
	case err != nil:
		return "", err
	case !ok:
		return "", errors.New("the step before has left no observation")
	}
	s.observed.EpisodeStep = before.EpisodeStep
	ids, finish, err := s.a.cfg.Store.LastOutput(ctx, s.work.ID)
	if err != nil {
		return "", err
	}
	s.lastIDs = ids
	var text string
	err = s.a.askEngines(ctx, func() (err error) {
		text, err = s.a.cfg.Engines.Detokenize(ctx, ids, finish == engine.FinishStop.String())
		return err
	})
	var final *finalError
	if errors.As(err, &final) {
		return fmt.Sprintf("the environment needs the text of the turn: %v", final.error), nil
	}
	s.message = toolcall.Parse(s.spec.ToolFormat, text, s.number-1)
	return "", err
}

// ask calls the environment, again where that may help.
func (s *environmentStep) ask(ctx context.Context) error {
	if s.a.cfg.Environments == nil {
		return failure.Newf(failure.Disabled, "opening an environment", "this process has none")
	}
	if s.number > 0 {
		s.observed.EpisodeStep++
	}
	for attempt := 1; ; attempt++ {
		err := s.call(ctx)
		kind, _ := failure.KindOf(err)
		switch {
		case err == nil || !kind.Repeatable():
			return err
		case attempt == stepAttempts && kind == failure.Exhausted:
			// Room for one more environment comes when another session ends. Waiting for
			// that as long as it takes is Temporal's part, so that it keeps no worker.
			return fmt.Errorf("%w: %v", errNoRoom, err)
		case attempt == stepAttempts:
			return err
		}
		s.a.cfg.Logger.Warn("an environment cannot be called, trying again", "session", s.work.ID, "step", s.number, "attempt", attempt, "error", err)
		if err := s.a.pause(ctx, attempt); err != nil {
			return err
		}
	}
}

// call makes one attempt. Only while a program may run does it count among those that do.
func (s *environmentStep) call(ctx context.Context) error {
	if s.spec.Kind == spec.Exec {
		leave, err := s.a.steppers.enter(ctx)
		if err != nil {
			return err
		}
		defer leave()
	}
	e, err := s.a.cfg.Environments.Open(s.work.ID.String(), *s.spec)
	if err != nil {
		return err
	}
	if s.number == 0 {
		s.answer, err = e.Reset(ctx, environment.ResetRequest{Seed: episodeSeed(s.work), Member: s.work.Member, Metadata: s.work.Spec.Metadata})
		return err
	}
	s.answer, err = e.Step(ctx, environment.Action{Step: s.observed.EpisodeStep, Text: s.message.Content, Calls: s.message.Calls})
	return err
}

// tokens turns the observation into ids, unless a limit leaves no turn after it.
func (s *environmentStep) tokens(ctx context.Context) (problem string, err error) {
	messages := s.answer.Render(s.spec.ToolFormat, s.message.Problems)
	if s.number == 0 {
		problem, err = s.begin(ctx, messages)
	} else {
		s.observed.IDs, err = s.a.continuation(ctx, &s.work.Spec, messages, s.lastIDs)
	}
	var final *finalError
	if errors.As(err, &final) {
		return fmt.Sprintf("the observation could not be tokenised: %v", final.error), nil
	}
	if err != nil || problem != "" {
		return problem, err
	}
	context := s.a.promptTokens(s.work, s.number) + int64(len(s.observed.IDs))
	if reply, ends := s.a.overAt(s.work, s.number, context); ends {
		s.observed.Status, err = router.ParseEndStatus(reply.Status)
		return reply.Problem, err
	}
	return "", nil
}

// begin puts the first observation behind the prompt, and the tools into its template.
func (s *environmentStep) begin(ctx context.Context, messages []toolcall.Message) (problem string, err error) {
	chat := promptMessages(&s.work.Spec)
	if chat == nil {
		if len(messages) > 0 {
			s.observed.IDs, err = s.a.continuation(ctx, &s.work.Spec, messages, nil)
		}
		return "", err
	}
	request := engine.TokenizeRequest{Messages: chat}
	if len(s.answer.Tools) > 0 {
		if request.Tools, err = toolcall.Describe(s.answer.Tools); err != nil {
			return "", err
		}
	}
	if problem, err := s.a.keepPrompt(ctx, s.work, request); err != nil || problem != "" {
		return problem, err
	}
	s.observed.IDs, err = s.a.firstObservation(ctx, s.work, request, messages)
	return "", err
}

// detail is what the session's history tells of the step.
func (s *environmentStep) detail() (json.RawMessage, error) {
	detail := struct {
		Step           int      `json:"step"`
		Environment    string   `json:"environment"`
		Seconds        float64  `json:"seconds"`
		Calls          int      `json:"calls"`
		MalformedCalls int      `json:"malformed_calls,omitempty"`
		Tokens         int      `json:"tokens"`
		CutBytes       int64    `json:"cut_bytes,omitempty"`
		Reward         *float64 `json:"reward,omitempty"`
		Status         string   `json:"status,omitempty"`
		Error          string   `json:"error,omitempty"`
		Problem        string   `json:"problem,omitempty"`
	}{
		Step: s.number, Environment: string(s.spec.Kind), Seconds: s.observed.Seconds, Calls: len(s.message.Calls), MalformedCalls: len(s.message.Problems),
		Tokens: len(s.observed.IDs), CutBytes: s.answer.CutBytes, Reward: s.observed.Reward, Problem: s.observed.Problem,
	}
	if s.observed.Status != 0 {
		detail.Status = s.observed.Status.String()
	}
	if s.failure != 0 {
		detail.Error = s.failure.String()
	}
	raw, err := json.Marshal(detail)
	if err != nil {
		return nil, fmt.Errorf("describing a step: %w", err)
	}
	return raw, nil
}

// overStepped adds to the end of a session with an environment whether it is scored. A
// session that was truncated before its environment gave a reward has none, which is
// no failure.
func (a *Activities) overStepped(ctx context.Context, work *store.WorkSession, reply workflows.TurnReply) (workflows.TurnReply, error) {
	truncated := reply.Status == router.Truncated.String()
	if work.Spec.Scorer == nil || !truncated && reply.Status != router.Completed.String() {
		return reply, nil
	}
	reply.Scored = true
	if truncated && work.Spec.Scorer.Kind == task.ScorerEnvironment {
		reward, err := a.cfg.Store.EnvironmentReward(ctx, work.ID)
		if err != nil {
			return reply, err
		}
		reply.Scored = reward != nil
	}
	return reply, nil
}

// observedBefore returns what the environment answered before a turn.
func (a *Activities) observedBefore(ctx context.Context, work *store.WorkSession, turn int) (store.Observation, error) {
	observation, ok, err := a.cfg.Store.Observation(ctx, work.ID, turn)
	if err == nil && !ok {
		err = errors.New("no observation is there to go on from")
	}
	return observation, err
}

// Release gives back what a session's environment holds. Only a server that may answer
// a little later is worth another try.
func (a *Activities) Release(ctx context.Context, session string) error {
	id, err := uuid.Parse(session)
	if err != nil {
		return fmt.Errorf("releasing an environment: session id: %w", err)
	}
	work, err := a.cfg.Store.SessionForWork(ctx, id)
	if err != nil {
		return fmt.Errorf("releasing the environment of session %s: %w", id, err)
	}
	stepped := work.Spec.Stepped()
	if stepped == nil || a.cfg.Environments == nil {
		return nil
	}
	if err := a.cfg.Environments.Release(ctx, session, *stepped); err != nil {
		if kind, ok := failure.KindOf(err); ok && kind.Repeatable() {
			return err
		}
		a.cfg.Logger.Warn("releasing an environment failed", "session", session, "error", err)
	}
	return nil
}

// episodeSeed is the same for all members of a group, so that they face one episode.
func episodeSeed(work *store.WorkSession) int64 {
	if seed := work.Spec.Sampling.Seed; seed != nil {
		return *seed
	}
	return int64(binary.LittleEndian.Uint64(work.TaskID[:8]) >> 1)
}

// runTimeLeft is how long the session may yet run, where its task limits that.
func runTimeLeft(work *store.WorkSession) (left time.Duration, limited bool) {
	limit := work.Spec.Limits.MaxRunSeconds
	if limit == 0 || work.FirstAdmittedAt == nil {
		return 0, false
	}
	ran := time.Since(*work.FirstAdmittedAt).Seconds() - work.HeldSeconds
	return time.Duration((limit - ran) * float64(time.Second)), true
}

func shortened(problem string) string {
	if len(problem) > maxProblemBytes {
		problem = problem[:maxProblemBytes]
	}
	return problem
}
