package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humaecho"
	strictjson "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/labstack/echo/v4"

	"holdfast/api/wire"
	"holdfast/orchestrator/environment/spec"
	"holdfast/workflows/task"
)

const (
	basePath = "/api/v1"
	// jsonMediaType is what bodies and answers are, problems excepted.
	jsonMediaType = "application/json"
	// maxSmallBodyBytes bounds every body but a batch's.
	maxSmallBodyBytes = 1 << 20
	apiVersion        = "1.0.0"
	apiDescription    = `Holdfast runs rollouts for reinforcement learning: a trainer submits batches of tasks and consumes finished samples.
Errors are problem documents (RFC 9457) with the place of everything that is wrong. 429 and 503 carry Retry-After.
Delivery of samples is at least once in completion order, with stable ids.`
)

// newHuma sets up huma so that it documents what is served and nothing more: no
// documentation pages from elsewhere, no links added to answers, one format.
func newHuma(e *echo.Echo) huma.API {
	format := huma.Format{Marshal: marshal, Unmarshal: unmarshal}
	config := huma.Config{
		OpenAPI: &huma.OpenAPI{
			OpenAPI: "3.1.0",
			Info:    &huma.Info{Title: "Holdfast", Version: apiVersion, Description: apiDescription},
			Components: &huma.Components{
				Schemas: huma.NewMapRegistry("#/components/schemas/", nameSchema),
				SecuritySchemes: map[string]*huma.SecurityScheme{
					"bearer": {Type: "http", Scheme: "bearer", Description: "A token with the role viewer, trainer or operator. Without configured tokens the service answers this machine only, to every caller."},
				},
			},
		},
		Formats:                      map[string]huma.Format{jsonMediaType: format, "json": format},
		DefaultFormat:                jsonMediaType,
		RejectUnknownQueryParameters: true,
		Transformers:                 []huma.Transformer{toWire},
	}
	return humaecho.New(e, config)
}

// marshal writes an answer piece by piece. Absent arrays are written as [].
func marshal(w io.Writer, v any) error {
	return strictjson.MarshalWrite(w, v, strictjson.Deterministic(true))
}

// unmarshal reads a small body. A member that occurs twice is refused, since it
// would silently replace the first.
func unmarshal(data []byte, v any) error { return unmarshalWith(data, v) }

func unmarshalWith(data []byte, v any, options ...strictjson.Options) error {
	err := strictjson.Unmarshal(data, v, options...)
	var syntactic *jsontext.SyntacticError
	if errors.As(err, &syntactic) {
		return &offsetError{problem: syntactic, offset: syntactic.ByteOffset}
	}
	if err != nil {
		said := task.Explain(err, "", 0)
		return &memberError{path: said.Path, problem: said.Problem}
	}
	return nil
}

// memberError is a value that does not fit its member; huma carries it as text only.
type memberError struct{ path, problem string }

// Error says what is wrong and where.
func (e *memberError) Error() string { return e.problem + memberMark + e.path }

// memberMark stands between what is wrong and the path of the member.
const memberMark = ", at body."

// memberIn takes the path out of a memberError's text.
func memberIn(text string) (problem, path string, ok bool) {
	at := strings.LastIndex(text, memberMark)
	if at < 0 || strings.ContainsAny(text[at+len(memberMark):], " \n") {
		return text, "", false
	}
	return text[:at], text[at+len(memberMark):], true
}

// offsetError is a syntax error that huma carries as text only.
type offsetError struct {
	problem *jsontext.SyntacticError
	offset  int64
}

// Error says what is wrong and where.
func (e *offsetError) Error() string {
	return e.message() + " at byte " + strconv.FormatInt(e.offset, 10)
}

func (e *offsetError) message() string {
	text := "is not valid JSON: " + e.problem.Err.Error()
	if pointer := string(e.problem.JSONPointer); pointer != "" {
		text += " within " + shorten(pointer)
	}
	return text
}

// toWire turns what handlers and huma return as errors into problem documents.
func toWire(ctx huma.Context, _ string, v any) (any, error) {
	var p *problem
	switch found := v.(type) {
	case *problem:
		p = found
	case *huma.ErrorModel:
		p = problemOfHuma(found)
	default:
		return v, nil
	}
	state := stateOf(ctx.Context())
	state.failed(p)
	answer := p.Problem
	answer.RequestID = state.id
	return &answer, nil
}

// operation describes one operation for register.
type operation struct {
	id, method, path, summary, description string
	tag                                    string
	terms                                  terms
	// status of success, 200 if absent.
	status int
	// bodyBytes bounds a body that the handler checks itself; a body that huma checks
	// is bounded by maxSmallBodyBytes.
	bodyBytes int64
	// problems are the statuses it answers besides those that every operation has.
	problems []int
}

// register adds an operation under /api/v1 with its documentation. Errors of the
// handler become problem documents here.
func register[I, O any](s *Server, op operation, handler func(context.Context, *I) (*O, error)) {
	if op.terms.timeout == 0 {
		op.terms.timeout = s.limits.RequestTimeout
	}
	described := huma.Operation{
		OperationID: op.id, Method: op.method, Path: basePath + op.path,
		Summary: op.summary, Description: op.description, Tags: []string{op.tag},
		DefaultStatus: op.status, MaxBodyBytes: cmp.Or(op.bodyBytes, maxSmallBodyBytes), SkipValidateBody: op.bodyBytes > 0, BodyReadTimeout: s.limits.RequestTimeout,
		Metadata:   map[string]any{termsKey: op.terms},
		Security:   []map[string][]string{{"bearer": {}}},
		Extensions: map[string]any{"x-roles": op.terms.roles},
		Responses:  s.problemResponses(op.problems),
	}
	huma.Register(s.huma, described, func(ctx context.Context, input *I) (*O, error) {
		output, err := handler(ctx, input)
		if err != nil {
			return nil, problemOf(err)
		}
		return output, nil
	})
}

// everyProblem lists the statuses that every operation can answer.
var everyProblem = []int{
	http.StatusUnauthorized, http.StatusForbidden, http.StatusUnprocessableEntity,
	http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusServiceUnavailable,
}

func (s *Server) problemResponses(more []int) map[string]*huma.Response {
	schema := s.huma.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[wire.Problem](), true, "Problem")
	responses := make(map[string]*huma.Response)
	for _, status := range slices.Concat(everyProblem, more) {
		response := &huma.Response{
			Description: http.StatusText(status),
			Content:     map[string]*huma.MediaType{problemMediaType: {Schema: schema}},
		}
		if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
			response.Headers = map[string]*huma.Param{"Retry-After": {Schema: &huma.Schema{Type: huma.TypeInteger}, Description: "Seconds to wait before the next try."}}
		}
		responses[strconv.Itoa(status)] = response
	}
	return responses
}

// nameSchema keeps names of different packages apart: a task's parts begin with
// Task, and huma's own error types, which no one is sent, can be dropped by name.
func nameSchema(t reflect.Type, hint string) string {
	name := huma.DefaultSchemaNamer(t, hint)
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch t.PkgPath() {
	case reflect.TypeFor[task.Spec]().PkgPath():
		return "Task" + strings.TrimPrefix(name, "Spec")
	case reflect.TypeFor[spec.Scorer]().PkgPath():
		if t == reflect.TypeFor[spec.Limits]() {
			name = "Program" + name // a session has limits as well
		}
		return "Task" + name
	case reflect.TypeFor[huma.ErrorModel]().PkgPath():
		return humaSchemaPrefix + name
	}
	return name
}

const humaSchemaPrefix = "Huma"

// document is the OpenAPI document as it is served.
type document struct{ json, yaml []byte }

// render drops what huma adds for its own errors, leaves answers open to members
// of later versions, and renders the document once.
func render(api *huma.OpenAPI) (document, error) {
	schemas := api.Components.Schemas.Map()
	for name := range schemas {
		if strings.HasPrefix(name, humaSchemaPrefix) {
			delete(schemas, name)
		}
	}
	sent := make(map[string]bool)
	for _, item := range api.Paths {
		for _, op := range []*huma.Operation{item.Post, item.Put} {
			if op != nil && op.RequestBody != nil {
				reach(op.RequestBody.Content[jsonMediaType].Schema, schemas, sent)
			}
		}
	}
	for name, schema := range schemas {
		// Requests stay closed: an unknown field of theirs is a mistake.
		if schema.AdditionalProperties == false && !sent[name] {
			schema.AdditionalProperties = nil
		}
	}
	asJSON, err := json.MarshalIndent(api, "", "  ")
	if err != nil {
		return document{}, fmt.Errorf("rendering the OpenAPI document: %w", err)
	}
	asYAML, err := api.YAML()
	if err != nil {
		return document{}, fmt.Errorf("rendering the OpenAPI document: %w", err)
	}
	return document{json: asJSON, yaml: asYAML}, nil
}

// reach marks the named schemas that a schema refers to.
func reach(schema *huma.Schema, schemas map[string]*huma.Schema, marked map[string]bool) {
	if schema == nil {
		return
	}
	if name := path.Base(schema.Ref); schema.Ref != "" && !marked[name] {
		marked[name] = true
		reach(schemas[name], schemas, marked)
	}
	reach(schema.Items, schemas, marked)
	for _, property := range schema.Properties {
		reach(property, schemas, marked)
	}
}
