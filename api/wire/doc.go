// Package wire holds the JSON documents of the REST interface under /api/v1, as
// the server writes them and clients read them.
//
// It is a leaf, so that a client needs neither the server nor the store. It
// holds data and its two token encodings, no behaviour. The doc, enum, minimum
// and maximum tags are the source of api/openapi.yaml, and the server checks
// requests against them. Units stand last in names; times are RFC 3339 in UTC.
//
// A task is not here: package task owns its shape, its checks and its decoding.
package wire
