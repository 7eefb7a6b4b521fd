package wire

import "fmt"

// Problem is an error document (RFC 9457, application/problem+json).
type Problem struct {
	Type      string        `json:"type" doc:"Names the kind of problem for programs, such as urn:holdfast:problem:invalid-request."`
	Title     string        `json:"title" doc:"The kind in words."`
	Status    int           `json:"status" doc:"HTTP status."`
	Detail    string        `json:"detail" doc:"What happened here, in one sentence."`
	RequestID string        `json:"request_id,omitzero" doc:"Stands in the service's log as well."`
	Errors    []ErrorDetail `json:"errors,omitzero" nullable:"false" doc:"Each thing that is wrong, with its place."`
}

// ErrorDetail is one thing wrong with a request.
type ErrorDetail struct {
	Location    string `json:"location" doc:"Where: body, path, query or header, and the path in it, such as body.tasks[3].class."`
	Message     string `json:"message"`
	OffsetBytes *int64 `json:"offset_bytes,omitzero" doc:"Byte of the decoded body at which reading stopped, from 0."`
	Value       any    `json:"value,omitzero" doc:"The value found there, if it is short."`
}

// Error gives status and detail in one line.
func (p *Problem) Error() string { return fmt.Sprintf("%s (status %d)", p.Detail, p.Status) }
