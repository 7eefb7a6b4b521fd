"""What the service answers with, as dataclasses.

Fields are those of the REST interface (api/openapi.yaml), with the same units:
they stand last in the names. ``class_name`` is the interface's ``class``, a word
that Python keeps for itself. Times are in UTC.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Dict, List, Optional

from . import _decode
from .errors import problem_from
from .tokens import FloatArray, IntArray, NumpyTokens, TokenArrays, unpack_turn


def _class() -> Any:
    return field(metadata={"json": "class"})


@dataclass
class ClassShare:
    """One class of a contract with its target share."""

    class_name: str = _class()
    share: float = 0.0


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
class Usage:
    """What a session used of the engines, over all its turns."""

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    context_tokens: int = 0
    token_seconds: float = 0.0
    resumes: int = 0
    """Model calls that went on from the partial output of one that was cut."""
    tokens_regenerated: int = 0
    """Sampled again because an earlier copy was lost; not part of output_tokens."""


@dataclass
class Times:
    """Where a session's time went."""

    held_seconds: float = 0.0
    residency_seconds: float = 0.0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    tool_seconds: float = 0.0
    score_seconds: float = 0.0


@dataclass
class Segment:
    """A stretch of a sample's tokens. ``kind`` is prompt, appended or generated."""

    kind: str
    turn: int
    start: int
    count: int
    policy_version: int
    """Weights that generated the tokens; for other kinds those of the turn that read them."""


USABLE = ("completed", "truncated")
"""Statuses of samples that are for training."""


@dataclass
class Sample:
    """The finished product of one session, whatever became of it.

    ``id`` is stable: count by it, since delivery is at least once. Only those
    that are ``usable`` are for training; a failure never has a reward of 0.
    """

    id: str
    seq: int
    cursor: str
    run: str
    batch: str
    task: str
    """Common to the members of a group."""
    task_id: str
    """The trainer's own name for the task."""
    member: int
    group_size: int
    class_name: str = _class()
    status: str = ""
    policy_version: int = 0
    """Of the release."""
    min_policy_version: int = 0
    max_policy_version: int = 0
    staleness: int = 0
    """Versions that the pool was ahead of min_policy_version when the session ended."""
    usage: Usage = field(default_factory=Usage)
    times: Times = field(default_factory=Times)
    instances: List[str] = field(default_factory=list)
    released_at: Optional[datetime] = None
    first_admitted_at: Optional[datetime] = None
    ended_at: Optional[datetime] = None
    segments: List[Segment] = field(default_factory=list)
    finish_reason: str = ""
    problem: str = ""
    reward: Optional[float] = None
    score_detail: Any = None
    metadata: Any = None
    tokens: Optional[TokenArrays] = field(default=None, init=False, repr=False, compare=False)
    """None if the sample was read without tokens."""

    @property
    def usable(self) -> bool:
        """Whether the sample is for training."""
        return self.status in USABLE

    @property
    def token_ids(self) -> IntArray:
        """int32: the whole context in order. LookupError if read without tokens."""
        return self._arrays().token_ids

    @property
    def loss_mask(self) -> IntArray:
        """uint8: 1 where the policy generated the token."""
        return self._arrays().loss_mask

    @property
    def logprobs(self) -> Optional[FloatArray]:
        """float32: of generated tokens, 0 elsewhere; None if none were asked for."""
        return self._arrays().logprobs

    def numpy(self) -> NumpyTokens:
        """The three arrays as numpy's, sharing memory. ImportError without numpy."""
        return self._arrays().numpy()

    @property
    def prompt_count(self) -> int:
        """Tokens of the prompt, which stand first; all others are the response."""
        count = 0
        for segment in self.segments:
            if segment.kind != "prompt":
                break
            count += segment.count
        return count

    def _arrays(self) -> TokenArrays:
        if self.tokens is None:
            raise LookupError(f"sample {self.id} was read without tokens")
        return self.tokens


def sample_of(document: Any) -> Sample:
    """Read a sample; its tokens stay encoded until they are asked for."""
    sample = _decode.decode(Sample, document)
    if document.get("packed") is not None:
        sample.tokens = TokenArrays(document["packed"], packed=True)
    elif document.get("tokens") is not None:
        sample.tokens = TokenArrays(document["tokens"], packed=False)
    return sample


@dataclass
class SamplePage:
    """A piece of a run's samples in completion order."""

    samples: List[Sample]
    next: str
    """Continues after this page, also when it is empty."""
    more: bool
    """A further page is ready now."""


def page_of(document: Any) -> SamplePage:
    """Read a page of samples."""
    page = _decode.decode(_Page, document)
    return SamplePage([sample_of(one) for one in page.samples], page.next, page.more)


@dataclass
class _Page:
    samples: List[Any]
    next: str
    more: bool


@dataclass
class Consumer:
    """A reader's place in a run's samples."""

    run: str
    consumer: str
    delivered: str
    delivered_seq: int
    acknowledged: str
    acknowledged_seq: int
    updated_at: datetime


@dataclass
class ClassBacklog:
    """Where the released samples of one class are: released = ended + backlog."""

    class_name: str = _class()
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
    oldest_hold_seconds: float = 0.0
    drain_seconds: Optional[float] = None
    """None while nothing has ended in the last ten minutes."""


@dataclass
class Backlog:
    """One snapshot of a run."""

    run: str
    at: datetime
    classes: List[ClassBacklog]
    total: ClassBacklog


@dataclass
class ClassMixture:
    """One class's part in the mixture."""

    class_name: str = _class()
    rho: float = 0.0
    released: int = 0
    released_share: float = 0.0
    completed: int = 0
    completed_share: float = 0.0
    consumed: int = 0
    consumed_share: float = 0.0


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

    class_name: str = _class()
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
    residency_seconds: float = 0.0


@dataclass
class Metrics:
    """Rates, latencies and use of the engines over a window."""

    run: str
    from_: datetime = field(metadata={"json": "from"})
    to: datetime
    classes: List[ClassMetrics]
    total: ClassMetrics


@dataclass
class SessionInfo:
    """One rollout as the audit trail shows it.

    ``state`` is queued, dispatched, held, active or ended; ``status`` is empty
    until it has ended.
    """

    id: str
    run: str
    pool: str
    batch: str
    task: str
    task_id: str
    member: int
    group_size: int
    class_name: str = _class()
    state: str = ""
    status: str = ""
    policy_version: int = 0
    instance: str = ""
    instances: List[str] = field(default_factory=list)
    hold_reason: str = ""
    holds: int = 0
    cancel_requested: bool = False
    cancel_reason: str = ""
    usage: Usage = field(default_factory=Usage)
    times: Times = field(default_factory=Times)
    released_at: Optional[datetime] = None
    dispatched_at: Optional[datetime] = None
    first_admitted_at: Optional[datetime] = None
    held_since: Optional[datetime] = None
    ended_at: Optional[datetime] = None
    sample_seq: int = 0
    """Place in the run's completion order; 0 until it has ended."""
    reward: Optional[float] = None
    score_detail: Any = None
    problem: str = ""


@dataclass
class SessionPage:
    """A piece of a run's sessions in release order; ``next`` is empty on the last one."""

    sessions: List[SessionInfo]
    next: str = ""


@dataclass
class Turn:
    """One committed model call."""

    turn: int
    instance: str
    epoch: int
    policy_version: int
    prompt_tokens: int
    predicted_cached_tokens: int
    output_tokens: int
    appended_tokens: int
    started_at: datetime
    committed_at: datetime
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    total_seconds: float = 0.0
    tool_seconds: float = 0.0
    finish_reason: str = ""
    attempts: int = 0
    cached_tokens: Optional[int] = None
    """None if the engine did not tell."""


@dataclass
class TurnPage:
    """A piece of a session's turns; ``next`` is None on the last one."""

    turns: List[Turn]
    next: Optional[int] = None


@dataclass
class HarnessTurn:
    """The turn that a harness's call made."""

    turn: int
    """Counts from 0."""
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    policy_version: int
    instance: str
    cached_tokens: Optional[int] = None
    """None if the engine did not tell."""
    repeated: bool = False
    """An earlier call of the same request made the turn."""
    token_ids: IntArray = field(default_factory=lambda: array("i"), init=False)
    """int32: what was generated."""
    logprobs: Optional[FloatArray] = field(default=None, init=False)
    """float32: one per generated token; None if not asked for."""


def turn_of(document: Any) -> HarnessTurn:
    """Read a turn; one that failed after its answer had begun carries a problem instead."""
    if isinstance(document, dict) and isinstance(document.get("problem"), dict):
        raise problem_from(int(document["problem"].get("status", 500)), document["problem"])
    turn = _decode.decode(HarnessTurn, document)
    turn.token_ids, turn.logprobs = unpack_turn(document.get("packed_token_ids"), document.get("packed_logprobs"))
    return turn


@dataclass
class Event:
    """One entry of a session's history."""

    seq: int
    at: datetime
    kind: str
    detail: Any = None
    """Numbers and reasons of the event."""


@dataclass
class Delivery:
    """When a consumer was first given a session's sample, and when it acknowledged it."""

    consumer: str
    delivered_at: Optional[datetime] = None
    acknowledged_at: Optional[datetime] = None


@dataclass
class EventPage:
    """A piece of a session's history; ``next`` is None on the last one."""

    events: List[Event]
    deliveries: List[Delivery]
    next: Optional[int] = None


@dataclass
class History:
    """All that happened to a session, and who got its sample."""

    events: List[Event]
    deliveries: List[Delivery]


@dataclass
class Policy:
    """The version of a pool's weights."""

    pool: str
    policy_version: int


@dataclass
class Pool:
    """Instances that serve one model and share one router."""

    name: str
    policy_version: int
    epoch: int
    owner: str = ""
    """Process that runs the pool's router; empty while none does."""


@dataclass
class Instance:
    """One inference engine of a pool. ``state`` is active, draining or removed."""

    pool: str
    id: str
    url: str
    kind: str
    state: str
    expired: bool
    capacity_blocks: int
    block_tokens: int
    max_context_tokens: int
    policy_version: int
    created_at: datetime
    seen_at: datetime
    max_running: int = 0
    prefill_tokens_per_second: float = 0.0
    ttl_seconds: float = 0.0
    ranks: int = 1
    control: str = "manage"
    """manage: Holdfast pauses and resumes it for a weight update; observe: the trainer does."""


@dataclass
class WeightInstance:
    """One instance's place in a weight update."""

    instance: str
    state: str
    reached: str
    changed_at: datetime
    problem: str = ""


@dataclass
class WeightUpdate:
    """One entry of a pool's history of policy versions.

    ``state`` is pausing, paused, committing, committed, cancelling, cancelled or
    failed; ``failed_step`` and ``problem`` tell what failed.
    """

    pool: str
    policy_version: int
    from_version: int
    source: str
    cache: str
    control: str
    state: str
    attempt: int
    began_at: datetime
    changed_at: datetime
    instances: List[WeightInstance]
    mode: str = ""
    failed_step: str = ""
    problem: str = ""
    pause_timeout_seconds: float = 0.0
    sessions_over_bound: int = 0
    sessions_ended: int = 0
    gone: int = 0
    advanced_at: Optional[datetime] = None
