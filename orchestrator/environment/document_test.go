package environment

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path"
	"regexp"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"holdfast/orchestrator/environment/spec"
)

const documentPath = "../../docs/environments.md"

// blocks returns the insides of the document's code blocks of a kind.
func blocks(t *testing.T, kind string) []string {
	t.Helper()
	raw, err := os.ReadFile(documentPath)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, match := range regexp.MustCompile("(?ms)^```"+kind+"$\n(.*?)^```$").FindAllSubmatch(raw, -1) {
		found = append(found, string(match[1]))
	}
	return found
}

// schemaOf compiles one definition of the documented schema.
func schemaOf(t *testing.T, name string) *jsonschema.Schema {
	t.Helper()
	schemas := blocks(t, "json schema")
	if len(schemas) != 1 {
		t.Fatalf("the document has %d schemas", len(schemas))
	}
	document, err := jsonschema.UnmarshalJSON(strings.NewReader(schemas[0]))
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource("environments.json", document); err != nil {
		t.Fatal(err)
	}
	schema, err := compiler.Compile("environments.json#/$defs/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return schema
}

func hold(t *testing.T, name, text string) {
	t.Helper()
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	if err != nil {
		t.Errorf("%s: %v", text, err)
		return
	}
	if err := schemaOf(t, name).Validate(value); err != nil {
		t.Errorf("%s is no %s: %v", text, name, err)
	}
}

// documents are what the documented paths receive and answer.
var documents = map[string][2]string{
	"reset": {"reset", "answer"}, "step": {"step", "answer"}, "close": {"close", ""}, "score": {"samples", "results"},
}

func TestDocumentedExchangesFollowTheSchema(t *testing.T) {
	var names [2]string
	lines := 0
	for _, block := range blocks(t, "text") {
		for line := range strings.Lines(block) {
			fields := strings.Fields(line)
			if fields[0] == "POST" {
				names = documents[path.Base(fields[1])]
			}
			text := ""
			if brace := strings.IndexByte(line, '{'); brace >= 0 {
				text = line[brace:]
			}
			name := names[0]
			if fields[0] != "POST" {
				name = names[1]
			}
			if (name == "") != (text == "") {
				t.Errorf("%q should be a %q", line, name)
			} else if name != "" {
				hold(t, name, text)
				lines++
			}
		}
	}
	if lines != 7 {
		t.Errorf("%d lines were held to the schema, want 7", lines)
	}
}

func TestDocumentedSpecsAreValid(t *testing.T) {
	decoder := json.NewDecoder(strings.NewReader(blocks(t, "json")[0]))
	decoder.DisallowUnknownFields()
	kinds := map[spec.Kind]bool{}
	for decoder.More() {
		var task struct{ Environment spec.Environment }
		if err := decoder.Decode(&task); err != nil {
			t.Fatal(err)
		}
		if err := task.Environment.Validate("environment"); err != nil {
			t.Error(err)
		}
		kinds[task.Environment.Kind] = true
	}
	if len(kinds) != 3 {
		t.Errorf("the examples show %v", kinds)
	}
}

// recorder holds what passes to the schema.
type recorder struct {
	t     *testing.T
	calls int
}

func (r *recorder) RoundTrip(request *http.Request) (*http.Response, error) {
	sent, err := io.ReadAll(request.Body)
	if err != nil {
		return nil, err
	}
	names := documents[path.Base(request.URL.Path)]
	hold(r.t, names[0], string(sent))
	request = request.Clone(request.Context())
	request.Body = io.NopCloser(bytes.NewReader(sent))
	response, err := http.DefaultTransport.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	received, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	response.Body = io.NopCloser(bytes.NewReader(received))
	if names[1] != "" {
		hold(r.t, names[1], string(received))
	}
	r.calls++
	return response, nil
}

func TestWhatIsSentFollowsTheSchema(t *testing.T) {
	_, url := serveCounter(t)
	r := &recorder{t: t}
	e := open(t, newRegistry(t, Config{Transport: r}), httpSpec(url))
	if _, err := e.Reset(t.Context(), ResetRequest{Seed: -1, Member: 3, Metadata: json.RawMessage(`{"a":1}`)}); err != nil {
		t.Fatal(err)
	}
	step(t, e, say(1, "4"))
	calling := ask(2, "count", `{"to":3}`)
	calling.Text = "3"
	step(t, e, calling)
	if err := e.Close(t.Context()); err != nil || r.calls != 4 {
		t.Errorf("%d calls, %v", r.calls, err)
	}
}
