"""What a trainer asks for: tasks and contracts, and how they are written.

Tasks may be given as :class:`Task` or as mappings in the interface's own form.
The service checks them; here only what JSON cannot say is refused.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Union


@dataclass
class Task:
    """One task; ``group_size`` sessions are run for it, each its own sample.

    ``prompt`` is a sequence of token ids, or a mapping in the interface's form
    (such as ``{"synthetic": {...}}``). The other mappings are the interface's.
    """

    class_name: str
    prompt: Union[Sequence[int], Mapping[str, Any]]
    sampling: Mapping[str, Any]
    id: str = ""
    """The trainer's own name, unique within the batch; empty means the service numbers it."""
    group_size: int = 1
    limits: Optional[Mapping[str, Any]] = None
    deadline_seconds: float = 0.0
    """So long after the release members that have not ended end as stale; 0 means never."""
    environment: Optional[Mapping[str, Any]] = None
    scorer: Optional[Mapping[str, Any]] = None
    metadata: Any = None
    """Comes back with the sample."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the interface that this class does not name."""

    def to_json(self) -> Dict[str, Any]:
        """The task in the interface's form."""
        prompt = self.prompt if isinstance(self.prompt, Mapping) else {"token_ids": self.prompt}
        task: Dict[str, Any] = {"class": self.class_name, "prompt": prompt, "sampling": self.sampling, **self.extra}
        if self.id:
            task["id"] = self.id
        if self.group_size != 1:
            task["group_size"] = self.group_size
        if self.deadline_seconds:
            task["deadline_seconds"] = self.deadline_seconds
        for name in ("limits", "environment", "scorer", "metadata"):
            value = getattr(self, name)
            if value is not None:
                task[name] = value
        return task


AnyTask = Union[Task, Mapping[str, Any]]


@dataclass
class Contract:
    """What a trainer asks of a run: the mixture, and how much may be under way."""

    shares: Mapping[str, float]
    """Target share by class; a sum within 0.005 of 1 is normalised by the service."""
    max_concurrency: int
    staleness_bound: Optional[int] = None
    """Policy versions that a sample may lag behind the pool's; None means unbounded."""
    group_policy: str = ""
    """What an unusable member does: partial (the service's default), refill or end."""
    stale_policy: str = ""
    """What becomes of a session that new weights make older than the bound: finish (the service's default), end or restart."""
    max_restarts: Optional[int] = None
    """With restart: how often one session may be begun again; None means 2."""
    freshness_budget_seconds: float = 0.0
    """How long a sample may take from release to end; told, not enforced; 0 means none."""
    class_freshness_budget_seconds: Mapping[str, float] = field(default_factory=dict)
    """Budgets of classes that have one of their own."""
    group_refills: Optional[int] = None
    """With refill: members released anew for one group; None means as many as its size."""
    spare_members: int = 0
    """Members released with every group of two or more beyond its size; the rest is cancelled once enough are usable."""
    undelivered_limit: Optional[int] = None
    """Ended samples that may wait for an acknowledgement before nothing more is started; None means unbounded."""

    def to_json(self) -> Dict[str, Any]:
        """The contract in the interface's form."""
        contract: Dict[str, Any] = {
            "classes": [self._class(name, share) for name, share in self.shares.items()],
            "max_concurrency": self.max_concurrency,
        }
        for name in ("staleness_bound", "group_refills", "undelivered_limit", "max_restarts"):
            if getattr(self, name) is not None:
                contract[name] = getattr(self, name)
        for name in ("group_policy", "stale_policy", "spare_members", "freshness_budget_seconds"):
            if getattr(self, name):
                contract[name] = getattr(self, name)
        return contract

    def _class(self, name: str, share: float) -> Dict[str, Any]:
        budget = self.class_freshness_budget_seconds.get(name)
        return {"class": name, "share": share, **({"freshness_budget_seconds": budget} if budget else {})}


AnyContract = Union[Contract, Mapping[str, Any]]


def contract_json(contract: AnyContract) -> Mapping[str, Any]:
    """A contract in the interface's form, whichever way it was given."""
    return contract.to_json() if isinstance(contract, Contract) else contract


def batch_body(tasks: Iterable[AnyTask], policy_version: Optional[int]) -> bytes:
    """Write a batch. Equal tasks give equal bytes, which the service compares.

    ValueError or TypeError names the task that JSON cannot express.
    """
    pieces: List[str] = []
    for i, task in enumerate(tasks):
        try:
            pieces.append(to_json(task.to_json() if isinstance(task, Task) else task))
        except (TypeError, ValueError) as error:
            raise type(error)(f"tasks[{i}]: {error}") from error
    # The service reads the body as a stream and wants the version first.
    opening = "{" if policy_version is None else f'{{"policy_version":{int(policy_version)},'
    return (opening + '"tasks":[' + ",".join(pieces) + "]}").encode()


def batch_key(prefix: str, tasks: Iterable[AnyTask]) -> str:
    """An idempotency key of what is submitted: equal tasks give the same batch, others a batch of their own.

    For trainers whose repeated step may draw other tasks, such as after groups
    went back to a buffer. ``prefix`` tells apart steps that draw the same ones.
    """
    return f"{prefix}-{hashlib.sha256(batch_body(tasks, None)).hexdigest()[:32]}"


def to_json(document: Any) -> str:
    """Write JSON; numbers that JSON does not have are a ValueError."""
    return json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    """Write arrays and scalars of numpy, torch and the standard library as numbers."""
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        return tolist()
    if isinstance(value, range):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
