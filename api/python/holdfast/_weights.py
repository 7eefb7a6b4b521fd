"""The course of a weight update, without I/O."""

from __future__ import annotations

import time
from typing import Any, Dict, Tuple

from . import _calls
from .documents import WeightUpdate
from .errors import HoldfastError

_UNDER_WAY = {"paused": ("pausing",), "committed": ("committing",), "cancelled": ("cancelling",)}
_FIRST_PAUSE_SECONDS = 0.02
_LAST_PAUSE_SECONDS = 0.5


class WeightUpdateError(HoldfastError):
    """A weight update did not come to where it should; ``update`` tells where it stands."""

    def __init__(self, message: str, update: WeightUpdate) -> None:
        super().__init__(message, update)
        self.update = update

    def __str__(self) -> str:
        return str(self.args[0])


class Course:
    """One update: what is asked of the service, and how long to wait for what."""

    def __init__(self, pool: str, version: int, mode: str, cache: str, control: str, pause_timeout: float, timeout: float) -> None:
        self.pool, self.version, self._timeout = pool, version, timeout
        self._terms: Dict[str, Any] = {"mode": mode, "cache": cache, "control": control, "pause_timeout_seconds": pause_timeout}

    def begin(self) -> "_calls.Call[WeightUpdate]":
        """Ask for the engines to be paused."""
        return _calls.begin_weights(self.pool, self.version, self._terms)

    def look(self) -> "_calls.Call[WeightUpdate]":
        """Read where the update stands."""
        return _calls.get_weights(self.pool, self.version)

    def commit(self) -> "_calls.Call[WeightUpdate]":
        """Bring the version into force."""
        return _calls.commit_weights(self.pool, self.version)

    def cancel(self) -> "_calls.Call[WeightUpdate]":
        """Give it up."""
        return _calls.cancel_weights(self.pool, self.version)

    def waiting(self, goal: str) -> "Waiting":
        """Wait for a state."""
        return Waiting(goal, self._timeout)


class Waiting:
    """Waits for an update to come to a state, asking ever less often."""

    def __init__(self, goal: str, timeout: float) -> None:
        self._goal = goal
        self._end = time.monotonic() + timeout
        self._pause = _FIRST_PAUSE_SECONDS

    def step(self, update: WeightUpdate) -> Tuple[bool, float]:
        """Whether it is there, and else after how many seconds to look again. Raises WeightUpdateError."""
        if update.state == self._goal:
            return True, 0.0
        where = f"weight update {update.policy_version} of pool {update.pool}"
        if update.state == "failed":
            raise WeightUpdateError(f"{where}: {update.failed_step} failed: {update.problem}", update)
        if update.state == "committed":
            raise WeightUpdateError(f"{where}: the version is in force already; the next one is above it", update)
        if update.state not in _UNDER_WAY[self._goal]:
            raise WeightUpdateError(f"{where}: is {update.state}, not {self._goal}", update)
        if time.monotonic() > self._end:
            raise WeightUpdateError(f"{where}: still {update.state}", update)
        pause, self._pause = self._pause, min(self._pause * 1.5, _LAST_PAUSE_SECONDS)
        return False, pause
