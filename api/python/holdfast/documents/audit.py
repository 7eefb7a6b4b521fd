"""Everything that is known of one session and its sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, List, Optional

from .sessions import Delivery, Event, SessionInfo, Turn


@dataclass
class Release:
    """How a session came about."""

    at: datetime
    batch_seq: int
    idempotency_key: str
    policy_version: int
    queued_seconds: float
    """From the release until it was started, or until its end."""
    dispatched_at: Optional[datetime] = None


@dataclass
class Hold:
    """A stretch in which a session waited for a turn."""

    turn: int
    reason: str
    from_: datetime = field(metadata={"json": "from"})
    seconds: float = 0.0
    """0 while it is held."""
    to: Optional[datetime] = None
    """None while it is held."""
    numbers: Any = None
    """The router's, when it decided."""


@dataclass
class Admission:
    """The router's decision to run a turn at an instance."""

    turn: int
    at: datetime
    instance: str
    reason: str
    epoch: int
    moved_from: str = ""
    """The instance before, if it was another."""
    numbers: Any = None


@dataclass
class Score:
    """How a sample was scored."""

    seconds: float
    at: Optional[datetime] = None
    """None where the history does not say it."""
    reward: Optional[float] = None
    detail: Any = None


@dataclass
class Audit:
    """When it was released, held and why, admitted where, every turn and retry, scored, delivered, acknowledged."""

    session: SessionInfo
    release: Release
    holds: List[Hold]
    admissions: List[Admission]
    turns: List[Turn]
    retries: int
    """Calls of engines that had to be made again, over all turns."""
    moves: int
    """How often it went on at another instance."""
    deliveries: List[Delivery]
    events: List[Event]
    """The whole history in order."""
    score: Optional[Score] = None
    """None unless it was scored."""
    more: bool = False
    """There are more events or turns than an audit holds: read them page by page."""
    history_pruned: bool = False
    """Events and turns are gone; their sums are in session."""
    transcript_pruned: bool = False
    """The sample's tokens are gone."""
