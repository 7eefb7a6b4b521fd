"""Whole groups out of the service's own order of groups.

The service gives a group when all its members have ended, members together:
those that the task asked for, spare ones, and those that were released in place
of others. A place is therefore a cursor and nothing more: every group before it
was handed out, every other comes again after a crash.

Nothing here does I/O: the synchronous and the asynchronous stream share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from .documents import Sample


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
    cursor: str
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


class Gathering:
    """Puts groups together from samples that come group by group, in pages cut anywhere."""

    def __init__(self) -> None:
        self._open: List[Sample] = []

    def add(self, sample: Sample) -> Optional[Group]:
        """Take the next sample of the stream; returns the group that it completes."""
        if self._open and self._open[0].task != sample.task:
            # Somebody acknowledged up to the middle of a group: the rest of it is no group.
            self._open = []
        self._open.append(sample)
        if len(self._open) < sample.group_members:
            return None
        members, self._open = self._open, []
        return Group(
            sample.task, sample.task_id, sample.batch, sample.class_name, sample.group_size, sample.group_outcome, members, sample.cursor)
