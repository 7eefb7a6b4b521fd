"""When a call is sent again, and after which pause.

Repeated are calls that change nothing the second time, after a broken
connection or an answer of 408, 502, 503 or 504; any call after 429, which the
service gives before any work, and after a failure to connect. Pauses are drawn
at random below a bound that doubles, so that callers who failed together do not
return together; what Retry-After asks for comes on top. Nothing is repeated
beyond the deadline.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any, Callable

from ._calls import Call
from .errors import HoldfastError, ProblemError, UnreachableError


@dataclass(frozen=True)
class RetryPolicy:
    """Bounds of repetition, in seconds.

    ``deadline_seconds`` bounds a call with all its repetitions, what the service
    waits by the caller's wish not counted. ``try_seconds`` bounds one try,
    ``upload_seconds`` one try of a batch. ``deadline_seconds=0`` never repeats.
    """

    deadline_seconds: float = 120.0
    try_seconds: float = 60.0
    upload_seconds: float = 600.0
    min_delay_seconds: float = 0.1
    max_delay_seconds: float = 10.0

    def __post_init__(self) -> None:
        if min(self.deadline_seconds, self.min_delay_seconds) < 0 or min(self.try_seconds, self.upload_seconds) <= 0:
            raise ValueError("retry policy: times must be positive")
        if self.max_delay_seconds < self.min_delay_seconds:
            raise ValueError("retry policy: max_delay_seconds is below min_delay_seconds")


_REPEATABLE_STATUSES = (408, 502, 503, 504)


class Tries:
    """The tries of one call."""

    def __init__(self, policy: RetryPolicy, call: Call[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._policy, self._call, self._clock = policy, call, clock
        self._end = clock() + policy.deadline_seconds + call.wait_seconds
        self.count = 0

    def timeout(self) -> float:
        """How long the coming try may take. Counts it."""
        self.count += 1
        own = self._policy.upload_seconds if self._call.upload else self._policy.try_seconds
        return own + self._call.wait_seconds

    def pause(self, error: HoldfastError) -> float:
        """Seconds until the next try; raises the error if there is to be none."""
        again, at_least = self._may_repeat(error)
        if not again:
            raise error
        bound = min(self._policy.max_delay_seconds, self._policy.min_delay_seconds * 2.0 ** min(self.count - 1, 30))
        pause = at_least + random.uniform(0.0, bound)
        if self._clock() + pause > self._end:
            raise error
        return pause

    def _may_repeat(self, error: HoldfastError) -> "tuple[bool, float]":
        if isinstance(error, UnreachableError):
            return self._call.repeatable or not error.sent, 0.0
        if isinstance(error, ProblemError):
            at_least = error.retry_after or 0.0
            if error.status == 429:
                return True, at_least
            return self._call.repeatable and error.status in _REPEATABLE_STATUSES, at_least
        return False, 0.0
