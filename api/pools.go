package api

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"holdfast/api/wire"
	"holdfast/store"
)

type PoolPath struct {
	Pool string `path:"pool" maxLength:"64" doc:"Name of the pool."`
}

type InstancePath struct {
	PoolPath
	Instance string `path:"instance" maxLength:"128" doc:"Name of the instance in its pool."`
}

type poolListOutput struct{ Body wire.PoolList }

type policyOutput struct{ Body wire.Policy }

type putPolicyInput struct {
	PoolPath
	Body wire.NewPolicy
}

type registerInstanceInput struct {
	PoolPath
	Body wire.NewInstance
}

type instanceOutput struct{ Body wire.Instance }

type instanceListOutput struct{ Body wire.InstanceList }

type drainInput struct {
	InstancePath
	Body *wire.Drain `required:"false"`
}

type routerOutput struct{ Body wire.RouterView }

// probeTimeout bounds how long an engine may take to say what it is.
const probeTimeout = 10 * time.Second

func (s *Server) registerPools() {
	const tag = "pools"
	missing := []int{http.StatusNotFound}
	register(s, operation{
		id: "list-pools", method: http.MethodGet, path: "/pools", tag: tag,
		summary: "List pools with their policy version and the owner of their router", terms: terms{roles: anyone},
	}, s.listPools)
	register(s, operation{
		id: "get-policy", method: http.MethodGet, path: "/pools/{pool}/policy", tag: tag,
		summary: "Read the version of a pool's weights", terms: terms{roles: anyone}, problems: missing,
	}, s.getPolicy)
	register(s, operation{
		id: "put-policy", method: http.MethodPut, path: "/pools/{pool}/policy", tag: tag,
		summary:     "Tell that the pool's engines have new weights",
		description: "For trainers that change weights on their own. What is released from then on is released at the new version; sessions under way finish under theirs. A lower version than the current one is refused with 409.",
		terms:       terms{roles: trainers}, problems: append([]int{http.StatusNotFound, http.StatusConflict}, withBody...),
	}, s.putPolicy)
	register(s, operation{
		id: "register-instance", method: http.MethodPost, path: "/pools/{pool}/instances", tag: tag,
		summary:     "Register an engine, or announce a known one anew",
		description: "The engine is asked for its capacity first; one that does not answer is refused with 422 and nothing is stored. What it does not tell must be given.",
		terms:       terms{roles: caretakers}, problems: withBody,
	}, s.registerInstance)
	register(s, operation{
		id: "list-instances", method: http.MethodGet, path: "/pools/{pool}/instances", tag: tag,
		summary: "List a pool's instances", terms: terms{roles: anyone}, problems: missing,
	}, s.listInstances)
	register(s, operation{
		id: "heartbeat-instance", method: http.MethodPost, path: "/pools/{pool}/instances/{instance}/heartbeat", tag: tag, status: http.StatusNoContent,
		summary: "Renew an instance's time to live", terms: terms{roles: caretakers}, problems: missing,
	}, s.heartbeatInstance)
	register(s, operation{
		id: "drain-instance", method: http.MethodPost, path: "/pools/{pool}/instances/{instance}/drain", tag: tag, status: http.StatusNoContent,
		summary:     "Drain an instance, or end draining",
		description: "A draining instance takes no new sessions; those it has go on there.",
		terms:       terms{roles: caretakers}, problems: append(missing, withBody...),
	}, s.drainInstance)
	register(s, operation{
		id: "remove-instance", method: http.MethodDelete, path: "/pools/{pool}/instances/{instance}", tag: tag, status: http.StatusNoContent,
		summary:     "Take an instance out of its pool",
		description: "Its sessions go on elsewhere.",
		terms:       terms{roles: caretakers}, problems: missing,
	}, s.removeInstance)
	register(s, operation{
		id: "get-router", method: http.MethodGet, path: "/pools/{pool}/router", tag: tag,
		summary:     "Read what the router knows and why it decided as it did",
		description: "Answered by the process that runs the pool's router; others answer 503.",
		terms:       terms{roles: anyone}, problems: missing,
	}, s.getRouter)
}

func noPool(err error, pool string) error { return notFound(err, fmt.Sprintf("pool %q", pool)) }

func noInstance(err error, in *InstancePath) error {
	return notFound(err, fmt.Sprintf("instance %q in pool %q", in.Instance, in.Pool))
}

func (s *Server) listPools(ctx context.Context, _ *struct{}) (*poolListOutput, error) {
	pools, err := s.store.Pools(ctx)
	if err != nil {
		return nil, err
	}
	list := wire.PoolList{Pools: make([]wire.Pool, len(pools))}
	for i, pool := range pools {
		list.Pools[i] = wire.Pool{Name: pool.Name, PolicyVersion: pool.PolicyVersion, Owner: pool.Owner, Epoch: pool.Epoch}
	}
	return &poolListOutput{Body: list}, nil
}

func (s *Server) getPolicy(ctx context.Context, in *PoolPath) (*policyOutput, error) {
	version, err := s.store.PolicyVersion(ctx, in.Pool)
	if err != nil {
		return nil, noPool(err, in.Pool)
	}
	return &policyOutput{Body: wire.Policy{Pool: in.Pool, PolicyVersion: version}}, nil
}

func (s *Server) putPolicy(ctx context.Context, in *putPolicyInput) (*policyOutput, error) {
	if err := s.store.AdvancePolicyVersion(ctx, in.Pool, in.Body.PolicyVersion); err != nil {
		return nil, noPool(err, in.Pool)
	}
	return &policyOutput{Body: wire.Policy{Pool: in.Pool, PolicyVersion: in.Body.PolicyVersion}}, nil
}

func (s *Server) registerInstance(ctx context.Context, in *registerInstanceInput) (*instanceOutput, error) {
	if s.prober == nil {
		return nil, newProblem(http.StatusServiceUnavailable, kindUnavailable, "this process does not register engines")
	}
	if err := checkEngineURL(in.Body.URL); err != nil {
		return nil, err
	}
	probing, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	info, err := s.prober.Discover(probing, in.Body.Kind, in.Body.URL)
	if err != nil {
		return nil, noAnswer(in.Body.URL, err)
	}
	if err := completeInfo(&info, &in.Body); err != nil {
		return nil, err
	}
	instance, err := s.store.RegisterInstance(ctx, store.Instance{
		Pool: in.Pool, ID: in.Body.ID, URL: strings.TrimRight(in.Body.URL, "/"), Kind: in.Body.Kind,
		CapacityBlocks: info.CapacityBlocks, BlockTokens: info.BlockTokens, MaxContextTokens: info.MaxContextTokens,
		MaxRunning: info.MaxRunning, PrefillTokensPerSecond: info.PrefillTokensPerSecond, PolicyVersion: info.PolicyVersion,
		TTLSeconds: in.Body.TTLSeconds, KVEvents: storedKVEvents(in.Body.KVEvents), Ranks: in.Body.Ranks, Control: store.InstanceControl(in.Body.Control),
	})
	if err != nil {
		return nil, relocated(err, "pool", "path.pool")
	}
	return &instanceOutput{Body: wireInstance(&instance)}, nil
}

// completeInfo fills in what the engine does not tell of itself from what was given
// with its registration; the router can do without none of it.
func completeInfo(info *EngineInfo, given *wire.NewInstance) error {
	if info.CapacityBlocks <= 0 {
		info.CapacityBlocks = given.CapacityBlocks
	}
	if info.BlockTokens <= 0 {
		info.BlockTokens = given.BlockTokens
	}
	if info.MaxContextTokens <= 0 {
		info.MaxContextTokens = given.MaxContextTokens
	}
	switch {
	case info.CapacityBlocks <= 0:
		return invalid("body.capacity_blocks", "is required, since the engine does not tell the size of its KV cache")
	case info.BlockTokens <= 0:
		return invalid("body.block_tokens", "is required, since the engine does not tell the size of its blocks")
	case info.MaxContextTokens <= 0:
		return invalid("body.max_context_tokens", "is required, since the engine does not tell its context limit")
	}
	return nil
}

// checkEngineURL refuses what could not be called, before it is called.
func checkEngineURL(given string) error {
	parsed, err := url.Parse(given)
	if err != nil || (parsed.Scheme != "http" && parsed.Scheme != "https") || parsed.Host == "" {
		return invalid("body.url", fmt.Sprintf("must be an http or https URL with a host, is %q", shorten(given)))
	}
	if parsed.User != nil || parsed.RawQuery != "" || parsed.Fragment != "" {
		return invalid("body.url", "must have neither user, query nor fragment")
	}
	return nil
}

func noAnswer(engineURL string, err error) *problem {
	p := newProblem(http.StatusUnprocessableEntity, kindEngineNoAnswer, fmt.Sprintf("body.url: the engine at %s does not answer as one: %v", engineURL, err))
	p.Errors = []wire.ErrorDetail{{Location: "body.url", Message: err.Error(), Value: shorten(engineURL)}}
	return p
}

func (s *Server) listInstances(ctx context.Context, in *PoolPath) (*instanceListOutput, error) {
	instances, err := s.store.Instances(ctx, in.Pool)
	if err != nil {
		return nil, noPool(err, in.Pool)
	}
	list := wire.InstanceList{Pool: in.Pool, Instances: make([]wire.Instance, len(instances))}
	for i := range instances {
		list.Instances[i] = wireInstance(&instances[i])
	}
	return &instanceListOutput{Body: list}, nil
}

func (s *Server) heartbeatInstance(ctx context.Context, in *InstancePath) (*struct{}, error) {
	return nil, noInstance(s.store.HeartbeatInstance(ctx, in.Pool, in.Instance), in)
}

func (s *Server) drainInstance(ctx context.Context, in *drainInput) (*struct{}, error) {
	draining := in.Body == nil || in.Body.Draining == nil || *in.Body.Draining
	return nil, noInstance(s.store.DrainInstance(ctx, in.Pool, in.Instance, draining), &in.InstancePath)
}

func (s *Server) removeInstance(ctx context.Context, in *InstancePath) (*struct{}, error) {
	return nil, noInstance(s.store.RemoveInstance(ctx, in.Pool, in.Instance), in)
}

func (s *Server) getRouter(ctx context.Context, in *PoolPath) (*routerOutput, error) {
	if s.router == nil {
		return nil, ErrNotOwner
	}
	view, err := s.router.Describe(ctx, in.Pool)
	if err != nil {
		return nil, noPool(err, in.Pool)
	}
	return &routerOutput{Body: view}, nil
}

func wireInstance(instance *store.Instance) wire.Instance {
	return wire.Instance{
		Pool: instance.Pool, ID: instance.ID, URL: instance.URL, Kind: instance.Kind, State: string(instance.State), Expired: instance.Expired,
		CapacityBlocks: instance.CapacityBlocks, BlockTokens: instance.BlockTokens, MaxContextTokens: instance.MaxContextTokens,
		MaxRunning: instance.MaxRunning, PrefillTokensPerSecond: instance.PrefillTokensPerSecond, PolicyVersion: instance.PolicyVersion,
		TTLSeconds: instance.TTLSeconds, KVEvents: wireKVEvents(instance.KVEvents), Ranks: instance.Ranks, Control: string(instance.Control), CreatedAt: instance.CreatedAt.UTC(), SeenAt: instance.SeenAt.UTC(),
	}
}

func storedKVEvents(given *wire.KVEvents) store.KVEvents {
	if given == nil {
		return store.KVEvents{}
	}
	return store.KVEvents{Endpoint: given.Endpoint, Bind: given.Bind, ReplayEndpoint: given.ReplayEndpoint, Topic: given.Topic}
}

func wireKVEvents(stored store.KVEvents) *wire.KVEvents {
	if stored == (store.KVEvents{}) {
		return nil
	}
	return &wire.KVEvents{Endpoint: stored.Endpoint, Bind: stored.Bind, ReplayEndpoint: stored.ReplayEndpoint, Topic: stored.Topic}
}
