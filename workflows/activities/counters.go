package activities

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// Counters count the tokens that engines sample for one pool. They outlive the
// terms of its owner.
type Counters struct {
	generated, regenerated, resumes prometheus.Counter
}

// NewCounters registers the counters of a pool.
func NewCounters(registerer prometheus.Registerer, pool string) (*Counters, error) {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: prometheus.Labels{"pool": pool}})
	}
	c := &Counters{
		generated: counter("holdfast_tokens_generated_total",
			"Tokens that engines sampled, those that were lost included. Standing still while turns are admitted: look at the engines."),
		regenerated: counter("holdfast_tokens_regenerated_total",
			"Tokens sampled again because an earlier copy was lost with its worker. Above 1 % of the generated: workers die often, look why."),
		resumes: counter("holdfast_turns_resumed_total",
			"Model calls that went on from the partial output of one that was cut. Rising without weight updates: engines or their connections break, read the log."),
	}
	for _, collector := range []prometheus.Collector{c.generated, c.regenerated, c.resumes} {
		if err := registerer.Register(collector); err != nil {
			return nil, fmt.Errorf("registering the counters of tokens: %w", err)
		}
	}
	return c, nil
}

func (c *Counters) count(g growth) {
	c.generated.Add(float64(g.tokens))
	c.regenerated.Add(float64(g.regenerated))
	if g.resumed {
		c.resumes.Inc()
	}
}
