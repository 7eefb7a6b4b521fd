package store_test

import (
	"flag"
	"os"
	"testing"

	"holdfast/store/storetest"
)

func TestMain(m *testing.M) {
	// Each step of a property test is a transaction or more, so a few dozen runs of
	// it are what a minute allows; -rapid.checks asks for more.
	if err := flag.Set("rapid.checks", "30"); err != nil {
		panic(err)
	}
	os.Exit(storetest.Main(m))
}
