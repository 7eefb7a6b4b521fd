"""How a stream of samples goes from page to page, without I/O."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Optional

from . import _calls
from .documents import Backlog, RunInfo, SamplePage


_ENDED_WAIT_SECONDS = 1.0


class Paging:
    """Where a stream stands, and how long its next poll may wait.

    ``wait`` bounds one poll; ``timeout`` bounds how long the stream waits for a
    sample before it ends, None for ever.
    """

    def __init__(self, run: str, query: _calls.SamplesQuery, wait: float, timeout: Optional[float]) -> None:
        if not 0 < wait <= _calls.MAX_WAIT_SECONDS:
            # Not to wait at all is timeout=0; no wait and no time-out would be a busy loop.
            raise ValueError(f"wait must be above 0 and at most {_calls.MAX_WAIT_SECONDS:g} seconds, is {wait}")
        if timeout is not None and timeout < 0:
            raise ValueError(f"timeout must not be negative, is {timeout}")
        self._run, self.query, self._wait, self._timeout = run, query, wait, timeout
        self._end: Optional[float] = None
        self._last_look = False

    def begin(self) -> None:
        """A sample is wanted from now on."""
        self._end = None if self._timeout is None else time.monotonic() + self._timeout
        self._last_look = False

    def poll(self, run_ended: bool) -> "_calls.Call[SamplePage]":
        """The next request. An ended run is not waited for long: little can come yet, or nothing."""
        wait = min(self._wait, _ENDED_WAIT_SECONDS) if run_ended else self._wait
        if self._end is not None:
            wait = min(wait, max(0.0, self._end - time.monotonic()))
        return _calls.samples(self._run, self.query, 0.0 if self._last_look else wait)

    def take(self, page: SamplePage) -> bool:
        """Go behind a page. True if the stream is at its end."""
        self.query = replace(self.query, after=page.next)
        if page.samples or page.more:
            return False
        return self._last_look or (self._end is not None and time.monotonic() >= self._end)

    def nothing_to_come(self, run: RunInfo, backlog: Backlog) -> None:
        """After an empty page: an ended run whose sessions have all ended is read once more, to the end."""
        self._last_look = run.state == "ended" and backlog.total.backlog == 0
