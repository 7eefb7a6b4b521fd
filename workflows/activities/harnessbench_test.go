package activities

import (
	"strconv"
	"testing"
	"time"

	"holdfast/workflows"
)

// BenchmarkHarnessTurn is a harness's call without HTTP and without an engine: what is
// left is mostly the round trip to Postgres. Most harnesses call after a pause, and then
// processes and processors have to be woken first.
func BenchmarkHarnessTurn(b *testing.B) {
	for name, pause := range map[string]time.Duration{"back to back": 0, "after 30 ms": 30 * time.Millisecond} {
		b.Run(name, func(b *testing.B) {
			f := newFixture(b)
			id := f.session(harnessed(8))
			a := f.worker(newEngines(b), &placements{}, testCheckpointTokens)
			b.ResetTimer()
			for i := range b.N {
				if pause > 0 {
					b.StopTimer()
					time.Sleep(pause)
					b.StartTimer()
				}
				f.call(a, id, workflows.HarnessCall{RequestID: strconv.Itoa(i), Append: []int32{1, 2}})
			}
		})
	}
}
