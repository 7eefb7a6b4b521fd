package api_test

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"holdfast/api"
	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/router"
	"holdfast/workflows/task"
)

// badInput is one thing that a caller can do wrong, with the answer it gets.
type badInput struct {
	name         string
	method, path string
	body         string
	header       []string
	status       int
	// kind ends the problem's type; location is that of its first error; says
	// stands in its detail.
	kind, location, says string
	// offset: the problem tells the byte.
	offset bool
}

const goodTask = `{"class":"agent","prompt":{"token_ids":[1,2]},"sampling":{"max_tokens":4}}`

// badBatches are submissions; path and key are added.
func badBatches() []badInput {
	task := func(fields string) string {
		return `{"tasks":[{"class":"agent","prompt":{"token_ids":[1]},` + fields + `}]}`
	}
	return []badInput{
		{name: "malformed", body: `{"tasks":[{"class":"agent",]}`, status: 400, kind: "invalid-json", location: "body.tasks[0]", offset: true},
		{name: "NaN", body: task(`"sampling":{"max_tokens":4,"temperature":NaN}`), status: 400, kind: "invalid-json", location: "body.tasks[0]", says: "JSON has no NaN", offset: true},
		{name: "Infinity", body: task(`"sampling":{"max_tokens":4,"temperature":-Infinity}`), status: 400, kind: "invalid-json", location: "body.tasks[0]", says: "JSON has no NaN, Infinity", offset: true},
		{name: "truncated in a task", body: `{"tasks":[` + goodTask + `,{"class":"age`, status: 400, kind: "invalid-json", location: "body.tasks[1]", says: "ends before", offset: true},
		{name: "truncated after the tasks", body: `{"tasks":[` + goodTask + `]`, status: 400, kind: "invalid-json", location: "body", says: "ends before", offset: true},
		{name: "trailing text", body: `{"tasks":[` + goodTask + `]} {}`, status: 400, kind: "invalid-json", location: "body", says: "goes on after", offset: true},
		{name: "empty", body: ``, status: 400, kind: "invalid-json", location: "body", says: "is empty"},
		{name: "an array", body: `[` + goodTask + `]`, status: 422, kind: "invalid-request", location: "body", says: "must be an object"},
		{name: "no tasks member", body: `{"policy_version":0}`, status: 422, kind: "invalid-request", location: "body.tasks", says: "is required"},
		{name: "no tasks", body: `{"tasks":[]}`, status: 422, kind: "invalid-request", location: "body.tasks", says: "at least one"},
		{name: "tasks null", body: `{"tasks":null}`, status: 422, kind: "invalid-request", location: "body.tasks", says: "must be an array"},
		{name: "a task that is a number", body: `{"tasks":[` + goodTask + `,7]}`, status: 422, kind: "invalid-request", location: "body.tasks[1]", says: "must be an object", offset: true},
		{name: "tasks twice", body: `{"tasks":[` + goodTask + `],"tasks":[]}`, status: 422, kind: "invalid-request", location: "body.tasks", says: "twice"},
		{name: "unknown member", body: `{"taks":[]}`, status: 422, kind: "invalid-request", location: "body.taks", says: "not a known field", offset: true},
		{name: "policy version of the future", body: `{"policy_version":1,"tasks":[` + goodTask + `]}`, status: 422, kind: "invalid-request", location: "body.policy_version", says: "between 0 and the pool's current version 0"},
		{name: "policy version negative", body: `{"policy_version":-1,"tasks":[]}`, status: 422, kind: "invalid-request", location: "body.policy_version"},
		{name: "policy version a fraction", body: `{"policy_version":1.5,"tasks":[]}`, status: 422, kind: "invalid-request", location: "body.policy_version", says: "whole number"},
		{name: "policy version a text", body: `{"policy_version":"1","tasks":[]}`, status: 422, kind: "invalid-request", location: "body.policy_version", says: "whole number"},
		{name: "policy version last", body: `{"tasks":[` + goodTask + `],"policy_version":0}`, status: 422, kind: "invalid-request", location: "body.policy_version", says: "before tasks"},
		{name: "unknown class", body: `{"tasks":[` + goodTask + `,{"class":"sft","prompt":{"token_ids":[1]},"sampling":{"max_tokens":4}}]}`, status: 422, kind: "unknown-class", location: "body.tasks[1].class", says: `"sft"`},
		{name: "unknown field of a task", body: task(`"sampling":{"max_tokens":4},"promt":1`), status: 422, kind: "invalid-request", location: "body.tasks[0].promt", says: "not a known field", offset: true},
		{name: "duplicate field of a task", body: task(`"class":"rlvr","sampling":{"max_tokens":4}`), status: 422, kind: "invalid-request", location: "body.tasks[0].class", says: "twice", offset: true},
		{name: "wrong type", body: task(`"sampling":{"max_tokens":"many"}`), status: 422, kind: "invalid-request", location: "body.tasks[0].sampling.max_tokens", says: "whole number", offset: true},
		{name: "negative limit", body: task(`"sampling":{"max_tokens":4},"limits":{"max_turns":-1}`), status: 422, kind: "invalid-request", location: "body.tasks[0].limits.max_turns", says: "-1"},
		{name: "absurd limit", body: task(`"sampling":{"max_tokens":4},"limits":{"max_run_seconds":1e300}`), status: 422, kind: "invalid-request", location: "body.tasks[0].limits.max_run_seconds"},
		{name: "negative deadline", body: task(`"sampling":{"max_tokens":4},"deadline_seconds":-1`), status: 422, kind: "invalid-request", location: "body.tasks[0].deadline_seconds", says: "-1"},
		{name: "absurd deadline", body: task(`"sampling":{"max_tokens":4},"deadline_seconds":1e12`), status: 422, kind: "invalid-request", location: "body.tasks[0].deadline_seconds"},
		{name: "absurd group", body: task(`"sampling":{"max_tokens":4},"group_size":5000`), status: 422, kind: "invalid-request", location: "body.tasks[0].group_size", says: "5000"},
		{name: "number too large for any float", body: task(`"sampling":{"max_tokens":4,"temperature":1e999}`), status: 422, kind: "invalid-request", location: "body.tasks[0].sampling.temperature", offset: true},
		{name: "no prompt", body: `{"tasks":[{"class":"agent","sampling":{"max_tokens":4}}]}`, status: 422, kind: "invalid-request", location: "body.tasks[0].prompt"},
		{name: "two prompts", body: `{"tasks":[{"class":"agent","prompt":{"text":"hi","messages":[{"role":"user","content":"hi"}]},"sampling":{"max_tokens":4}}]}`, status: 422, kind: "invalid-request", location: "body.tasks[0].prompt", says: "text and messages"},
		{name: "a message without role", body: `{"tasks":[{"class":"agent","prompt":{"messages":[{"content":"hi"}]},"sampling":{"max_tokens":4}}]}`, status: 422, kind: "invalid-request", location: "body.tasks[0].prompt.messages[0].role"},
		{name: "unknown scorer", body: task(`"sampling":{"max_tokens":4},"scorer":{"kind":"judge"}`), status: 422, kind: "invalid-request", location: "body.tasks[0].scorer.kind", says: "numeric_match"},
		{name: "scorer without a scheme", body: task(`"sampling":{"max_tokens":4},"scorer":{"kind":"http","http":{"url":"judge:80"}}`), status: 422, kind: "invalid-request", location: "body.tasks[0].scorer.http.url", says: "judge:80"},
		{name: "scorer that is not allowed", body: `{"tasks":[` + goodTask + `,` + strings.TrimSuffix(goodTask, "}") + `,"scorer":{"kind":"http","http":{"url":"http://judge"}}}]}`, status: 422, kind: "invalid-request", location: "body.tasks[1].scorer.http.url", says: "no judges here"},
		{name: "unknown field of a scorer", body: task(`"sampling":{"max_tokens":4},"scorer":{"kind":"exec","program":{"comand":["x"]}}`), status: 422, kind: "invalid-request", location: "body.tasks[0].scorer.program.comand", says: "not a known field", offset: true},
		{name: "target that is no number", body: task(`"sampling":{"max_tokens":4},"scorer":{"kind":"numeric_match","target":"four"}`), status: 422, kind: "invalid-request", location: "body.tasks[0].scorer.target", says: "four"},
		{name: "duplicate ids", body: `{"tasks":[` + strings.Replace(goodTask, "{", `{"id":"x",`, 1) + `,` + strings.Replace(goodTask, "{", `{"id":"x",`, 1) + `]}`, status: 422, kind: "invalid-request", location: "body.tasks[1].id", says: "x"},
		{name: "too many tasks", body: manyTasks(10_001), status: 422, kind: "invalid-request", location: "body.tasks", says: "10000"},
		{name: "not JSON by its own account", body: `{"tasks":[]}`, header: []string{"Content-Type", "text/csv"}, status: 415, kind: "unsupported-media-type", says: "text/csv"},
		{name: "unknown encoding", body: `{"tasks":[]}`, header: []string{"Content-Encoding", "br"}, status: 415, kind: "unsupported-media-type", location: "header.Content-Encoding", says: "br"},
		{name: "not gzip", body: `{"tasks":[]}`, header: []string{"Content-Encoding", "gzip"}, status: 400, kind: "invalid-json", location: "body", says: "Content-Encoding"},
		{name: "not zstd", body: `{"tasks":[]}`, header: []string{"Content-Encoding", "zstd"}, status: 400, kind: "invalid-json", location: "body", says: "Content-Encoding"},
		{name: "gzip broken off", body: zipped(`{"tasks":[` + goodTask + `]}`)[:30], header: []string{"Content-Encoding", "gzip"}, status: 400, kind: "invalid-json"},
		{name: "no key", body: `{"tasks":[` + goodTask + `]}`, header: []string{"Idempotency-Key", ""}, status: 422, kind: "invalid-request", location: "header.Idempotency-Key"},
		{name: "absurd key", body: `{"tasks":[` + goodTask + `]}`, header: []string{"Idempotency-Key", strings.Repeat("k", 257)}, status: 422, kind: "invalid-request", location: "header.Idempotency-Key"},
		{name: "key used with another body", body: `{"tasks":[` + goodTask + `]} `, header: []string{"Idempotency-Key", "used"}, status: 409, kind: "idempotency-key-reused", location: "header.Idempotency-Key"},
		{name: "unknown query parameter", path: "?dry_run=1", body: `{"tasks":[` + goodTask + `]}`, status: 422, kind: "invalid-request", location: "query.dry_run"},
	}
}

func manyTasks(n int) string {
	return `{"tasks":[` + strings.Repeat(goodTask+",", n-1) + goodTask + `]}`
}

func zipped(text string) string {
	var out bytes.Buffer
	zip := gzip.NewWriter(&out)
	if _, err := io.WriteString(zip, text); err != nil {
		panic(err)
	}
	if err := zip.Close(); err != nil {
		panic(err)
	}
	return out.String()
}

// badRuns are bodies for opening a run.
func badRuns() []badInput {
	run := func(contract string) string { return `{"name":"n","pool":"second","contract":{` + contract + `}}` }
	return []badInput{
		{name: "shares 0.006 above 1", body: run(`"classes":[{"class":"a","share":0.5},{"class":"b","share":0.506}],"max_concurrency":1`), status: 422, kind: "invalid-request", location: "body.contract.classes", says: "off 1 by +0.006"},
		{name: "shares below 1", body: run(`"classes":[{"class":"a","share":0.9}],"max_concurrency":1`), status: 422, kind: "invalid-request", location: "body.contract.classes", says: "off 1 by -0.1"},
		{name: "negative share", body: run(`"classes":[{"class":"a","share":-0.5},{"class":"b","share":1.5}],"max_concurrency":1`), status: 422, kind: "invalid-request", location: "body.contract.classes[0].share", says: "-0.5"},
		{name: "NaN share", body: run(`"classes":[{"class":"a","share":NaN}],"max_concurrency":1`), status: 400, kind: "invalid-json", location: "body", says: "JSON has no NaN", offset: true},
		{name: "class twice", body: run(`"classes":[{"class":"a","share":0.5},{"class":"a","share":0.5}],"max_concurrency":1`), status: 422, kind: "invalid-request", location: "body.contract.classes[1].class"},
		{name: "odd class", body: run(`"classes":[{"class":"a b","share":1}],"max_concurrency":1`), status: 422, kind: "invalid-request", location: "body.contract.classes[0].class"},
		{name: "no classes", body: run(`"classes":[],"max_concurrency":1`), status: 422, kind: "invalid-request", location: "body.contract.classes"},
		{name: "no concurrency", body: run(`"classes":[{"class":"a","share":1}]`), status: 422, kind: "invalid-request", location: "body.contract", says: "max_concurrency"},
		{name: "negative concurrency", body: run(`"classes":[{"class":"a","share":1}],"max_concurrency":-3`), status: 422, kind: "invalid-request", location: "body.contract.max_concurrency", says: "-3"},
		{name: "absurd concurrency", body: run(`"classes":[{"class":"a","share":1}],"max_concurrency":1000000000`), status: 422, kind: "invalid-request", location: "body.contract.max_concurrency"},
		{name: "concurrency beyond integers", body: run(`"classes":[{"class":"a","share":1}],"max_concurrency":1e30`), status: 422, kind: "invalid-request", location: "body.contract.max_concurrency"},
		{name: "negative staleness", body: run(`"classes":[{"class":"a","share":1}],"max_concurrency":1,"staleness_bound":-1`), status: 422, kind: "invalid-request", location: "body.contract.staleness_bound"},
		{name: "no undelivered sample at all", body: run(`"classes":[{"class":"a","share":1}],"max_concurrency":1,"undelivered_limit":0`), status: 422, kind: "invalid-request", location: "body.contract.undelivered_limit"},
		{name: "unknown stale policy", body: run(`"classes":[{"class":"a","share":1}],"max_concurrency":1,"stale_policy":"drop"`), status: 422, kind: "invalid-request", location: "body.contract.stale_policy", says: "finish, end or restart"},
		{name: "restarts without restart", body: run(`"classes":[{"class":"a","share":1}],"max_concurrency":1,"max_restarts":1`), status: 422, kind: "invalid-request", location: "body.contract.max_restarts", says: "unless stale_policy is restart"},
		{name: "no restarts with restart", body: run(`"classes":[{"class":"a","share":1}],"max_concurrency":1,"stale_policy":"restart","max_restarts":0`), status: 422, kind: "invalid-request", location: "body.contract.max_restarts"},
		{name: "negative budget", body: run(`"classes":[{"class":"a","share":1}],"max_concurrency":1,"freshness_budget_seconds":-1`), status: 422, kind: "invalid-request", location: "body.contract.freshness_budget_seconds"},
		{name: "absurd budget of a class", body: run(`"classes":[{"class":"a","share":1,"freshness_budget_seconds":1e300}],"max_concurrency":1`), status: 422, kind: "invalid-request", location: "body.contract.classes[0].freshness_budget_seconds"},
		{name: "unknown group policy", body: run(`"classes":[{"class":"a","share":1}],"max_concurrency":1,"group_policy":"hope"`), status: 422, kind: "invalid-request", location: "body.contract.group_policy", says: "partial, refill or end"},
		{name: "refills without refill", body: run(`"classes":[{"class":"a","share":1}],"max_concurrency":1,"group_policy":"end","group_refills":1`), status: 422, kind: "invalid-request", location: "body.contract.group_refills", says: "unless group_policy is refill"},
		{name: "absurd refills", body: run(`"classes":[{"class":"a","share":1}],"max_concurrency":1,"group_policy":"refill","group_refills":2000`), status: 422, kind: "invalid-request", location: "body.contract.group_refills"},
		{name: "negative spare members", body: run(`"classes":[{"class":"a","share":1}],"max_concurrency":1,"spare_members":-1`), status: 422, kind: "invalid-request", location: "body.contract.spare_members"},
		{name: "unknown field", body: `{"name":"n","pool":"second","contrat":{}}`, status: 422, kind: "invalid-request", says: "contrat"},
		{name: "member twice", body: `{"name":"n","name":"m"}`, status: 400, kind: "invalid-json", location: "body", says: "duplicate"},
		{name: "odd pool", body: `{"name":"n","pool":"a/b","contract":{"classes":[{"class":"a","share":1}],"max_concurrency":1}}`, status: 422, kind: "invalid-request", location: "body.pool"},
		{name: "pool in use", body: `{"name":"n","pool":"main","contract":{"classes":[{"class":"a","share":1}],"max_concurrency":1}}`, status: 409, kind: "conflict", says: "pool"},
		{name: "malformed", body: `{"name":"n",`, status: 400, kind: "invalid-json", location: "body", offset: true},
		{name: "no body", body: ``, status: 400, kind: "invalid-json"},
		{name: "too large", body: `{"name":"` + strings.Repeat("n", 1<<20) + `"}`, status: 413, kind: "too-large"},
		{name: "not JSON by its own account", body: `<run/>`, header: []string{"Content-Type", "application/xml"}, status: 415, kind: "unsupported-media-type"},
	}
}

// badOthers are the rest; RUN and SESSION stand for existing ids.
func badOthers() []badInput {
	const nobody = "00000000-0000-4000-8000-000000000000"
	return []badInput{
		{name: "unknown path", method: "GET", path: "/api/v1/rums", status: 404, kind: "not-found"},
		{name: "unknown method", method: "PATCH", path: "/api/v1/runs", status: 405, kind: "method-not-allowed"},
		{name: "unknown run", method: "GET", path: "/api/v1/runs/" + nobody, status: 404, kind: "not-found", says: nobody},
		{name: "run id that is none", method: "GET", path: "/api/v1/runs/first", status: 422, kind: "invalid-request", location: "path.run"},
		{name: "batch to an unknown run", method: "POST", path: "/api/v1/runs/" + nobody + "/batches", body: `{"tasks":[` + goodTask + `]}`, header: []string{"Idempotency-Key", "k"}, status: 404, kind: "not-found"},
		{name: "unknown batch", method: "GET", path: "/api/v1/runs/RUN/batches/" + nobody, status: 404, kind: "not-found"},
		{name: "backlog of an unknown run", method: "GET", path: "/api/v1/runs/" + nobody + "/backlog", status: 404, kind: "not-found"},
		{name: "mixture of an unknown run", method: "GET", path: "/api/v1/runs/" + nobody + "/mixture", status: 404, kind: "not-found"},
		{name: "metrics of an unknown run", method: "GET", path: "/api/v1/runs/" + nobody + "/metrics", status: 404, kind: "not-found"},
		{name: "consumers of an unknown run", method: "GET", path: "/api/v1/runs/" + nobody + "/consumers", status: 404, kind: "not-found"},
		{name: "history of an unknown run", method: "GET", path: "/api/v1/runs/" + nobody + "/contract/history", status: 404, kind: "not-found"},
		{name: "end of an unknown run", method: "POST", path: "/api/v1/runs/" + nobody + "/end", status: 404, kind: "not-found"},
		{name: "pace of an unknown run", method: "GET", path: "/api/v1/runs/" + nobody + "/pace", status: 404, kind: "not-found"},
		{name: "pace of empty groups", method: "GET", path: "/api/v1/runs/RUN/pace?group_size=0", status: 422, kind: "invalid-request", location: "query.group_size"},
		{name: "pace of negative steps", method: "GET", path: "/api/v1/runs/RUN/pace?step_samples=-1", status: 422, kind: "invalid-request", location: "query.step_samples"},
		{name: "pace asked for again next week", method: "GET", path: "/api/v1/runs/RUN/pace?ask_again_seconds=604800", status: 422, kind: "invalid-request", location: "query.ask_again_seconds"},
		{name: "window that is none", method: "GET", path: "/api/v1/runs/RUN/metrics?window=yesterday", status: 422, kind: "invalid-request", location: "query.window"},
		{name: "window and from", method: "GET", path: "/api/v1/runs/RUN/metrics?window=5m&from=2026-01-01T00:00:00Z", status: 422, kind: "invalid-request", location: "query.window"},
		{name: "window backwards", method: "GET", path: "/api/v1/runs/RUN/mixture?from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z", status: 422, kind: "invalid-request", location: "query.to"},
		{name: "unknown cursor", method: "GET", path: "/api/v1/runs/RUN/samples?after=AAAA", status: 422, kind: "unknown-cursor", location: "query.after"},
		{name: "endless wait", method: "GET", path: "/api/v1/runs/RUN/samples?wait=2h", status: 422, kind: "invalid-request", location: "query.wait", says: "1m0s"},
		{name: "wait that is none", method: "GET", path: "/api/v1/runs/RUN/samples?wait=soon", status: 422, kind: "invalid-request", location: "query.wait"},
		{name: "wait NaN", method: "GET", path: "/api/v1/runs/RUN/samples?wait=NaN", status: 422, kind: "invalid-request", location: "query.wait"},
		{name: "limit 0", method: "GET", path: "/api/v1/runs/RUN/samples?limit=0", status: 422, kind: "invalid-request", location: "query.limit"},
		{name: "limit absurd", method: "GET", path: "/api/v1/runs/RUN/samples?limit=1001", status: 422, kind: "invalid-request", location: "query.limit"},
		{name: "unknown start", method: "GET", path: "/api/v1/runs/RUN/samples?consumer=new&start=tomorrow", status: 422, kind: "invalid-request", location: "query.start"},
		{name: "a batch for a consumer", method: "GET", path: "/api/v1/runs/RUN/samples?consumer=trainer&batch=" + nobody, status: 422, kind: "invalid-request", location: "query.batch", says: "pass over the samples of others"},
		{name: "a batch in whole groups", method: "GET", path: "/api/v1/runs/RUN/samples?groups=whole&batch=" + nobody, status: 422, kind: "invalid-request", location: "query.batch"},
		{name: "a batch that is none", method: "GET", path: "/api/v1/runs/RUN/samples?batch=step-1", status: 422, kind: "invalid-request", location: "query.batch"},
		{name: "page of no bytes", method: "GET", path: "/api/v1/runs/RUN/samples?max_bytes=0", status: 422, kind: "invalid-request", location: "query.max_bytes"},
		{name: "export in an unknown format", method: "GET", path: "/api/v1/runs/RUN/export?format=csv", status: 422, kind: "invalid-request", location: "query.format"},
		{name: "export of an unknown run", method: "GET", path: "/api/v1/runs/" + nobody + "/export", status: 404, kind: "not-found", says: nobody},
		{name: "export after an unknown cursor", method: "GET", path: "/api/v1/runs/RUN/export?after=AAAA", status: 422, kind: "unknown-cursor", location: "query.after"},
		{name: "audit of an unknown session", method: "GET", path: "/api/v1/sessions/" + nobody + "/audit", status: 404, kind: "not-found", says: nobody},
		{name: "column of another length", method: "POST", path: "/api/v1/sessions/LIVE/columns", body: `{"columns":[{"name":"a","dtype":"int16","shape":[2],"data":"AAA="}]}`, status: 422, kind: "invalid-request", location: "body.columns[0].data", says: "the 4 bytes of [2] int16, is 2"},
		{name: "column of an unknown type", method: "POST", path: "/api/v1/sessions/LIVE/columns", body: `{"columns":[{"name":"a","dtype":"int4","shape":[1],"data":"AA=="}]}`, status: 422, kind: "invalid-request", location: "body.columns[0].dtype", says: "int4"},
		{name: "column twice", method: "POST", path: "/api/v1/sessions/LIVE/columns", body: `{"columns":[{"name":"a","dtype":"int8","shape":[1],"data":"AA=="},{"name":"a","dtype":"int8","shape":[1],"data":"AA=="}]}`, status: 422, kind: "invalid-request", location: "body.columns[1].name"},
		{name: "column that is no base64", method: "POST", path: "/api/v1/sessions/LIVE/columns", body: `{"columns":[{"name":"a","dtype":"int8","shape":[1],"data":"A*"}]}`, status: 422, kind: "invalid-request", location: "body.columns[0].data", says: "base64"},
		{name: "no columns", method: "POST", path: "/api/v1/sessions/LIVE/columns", body: `{"columns":[]}`, status: 422, kind: "invalid-request", location: "body.columns"},
		{name: "columns of a sample that is made", method: "POST", path: "/api/v1/sessions/ENDED/columns", body: `{"columns":[{"name":"a","dtype":"int8","shape":[1],"data":"AA=="}]}`, status: 409, kind: "conflict", says: "before it ends"},
		{name: "columns of an unknown session", method: "POST", path: "/api/v1/sessions/" + nobody + "/columns", body: `{"columns":[{"name":"a","dtype":"int8","shape":[1],"data":"AA=="}]}`, status: 404, kind: "not-found"},
		{name: "removal of an unknown consumer", method: "DELETE", path: "/api/v1/runs/RUN/consumers/stranger", status: 404, kind: "not-found", says: "stranger"},
		{name: "unknown status", method: "GET", path: "/api/v1/runs/RUN/samples?status=completed,done", status: 422, kind: "invalid-request", location: "query.status[1]"},
		{name: "unknown encoding", method: "GET", path: "/api/v1/runs/RUN/samples?encoding=cbor", status: 422, kind: "invalid-request", location: "query.encoding"},
		{name: "odd consumer", method: "GET", path: "/api/v1/runs/RUN/samples?consumer=a%20b", status: 422, kind: "invalid-request", location: "query.consumer"},
		{name: "samples of an unknown run", method: "GET", path: "/api/v1/runs/" + nobody + "/samples?wait=30s", status: 404, kind: "not-found"},
		{name: "ack of an unknown cursor", method: "POST", path: "/api/v1/runs/RUN/ack", body: `{"consumer":"trainer","cursor":"zzz"}`, status: 422, kind: "unknown-cursor", location: "body.cursor"},
		{name: "ack beyond what was delivered", method: "POST", path: "/api/v1/runs/RUN/ack", body: `{"consumer":"trainer","cursor":"CURSOR"}`, status: 422, kind: "unknown-cursor", location: "body.cursor"},
		{name: "ack by nobody", method: "POST", path: "/api/v1/runs/RUN/ack", body: `{"consumer":"stranger","cursor":"CURSOR"}`, status: 404, kind: "not-found", says: "stranger"},
		{name: "unknown session", method: "GET", path: "/api/v1/sessions/" + nobody, status: 404, kind: "not-found"},
		{name: "turns of an unknown session", method: "GET", path: "/api/v1/sessions/" + nobody + "/turns", status: 404, kind: "not-found"},
		{name: "events of an unknown session", method: "GET", path: "/api/v1/sessions/" + nobody + "/events", status: 404, kind: "not-found"},
		{name: "cancel of an unknown session", method: "POST", path: "/api/v1/sessions/" + nobody + "/cancel", status: 404, kind: "not-found"},
		{name: "engine that does not answer", method: "POST", path: "/api/v1/pools/main/instances", body: `{"id":"one","url":"http://127.0.0.1:9"}`, status: 422, kind: "engine-does-not-answer", location: "body.url", says: "connection refused"},
		{name: "engine at no URL", method: "POST", path: "/api/v1/pools/main/instances", body: `{"id":"one","url":"file:///etc/passwd"}`, status: 422, kind: "invalid-request", location: "body.url"},
		{name: "engine without a name", method: "POST", path: "/api/v1/pools/main/instances", body: `{"id":"","url":"http://engine"}`, status: 422, kind: "invalid-request", location: "body.id"},
		{name: "engine in an odd pool", method: "POST", path: "/api/v1/pools/a%20b/instances", body: `{"id":"one","url":"http://engine"}`, status: 422, kind: "invalid-request", location: "path.pool"},
		{name: "engine of an unknown kind", method: "POST", path: "/api/v1/pools/main/instances", body: `{"id":"one","url":"http://engine","kind":"tgi"}`, status: 422, kind: "invalid-request", location: "body.kind"},
		{name: "engine of unknown size", method: "POST", path: "/api/v1/pools/main/instances", body: `{"id":"one","url":"http://engine-silent"}`, status: 422, kind: "invalid-request", location: "body.capacity_blocks"},
		{name: "engine of unknown blocks", method: "POST", path: "/api/v1/pools/main/instances", body: `{"id":"one","url":"http://engine-silent","capacity_blocks":9}`, status: 422, kind: "invalid-request", location: "body.block_tokens"},
		{name: "engine of unknown context", method: "POST", path: "/api/v1/pools/main/instances", body: `{"id":"one","url":"http://engine-silent","capacity_blocks":9,"block_tokens":16}`, status: 422, kind: "invalid-request", location: "body.max_context_tokens"},
		{name: "engine of negative size", method: "POST", path: "/api/v1/pools/main/instances", body: `{"id":"one","url":"http://engine","capacity_blocks":-9}`, status: 422, kind: "invalid-request", location: "body.capacity_blocks"},
		{name: "engine living backwards", method: "POST", path: "/api/v1/pools/main/instances", body: `{"id":"one","url":"http://engine","ttl_seconds":-1}`, status: 422, kind: "invalid-request", location: "body.ttl_seconds"},
		{name: "drain of an unknown instance", method: "POST", path: "/api/v1/pools/main/instances/none/drain", status: 404, kind: "not-found"},
		{name: "heartbeat of an unknown instance", method: "POST", path: "/api/v1/pools/main/instances/none/heartbeat", status: 404, kind: "not-found"},
		{name: "removal of an unknown instance", method: "DELETE", path: "/api/v1/pools/main/instances/none", status: 404, kind: "not-found"},
		{name: "policy of an unknown pool", method: "GET", path: "/api/v1/pools/none/policy", status: 404, kind: "not-found"},
		{name: "negative policy version", method: "PUT", path: "/api/v1/pools/main/policy", body: `{"policy_version":-1}`, status: 422, kind: "invalid-request", location: "body.policy_version"},
		{name: "router of a pool run elsewhere", method: "GET", path: "/api/v1/pools/other/router", status: 503, kind: "not-owner"},
	}
}

// TestBadInput sends everything that is wrong and finds each refused with its
// status, kind and place, nothing stored, and the service well afterwards.
func TestBadInput(t *testing.T) {
	s := start(t, func(config *api.Config) {
		config.Allowed = func(spec *task.Spec, path string) *task.FieldError {
			if spec.Scorer != nil && spec.Scorer.HTTP != nil {
				return &task.FieldError{Path: path + ".scorer.http.url", Problem: "no judges here", Offset: task.UnknownOffset}
			}
			return nil
		}
	})
	run := s.openRun()
	sessions := s.submit(run.ID, "earlier", 2)
	s.finish(&sessions[0], router.Completed)
	page, err := s.client.Samples(t.Context(), run.ID, client.SamplesQuery{Consumer: "trainer"})
	if err != nil || len(page.Samples) != 1 {
		t.Fatalf("%+v, %v", page, err)
	}
	s.finish(&sessions[1], router.Completed)
	beyond, err := s.client.Samples(t.Context(), run.ID, client.SamplesQuery{})
	if err != nil || len(beyond.Samples) != 2 {
		t.Fatalf("%+v, %v", beyond, err)
	}
	if _, err := s.client.SubmitBatch(t.Context(), run.ID, "used", client.NewBatch{Tasks: client.Tasks([]task.Spec{oneTask("other", "agent")})}); err != nil {
		t.Fatal(err)
	}

	var cases []badInput
	for i, bad := range badBatches() {
		bad.method, bad.path = http.MethodPost, "/api/v1/runs/RUN/batches"+bad.path
		bad.header = append([]string{"Content-Type", "application/json", "Idempotency-Key", fmt.Sprint("bad-", i)}, bad.header...)
		bad.name = "batch: " + bad.name
		cases = append(cases, bad)
	}
	for _, bad := range badRuns() {
		bad.method, bad.path, bad.name = http.MethodPost, "/api/v1/runs", "run: "+bad.name
		cases = append(cases, bad)
	}
	cases = append(cases, badOthers()...)
	live := s.submit(run.ID, "under way", 1)[0].ID.String()
	if _, err := s.store.DispatchQueued(t.Context(), run.ID, 100); err != nil {
		t.Fatal(err)
	}
	place := strings.NewReplacer("RUN", run.ID.String(), "CURSOR", beyond.Next, "LIVE", live, "ENDED", sessions[0].ID.String())
	rows := s.counting()
	before := rows()
	for _, bad := range cases {
		t.Run(bad.name, func(t *testing.T) {
			status, problem, text := s.send(bad.method, place.Replace(bad.path), place.Replace(bad.body), bad.header...)
			bad.judge(t, status, &problem, text)
			if after := rows(); !maps.Equal(before, after) {
				t.Errorf("something was stored: rows were %v, are %v", before, after)
			}
		})
	}
	if _, err := s.client.Backlog(t.Context(), run.ID); err != nil {
		t.Errorf("the service is not well afterwards: %v", err)
	}
	if err := s.store.VerifyCounters(t.Context(), run.ID); err != nil {
		t.Error(err)
	}
}

func (bad *badInput) judge(t *testing.T, status int, problem *wire.Problem, text string) {
	t.Helper()
	if status != bad.status || problem.Status != bad.status {
		t.Fatalf("answered %d: %s", status, text)
	}
	if problem.Type != "urn:holdfast:problem:"+bad.kind || problem.Title == "" || problem.RequestID == "" {
		t.Errorf("want kind %s: %s", bad.kind, text)
	}
	if !strings.Contains(problem.Detail, bad.says) {
		t.Errorf("the detail does not say %q: %s", bad.says, text)
	}
	if bad.location != "" && (len(problem.Errors) == 0 || problem.Errors[0].Location != bad.location) {
		t.Errorf("want the place %s: %s", bad.location, text)
	}
	if bad.offset && (len(problem.Errors) == 0 || problem.Errors[0].OffsetBytes == nil) {
		t.Errorf("the byte is not told: %s", text)
	}
	for _, wrong := range problem.Errors {
		if value, ok := wrong.Value.(string); ok && wrong.Location != "body" && strings.HasPrefix(value, "{") {
			t.Errorf("the value of %s is that of the body: %s", wrong.Location, text)
		}
	}
	if len(text) > 2000 {
		t.Errorf("the answer repeats too much of the request: %d bytes", len(text))
	}
}

// TestSharesAreNormalised: 48.6/33.1/18.2 in percent of 0.999 is the paper's own.
func TestSharesAtTheEdge(t *testing.T) {
	s := start(t, nil)
	for i, shares := range [][]float64{{0.995}, {1.005}, {0.5, 0.4951}} {
		contract := wire.NewContract{MaxConcurrency: 1}
		for j, share := range shares {
			contract.Classes = append(contract.Classes, wire.ClassShare{Class: fmt.Sprint("c", j), Share: share})
		}
		run, err := s.client.CreateRun(t.Context(), wire.NewRun{Name: "n", Pool: fmt.Sprint("p", i), Contract: contract})
		if err != nil {
			t.Errorf("%v: %v", shares, err)
			continue
		}
		sum := 0.0
		for _, class := range run.Contract.Classes {
			sum += class.Share
		}
		if sum < 1-1e-12 || sum > 1+1e-12 {
			t.Errorf("%v is normalised to %v", shares, run.Contract.Classes)
		}
	}
}

// repeated gives the same bytes again and again, then an end.
type repeated struct {
	begin, again, end string
	times             int
}

func (r *repeated) reader() io.Reader {
	parts := []io.Reader{strings.NewReader(r.begin)}
	for range r.times {
		parts = append(parts, strings.NewReader(r.again))
	}
	return io.MultiReader(append(parts, strings.NewReader(r.end))...)
}

// hugeBatch is a well-formed batch of some n MiB.
func hugeBatch(n int) *repeated {
	filler := `{"class":"agent","prompt":{"token_ids":[` + strings.Repeat("1234,", 200_000) + `1]},"sampling":{"max_tokens":4}}`
	return &repeated{begin: `{"tasks":[` + goodTask, again: "," + filler, end: `]}`, times: n}
}

// TestBodiesThatAreTooLarge sends more than 64 MiB in every way there is.
func TestBodiesThatAreTooLarge(t *testing.T) {
	s := start(t, nil)
	run := s.openRun()
	rows := s.counting()
	before := rows()
	path := s.url + "/api/v1/runs/" + run.ID.String() + "/batches"
	const limit = 64 << 20
	var gzipBomb, zstdBomb bytes.Buffer
	zip := gzip.NewWriter(&gzipBomb)
	if _, err := io.Copy(zip, hugeBatch(80).reader()); err != nil {
		t.Fatal(err)
	}
	zip.Close()
	fast, err := zstd.NewWriter(&zstdBomb, zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(fast, hugeBatch(80).reader()); err != nil {
		t.Fatal(err)
	}
	fast.Close()
	if gzipBomb.Len() > 1<<20 || zstdBomb.Len() > 1<<20 {
		t.Fatalf("the bombs are %d and %d bytes and prove little", gzipBomb.Len(), zstdBomb.Len())
	}
	for name, c := range map[string]struct {
		body     io.Reader
		encoding string
		location string
		says     string
	}{
		"plain":    {hugeBatch(80).reader(), "", "body", fmt.Sprint(limit)},
		"gzip":     {&gzipBomb, "gzip", "body", "once decompressed"},
		"zstd":     {&zstdBomb, "zstd", "body", "once decompressed"},
		"one task": {io.MultiReader(strings.NewReader(`{"tasks":[{"class":"`), strings.NewReader(strings.Repeat("x", 17<<20)), strings.NewReader(`"}]}`)), "", "body.tasks[0]", fmt.Sprint(16 << 20)},
	} {
		t.Run(name, func(t *testing.T) {
			request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, path, io.NopCloser(c.body))
			if err != nil {
				t.Fatal(err)
			}
			header := []string{"Idempotency-Key", name}
			if c.encoding != "" {
				header = append(header, "Content-Encoding", c.encoding)
			}
			status, problem, text := s.sendRequest(request, header...)
			(&badInput{status: 413, kind: "too-large", location: c.location, says: c.says}).judge(t, status, &problem, text)
		})
	}
	if after := rows(); !maps.Equal(before, after) {
		t.Errorf("something was stored: rows were %v, are %v", before, after)
	}
}

// TestConnectionThatBreaksOff sends less than was announced and hears why not.
func TestConnectionThatBreaksOff(t *testing.T) {
	s := start(t, nil)
	run := s.openRun()
	rows := s.counting()
	before := rows()
	for path, location := range map[string]string{"/api/v1/runs/" + run.ID.String() + "/batches": "body.tasks[1]", "/api/v1/runs": "body"} {
		conn := s.dial()
		body := `{"tasks":[` + goodTask + `,{"cla`
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nIdempotency-Key: k\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n%s", path, body)
		if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(conn)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.HasPrefix(answer, []byte("HTTP/1.1 400 ")) || !bytes.Contains(answer, []byte(`"location":"`+location+`"`)) {
			t.Errorf("%s: %s", path, answer)
		}
	}
	if after := rows(); !maps.Equal(before, after) {
		t.Errorf("something was stored: rows were %v, are %v", before, after)
	}
}
