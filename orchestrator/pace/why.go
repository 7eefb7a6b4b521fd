package pace

import "fmt"

// Why tells the advice's reason for people.
func (a *Advice) Why(state *State) string {
	if a.Idle {
		return "nothing is outstanding and the trainer waits, so one group is advised whatever the bounds say"
	}
	var outstanding int64
	for i := range state.Classes {
		outstanding += state.Classes[i].Outstanding
	}
	of := ""
	if a.LimitClass != "" {
		of = " of class " + a.LimitClass
	}
	switch a.Limit {
	case Staleness:
		return fmt.Sprintf("in %.4g s more than %d further policy versions are expected; what%s surely ends until then leaves room for %d sessions besides the %d outstanding",
			*a.HorizonSeconds, *state.StalenessBound, of, *a.StalenessRoom, outstanding)
	case Undelivered:
		return fmt.Sprintf("%d usable samples are not acknowledged and %d sessions are outstanding; steps of %d samples within the bound leave room for %d sessions",
			state.Unacknowledged, outstanding, a.StepSamples, *a.UndeliveredRoom)
	case Backlog:
		return fmt.Sprintf("%d sessions are outstanding, and %d keep the pool busy until the next question", outstanding, a.TargetBacklog)
	case ColdStart:
		return fmt.Sprintf("too little was measured yet for more than a first wave of %d sessions, of which %d are outstanding", a.TargetBacklog, outstanding)
	case Ended:
		return "the run has ended"
	}
	return ""
}
