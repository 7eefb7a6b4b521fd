package store

import (
	"encoding/json"
	"math"

	"holdfast/router"
)

// decisionDetail is the stored form of a decision about a session.
type decisionDetail struct {
	Turn     int            `json:"turn"`
	Reason   string         `json:"reason"`
	Instance string         `json:"instance,omitempty"`
	Epoch    int64          `json:"epoch"`
	Numbers  decisionNumber `json:"numbers"`
}

// decisionNumber is router.Numbers as it stands in stored events. Zeros are left
// out, since most decisions are made from few of the numbers.
type decisionNumber struct {
	BaseCap               int     `json:"base_cap,omitempty"`
	Cap                   int     `json:"cap,omitempty"`
	Protected             int     `json:"protected,omitempty"`
	Pending               int     `json:"pending,omitempty"`
	ClassCap              int     `json:"class_cap,omitempty"`
	ClassProtected        int     `json:"class_protected,omitempty"`
	ClassQuotaBlocks      int64   `json:"class_quota_blocks,omitempty"`
	ReservedBlocks        int64   `json:"reserved_blocks,omitempty"`
	ReserveBlocks         int64   `json:"reserve_blocks,omitempty"`
	BudgetBlocks          int64   `json:"budget_blocks,omitempty"`
	KBarBlocks            float64 `json:"k_bar_blocks,omitempty"`
	TBarSeconds           float64 `json:"t_bar_seconds,omitempty"`
	Demand                int     `json:"demand,omitempty"`
	PromptTokens          int64   `json:"prompt_tokens,omitempty"`
	PredictedCachedTokens int64   `json:"predicted_cached_tokens,omitempty"`
	CostSeconds           float64 `json:"cost_seconds,omitempty"`
	QueueSeconds          float64 `json:"queue_seconds,omitempty"`
	RunnerUp              string  `json:"runner_up,omitempty"`
	RunnerUpCostSeconds   float64 `json:"runner_up_cost_seconds,omitempty"`
	HeldSeconds           float64 `json:"held_seconds,omitempty"`
	AheadInOrder          int     `json:"ahead_in_order,omitempty"`
}

func numbersOf(n *router.Numbers) decisionNumber {
	return decisionNumber{
		BaseCap: n.BaseCap, Cap: n.Cap, Protected: n.Protected, Pending: n.Pending,
		ClassCap: n.ClassCap, ClassProtected: n.ClassProtected, ClassQuotaBlocks: n.ClassQuotaBlocks,
		ReservedBlocks: n.ReservedBlocks, ReserveBlocks: n.ReserveBlocks, BudgetBlocks: n.BudgetBlocks,
		KBarBlocks: finite(n.KBarBlocks), TBarSeconds: finite(n.TBarSeconds), Demand: n.Demand,
		PromptTokens: n.PromptTokens, PredictedCachedTokens: n.PredictedCachedTokens,
		CostSeconds: finite(n.CostSeconds), QueueSeconds: finite(n.QueueSeconds),
		RunnerUp: string(n.RunnerUp), RunnerUpCostSeconds: finite(n.RunnerUpCostSeconds),
		HeldSeconds: float64(n.HeldNanos) / 1e9, AheadInOrder: n.AheadInOrder,
	}
}

// finite leaves out what JSON cannot carry, such as the cost at an instance whose
// prefill rate is not known: a decision must be recorded whatever its numbers.
func finite(x float64) float64 {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return 0
	}
	return x
}

// EncodeNumbers writes a decision's numbers as they stand in stored events.
func EncodeNumbers(n *router.Numbers) ([]byte, error) { return json.Marshal(numbersOf(n)) }
