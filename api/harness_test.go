package api_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"holdfast/api"
	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
	"holdfast/workflows/task"
)

// service is a started server on a real store, with a client whose traffic is
// held against the OpenAPI document.
type service struct {
	t           testing.TB
	url         string
	databaseURL string
	store       *store.Store
	listener    *store.Listener
	server      *api.Server
	client      *client.Client
	conformance *conformance
}

// start starts a service; change may alter its configuration.
func start(t testing.TB, change func(*api.Config)) *service {
	t.Helper()
	databaseURL := storetest.URL(t)
	db := storetest.Open(t, databaseURL)
	listening, stopListening := context.WithCancel(context.Background())
	t.Cleanup(stopListening)
	listener, err := db.Listen(listening)
	if err != nil {
		t.Fatal(err)
	}
	s := &service{t: t, databaseURL: databaseURL, store: db, listener: listener}
	return s.beside(change)
}

// beside starts a further server on the same store: one with limits that what the test
// needs beforehand might not keep on a busy machine.
func (s *service) beside(change func(*api.Config)) *service {
	t := s.t
	t.Helper()
	config := api.Config{
		Listen: "127.0.0.1:0", Store: s.store, Notifications: s.listener, Prober: engines{}, Router: pools{},
		Logger: slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
	if change != nil {
		change(&config)
	}
	server, err := api.New(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := server.Stop(ctx); err != nil {
			t.Error(err)
		}
	})
	made := &service{
		t: t, url: "http://" + server.Addr(), databaseURL: s.databaseURL, store: s.store, listener: s.listener,
		server: server, conformance: newConformance(t, server.OpenAPI()),
	}
	made.client = made.connect(client.Config{Transport: made.conformance})
	return made
}

func (s *service) connect(config client.Config) *client.Client {
	s.t.Helper()
	config.BaseURL = s.url
	c, err := client.New(config)
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// testWriter sends the log to the test's.
type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSuffix(string(p), "\n"))
	return len(p), nil
}

// engines answers for http://engine.* and for no other address; http://engine-silent
// tells nothing of itself.
type engines struct{}

func (engines) Discover(_ context.Context, _, url string) (api.EngineInfo, error) {
	if !strings.HasPrefix(url, "http://engine") {
		return api.EngineInfo{}, errors.New("connection refused")
	}
	if strings.HasPrefix(url, "http://engine-silent") {
		return api.EngineInfo{}, nil
	}
	return api.EngineInfo{CapacityBlocks: 1000, BlockTokens: 16, MaxContextTokens: 8192, PolicyVersion: 0}, nil
}

// pools describes the pool "main" only.
type pools struct{}

func (pools) Describe(_ context.Context, pool string) (wire.RouterView, error) {
	if pool != "main" {
		return wire.RouterView{}, api.ErrNotOwner
	}
	return wire.RouterView{Pool: pool, Epoch: 1, Text: "cap 3"}, nil
}

// threeClasses is the paper's own mixture, whose sum is 0.999.
func threeClasses() wire.NewContract {
	return wire.NewContract{
		Classes:        []wire.ClassShare{{Class: "agent", Share: 0.486}, {Class: "rlvr", Share: 0.331}, {Class: "rlhf", Share: 0.182}},
		MaxConcurrency: 100,
	}
}

// openRun opens a run in the pool "main".
func (s *service) openRun() wire.Run {
	s.t.Helper()
	run, err := s.client.CreateRun(s.t.Context(), wire.NewRun{Name: "test", Pool: "main", Contract: threeClasses()})
	if err != nil {
		s.t.Fatal(err)
	}
	return run
}

// oneTask is a task of one turn.
func oneTask(id, class string) task.Spec {
	return task.Spec{ID: id, Class: class, Prompt: task.Prompt{TokenIDs: []int32{5, 6, 7}}, Sampling: task.Sampling{MaxTokens: 8}}
}

// submit releases n tasks of class agent and returns their sessions in order.
func (s *service) submit(run uuid.UUID, key string, n int) []wire.Session {
	s.t.Helper()
	tasks := make([]task.Spec, n)
	for i := range tasks {
		tasks[i] = oneTask(fmt.Sprintf("%s-%d", key, i), "agent")
	}
	batch, err := s.client.SubmitBatch(s.t.Context(), run, key, client.NewBatch{Tasks: client.Tasks(tasks)})
	if err != nil {
		s.t.Fatal(err)
	}
	page, err := s.client.Sessions(s.t.Context(), run, client.SessionsQuery{Batch: batch.ID, Limit: 1000})
	if err != nil {
		s.t.Fatal(err)
	}
	return page.Sessions
}

// finish runs a session of one turn to its end as workers would.
func (s *service) finish(session *wire.Session, status router.EndStatus) {
	s.t.Helper()
	ctx := s.t.Context()
	if _, err := s.store.DispatchQueued(ctx, session.Run, 1000); err != nil {
		s.t.Fatal(err)
	}
	_, err := s.store.CommitTurn(ctx, store.TurnCommit{
		SessionID: session.ID, Instance: "one", Generated: []int32{8, 9}, Logprobs: []float32{-0.5, -1.25},
		PromptTokens: 3, CachedTokens: -1, StartedAt: time.Now(), FinishReason: "length",
	})
	if err != nil {
		s.t.Fatal(err)
	}
	ending := store.Ending{SessionID: session.ID, Status: status}
	if status == router.Completed {
		reward := 1.0
		ending.Reward = &reward
	} else {
		ending.Problem = "made to end so"
	}
	if _, _, err := s.store.EndSession(ctx, ending); err != nil {
		s.t.Fatal(err)
	}
}

// send sends a raw request and returns status, problem (if it is one) and body.
func (s *service) send(method, path, body string, header ...string) (int, wire.Problem, string) {
	s.t.Helper()
	request, err := http.NewRequestWithContext(s.t.Context(), method, s.url+path, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	return s.sendRequest(request, header...)
}

// problemOf reads the problem out of an error of the client's.
func problemOf(t testing.TB, err error) *wire.Problem {
	t.Helper()
	var problem *wire.Problem
	if !errors.As(err, &problem) {
		t.Fatalf("want a problem, got %v", err)
	}
	return problem
}

// counting returns a function that counts the rows of every table, by table.
func (s *service) counting() func() map[string]int64 {
	s.t.Helper()
	conn, err := pgx.Connect(context.Background(), s.databaseURL)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { conn.Close(context.Background()) })
	names, err := conn.Query(s.t.Context(), `select tablename from pg_tables where schemaname = 'public' and tablename not like 'goose%'`)
	if err != nil {
		s.t.Fatal(err)
	}
	tables, err := pgx.CollectRows(names, pgx.RowTo[string])
	if err != nil {
		s.t.Fatal(err)
	}
	counts := make([]string, len(tables))
	for i, table := range tables {
		counts[i] = fmt.Sprintf("select '%s', count(*) from %s", table, pgx.Identifier{table}.Sanitize())
	}
	statement := strings.Join(counts, " union all ")
	return func() map[string]int64 {
		s.t.Helper()
		found, err := conn.Query(s.t.Context(), statement)
		if err != nil {
			s.t.Fatal(err)
		}
		rows := map[string]int64{}
		var table string
		var n int64
		if _, err := pgx.ForEachRow(found, []any{&table, &n}, func() error { rows[table] = n; return nil }); err != nil {
			s.t.Fatal(err)
		}
		return rows
	}
}

func (s *service) sendRequest(request *http.Request, header ...string) (int, wire.Problem, string) {
	s.t.Helper()
	for i := 0; i < len(header); i += 2 {
		request.Header.Set(header[i], header[i+1])
	}
	ctx, cancel := context.WithTimeout(request.Context(), storetest.Patience)
	defer cancel()
	request = request.WithContext(ctx)
	response, err := s.conformance.RoundTrip(request)
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return response.StatusCode, parseProblem(s.t, response, text), string(text)
}
