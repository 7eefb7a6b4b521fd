package activities

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"

	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/pool"
	"holdfast/router"
	"holdfast/store/storetest"
)

func TestMain(m *testing.M) {
	// Each run of the property test has processes of its own; -rapid.checks asks for more.
	for name, value := range map[string]string{"rapid.checks": "40", "rapid.shrinktime": "10s"} {
		if err := flag.Set(name, value); err != nil {
			panic(err)
		}
	}
	os.Exit(storetest.Main(m))
}

// ending is how a scripted call ends after its tokens.
type ending int

const (
	// endsItself: at the limit, or at the script's last token.
	endsItself ending = iota
	// endsBroken: the stream ends before the generation does.
	endsBroken
	// endsCut: the engine gives the call up, as for a weight update.
	endsCut
	// endsLost: the worker dies; the call hangs until the test lets it go.
	endsLost
	// endsUnmarked: the connection breaks after the last token, before the end marker.
	endsUnmarked
	// endsContradicting: the engine counts more tokens than it sent.
	endsContradicting
	// endsUnfit: the engine refuses the request itself.
	endsUnfit
)

// step is one scripted call; calls beyond the script end themselves.
type step struct {
	// tokens before the end; what a call generates anyway if it ends by itself.
	tokens int
	end    ending
	// unseen of them come with the result only.
	unseen int
	// newVersionAfter, if positive, changes the weights after so many tokens.
	newVersionAfter int
	newVersionAtEnd bool
}

// engines is a deterministic engine at several instances: token and log-probability
// at a place of the context depend on the place and the weights alone, so that any
// sequence of calls has one right output.
type engines struct {
	t           testing.TB
	chunkTokens int
	// lastToken, if positive, is the place in the context of a token that ends the
	// generation by itself.
	lastToken int
	// silent: the registry does not know of versions, the engine says them.
	silent bool
	// hung gets a value when a call hangs; release lets it end.
	hung    chan struct{}
	release chan struct{}
	// reached, if set, is called when a call has sent its last token.
	reached func()

	// text is what all ids stand for.
	text string

	mu     sync.Mutex
	script []step
	// tokenizerErrs are what the next questions to the tokenizer get.
	tokenizerErrs []error
	tokenized     []engine.TokenizeRequest
	detokenized   [][]int32
	version       int64
	requests      []engine.Request
	// sampled counts, per place, how often a token was sampled there, and versions
	// under which version last.
	sampled  map[int]int
	versions map[int]int64
}

func newEngines(t testing.TB, script ...step) *engines {
	return &engines{
		t: t, chunkTokens: 1, script: script, version: 1, hung: make(chan struct{}, 1), release: make(chan struct{}),
		sampled: map[int]int{}, versions: map[int]int64{},
	}
}

func tokenAt(place int, version int64) int32 {
	return int32((uint64(place)*0x9e3779b97f4a7c15+uint64(version)*0xbf58476d1ce4e5b9)>>40) & 0xffff
}

func logprobAt(place int, version int64) float32 {
	return -float32(tokenAt(place, version+1_000)) / 65_536
}

func (e *engines) begin(request engine.Request) step {
	e.mu.Lock()
	defer e.mu.Unlock()
	for place := range request.Prompt {
		if version, ok := e.versions[place]; ok && request.Prompt[place] != tokenAt(place, version) {
			e.t.Errorf("call %d sends token %d at place %d, sampled was %d", len(e.requests), request.Prompt[place], place, tokenAt(place, version))
		}
	}
	if request.MaxTokens < 1 || request.MinTokens < 0 || request.MinTokens > request.MaxTokens {
		e.t.Errorf("call %d asks for %d to %d tokens", len(e.requests), request.MinTokens, request.MaxTokens)
	}
	request.Prompt = slices.Clone(request.Prompt)
	e.requests = append(e.requests, request)
	if len(e.script) == 0 {
		return step{}
	}
	s := e.script[0]
	e.script = e.script[1:]
	return s
}

// sample generates one token.
func (e *engines) sample(place int, r *engine.Result) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.sampled[place]++
	e.versions[place] = e.version
	r.OutputIDs = append(r.OutputIDs, tokenAt(place, e.version))
	r.Logprobs = append(r.Logprobs, logprobAt(place, e.version))
}

func (e *engines) changeWeights() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.version++
}

func (e *engines) Generate(ctx context.Context, _ router.InstanceID, _ router.SessionID, request engine.Request, onProgress func(engine.Progress)) (engine.Result, error) {
	s := e.begin(request)
	if s.end == endsUnfit {
		return engine.Result{CachedTokens: -1}, &engine.Error{Class: engine.FailTurn, StatusCode: 400, Message: "no such model"}
	}
	n, last := request.MaxTokens, len(request.Prompt)+request.MaxTokens
	finish := engine.FinishLength
	if e.lastToken > 0 && e.lastToken < last {
		n, finish = e.lastToken-len(request.Prompt)+1, engine.FinishStop
	}
	if s.end == endsBroken || s.end == endsCut || s.end == endsLost {
		n = min(n-1, s.tokens)
	}
	result := engine.Result{
		PromptTokens: len(request.Prompt), CachedTokens: len(request.Prompt) / 2,
		QueueSeconds: 0.5, TimeToFirstTokenSeconds: 1, TotalSeconds: 1 + float64(n)/100,
	}
	for i := range n {
		if s.newVersionAfter > 0 && i == s.newVersionAfter {
			e.changeWeights()
		}
		e.sample(len(request.Prompt)+i, &result)
		if sent := i + 1; sent <= n-s.unseen && (sent%e.chunkTokens == 0 || sent == n-s.unseen) {
			onProgress(engine.Progress{OutputTokens: sent, OutputIDs: result.OutputIDs, Logprobs: result.Logprobs})
		}
	}
	if e.reached != nil {
		e.reached()
	}
	if e.silent {
		result.WeightVersion = strconv.FormatInt(e.version, 10)
	}
	if s.newVersionAtEnd {
		e.changeWeights()
	}
	return e.end(ctx, s.end, finish, result)
}

func (e *engines) end(ctx context.Context, how ending, finish engine.FinishReason, result engine.Result) (engine.Result, error) {
	switch how {
	case endsItself:
	case endsBroken:
		return result, &engine.Error{Class: engine.RetryElsewhere, Message: "reading the stream", Err: io.ErrUnexpectedEOF}
	case endsCut:
		result.FinishReason = engine.FinishAbort
		return result, nil
	case endsLost:
		e.hung <- struct{}{}
		select {
		case <-e.release:
			return result, &engine.Error{Class: engine.RetryElsewhere, Message: "reading the stream", Err: io.ErrUnexpectedEOF}
		case <-ctx.Done():
			return result, &engine.Error{Class: engine.Cancelled, Err: ctx.Err()}
		}
	case endsUnmarked:
		result.FinishReason = finish
		return result, &engine.Error{Class: engine.RetryElsewhere, Message: "reading the stream", Err: io.ErrUnexpectedEOF}
	case endsContradicting:
		result.FinishReason = finish
		return result, &engine.Error{Class: engine.RetryElsewhere, Message: fmt.Sprintf("the engine counts %d output tokens", len(result.OutputIDs)+1)}
	}
	result.FinishReason = finish
	return result, nil
}

// Tokenize makes one id of each byte, after as many failures as the test asks for.
func (e *engines) Tokenize(_ context.Context, request engine.TokenizeRequest) ([]int32, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tokenized = append(e.tokenized, request)
	if len(e.tokenizerErrs) > 0 {
		err := e.tokenizerErrs[0]
		e.tokenizerErrs = e.tokenizerErrs[1:]
		return nil, err
	}
	return engine.Bytes{}.Encode(nil, request.Text+string(request.Messages)), nil
}

// Detokenize gives the test's text.
func (e *engines) Detokenize(_ context.Context, ids []int32, ended bool) (string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.tokenizerErrs) > 0 {
		err := e.tokenizerErrs[0]
		e.tokenizerErrs = e.tokenizerErrs[1:]
		return "", err
	}
	e.detokenized = append(e.detokenized, ids)
	if ended {
		return e.text, nil
	}
	return e.text + " unended", nil
}

func (e *engines) Forget(router.SessionID) {}

func (e *engines) MaxContextTokens() int64 { return 1 << 20 }

func (e *engines) Hashing() (policyVersion int64, blockTokens int) { return 1, 16 }

func (e *engines) Receipt(router.InstanceID, int64, int64) {}

func (e *engines) PolicyVersion(router.InstanceID) int64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.silent {
		return 0
	}
	return e.version
}

// sampledAgain counts the tokens beyond the first that were sampled at each place.
func (e *engines) sampledAgain() (tokens int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, times := range e.sampled {
		tokens += int64(times - 1)
	}
	return tokens
}

// placements admits every turn to one of two instances, but for those it is told to hold.
type placements struct {
	mu sync.Mutex
	// holdNext, if not nil, says whether the question of that number is held.
	holdNext  func(question int) bool
	questions []router.TurnRequested
	told      []router.Event
}

func (p *placements) RequestTurn(_ context.Context, request router.TurnRequested) (pool.Placement, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	request.NewBlocks = slices.Clone(request.NewBlocks)
	p.questions = append(p.questions, request)
	if p.holdNext != nil && p.holdNext(len(p.questions)-1) {
		return pool.Placement{}, nil
	}
	instance := router.InstanceID("w1")
	if request.Avoid == instance {
		instance = "w2"
	}
	return pool.Placement{Admitted: true, Instance: instance, PredictedCachedTokens: request.PromptTokens / 2}, nil
}

// AwaitTurn asks again after a hold, of which it tells.
func (p *placements) AwaitTurn(ctx context.Context, request router.TurnRequested, onHold func(router.Reason)) (pool.Placement, error) {
	for {
		placement, err := p.RequestTurn(ctx, request)
		if err != nil || placement.Admitted || ctx.Err() != nil {
			return placement, errors.Join(err, ctx.Err())
		}
		onHold(router.AtCap)
	}
}

func (p *placements) Tell(_ context.Context, event router.Event) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.told = append(p.told, event)
	return nil
}

// ends are the turn ends that the router was told.
func (p *placements) ends() (ends []router.TurnEnded) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, event := range p.told {
		if end, ok := event.(*router.TurnEnded); ok {
			ends = append(ends, *end)
		}
	}
	return ends
}
