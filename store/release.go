package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"holdfast/workflows/task"
)

// release writes one new batch inside a transaction. The large tables are filled
// first, by COPY; the run's lock is taken only then, so that sessions keep ending
// while a body arrives.
type release struct {
	tx         pgx.Tx
	submission BatchSubmission
	batchID    uuid.UUID

	of            Run
	policyVersion int64
	releasedAt    time.Time
	classIndex    map[string]int
	// tasks and taskIDs are filled as the tasks pass.
	tasks       []releasedTask
	taskIDs     []uuid.UUID
	externalIDs map[string]int
	sessions    int
}

func (r *release) run(ctx context.Context) (Batch, error) {
	if err := r.prepare(ctx); err != nil {
		return Batch{}, err
	}
	stream := taskStream{release: r}
	if _, err := r.tx.CopyFrom(ctx, pgx.Identifier{"tasks"}, taskColumns, &stream); err != nil {
		if stream.err != nil {
			return Batch{}, stream.err
		}
		return Batch{}, fmt.Errorf("writing tasks: %w", err)
	}
	if len(r.tasks) == 0 {
		return Batch{}, &FieldError{Path: "tasks", Problem: "must hold at least one task"}
	}
	hash := r.submission.BodyHash()
	if err := r.tx.QueryRow(ctx, `select clock_timestamp()`).Scan(&r.releasedAt); err != nil {
		return Batch{}, fmt.Errorf("reading the clock: %w", err)
	}
	if err := r.copySessions(ctx); err != nil {
		return Batch{}, err
	}
	return r.count(ctx, hash)
}

// prepare reads what the tasks are checked against.
func (r *release) prepare(ctx context.Context) error {
	of, err := readRun(ctx, r.tx, r.submission.RunID)
	if err != nil {
		return err
	}
	if of.State == RunEnded {
		return ErrRunEnded
	}
	r.of = of
	if err := r.tx.QueryRow(ctx, selectPolicyVersionSQL, of.Pool).Scan(&r.policyVersion); err != nil {
		return found(err, "reading the policy version of pool", of.Pool)
	}
	if given := r.submission.PolicyVersion; given != nil {
		if *given < 0 || *given > r.policyVersion {
			return &FieldError{Path: "policy_version", Problem: fmt.Sprintf("must be between 0 and the pool's current version %d, is %d", r.policyVersion, *given)}
		}
		r.policyVersion = *given
	}
	r.classIndex = map[string]int{}
	for i, class := range of.Contract.Contract.Classes {
		r.classIndex[class.Class] = i
	}
	r.externalIDs = map[string]int{}
	return nil
}

var taskColumns = []string{"task_id", "pool", "run_id", "batch_id", "ordinal", "external_id", "class", "group_size",
	"spec", "metadata", "prompt_tokens", "prompt_ids"}

// taskStream pulls tasks from the submission into COPY. It keeps its own error,
// since the one that COPY returns has lost the type.
type taskStream struct {
	release *release
	row     []any
	err     error
}

func (s *taskStream) Next() bool {
	spec, err := s.release.submission.Next()
	if errors.Is(err, io.EOF) {
		return false
	}
	if err == nil {
		s.row, err = s.release.accept(spec)
	}
	s.err = err
	return err == nil
}

func (s *taskStream) Values() ([]any, error) { return s.row, nil }

func (s *taskStream) Err() error { return s.err }

// accept checks a task against the run and the rest of the batch, and returns its
// row.
func (r *release) accept(spec *task.Spec) ([]any, error) {
	ordinal := len(r.tasks)
	path := "tasks[" + strconv.Itoa(ordinal) + "]"
	if ordinal == MaxBatchTasks {
		return nil, &FieldError{Path: "tasks", Problem: fmt.Sprintf("must hold at most %d tasks", MaxBatchTasks)}
	}
	class, declared := r.classIndex[spec.Class]
	if !declared {
		return nil, &UnknownClassError{Class: spec.Class, Path: path + ".class"}
	}
	members := r.of.Contract.Contract.members(spec.Members())
	if members < 1 || members > MaxBatchSessions-r.sessions {
		return nil, &FieldError{Path: path + ".group_size", Problem: fmt.Sprintf("brings the batch above %d sessions", MaxBatchSessions)}
	}
	if spec.ID != "" {
		if cleanText(spec.ID) != spec.ID {
			return nil, &FieldError{Path: path + ".id", Problem: "must be text without NUL"}
		}
		if first, again := r.externalIDs[spec.ID]; again {
			return nil, &FieldError{Path: path + ".id", Problem: fmt.Sprintf("repeats %q of tasks[%d]", spec.ID, first)}
		}
		r.externalIDs[spec.ID] = ordinal
	}
	stored, err := storedSpec(spec)
	if err != nil {
		return nil, &FieldError{Path: path, Problem: err.Error()}
	}
	promptTokens := len(spec.Prompt.TokenIDs)
	if spec.Prompt.Synthetic != nil {
		promptTokens = spec.Prompt.Synthetic.Tokens
	}
	id := taskID(r.batchID, spec.ID, ordinal)
	r.tasks = append(r.tasks, releasedTask{class: class, size: spec.Members(), members: members, promptTokens: promptTokens, deadlineSeconds: spec.DeadlineSeconds})
	r.taskIDs = append(r.taskIDs, id)
	r.sessions += members
	return []any{id, r.of.Pool, r.of.ID, r.batchID, ordinal, spec.ID, spec.Class, spec.Members(),
		stored, nullJSON(spec.Metadata), promptTokens, packTokens(spec.Prompt.TokenIDs)}, nil
}

// storedSpec is the spec without what has a column of its own.
func storedSpec(spec *task.Spec) ([]byte, error) {
	rest := *spec
	rest.Prompt.TokenIDs = nil
	rest.Metadata = nil
	if !utf8.Valid(spec.Metadata) {
		return nil, errors.New("metadata must be UTF-8")
	}
	var buffer bytes.Buffer
	encoder := json.NewEncoder(&buffer)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(&rest); err != nil {
		return nil, fmt.Errorf("must be JSON: %w", err)
	}
	if !utf8.Valid(buffer.Bytes()) {
		return nil, errors.New("must be UTF-8")
	}
	return buffer.Bytes(), nil
}

// nullJSON keeps an absent JSON value apart from an empty one.
func nullJSON(raw json.RawMessage) any {
	if len(raw) == 0 {
		return nil
	}
	return []byte(raw)
}

// taskID keeps a task named "3" apart from the unnamed task number 3.
func taskID(batchID uuid.UUID, externalID string, ordinal int) uuid.UUID {
	if externalID != "" {
		return uuid.NewSHA1(batchID, []byte("task:"+externalID))
	}
	return uuid.NewSHA1(batchID, []byte("ordinal:"+strconv.Itoa(ordinal)))
}

// SessionID is the id of one member of a task.
func SessionID(taskID uuid.UUID, member int) uuid.UUID {
	return uuid.NewSHA1(taskID, []byte("member:"+strconv.Itoa(member)))
}

// copySessions fills groups, sessions and their first events, in dispatch order.
func (r *release) copySessions(ctx context.Context) error {
	contract := &r.of.Contract.Contract
	groups := make([][]any, 0, len(r.tasks))
	sessions := make([][]any, 0, r.sessions)
	events := make([][]any, 0, r.sessions)
	detail, err := json.Marshal(map[string]any{"batch": r.batchID, "policy_version": r.policyVersion})
	if err != nil {
		return fmt.Errorf("describing the release: %w", err)
	}
	for _, i := range stratified(r.tasks) {
		t, id := r.tasks[i], r.taskIDs[i]
		class := contract.Classes[t.class].Class
		groups = append(groups, []any{id, r.of.Pool, r.of.ID, r.batchID, class, t.size, t.members,
			string(contract.GroupPolicy), contract.refillsAllowed(t.size), deadlineOf(r.releasedAt, t.deadlineSeconds)})
		for member := range t.members {
			session := SessionID(id, member)
			sessions = append(sessions, []any{session, r.of.Pool, r.of.ID, r.batchID, id, member, class, len(sessions),
				r.policyVersion, string(SessionQueued), t.promptTokens, 1, r.releasedAt})
			events = append(events, []any{session, 1, r.of.ID, r.releasedAt, string(EventReleased), detail})
		}
	}
	for _, c := range []struct {
		table   string
		columns []string
		rows    [][]any
	}{
		{"groups", []string{"group_id", "pool", "run_id", "batch_id", "class", "size", "members", "policy", "refills_allowed", "deadline_at"}, groups},
		{"sessions", []string{"session_id", "pool", "run_id", "batch_id", "task_id", "member", "class", "dispatch_ordinal",
			"policy_version", "state", "context_tokens", "event_seq", "released_at"}, sessions},
		{"session_events", []string{"session_id", "seq", "run_id", "at", "kind", "detail"}, events},
	} {
		if _, err := r.tx.CopyFrom(ctx, pgx.Identifier{c.table}, c.columns, pgx.CopyFromRows(c.rows)); err != nil {
			return fmt.Errorf("writing %s: %w", c.table, err)
		}
	}
	return nil
}

// deadlineOf is nil for none.
func deadlineOf(releasedAt time.Time, seconds float64) any {
	if seconds == 0 {
		return nil
	}
	return releasedAt.Add(time.Duration(seconds * float64(time.Second)))
}

// count takes the run's lock and makes the batch part of A.
func (r *release) count(ctx context.Context, hash []byte) (Batch, error) {
	lock, err := lockRun(ctx, r.tx, r.of.ID)
	if err != nil {
		return Batch{}, err
	}
	if lock.state == RunEnded {
		return Batch{}, ErrRunEnded
	}
	if lock.contractVersion != r.of.Contract.Version {
		if err := r.checkClassesAgain(ctx); err != nil {
			return Batch{}, err
		}
	}
	byClass := map[string]int{}
	for _, t := range r.tasks {
		byClass[r.of.Contract.Contract.Classes[t.class].Class] += t.members
	}
	stored := Batch{
		ID: r.batchID, RunID: r.of.ID, Seq: lock.batchSeq + 1, IdempotencyKey: r.submission.IdempotencyKey,
		PolicyVersion: r.policyVersion, Tasks: len(r.tasks), Sessions: r.sessions, SessionsByClass: byClass, CreatedAt: r.releasedAt,
	}
	batch := &pgx.Batch{}
	batch.Queue(insertBatchSQL, stored.ID, r.of.Pool, stored.RunID, stored.Seq, stored.IdempotencyKey, hash,
		stored.PolicyVersion, stored.Tasks, stored.Sessions, stored.SessionsByClass, stored.CreatedAt)
	batch.Queue(countReleasedSQL, stored.RunID, stored.Seq, stored.Sessions)
	for class, sessions := range byClass {
		batch.Queue(countReleasedClassSQL, stored.RunID, class, sessions)
	}
	notify(batch, DispatchTopic())
	if err := r.tx.SendBatch(ctx, batch).Close(); err != nil {
		return Batch{}, fmt.Errorf("counting the release: %w", err)
	}
	return stored, nil
}

// checkClassesAgain is for the rare contract that changed while the body arrived.
func (r *release) checkClassesAgain(ctx context.Context) error {
	current, err := readRun(ctx, r.tx, r.of.ID)
	if err != nil {
		return err
	}
	for i, t := range r.tasks {
		class := r.of.Contract.Contract.Classes[t.class].Class
		if _, declared := current.Contract.Contract.ShareOf(class); !declared {
			return &UnknownClassError{Class: class, Path: "tasks[" + strconv.Itoa(i) + "].class"}
		}
	}
	return nil
}
