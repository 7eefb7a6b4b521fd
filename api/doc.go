// Package api serves Holdfast over HTTP: the REST interface of trainers and
// operators under /api/v1 with its OpenAPI 3.1 document, health and readiness,
// Prometheus metrics and one plain page for people.
//
// It translates and bounds. Every request is checked, limited in size, time and
// number before it costs anything, and answered from package store; every error
// becomes one problem document (RFC 9457) in problem.go. A batch is decoded as a
// stream, so that its size never decides how much memory the process needs.
//
// It decides nothing about sessions: it neither admits nor places nor schedules,
// and it keeps no state of its own that outlives a request.
package api
