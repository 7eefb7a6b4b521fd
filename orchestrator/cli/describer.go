package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"holdfast/api"
	"holdfast/api/wire"
	"holdfast/orchestrator/fleet"
	"holdfast/orchestrator/kvevents"
	"holdfast/orchestrator/pool"
	"holdfast/orchestrator/service"
	"holdfast/router"
	"holdfast/store"
)

// describer shows the router's state through the API.
type describer struct {
	service *service.Service
	store   *store.Store
}

// Describe returns what the pool's router knows and why it decided as it did, or
// api.ErrNotOwner.
func (d describer) Describe(ctx context.Context, poolName string) (wire.RouterView, error) {
	view, err := d.service.View(ctx, poolName)
	if errors.Is(err, pool.ErrNotOwner) {
		return wire.RouterView{}, api.ErrNotOwner
	}
	if err != nil {
		return wire.RouterView{}, err
	}
	shares, err := d.shares(ctx, poolName)
	if err != nil {
		return wire.RouterView{}, err
	}
	shown := wire.RouterView{
		Pool: poolName, At: time.Unix(0, view.Report.At).UTC(), Epoch: view.Epoch, HeldTotal: view.HeldTotal, Text: view.Text,
		Instances: []wire.RouterInstance{}, Classes: []wire.RouterClass{}, Held: []wire.RouterHeld{}, Recent: []wire.RouterDecision{},
	}
	blockTokens, err := d.blockTokens(ctx, poolName)
	if err != nil {
		return wire.RouterView{}, err
	}
	for _, c := range view.Report.Classes {
		shown.Classes = append(shown.Classes, wire.RouterClass{
			Class: string(c.Class), Share: shares[string(c.Class)], MeanBlocks: float64(c.KBarTokens) / blockTokens, ResidencySeconds: c.TBarSeconds,
			Sessions: c.Active + c.Pending + c.Held + c.Unplaced, Held: c.Held,
		})
	}
	for i := range view.Report.Instances {
		instance := shownInstance(&view.Report.Instances[i])
		for k := range view.Instances {
			if status := &view.Instances[k]; string(status.Instance) == instance.ID {
				instance.Receipts, instance.Index = shownReceipts(status.Receipts), shownIndex(status.Events)
			}
		}
		shown.Instances = append(shown.Instances, instance)
	}
	for _, h := range view.Held {
		shown.Held = append(shown.Held, wire.RouterHeld{
			Session: uuid.UUID(h.Session), Class: string(h.Class), Turn: h.Turn, PromptTokens: h.Numbers.PromptTokens,
			HeldSeconds: float64(h.Numbers.HeldNanos) / 1e9, Reason: h.Reason.String(),
		})
	}
	for i := range view.Recent {
		decision, err := shownDecision(&view.Recent[i])
		if err != nil {
			return wire.RouterView{}, err
		}
		shown.Recent = append(shown.Recent, decision)
	}
	return shown, nil
}

// shares are the contract's rho by class, of the pool's active run.
func (d describer) shares(ctx context.Context, poolName string) (map[string]float64, error) {
	runs, err := d.store.Runs(ctx, store.RunQuery{Pool: poolName, State: store.RunActive, Limit: 1})
	if err != nil {
		return nil, err
	}
	shares := map[string]float64{}
	for _, run := range runs {
		for _, c := range run.Contract.Contract.Classes {
			shares[c.Class] = c.Share
		}
	}
	return shares, nil
}

// blockTokens is the block size of the pool's instances, in tokens; 1 while there
// is none, so that footprints then read as tokens.
func (d describer) blockTokens(ctx context.Context, poolName string) (float64, error) {
	instances, err := d.store.Instances(ctx, poolName)
	if err != nil {
		return 0, err
	}
	if len(instances) == 0 {
		return 1, nil
	}
	return float64(instances[0].BlockTokens), nil
}

func shownInstance(in *router.InstanceReport) wire.RouterInstance {
	shown := wire.RouterInstance{
		ID: string(in.Instance), Draining: in.Draining, Observability: in.Observability.String(), PolicyVersion: in.PolicyVersion,
		BaseCap: in.BaseCap, Cap: in.Cap, Protected: in.Protected, Pending: in.Pending,
		CapacityBlocks: in.BudgetBlocks, ReservedBlocks: in.ReservedBlocks, Quotas: []wire.RouterQuota{},
	}
	for _, c := range in.Classes {
		shown.Quotas = append(shown.Quotas, wire.RouterQuota{
			Class: string(c.Class), QuotaBlocks: c.QuotaBlocks, Cap: int(c.Cap), Sessions: c.Protected,
		})
	}
	return shown
}

func shownReceipts(r fleet.Receipts) *wire.Receipts {
	return &wire.Receipts{
		Turns: r.Turns, PredictedTokens: r.PredictedTokens, CachedTokens: r.CachedTokens, ErrorTokens: r.AbsoluteErrorTokens, Alarm: r.Alarm,
	}
}

func shownIndex(h *kvevents.Health) *wire.IndexHealth {
	if h == nil {
		return nil
	}
	shown := &wire.IndexHealth{
		Trusted: h.Trusted, Reason: h.Reason, Alarm: h.Alarm, Blocks: h.OwnHashes, Events: h.Events, Gaps: h.Gaps,
		Replays: h.Replays, Resyncs: h.Resyncs, DecodeErrors: h.DecodeErrors,
	}
	if !h.LastEventAt.IsZero() {
		at := h.LastEventAt.UTC()
		shown.LastEventAt = &at
	}
	return shown
}

func shownDecision(d *router.Decision) (wire.RouterDecision, error) {
	shown := wire.RouterDecision{
		At: time.Unix(0, d.At).UTC(), Kind: d.Kind.String(), Reason: d.Reason.String(), Turn: d.Turn, Class: string(d.Class), Instance: string(d.Instance),
	}
	if d.Session != (router.SessionID{}) {
		id := uuid.UUID(d.Session)
		shown.Session = &id
	}
	text, err := store.EncodeNumbers(&d.Numbers)
	if err != nil {
		return shown, fmt.Errorf("encoding a decision's numbers: %w", err)
	}
	if err := json.Unmarshal(text, &shown.Numbers); err != nil {
		return shown, fmt.Errorf("encoding a decision's numbers: %w", err)
	}
	return shown, nil
}
