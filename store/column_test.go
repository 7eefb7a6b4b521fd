package store_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"

	"holdfast/router"
	"holdfast/store"
	"holdfast/store/storetest"
)

// experts is a small column as an engine with two layers of experts would give it.
func experts(data ...byte) store.Column {
	return store.Column{Name: "routed_experts", DType: "uint8", Shape: []int64{int64(len(data)) / 2, 2}, Data: data}
}

// withBlobs is the fixture's database through a store that keeps columns in a directory.
func (f *fixture) withBlobs() (*store.Store, string) {
	f.t.Helper()
	dir := f.t.TempDir()
	blobs, err := store.NewDirBlobs(dir)
	must(f.t, err)
	s, err := store.Open(f.t.Context(), store.Config{URL: f.url, MaxConnections: 4, Blobs: blobs})
	must(f.t, err)
	f.t.Cleanup(s.Close)
	return s, dir
}

func files(t *testing.T, dir string) (names []string) {
	t.Helper()
	must(t, filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			names = append(names, path)
		}
		return err
	}))
	return names
}

// TestColumns: given before the end, replaced by name, delivered with the tokens and in
// their order, and pruned with them, wherever the bytes are kept.
func TestColumns(t *testing.T) {
	for _, outside := range []bool{false, true} {
		f := newFixture(t, 10)
		s, dir := f.Store, ""
		if outside {
			s, dir = f.withBlobs()
		}
		f.submit("one", prompted("agent", 1))
		id := f.dispatch()[0]
		values := store.Column{Name: "values", DType: "float32", Shape: []int64{2}, Data: []byte{0, 0, 128, 63, 0, 0, 0, 64}}
		must(t, s.PutColumns(t.Context(), id, []store.Column{experts(1, 2, 3, 4), values}))
		must(t, s.PutColumns(t.Context(), id, []store.Column{experts(5, 6)}))
		f.end(id, router.Completed)
		if err := s.PutColumns(t.Context(), id, []store.Column{values}); !errors.Is(err, store.ErrSessionEnded) {
			t.Errorf("after the end: %v", err)
		}
		page, err := s.Samples(t.Context(), store.SampleQuery{RunID: f.run.ID, Consumer: "trainer", WithTokens: true})
		must(t, err)
		if want := []store.Column{experts(5, 6), values}; !reflect.DeepEqual(page.Samples[0].Columns, want) {
			t.Errorf("outside %v: delivered %+v", outside, page.Samples[0].Columns)
		}
		if outside && len(files(t, dir)) != 2 {
			t.Errorf("the directory holds %v", files(t, dir))
		}
		if bare := f.samples(store.SampleQuery{}); bare.Samples[0].Columns != nil || bare.Samples[0].ColumnBytes != 10 {
			t.Errorf("without tokens: %+v", bare.Samples[0])
		}
		_, err = s.Ack(t.Context(), f.run.ID, "trainer", page.Next)
		must(t, err)
		done, err := s.Prune(t.Context(), f.run.ID, atOnce, 10)
		must(t, err)
		if done.Rows["sample_columns"] != 2 || outside && len(files(t, dir)) != 0 {
			t.Errorf("outside %v: pruned %+v, left %v", outside, done, files(t, dir))
		}
	}
}

// TestColumnsOfAnAttemptThatWasLeft leave nothing where they were kept.
func TestColumnsOfAnAttemptThatWasLeft(t *testing.T) {
	f := restarting(t, 1)
	s, dir := f.withBlobs()
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	f.turnAt(id, 0)
	must(t, s.PutColumns(t.Context(), id, []store.Column{experts(1, 2, 3, 4)}))
	must(t, f.AdvancePolicyVersion(t.Context(), pool, 1))
	if _, _, err := s.EndSession(t.Context(), store.Ending{SessionID: id, Status: router.Cancelled}); !errors.Is(err, store.ErrSessionRestarted) {
		t.Fatal(err)
	}
	if left := files(t, dir); f.count("sample_columns", id) != 0 || len(left) != 0 {
		t.Errorf("of the old attempt there are %d columns and %v", f.count("sample_columns", id), left)
	}
}

// pausing calls a function before the first blob is deleted.
type pausing struct {
	store.Blobs
	paused atomic.Bool
	before func()
}

func (p *pausing) Delete(ctx context.Context, key string) error {
	if p.paused.CompareAndSwap(false, true) {
		p.before()
	}
	return p.Blobs.Delete(ctx, key)
}

// TestColumnThatComesBack: bytes that were replaced are given again while what was
// left of them is being removed.
func TestColumnThatComesBack(t *testing.T) {
	f := newFixture(t, 10)
	ctx := t.Context()
	blobs, err := store.NewDirBlobs(t.TempDir())
	must(t, err)
	paused := &pausing{Blobs: blobs}
	s, err := store.Open(ctx, store.Config{URL: f.url, MaxConnections: 4, Blobs: paused})
	must(t, err)
	t.Cleanup(s.Close)
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	back := make(chan error, 1)
	paused.before = func() {
		put := make(chan struct{})
		go func() {
			defer close(put)
			back <- s.PutColumns(ctx, id, []store.Column{experts(1, 2)})
		}()
		f.waitForLockOr(put)
	}
	must(t, s.PutColumns(ctx, id, []store.Column{experts(1, 2)}))
	must(t, s.PutColumns(ctx, id, []store.Column{experts(3, 4)}))
	must(t, storetest.Came(t, "the column that comes back", back))
	f.end(id, router.Completed)
	page, err := s.Samples(ctx, store.SampleQuery{RunID: f.run.ID, WithTokens: true})
	must(t, err)
	if want := []store.Column{experts(1, 2)}; !reflect.DeepEqual(page.Samples[0].Columns, want) {
		t.Errorf("delivered %+v", page.Samples[0].Columns)
	}
}

// TestDamagedColumnIsNotDelivered: neither bytes that changed, nor a file that is gone,
// nor a row that says other than its bytes.
func TestDamagedColumnIsNotDelivered(t *testing.T) {
	f := newFixture(t, 10)
	f.submit("one", repeat("agent", 3)...)
	ids := f.dispatch()
	s, dir := f.withBlobs()
	must(t, f.PutColumns(t.Context(), ids[0], []store.Column{experts(1, 2)}))
	must(t, f.PutColumns(t.Context(), ids[1], []store.Column{experts(1, 2)}))
	must(t, s.PutColumns(t.Context(), ids[2], []store.Column{experts(1, 2)}))
	for _, id := range ids {
		f.end(id, router.Completed)
	}
	f.exec(`update sample_columns set data = '\x0103' where session_id = '` + ids[0].String() + `'`)
	f.exec(`update sample_columns set shape = '{3}' where session_id = '` + ids[1].String() + `'`)
	for _, id := range ids[:2] {
		if _, err := storetest.SampleOf(t.Context(), f.Store, id); err == nil {
			t.Errorf("the damaged sample %s was delivered", id)
		}
	}
	if _, err := storetest.SampleOf(t.Context(), f.Store, ids[2]); err == nil {
		t.Error("a column that is elsewhere was delivered without its place")
	}
	if _, err := storetest.SampleOf(t.Context(), s, ids[2]); err != nil {
		t.Error(err)
	}
	must(t, os.Remove(files(t, dir)[0]))
	if _, err := storetest.SampleOf(t.Context(), s, ids[2]); err == nil {
		t.Error("a column whose file is gone was delivered")
	}
}

func TestColumnsThatAreRefused(t *testing.T) {
	f := newFixture(t, 10)
	f.submit("one", prompted("agent", 1))
	id := f.dispatch()[0]
	must(t, f.PutColumns(t.Context(), id, []store.Column{experts(1, 2)}))
	named := func(name string) store.Column { c := experts(1, 2); c.Name = name; return c }
	many := slices.Collect(func(yield func(store.Column) bool) {
		for i := range store.MaxColumns {
			if !yield(named(strings.Repeat("x", i+1))) {
				return
			}
		}
	})
	for path, columns := range map[string][]store.Column{
		"columns[0].name":     {named("a b")},
		"columns[1].name":     {named("a"), named("a")},
		"columns[0].dtype":    {{Name: "a", DType: "int4", Shape: []int64{1}, Data: []byte{1}}},
		"columns[0].shape":    {{Name: "a", DType: "int8", Shape: []int64{1 << 13, 1 << 13}, Data: []byte{1}}},
		"columns[0].shape[1]": {{Name: "a", DType: "int8", Shape: []int64{1, 0}}},
		"columns[0].data":     {{Name: "a", DType: "int16", Shape: []int64{1}, Data: []byte{1}}},
		"columns":             many,
	} {
		var field *store.FieldError
		if err := f.PutColumns(t.Context(), id, columns); !errors.As(err, &field) || field.Path != path {
			t.Errorf("want a problem of %s, got %v", path, err)
		}
	}
	half := store.Column{Name: "half", DType: "uint8", Shape: []int64{store.MaxColumnsBytes}, Data: make([]byte, store.MaxColumnsBytes)}
	var field *store.FieldError
	if err := f.PutColumns(t.Context(), id, []store.Column{half}); !errors.As(err, &field) || field.Path != "columns" {
		t.Errorf("too many bytes with what is there: %v", err)
	}
	if err := f.PutColumns(t.Context(), uuid.New(), []store.Column{experts(1, 2)}); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("of an unknown session: %v", err)
	}
}
