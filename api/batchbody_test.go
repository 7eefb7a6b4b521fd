package api

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"

	"holdfast/workflows/task"
)

const aTask = `{"class":"agent","prompt":{"token_ids":[1,2]},"sampling":{"max_tokens":4}}`

func defaultLimits() *Limits {
	limits := new(Limits)
	limits.setDefaults()
	return limits
}

// readBody reads a whole body.
func readBody(body io.Reader, limits *Limits) (*batchBody, []*task.Spec, error) {
	b, err := newBatchBody(body, "", limits)
	if err != nil {
		return nil, nil, err
	}
	if err := b.open(); err != nil {
		return b, nil, err
	}
	var specs []*task.Spec
	for {
		spec, err := b.next()
		if errors.Is(err, io.EOF) {
			return b, specs, nil
		}
		if err != nil {
			return b, specs, err
		}
		specs = append(specs, spec)
	}
}

// TestBatchBodyInPieces: how the bytes arrive changes nothing.
func TestBatchBodyInPieces(t *testing.T) {
	text := ` { "policy_version" : 3 , "tasks" : [ ` + aTask + `,` + strings.Replace(aTask, "agent", "rlvr", 1) + "]}\n\t "
	for name, pieces := range map[string]func(io.Reader) io.Reader{
		"whole": func(r io.Reader) io.Reader { return r }, "bytes": iotest.OneByteReader, "halves": iotest.HalfReader, "with the end": iotest.DataErrReader,
	} {
		b, specs, err := readBody(pieces(strings.NewReader(text)), defaultLimits())
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		want := sha256.Sum256([]byte(text))
		if len(specs) != 2 || specs[1].Class != "rlvr" || b.policyVersion == nil || *b.policyVersion != 3 || !bytes.Equal(b.hash(), want[:]) {
			t.Errorf("%s: %d tasks, version %v, hash %x", name, len(specs), b.policyVersion, b.hash())
		}
	}
}

// TestBatchBodyKeepsOneTask: what is live while a large body is read is a task,
// not the body.
func TestBatchBodyKeepsOneTask(t *testing.T) {
	filler := strings.Replace(aTask, `"token_ids":[1,2]`, `"token_ids":[`+strings.Repeat("1234,", 100_000)+`1]`, 1)
	const tasks = 120
	parts := []io.Reader{strings.NewReader(`{"tasks":[` + aTask)}
	for range tasks {
		parts = append(parts, strings.NewReader(","), strings.NewReader(filler))
	}
	b, err := newBatchBody(io.MultiReader(append(parts, strings.NewReader("]}"))...), "", defaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	if err := b.open(); err != nil {
		t.Fatal(err)
	}
	live := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before, most := live(), int64(0)
	for n := 0; ; n++ {
		_, err := b.next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if n%10 == 0 {
			most = max(most, live()-before)
		}
	}
	if total := int64(tasks * len(filler)); most > total/10 {
		t.Errorf("of a body of %d bytes %d were live at once", total, most)
	}
	runtime.KeepAlive(b)
}

// TestBatchBodyBounds: one byte more than a bound is refused, the bound itself is not.
func TestBatchBodyBounds(t *testing.T) {
	text := `{"tasks":[` + aTask + `,` + aTask + `]}`
	for _, c := range []struct {
		bodyBytes, taskBytes int64
		ok                   bool
		location             string
	}{
		{int64(len(text)), int64(len(aTask)) + 1, true, ""},
		{int64(len(text)) - 1, int64(len(aTask)) + 1, false, "body"},
		{int64(len(text)), int64(len(aTask)) - 1, false, "body.tasks[0]"},
	} {
		limits := defaultLimits()
		limits.BatchBytes, limits.TaskBytes = c.bodyBytes, c.taskBytes
		_, _, err := readBody(iotest.OneByteReader(strings.NewReader(text)), limits)
		var tooLarge *bodyTooLargeError
		if (err == nil) != c.ok || (!c.ok && (!errors.As(err, &tooLarge) || tooLarge.location != c.location)) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// FuzzBatchBody: what is accepted is what encoding/json reads from the whole
// text, and what is refused has a place.
func FuzzBatchBody(f *testing.F) {
	for _, seed := range []string{
		`{"tasks":[` + aTask + `]}`, `{"policy_version":null,"tasks":[` + aTask + `,` + aTask + `]}`, `{"tasks":[`, `[]`, ``, `{"tasks":{}}`,
		`{"tasks":[` + aTask + `}`, `{"tasks":[` + aTask + `] "x"}`, `{"policy_version":1e3,"tasks":[]}`, "{\"t\\u0061sks\":[" + aTask + "]}", `{"tasks":[` + aTask + `,]}`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		b, specs, err := readBody(strings.NewReader(text), defaultLimits())
		if err != nil {
			if p := problemOf(err); p.Status < 400 || p.Status > 499 || len(p.Errors) != 1 || !strings.HasPrefix(p.Errors[0].Location, "body") {
				t.Errorf("%q is answered %+v", text, p.Problem)
			}
			return
		}
		var whole struct {
			PolicyVersion *int64      `json:"policy_version"`
			Tasks         []task.Spec `json:"tasks"`
		}
		if err := json.Unmarshal([]byte(text), &whole); err != nil {
			t.Fatalf("%q was accepted: %v", text, err)
		}
		want := sha256.Sum256([]byte(text))
		if !bytes.Equal(b.hash(), want[:]) || len(specs) != len(whole.Tasks) || !reflect.DeepEqual(b.policyVersion, whole.PolicyVersion) {
			t.Errorf("%q: %d tasks of %d, version %v of %v", text, len(specs), len(whole.Tasks), b.policyVersion, whole.PolicyVersion)
		}
	})
}

// BenchmarkBatchBody reads batches of 1,000 tasks of 1,000 prompt tokens.
func BenchmarkBatchBody(b *testing.B) {
	ids := strings.TrimSuffix(strings.Repeat("151643,", 1000), ",")
	one := fmt.Sprintf(`{"class":"agent","prompt":{"token_ids":[%s]},"sampling":{"max_tokens":4}}`, ids)
	text := `{"tasks":[` + strings.TrimSuffix(strings.Repeat(one+",", 1000), ",") + `]}`
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	reportCPU(b)
	for b.Loop() {
		if _, specs, err := readBody(strings.NewReader(text), defaultLimits()); err != nil || len(specs) != 1000 {
			b.Fatal(len(specs), err)
		}
	}
}
