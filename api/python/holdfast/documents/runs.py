"""Runs, contracts and batches; where a run's samples are, its mixture and its rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Dict, List, Optional

from ._fields import class_field


@dataclass
class ClassShare:
    """One class of a contract with its target share."""

    class_name: str = class_field()
    share: float = 0.0
    freshness_budget_seconds: float = 0.0
    """The class's own; 0 means the contract's."""


@dataclass
class ContractVersion:
    """One version of a run's contract; its shares sum to 1."""

    version: int
    classes: List[ClassShare]
    given: List[ClassShare]
    max_concurrency: int
    group_policy: str
    created_at: datetime
    staleness_bound: Optional[int] = None
    stale_policy: str = "finish"
    max_restarts: Optional[int] = None
    """With stale_policy restart; None means 2."""
    freshness_budget_seconds: float = 0.0
    """How long a sample may take from release to end; 0 means none."""
    group_refills: Optional[int] = None
    """None means as many as a group's size."""
    spare_members: int = 0
    undelivered_limit: Optional[int] = None
    """None means unbounded."""


@dataclass
class RunInfo:
    """A training run with its current contract. ``state`` is active or ended."""

    id: str
    name: str
    pool: str
    state: str
    contract: ContractVersion
    created_at: datetime
    ended_at: Optional[datetime] = None


@dataclass
class Batch:
    """A set of tasks that was released together."""

    id: str
    run: str
    seq: int
    idempotency_key: str
    policy_version: int
    tasks: int
    sessions: int
    """Members of all tasks together: the samples to expect."""
    sessions_by_class: Dict[str, int]
    created_at: datetime
    replayed: bool = False
    """The key had been used with this very body before; nothing was released anew."""


@dataclass
class ClassBacklog:
    """Where the released samples of one class are: released = ended + backlog."""

    class_name: str = class_field()
    released: int = 0
    ended: int = 0
    backlog: int = 0
    queued: int = 0
    pending: int = 0
    held: int = 0
    active: int = 0
    completed: int = 0
    truncated: int = 0
    stale: int = 0
    failed: int = 0
    cancelled: int = 0
    groups_ended: int = 0
    """Groups whose members have all ended."""
    groups_without_signal: int = 0
    """Of these, those whose usable members, two or more, all have one and the same reward."""
    over_bound: int = 0
    """Completed and truncated samples that are older than the contract's staleness bound."""
    restarts: int = 0
    """How often sessions were begun again because new weights had made them too old."""
    expired: int = 0
    """Stale samples of groups whose deadline had passed."""
    oldest_hold_seconds: float = 0.0
    oldest_queued_seconds: float = 0.0
    oldest_outstanding_seconds: float = 0.0
    """Age since its release of the oldest session that has not ended."""
    live_token_seconds: float = 0.0
    live_block_seconds: Optional[float] = None
    """Block-time of sessions under way; None while no instance tells its block size."""
    freshness_budget_seconds: Optional[float] = None
    within_freshness_budget: Optional[bool] = None
    """Whether oldest_outstanding_seconds is within it; None without a budget."""
    drain_seconds: Optional[float] = None
    """None while nothing has ended in the last ten minutes."""
    paused: str = ""
    """Why no queued session is started at the moment; empty when they are."""


@dataclass
class Backlog:
    """One snapshot of a run."""

    run: str
    at: datetime
    classes: List[ClassBacklog]
    total: ClassBacklog
    undelivered: int = 0
    """Ended samples that the slowest consumer has not acknowledged, which back-pressure goes by."""
    undelivered_limit: Optional[int] = None
    paused_at: Optional[datetime] = None
    """Since when no queued session is started; None when they are."""


@dataclass
class ClassMixture:
    """One class's part in the mixture."""

    class_name: str = class_field()
    rho: float = 0.0
    released: int = 0
    released_share: float = 0.0
    completed: int = 0
    completed_share: float = 0.0
    consumed: int = 0
    consumed_share: float = 0.0
    stale: int = 0
    """Samples that ended as stale."""
    over_bound: int = 0
    """Of the completed ones, those older than the contract's staleness bound."""


@dataclass
class MixtureSpan:
    """Shares over a stretch of time; distances are total variation in percentage points."""

    classes: List[ClassMixture]
    tv_released_pp: float
    """Completed against released: what the service did to the mixture."""
    tv_consumed_pp: float
    """Consumed against rho: what the trainer got."""
    tv_rho_pp: float
    """Completed against rho."""


@dataclass
class Mixture:
    """The mixture of a run, over all of it and over a window if one was asked for."""

    run: str
    total: MixtureSpan
    window: Optional[MixtureSpan] = None
    from_: Optional[datetime] = field(default=None, metadata={"json": "from"})
    to: Optional[datetime] = None


@dataclass
class ClassMetrics:
    """A class's sessions that ended in a window."""

    class_name: str = class_field()
    samples: int = 0
    samples_per_minute: float = 0.0
    latency_p50_seconds: float = 0.0
    latency_p95_seconds: float = 0.0
    latency_p99_seconds: float = 0.0
    held_p50_seconds: float = 0.0
    held_p95_seconds: float = 0.0
    held_p99_seconds: float = 0.0
    held_sessions: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefix_hit: float = 0.0
    cold_prefill_tokens: int = 0
    token_seconds: float = 0.0
    block_seconds: Optional[float] = None
    """Block-time: token_seconds in KV blocks; None while no instance tells its block size."""
    residency_seconds: float = 0.0
    tokens_generated: int = 0
    tokens_regenerated: int = 0
    resumes: int = 0
    stale: int = 0
    over_bound: int = 0
    freshness_budget_seconds: Optional[float] = None
    over_freshness_budget: int = 0
    """Completed and truncated samples that took longer than their class's budget."""
    within_freshness_budget: Optional[bool] = None
    """Whether latency_p95_seconds is within it; None without a budget."""


@dataclass
class Metrics:
    """Rates, latencies and use of the engines over a window."""

    run: str
    from_: datetime = field(metadata={"json": "from"})
    to: datetime
    classes: List[ClassMetrics]
    total: ClassMetrics


@dataclass
class ClassPace:
    """What may be released of one class now."""

    class_name: str = class_field()
    release_sessions: int = 0
    """How many more sessions may be released now, spare members included."""
    release_groups: int = 0
    """The same in tasks of group_size members."""
    rho: float = 0.0
    released: int = 0
    released_share: float = 0.0
    backlog: int = 0
    ended_in_window: int = 0
    service_p99_seconds: float = 0.0


@dataclass
class Pace:
    """How many more sessions may be released now, so that the staleness bound holds and the shares stay rho.

    Following it is up to the trainer. ``limited_by`` is cold_start, staleness,
    undelivered, backlog or ended; ``why`` says it for people, with the numbers.
    """

    run: str
    at: datetime
    policy_version: int
    release_sessions: int
    """Sum over the classes."""
    classes: List[ClassPace]
    limited_by: str
    why: str
    limited_by_class: str = ""
    idle: bool = False
    """One group is advised beyond the rooms: nothing is outstanding and the trainer waits."""
    staleness_room_sessions: Optional[int] = None
    undelivered_room_sessions: Optional[int] = None
    backlog_room_sessions: Optional[int] = None
    target_backlog_sessions: int = 0
    staleness_bound: Optional[int] = None
    horizon_seconds: Optional[float] = None
    """Until more than staleness_bound further versions are expected."""
    version_seconds: float = 0.0
    version_age_seconds: float = 0.0
    endings_per_second: float = 0.0
    step_samples: int = 0
    unacknowledged_samples: int = 0
    group_size: int = 0
    spare_members: int = 0
