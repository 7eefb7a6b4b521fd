package api_test

import (
	"testing"

	"holdfast/api/wire"
)

// TestWhatAnEngineDoesNotTellIsGiven: an OpenAI-compatible server says nothing of its
// memory, and what an engine does say is not overruled.
func TestWhatAnEngineDoesNotTellIsGiven(t *testing.T) {
	s := start(t, nil)
	given := wire.NewInstance{ID: "one", URL: "http://engine-silent", Kind: "openai", CapacityBlocks: 64, BlockTokens: 32, MaxContextTokens: 2048}
	instance, err := s.client.RegisterInstance(t.Context(), "main", given)
	if err != nil || instance.CapacityBlocks != 64 || instance.BlockTokens != 32 || instance.MaxContextTokens != 2048 {
		t.Errorf("%+v, %v", instance, err)
	}
	given.ID, given.URL, given.Kind = "two", "http://engine-2", "vllm"
	instance, err = s.client.RegisterInstance(t.Context(), "main", given)
	if err != nil || instance.CapacityBlocks != 1000 || instance.BlockTokens != 16 || instance.MaxContextTokens != 8192 {
		t.Errorf("%+v, %v", instance, err)
	}
}
