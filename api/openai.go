package api

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"holdfast/store"
	"holdfast/workflows"
)

// The OpenAI-compatible surface, for harnesses that keep their own loop and speak to
// a model through some client library: a base URL, a key and a model name are all that
// these take. Errors are in OpenAI's form, and what cannot be done as asked is refused
// by the name of its field. The documents are OpenAI's, so that they are not in our
// OpenAPI document; docs/api.md says what is served of them.
const openAIPath = "/v1"

// sessionHeader names the session where the path does not.
const sessionHeader = "X-Holdfast-Session"

// openAIKind is the closed set of calls.
type openAIKind uint8

const (
	openAIChat openAIKind = iota + 1
	openAIText
)

func (k openAIKind) String() string {
	switch k {
	case openAIChat:
		return "chat"
	case openAIText:
		return "text"
	}
	return "unknown"
}

func (s *Server) registerOpenAI() {
	for _, base := range []string{openAIPath, openAIPath + "/sessions/:session"} {
		s.echo.POST(base+"/chat/completions", s.openAITurn(openAIChat))
		s.echo.POST(base+"/completions", s.openAITurn(openAIText))
		s.echo.GET(base+"/models", s.openAIModels)
	}
}

// openAITurn answers one call.
func (s *Server) openAITurn(kind openAIKind) echo.HandlerFunc {
	return func(c echo.Context) error {
		session, refused := s.openAIEnter(c, trainers)
		if refused != nil {
			return writeOpenAIProblem(c, refused)
		}
		switch {
		case session == uuid.Nil:
			return writeOpenAIProblem(c, invalid("header."+sessionHeader, "must name the session, unless the path does, as /v1/sessions/{id}, or the key, as {key}@{id}"))
		case s.harness == nil:
			return writeOpenAIProblem(c, problemOf(ErrNotOwner))
		}
		leave, refused := s.enter(workTurn)
		if refused != nil {
			return writeOpenAIProblem(c, refused)
		}
		defer leave()
		ctx, cancel := context.WithTimeout(c.Request().Context(), s.limits.TurnTimeout)
		defer cancel()
		asked, call, err := s.openAICall(c, kind)
		if err != nil {
			return writeOpenAIProblem(c, problemOf(err))
		}
		answer := newOpenAIAnswer(c, kind, asked)
		made, err := s.harnessTurn(ctx, session, call, workflows.HarnessProgress{OnWait: func(string) {}, OnText: answer.onText()}, answer.keepAlive)
		if err != nil {
			answer.fail(turnProblem(err, session))
			return nil
		}
		answer.turn(&made)
		return nil
	}
}

// openAICall reads and checks a call.
func (s *Server) openAICall(c echo.Context, kind openAIKind) (*openAIRequest, workflows.HarnessCall, error) {
	var call workflows.HarnessCall
	reader := &movingReader{from: http.MaxBytesReader(c.Response(), c.Request().Body, maxTurnBytes), controller: http.NewResponseController(c.Response()), stall: s.limits.StallTimeout}
	body, err := io.ReadAll(reader)
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, call, newProblem(http.StatusRequestEntityTooLarge, kindTooLarge, "the body must be at most 16 MiB")
	case isTimeout(err):
		return nil, call, newProblem(http.StatusRequestTimeout, kindBodyTimeout, "the body stopped arriving")
	case err != nil:
		return nil, call, newProblem(http.StatusBadRequest, kindInvalidJSON, "the body breaks off").because(err)
	}
	if err := reader.rest(); err != nil {
		return nil, call, err
	}
	asked, err := readOpenAIRequest(body)
	if err != nil {
		return nil, call, err
	}
	call, err = asked.call(kind, c.Request().Header)
	call.Content = contentOf(kind, body)
	return asked, call, err
}

// openAIEnter lets a request pass whose caller may do this, and says for which session
// it is: that of the path, of the header, or at the end of the key, behind an @.
func (s *Server) openAIEnter(c echo.Context, roles []Role) (uuid.UUID, *problem) {
	r := c.Request()
	named := c.Param("session")
	if named == "" {
		named = r.Header.Get(sessionHeader)
	}
	if key, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer "); ok {
		if at := strings.LastIndexByte(key, '@'); at >= 0 && uuid.Validate(key[at+1:]) == nil {
			r = r.Clone(r.Context())
			r.Header.Set("Authorization", "Bearer "+key[:at])
			if named == "" {
				named = key[at+1:]
			}
		}
	}
	if refused := s.pass(r, roles); refused != nil {
		return uuid.Nil, refused
	}
	if named == "" {
		return uuid.Nil, nil
	}
	session, err := uuid.Parse(named)
	if err != nil {
		return uuid.Nil, newProblem(http.StatusNotFound, kindNotFound, "there is no session "+shorten(named)+": its id is a UUID")
	}
	return session, nil
}

// openAIModels lists what a client may name as its model: the pool, since the session
// decides which model answers. Any other name is taken as well.
func (s *Server) openAIModels(c echo.Context) error {
	id, refused := s.openAIEnter(c, anyone)
	if refused != nil {
		return writeOpenAIProblem(c, refused)
	}
	leave, refused := s.enter(workRequest)
	if refused != nil {
		return writeOpenAIProblem(c, refused)
	}
	defer leave()
	ctx, cancel := context.WithTimeout(c.Request().Context(), s.limits.RequestTimeout)
	defer cancel()
	var names []string
	if id != uuid.Nil {
		session, err := s.store.Session(ctx, id)
		if err != nil {
			return writeOpenAIProblem(c, problemOf(noSession(err, id)))
		}
		names = []string{session.Pool}
	} else {
		pools, err := s.store.Pools(ctx)
		if err != nil {
			return writeOpenAIProblem(c, problemOf(err))
		}
		names = poolNames(pools)
	}
	list := openAIModelList{Object: "list", Data: []openAIModel{}}
	for _, name := range names {
		list.Data = append(list.Data, openAIModel{ID: name, Object: "model", OwnedBy: "holdfast"})
	}
	return c.JSON(http.StatusOK, list)
}

func poolNames(pools []store.Pool) (names []string) {
	for i := range pools {
		names = append(names, pools[i].Name)
	}
	return names
}

type openAIModelList struct {
	Object string        `json:"object"`
	Data   []openAIModel `json:"data"`
}

type openAIModel struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
}
