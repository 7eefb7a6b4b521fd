"""Sessions and what happened to them; turns of a harness that keeps its own loop."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, List, Optional

from .. import _decode
from ..errors import problem_from
from ..tokens import FloatArray, IntArray, unpack_turn
from ._fields import class_field
from .samples import Times, Usage


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
    class_name: str = class_field()
    state: str = ""
    status: str = ""
    policy_version: int = 0
    instance: str = ""
    instances: List[str] = field(default_factory=list)
    hold_reason: str = ""
    queue_reason: str = ""
    """Why a queued session is not started."""
    holds: int = 0
    restarts: int = 0
    """How often it was begun again because new weights had made it too old."""
    deadline_at: Optional[datetime] = None
    """When its group's deadline passes; None for none."""
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
    """Calls made for the turn, failed ones included."""
    resumes: int = 0
    """Of these, calls that went on from partial output."""
    tokens_regenerated: int = 0
    """Sampled again because an earlier copy was lost; not part of output_tokens."""
    kept_tokens: Optional[int] = None
    """Where a harness rewrote its history before this call: how many tokens of the context before it were kept."""
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
