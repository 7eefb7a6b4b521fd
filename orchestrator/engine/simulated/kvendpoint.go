package simulated

import "holdfast/orchestrator/engine/simulated/publish"

// KVEndpoint is where one rank publishes its KV cache events.
type KVEndpoint struct {
	Rank int `json:"rank"`
	// Endpoint is what was bound, or what is connected to.
	Endpoint string `json:"endpoint"`
	// ReplayEndpoint is empty if there is none.
	ReplayEndpoint string `json:"replay_endpoint,omitempty"`
	// Published is the number of batches published so far, and so the sequence number
	// that the next one will have.
	Published uint64 `json:"published"`
}

// KVEndpoints lists where the ranks publish their events, in order; it is empty if they do not.
func (s *Server) KVEndpoints() []KVEndpoint {
	var list []KVEndpoint
	s.core.look(func() {
		if l := s.core.log; l != nil {
			list = append(list, KVEndpoint{0, l.publisher.Endpoint(), l.publisher.ReplayEndpoint(), l.publisher.Published()})
		}
	})
	return list
}

// newPublisher opens a rank's sockets.
func (s *Server) newPublisher(rank int) (*publish.Publisher, error) {
	k := &s.cfg.KVEvents
	return publish.New(publish.Config{
		Endpoint: k.Endpoint, Connect: k.Connect, ReplayEndpoint: k.ReplayEndpoint, Topic: k.Topic, Encoding: k.Encoding,
		OldReplies: k.OldReplies, HistoryBatches: k.HistoryBatches, Rank: rank,
	})
}

func (s *Server) newCore() (*core, error) {
	if s.cfg.KVEvents.Endpoint == "" {
		return newCore(&s.cfg, nil)
	}
	publisher, err := s.newPublisher(0)
	if err != nil {
		return nil, err
	}
	c, err := newCore(&s.cfg, newKVLog(publisher, &s.cfg))
	if err != nil {
		publisher.Close()
	}
	return c, err
}
