package instance

import "testing"

// TestPreemptAllLosesBlocksNotTokens preempts at every moment of a run, within
// steps and between them, and forgets the cache: all requests still end after as many tokens.
func TestPreemptAllLosesBlocksNotTokens(t *testing.T) {
	for at := int64(0); at < 60; at++ {
		in, err := New(Demo(), nil)
		if err != nil {
			t.Fatal(err)
		}
		const requests = 5
		for id := range uint64(requests) {
			if err := in.Submit(Request{ID: id + 1, Chain: &Chain{ID: id + 1}, PromptTokens: 3000, OutputTokens: 40 + int(id)}); err != nil {
				t.Fatal(err)
			}
		}
		events := in.Advance(at*20_000_000, nil)
		in.NextEvent() // Starts the step that is due.
		before := map[uint64]int{}
		for id := range uint64(requests) {
			if p, ok := in.Progress(id + 1); ok {
				before[id+1] = p.OutputTokens
			}
		}
		events = in.PreemptAll(events)
		in.ResetCache()
		if s := in.Stats(); s.UsedBlocks() != 0 || s.CachedBlocks() != 0 || s.Waiting != len(before) || s.FreeBlocks != s.TotalBlocks {
			t.Fatalf("at %d: %+v", at, s)
		}
		for id, tokens := range before {
			if p, _ := in.Progress(id); p.OutputTokens != tokens || p.State != Waiting {
				t.Fatalf("at %d: request %d has %d tokens, had %d", at, id, p.OutputTokens, tokens)
			}
		}
		finished := 0
		for _, e := range in.Advance(1<<50, events) {
			if e.Kind == Finished {
				finished++
				if e.OutputTokens != 40+int(e.ID)-1 {
					t.Errorf("at %d: request %d ends with %d tokens", at, e.ID, e.OutputTokens)
				}
			}
		}
		if s := in.Stats(); finished != requests || s.UsedBlocks() != 0 {
			t.Fatalf("at %d: %d finished, %+v", at, finished, s)
		}
	}
}
