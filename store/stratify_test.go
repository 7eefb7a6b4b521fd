package store

import (
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestStratifiedPrefixes: however a batch is composed, every prefix of its order
// that ends between two groups holds each class within one group's width of its
// share.
func TestStratifiedPrefixes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tasks := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) releasedTask {
			return releasedTask{class: rapid.IntRange(0, 4).Draw(t, "class"), members: rapid.IntRange(1, 16).Draw(t, "members")}
		}), 1, 200).Draw(t, "tasks")
		order := stratified(tasks)
		sorted := slices.Sorted(slices.Values(order))
		total, widest := 0, 0
		sizes := map[int]int{}
		for i, task := range tasks {
			if sorted[i] != i {
				t.Fatalf("the order is no permutation: %v", order)
			}
			total += task.members
			sizes[task.class] += task.members
			widest = max(widest, task.members)
		}
		dispatched, length := map[int]int{}, 0
		last := map[int]int{}
		for _, i := range order {
			if before, ok := last[tasks[i].class]; ok && before > i {
				t.Fatalf("task %d of class %d goes before task %d", before, tasks[i].class, i)
			}
			last[tasks[i].class] = i
			dispatched[tasks[i].class] += tasks[i].members
			length += tasks[i].members
			for class, size := range sizes {
				want := float64(size) * float64(length) / float64(total)
				// Each class is off its own place by half a group, and so is the prefix
				// in every class.
				bound := float64(widest)/2 + float64(len(sizes)*widest)/2*float64(size)/float64(total) + 1e-9
				if math.Abs(float64(dispatched[class])-want) > bound {
					t.Fatalf("after %d of %d sessions class %d has %d, its share is %.2f, the bound %.2f", length, total, class, dispatched[class], want, bound)
				}
			}
		}
	})
}

func TestStratifiedSpreadsAMinority(t *testing.T) {
	var tasks []releasedTask
	for range 9 {
		tasks = append(tasks, releasedTask{class: 0, members: 1})
	}
	for range 3 {
		tasks = append(tasks, releasedTask{class: 1, members: 1})
	}
	var classes []int
	for _, i := range stratified(tasks) {
		classes = append(classes, tasks[i].class)
	}
	if want := []int{0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0}; !slices.Equal(classes, want) {
		// Places 1/6, 3/6, 5/6 of the minority tie with those of the second, fifth and
		// eighth of the majority; the tie goes to the earlier task.
		t.Errorf("order %v, want %v", classes, want)
	}
}
