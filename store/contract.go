package store

import (
	"fmt"
	"math"
	"regexp"
	"time"
)

// Limits of a contract.
const (
	// MaxClasses bounds the classes of one contract.
	MaxClasses = 64
	// MaxConcurrency bounds the sessions of a run that are dispatched at a time.
	MaxConcurrency = 100_000
	// MaxStalenessBound bounds the staleness bound, in policy versions.
	MaxStalenessBound = 10_000
	// MaxUndeliveredLimit bounds the limit of undelivered samples.
	MaxUndeliveredLimit = 100_000_000
	// MaxRestarts bounds a contract's own bound on restarts.
	MaxRestarts = 100
	// MaxBudgetSeconds bounds a freshness budget.
	MaxBudgetSeconds = 30 * 86_400.0
	// ShareTolerance is how far the sum of the shares may be from 1.
	ShareTolerance = 0.005
)

// defaultRestarts is how often a session is begun again unless the contract says.
const defaultRestarts = 2

var classPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$`)

// GroupPolicy says what happens to a group of which a member is unusable (stale or
// failed; a cancellation is a wish and triggers nothing) and no spare member can
// stand in for it.
type GroupPolicy string

const (
	// GroupPartial delivers the members that are usable.
	GroupPartial GroupPolicy = "partial"
	// GroupRefill releases another member in its place.
	GroupRefill GroupPolicy = "refill"
	// GroupEnd cancels the other members.
	GroupEnd GroupPolicy = "end"
)

// StalePolicy says what happens to a session under way that new weights make older
// than the staleness bound.
type StalePolicy string

const (
	// StaleFinish lets it go on; its sample tells its staleness.
	StaleFinish StalePolicy = "finish"
	// StaleEnd ends it with status stale.
	StaleEnd StalePolicy = "end"
	// StaleRestart begins it again from its prompt, at most MaxRestarts times; after
	// that, and for a harness's session, it is as StaleEnd.
	StaleRestart StalePolicy = "restart"
)

// ClassShare is the target share of one class, rho_b, as a fraction.
type ClassShare struct {
	Class string  `json:"class"`
	Share float64 `json:"share"`
	// FreshnessBudgetSeconds is the class's own budget; 0 means the contract's.
	FreshnessBudgetSeconds float64 `json:"freshness_budget_seconds,omitempty"`
}

// Contract is what a trainer asks of a run: the mixture, and how much of it may
// be under way.
type Contract struct {
	Classes []ClassShare `json:"classes"`
	// MaxConcurrency is the number of sessions dispatched and not yet ended.
	MaxConcurrency int `json:"max_concurrency"`
	// StalenessBound is eta: how many policy versions a sample may lag behind the
	// pool's; nil means unbounded.
	StalenessBound *int        `json:"staleness_bound,omitempty"`
	GroupPolicy    GroupPolicy `json:"group_policy,omitempty"`
	// GroupRefills bounds what GroupRefill releases for one group; nil means as many
	// as the group's size.
	GroupRefills *int `json:"group_refills,omitempty"`
	// SpareMembers are released with every group of two or more beyond its size; once
	// as many members as its size are usable, the rest is cancelled.
	SpareMembers int `json:"spare_members,omitempty"`
	// StalePolicy is empty for StaleFinish.
	StalePolicy StalePolicy `json:"stale_policy,omitempty"`
	// MaxRestarts bounds what StaleRestart does to one session; nil means 2.
	MaxRestarts *int `json:"max_restarts,omitempty"`
	// FreshnessBudgetSeconds is how long a sample may take from release to end; it is
	// measured against and enforces nothing. 0 means none.
	FreshnessBudgetSeconds float64 `json:"freshness_budget_seconds,omitempty"`
	// UndeliveredLimit bounds the ended samples that the slowest consumer has not
	// acknowledged: at the limit no queued session is dispatched; see BackPressure. nil
	// means unbounded.
	UndeliveredLimit *int `json:"undelivered_limit,omitempty"`
}

// ContractVersion is one version of a run's contract; versions count from 1.
type ContractVersion struct {
	Version int
	// Contract has shares that sum to 1.
	Contract Contract
	// Given are the shares as the trainer wrote them.
	Given     []ClassShare
	CreatedAt time.Time
}

// Normalise checks the contract and returns a copy whose shares sum to 1. A sum
// within ShareTolerance of 1 is a rounding of the trainer's and is divided out;
// any other sum is refused with its difference. Errors are *FieldError.
func (c Contract) Normalise() (Contract, error) {
	sum, err := c.checkClasses()
	if err != nil {
		return Contract{}, err
	}
	if c.MaxConcurrency < 1 || c.MaxConcurrency > MaxConcurrency {
		return Contract{}, &FieldError{Path: "max_concurrency", Problem: fmt.Sprintf("must be between 1 and %d, is %d", MaxConcurrency, c.MaxConcurrency)}
	}
	if c.StalenessBound != nil && (*c.StalenessBound < 0 || *c.StalenessBound > MaxStalenessBound) {
		return Contract{}, &FieldError{Path: "staleness_bound", Problem: fmt.Sprintf("must be between 0 and %d, is %d", MaxStalenessBound, *c.StalenessBound)}
	}
	if c.UndeliveredLimit != nil && (*c.UndeliveredLimit < 1 || *c.UndeliveredLimit > MaxUndeliveredLimit) {
		return Contract{}, &FieldError{Path: "undelivered_limit", Problem: fmt.Sprintf("must be between 1 and %d, is %d", MaxUndeliveredLimit, *c.UndeliveredLimit)}
	}
	if err := c.normaliseGroups(); err != nil {
		return Contract{}, err
	}
	if err := c.normaliseStaleness(); err != nil {
		return Contract{}, err
	}
	classes := make([]ClassShare, len(c.Classes))
	for i, given := range c.Classes {
		classes[i] = ClassShare{Class: given.Class, Share: given.Share / sum, FreshnessBudgetSeconds: given.FreshnessBudgetSeconds}
	}
	c.Classes = classes
	return c, nil
}

func (c *Contract) normaliseStaleness() error {
	switch c.StalePolicy {
	case "":
		c.StalePolicy = StaleFinish
	case StaleFinish, StaleEnd, StaleRestart:
	default:
		return &FieldError{Path: "stale_policy", Problem: fmt.Sprintf("must be finish, end or restart, is %q", c.StalePolicy)}
	}
	switch {
	case c.StalePolicy != StaleRestart && c.MaxRestarts != nil:
		return &FieldError{Path: "max_restarts", Problem: fmt.Sprintf("must be absent unless stale_policy is restart, which is %q", c.StalePolicy)}
	case c.StalePolicy == StaleRestart && c.MaxRestarts == nil:
		restarts := defaultRestarts
		c.MaxRestarts = &restarts
	case c.MaxRestarts != nil && (*c.MaxRestarts < 1 || *c.MaxRestarts > MaxRestarts):
		return &FieldError{Path: "max_restarts", Problem: fmt.Sprintf("must be between 1 and %d, is %d", MaxRestarts, *c.MaxRestarts)}
	}
	if err := checkBudget("freshness_budget_seconds", c.FreshnessBudgetSeconds); err != nil {
		return err
	}
	for i := range c.Classes {
		if err := checkBudget(fmt.Sprintf("classes[%d].freshness_budget_seconds", i), c.Classes[i].FreshnessBudgetSeconds); err != nil {
			return err
		}
	}
	return nil
}

func checkBudget(path string, seconds float64) error {
	if !(seconds >= 0 && seconds <= MaxBudgetSeconds) {
		return &FieldError{Path: path, Problem: fmt.Sprintf("must be between 0, for none, and %g, is %v", MaxBudgetSeconds, seconds)}
	}
	return nil
}

func (c *Contract) normaliseGroups() error {
	switch c.GroupPolicy {
	case "":
		c.GroupPolicy = GroupPartial
	case GroupPartial, GroupRefill, GroupEnd:
	default:
		return &FieldError{Path: "group_policy", Problem: fmt.Sprintf("must be partial, refill or end, is %q", c.GroupPolicy)}
	}
	if c.GroupRefills != nil {
		if c.GroupPolicy != GroupRefill {
			return &FieldError{Path: "group_refills", Problem: fmt.Sprintf("must be absent unless group_policy is refill, which is %q", c.GroupPolicy)}
		}
		if *c.GroupRefills < 0 || *c.GroupRefills > maxMembersBeyond {
			return &FieldError{Path: "group_refills", Problem: fmt.Sprintf("must be between 0 and %d, is %d", maxMembersBeyond, *c.GroupRefills)}
		}
	}
	if c.SpareMembers < 0 || c.SpareMembers > maxMembersBeyond {
		return &FieldError{Path: "spare_members", Problem: fmt.Sprintf("must be between 0 and %d, is %d", maxMembersBeyond, c.SpareMembers)}
	}
	return nil
}

// members is how many sessions are released for a group of that size.
func (c *Contract) members(size int) int {
	if size < 2 {
		return size
	}
	return size + c.SpareMembers
}

// refillsAllowed is how many may be released later, in place of unusable ones.
func (c *Contract) refillsAllowed(size int) int {
	switch {
	case c.GroupPolicy != GroupRefill:
		return 0
	case c.GroupRefills != nil:
		return *c.GroupRefills
	}
	return size
}

// checkClasses returns the sum of the shares.
func (c Contract) checkClasses() (float64, error) {
	if len(c.Classes) == 0 || len(c.Classes) > MaxClasses {
		return 0, &FieldError{Path: "classes", Problem: fmt.Sprintf("must hold 1 to %d classes, holds %d", MaxClasses, len(c.Classes))}
	}
	sum := 0.0
	seen := make(map[string]int, len(c.Classes))
	for i, given := range c.Classes {
		path := fmt.Sprintf("classes[%d]", i)
		if !classPattern.MatchString(given.Class) {
			return 0, &FieldError{Path: path + ".class", Problem: fmt.Sprintf("must be 1 to 64 letters, digits, dots, dashes or underscores, is %q", given.Class)}
		}
		if first, again := seen[given.Class]; again {
			return 0, &FieldError{Path: path + ".class", Problem: fmt.Sprintf("repeats %q of classes[%d]", given.Class, first)}
		}
		seen[given.Class] = i
		if math.IsNaN(given.Share) || given.Share < 0 || given.Share > 1+ShareTolerance {
			return 0, &FieldError{Path: path + ".share", Problem: fmt.Sprintf("must be between 0 and 1, is %v", given.Share)}
		}
		sum += given.Share
	}
	// A hair of slack lets 0.995 and 1.005 themselves pass whatever the rounding.
	if difference := sum - 1; math.Abs(difference) > ShareTolerance+1e-12 {
		return 0, &FieldError{Path: "classes", Problem: fmt.Sprintf("shares sum to %.6g, which is off 1 by %+.6g; at most %g is taken for rounding", sum, difference, ShareTolerance)}
	}
	return sum, nil
}

// ShareOf returns the share of a class, and whether the contract declares it.
func (c Contract) ShareOf(class string) (share float64, declared bool) {
	for _, candidate := range c.Classes {
		if candidate.Class == class {
			return candidate.Share, true
		}
	}
	return 0, false
}
