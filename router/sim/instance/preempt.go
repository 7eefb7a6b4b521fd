package instance

// PreemptAll sends every running request back to the waiting queue at Now, the one
// admitted last first, as an engine does that is told to drop the KV cache of
// running requests. Each computes its prompt and output again, less what is
// still cached then. What happened is appended to out.
func (in *Instance) PreemptAll(out []Event) []Event {
	for r := in.running.last; r != nil; r = in.running.last {
		in.leave(r)
		r.state = Waiting
		r.target = r.PromptTokens + r.generated
		r.scheduled = 0
		r.preemptions++
		in.total.preemptions++
		in.enqueue(r)
		out = append(out, r.event(Preempted, in.now))
	}
	return out
}
