package export

import (
	"reflect"
	"strings"
	"testing"

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
