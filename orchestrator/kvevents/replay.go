package kvevents

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/go-zeromq/zmq4"
)

// newReplayer returns the dialogue with one rank's replay socket: a DEALER asks for
// all batches from a number on and gets each that the engine still has, oldest
// first, then an end marker. vLLM looks for requests between two publications, so
// that the first reply may take a tenth of a second.
func newReplayer(s *Subscriber, rank int) func(context.Context, uint64, func(uint64, []byte) error) error {
	return func(ctx context.Context, from uint64, visit func(seq uint64, payload []byte) error) error {
		network, address, err := endpointOf(s.cfg.ReplayEndpoint, rank, false)
		if err != nil {
			return err
		}
		conn, err := dial(ctx, network, address, zmq4.Dealer, s.timing)
		if err != nil {
			return err
		}
		defer conn.close()
		// The empty frame is what a REQ socket would put before its message.
		if err := conn.send(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
			return fmt.Errorf("asking: %w", err)
		}
		for {
			if err := conn.raw.SetReadDeadline(time.Now().Add(s.timing.replayReply)); err != nil {
				return err
			}
			frames, err := conn.receive()
			if err != nil {
				return fmt.Errorf("reading the answer: %w", err)
			}
			seq, payload, end, err := parseReply(frames)
			if err != nil || end {
				return err
			}
			if err := visit(seq, payload); err != nil {
				return err
			}
		}
	}
}

var errReply = errors.New("not a reply to a replay request")

// parseReply reads one message of a replay: delimiter, number, payload, with a topic
// after the delimiter since vLLM 0.26. The end has the number 2^64-1.
func parseReply(frames [][]byte) (seq uint64, payload []byte, end bool, err error) {
	if len(frames) > 0 && len(frames[0]) == 0 {
		frames = frames[1:]
	}
	if len(frames) == 3 {
		frames = frames[1:]
	}
	if len(frames) != 2 || len(frames[0]) != 8 {
		return 0, nil, false, errReply
	}
	seq = binary.BigEndian.Uint64(frames[0])
	return seq, frames[1], seq == math.MaxUint64, nil
}
