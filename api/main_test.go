package api_test

import (
	"os"
	"testing"

	"holdfast/store/storetest"
)

func TestMain(m *testing.M) { os.Exit(storetest.Main(m)) }
