// Package client is the Go SDK of Holdfast's REST interface, for trainers and
// for the command line.
//
// It sends what a caller asks for and gives back documents of package wire. It
// repeats what is safe to repeat, with growing, jittered delays: reads, and
// writes that change nothing the second time. An answer that is a refusal comes
// back as *wire.Problem. Batches are encoded task by task while they are sent,
// so that neither side holds one whole.
//
// It keeps no state but its connections; a Reader keeps its place in a run's
// samples, and the service keeps what was acknowledged.
package client
