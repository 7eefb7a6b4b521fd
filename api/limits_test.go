package api_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"holdfast/api"
	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/store/storetest"
)

// describing is a router made of a function.
type describing func(context.Context, string) (wire.RouterView, error)

func (d describing) Describe(ctx context.Context, pool string) (wire.RouterView, error) {
	return d(ctx, pool)
}

// metric reads one line of /metrics.
func (s *service) metric(name string) string {
	s.t.Helper()
	response, err := http.Get(s.url + "/metrics")
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if value, found := strings.CutPrefix(line, name+" "); found {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// TestOverload: beyond its bound a kind of request is refused with 429 while the
// others, and health, go on; the client comes again and succeeds.
func TestOverload(t *testing.T) {
	entered, release := make(chan struct{}, 1), make(chan struct{})
	s := start(t, func(config *api.Config) {
		config.Limits.Requests = 1
		config.Router = describing(func(ctx context.Context, _ string) (wire.RouterView, error) {
			entered <- struct{}{}
			select {
			case <-release:
			case <-ctx.Done():
			}
			return wire.RouterView{}, ctx.Err()
		})
	})
	run := s.openRun()
	first := make(chan error, 1)
	go func() {
		_, err := s.client.Router(context.Background(), "main")
		first <- err
	}()
	storetest.Came(t, "the request that stays", entered)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url+"/api/v1/runs", nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := s.conformance.RoundTrip(request)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusTooManyRequests || response.Header.Get("Retry-After") != "1" {
		t.Errorf("answered %d, Retry-After %q", response.StatusCode, response.Header.Get("Retry-After"))
	}
	if models, text := s.ask(http.MethodGet, "/v1/models", "", nil); models.StatusCode != http.StatusTooManyRequests || models.Header.Get("Retry-After") != "1" {
		t.Errorf("models are answered %d: %s", models.StatusCode, text)
	}
	if _, err := s.client.Samples(t.Context(), run.ID, client.SamplesQuery{}); err != nil {
		t.Errorf("reading samples, which has a bound of its own: %v", err)
	}
	if status, _, text := s.send(http.MethodGet, "/healthz", ""); status != http.StatusOK {
		t.Errorf("health: %d %s", status, text)
	}
	later := make(chan error, 1)
	go func() {
		_, err := s.client.Run(context.Background(), run.ID)
		later <- err
	}()
	close(release)
	if err := errors.Join(storetest.Came(t, "the first answer", first), storetest.Came(t, "the later answer", later)); err != nil {
		t.Error(err)
	}
	if refused := s.metric(`holdfast_api_requests_refused_total{kind="request"}`); refused == "" || refused == "0" {
		t.Errorf("refusals are counted as %q", refused)
	}
}

// TestPanic: a defect in one request is answered, logged and counted, and takes
// nothing else down.
func TestPanic(t *testing.T) {
	s := start(t, func(config *api.Config) {
		config.Router = describing(func(_ context.Context, pool string) (wire.RouterView, error) {
			if pool == "broken" {
				panic("a defect")
			}
			// No JSON can carry this number, which shows after the status was sent.
			return wire.RouterView{Recent: []wire.RouterDecision{{Numbers: map[string]any{"x": math.NaN()}}}}, nil
		})
	})
	status, problem, text := s.send(http.MethodGet, "/api/v1/pools/broken/router", "", "X-Request-Id", "mine-7")
	if status != http.StatusInternalServerError || problem.RequestID != "mine-7" || strings.Contains(text, "defect") {
		t.Errorf("answered %d: %s", status, text)
	}
	if panics := s.metric("holdfast_api_panics_total"); panics != "1" {
		t.Errorf("panics are counted as %q", panics)
	}
	response, err := http.Get(s.url + "/api/v1/pools/main/router")
	if err == nil {
		defer response.Body.Close()
		if _, err = io.ReadAll(response.Body); err == nil {
			t.Error("an answer that could not be finished looks whole")
		}
	}
	s.openRun()
}

// TestSlowHandlersAndSenders: neither may hold a place for ever.
func TestSlowHandlersAndSenders(t *testing.T) {
	plain := start(t, nil)
	run := plain.openRun()
	s := plain.beside(func(config *api.Config) {
		config.Limits.RequestTimeout = time.Second
		config.Router = describing(func(ctx context.Context, _ string) (wire.RouterView, error) {
			<-ctx.Done()
			return wire.RouterView{}, ctx.Err()
		})
	})
	status, problem, text := s.send(http.MethodGet, "/api/v1/pools/main/router", "")
	if status != http.StatusServiceUnavailable || problem.Type != "urn:holdfast:problem:timeout" {
		t.Errorf("answered %d: %s", status, text)
	}
	s = plain.beside(func(config *api.Config) { config.Limits.StallTimeout = 100 * time.Millisecond })
	conn := s.dial()
	fmt.Fprintf(conn, "POST /api/v1/runs/%s/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nIdempotency-Key: k\r\nContent-Length: 5000\r\n\r\n{\"tasks\":[", run.ID)
	answer, err := io.ReadAll(conn)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(string(answer), "HTTP/1.1 408 ") || !strings.Contains(string(answer), "body-timeout") {
		t.Errorf("a sender that stopped is answered: %s", answer)
	}
}

// dial opens a connection on which nothing is waited for without a limit.
func (s *service) dial() net.Conn {
	s.t.Helper()
	conn, err := net.DialTimeout("tcp", s.server.Addr(), storetest.Patience)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(storetest.Patience)); err != nil {
		s.t.Fatal(err)
	}
	return conn
}

// TestRoles goes through who may do what.
func TestRoles(t *testing.T) {
	secrets := map[string]string{"viewer": "viewer-secret-0001", "trainer": "trainer-secret-001", "operator": "operator-secret-01"}
	s := start(t, func(config *api.Config) {
		for role, secret := range secrets {
			config.Tokens = append(config.Tokens, api.Token{Name: "the " + role, Role: api.Role(role), Secret: secret})
		}
	})
	trainer := s.connect(client.Config{Transport: s.conformance, Token: secrets["trainer"]})
	run, err := trainer.CreateRun(t.Context(), wire.NewRun{Name: "n", Pool: "main", Contract: threeClasses()})
	if err != nil {
		t.Fatal(err)
	}
	runURL := "/api/v1/runs/" + run.ID.String()
	for _, c := range []struct {
		method, path, body string
		// want is the status for nobody, a stranger, viewer, trainer, operator.
		want [5]int
	}{
		{"GET", runURL, "", [5]int{401, 401, 200, 200, 200}},
		{"GET", runURL + "/samples", "", [5]int{401, 401, 200, 200, 200}},
		{"GET", runURL + "/samples?consumer=c", "", [5]int{401, 401, 403, 200, 403}},
		{"POST", runURL + "/batches", `{"tasks":[` + goodTask + `]}`, [5]int{401, 401, 403, 201, 403}},
		{"POST", runURL + "/ack", `{"consumer":"c","cursor":"zzz"}`, [5]int{401, 401, 403, 422, 403}},
		{"POST", "/api/v1/pools/main/instances", `{"id":"one","url":"http://engine"}`, [5]int{401, 401, 403, 200, 200}},
		{"DELETE", "/api/v1/pools/main/instances/one", "", [5]int{401, 401, 403, 204, 204}},
		{"GET", "/metrics", "", [5]int{401, 401, 200, 200, 200}},
		{"GET", "/healthz", "", [5]int{200, 200, 200, 200, 200}},
		{"GET", "/", "", [5]int{200, 200, 200, 200, 200}},
	} {
		for i, secret := range []string{"", "stranger-secret-01", secrets["viewer"], secrets["trainer"], secrets["operator"]} {
			header := []string{"Idempotency-Key", "k"}
			if c.body != "" {
				header = append(header, "Content-Type", "application/json")
			}
			if secret != "" {
				header = append(header, "Authorization", "Bearer "+secret)
			}
			status, problem, text := s.send(c.method, c.path, c.body, header...)
			if status != c.want[i] || (status >= 400 && problem.Status != status) {
				t.Errorf("%s %s by caller %d is answered %d, want %d: %.300s", c.method, c.path, i, status, c.want[i], text)
			}
		}
	}
}

// TestOpenServiceAnswersThisMachineOnly: without tokens, what a web page in a
// browser of this machine could send is refused.
func TestOpenServiceAnswersThisMachineOnly(t *testing.T) {
	s := start(t, nil)
	request := func(method, host string, header ...string) int {
		made, err := http.NewRequestWithContext(t.Context(), method, s.url+"/api/v1/runs", nil)
		if err != nil {
			t.Fatal(err)
		}
		made.Host = host
		status, _, _ := s.sendRequest(made, header...)
		return status
	}
	if status := request(http.MethodGet, "attacker.example"); status != http.StatusForbidden {
		t.Errorf("under a name of its own a page is answered %d", status)
	}
	if status := request(http.MethodPost, "localhost", "Origin", "http://attacker.example", "Sec-Fetch-Site", "cross-site"); status != http.StatusForbidden {
		t.Errorf("a page of another site is answered %d", status)
	}
	if status := request(http.MethodGet, "localhost:8080"); status != http.StatusOK {
		t.Errorf("localhost is answered %d", status)
	}
}

// TestExposure: which addresses and tokens the configuration accepts.
func TestExposure(t *testing.T) {
	good := api.Token{Name: "n", Role: api.RoleTrainer, Secret: "0123456789abcdef"}
	for _, c := range []struct {
		listen string
		tokens []api.Token
		open   bool
		ok     bool
	}{
		{"127.0.0.1:0", nil, false, true},
		{"[::1]:8080", nil, false, true},
		{"localhost:8080", nil, false, true},
		{":8080", nil, false, false},
		{"0.0.0.0:8080", nil, false, false},
		{"[::]:8080", nil, false, false},
		{"10.1.2.3:8080", nil, false, false},
		{"engine-host:8080", nil, false, false},
		{"0.0.0.0:8080", nil, true, true},
		{"0.0.0.0:8080", []api.Token{good}, false, true},
		{"127.0.0.1", nil, false, false},
		{"127.0.0.1:0", []api.Token{{Name: "n", Role: api.RoleTrainer, Secret: "short"}}, false, false},
		{"127.0.0.1:0", []api.Token{{Name: "n", Role: "root", Secret: "0123456789abcdef"}}, false, false},
		{"127.0.0.1:0", []api.Token{{Role: api.RoleTrainer, Secret: "0123456789abcdef"}}, false, false},
		{"127.0.0.1:0", []api.Token{{Name: "n", Role: api.RoleTrainer, Secret: "0123456789 abcdef"}}, false, false},
		{"127.0.0.1:0", []api.Token{good, {Name: "m", Role: api.RoleViewer, Secret: good.Secret}}, false, false},
	} {
		err := api.CheckExposure(c.listen, c.tokens, c.open)
		if (err == nil) != c.ok {
			t.Errorf("%s with %v, open %v: %v", c.listen, c.tokens, c.open, err)
		}
		if err != nil && strings.Contains(err.Error(), good.Secret) {
			t.Errorf("the error tells a secret: %v", err)
		}
	}
}

// TestReadiness shows each check and fails for a required one only.
func TestReadiness(t *testing.T) {
	var temporal error
	s := start(t, func(config *api.Config) {
		config.Checks = []api.Check{
			{Name: "temporal", Required: true, Check: func(context.Context) error { return temporal }},
			{Name: "pool_owner", Check: func(context.Context) error { return errors.New("another process owns the pool") }},
		}
	})
	ready := func() (int, wire.Health) {
		status, _, text := s.send(http.MethodGet, "/readyz", "")
		var health wire.Health
		if err := json.Unmarshal([]byte(text), &health); err != nil {
			t.Fatal(err)
		}
		return status, health
	}
	status, health := ready()
	if status != http.StatusOK || health.Status != "ok" || len(health.Checks) != 3 || !health.Checks[0].OK || health.Checks[2].OK {
		t.Errorf("%d %+v", status, health)
	}
	if err := s.server.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}

	temporal = errors.New("unreachable")
	s = start(t, func(config *api.Config) {
		config.Checks = []api.Check{{Name: "temporal", Required: true, Check: func(context.Context) error { return temporal }}}
	})
	status, health = ready()
	if status != http.StatusServiceUnavailable || health.Status != "unready" || health.Checks[1].Problem != "unreachable" {
		t.Errorf("%d %+v", status, health)
	}
}

// TestReadinessNeedsTheDatabase: readiness fails while the database is away.
func TestReadinessNeedsTheDatabase(t *testing.T) {
	s := start(t, nil)
	s.store.Close()
	status, _, text := s.send(http.MethodGet, "/readyz", "")
	if status != http.StatusServiceUnavailable || !strings.Contains(text, "database") {
		t.Errorf("%d %s", status, text)
	}
}

// TestPagesOfAllKinds: what people and machines find besides the interface.
func TestPagesOfAllKinds(t *testing.T) {
	s := start(t, nil)
	s.openRun()
	for path, says := range map[string]string{
		"/":                    "Where to look next",
		"/api/v1/openapi.yaml": "openapi: 3.1.0",
		"/api/v1/openapi.json": `"openapi": "3.1.0"`,
		"/metrics":             `holdfast_api_requests_total{method="POST",route="/api/v1/runs",status="201"} 1`,
	} {
		status, _, text := s.send(http.MethodGet, path, "")
		if status != http.StatusOK || !strings.Contains(text, says) {
			t.Errorf("%s is answered %d: %.300s", path, status, text)
		}
	}
}
