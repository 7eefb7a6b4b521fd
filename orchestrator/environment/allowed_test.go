package environment

import (
	"strings"
	"testing"

	"holdfast/orchestrator/environment/exchange"
	"holdfast/orchestrator/environment/spec"
)

// TestAllowedNamesTheField: whatever a task names outside of the service is looked at,
// and the field that names it is told.
func TestAllowedNamesTheField(t *testing.T) {
	closed := Allowed{Access: exchange.Access{Closed: true}}
	open := Allowed{Access: exchange.Access{AllowedHosts: []string{"*.example"}, Credentials: map[string]string{"known": "t"}}, Programs: true}
	httpAt := func(url, credential string) *spec.Environment {
		return &spec.Environment{Kind: spec.HTTP, HTTP: &spec.HTTPServer{URL: url, Credential: credential}}
	}
	mcpAt := func(url, credential string) *spec.Environment {
		return &spec.Environment{Kind: spec.MCP, MCP: &spec.MCPServer{URL: url, Credential: credential}}
	}
	scoredAt := func(url, credential string) *spec.Scorer {
		return &spec.Scorer{Kind: spec.ScorerHTTP, HTTP: &spec.HTTPScorer{URL: url, Credential: credential}}
	}
	program := execSpec("true")
	served := &spec.Environment{Kind: spec.MCP, MCP: &spec.MCPServer{Program: &spec.Program{Command: []string{"tools"}}}}
	judged := &spec.Scorer{Kind: spec.ScorerExec, Program: &spec.Program{Command: []string{"judge"}}}
	for _, c := range []struct {
		by          Allowed
		environment *spec.Environment
		scorer      *spec.Scorer
		path, says  string
	}{
		{by: closed},
		{by: closed, scorer: &spec.Scorer{Kind: spec.ScorerNumericMatch, Target: "4"}},
		{by: closed, environment: httpAt("http://a.example", ""), path: "t.environment.http.url", says: "a.example is not allowed"},
		{by: closed, environment: mcpAt("http://a.example", ""), path: "t.environment.mcp.url", says: "a.example is not allowed"},
		{by: closed, environment: &program, path: "t.environment.exec.program", says: "runs no programs"},
		{by: closed, environment: served, path: "t.environment.mcp.program", says: "runs no programs"},
		{by: closed, scorer: judged, path: "t.scorer.program", says: "runs no programs"},
		{by: closed, scorer: scoredAt("http://a.example", ""), path: "t.scorer.http.url", says: "a.example is not allowed"},
		{by: open, environment: httpAt("http://a.example", "known"), scorer: scoredAt("http://b.example/score", "known")},
		{by: open, environment: mcpAt("http://a.example", "known"), scorer: judged},
		{by: open, environment: served},
		{by: open, environment: &program},
		{by: open, environment: httpAt("http://a.other", ""), path: "t.environment.http.url", says: "a.other is not allowed"},
		{by: open, environment: httpAt("http://a.example", "x"), path: "t.environment.http.credential", says: `no credential is called "x"`},
		{by: open, environment: mcpAt("http://a.example", "x"), path: "t.environment.mcp.credential", says: `no credential is called "x"`},
		{by: open, environment: httpAt("http://a.example", ""), scorer: scoredAt("http://a.example", "x"), path: "t.scorer.http.credential", says: `no credential is called "x"`},
	} {
		got := c.by.Check(c.environment, c.scorer, "t")
		if (got == nil) != (c.path == "") || got != nil && (got.Path != c.path || !strings.Contains(got.Problem, c.says)) {
			t.Errorf("%+v with %+v: %v, want %s: ...%s", c.environment, c.scorer, got, c.path, c.says)
		}
	}
}
