package workflows

import "time"

// GrantSignal tells a held workflow that the router admitted its turn. Its
// payload is a Grant. Repeating it is harmless: the workflow compares the turn,
// and the turn's activity asks the router again before it calls an engine.
const GrantSignal = "grant"

// FinishSignal tells the workflow of a harness's session to look at what the
// harness asked for. It has no payload, and repeating it is harmless.
const FinishSignal = "finish"

// SessionWorkflow is the registered name of Session.
const SessionWorkflow = "holdfast.session"

// Registered names of the activities, which live in package activities.
const (
	AdmitActivity    = "holdfast.admit"
	TurnActivity     = "holdfast.turn"
	ScoreActivity    = "holdfast.score"
	CompleteActivity = "holdfast.complete"
	OutsideActivity  = "holdfast.outside"
	StepActivity     = "holdfast.step"
	ReleaseActivity  = "holdfast.release"
)

// RestartError is the type of the complete activity's error when the session did not
// end but begins again from its prompt.
const RestartError = "restart"

// TaskQueue returns the Temporal task queue of a pool. Only the process that
// owns the pool's router polls it.
func TaskQueue(pool string) string { return "holdfast-" + pool }

// Timeouts and limits of a session's workflow.
const (
	// holdSafetyInterval is how long a held workflow waits for a grant before it
	// re-enqueues itself. It never admits: it only repairs a lost signal.
	holdSafetyInterval = 4 * time.Hour
	// heartbeatTimeout bounds how long a turn whose worker died stays unnoticed.
	heartbeatTimeout = 30 * time.Second
	// turnTimeout bounds one model call, a queue at the engine included.
	turnTimeout = 12 * time.Hour
	// scoreTimeout bounds scoring: above all attempts of the slowest scorer that a task
	// may ask for.
	scoreTimeout = 24 * time.Hour
	// stepTimeout bounds one step of an environment: above all the calls that one
	// message of the model may hold, each as slow as its task allows.
	stepTimeout = 72 * time.Hour
	// releaseAttempts bounds how often the release of an environment is tried. What
	// is left then ends with the process, or is the server's to forget.
	releaseAttempts = 5
	// bookkeepingTimeout bounds one try of an activity that reads and writes rows, or has
	// a prompt tokenised; so long also stays unnoticed that its worker died.
	bookkeepingTimeout = 20 * time.Second
	// historyEventsLimit is the history length at which a workflow continues as
	// new between two turns, far below Temporal's 51,200 events.
	historyEventsLimit = 2_000
)
