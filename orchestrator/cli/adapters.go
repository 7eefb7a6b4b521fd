package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"

	"holdfast/api"
	"holdfast/orchestrator/config"
	"holdfast/orchestrator/engine"
	"holdfast/orchestrator/pool"
	"holdfast/orchestrator/service"
	"holdfast/router"
	"holdfast/workflows"
)

// discoverTimeout bounds the questions to an engine that is being registered.
const discoverTimeout = 10 * time.Second

// prober asks engines what they are, for the API.
type prober struct{}

// Discover connects to an engine and returns its figures.
func (prober) Discover(ctx context.Context, kind, url string) (api.EngineInfo, error) {
	client, err := engine.NewClient(kind, url)
	if err != nil {
		return api.EngineInfo{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, discoverTimeout)
	defer cancel()
	info, err := client.Discover(ctx)
	if err != nil {
		return api.EngineInfo{}, err
	}
	return api.EngineInfo{
		CapacityBlocks: info.CapacityBlocks, BlockTokens: info.BlockTokens, MaxContextTokens: info.MaxContextTokens,
		MaxRunning: info.MaxRunning, PrefillTokensPerSecond: info.PrefillTokensPerSecond,
	}, nil
}

// harness makes model calls for the API.
type harness struct{ service *service.Service }

// HarnessTurn makes the call, or answers api.ErrNotOwner.
func (h harness) HarnessTurn(ctx context.Context, session uuid.UUID, call workflows.HarnessCall, progress workflows.HarnessProgress) (workflows.HarnessTurn, error) {
	made, err := h.service.HarnessTurn(ctx, session, call, progress)
	if errors.Is(err, pool.ErrNotOwner) {
		err = api.ErrNotOwner
	}
	return made, err
}

// apiTokens turns ROLE:TOKEN into what the API accepts. The configuration has
// checked their form.
func apiTokens(tokens []string) []api.Token {
	parsed := make([]api.Token, 0, len(tokens))
	for i, t := range tokens {
		role, secret, _ := strings.Cut(t, ":")
		parsed = append(parsed, api.Token{Name: fmt.Sprintf("%s-%d", role, i+1), Role: api.Role(role), Secret: secret})
	}
	return parsed
}

// policies are the admission policies by the name they have in the configuration.
var policies = map[string]func() router.Config{
	"holdfast":          router.DefaultConfig,
	"misa-t":            router.MISAT,
	"misa-t-paper":      router.MISATPaper,
	"misa":              router.MISA,
	"session-admission": router.SessionAdmission,
	"placement-only":    router.PlacementOnly,
}

// routerConfig is the core's configuration for a policy by name; the configuration
// has checked the name.
func routerConfig(cfg config.Router) router.Config { return policies[cfg.Policy]() }
