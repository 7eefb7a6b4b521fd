package store_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
)

// ended releases and ends n sessions, sample i with the i-th status, repeated.
func (f *fixture) ended(n int, statuses ...router.EndStatus) {
	f.t.Helper()
	f.submit(fmt.Sprint("ended ", n), repeat("agent", n)...)
	for i, id := range f.dispatch() {
		f.end(id, statuses[i%len(statuses)])
	}
}

func (f *fixture) samples(query store.SampleQuery) store.SamplePage {
	f.t.Helper()
	query.RunID = f.run.ID
	page, err := f.Samples(f.t.Context(), query)
	must(f.t, err)
	return page
}

func seqs(page store.SamplePage) []int64 {
	seqs := []int64{}
	for _, sample := range page.Samples {
		seqs = append(seqs, sample.Seq)
	}
	return seqs
}

func TestSamplePages(t *testing.T) {
	f := newFixture(t, 100)
	empty := f.samples(store.SampleQuery{Consumer: "trainer"})
	if len(empty.Samples) != 0 || empty.More || empty.Next == "" {
		t.Errorf("before the first sample: %+v", empty)
	}
	f.ended(5, router.Completed, router.Failed)
	for _, test := range []struct {
		name  string
		query store.SampleQuery
		want  []int64
		more  bool
	}{
		{"all", store.SampleQuery{}, []int64{1, 2, 3, 4, 5}, false},
		{"from an empty page on", store.SampleQuery{After: empty.Next}, []int64{1, 2, 3, 4, 5}, false},
		{"a limit", store.SampleQuery{Limit: 2}, []int64{1, 2}, true},
		{"a limit that just fits", store.SampleQuery{Limit: 5}, []int64{1, 2, 3, 4, 5}, false},
		// A sample here has three tokens, 27 packed bytes.
		{"a page of bytes", store.SampleQuery{MaxBytes: 60, WithTokens: true}, []int64{1, 2}, true},
		{"a page too small for one", store.SampleQuery{MaxBytes: 1, WithTokens: true}, []int64{1}, true},
		{"bytes without tokens", store.SampleQuery{MaxBytes: 1}, []int64{1, 2, 3, 4, 5}, false},
		{"one status", store.SampleQuery{Statuses: []router.EndStatus{router.Failed}}, []int64{2, 4}, false},
		{"one status, limited", store.SampleQuery{Statuses: []router.EndStatus{router.Completed}, Limit: 2}, []int64{1, 3}, true},
	} {
		page := f.samples(test.query)
		if got := seqs(page); fmt.Sprint(got) != fmt.Sprint(test.want) || page.More != test.more {
			t.Errorf("%s: samples %v, more %v", test.name, got, page.More)
		}
		rest := test.query
		rest.After, rest.MaxBytes, rest.Limit = page.Next, 0, 0
		next := f.samples(rest)
		if got := len(page.Samples) + len(next.Samples); test.query.Statuses == nil && got != 5 {
			t.Errorf("%s: %d samples on two pages", test.name, got)
		}
		for _, sample := range next.Samples {
			if sample.Seq <= test.want[len(test.want)-1] {
				t.Errorf("%s: sample %d again", test.name, sample.Seq)
			}
		}
	}
}

func TestAcknowledgedSamplesAreNotDeliveredAgain(t *testing.T) {
	f := newFixture(t, 100)
	ctx := t.Context()
	f.ended(6, router.Completed)
	first := f.samples(store.SampleQuery{Consumer: "trainer", Limit: 4})
	again := f.samples(store.SampleQuery{Consumer: "trainer", Limit: 4})
	if fmt.Sprint(seqs(first)) != fmt.Sprint(seqs(again)) {
		t.Errorf("unacknowledged %v, then %v", seqs(first), seqs(again))
	}
	place, err := f.Ack(ctx, f.run.ID, "trainer", first.Samples[2].Cursor)
	must(t, err)
	if place.AcknowledgedSeq != 3 || place.DeliveredSeq != 4 {
		t.Errorf("place %+v", place)
	}
	if got := seqs(f.samples(store.SampleQuery{Consumer: "trainer"})); fmt.Sprint(got) != "[4 5 6]" {
		t.Errorf("after acknowledging 3: %v", got)
	}
	if got := seqs(f.samples(store.SampleQuery{Consumer: "trainer", After: first.Samples[0].Cursor})); fmt.Sprint(got) != "[2 3 4 5 6]" {
		t.Errorf("from a checkpoint's cursor: %v", got)
	}
	if got := seqs(f.samples(store.SampleQuery{Consumer: "trainer"})); fmt.Sprint(got) != "[4 5 6]" {
		t.Errorf("after looking back: %v", got)
	}
	if got := seqs(f.samples(store.SampleQuery{Consumer: "logger"})); len(got) != 6 {
		t.Errorf("another consumer: %v", got)
	}
	if _, err := f.Ack(ctx, f.run.ID, "trainer", first.Samples[0].Cursor); err != nil {
		t.Errorf("an older acknowledgement: %v", err)
	}
	consumers, err := f.Consumers(ctx, f.run.ID)
	must(t, err)
	if len(consumers) != 2 || consumers[0].Name != "logger" || consumers[1].AcknowledgedSeq != 3 || consumers[1].DeliveredSeq != 6 {
		t.Errorf("consumers %+v", consumers)
	}
}

func TestUnknownCursors(t *testing.T) {
	f := newFixture(t, 100)
	ctx := t.Context()
	f.ended(3, router.Completed)
	other, err := f.CreateRun(ctx, store.NewRun{Name: "other", Pool: "other", Contract: contract(1)})
	must(t, err)
	foreign, err := f.Samples(ctx, store.SampleQuery{RunID: other.ID})
	must(t, err)
	last := f.samples(store.SampleQuery{Consumer: "trainer"}).Next
	beyond := cursorBeyond(t, f)
	flipped := []byte(last)
	flipped[3] ^= 1
	for _, cursor := range []store.Cursor{"x", "not base64 !", foreign.Next, beyond, last + "A", last[1:], store.Cursor(flipped)} {
		if _, err := f.Samples(ctx, store.SampleQuery{RunID: f.run.ID, After: cursor}); !errors.Is(err, store.ErrUnknownCursor) {
			t.Errorf("reading after %q: %v", cursor, err)
		}
		if _, err := f.Ack(ctx, f.run.ID, "trainer", cursor); !errors.Is(err, store.ErrUnknownCursor) {
			t.Errorf("acknowledging %q: %v", cursor, err)
		}
	}
	if _, err := f.Ack(ctx, f.run.ID, "trainer", ""); !errors.Is(err, store.ErrUnknownCursor) {
		t.Errorf("acknowledging nothing: %v", err)
	}
	if _, err := f.Ack(ctx, f.run.ID, "stranger", last); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("a consumer that has read nothing: %v", err)
	}
	// Durable, but never delivered to this consumer.
	f.samples(store.SampleQuery{Consumer: "slow", Limit: 1})
	if _, err := f.Ack(ctx, f.run.ID, "slow", last); !errors.Is(err, store.ErrUnknownCursor) {
		t.Errorf("acknowledging what was not delivered: %v", err)
	}
	if _, err := f.Samples(ctx, store.SampleQuery{RunID: uuid.New()}); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("an unknown run: %v", err)
	}
	var field *store.FieldError
	if _, err := f.Samples(ctx, store.SampleQuery{RunID: f.run.ID, Consumer: "a b"}); !errors.As(err, &field) || field.Path != "consumer" {
		t.Errorf("a consumer with a space: %v", err)
	}
}

// cursorBeyond is a cursor of the run that is well formed and was valid in a copy
// of the run with one more sample.
func cursorBeyond(t *testing.T, f *fixture) store.Cursor {
	t.Helper()
	f.submit("beyond", prompted("agent", 1))
	sample := f.end(f.dispatch()[0], router.Completed)
	for _, statement := range []string{
		`delete from samples where run_id = $1 and seq = 4`,
		`update run_counters set sample_seq = 3, live = live + 1 where run_id = $1`,
	} {
		f.exec(statement)
	}
	return sample.Cursor
}

// TestSampleWithoutLogprobs: a mixed session keeps its arrays of equal length.
func TestSampleWithoutLogprobs(t *testing.T) {
	f := newFixture(t, 10)
	f.submit("one", repeat("agent", 2)...)
	ids := f.dispatch()
	for i, id := range ids {
		f.decide(f.admit(id, 0, "w1"))
		for number := range 3 {
			commit := turn(id, number)
			if i == 0 || number != 1 {
				commit.Logprobs = nil
			}
			_, err := f.CommitTurn(t.Context(), commit)
			must(t, err)
		}
		f.end(id, router.Completed)
	}
	page := f.samples(store.SampleQuery{WithTokens: true})
	if none := page.Samples[0].Tokens; none.Logprobs != nil || len(none.TokenIDs) != 11 {
		t.Errorf("without log-probabilities: %+v", none)
	}
	some := page.Samples[1].Tokens
	if len(some.Logprobs) != len(some.TokenIDs) || some.Logprobs[6] != -0.5 || some.Logprobs[3] != 0 {
		t.Errorf("with some: %v", some.Logprobs)
	}
	one, err := storetest.SampleOf(t.Context(), f.Store, ids[1])
	must(t, err)
	if one.Seq != 2 || len(one.Tokens.TokenIDs) != 11 {
		t.Errorf("by session: %+v", one)
	}
}

// TestDamagedSampleIsNotDelivered: arrays that disagree are an error, never a
// sample.
func TestDamagedSampleIsNotDelivered(t *testing.T) {
	f := newFixture(t, 10)
	f.submit("one", repeat("agent", 6)...)
	conn := f.conn()
	ids := f.dispatch()
	for i, statement := range []string{
		`delete from segments where turn = 1 and kind = 'appended' and session_id = $1`,
		`delete from segments where turn = 2 and session_id = $1`,
		`update segments set start_tokens = start_tokens + 1 where turn = 1 and session_id = $1`,
		`update segments set tokens = tokens + 1 where turn = 0 and session_id = $1`,
		`update segments set ids = substring(ids for 6) where turn = 0 and session_id = $1`,
		`update samples set tokens = tokens + 1 where session_id = $1`,
	} {
		id := ids[i]
		f.decide(f.admit(id, 0, "w1"))
		for number := range 3 {
			f.commit(id, number)
		}
		f.end(id, router.Completed)
		if _, err := storetest.SampleOf(t.Context(), f.Store, id); err != nil {
			t.Fatal(err)
		}
		_, err := conn.Exec(t.Context(), statement, id)
		must(t, err)
		if _, err := storetest.SampleOf(t.Context(), f.Store, id); err == nil {
			t.Errorf("after %s the sample was delivered", statement)
		}
	}
	if _, err := f.Samples(t.Context(), store.SampleQuery{RunID: f.run.ID, WithTokens: true}); err == nil {
		t.Error("a page with damaged samples was delivered")
	}
}
