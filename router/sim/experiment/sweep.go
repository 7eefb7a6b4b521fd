package experiment

import (
	"fmt"

	"holdfast/router"
	"holdfast/router/sim"
	"holdfast/router/sim/policy"
	"holdfast/router/sim/workload"
)

// variant is one setting of a policy that is swept.
type variant struct {
	// ceiling says which setting, for people.
	ceiling string
	spec    sim.Spec
}

// candidate is a policy to judge: one variant, or several of which the best is
// taken in hindsight.
type candidate struct {
	name     string
	variants []variant
}

func fixed(spec sim.Spec) candidate {
	return candidate{name: spec.Name, variants: []variant{{spec: spec}}}
}

func swept(name string, ceilings []int, spec func(int) sim.Spec) candidate {
	c := candidate{name: name}
	for _, k := range ceilings {
		c.variants = append(c.variants, variant{fmt.Sprint(k), spec(k)})
	}
	return c
}

// candidates are all policies, in the order of the tables.
func candidates(s Setup, regime Regime) []candidate {
	return []candidate{
		fixed(policy.RoundRobin()),
		fixed(policy.LeastLoaded()),
		swept("request-ceiling", s.RequestCeilings, policy.RequestCeiling),
		swept("session-ceiling", s.SessionCeilings, policy.SessionCeiling),
		classCeilings(s),
		partitions(s, s.instances(regime)),
		fixed(policy.Safe128K()),
		fixed(policy.Permissive()),
		fixed(policy.PrebleLike()),
		fixed(policy.StickyLeastLoaded()),
		fixed(policy.StickyLeastInFlight()),
		fixed(policy.ThunderAgentLike()),
		fixed(policy.PrimeRLLike()),
		fixed(policy.SessionAdmission()),
		fixed(policy.MISA()),
		fixed(policy.MISAT()),
		fixed(policy.MISATPaper()),
		fixed(policy.Holdfast()),
		fixed(policy.Oracle(policy.DefaultOracle())),
	}
}

// classCeilings searches three dimensions: the sessions of all classes together,
// and how far the parts of Agent and RLVR lean from what the release rate and the
// residency of each class make of them (Little's law: n_b goes with rho_b T_b).
// RLHF sessions are so small and short that their part is rounded up.
func classCeilings(s Setup) candidate {
	c := candidate{name: "class-ceilings"}
	for _, total := range s.ClassTotals {
		for _, lean := range []float64{0.94, 1, 1.06} {
			agent := max(1, int(float64(total)*s.AgentShare*lean+0.5))
			rlvr := max(1, int(float64(total)*(1-s.AgentShare)*(2-lean)+0.5))
			rlhf := int(float64(total)*0.04 + 1)
			c.variants = append(c.variants, variant{
				fmt.Sprintf("%d/%d/%d", agent, rlvr, rlhf),
				policy.ClassCeilings(map[router.ClassID]int{workload.Agent: agent, workload.RLVR: rlvr, workload.RLHF: rlhf}),
			})
		}
	}
	return c
}

// partitions divides the instances in halves, which is what the classes' shares of
// the block-time ask for (about 45 to 55), with RLHF on either side.
func partitions(s Setup, instances int) candidate {
	c := candidate{name: "partitioned"}
	half := instances / 2
	var first, second []int
	for i := range instances {
		if i < half {
			first = append(first, i)
		} else {
			second = append(second, i)
		}
	}
	for _, agent := range s.AgentCeilings {
		for _, rlvr := range s.RLVRCeilings {
			c.variants = append(c.variants, variant{
				fmt.Sprintf("agent %d, rlvr+rlhf %d", agent, rlvr),
				policy.Partitioned([]policy.Partition{
					{Classes: []router.ClassID{workload.Agent}, Instances: first, Ceiling: agent},
					{Classes: []router.ClassID{workload.RLVR, workload.RLHF}, Instances: second, Ceiling: rlvr},
				}),
			})
		}
	}
	return c
}
