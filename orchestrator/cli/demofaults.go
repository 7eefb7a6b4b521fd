package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"holdfast/api/client"
	"holdfast/api/wire"
	"holdfast/orchestrator/config"
	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/engine/simulated/fault"
)

// The faults of the demo, by the share of the batch that has ended when they begin.
const (
	faultEventsLost    = 0.05
	faultStallSeconds  = 60
	faultCrashAt       = 0.15
	faultDownSeconds   = 3
	faultUpdateAt      = 0.5
	faultDemoEngines   = 3
	faultDemoTimeScale = 8
)

// FaultSummary is the result of a run with faults: the demo's, and what they cost.
type FaultSummary struct {
	Summary
	// Retries are model calls made again: all calls of a turn but the first.
	Retries int `json:"retries"`
	// Replaced counts moves of a session from one instance to another.
	Replaced int `json:"replaced"`
	// Resyncs counts how often an instance's part of the prefix index was dropped and built anew.
	Resyncs int `json:"resyncs"`
	// EventGaps were found in the sequences of KV events, and healed by a replay unless they led to a resync.
	EventGaps int `json:"event_gaps"`
	// TokensGenerated are in the samples; TokensRegenerated were generated again, because what
	// was generated first was lost.
	TokensGenerated   int64 `json:"tokens_generated"`
	TokensRegenerated int64 `json:"tokens_regenerated"`
	// Resumed counts generations that went on from what another call had generated.
	Resumed int `json:"resumed"`
	// PolicyVersions is the number of versions under which turns were generated.
	PolicyVersions int `json:"policy_versions"`
}

// disturbance does to the demo's engines what happens to real ones.
type disturbance struct {
	client *client.Client
	pool   string
	run    uuid.UUID
	out    io.Writer
	began  time.Time
}

// inject brings the faults on one after the other, each at its share of the batch.
func (d *disturbance) inject(ctx context.Context) error {
	list, err := d.client.Instances(ctx, d.pool)
	if err != nil {
		return err
	}
	engines := slices.DeleteFunc(list.Instances, func(in wire.Instance) bool { return in.Kind != engineKindSimulated })
	if len(engines) < faultDemoEngines {
		return fmt.Errorf("%d simulated engines, want at least %d for the faults", len(engines), faultDemoEngines)
	}
	lossy := fault.Settings{Events: fault.Events{Lost: faultEventsLost}}
	for i, in := range engines {
		lossy.Seed = uint64(i + 1)
		settings := lossy
		if i == 1 {
			settings.Metrics = fault.Metrics{Mode: fault.Hang, Seconds: faultStallSeconds}
		}
		if err := d.put(ctx, in.URL, settings); err != nil {
			return err
		}
	}
	d.say("%.0f %% of all KV events are lost from now on", 100*faultEventsLost)
	d.say("the metrics page of %s hangs for %d s", engines[1].ID, faultStallSeconds)
	if err := d.await(ctx, faultCrashAt); err != nil {
		return err
	}
	crash := lossy
	crash.Seed, crash.Crash = 1, &fault.Crash{DownSeconds: faultDownSeconds}
	if err := d.put(ctx, engines[0].URL, crash); err != nil {
		return err
	}
	d.say("%s crashed; it is back after %d s, with an empty cache", engines[0].ID, faultDownSeconds)
	if err := d.await(ctx, faultUpdateAt); err != nil {
		return err
	}
	return d.updateWeights(ctx)
}

// await returns once the given share of the run's sessions has ended.
func (d *disturbance) await(ctx context.Context, share float64) error {
	ticker := time.NewTicker(250 * time.Millisecond)
	defer ticker.Stop()
	for {
		backlog, err := d.client.Backlog(ctx, d.run)
		if err != nil {
			return err
		}
		if total := backlog.Total; total.Released > 0 && float64(total.Ended) >= share*float64(total.Released) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}

// put sets an engine's faults.
func (d *disturbance) put(ctx context.Context, engineURL string, settings fault.Settings) error {
	body, err := json.Marshal(settings)
	if err != nil {
		return fmt.Errorf("encoding faults: %w", err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPut, engineURL+"/simulated/faults", bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("setting faults: %w", err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return fmt.Errorf("setting faults: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 1_024))
		return fmt.Errorf("setting faults at %s: status %d: %s", engineURL, response.StatusCode, text)
	}
	return nil
}

func (d *disturbance) say(format string, args ...any) {
	fmt.Fprintf(d.out, "[%5.1f s] fault: %s\n", time.Since(d.began).Seconds(), fmt.Sprintf(format, args...))
}

// cost adds up what the faults cost, from the samples, their turns and the router.
func (d *disturbance) cost(ctx context.Context, samples []wire.Sample) (FaultSummary, error) {
	var s FaultSummary
	versions := map[int64]bool{}
	for i := range samples {
		sample := &samples[i]
		s.TokensGenerated += sample.Usage.OutputTokens
		s.TokensRegenerated += sample.Usage.TokensRegenerated
		s.Resumed += int(sample.Usage.Resumes)
		last := ""
		for after := -1; ; {
			page, err := d.client.Turns(ctx, sample.ID, after, 1_000)
			if err != nil {
				return s, err
			}
			for _, turn := range page.Turns {
				after = turn.Turn
				s.Retries += turn.Attempts - 1
				if last != "" && turn.Instance != last {
					s.Replaced++
				}
				last = turn.Instance
				versions[turn.PolicyVersion] = true
			}
			if page.Next == nil {
				break
			}
		}
	}
	s.PolicyVersions = len(versions)
	view, err := d.client.Router(ctx, d.pool)
	if err != nil {
		return s, err
	}
	for _, in := range view.Instances {
		if in.Index != nil {
			s.Resyncs += int(in.Index.Resyncs)
			s.EventGaps += int(in.Index.Gaps)
		}
	}
	return s, nil
}

// print shows what the faults cost.
func (s *FaultSummary) print(out io.Writer) {
	share := 0.0
	if s.TokensGenerated > 0 {
		share = 100 * float64(s.TokensRegenerated) / float64(s.TokensGenerated)
	}
	fmt.Fprintf(out, `
what the faults cost
  model calls made again           %d
  generations resumed              %d
  sessions moved                   %d times
  gaps in KV events                %d, healed by replay
  prefix index built anew          %d times
  tokens generated again           %s of %s (%.2f %%)
  policy versions in the samples   %d
`, s.Retries, s.Resumed, s.Replaced, s.EventGaps, s.Resyncs, thousands(s.TokensRegenerated), thousands(s.TokensGenerated), share, s.PolicyVersions)
}

// withFaults is the demo's configuration where faults are asked for and nobody
// says otherwise: one engine more, and slower, so that the stall ends before the run.
func withFaults(cmd *cobra.Command, cfg *config.Config) {
	if !cmd.Flags().Changed("engines") {
		cfg.Dev.Engines = faultDemoEngines
	}
	if !cmd.Flags().Changed("time-scale") {
		cfg.Dev.TimeScale = faultDemoTimeScale
	}
	if !cmd.Flags().Changed("data-dir") {
		cfg.Dev.DataDir = ".holdfast/demo-faults"
	}
}

// updateWeights takes the pool to its next policy version, as a trainer does.
func (d *disturbance) updateWeights(ctx context.Context) error {
	policy, err := d.client.Policy(ctx, d.pool)
	if err != nil {
		return err
	}
	version := policy.PolicyVersion + 1
	d.say("weights %d: generations under way are cut, engines pause", version)
	if _, err := d.client.BeginWeightUpdate(ctx, d.pool, wire.NewWeightUpdate{PolicyVersion: version, Mode: engine.PauseAbort.String()}); err != nil {
		return err
	}
	if _, err := d.client.AwaitWeightUpdate(ctx, d.pool, version, "paused"); err != nil {
		return err
	}
	if _, err := d.client.CommitWeightUpdate(ctx, d.pool, version, wire.CommitWeights{}); err != nil {
		return err
	}
	update, err := d.client.AwaitWeightUpdate(ctx, d.pool, version, "committed")
	if err != nil {
		return err
	}
	d.say("weights %d are in force on %d engines", version, len(update.Instances)-update.Gone)
	return nil
}
