package store

import "sort"

// releasedTask is what the release of a batch must remember of a task.
type releasedTask struct {
	// class is an index into the run's classes.
	class int
	// size is what the task asked for; members includes those to spare.
	size, members int
	// promptTokens is the length of the context before the first turn.
	promptTokens int
	// deadlineSeconds after the release its members end as stale; 0 for never.
	deadlineSeconds float64
}

// stratified returns the order in which a batch's tasks are dispatched, so that
// every prefix of it holds the classes in the batch's own shares, as nearly as
// whole groups allow. A class's tasks keep their order; the k-th of n sessions of
// a class is placed at (k + 1/2) / n of the batch, a group at its middle.
func stratified(tasks []releasedTask) []int {
	sessionsOf := map[int]int64{}
	for _, t := range tasks {
		sessionsOf[t.class] += int64(t.members)
	}
	// place[i] is twice the sessions of the class before the middle of task i; over
	// twice the sessions of the class it is its place in the batch. Places are
	// compared as fractions, so that equal ones are equal.
	place := make([]int64, len(tasks))
	before := map[int]int64{}
	for i, t := range tasks {
		place[i] = 2*before[t.class] + int64(t.members)
		before[t.class] += int64(t.members)
	}
	order := make([]int, len(tasks))
	for i := range order {
		order[i] = i
	}
	sort.SliceStable(order, func(a, b int) bool {
		i, j := order[a], order[b]
		return place[i]*sessionsOf[tasks[j].class] < place[j]*sessionsOf[tasks[i].class]
	})
	return order
}
