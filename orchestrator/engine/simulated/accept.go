package simulated

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"holdfast/orchestrator/engine/simulated/fault"
	"holdfast/router/sim/instance"
)

// scratch is what a handler needs only until its request is submitted, or only
// while it writes: prompts and outputs are megabytes.
type scratch struct {
	body   []byte
	prompt []int32
	hashes []blockHash
	noise  []uint64
}

var scratches = sync.Pool{New: func() any { return new(scratch) }}

// parser reads a dialect's generation request. The prompt is appended to one that may
// be reused when the request has been submitted. What it returns beside an error
// holds that prompt, or is nil.
type parser func(body []byte, prompt []int32, cfg *Config) (*completionRequest, error)

// accept reads a request, unless a fault refuses it, and submits it.
func (s *Server) accept(l *life, w http.ResponseWriter, r *http.Request, parse parser) (*call, error) {
	if err := s.refuseByFault(w); err != nil {
		return nil, err
	}
	started := time.Now()
	tmp := scratches.Get().(*scratch)
	defer scratches.Put(tmp)
	var err error
	if tmp.body, err = readBody(tmp.body[:0], http.MaxBytesReader(w, r.Body, s.cfg.MaxBodyBytes), r.ContentLength); err != nil {
		return nil, err
	}
	request, err := parse(tmp.body, tmp.prompt, &s.cfg)
	if request == nil {
		return nil, err
	}
	tmp.prompt = request.Prompt
	if err != nil {
		return nil, err
	}
	x := &call{
		requestID: request.RequestID, sessionID: r.Header.Get("X-Session-Id"),
		request: request, promptTokens: len(request.Prompt), wallStart: started, dropAfter: s.faults.DropAfter(),
	}
	if x.requestID == "" {
		x.requestID = r.Header.Get("X-Request-Id")
	}
	if x.requestID == "" {
		x.requestID = strconv.FormatInt(started.UnixNano(), 36)
	}
	rank := request.Rank
	if rank == "" {
		rank = r.Header.Get("X-Data-Parallel-Rank")
	}
	c, err := l.choose(rank)
	if err != nil {
		return nil, badRequest("", "%v", err)
	}
	tmp.hashes = s.prepare(x, tmp.hashes[:0], request.Prompt, l.weightVersion())
	if request.ReturnPromptTokens {
		request.Prompt = slices.Clone(request.Prompt)
	} else {
		request.Prompt = nil
	}
	return x, c.submit(r.Context(), x, tmp.hashes, tmp.prompt)
}

// prepare hashes a call's prompt and decides what it generates. The hashes of the
// prompt's full blocks are appended to hashes.
func (s *Server) prepare(x *call, hashes []blockHash, prompt []int32, weights string) []blockHash {
	size := s.cfg.Engine.BlockTokens
	salt := hashSalt(x.request.CacheSalt)
	hashes = hashPrompt(hashes, salt, prompt, size)
	x.promptEnd = place{hash: hashStart}
	if n := len(hashes); n > 0 {
		x.promptEnd.hash = hashes[n-1] ^ salt
	}
	x.promptTail = slices.Clone(prompt[len(hashes)*size:])
	for _, token := range x.promptTail {
		x.promptEnd.push(token, size)
	}
	name := x.sessionID
	if name == "" {
		name = x.requestID
	}
	x.sampler = Sampling{
		Seed: s.cfg.Seed, VocabularySize: s.cfg.VocabularySize, Session: name,
		RequestSeed: x.request.Seed, Temperature: x.request.Temperature,
	}.sampler(size)
	x.sampler.under(weights, 0)
	x.sampler.script = s.script.Load().outputAfter(prompt, s.cfg.VocabularySize)
	x.outputTokens, x.stopped, x.stopToken = x.sampler.outputTokens(tape{at: x.promptEnd}, x.request, s.cfg.MeanOutputTokens)
	return hashes
}

// answer follows a call to its end. chunk is told of each piece of progress, the last
// one included, and returns an error if nobody reads any more. A fault may break
// the connection off, as a crash does.
func (s *Server) answer(ctx context.Context, x *call, chunk func(progress) error) error {
	for {
		p, err := x.core.wait(ctx, x)
		if x.dropAfter > 0 && p.generated >= x.dropAfter && err == nil {
			return s.drop(x, p, chunk)
		}
		switch {
		case errors.Is(err, errCrashed):
			panic(http.ErrAbortHandler)
		case err != nil:
			return err
		}
		if err := chunk(p); err != nil {
			x.core.abort(x) // The client is gone; its context may not know yet.
			return nil
		}
		if p.done() {
			return nil
		}
	}
}

// drop sends the tokens up to where the fault is and breaks the connection.
func (s *Server) drop(x *call, p progress, chunk func(progress) error) error {
	x.core.abort(x)
	s.faults.Count(func(n *fault.Counters) { n.StreamsDropped++ })
	if p.generated, p.ending = x.dropAfter, running; x.request.Stream {
		// Whether it still arrives does not matter.
		_ = chunk(p)
	}
	panic(http.ErrAbortHandler)
}

// refuse answers with an error document. Nothing has been written before.
func (s *Server) refuse(w http.ResponseWriter, err error) {
	var api *apiError
	var tooLarge *http.MaxBytesError
	switch {
	case errors.Is(err, context.Canceled):
		return // Nobody reads the answer.
	case errors.Is(err, errCrashed):
		panic(http.ErrAbortHandler)
	case errors.As(err, &api):
	case errors.As(err, &tooLarge):
		api = &apiError{http.StatusRequestEntityTooLarge, "BadRequestError", err.Error(), ""}
	case errors.Is(err, errClosed):
		api = &apiError{http.StatusServiceUnavailable, "ServiceUnavailableError", err.Error(), ""}
	case errors.Is(err, instance.ErrContextTooLong):
		api = badRequest("max_tokens", "%v", err)
	default:
		api = &apiError{http.StatusInternalServerError, "InternalServerError", err.Error(), ""}
		s.cfg.Logger.Error("a completion failed", "error", err)
	}
	s.writeError(w, api)
}

// readBody reads all of r into buf.
func readBody(buf []byte, r io.Reader, length int64) ([]byte, error) {
	const maxReserveBytes = 8 << 20 // The length is only a claim.
	if want := int(min(length, maxReserveBytes)) + 1; want > cap(buf) {
		buf = make([]byte, 0, want)
	}
	for {
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
		}
		n, err := r.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if err == io.EOF {
			return buf, nil
		}
		if err != nil {
			return buf, err
		}
	}
}
