"""Whole groups out of the service's own order of groups, and the place in it.

The service gives a group when all its members have ended, members together:
those that the task asked for, spare ones, and those that were released in place
of others. A place is therefore a cursor and nothing more: every group before it
was handed out, every other comes again after a crash.

Nothing here does I/O: the synchronous and the asynchronous stream share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional

from .documents import Consumer, Sample
from .errors import PositionError


@dataclass(frozen=True)
class Position:
    """A place in a run's groups, for a trainer's checkpoint: all groups before it were handed out."""

    cursor: str = ""
    seq: int = 0
    """Samples before it, in the order of whole groups."""

    def to_json(self) -> Dict[str, Any]:
        """The position as plain data."""
        return {"cursor": self.cursor, "seq": self.seq}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Position":
        """Read what to_json wrote."""
        return cls(str(document["cursor"]), int(document["seq"]))


@dataclass(frozen=True)
class Group:
    """All members of one task, in the order of their ``member``, whatever became of them."""

    task: str
    """The service's id of the task; count by it."""
    task_id: str
    """The trainer's own name for the task."""
    batch: str
    class_name: str
    size: int
    """Members that the task asked for; there can be more, spare and refilled ones, and more usable ones."""
    outcome: str
    """complete: as many usable members as asked for; partial: fewer; ended: an unusable member ended it."""
    samples: List[Sample]
    position: Position
    """The place after it."""

    @property
    def usable(self) -> List[Sample]:
        """Members that are for training. They can be fewer than ``size``, or none."""
        return [sample for sample in self.samples if sample.usable]

    @property
    def without_signal(self) -> bool:
        """Whether its usable members, two or more, all have one and the same reward, as the backlog counts it."""
        rewards = [sample.reward for sample in self.usable]
        return len(rewards) > 1 and None not in rewards and len(set(rewards)) == 1


class GroupBook:
    """Puts groups together and keeps the place after those handed out."""

    def __init__(self, position: Optional[Position], consumer: Optional[Consumer]) -> None:
        acknowledged = consumer.acknowledged_seq if consumer else 0
        if position is None:
            position = Position(consumer.acknowledged if consumer else "", acknowledged)
        elif acknowledged > position.seq:
            # The service would silently go on where the consumer acknowledged last.
            raise PositionError(
                f"the position is at sample {position.seq}, but its consumer has acknowledged up to {acknowledged}, "
                "which the service does not give it again; read under another consumer's name")
        self._place = position
        self._seq = position.seq
        self._open: List[Sample] = []

    def position(self) -> Position:
        """The place after all groups handed out so far."""
        return self._place

    def add(self, sample: Sample) -> Optional[Group]:
        """Take the next sample of the stream; returns the group that it completes."""
        self._seq += 1
        if self._open and self._open[0].task != sample.task:
            # Somebody acknowledged up to the middle of a group: the rest of it is no group.
            self._open = []
        self._open.append(sample)
        if len(self._open) < sample.group_members:
            return None
        members, self._open = self._open, []
        place = Position(sample.cursor, self._seq)
        return Group(sample.task, sample.task_id, sample.batch, sample.class_name, sample.group_size, sample.group_outcome, members, place)

    def hand(self, group: Group) -> None:
        """Note that the trainer was given a group; they are given in the order in which they were put together."""
        self._place = group.position
