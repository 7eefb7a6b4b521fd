package export

import (
	"bytes"
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"

	"holdfast/api/wire"
)

// TestRowHasEveryField: what the samples API tells has a column of its name, so that a
// field which is added there is not forgotten here.
func TestRowHasEveryField(t *testing.T) {
	columns := map[string]bool{}
	for _, of := range []reflect.Type{reflect.TypeFor[Row](), reflect.TypeFor[Sequence](), reflect.TypeFor[Usage](), reflect.TypeFor[Times]()} {
		for i := range of.NumField() {
			name, _, _ := strings.Cut(of.Field(i).Tag.Get("parquet"), ",")
			columns[name] = true
		}
	}
	// A file has no cursors; its sequences are spread over token_ids to segments and earlier.
	columns["cursor"], columns["tokens"], columns["packed"], columns["sequences"] = true, true, true, true
	for _, of := range []reflect.Type{reflect.TypeFor[wire.Sample](), reflect.TypeFor[wire.Usage](), reflect.TypeFor[wire.Times]()} {
		for i := range of.NumField() {
			name, _, _ := strings.Cut(of.Field(i).Tag.Get("json"), ",")
			if !columns[name] {
				t.Errorf("%s of %s has no column", name, of.Name())
			}
		}
	}
}

// TestRowGroupsEndBySize: texts count for the bytes that a row group may hold, each of
// a third of half of them here.
func TestRowGroupsEndBySize(t *testing.T) {
	text := `"` + strings.Repeat("x", groupBytes/6) + `"`
	sample := wire.Sample{Metadata: json.RawMessage(text), ScoreDetail: json.RawMessage(text), Problem: text}
	var file bytes.Buffer
	table := newTable(&file)
	for range 3 {
		if err := table.Write(&sample); err != nil {
			t.Fatal(err)
		}
	}
	if err := table.Close(); err != nil {
		t.Fatal(err)
	}
	read, err := parquet.OpenFile(bytes.NewReader(file.Bytes()), int64(file.Len()))
	if err != nil {
		t.Fatal(err)
	}
	var rows []int64
	for _, group := range read.RowGroups() {
		rows = append(rows, group.NumRows())
	}
	if !slices.Equal(rows, []int64{2, 1}) {
		t.Errorf("row groups of %v rows", rows)
	}
}
