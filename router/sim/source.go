package sim

import (
	"errors"
	"fmt"

	"holdfast/router/sim/workload"
)

// ClassShare is one class of the trainer's target mixture.
type ClassShare struct {
	Name string
	// Share is rho_b; the shares of all classes sum to 1.
	Share float64
}

// Task is one prompt as the trainer releases it, with all rollouts of it.
type Task struct {
	// Class is an index into the source's classes.
	Class int
	// ClassSharedTokens is the leading part of the prompt that every session of
	// the class has (a system prompt). Members share the whole prompt.
	ClassSharedTokens int
	Members           []workload.Session
}

// Source is a stream of tasks in the order in which the trainer releases them.
type Source interface {
	Classes() []ClassShare
	// Task returns task n, counted from 0; equal numbers give equal tasks. It is
	// asked for them in order.
	Task(n int64) Task
}

// Composed draws tasks from class distributions, in stratified order: each next
// task is of the class that lags furthest behind its share.
type Composed struct {
	Seed    uint64
	Mixture []ComposedClass
	// GroupSize is the number of rollouts of each task.
	GroupSize int
	Drift     workload.Drift
	// From sample ShiftFrom on, if positive, Shift multiplies what is drawn.
	ShiftFrom int64
	Shift     workload.Factors
}

// ComposedClass is a class with its share of the samples.
type ComposedClass struct {
	workload.Class
	Share float64
	// Recorded, if any, are replayed one after the other instead of drawing: all
	// members of a task replay the same numbers. Drift does not change them.
	Recorded []workload.Session
}

// Source validates the composition and returns its stream.
func (c Composed) Source() (Source, error) {
	if c.GroupSize < 1 {
		return nil, fmt.Errorf("composing a workload: group size %d is below 1", c.GroupSize)
	}
	if len(c.Mixture) == 0 {
		return nil, errors.New("composing a workload: no class")
	}
	var sum float64
	for _, class := range c.Mixture {
		if class.Share <= 0 {
			return nil, fmt.Errorf("composing a workload: class %s has share %v", class.Name, class.Share)
		}
		sum += class.Share
	}
	s := &composedSource{Composed: c, released: make([]float64, len(c.Mixture))}
	for _, class := range c.Mixture {
		s.classes = append(s.classes, ClassShare{Name: class.Name, Share: class.Share / sum})
	}
	return s, nil
}

type composedSource struct {
	Composed
	classes  []ClassShare
	released []float64
	order    []uint8
	// ordinals number the tasks of each class.
	ordinals []int32
}

func (s *composedSource) Classes() []ClassShare { return s.classes }

func (s *composedSource) Task(n int64) Task {
	for int64(len(s.order)) <= n {
		s.extendOrder()
	}
	b := int(s.order[n])
	class := s.Mixture[b].Class
	sample := n * int64(s.GroupSize)
	factors := s.Drift.At(sample)
	if s.ShiftFrom > 0 && sample >= s.ShiftFrom {
		factors.Lengths *= s.Shift.Lengths
		factors.Gaps *= s.Shift.Gaps
	}
	if recorded := s.Mixture[b].Recorded; len(recorded) > 0 {
		return recordedTask(b, recorded[int(s.ordinals[n])%len(recorded)], s.GroupSize)
	}
	return Task{
		Class:             b,
		ClassSharedTokens: class.SharedTokens,
		Members:           class.SampleGroup(workload.Source(s.Seed, class.Name, n), s.GroupSize, factors),
	}
}

// recordedTask gives every member of a task the same recorded session.
func recordedTask(class int, session workload.Session, members int) Task {
	task := Task{Class: class, ClassSharedTokens: session.SharedTokens}
	if members > 1 {
		session.SharedTokens = session.PromptTokens
	}
	for range members {
		task.Members = append(task.Members, session)
	}
	return task
}

// extendOrder appends the class with the largest deficit; the first of equals.
func (s *composedSource) extendOrder() {
	total := float64(len(s.order) + 1)
	best, bestDeficit := 0, 0.0
	for b, class := range s.classes {
		if deficit := class.Share*total - s.released[b]; deficit > bestDeficit {
			best, bestDeficit = b, deficit
		}
	}
	s.ordinals = append(s.ordinals, int32(s.released[best]))
	s.released[best]++
	s.order = append(s.order, uint8(best))
}
