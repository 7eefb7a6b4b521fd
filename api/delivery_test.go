package api_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/parquet-go/parquet-go"

	"holdfast/api"
	"holdfast/api/client"
	"holdfast/api/export"
	"holdfast/api/wire"
	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
)

// history has a session held, admitted at one instance, moved to another, and ended
// with two turns, a rewritten history in between if asked for, and a reward.
func (s *service) history(session *wire.Session, epoch int64, rewrites bool) {
	s.t.Helper()
	ctx := s.t.Context()
	decide := func(kind router.DecisionKind, reason router.Reason, instance string, turn int) {
		s.t.Helper()
		err := s.store.RecordDecisions(ctx, "main", epoch, []store.DecisionRecord{{Decision: router.Decision{
			Kind: kind, Reason: reason, At: time.Now().UnixNano(), Session: router.SessionID(session.ID), Turn: turn,
			Instance: router.InstanceID(instance), Numbers: router.Numbers{Cap: 3, Protected: 2, PredictedCachedTokens: 2}}}})
		if err != nil {
			s.t.Fatal(err)
		}
	}
	commit := func(turn store.TurnCommit) {
		s.t.Helper()
		turn.SessionID, turn.Epoch, turn.StartedAt, turn.FinishReason = session.ID, epoch, time.Now(), "stop"
		turn.Attempts = turn.Turn + 1
		if _, err := s.store.CommitTurn(ctx, turn); err != nil {
			s.t.Fatal(err)
		}
	}
	decide(router.Hold, router.AtCap, "", 0)
	decide(router.Hold, router.NoBlocks, "", 0)
	decide(router.Admit, router.NewSession, "one", 0)
	commit(store.TurnCommit{Turn: 0, Instance: "one", Generated: []int32{8, 9}, Logprobs: []float32{-0.5, -1.25}, PromptTokens: 3, CachedTokens: 1, PredictedCachedTokens: 2})
	decide(router.Admit, router.Continuation, "two", 1)
	second := store.TurnCommit{Turn: 1, Instance: "two", PolicyVersion: 1, Appended: []int32{10}, Generated: []int32{11}, Logprobs: []float32{-2}, PromptTokens: 6, CachedTokens: 0}
	if rewrites {
		kept := int64(2)
		second.Kept, second.PromptTokens = &kept, 3
	}
	commit(second)
	reward := 0.75
	_, _, err := s.store.EndSession(ctx, store.Ending{SessionID: session.ID, Status: router.Completed, Reward: &reward, ScoreSeconds: 0.125, ScoreDetail: json.RawMessage(`{"why":"right"}`)})
	if err != nil {
		s.t.Fatal(err)
	}
}

// delivered opens a run with three samples: one of two turns, one whose harness rewrote
// its history, one that failed without tokens.
func (s *service) delivered() (wire.Run, []wire.Session) {
	s.t.Helper()
	run := s.openRun()
	epoch := s.own()
	sessions := s.submit(run.ID, "k", 3)
	if _, err := s.store.DispatchQueued(s.t.Context(), run.ID, 10); err != nil {
		s.t.Fatal(err)
	}
	columns := []wire.Column{{Name: "routed_experts", DType: "uint8", Shape: []int64{3, 2}, Data: []byte{1, 2, 3, 4, 5, 6}}, {Name: "value", DType: "float32", Data: []byte{0, 0, 128, 63}}}
	if err := s.client.PutColumns(s.t.Context(), sessions[1].ID, columns); err != nil {
		s.t.Fatal(err)
	}
	s.history(&sessions[0], epoch, false)
	s.history(&sessions[1], epoch, true)
	if _, _, err := s.store.EndSession(s.t.Context(), store.Ending{SessionID: sessions[2].ID, Status: router.Failed, Problem: "no engine"}); err != nil {
		s.t.Fatal(err)
	}
	return run, sessions
}

// TestExport: both files hold, field by field, what the samples API gives, and no
// consumer's place has moved.
func TestExport(t *testing.T) {
	s := start(t, nil)
	run, _ := s.delivered()
	ctx := t.Context()
	if _, err := s.client.Samples(ctx, run.ID, client.SamplesQuery{Consumer: "trainer", Limit: 1}); err != nil {
		t.Fatal(err)
	}
	before, err := s.client.Consumers(ctx, run.ID)
	if err != nil {
		t.Fatal(err)
	}
	page, err := s.client.Samples(ctx, run.ID, client.SamplesQuery{Encoding: "json"})
	if err != nil || len(page.Samples) != 3 || len(page.Samples[1].Sequences) != 2 || len(page.Samples[1].Columns) != 2 || page.Samples[1].Columns[0].Shape[1] != 2 {
		t.Fatalf("%+v, %v", page, err)
	}

	var jsonl bytes.Buffer
	if _, err := s.client.Export(ctx, run.ID, client.ExportQuery{Format: "jsonl"}, &jsonl); err != nil {
		t.Fatal(err)
	}
	var lines []wire.Sample
	for scanner := bufio.NewScanner(&jsonl); scanner.Scan(); {
		var sample wire.Sample
		if err := json.Unmarshal(scanner.Bytes(), &sample); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, sample)
	}
	if got, want := asJSON(t, lines), asJSON(t, page.Samples); got != want {
		t.Errorf("JSONL holds %s, the API gives %s", got, want)
	}

	var table bytes.Buffer
	if _, err := s.client.Export(ctx, run.ID, client.ExportQuery{Format: "parquet", After: page.Samples[0].Cursor}, &table); err != nil {
		t.Fatal(err)
	}
	rows, err := parquet.Read[export.Row](bytes.NewReader(table.Bytes()), int64(table.Len()))
	if err != nil || len(rows) != 2 {
		t.Fatalf("%d rows after the first sample, %v", len(rows), err)
	}
	for i := range rows {
		want, err := export.RowOf(&page.Samples[i+1])
		if err != nil {
			t.Fatal(err)
		}
		if got, want := asJSON(t, rows[i]), asJSON(t, want); got != want {
			t.Errorf("row %d holds %s, the API gives %s", i, got, want)
		}
	}
	rewritten := rows[0]
	if len(rewritten.Columns) != 2 || !reflect.DeepEqual(rewritten.Columns[0].Data, []byte{1, 2, 3, 4, 5, 6}) {
		t.Errorf("columns of the row: %+v", rewritten.Columns)
	}
	if len(rewritten.Earlier) != 1 || !reflect.DeepEqual(rewritten.Earlier[0].TokenIDs, []int32{5, 6, 7, 8, 9}) || !reflect.DeepEqual(rewritten.LossMask, []int32{0, 0, 0, 1}) ||
		!reflect.DeepEqual(rewritten.Logprobs, []float32{0, 0, 0, -2}) || rewritten.Segments[len(rewritten.Segments)-1].PolicyVersion != 1 || *rewritten.Reward != 0.75 || *rewritten.ScoreDetail != `{"why":"right"}` {
		t.Errorf("the row of a rewritten history: %+v", rewritten)
	}

	after, err := s.client.Consumers(ctx, run.ID)
	if err != nil || !reflect.DeepEqual(before, after) {
		t.Errorf("consumers were %+v, are %+v, %v", before, after, err)
	}
}

// asJSON makes values comparable that differ in nil and empty, or in a time's zone.
func asJSON(t *testing.T, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return strings.NewReplacer("null", "[]", `"KeptTokens":[]`, `"KeptTokens":0`).Replace(string(text))
}

// TestExportOfManyPages: an export of more than one page and row group is whole.
func TestExportOfManyPages(t *testing.T) {
	s := start(t, func(config *api.Config) { config.Limits.PageBytes = 100 })
	run := s.openRun()
	sessions := s.submit(run.ID, "k", 25)
	for i := range sessions {
		s.finish(&sessions[i], router.Completed)
	}
	var table bytes.Buffer
	if _, err := s.client.Export(t.Context(), run.ID, client.ExportQuery{Format: "parquet"}, &table); err != nil {
		t.Fatal(err)
	}
	rows, err := parquet.Read[export.Row](bytes.NewReader(table.Bytes()), int64(table.Len()))
	if err != nil || len(rows) != 25 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	for i := range rows {
		if rows[i].Seq != int64(i+1) || !reflect.DeepEqual(rows[i].TokenIDs, []int32{5, 6, 7, 8, 9}) {
			t.Errorf("row %d: %+v", i, rows[i])
		}
	}
}

// stuck is a receiver that takes nothing until it is let go.
type stuck struct {
	*httptest.ResponseRecorder
	entered, release chan struct{}
	once             sync.Once
}

func (s *stuck) Write(p []byte) (int, error) {
	s.once.Do(func() { close(s.entered) })
	select {
	case <-s.release:
	case <-time.After(storetest.Patience): // the test has failed
	}
	return s.ResponseRecorder.Write(p)
}

// TestExportsHaveBounds: beyond their number, and where no page may be read for long,
// an export is refused with 429 before anything is sent.
func TestExportsHaveBounds(t *testing.T) {
	for name, limits := range map[string]api.Limits{
		"as many exports as are allowed": {Exports: 1},
		"as many pages as are allowed":   {Exports: 2, Pages: 1, RequestTimeout: 5 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			plain := start(t, nil)
			run, _ := plain.delivered()
			s := plain.beside(func(config *api.Config) { config.Limits = limits })
			path := "/api/v1/runs/" + run.ID.String() + "/export?format=parquet"
			first := &stuck{ResponseRecorder: httptest.NewRecorder(), entered: make(chan struct{}), release: make(chan struct{})}
			done := make(chan struct{})
			go func() {
				defer close(done)
				s.server.Handler().ServeHTTP(first, httptest.NewRequestWithContext(t.Context(), http.MethodGet, s.url+path, nil))
			}()
			storetest.Came(t, "the first export's first bytes", first.entered)
			response, text := s.ask(http.MethodGet, path, "", nil)
			if response.StatusCode != http.StatusTooManyRequests || response.Header.Get("Retry-After") != "1" {
				t.Errorf("answered %d, Retry-After %q: %.200s", response.StatusCode, response.Header.Get("Retry-After"), text)
			}
			close(first.release)
			storetest.Came(t, "the first export's end", done)
			if rows, err := parquet.Read[export.Row](bytes.NewReader(first.Body.Bytes()), int64(first.Body.Len())); err != nil || len(rows) != 3 {
				t.Errorf("the first export holds %d rows, %v", len(rows), err)
			}
		})
	}
}

// TestAudit: one document answers for a sample.
func TestAudit(t *testing.T) {
	s := start(t, nil)
	run, sessions := s.delivered()
	ctx := t.Context()
	page, err := s.client.Samples(ctx, run.ID, client.SamplesQuery{Consumer: "trainer", Limit: 1})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.Ack(ctx, run.ID, "trainer", page.Next); err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.Samples(ctx, run.ID, client.SamplesQuery{Consumer: "logger", Limit: 1}); err != nil {
		t.Fatal(err)
	}
	audit, err := s.client.Audit(ctx, sessions[0].ID)
	if err != nil {
		t.Fatal(err)
	}
	if r := audit.Release; r.BatchSeq != 1 || r.IdempotencyKey != "k" || r.At.IsZero() || r.DispatchedAt == nil || r.QueuedSeconds < 0 {
		t.Errorf("release %+v", r)
	}
	if h := audit.Holds; len(h) != 2 || h[0].Reason != "at_cap" || h[1].Reason != "no_blocks" || h[0].To == nil || !h[0].To.Equal(h[1].From) || h[1].To == nil || !strings.Contains(string(h[0].Numbers), `"cap":3`) {
		t.Errorf("holds %+v", h)
	}
	if a := audit.Admissions; len(a) != 2 || a[0].Instance != "one" || a[0].MovedFrom != "" || a[1].Instance != "two" || a[1].MovedFrom != "one" || !strings.Contains(string(a[0].Numbers), `"protected":2`) {
		t.Errorf("admissions %+v", a)
	}
	if len(audit.Turns) != 2 || audit.Turns[0].PredictedCachedTokens != 2 || *audit.Turns[0].CachedTokens != 1 || audit.Turns[1].PolicyVersion != 1 || audit.Retries != 1 || audit.Moves != 1 {
		t.Errorf("turns %+v, %d retries, %d moves", audit.Turns, audit.Retries, audit.Moves)
	}
	if score := audit.Score; score == nil || score.At == nil || score.Seconds != 0.125 || *score.Reward != 0.75 {
		t.Errorf("score %+v", score)
	}
	if d := audit.Deliveries; len(d) != 2 || d[0].Consumer != "logger" || d[0].DeliveredAt == nil || d[0].AcknowledgedAt != nil || d[1].AcknowledgedAt == nil {
		t.Errorf("deliveries %+v", d)
	}
	kinds := []string{}
	for _, event := range audit.Events {
		kinds = append(kinds, event.Kind)
	}
	if want := "[released dispatched held held admitted turn admitted turn scored ended]"; fmt.Sprint(kinds) != want {
		t.Errorf("events %v, want %s", kinds, want)
	}
	if failed, err := s.client.Audit(ctx, sessions[2].ID); err != nil || failed.Score != nil || failed.Session.Problem != "no engine" || len(failed.Deliveries) != 0 {
		t.Errorf("of a failed session: %+v, %v", failed, err)
	}
}

// TestPrunedIsSaid: what is gone is answered with 410 that names where the rest begins.
func TestPrunedIsSaid(t *testing.T) {
	s := start(t, nil)
	run, sessions := s.delivered()
	ctx := t.Context()
	page, err := s.client.Samples(ctx, run.ID, client.SamplesQuery{Consumer: "trainer", Limit: 2})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.Ack(ctx, run.ID, "trainer", page.Next); err != nil {
		t.Fatal(err)
	}
	if done, err := s.store.Prune(ctx, run.ID, store.Retention{Transcripts: time.Nanosecond, History: time.Nanosecond}, 10); err != nil || done.Samples != 2 {
		t.Fatalf("%+v, %v", done, err)
	}
	base := "/api/v1/runs/" + run.ID.String()
	session := "/api/v1/sessions/" + sessions[0].ID.String()
	for _, gone := range []badInput{
		{name: "the beginning", path: base + "/samples", says: page.Next, location: "query.start"},
		{name: "a new consumer", path: base + "/samples?consumer=late", says: page.Next, location: "query.start"},
		{name: "an export from the beginning", path: base + "/export", says: page.Next, location: "query.start"},
		{name: "a checkpoint's cursor", path: base + "/samples?consumer=trainer&after=" + page.Samples[0].Cursor, says: page.Next, location: "query.after"},
		{name: "an export's cursor", path: base + "/export?after=" + page.Samples[0].Cursor, says: page.Next, location: "query.after"},
		{name: "turns", path: session + "/turns", says: "are pruned"},
		{name: "events", path: session + "/events", says: "are pruned"},
	} {
		t.Run(gone.name, func(t *testing.T) {
			gone.status, gone.kind = http.StatusGone, "pruned"
			status, problem, text := s.send(http.MethodGet, gone.path, "")
			gone.judge(t, status, &problem, text)
		})
	}
	rest, err := s.client.Samples(ctx, run.ID, client.SamplesQuery{Consumer: "late", Start: "available"})
	if err != nil || len(rest.Samples) != 1 || rest.Samples[0].Seq != 3 {
		t.Fatalf("what is left: %+v, %v", rest, err)
	}
	var jsonl bytes.Buffer
	for _, left := range []client.ExportQuery{{After: page.Next}, {Start: "available"}, {Start: "available", Statuses: []string{rest.Samples[0].Status}}} {
		jsonl.Reset()
		if _, err := s.client.Export(ctx, run.ID, left, &jsonl); err != nil || bytes.Count(jsonl.Bytes(), []byte("\n")) != 1 {
			t.Errorf("an export of what is left by %+v: %s, %v", left, jsonl.Bytes(), err)
		}
	}
	audit, err := s.client.Audit(ctx, sessions[0].ID)
	if err != nil || !audit.HistoryPruned || !audit.TranscriptPruned || audit.Session.Usage.Turns != 2 || audit.Score == nil {
		t.Errorf("the audit of a pruned session: %+v, %v", audit, err)
	}
	if err := s.store.VerifyCounters(ctx, run.ID); err != nil {
		t.Error(err)
	}
}

// TestBackPressureIsSaid: at the limit the backlog and queued sessions say why nothing
// is started, releases go on, and an acknowledgement ends it.
func TestBackPressureIsSaid(t *testing.T) {
	s := start(t, nil)
	ctx := t.Context()
	contract := threeClasses()
	limit := 2
	contract.UndeliveredLimit = &limit
	run, err := s.client.CreateRun(ctx, wire.NewRun{Name: "n", Pool: "main", Contract: contract})
	if err != nil || run.Contract.UndeliveredLimit == nil || *run.Contract.UndeliveredLimit != 2 {
		t.Fatalf("%+v, %v", run, err)
	}
	sessions := s.submit(run.ID, "one", 2)
	for i := range sessions {
		s.finish(&sessions[i], router.Completed)
	}
	queued := s.submit(run.ID, "two", 1)[0].ID
	dispatch := func() int {
		t.Helper()
		n, err := s.store.DispatchQueued(ctx, run.ID, 10)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := dispatch(); n != 0 {
		t.Fatalf("%d sessions were started at the limit", n)
	}
	const reason = "undelivered samples 2 of 2"
	backlog, err := s.client.Backlog(ctx, run.ID)
	if err != nil || backlog.Total.Paused != reason || backlog.Classes[0].Paused != reason || backlog.Undelivered != 2 || backlog.PausedAt == nil || backlog.Total.Queued != 1 {
		t.Errorf("%+v, %v", backlog, err)
	}
	if session, err := s.client.Session(ctx, queued); err != nil || session.QueueReason != reason {
		t.Errorf("%+v, %v", session, err)
	}
	page, err := s.client.Samples(ctx, run.ID, client.SamplesQuery{Consumer: "trainer"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.Ack(ctx, run.ID, "trainer", page.Next); err != nil {
		t.Fatal(err)
	}
	if n := dispatch(); n != 1 {
		t.Fatalf("%d sessions were started after the acknowledgement", n)
	}
	if backlog, err = s.client.Backlog(ctx, run.ID); err != nil || backlog.Total.Paused != "" || backlog.PausedAt != nil || backlog.Undelivered != 0 {
		t.Errorf("%+v, %v", backlog, err)
	}
}

// TestResumeFromACheckpoint: a trainer that restores an older state reads on from the
// cursor in it, whatever it had acknowledged since, without a gap or a repetition.
func TestResumeFromACheckpoint(t *testing.T) {
	s := start(t, nil)
	ctx := t.Context()
	run := s.openRun()
	sessions := s.submit(run.ID, "k", 8)
	for i := range sessions {
		s.finish(&sessions[i], router.Completed)
	}
	var checkpoint string
	for step := range 3 {
		page, err := s.client.Samples(ctx, run.ID, client.SamplesQuery{Consumer: "trainer", Limit: 2})
		if err != nil || len(page.Samples) != 2 {
			t.Fatalf("%+v, %v", page, err)
		}
		if _, err := s.client.Ack(ctx, run.ID, "trainer", page.Next); err != nil {
			t.Fatal(err)
		}
		if step == 0 {
			checkpoint = page.Next
		}
	}
	var again []uuid.UUID
	for after := checkpoint; len(again) < 6; {
		page, err := s.client.Samples(ctx, run.ID, client.SamplesQuery{Consumer: "trainer", After: after, Limit: 4})
		if err != nil || len(page.Samples) == 0 {
			t.Fatalf("%+v, %v", page, err)
		}
		for i := range page.Samples {
			again = append(again, page.Samples[i].ID)
		}
		after = page.Next
		if _, err := s.client.Ack(ctx, run.ID, "trainer", after); err != nil {
			t.Fatal(err)
		}
	}
	for i, id := range again {
		if id != sessions[i+2].ID {
			t.Errorf("place %d after the checkpoint holds session %s", i, id)
		}
	}
}
