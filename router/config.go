package router

import (
	"errors"
	"fmt"

	"holdfast/router/forecast"
)

// AdmissionMode is the closed set of admission rules, in the paper's order of
// ablation.
type AdmissionMode uint8

// Admission modes.
const (
	// AdmitAll places every turn at once, wherever it is cheapest: placement only.
	AdmitAll AdmissionMode = iota + 1
	// AdmitSessions bounds protected sessions by one cap for all classes.
	AdmitSessions
	// AdmitSpace adds class caps by footprint (MISA).
	AdmitSpace
	// AdmitSpaceTime weighs them by residency as well (MISA-T).
	AdmitSpaceTime
)

// String returns the mode's name as it stands in configuration.
func (m AdmissionMode) String() string {
	switch m {
	case AdmitAll:
		return "all"
	case AdmitSessions:
		return "sessions"
	case AdmitSpace:
		return "space"
	case AdmitSpaceTime:
		return "space_time"
	}
	return fmt.Sprintf("AdmissionMode(%d)", uint8(m))
}

// ReserveMode says how many blocks of the protected budget an admitted session
// reserves.
type ReserveMode uint8

// Reserve modes.
const (
	// ReserveMax reserves max(k_s, k-bar_b), as MISA-T defines k~_s.
	ReserveMax ReserveMode = iota + 1
	// ReserveMean reserves k-bar_b for every session, whatever it holds now.
	ReserveMean
	// ReserveCurrent reserves k_s once snapshots show it, and max(k_s, k-bar_b) for
	// sessions that ask, are pending, or are at an instance that is not seen fresh.
	ReserveCurrent
	// ReserveAhead reserves what is expected of each session over the horizon of
	// Forecast; the sum's peak must fit.
	ReserveAhead
	// ReserveNone leaves the cap on sessions as the only bound.
	ReserveNone
)

// String returns the mode's name as it stands in configuration.
func (m ReserveMode) String() string {
	switch m {
	case ReserveMax:
		return "max"
	case ReserveMean:
		return "mean"
	case ReserveCurrent:
		return "current"
	case ReserveAhead:
		return "ahead"
	case ReserveNone:
		return "none"
	}
	return fmt.Sprintf("ReserveMode(%d)", uint8(m))
}

// Config holds every parameter of the core. DefaultConfig and the other variants
// give complete ones; New validates.
type Config struct {
	Admission AdmissionMode
	Reserve   ReserveMode
	// ProtectedShare of an instance's capacity is its protected budget C_w.
	ProtectedShare float64
	// StaticCap, if positive, fixes every instance's cap in sessions: neither
	// lengths nor pressure move it.
	StaticCap int
	// Borrow lets a class exceed its quota while no session within its own
	// quota wants the place, and hands quota that demand cannot fill to others.
	Borrow bool
	// ClassFloorShare of the budget is each class's least quota, as far as it has
	// demand for it.
	ClassFloorShare float64

	// ReadmitBelowShare: a session loses its protection when less than this share
	// of its prefix is still cached as its next turn arrives. 0 never takes
	// protection away (the paper's rule).
	ReadmitBelowShare float64
	// ReadmitBoostSeconds is how much earlier than its arrival a re-admission
	// stands in the order. It bounds by how much new sessions can be overtaken.
	ReadmitBoostSeconds float64
	// EventLagSeconds is how late an engine's block events may be: context younger
	// than that is not judged as evicted.
	EventLagSeconds float64

	// Placement chooses among the instances that admission lets pass.
	Placement Placement
	// PlacementSlackSeconds: instances whose cost exceeds the lowest by no more
	// than this count as equally cheap, and the least filled of them is taken.
	PlacementSlackSeconds float64
	// RerouteMarginSeconds: a protected session moves to another instance with
	// headroom when its turn would start earlier there by more than this. 0 never.
	RerouteMarginSeconds float64
	// AvoidSeconds is how long a turn keeps away from the instance that failed it.
	AvoidSeconds float64

	// SiblingMinTokens is the shared prompt from which members of a group wait for
	// the first one's prefill; SiblingWaitSeconds bounds that wait.
	SiblingMinTokens   int64
	SiblingWaitSeconds float64

	// A deadline nearer than DeadlineHorizonSeconds at arrival moves a session
	// forward within its class, by at most DeadlineBoostSeconds.
	DeadlineHorizonSeconds float64
	DeadlineBoostSeconds   float64

	Footprint FootprintConfig
	// Forecast is used with ReserveAhead.
	Forecast forecast.Config
	Caps     CapsConfig
	Pressure PressureConfig

	// DefaultClass is the class of sessions without a label.
	DefaultClass ClassID
	// MaxClasses bounds the number of classes; labels beyond it count as DefaultClass.
	MaxClasses int
	// PrefillTokensPerSecond is the prior of mu where an instance names none.
	PrefillTokensPerSecond float64
	// MaxIndexBlocks bounds the prefix index.
	MaxIndexBlocks int
	// MaxVersionLag is how many policy versions an instance may be behind the
	// newest and still take new sessions.
	MaxVersionLag int64
}

// FootprintConfig sets how footprints and residencies are estimated.
type FootprintConfig struct {
	// PriorTokens, PriorSeconds: what a session of a class without history grows
	// by and lives for; PriorSessions is the prior's weight.
	PriorTokens   float64
	PriorSeconds  float64
	PriorSessions float64
	// WindowSessions is the estimators' memory, in finished sessions per class.
	WindowSessions float64
	// CensoringAware counts running sessions as well; without it only finished
	// ones count, as in the paper.
	CensoringAware bool
	// FloorByLive keeps the cap's reference footprint at or above the mean of the
	// sessions that live at the instance now.
	FloorByLive bool
	// NeutralSessions: below so many finished sessions the residency of a class is
	// mixed with the one shared by all classes.
	NeutralSessions float64
}

// CapsConfig sets the slow loop: base caps and references.
type CapsConfig struct {
	PeriodSeconds float64
	// Margin multiplies C_w / reference. Above 1 the reservations, which follow what
	// sessions hold now, bind before the cap, which follows what they hold on average.
	Margin float64
	// RiseShare is the most a base cap grows in one period; it falls at once.
	RiseShare float64
}

// PressureConfig sets the fast loop: contraction and recovery of current caps.
type PressureConfig struct {
	Enabled bool
	// WindowSeconds is the length of one observation of the hit rate; a window
	// with less than MinTokens of reusable prompt is not judged.
	WindowSeconds float64
	MinTokens     int64
	// HitGap is the G_w from which a window counts as degraded.
	HitGap float64
	// ConfirmWindows degraded windows in a row confirm pressure.
	ConfirmWindows int
	// QueueShare: an engine's waiting queue of more than this share of its running
	// requests (and more than two) counts as pressure when it persists for
	// QueueSeconds.
	QueueShare   float64
	QueueSeconds float64
	// Confirmed pressure multiplies the cap by 1 - max(ContractShare, gap), at
	// most by 1 - MaxContractShare, no more than once in CooldownSeconds.
	// It never falls below MinCapShare of the base cap.
	ContractShare    float64
	MaxContractShare float64
	MinCapShare      float64
	CooldownSeconds  float64
	// RecoverShare of the base cap is given back every RecoverSeconds.
	RecoverShare   float64
	RecoverSeconds float64
}

// DefaultConfig is Holdfast's own policy, the product's default: one order for all
// classes, by arrival, with re-admissions ahead; caps and reservations that follow
// what sessions really hold. Of the variants compared in the simulator it completes
// most without bending the mixture; class quotas are computed and reported, and
// enforced by the other admission modes.
func DefaultConfig() Config {
	return Config{
		Admission:              AdmitSessions,
		Reserve:                ReserveAhead,
		ProtectedShare:         0.93,
		Borrow:                 true,
		ClassFloorShare:        0.10,
		ReadmitBelowShare:      0.9,
		ReadmitBoostSeconds:    3600,
		EventLagSeconds:        1,
		Placement:              LowestCost,
		PlacementSlackSeconds:  1,
		RerouteMarginSeconds:   5,
		AvoidSeconds:           30,
		SiblingMinTokens:       512,
		SiblingWaitSeconds:     30,
		DeadlineHorizonSeconds: 1800,
		DeadlineBoostSeconds:   600,
		Footprint: FootprintConfig{
			PriorTokens: 32768, PriorSeconds: 300, PriorSessions: 2, WindowSessions: 128,
			CensoringAware: true, NeutralSessions: 16,
		},
		Forecast: forecast.DefaultConfig(),
		Caps:     CapsConfig{PeriodSeconds: 10, Margin: 2, RiseShare: 0.03},
		Pressure: PressureConfig{
			Enabled: true, WindowSeconds: 10, MinTokens: 50_000, HitGap: 0.05, ConfirmWindows: 2,
			QueueShare: 0.1, QueueSeconds: 30,
			ContractShare: 0.05, MaxContractShare: 0.3, MinCapShare: 0.3, CooldownSeconds: 30,
			RecoverShare: 0.03, RecoverSeconds: 10,
		},
		DefaultClass:           "default",
		MaxClasses:             32,
		PrefillTokensPerSecond: 20_000,
		MaxIndexBlocks:         32 << 20,
	}
}

// MISAT is the paper's policy with re-admission of evicted continuations.
func MISAT() Config {
	c := DefaultConfig()
	c.Admission = AdmitSpaceTime
	c.Reserve = ReserveMax
	c.ReadmitBelowShare = 0.5
	c.ProtectedShare = 0.95
	c.Footprint.FloorByLive = true
	c.Caps.Margin = 1
	c.Borrow = false
	c.ClassFloorShare = 0
	c.PlacementSlackSeconds = 0
	c.RerouteMarginSeconds = 0
	return c
}

// MISATPaper is the paper's policy to the letter: protection is never lost.
func MISATPaper() Config {
	c := MISAT()
	c.ReadmitBelowShare = 0
	return c
}

// MISA is the paper's ablation with class caps by space alone.
func MISA() Config {
	c := MISAT()
	c.Admission = AdmitSpace
	return c
}

// SessionAdmission is the paper's ablation without classes.
func SessionAdmission() Config {
	c := MISAT()
	c.Admission = AdmitSessions
	return c
}

// MISATBorrow is MISA-T with a floor for every class and with borrowing: quotas
// bind only while a class within its own wants the place.
func MISATBorrow() Config {
	c := DefaultConfig()
	c.Admission = AdmitSpaceTime
	return c
}

// PlacementOnly admits every turn at once.
func PlacementOnly() Config {
	c := MISAT()
	c.Admission = AdmitAll
	c.Reserve = ReserveNone
	c.ReadmitBelowShare = 0
	c.Pressure.Enabled = false
	return c
}

// Validate reports every field that cannot work.
func (c *Config) Validate() error {
	var errs []error
	check := func(ok bool, field string, value any) {
		if !ok {
			errs = append(errs, fmt.Errorf("router config: %s = %v is out of range", field, value))
		}
	}
	share := func(field string, v float64) { check(v >= 0 && v <= 1, field, v) }
	notNegative := func(field string, v float64) { check(v >= 0 && v < 1e12, field, v) }
	positive := func(field string, v float64) { check(v > 0 && v < 1e12, field, v) }

	check(c.Admission >= AdmitAll && c.Admission <= AdmitSpaceTime, "Admission", c.Admission)
	check(c.Reserve >= ReserveMax && c.Reserve <= ReserveNone, "Reserve", c.Reserve)
	check(c.ProtectedShare > 0 && c.ProtectedShare <= 10, "ProtectedShare", c.ProtectedShare)
	check(c.StaticCap >= 0, "StaticCap", c.StaticCap)
	share("ClassFloorShare", c.ClassFloorShare)
	share("ReadmitBelowShare", c.ReadmitBelowShare)
	notNegative("ReadmitBoostSeconds", c.ReadmitBoostSeconds)
	notNegative("EventLagSeconds", c.EventLagSeconds)
	check(c.Placement.Choose != nil, "Placement", c.Placement.Name)
	notNegative("PlacementSlackSeconds", c.PlacementSlackSeconds)
	notNegative("RerouteMarginSeconds", c.RerouteMarginSeconds)
	notNegative("AvoidSeconds", c.AvoidSeconds)
	check(c.SiblingMinTokens >= 0, "SiblingMinTokens", c.SiblingMinTokens)
	notNegative("SiblingWaitSeconds", c.SiblingWaitSeconds)
	notNegative("DeadlineHorizonSeconds", c.DeadlineHorizonSeconds)
	notNegative("DeadlineBoostSeconds", c.DeadlineBoostSeconds)
	f := &c.Footprint
	positive("Footprint.PriorTokens", f.PriorTokens)
	positive("Footprint.PriorSeconds", f.PriorSeconds)
	positive("Footprint.PriorSessions", f.PriorSessions)
	check(f.WindowSessions >= 2 && f.WindowSessions < 1e9, "Footprint.WindowSessions", f.WindowSessions)
	notNegative("Footprint.NeutralSessions", f.NeutralSessions)
	if c.Reserve == ReserveAhead {
		errs = append(errs, c.Forecast.Validate())
	}
	positive("Caps.PeriodSeconds", c.Caps.PeriodSeconds)
	check(c.Caps.Margin > 0 && c.Caps.Margin <= 10, "Caps.Margin", c.Caps.Margin)
	check(c.Caps.RiseShare > 0, "Caps.RiseShare", c.Caps.RiseShare)
	p := &c.Pressure
	positive("Pressure.WindowSeconds", p.WindowSeconds)
	check(p.MinTokens >= 0, "Pressure.MinTokens", p.MinTokens)
	share("Pressure.HitGap", p.HitGap)
	check(p.ConfirmWindows >= 1, "Pressure.ConfirmWindows", p.ConfirmWindows)
	notNegative("Pressure.QueueShare", p.QueueShare)
	positive("Pressure.QueueSeconds", p.QueueSeconds)
	share("Pressure.ContractShare", p.ContractShare)
	share("Pressure.MaxContractShare", p.MaxContractShare)
	share("Pressure.MinCapShare", p.MinCapShare)
	notNegative("Pressure.CooldownSeconds", p.CooldownSeconds)
	check(p.RecoverShare > 0, "Pressure.RecoverShare", p.RecoverShare)
	positive("Pressure.RecoverSeconds", p.RecoverSeconds)
	check(c.DefaultClass != "", "DefaultClass", c.DefaultClass)
	check(c.MaxClasses >= 1 && c.MaxClasses <= 256, "MaxClasses", c.MaxClasses)
	positive("PrefillTokensPerSecond", c.PrefillTokensPerSecond)
	check(c.MaxIndexBlocks > 0, "MaxIndexBlocks", c.MaxIndexBlocks)
	check(c.MaxVersionLag >= 0, "MaxVersionLag", c.MaxVersionLag)
	return errors.Join(errs...)
}

// nanos converts a configured length of time.
func nanos(seconds float64) Nanos { return Nanos(seconds * 1e9) }

// seconds converts a length of router time.
func seconds(n Nanos) float64 { return float64(n) / 1e9 }
