"""The asynchronous client: that of :mod:`holdfast.client`, with coroutines.

    async with AsyncClient() as client:
        run = await client.run("math", contract=holdfast.Contract({"rlvr": 1.0}, max_concurrency=64))
        async for sample in run.samples():
            ...

Methods of the same name do the same; what each promises stands there. It speaks
HTTP over asyncio streams in the event loop itself: a poll that waits is a socket
and a coroutine, no thread. A client belongs to the event loop that it is first
used in. Encoding of batches and decoding of pages run in the loop; a page's
tokens are decoded when they are asked for.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import uuid
from contextlib import asynccontextmanager
from typing import Any, AsyncContextManager, AsyncIterator, Generic, Iterable, List, Mapping, Optional, Sequence, TypeVar, Union
from urllib.parse import quote

from . import _calls, _flows, documents
from ._async import AsyncConnections
from ._calls import Call, Window
from ._endpoint import Endpoint
from ._flows import Flow
from ._paging import Paging
from ._retry import RetryPolicy, Tries
from ._weights import Course
from .errors import HoldfastError, problem_of
from .groups import Gathering, Group
from .tasks import AnyContract, AnyTask

T = TypeVar("T")

class AsyncClient:
    """A service, for one event loop. Any number of its tasks may use it at once."""

    def __init__(
        self, url: Optional[str] = None, token: Optional[str] = None, *, retry: RetryPolicy = RetryPolicy(),
        tls: Optional[ssl.SSLContext] = None, max_idle: int = 64,
    ) -> None:
        url = url or os.environ.get("HOLDFAST_URL") or "http://127.0.0.1:8080"
        self._endpoint = Endpoint(url, token or os.environ.get("HOLDFAST_TOKEN"), tls)
        self._retry = retry
        self._connections = AsyncConnections(self._endpoint, max_idle)

    async def close(self) -> None:
        """Close idle connections."""
        await self._connections.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(self, call: Call[T]) -> T:
        """Carry out a call, repeating what may be repeated."""
        tries = Tries(self._retry, call)
        while True:
            try:
                answer = await self._connections.send(call, tries.timeout())
                if answer.status < 400:
                    return call.answer(answer.status, answer.body)
                raise problem_of(answer.status, answer.reason, answer.headers, answer.body)
            except HoldfastError as error:
                pause = tries.pause(error)
            await asyncio.sleep(pause)

    async def follow(self, flow: Flow[T]) -> T:
        """Carry out what takes several calls."""
        try:
            step = next(flow)
            while True:
                try:
                    answer: Any = None
                    if isinstance(step, Call):
                        answer = await self.call(step)
                    else:
                        await asyncio.sleep(step)
                except BaseException as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    # Runs

    async def run(
        self, name: str, *, pool: str = "default", contract: Optional[AnyContract] = None, consumer: str = "trainer",
    ) -> "AsyncRun":
        """Open a run, or go on with the pool's active one if it has this name."""
        return AsyncRun(self, await self.follow(_flows.open_run(name, pool, contract)), consumer)

    async def open_run(self, run: str, *, consumer: str = "trainer") -> "AsyncRun":
        """A run by its id."""
        return AsyncRun(self, await self.call(_calls.get_run(run)), consumer)

    def session(self, session: str) -> "AsyncSession":
        """A session by its id, which is its sample's. Nothing is sent yet."""
        return AsyncSession(self, session)

    def openai_base_url(self, session: str) -> str:
        """The base URL at which an OpenAI client library speaks to the model in a session; its key is the token, or any."""
        return self._endpoint.url + "/v1/sessions/" + quote(session, safe="")

    # Weights and engines

    async def policy(self, pool: str = "default") -> documents.Policy:
        """The version of the pool's weights."""
        return await self.call(_calls.policy(pool))

    async def put_policy(self, version: int, pool: str = "default") -> documents.Policy:
        """Tell that the pool's engines have new weights, which were put there without :meth:`policy_update`."""
        return await self.call(_calls.put_policy(pool, version))

    @asynccontextmanager
    async def policy_update(
        self, pool: str, version: int, *, mode: str = "abort", cache: str = "reset", control: str = "manage",
        pause_timeout: float = 300.0, timeout: float = 600.0,
    ) -> AsyncIterator[documents.WeightUpdate]:
        """Put new weights into the pool's engines: ``async with client.policy_update(pool, version):``."""
        course = Course(pool, version, mode, cache, control, pause_timeout, timeout)
        update = await self.call(course.begin())
        try:
            yield await self.follow(_flows.reach(course, update, "paused"))
        except BaseException:
            # Also when the task is cancelled: the engines must not stay paused.
            await asyncio.shield(asyncio.ensure_future(self.follow(_flows.give_up_update(course))))
            raise
        await self.follow(_flows.commit_update(course))

    async def weight_updates(self, pool: str = "default", limit: int = 100) -> List[documents.WeightUpdate]:
        """The last entries of the pool's history of policy versions, newest first."""
        return await self.call(_calls.list_weights(pool, limit))

    async def pools(self) -> List[documents.Pool]:
        """All pools."""
        return await self.call(_calls.pools())

    async def router(self, pool: str = "default") -> Any:
        """What the pool's router knows and why it decided as it did, as plain data."""
        return await self.call(_calls.router(pool))

    async def instances(self, pool: str = "default") -> List[documents.Instance]:
        """The pool's engines."""
        return await self.call(_calls.instances(pool))

    async def register_instance(self, instance: Mapping[str, Any], pool: str = "default") -> documents.Instance:
        """Add an engine, or announce a known one anew."""
        return await self.call(_calls.register_instance(pool, instance))

    async def heartbeat_instance(self, instance: str, pool: str = "default") -> None:
        """Renew an engine's time to live."""
        await self.call(_calls.heartbeat_instance(pool, instance))

    async def drain_instance(self, instance: str, draining: bool = True, pool: str = "default") -> None:
        """Start or end draining an engine."""
        await self.call(_calls.drain_instance(pool, instance, draining))

    async def remove_instance(self, instance: str, pool: str = "default") -> None:
        """Take an engine out of its pool."""
        await self.call(_calls.remove_instance(pool, instance))


class AsyncRun:
    """A training run, read as one consumer. Its streams are for one task each."""

    def __init__(self, client: AsyncClient, info: documents.RunInfo, consumer: str) -> None:
        self.client, self.info, self.consumer = client, info, consumer

    @property
    def id(self) -> str:
        """The run's id."""
        return self.info.id

    async def submit(
        self, tasks: Iterable[AnyTask], *, policy_version: Optional[int] = None, key: Optional[str] = None, compress: bool = False,
    ) -> documents.Batch:
        """Release a batch of tasks: all of it or nothing."""
        return await self.client.call(_calls.submit(self.id, key or uuid.uuid4().hex, tasks, policy_version, compress))

    async def batch(self, batch: str) -> documents.Batch:
        """A batch by its id."""
        return await self.client.call(_calls.get_batch(self.id, batch))

    def samples(
        self, *, consumer: Optional[str] = None, after: str = "", start: str = "", batch: str = "", wait: float = 30.0,
        timeout: Optional[float] = None, limit: Optional[int] = None, max_bytes: Optional[int] = None, encoding: str = "packed",
        statuses: Sequence[str] = (),
    ) -> "AsyncSamples":
        """Samples in completion order, as long as there may come more."""
        name = ("" if batch else self.consumer) if consumer is None else consumer
        query = _calls.SamplesQuery(name, after, limit, max_bytes, encoding, tuple(statuses), start, batch)
        return AsyncSamples(self, Paging(self.id, query, wait, timeout))

    def groups(
        self, *, consumer: Optional[str] = None, after: str = "", start: str = "", wait: float = 30.0, timeout: Optional[float] = None,
        limit: Optional[int] = None, max_bytes: Optional[int] = None, encoding: str = "packed",
    ) -> "AsyncGroups":
        """Whole groups, each once, in the order in which the last of their members ended."""
        query = _calls.SamplesQuery(
            self.consumer if consumer is None else consumer, after, limit, max_bytes, encoding, start=start, whole_groups=True)
        return AsyncGroups(self, Paging(self.id, query, wait, timeout))

    async def ack(self, cursor: str, *, consumer: Optional[str] = None) -> documents.Consumer:
        """Acknowledge every sample up to a cursor; an older one than the last changes nothing."""
        return await self.client.call(_calls.ack(self.id, self.consumer if consumer is None else consumer, cursor))

    async def consumers(self) -> List[documents.Consumer]:
        """All readers of the run's samples with their places."""
        return await self.client.call(_calls.consumers(self.id))

    async def remove_consumer(self, consumer: str) -> None:
        """Forget a reader that reads no more: neither pruning nor back-pressure waits for it any longer."""
        await self.client.call(_calls.remove_consumer(self.id, consumer))

    async def backlog(self) -> documents.Backlog:
        """Where the released samples are, per class."""
        return await self.client.call(_calls.backlog(self.id))

    async def mixture(self, window: Window = None) -> documents.Mixture:
        """The mixture and its drift, of the whole run and of a window if one is given."""
        return await self.client.call(_calls.mixture(self.id, window))

    async def metrics(self, window: Window = None) -> documents.Metrics:
        """Rates and latencies of sessions that ended in a window."""
        return await self.client.call(_calls.metrics(self.id, window))

    async def pace(self, *, group_size: int = 1, step_samples: int = 0, ask_again: float = 15.0) -> documents.Pace:
        """How much more of each class may be released now, within the staleness bound and true to rho."""
        return await self.client.call(_calls.pace(self.id, group_size, step_samples, ask_again))

    async def export(
        self, path: "Union[str, os.PathLike[str]]", *, format: str = "", after: str = "", start: str = "", statuses: Sequence[str] = (),
    ) -> None:
        """Write the run's samples to a file, in completion order, up to those that have ended by now.

        Writing to the file is done in the event loop.
        """
        form = format or os.path.splitext(os.fspath(path))[1].lstrip(".") or "jsonl"
        with _calls.Download(path) as download:
            await self.client.call(_calls.export(self.id, form, after, start, statuses, download))

    async def sessions(
        self, *, batch: str = "", task: str = "", class_name: str = "", state: str = "",
    ) -> AsyncIterator[documents.SessionInfo]:
        """Sessions in release order, all by default."""
        after = ""
        while True:
            page = await self.client.call(_calls.sessions(self.id, batch, task, class_name, state, after))
            for session in page.sessions:
                yield session
            if not page.next:
                return
            after = page.next

    def session(self, session: str) -> "AsyncSession":
        """A session by its id. Nothing is sent yet."""
        return AsyncSession(self.client, session)

    def policy_update(self, version: int, **terms: Any) -> AsyncContextManager[documents.WeightUpdate]:
        """The client's policy_update for the run's pool, with the same terms."""
        return self.client.policy_update(self.info.pool, version, **terms)

    async def refresh(self) -> documents.RunInfo:
        """Read the run anew."""
        self.info = await self.client.call(_calls.get_run(self.id))
        return self.info

    async def put_contract(self, contract: AnyContract) -> documents.ContractVersion:
        """Make a contract current for what is released from now on."""
        return await self.client.call(_calls.put_contract(self.id, contract))

    async def contract_history(self) -> List[documents.ContractVersion]:
        """All versions of the contract, oldest first."""
        return await self.client.call(_calls.contract_history(self.id))

    async def end(self) -> documents.RunInfo:
        """End the run for good. Its samples stay readable."""
        self.info = await self.client.call(_calls.end_run(self.id))
        return self.info


class AsyncSession:
    """One rollout's audit trail."""

    def __init__(self, client: AsyncClient, session: str) -> None:
        self._client, self.id = client, session

    async def info(self) -> documents.SessionInfo:
        """Where it stands, and where its time went."""
        return await self._client.call(_calls.get_session(self.id))

    async def turns(self) -> List[documents.Turn]:
        """All its model calls."""
        return await self._client.follow(_flows.turns(self.id))

    async def events(self) -> documents.History:
        """All that happened to it, and who got its sample."""
        return await self._client.follow(_flows.history(self.id))

    async def audit(self) -> documents.Audit:
        """All of it in one document: released, held, admitted, every turn and retry, scored, delivered, acknowledged."""
        return await self._client.call(_calls.audit(self.id))

    async def cancel(self, reason: str = "") -> documents.SessionInfo:
        """End it as cancelled."""
        return await self._client.call(_calls.cancel(self.id, reason))

    async def generate(
        self, request_id: str, *, token_ids: Optional[Iterable[int]] = None, append_token_ids: Optional[Iterable[int]] = None, **sampling: Any,
    ) -> documents.HarnessTurn:
        """Make one model call in a session whose loop runs here (environment kind ``external``)."""
        return await self._client.call(_calls.generate(self.id, request_id, token_ids, append_token_ids, sampling))

    async def put_columns(self, *columns: documents.Column) -> None:
        """Give further arrays for the sample, while the session is under way."""
        await self._client.call(_calls.put_columns(self.id, columns))

    async def complete(
        self, status: str = "completed", *, reward: Optional[float] = None, detail: Any = None, problem: str = "",
    ) -> documents.SessionInfo:
        """End a session whose loop runs here."""
        return await self._client.call(_calls.complete(self.id, status, reward, detail, problem))


class _AsyncStream(Generic[T]):
    """What streams of samples and of groups share. Going on after the end looks again."""

    def __init__(self, run: AsyncRun, paging: Paging) -> None:
        self._run, self._paging = run, paging

    async def _next_page(self) -> List[documents.Sample]:
        """The next samples; none at the end of the stream."""
        return await self._run.client.follow(_flows.next_page(self._run.info, self._paging))


class AsyncSamples(_AsyncStream[documents.Sample], AsyncIterator[documents.Sample]):
    """A run's samples in completion order. For one task; after an error or a cancellation it may go on and skips nothing."""

    def __init__(self, run: AsyncRun, paging: Paging) -> None:
        super().__init__(run, paging)
        self._page: List[documents.Sample] = []
        self._given = ""

    @property
    def cursor(self) -> str:
        """The place after the last sample given out; empty before the first."""
        return self._given

    async def __anext__(self) -> documents.Sample:
        if not self._page:
            self._paging.begin()
            self._page = (await self._next_page())[::-1]
            if not self._page:
                raise StopAsyncIteration
        sample = self._page.pop()
        self._given = sample.cursor
        return sample

    async def ack(self) -> Optional[documents.Consumer]:
        """Acknowledge every sample given out so far; None if there is none."""
        if not self._paging.query.consumer:
            raise ValueError("samples that are read without a consumer cannot be acknowledged")
        return await self._run.ack(self._given, consumer=self._paging.query.consumer) if self._given else None


class AsyncGroups(_AsyncStream[Group], AsyncIterator[Group]):
    """A run's groups in the service's order. For one task; after an error or a cancellation it may go on and skips nothing."""

    def __init__(self, run: AsyncRun, paging: Paging) -> None:
        super().__init__(run, paging)
        self._gathering = Gathering()
        self._ready: List[Group] = []
        self._given = ""

    @property
    def cursor(self) -> str:
        """The place after the last group given out, for the trainer's checkpoint; empty before the first."""
        return self._given

    async def __anext__(self) -> Group:
        self._paging.begin()
        while not self._ready:
            samples = await self._next_page()
            if not samples:
                raise StopAsyncIteration
            self._ready = [group for group in map(self._gathering.add, samples) if group is not None][::-1]
        group = self._ready.pop()
        self._given = group.cursor
        return group

    async def ack(self, group: Optional[Group] = None) -> Optional[documents.Consumer]:
        """Acknowledge all groups given out, or those up to ``group``, once they are durable; None if there is none yet."""
        name, cursor = self._paging.query.consumer, group.cursor if group else self._given
        if not name:
            raise ValueError("groups that are read without a consumer cannot be acknowledged")
        return await self._run.ack(cursor, consumer=name) if cursor else None
