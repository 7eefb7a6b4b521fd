package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/labstack/echo/v4"
	"golang.org/x/sync/semaphore"

	"holdfast/store"
	"holdfast/workflows/task"
)

// Server answers the REST interface. Create it with New, start and stop it once.
type Server struct {
	store         *store.Store
	notifications Notifications
	prober        Prober
	router        Router
	harness       Harness
	allowed       func(spec *task.Spec, path string) *task.FieldError
	checks        []Check
	limits        Limits
	log           *slog.Logger
	listen        string
	version       string

	doorkeeper  *doorkeeper
	crossOrigin *http.CrossOriginProtection
	slots       map[workKind]*semaphore.Weighted
	pages       *semaphore.Weighted
	metrics     *metrics
	echo        *echo.Echo
	huma        huma.API
	document    document

	http     *http.Server
	listener net.Listener
	// stopping is closed when the server begins to stop, which ends long polls.
	stopping chan struct{}
	stopOnce sync.Once
	served   chan struct{}
}

// New checks the configuration and builds the server. It does not listen yet.
func New(config Config) (*Server, error) {
	if err := config.validate(); err != nil {
		return nil, fmt.Errorf("configuring the API: %w", err)
	}
	figures, err := newMetrics(config.Registry)
	if err != nil {
		return nil, err
	}
	s := &Server{
		store: config.Store, notifications: config.Notifications, prober: config.Prober, router: config.Router, harness: config.Harness, allowed: config.Allowed,
		checks: config.Checks, limits: config.Limits, log: config.Logger, listen: config.Listen, version: config.Version,
		doorkeeper:  newDoorkeeper(config.Tokens, config.AllowOpen),
		crossOrigin: http.NewCrossOriginProtection(),
		slots:       newSlots(&config.Limits),
		pages:       semaphore.NewWeighted(int64(config.Limits.Pages)),
		metrics:     figures,
		echo:        echo.New(),
		stopping:    make(chan struct{}),
		served:      make(chan struct{}),
	}
	s.echo.Use(s.follow)
	s.huma = newHuma(s.echo)
	s.huma.UseMiddleware(s.gate)
	s.registerRuns()
	s.registerBatches()
	s.registerObservation()
	s.registerPace()
	s.registerSamples()
	s.registerExport()
	s.registerSessions()
	s.registerAudit()
	s.registerColumns()
	s.registerPools()
	s.registerWeights()
	s.registerTurns()
	if s.document, err = render(s.huma.OpenAPI()); err != nil {
		return nil, err
	}
	s.registerPlain(config.Registry)
	s.registerOpenAI()
	s.http = &http.Server{
		Handler:           s.echo,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
	return s, nil
}

const (
	headerTimeout  = 10 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 64 << 10
)

// Handler serves without a listener of its own, as tests do.
func (s *Server) Handler() http.Handler { return s.echo }

// OpenAPI returns the document of what is served, as YAML.
func (s *Server) OpenAPI() []byte { return s.document.yaml }

// Start listens and serves until Stop. It returns once connections are accepted;
// requests outlive ctx, which bounds the start only.
func (s *Server) Start(ctx context.Context) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", s.listen)
	if err != nil {
		return fmt.Errorf("listening on %s: %w", s.listen, err)
	}
	s.listener = listener
	go func() {
		defer close(s.served)
		if err := s.http.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			s.log.Error("the API stopped serving", "address", listener.Addr().String(), "cause", err)
		}
	}()
	return nil
}

// Addr is the address that is listened on, or empty before Start.
func (s *Server) Addr() string {
	if s.listener == nil {
		return ""
	}
	return s.listener.Addr().String()
}

// Served is closed when a started server serves no longer, for whatever reason.
func (s *Server) Served() <-chan struct{} { return s.served }

// Stop refuses new connections, answers long polls at once and waits for the
// other requests until ctx ends; those still at work then are cut off.
func (s *Server) Stop(ctx context.Context) error {
	s.stopOnce.Do(func() { close(s.stopping) })
	if s.listener == nil {
		return nil
	}
	err := s.http.Shutdown(ctx)
	if err != nil {
		err = errors.Join(fmt.Errorf("stopping the API: %w", err), s.http.Close())
	}
	<-s.served
	return err
}
