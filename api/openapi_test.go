package api_test

import (
	"bytes"
	"flag"
	"os"
	"testing"

	"holdfast/api"
	"holdfast/store"
)

var update = flag.Bool("update", false, "write api/openapi.yaml from the code")

const openAPIFile = "openapi.yaml"

// never is a source of notifications that has none.
type never struct{}

func (never) WaitFor(store.Topic) <-chan struct{} { return nil }

// TestOpenAPI keeps the committed document in step with the code.
func TestOpenAPI(t *testing.T) {
	server, err := api.New(api.Config{Listen: "127.0.0.1:0", Store: new(store.Store), Notifications: never{}})
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(openAPIFile, server.OpenAPI(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	committed, err := os.ReadFile(openAPIFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(committed, server.OpenAPI()) {
		t.Errorf("%s is not what the code serves; run: make openapi", openAPIFile)
	}
}
