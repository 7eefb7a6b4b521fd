"""Groups out of a stream of samples, and the place to acknowledge.

Samples come in completion order, so members of several groups interleave. A
group is complete once all its members have come, whatever their status. The
place that may be acknowledged is the last one up to which every sample belongs
to a group that was handed out: what is beyond comes again after a crash.

Some groups that were handed out can have members beyond that place. A
:class:`Position` names them, so that a trainer which keeps it in its checkpoint
gets no group twice. Without it, groups that lie wholly beyond the acknowledged
place come again, and of those that lie across it, which were handed out for
certain, the rest is passed over.

Nothing here does I/O: the synchronous and the asynchronous stream share it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Deque, Dict, List, Mapping, Optional, Set, Tuple

from .documents import Consumer, Sample, SessionInfo
from .errors import PositionError


@dataclass(frozen=True)
class Group:
    """All members of one task, in the order of their ``member``."""

    task: str
    """The service's id of the task; count by it."""
    task_id: str
    """The trainer's own name for the task."""
    batch: str
    class_name: str
    samples: List[Sample]

    @property
    def usable(self) -> List[Sample]:
        """Members that are for training. They can be fewer than the group's size, or none."""
        return [sample for sample in self.samples if sample.usable]


@dataclass(frozen=True)
class Position:
    """A place in a run's groups, for a trainer's checkpoint.

    Every sample up to ``cursor`` belongs to a group that was handed out;
    ``beyond`` are the groups handed out that have samples after it, with how many.
    """

    cursor: str = ""
    seq: int = 0
    beyond: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> Dict[str, Any]:
        """The position as plain data."""
        return {"cursor": self.cursor, "seq": self.seq, "beyond": dict(self.beyond)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Position":
        """Read what to_json wrote."""
        return cls(str(document["cursor"]), int(document["seq"]), {str(k): int(v) for k, v in document["beyond"].items()})


class GroupBook:
    """Keeps account of the samples that came and of the groups handed out."""

    def __init__(self, position: Optional[Position], consumer: Optional[Consumer]) -> None:
        acknowledged = consumer.acknowledged_seq if consumer else 0
        if position is not None and acknowledged > position.seq:
            # The service would silently go on where the consumer acknowledged last.
            raise PositionError(
                f"the position is at sample {position.seq}, but its consumer has acknowledged up to {acknowledged}, "
                "which the service does not give it again; read under another consumer's name")
        # A position names the groups that lie across it. Without one they must be
        # looked for among those released before the consumer's last move.
        self._last_move: Optional[datetime] = None
        if position is None:
            position = Position(consumer.acknowledged if consumer else "", acknowledged)
            self._last_move = consumer.updated_at if consumer and acknowledged else None
        self._cursor, self._seq = position.cursor, position.seq
        self._start = position.seq
        self._settled: Set[str] = set()
        self._handed: Dict[str, int] = dict(position.beyond)
        self._ahead: Deque[Tuple[str, str, int]] = deque()
        self._open: Dict[str, Dict[int, Sample]] = {}

    @property
    def cursor(self) -> str:
        """Where the stream begins."""
        return self._cursor

    @property
    def open(self) -> int:
        """Groups of which some members have come and others have not."""
        return len(self._open)

    def doubtful(self, samples: List[Sample]) -> List[str]:
        """Tasks among the samples whose other members may lie before the start."""
        if self._last_move is None:
            return []
        here: Dict[str, int] = {}
        for sample in samples:
            here[sample.task] = here.get(sample.task, 0) + 1
        found: Dict[str, None] = {}
        for sample in samples:
            known = sample.task in self._handed or sample.task in self._open or sample.task in self._settled
            late = sample.released_at is not None and sample.released_at > self._last_move
            if not (known or late or here[sample.task] == sample.group_size):
                found[sample.task] = None
        return list(found)

    def settle(self, task: str, members: List[SessionInfo]) -> None:
        """Tell where the members of a doubtful task lie."""
        self._settled.add(task)
        after = sum(1 for member in members if member.sample_seq == 0 or member.sample_seq > self._start)
        if members and after < members[0].group_size:
            self._handed[task] = after

    def add(self, sample: Sample) -> Optional[Group]:
        """Take the next sample of the stream; returns the group that it completes."""
        self._ahead.append((sample.task, sample.cursor, sample.seq))
        if sample.task in self._handed:
            return None
        members = self._open.setdefault(sample.task, {})
        members[sample.member] = sample
        if len(members) < sample.group_size:
            return None
        del self._open[sample.task]
        ordered = [members[member] for member in sorted(members)]
        return Group(sample.task, sample.task_id, sample.batch, sample.class_name, ordered)

    def hand(self, group: Group) -> None:
        """Note that the trainer was given a group."""
        self._handed[group.task] = len(group.samples)

    def position(self) -> Position:
        """The place after all groups handed out so far."""
        while self._ahead and self._ahead[0][0] in self._handed:
            task, self._cursor, self._seq = self._ahead.popleft()
            self._handed[task] -= 1
            if not self._handed[task]:
                del self._handed[task]
        return Position(self._cursor, self._seq, dict(self._handed))
