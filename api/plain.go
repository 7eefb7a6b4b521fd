package api

import (
	"context"
	_ "embed"
	"net/http"
	"sync"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"holdfast/api/wire"
)

//go:embed page/index.html
var indexPage []byte

// pagePolicy lets the page run its own script and style and talk to this service only.
const pagePolicy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// registerPlain adds what is no operation of the REST interface. Health and
// readiness need no token, since those who ask have none, and tell nothing but
// which part is missing.
func (s *Server) registerPlain(gatherer prometheus.Gatherer) {
	s.echo.HTTPErrorHandler = func(err error, c echo.Context) { writeProblem(c, problemOfEcho(err)) }
	s.echo.GET("/healthz", func(c echo.Context) error {
		return c.JSON(http.StatusOK, wire.Health{Status: "ok"})
	})
	readiness := &readiness{checks: append([]Check{{Name: "database", Required: true, Check: s.store.Ping}}, s.checks...), stopping: s.stopping}
	s.echo.GET("/readyz", func(c echo.Context) error {
		health := readiness.look(c.Request().Context())
		status := http.StatusOK
		if health.Status != "ok" {
			status = http.StatusServiceUnavailable
		}
		return c.JSON(status, health)
	})
	figures := promhttp.HandlerFor(gatherer, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 10 * time.Second})
	s.echo.GET("/metrics", s.forRoles(anyone, echo.WrapHandler(figures)))
	s.echo.GET("/", func(c echo.Context) error {
		c.Response().Header().Set("Content-Security-Policy", pagePolicy)
		return c.HTMLBlob(http.StatusOK, indexPage)
	})
	s.echo.GET(basePath+"/openapi.json", func(c echo.Context) error {
		return c.Blob(http.StatusOK, "application/openapi+json", s.document.json)
	})
	s.echo.GET(basePath+"/openapi.yaml", func(c echo.Context) error {
		return c.Blob(http.StatusOK, "application/openapi+yaml", s.document.yaml)
	})
}

// forRoles lets a request pass that one of the roles sends.
func (s *Server) forRoles(roles []Role, next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		who, refused := s.doorkeeper.admit(c.Request(), roles)
		stateOf(c.Request().Context()).caller = who
		if refused != nil {
			return refused
		}
		return next(c)
	}
}

// readiness asks the checks at most once a second, however often it is asked.
type readiness struct {
	checks   []Check
	stopping <-chan struct{}

	mu     sync.Mutex
	asked  time.Time
	health wire.Health
}

const (
	readinessAge     = time.Second
	readinessTimeout = 5 * time.Second
)

func (r *readiness) look(ctx context.Context) wire.Health {
	select {
	case <-r.stopping:
		return wire.Health{Status: "unready", Checks: []wire.HealthCheck{{Name: "stopping", Required: true, Problem: "the process is stopping"}}}
	default:
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.asked) < readinessAge {
		return r.health
	}
	// The answer is for all who ask within a second, so it does not end with one of them.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readinessTimeout)
	defer cancel()
	health := wire.Health{Status: "ok", Checks: make([]wire.HealthCheck, len(r.checks))}
	var asking sync.WaitGroup
	for i, check := range r.checks {
		asking.Go(func() {
			health.Checks[i] = wire.HealthCheck{Name: check.Name, Required: check.Required, OK: true}
			if err := check.Check(ctx); err != nil {
				health.Checks[i].OK, health.Checks[i].Problem = false, err.Error()
			}
		})
	}
	asking.Wait()
	for _, check := range health.Checks {
		if check.Required && !check.OK {
			health.Status = "unready"
		}
	}
	r.asked, r.health = time.Now(), health
	return health
}
