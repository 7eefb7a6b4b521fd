"""What takes several calls, written once for both clients.

A flow is a generator that yields calls to carry out, and pauses in seconds; it is
sent the answers, or thrown the errors. It does no I/O itself: a client drives it,
with threads that wait or with coroutines.
"""

from __future__ import annotations

import logging
from typing import Any, Generator, List, Optional, TypeVar, Union

from . import _calls, documents
from ._calls import Call
from ._paging import Paging
from ._weights import Course
from .errors import ConflictError, HoldfastError, UnreachableError
from .tasks import AnyContract

T = TypeVar("T")

Flow = Generator[Union[Call[Any], float], Any, T]

_log = logging.getLogger("holdfast")


def open_run(name: str, pool: str, contract: Optional[AnyContract]) -> Flow[documents.RunInfo]:
    """Go on with the pool's active run of this name, or open it."""
    known = yield from _active_run(name, pool)
    if known is not None:
        if contract is not None:
            known.contract = yield _calls.put_contract(known.id, contract)
        return known
    if contract is None:
        raise ValueError(f"pool {pool} serves no active run {name!r}; opening one takes a contract")
    try:
        opened: documents.RunInfo = yield _calls.create_run(name, pool, contract)
        return opened
    except (ConflictError, UnreachableError):
        # Another process was faster, or the answer was lost: it may be there now.
        known = yield from _active_run(name, pool)
        if known is None:
            raise
        return known


def _active_run(name: str, pool: str) -> Flow[Optional[documents.RunInfo]]:
    runs: List[documents.RunInfo] = yield _calls.active_runs(pool)
    return next((run for run in runs if run.name == name), None)


def reach(course: Course, update: documents.WeightUpdate, goal: str) -> Flow[documents.WeightUpdate]:
    """Wait until a weight update has come to a state."""
    waiting = course.waiting(goal)
    while True:
        there, pause = waiting.step(update)
        if there:
            return update
        yield pause
        update = yield course.look()


def commit_update(course: Course) -> Flow[documents.WeightUpdate]:
    """Bring the version into force and wait until the engines are resumed."""
    update: documents.WeightUpdate = yield course.commit()
    return (yield from reach(course, update, "committed"))


def give_up_update(course: Course) -> Flow[None]:
    """Cancel an update while another error is on its way, which must not be lost."""
    try:
        update: documents.WeightUpdate = yield course.look()
        if update.state != "committed":
            update = yield course.cancel()
            yield from reach(course, update, "cancelled")
    except HoldfastError:
        _log.warning("cancelling weight update %d of pool %s", course.version, course.pool, exc_info=True)


def turns(session: str) -> Flow[List[documents.Turn]]:
    """All turns of a session."""
    found: List[documents.Turn] = []
    after: Optional[int] = -1
    while after is not None:
        page: documents.TurnPage = yield _calls.turns(session, after)
        found += page.turns
        after = page.next
    return found


def history(session: str) -> Flow[documents.History]:
    """All events of a session."""
    events: List[documents.Event] = []
    after = 0
    while True:
        page: documents.EventPage = yield _calls.events(session, after)
        events += page.events
        if page.next is None:
            return documents.History(events, page.deliveries)
        after = page.next


def next_page(run: documents.RunInfo, paging: Paging) -> Flow[List[documents.Sample]]:
    """The stream's next samples; none at its end. ``run`` is brought up to date on the way."""
    while True:
        page: documents.SamplePage = yield paging.poll(run.state == "ended")
        ended = paging.take(page)
        if page.samples or ended:
            return page.samples
        if not page.more:
            now: documents.RunInfo = yield _calls.get_run(run.id)
            run.state, run.ended_at, run.contract = now.state, now.ended_at, now.contract
            backlog: documents.Backlog = yield _calls.backlog(run.id)
            paging.nothing_to_come(run, backlog)
