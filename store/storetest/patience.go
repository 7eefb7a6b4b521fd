package storetest

import "time"

// Patience bounds every wait of a test for what comes at once unless something is
// wrong. It is long, since it costs nothing where it is not needed.
const Patience = 2 * time.Minute

// Failer is what a test and a property test have in common.
type Failer interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// Came returns what comes next, and fails if that is nothing.
func Came[T any](t Failer, what string, from <-chan T) T {
	t.Helper()
	select {
	case value := <-from:
		return value
	case <-time.After(Patience):
		t.Fatalf("%s: nothing came", what)
		panic("unreachable")
	}
}
