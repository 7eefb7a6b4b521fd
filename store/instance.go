package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/url"
	"regexp"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

// InstanceState is the closed set of an instance's states.
type InstanceState string

// Instance states.
const (
	InstanceActive   InstanceState = "active"
	InstanceDraining InstanceState = "draining"
	InstanceRemoved  InstanceState = "removed"
)

// KVEvents is where an instance tells what its KV cache holds, as ZMQ endpoints
// such as tcp://10.0.0.7:5557. The zero value means that it does not.
type KVEvents struct {
	Endpoint string
	// Bind: Holdfast listens at Endpoint and the engine connects.
	Bind bool
	// ReplayEndpoint gives missed events again; empty if there is none.
	ReplayEndpoint string
	Topic          string
}

// InstanceControl is the closed set of who changes an instance's weights.
type InstanceControl string

// Who changes weights: Holdfast pauses, resets and resumes the engine, or only
// looks on while the trainer does.
const (
	ControlManage  InstanceControl = "manage"
	ControlObserve InstanceControl = "observe"
)

const (
	maxRanks      = 1_024
	maxTopicBytes = 256
)

const (
	maxInstanceURLBytes  = 1_024
	maxInstanceKindBytes = 64
)

var instancePattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$`)

// Instance is one inference engine of a pool.
type Instance struct {
	Pool string
	ID   string
	URL  string
	// Kind is the engine's protocol, such as vllm.
	Kind             string
	CapacityBlocks   int64
	BlockTokens      int
	MaxContextTokens int64
	// MaxRunning and PrefillTokensPerSecond are 0 if unknown.
	MaxRunning             int
	PrefillTokensPerSecond float64
	// PolicyVersion is that of its weights. Registering with 0 means the pool's
	// current one: an engine that is announced has the weights that are in force.
	PolicyVersion int64
	// TTLSeconds after the last heartbeat the instance counts as gone; 0 means never.
	TTLSeconds float64
	KVEvents   KVEvents
	// Ranks is the number of data-parallel ranks behind the instance, at least 1.
	Ranks int
	// Control is who changes the instance's weights; empty means ControlManage.
	Control InstanceControl
	// The fields below are the store's.
	State     InstanceState
	Expired   bool
	CreatedAt time.Time
	SeenAt    time.Time
}

const (
	registerInstanceSQL = `
insert into instances (pool, instance, url, kind, capacity_blocks, block_tokens, max_context_tokens, max_running,
                       prefill_tokens_per_second, policy_version, ttl_seconds, kv_events_endpoint, kv_events_bind, kv_replay_endpoint,
                       kv_topic, ranks, control, state, seen_at)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, coalesce(nullif($10::bigint, 0), (select p.policy_version from pools p where p.pool = $1)), $11, $12, $13, $14, $15, $16, $17, 'active', clock_timestamp())
on conflict (pool, instance) do update
set url = excluded.url, kind = excluded.kind, capacity_blocks = excluded.capacity_blocks, block_tokens = excluded.block_tokens,
    max_context_tokens = excluded.max_context_tokens, max_running = excluded.max_running,
    prefill_tokens_per_second = excluded.prefill_tokens_per_second, policy_version = excluded.policy_version,
    ttl_seconds = excluded.ttl_seconds, kv_events_endpoint = excluded.kv_events_endpoint, kv_events_bind = excluded.kv_events_bind,
    kv_replay_endpoint = excluded.kv_replay_endpoint, kv_topic = excluded.kv_topic, ranks = excluded.ranks, control = excluded.control,
    state = 'active', seen_at = excluded.seen_at`

	instanceColumns = `
select pool, instance, url, kind, capacity_blocks, block_tokens, max_context_tokens, max_running,
       prefill_tokens_per_second, policy_version, ttl_seconds, kv_events_endpoint, kv_events_bind, kv_replay_endpoint, kv_topic,
       ranks, control, state,
       ttl_seconds > 0 and seen_at + make_interval(secs => ttl_seconds) <= clock_timestamp(), created_at, seen_at
from instances`

	selectInstanceSQL  = instanceColumns + ` where pool = $1 and instance = $2`
	lockInstanceSQL    = selectInstanceSQL + ` for update`
	selectInstancesSQL = instanceColumns + ` where pool = $1 and state <> 'removed' order by instance`

	heartbeatInstanceSQL = `
update instances set seen_at = clock_timestamp() where pool = $1 and instance = $2 and state <> 'removed'`

	// Setting the state it has already changes and notifies nothing.
	setInstanceStateSQL = `
update instances set state = $3 where pool = $1 and instance = $2 and state <> $3 and state <> 'removed'`
)

func (i Instance) check() error {
	if err := checkPoolName("pool", i.Pool); err != nil {
		return err
	}
	address, err := url.Parse(i.URL)
	badURL := err != nil || (address.Scheme != "http" && address.Scheme != "https") || address.Host == "" || len(i.URL) > maxInstanceURLBytes
	nonNegative := func(x float64) bool { return x >= 0 && !math.IsInf(x, 0) }
	switch {
	case !instancePattern.MatchString(i.ID):
		return &FieldError{Path: "id", Problem: fmt.Sprintf("must be 1 to 128 letters, digits, dots, colons, dashes or underscores, is %q", i.ID)}
	case badURL:
		return &FieldError{Path: "url", Problem: fmt.Sprintf("must be an http or https URL of at most %d bytes", maxInstanceURLBytes)}
	case i.Kind == "" || len(i.Kind) > maxInstanceKindBytes:
		return &FieldError{Path: "kind", Problem: fmt.Sprintf("must be 1 to %d bytes long", maxInstanceKindBytes)}
	case i.CapacityBlocks < 1:
		return &FieldError{Path: "capacity_blocks", Problem: fmt.Sprintf("must be positive, is %d", i.CapacityBlocks)}
	case i.BlockTokens < 1 || i.BlockTokens > math.MaxInt32:
		return &FieldError{Path: "block_tokens", Problem: fmt.Sprintf("must be positive, is %d", i.BlockTokens)}
	case i.MaxContextTokens < 1:
		return &FieldError{Path: "max_context_tokens", Problem: fmt.Sprintf("must be positive, is %d", i.MaxContextTokens)}
	case i.MaxRunning < 0 || i.MaxRunning > math.MaxInt32:
		return &FieldError{Path: "max_running", Problem: fmt.Sprintf("must not be negative, is %d", i.MaxRunning)}
	case !nonNegative(i.PrefillTokensPerSecond):
		return &FieldError{Path: "prefill_tokens_per_second", Problem: fmt.Sprintf("must be finite and not negative, is %v", i.PrefillTokensPerSecond)}
	case i.PolicyVersion < 0:
		return &FieldError{Path: "policy_version", Problem: fmt.Sprintf("must not be negative, is %d", i.PolicyVersion)}
	case !nonNegative(i.TTLSeconds):
		return &FieldError{Path: "ttl_seconds", Problem: fmt.Sprintf("must be finite and not negative, is %v", i.TTLSeconds)}
	case i.Ranks < 1 || i.Ranks > maxRanks:
		return &FieldError{Path: "ranks", Problem: fmt.Sprintf("must be between 1 and %d, is %d", maxRanks, i.Ranks)}
	case i.Control != ControlManage && i.Control != ControlObserve:
		return &FieldError{Path: "control", Problem: fmt.Sprintf("must be manage or observe, is %q", i.Control)}
	}
	return i.KVEvents.check(i.Ranks)
}

// check looks at the endpoints of all ranks.
func (k KVEvents) check(ranks int) error {
	if k == (KVEvents{}) {
		return nil
	}
	for _, e := range []struct{ path, endpoint string }{
		{"kv_events.endpoint", k.Endpoint}, {"kv_events.replay_endpoint", k.ReplayEndpoint},
	} {
		if e.endpoint == "" && e.path != "kv_events.endpoint" {
			continue
		}
		address, err := url.Parse(e.endpoint)
		if err != nil || address.Scheme != "tcp" || address.Host == "" || address.Port() == "" || address.Path != "" || len(e.endpoint) > maxInstanceURLBytes {
			return &FieldError{Path: e.path, Problem: fmt.Sprintf("must be a ZMQ endpoint such as tcp://10.0.0.7:5557, is %q", e.endpoint)}
		}
		if port, err := strconv.Atoi(address.Port()); err != nil || port+ranks-1 > math.MaxUint16 {
			return &FieldError{Path: e.path, Problem: fmt.Sprintf("must leave a port for each of %d ranks below 65,536, is %q", ranks, e.endpoint)}
		}
	}
	if len(k.Topic) > maxTopicBytes {
		return &FieldError{Path: "kv_events.topic", Problem: fmt.Sprintf("must be at most %d bytes long", maxTopicBytes)}
	}
	return nil
}

// RegisterInstance adds an instance, or announces a known one anew: it becomes
// active and seen now, with what is given. The pool is created if it is new.
// What cannot be accepted is *FieldError. Ranks and Control default to 1 and manage.
func (s *Store) RegisterInstance(ctx context.Context, instance Instance) (Instance, error) {
	instance.Ranks = cmp.Or(instance.Ranks, 1)
	instance.Control = cmp.Or(instance.Control, ControlManage)
	if err := instance.check(); err != nil {
		return Instance{}, err
	}
	var registered Instance
	err := s.write(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, ensurePoolSQL, instance.Pool); err != nil {
			return err
		}
		before, err := readInstance(ctx, tx, lockInstanceSQL, instance.Pool, instance.ID)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		_, err = tx.Exec(ctx, registerInstanceSQL, instance.Pool, instance.ID, instance.URL, instance.Kind, instance.CapacityBlocks,
			instance.BlockTokens, instance.MaxContextTokens, instance.MaxRunning, instance.PrefillTokensPerSecond,
			instance.PolicyVersion, instance.TTLSeconds, instance.KVEvents.Endpoint, instance.KVEvents.Bind, instance.KVEvents.ReplayEndpoint,
			instance.KVEvents.Topic, instance.Ranks, string(instance.Control))
		if err != nil {
			return err
		}
		registered, err = readInstance(ctx, tx, selectInstanceSQL, instance.Pool, instance.ID)
		if err != nil || registered.sameAs(before) {
			return err
		}
		_, err = tx.Exec(ctx, notifySQL, string(InstancesTopic(instance.Pool)))
		return err
	})
	if err != nil {
		return Instance{}, fmt.Errorf("registering instance %s: %w", instance.ID, err)
	}
	return registered, nil
}

// sameAs tells whether a registration repeats what was known, so that it is no
// more than a heartbeat and wakes no one.
func (i Instance) sameAs(before Instance) bool {
	before.SeenAt, before.TTLSeconds = i.SeenAt, i.TTLSeconds
	return i == before
}

func readInstance(ctx context.Context, tx pgx.Tx, sql, pool, id string) (Instance, error) {
	rows, err := tx.Query(ctx, sql, pool, id)
	if err != nil {
		return Instance{}, err
	}
	return pgx.CollectExactlyOneRow(rows, scanInstance)
}

func scanInstance(row pgx.CollectableRow) (Instance, error) {
	var i Instance
	err := row.Scan(&i.Pool, &i.ID, &i.URL, &i.Kind, &i.CapacityBlocks, &i.BlockTokens, &i.MaxContextTokens, &i.MaxRunning,
		&i.PrefillTokensPerSecond, &i.PolicyVersion, &i.TTLSeconds, &i.KVEvents.Endpoint, &i.KVEvents.Bind, &i.KVEvents.ReplayEndpoint,
		&i.KVEvents.Topic, &i.Ranks, &i.Control, &i.State, &i.Expired, &i.CreatedAt, &i.SeenAt)
	return i, err
}

// HeartbeatInstance marks an instance as seen now; ErrNotFound if it is unknown
// or removed.
func (s *Store) HeartbeatInstance(ctx context.Context, pool, id string) error {
	tag, err := s.pool.Exec(ctx, heartbeatInstanceSQL, pool, id)
	if err == nil && tag.RowsAffected() == 0 {
		err = pgx.ErrNoRows
	}
	return found(err, "marking as seen instance", id)
}

// DrainInstance starts or ends draining; ErrNotFound if it is unknown or removed.
func (s *Store) DrainInstance(ctx context.Context, pool, id string, draining bool) error {
	state := InstanceActive
	if draining {
		state = InstanceDraining
	}
	current, err := s.setInstanceState(ctx, pool, id, state)
	if err == nil && current == InstanceRemoved {
		err = pgx.ErrNoRows
	}
	return found(err, "draining instance", id)
}

// RemoveInstance takes an instance out of the pool; ErrNotFound if it is unknown,
// no change if it is removed already.
func (s *Store) RemoveInstance(ctx context.Context, pool, id string) error {
	_, err := s.setInstanceState(ctx, pool, id, InstanceRemoved)
	return found(err, "removing instance", id)
}

// setInstanceState returns the state that the instance then has.
func (s *Store) setInstanceState(ctx context.Context, pool, id string, state InstanceState) (current InstanceState, err error) {
	err = s.write(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, setInstanceStateSQL, pool, id, string(state))
		if err != nil {
			return err
		}
		if tag.RowsAffected() > 0 {
			if _, err := tx.Exec(ctx, notifySQL, string(InstancesTopic(pool))); err != nil {
				return err
			}
		}
		return tx.QueryRow(ctx, `select state from instances where pool = $1 and instance = $2`, pool, id).Scan(&current)
	})
	return current, err
}

// Instances lists the pool's instances by id, removed ones excepted.
func (s *Store) Instances(ctx context.Context, pool string) ([]Instance, error) {
	rows, err := s.pool.Query(ctx, selectInstancesSQL, pool)
	if err != nil {
		return nil, fmt.Errorf("listing the instances of pool %s: %w", pool, err)
	}
	instances, err := pgx.CollectRows(rows, scanInstance)
	if err != nil {
		return nil, fmt.Errorf("listing the instances of pool %s: %w", pool, err)
	}
	return instances, nil
}
