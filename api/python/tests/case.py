"""What the cases against the real service have in common."""

from __future__ import annotations

import itertools
import typing
import unittest
from typing import Iterator, List

import holdfast

from . import service


T = typing.TypeVar("T")


def take(count: int, stream: Iterator[T]) -> List[T]:
    """The next so many of a stream, and no look at what comes after them."""
    return list(itertools.islice(stream, count))


NO_REPETITION = holdfast.RetryPolicy(deadline_seconds=0)


class ServiceCase(unittest.TestCase):
    """A case with a client and a run of its own on the pool that has engines."""

    def setUp(self) -> None:
        self.client = service.client()
        self.addCleanup(self.client.close)
        self.run_ = service.new_run(self.client)
        self.addCleanup(self.run_.end)

    def another(self) -> holdfast.Run:
        """The run as a trainer finds it again after a crash: a new client, nothing remembered."""
        client = service.client()
        self.addCleanup(client.close)
        return client.run(self.run_.info.name)
