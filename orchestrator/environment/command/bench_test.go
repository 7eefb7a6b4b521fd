package command

import (
	"testing"

	"holdfast/orchestrator/environment/spec"
)

// BenchmarkRun is what a step that runs next to nothing costs.
func BenchmarkRun(b *testing.B) {
	for _, isolation := range []Isolation{IsolationProcessGroup, IsolationNamespaces} {
		for _, network := range []bool{true, false} {
			if isolation == IsolationProcessGroup && !network {
				continue
			}
			name := isolation.String()
			if network {
				name += " with network"
			}
			b.Run(name, func(b *testing.B) {
				r, err := NewRunner(b.Context(), Config{Root: openRoot(b), Isolation: isolation})
				if err != nil {
					b.Fatal(err)
				}
				defer r.Close()
				d, err := r.NewDirectory("session-1")
				if err != nil {
					b.Fatal(err)
				}
				for b.Loop() {
					if _, err := d.Run(b.Context(), Request{Program: spec.Program{Command: []string{"true"}, Network: network}}); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
