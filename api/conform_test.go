package api_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"
)

// conformance is a transport that holds all traffic against an OpenAPI document:
// every answer must be documented and match its schema, and every request that is
// not refused must match the schema of its body and name documented parameters.
type conformance struct {
	t        testing.TB
	next     http.RoundTripper
	document map[string]any
	compiler *jsonschema.Compiler

	mu sync.Mutex
	// answered counts answers by operation id and status.
	answered map[string]int
}

const documentURL = "urn:openapi"

func newConformance(t testing.TB, documentYAML []byte) *conformance {
	t.Helper()
	var parsed any
	if err := yaml.Unmarshal(documentYAML, &parsed); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(parsed)
	if err != nil {
		t.Fatal(err)
	}
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	closeObjects(document)
	compiler := jsonschema.NewCompiler()
	compiler.DefaultDraft(jsonschema.Draft2020)
	compiler.AssertFormat()
	if err := compiler.AddResource(documentURL, document); err != nil {
		t.Fatal(err)
	}
	return &conformance{t: t, next: http.DefaultTransport, document: document.(map[string]any), compiler: compiler, answered: map[string]int{}}
}

// closeObjects refuses members that the document does not name: it leaves answers
// open for later versions, but this version must send nothing undocumented.
func closeObjects(node any) {
	switch v := node.(type) {
	case map[string]any:
		if _, named := v["properties"]; named && v["type"] == "object" && v["additionalProperties"] == nil {
			v["additionalProperties"] = false
		}
		for _, child := range v {
			closeObjects(child)
		}
	case []any:
		for _, child := range v {
			closeObjects(child)
		}
	}
}

// RoundTrip sends a request and judges it with its answer.
func (c *conformance) RoundTrip(request *http.Request) (*http.Response, error) {
	var sent []byte
	if request.Body != nil {
		var err error
		if sent, err = io.ReadAll(request.Body); err != nil {
			return nil, err
		}
		request.Body.Close()
		request = request.Clone(request.Context())
		request.Body = io.NopCloser(bytes.NewReader(sent))
	}
	response, err := c.next.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	received, err := io.ReadAll(response.Body)
	response.Body.Close()
	if err != nil {
		return nil, err
	}
	response.Body = io.NopCloser(bytes.NewReader(received))
	if template, operation := c.operation(request); operation == nil {
		if rest, found := strings.CutPrefix(request.URL.Path, "/api/v1/"); found && response.StatusCode < 400 && !strings.HasPrefix(rest, "openapi.") {
			c.t.Errorf("%s %s is answered %d and not documented", request.Method, request.URL.Path, response.StatusCode)
		}
	} else if err := c.judge(template, operation, request, sent, response, received); err != nil {
		c.t.Errorf("%s %s, answered %d: %v", request.Method, request.URL, response.StatusCode, err)
	}
	return response, nil
}

// operation finds the documented operation of a request.
func (c *conformance) operation(request *http.Request) (template string, operation map[string]any) {
	for template, item := range c.document["paths"].(map[string]any) {
		if matches(template, request.URL.EscapedPath()) {
			if operation, ok := item.(map[string]any)[strings.ToLower(request.Method)].(map[string]any); ok {
				return template, operation
			}
		}
	}
	return "", nil
}

func matches(template, path string) bool {
	want, got := strings.Split(template, "/"), strings.Split(path, "/")
	if len(want) != len(got) {
		return false
	}
	for i := range want {
		if !strings.HasPrefix(want[i], "{") && want[i] != got[i] {
			return false
		}
	}
	return true
}

func (c *conformance) judge(template string, operation map[string]any, request *http.Request, sent []byte, response *http.Response, received []byte) error {
	status := strconv.Itoa(response.StatusCode)
	c.mu.Lock()
	c.answered[operation["operationId"].(string)+" "+status]++
	c.mu.Unlock()
	place := "#/paths/" + escape(template) + "/" + strings.ToLower(request.Method)
	if response.StatusCode < 300 {
		if err := c.judgeRequest(place, operation, request, sent); err != nil {
			return fmt.Errorf("the request was accepted: %w", err)
		}
	}
	documented, ok := operation["responses"].(map[string]any)[status].(map[string]any)
	if !ok {
		return fmt.Errorf("the status is not documented")
	}
	content, _ := documented["content"].(map[string]any)
	if len(content) == 0 {
		if len(received) > 0 {
			return fmt.Errorf("documented without a body, has %d bytes", len(received))
		}
		return nil
	}
	media, _, err := mime.ParseMediaType(response.Header.Get("Content-Type"))
	if err != nil || content[media] == nil {
		return fmt.Errorf("content type %q is not documented", response.Header.Get("Content-Type"))
	}
	if !strings.HasSuffix(media, "json") {
		return nil // a file, which its own test reads back
	}
	return c.validate(place+"/responses/"+status+"/content/"+escape(media)+"/schema", received)
}

func (c *conformance) judgeRequest(place string, operation map[string]any, request *http.Request, sent []byte) error {
	known := map[string]bool{}
	parameters, _ := operation["parameters"].([]any)
	for _, p := range parameters {
		parameter := p.(map[string]any)
		name := parameter["name"].(string)
		switch parameter["in"] {
		case "query":
			known[name] = true
		case "header":
			if parameter["required"] == true && request.Header.Get(name) == "" {
				return fmt.Errorf("header %s is missing", name)
			}
		}
	}
	for name := range request.URL.Query() {
		if !known[name] {
			return fmt.Errorf("query parameter %s is not documented", name)
		}
	}
	if len(sent) == 0 {
		return nil
	}
	if request.Header.Get("Content-Encoding") == "gzip" {
		unzip, err := gzip.NewReader(bytes.NewReader(sent))
		if err != nil {
			return err
		}
		if sent, err = io.ReadAll(unzip); err != nil {
			return err
		}
	}
	if operation["requestBody"] == nil {
		return fmt.Errorf("a body is not documented")
	}
	return c.validate(place+"/requestBody/content/application~1json/schema", sent)
}

func (c *conformance) validate(place string, body []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	schema, err := c.compiler.Compile(documentURL + place)
	if err != nil {
		return err
	}
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	if err != nil {
		return err
	}
	if err := schema.Validate(value); err != nil {
		return fmt.Errorf("%w in %.2000s", err, body)
	}
	return nil
}

// escape makes a piece of a JSON pointer in a URL fragment.
func escape(piece string) string {
	return strings.NewReplacer("~", "~0", "/", "~1", "{", "%7B", "}", "%7D").Replace(piece)
}

// uncovered lists operations without an answer of success.
func (c *conformance) uncovered() []string {
	var missing []string
	for _, item := range c.document["paths"].(map[string]any) {
		for _, operation := range item.(map[string]any) {
			id := operation.(map[string]any)["operationId"].(string)
			covered := false
			for _, status := range []string{" 200", " 201", " 202", " 204"} {
				covered = covered || c.answered[id+status] > 0
			}
			if !covered {
				missing = append(missing, id)
			}
		}
	}
	return missing
}
