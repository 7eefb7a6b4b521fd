package activities

import (
	"slices"
	"sync"

	"github.com/google/uuid"

	"holdfast/orchestrator/engine"
	"holdfast/store"
)

// output is what a turn has generated so far, over all its calls and workers. The
// reader of a stream adds to it while its checkpoints are written and heartbeats
// tell how long it is.
type output struct {
	mu       sync.Mutex
	ids      []int32
	logprobs []float32
	versions []store.VersionSpan
	effort   store.TurnEffort
	// instance sampled the last tokens.
	instance string
	// generated is the highest count of tokens that the turn has ever had, also in a
	// worker that died: what is generated below it is generated again.
	generated int
	// callStart is where the output of the present call begins. Up to sure it is
	// known not to be the turn's end: a checkpoint that held the last token would have
	// the next worker generate beyond it.
	callStart, sure int
	// parts are the checkpoints of this output; saveAt is the length that asks for the next.
	parts  []savedPart
	saveAt int
	every  int
}

// savedPart is a checkpoint: the part that it ends with, and where.
type savedPart struct {
	id  uuid.UUID
	end int
}

// newOutput goes on from what is durable of a turn, which may be nothing.
func newOutput(partial store.PartialTurn, every int) *output {
	o := &output{
		ids: partial.IDs, logprobs: partial.Logprobs, versions: partial.Versions, effort: partial.TurnEffort,
		instance: partial.Instance, generated: len(partial.IDs), sure: len(partial.IDs), every: every, saveAt: len(partial.IDs) + every,
	}
	if len(o.ids) > 0 {
		o.parts = []savedPart{{id: partial.Last, end: len(o.ids)}}
	}
	return o
}

// recall takes in what an earlier worker said of the turn before it was lost.
func (o *output) recall(earlier progress) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.generated = max(o.generated, earlier.Tokens)
	o.effort.Attempts = max(o.effort.Attempts, earlier.Attempts)
	o.effort.Resumes = max(o.effort.Resumes, earlier.Resumes)
	o.effort.TokensRegenerated = max(o.effort.TokensRegenerated, earlier.TokensRegenerated)
}

// progress is what a heartbeat tells of the turn.
func (o *output) progress() progress {
	o.mu.Lock()
	defer o.mu.Unlock()
	return progress{
		Tokens: o.generated, Attempts: o.effort.Attempts, Resumes: o.effort.Resumes, TokensRegenerated: o.effort.TokensRegenerated,
	}
}

// begin starts a call and returns its number within the turn, from 1.
func (o *output) begin(instance string) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.callStart, o.instance = len(o.ids), instance
	o.effort.Attempts++
	return o.effort.Attempts
}

// growth is what a piece of a call's output added to the turn's.
type growth struct {
	tokens, regenerated int
	// resumed: it is the first piece of a call that went on from earlier output.
	resumed bool
	// due: a checkpoint is.
	due bool
}

// grow takes in the present call's output so far, of which it may know a part. A
// token counts once its log-probability is there; one that has none where the
// tokens before have one, or the other way round, is not taken: see mixes.
func (o *output) grow(ids []int32, logprobs []float32, policyVersion int64) (g growth) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.mixes(ids, logprobs) {
		return growth{}
	}
	end := len(ids)
	if len(logprobs) > 0 {
		end = min(end, len(logprobs))
	}
	known := len(o.ids) - o.callStart
	if end <= known {
		return growth{}
	}
	g.tokens = end - known
	g.resumed = known == 0 && o.callStart > 0
	g.regenerated = max(0, min(o.generated-len(o.ids), g.tokens))
	o.sure = len(o.ids)
	o.ids = append(o.ids, ids[known:end]...)
	if len(logprobs) > 0 {
		o.logprobs = append(o.logprobs, logprobs[known:end]...)
	}
	o.versions = store.AppendVersion(o.versions, g.tokens, policyVersion)
	o.generated = max(o.generated, len(o.ids))
	o.effort.TokensRegenerated += int64(g.regenerated)
	if g.resumed {
		o.effort.Resumes++
	}
	g.due = o.sure >= o.saveAt
	return g
}

// broken tells that the present call has ended before the turn.
func (o *output) broken() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sure = len(o.ids)
}

// mixes tells whether a call gives log-probabilities and the output before it has
// none, or the other way round: such arrays are of no use to training.
func (o *output) mixes(ids []int32, logprobs []float32) bool {
	return o.callStart > 0 && len(ids) > 0 && (len(o.logprobs) > 0) != (len(logprobs) > 0)
}

// relabel gives the last tokens of the present call that are of one version the
// version that the engine names.
func (o *output) relabel(policyVersion int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.ids) == o.callStart {
		return
	}
	last := &o.versions[len(o.versions)-1]
	if last.PolicyVersion == policyVersion {
		return
	}
	from := max(o.callStart, len(o.ids)-last.Tokens)
	tokens := len(o.ids) - from
	if last.Tokens -= tokens; last.Tokens == 0 {
		o.versions = o.versions[:len(o.versions)-1]
	}
	o.versions = store.AppendVersion(o.versions, tokens, policyVersion)
	o.forgetPartsBeyond(from)
}

// discard drops the output of the present call, which is not to be trusted.
func (o *output) discard() {
	o.mu.Lock()
	defer o.mu.Unlock()
	drop := len(o.ids) - o.callStart
	o.ids, o.sure = o.ids[:o.callStart], o.callStart
	o.logprobs = o.logprobs[:min(len(o.logprobs), o.callStart)]
	for drop > 0 {
		last := &o.versions[len(o.versions)-1]
		n := min(drop, last.Tokens)
		drop -= n
		if last.Tokens -= n; last.Tokens == 0 {
			o.versions = o.versions[:len(o.versions)-1]
		}
	}
	o.forgetPartsBeyond(o.callStart)
}

// forgetPartsBeyond makes the next checkpoint replace what reaches beyond a place.
func (o *output) forgetPartsBeyond(tokens int) {
	for len(o.parts) > 0 && o.parts[len(o.parts)-1].end > tokens {
		o.parts = o.parts[:len(o.parts)-1]
	}
	o.saveAt = o.durable().end + o.every
}

func (o *output) durable() savedPart {
	if len(o.parts) == 0 {
		return savedPart{}
	}
	return o.parts[len(o.parts)-1]
}

// due tells whether enough is generated for a checkpoint.
func (o *output) due() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.sure >= o.saveAt
}

// unsaved is a copy of what no checkpoint holds yet; ok is false if that is nothing.
func (o *output) unsaved() (c store.Checkpoint, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	durable := o.durable()
	if durable.end >= o.sure {
		return c, false
	}
	c = store.Checkpoint{
		StartTokens: durable.end, Previous: durable.id, IDs: slices.Clone(o.ids[durable.end:o.sure]), Instance: o.instance, TurnEffort: o.effort,
	}
	if len(o.logprobs) > 0 {
		c.Logprobs = slices.Clone(o.logprobs[durable.end:o.sure])
	}
	from := 0
	for _, span := range o.versions {
		to := from + span.Tokens
		c.Versions = store.AppendVersion(c.Versions, min(to, o.sure)-max(from, durable.end), span.PolicyVersion)
		from = to
	}
	// Until that is written, or if it cannot be, the next one waits for as much again.
	o.saveAt = o.sure + o.every
	return c, true
}

// discarded names the part behind which stored output is to go.
func (o *output) discarded() store.Checkpoint {
	o.mu.Lock()
	defer o.mu.Unlock()
	durable := o.durable()
	return store.Checkpoint{StartTokens: durable.end, Previous: durable.id}
}

// saved notes a checkpoint.
func (o *output) saved(part savedPart) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.parts = append(o.parts, part)
}

// finished tells whether the output is whole by the terms of its request, though no
// call said so.
func (o *output) finished(whole *engine.Request) (engine.FinishReason, bool) {
	n := len(o.ids)
	switch {
	case n == 0:
	case n >= whole.MinTokens && slices.Contains(whole.StopTokenIDs, o.ids[n-1]):
		return engine.FinishStop, true
	case n >= whole.MaxTokens:
		return engine.FinishLength, true
	}
	return engine.FinishUnknown, false
}

// next is the call that goes on from the output.
func (o *output) next(whole engine.Request) engine.Request {
	n := len(o.ids)
	if n == 0 {
		return whole
	}
	whole.Prompt = append(whole.Prompt, o.ids...)
	whole.MaxTokens -= n
	whole.MinTokens = max(0, whole.MinTokens-n)
	if whole.Seed != nil {
		// The same seed would draw the same numbers again.
		seed := *whole.Seed + int64(n)
		whole.Seed = &seed
	}
	return whole
}
