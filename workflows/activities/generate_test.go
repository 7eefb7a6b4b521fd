package activities

import (
	"math"
	"testing"

	"holdfast/store"
	"holdfast/workflows/task"
)

// TestMembersOfASeededGroupDiffer asks for the seeds of a group whose task has one:
// the same for every member would give the same answer to each of them.
func TestMembersOfASeededGroupDiffer(t *testing.T) {
	work := store.WorkSession{}
	if seed := memberSeed(&work); seed != nil {
		t.Errorf("without a seed of the task the member got %d", *seed)
	}
	for _, given := range []int64{0, 7, -3, math.MaxInt64} {
		work.Spec.Sampling = task.Sampling{Seed: &given}
		seen := map[int64]bool{}
		for work.Member = range 4 {
			seen[*memberSeed(&work)] = true
		}
		work.Member = 0
		if len(seen) != 4 || *memberSeed(&work) != given {
			t.Errorf("seed %d gives four members %v", given, seen)
		}
	}
}
