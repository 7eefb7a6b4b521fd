package api_test

import (
	"net/http"
	"os"
	"testing"

	"holdfast/store/storetest"
)

func TestMain(m *testing.M) {
	// For the raw requests of tests: a server that hangs fails them, and not the package.
	http.DefaultClient.Timeout = storetest.Patience
	os.Exit(storetest.Main(m))
}
