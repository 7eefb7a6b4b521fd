package policy

import (
	"holdfast/router"
	"holdfast/router/sim"
)

// coreTickSeconds is how often the service lets time pass for the core.
const coreTickSeconds = 1

// Core runs the router core itself under a configuration.
func Core(name string, cfg router.Config) sim.Spec {
	return sim.Spec{
		Name:  name,
		Wants: sim.Wants{Snapshots: true, Blocks: true, TickSeconds: coreTickSeconds},
		New: func(sim.Truth) (sim.Policy, error) {
			return router.New(cfg)
		},
	}
}

// SessionAdmission is the paper's ablation without classes.
func SessionAdmission() sim.Spec { return Core("session-admission", router.SessionAdmission()) }

// MISA is the paper's ablation with class caps by space.
func MISA() sim.Spec { return Core("misa", router.MISA()) }

// MISAT is the paper's policy with re-admission of evicted continuations.
func MISAT() sim.Spec { return Core("misa-t", router.MISAT()) }

// MISATPaper is the paper's policy to the letter.
func MISATPaper() sim.Spec { return Core("misa-t-paper", router.MISATPaper()) }

// Holdfast is the default of the product.
func Holdfast() sim.Spec { return Core("holdfast", router.DefaultConfig()) }
