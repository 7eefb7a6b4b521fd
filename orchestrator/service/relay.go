package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"go.temporal.io/api/enums/v1"
	"go.temporal.io/api/serviceerror"
	"go.temporal.io/sdk/client"
	"golang.org/x/sync/errgroup"

	"holdfast/store"
	"holdfast/workflows"
)

const (
	relayBatch        = 200
	relayParallel     = 16
	relayLeaseSeconds = 30
	relayIdle         = 5 * time.Second
	relayRetrySeconds = 2
)

// relay carries outbox messages to workflows: what a transaction promised is done
// at least once, also when the process dies between the two.
type relay struct {
	store    *store.Store
	temporal client.Client
	listener *store.Listener
	messages wake
	// cancelLocal ends a model call that this process is making.
	cancelLocal func(session uuid.UUID)
	log         *slog.Logger
}

// run delivers until ctx ends.
func (r *relay) run(ctx context.Context) error {
	for {
		notified := r.listener.WaitFor(store.OutboxTopic())
		more, err := r.deliver(ctx)
		if err != nil && ctx.Err() == nil {
			r.log.Warn("delivering messages to workflows failed, trying again", "error", err)
		}
		if more && err == nil {
			continue
		}
		timer := time.NewTimer(relayIdle)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-r.messages:
		case <-notified:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// deliver claims one batch and sends it; more tells that another may be due.
func (r *relay) deliver(ctx context.Context) (more bool, err error) {
	rows, err := r.store.ClaimOutbox(ctx, relayBatch, relayLeaseSeconds)
	if err != nil {
		return false, fmt.Errorf("claiming outbox messages: %w", err)
	}
	if len(rows) == 0 {
		return false, nil
	}
	results := make([]error, len(rows))
	var group errgroup.Group
	group.SetLimit(relayParallel)
	for i := range rows {
		group.Go(func() error {
			results[i] = r.send(ctx, &rows[i])
			return nil
		})
	}
	_ = group.Wait()
	done := make([]int64, 0, len(rows))
	for i, result := range results {
		if result == nil {
			done = append(done, rows[i].ID)
			continue
		}
		r.log.Warn("a message to a workflow failed, trying again", "kind", rows[i].Kind, "session", rows[i].SessionID, "attempt", rows[i].Attempts, "error", result)
		if err := r.store.RetryOutbox(ctx, rows[i].ID, relayRetrySeconds, result.Error()); err != nil {
			return false, fmt.Errorf("putting back an outbox message: %w", err)
		}
	}
	if err := r.store.FinishOutbox(ctx, done); err != nil {
		return false, fmt.Errorf("finishing %d outbox messages: %w", len(done), err)
	}
	return len(rows) == relayBatch, nil
}

// send delivers one message. A workflow that exists already, or has ended, counts
// as delivered: the session's row says what became of it.
func (r *relay) send(ctx context.Context, row *store.OutboxRow) error {
	id := row.SessionID.String()
	var err error
	switch row.Kind {
	case store.OutboxStart:
		_, err = r.temporal.ExecuteWorkflow(ctx, client.StartWorkflowOptions{
			ID: id, TaskQueue: workflows.TaskQueue(row.Pool),
			WorkflowIDReusePolicy:                    enums.WORKFLOW_ID_REUSE_POLICY_ALLOW_DUPLICATE,
			WorkflowExecutionErrorWhenAlreadyStarted: true,
		}, workflows.SessionWorkflow, workflows.SessionInput{Session: id})
		var started *serviceerror.WorkflowExecutionAlreadyStarted
		if errors.As(err, &started) {
			return nil
		}
	case store.OutboxGrant:
		err = r.temporal.SignalWorkflow(ctx, id, "", workflows.GrantSignal, workflows.Grant{Turn: row.Turn})
	case store.OutboxCancel:
		return r.cancel(ctx, row)
	case store.OutboxFinish:
		err = r.temporal.SignalWorkflow(ctx, id, "", workflows.FinishSignal, nil)
	default:
		return fmt.Errorf("outbox kind %q is unknown", row.Kind)
	}
	var missing *serviceerror.NotFound
	if errors.As(err, &missing) {
		return r.withoutWorkflow(ctx, row)
	}
	return err
}

// cancel asks the session's workflow to cancel. Since the message was claimed the
// session may have begun again, in a run of the workflow that must not hear of it: that
// run's environment would be lost. So the run is named, and whether the cancellation
// still stands is read after the name: if it does, the name is not of a later attempt.
func (r *relay) cancel(ctx context.Context, row *store.OutboxRow) error {
	id := row.SessionID.String()
	var missing *serviceerror.NotFound
	described, err := r.temporal.DescribeWorkflow(ctx, id, "")
	if errors.As(err, &missing) {
		return r.withoutWorkflow(ctx, row)
	}
	if err != nil {
		return err
	}
	wanted, err := r.store.CancelWanted(ctx, row.SessionID)
	if err != nil || !wanted {
		return err
	}
	r.cancelLocal(row.SessionID)
	err = r.temporal.CancelWorkflow(ctx, id, described.WorkflowExecution.RunID)
	if !errors.As(err, &missing) {
		return err
	}
	// The run has ended meanwhile: with the session, with its attempt, or another goes on.
	if wanted, err = r.store.CancelWanted(ctx, row.SessionID); err != nil || !wanted {
		return err
	}
	return errors.New("the run that was to be cancelled has ended, and the session has not")
}

// withoutWorkflow handles a message whose workflow is not there: it has not been
// started yet (its start is in the outbox too, so this message waits), or it has
// ended and took the session with it.
func (r *relay) withoutWorkflow(ctx context.Context, row *store.OutboxRow) error {
	work, err := r.store.SessionForWork(ctx, row.SessionID)
	if err != nil {
		return err
	}
	if work.State == store.SessionEnded {
		return nil
	}
	return fmt.Errorf("the session is %s and its workflow is not running yet", work.State)
}
