package api

import (
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the interface's own figures; each help text says what to do.
type metrics struct {
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
	working  *prometheus.GaugeVec
	refused  *prometheus.CounterVec
	panics   prometheus.Counter
	tasks    prometheus.Counter
	samples  prometheus.Counter
}

func newMetrics(registry prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "holdfast_api_requests_total",
			Help: "Requests answered, by route, method and status. Rising 4xx: a client sends what the service refuses, its problem documents and the log say what. Rising 5xx: read the log by request id.",
		}, []string{"route", "method", "status"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "holdfast_api_request_duration_seconds",
			Help:    "Time from a request's headers to the end of its answer, long polls included. Rising on routes that do not wait: look at the database first.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300},
		}, []string{"route", "method"}),
		working: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "holdfast_api_requests_working",
			Help: "Requests at work, by kind (request, wait, upload). Near its limit for long: raise the limit if memory allows, or add a replica.",
		}, []string{"kind"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "holdfast_api_requests_refused_total",
			Help: "Requests answered 429 because the limit of their kind was reached. Rising: clients poll without waiting, or the limit is too low.",
		}, []string{"kind"}),
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "holdfast_api_panics_total",
			Help: "Requests whose handler panicked; the process went on. Any: a defect, report the stack in the log.",
		}),
		tasks: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "holdfast_api_tasks_submitted_total",
			Help: "Tasks released through batches. Standing still while the trainer runs: look at the trainer.",
		}),
		samples: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "holdfast_api_samples_delivered_total",
			Help: "Samples sent to consumers, repeated deliveries included. Far above acknowledged samples: a consumer crashes before it acknowledges.",
		}),
	}
	for _, collector := range []prometheus.Collector{m.requests, m.duration, m.working, m.refused, m.panics, m.tasks, m.samples} {
		if err := registry.Register(collector); err != nil {
			return nil, fmt.Errorf("registering the interface's metrics: %w", err)
		}
	}
	return m, nil
}

func (m *metrics) finished(route, method string, status int, took time.Duration) {
	// A caller chooses the method's name; it must not choose how many series there are.
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodOptions:
	default:
		method = "other"
	}
	m.requests.WithLabelValues(route, method, strconv.Itoa(status)).Inc()
	m.duration.WithLabelValues(route, method).Observe(took.Seconds())
}
