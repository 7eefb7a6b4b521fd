// Package instance models one LLM inference engine instance in virtual time:
// its KV cache and prefix cache, its scheduler and the duration of its steps.
// The discrete-event simulator and the HTTP simulated engine both run on it, so
// that there is one engine model in the project and not two.
//
// It is a pure state machine: no clock, no goroutine, no I/O, no randomness.
// Time is int64 nanoseconds and moves only by Advance; equal calls give equal
// events. An Instance is not safe for concurrent use.
//
// What it models follows vLLM's V1 engine: a fixed number of blocks, a prefix
// cache of full blocks under LRU eviction (tail of the chain released longest
// ago first; running requests pin their blocks), chunked prefill that shares
// a token budget with decode, a first-come-first-served waiting queue,
// preemption by recompute of the request admitted last, and one token a step
// for every decoding sequence. It does not model the content of tokens, nor
// tensor shapes, nor speculative decoding.
//
// It is fast because it never simulates what does not change. While the same
// sequences decode, step i takes A + B*i, so k steps are a sum in closed form;
// every step advances all of them by one token, so a sequence is only a key in
// a heap of finishing steps; and the content of the cache is extents of chains,
// never single blocks. All sums are integers, so a leap over k steps ends at
// exactly the picosecond at which k single steps end.
package instance
