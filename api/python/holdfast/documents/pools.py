"""Pools, their engines and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import List, Optional


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
