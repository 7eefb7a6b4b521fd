"""The synchronous client.

    client = holdfast.Client()
    run = client.run("math", pool="default", contract=holdfast.Contract({"rlvr": 1.0}, max_concurrency=64))
    run.submit(tasks, key="step-1")
    samples = run.samples()
    for sample in samples:
        ...            # train, make it durable
        samples.ack()  # what was not acknowledged comes again after a crash
"""

from __future__ import annotations

import os
import ssl
import time
import uuid
from contextlib import contextmanager
from typing import Any, ContextManager, Generic, Iterable, Iterator, List, Mapping, Optional, Sequence, TypeVar, Union
from urllib.parse import quote

from . import _calls, _flows, documents
from ._calls import Call, Window
from ._endpoint import Endpoint
from ._flows import Flow
from ._paging import Paging
from ._retry import RetryPolicy, Tries
from ._sync import Connections
from ._weights import Course
from .errors import HoldfastError, problem_of
from .groups import Gathering, Group
from .tasks import AnyContract, AnyTask

T = TypeVar("T")

class Client:
    """A service, over connections that are kept alive.

    Safe for use by several threads at once. ``url`` and ``token`` default to the
    environment's HOLDFAST_URL and HOLDFAST_TOKEN. It does not connect before the
    first call. Calls raise what :mod:`holdfast.errors` lists.
    """

    def __init__(
        self, url: Optional[str] = None, token: Optional[str] = None, *, retry: RetryPolicy = RetryPolicy(),
        tls: Optional[ssl.SSLContext] = None, max_idle: int = 16,
    ) -> None:
        url = url or os.environ.get("HOLDFAST_URL") or "http://127.0.0.1:8080"
        self._endpoint = Endpoint(url, token or os.environ.get("HOLDFAST_TOKEN"), tls)
        self._retry = retry
        self._connections = Connections(self._endpoint, max_idle)

    def close(self) -> None:
        """Close idle connections."""
        self._connections.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, call: Call[T]) -> T:
        """Carry out a call, repeating what may be repeated."""
        tries = Tries(self._retry, call)
        while True:
            try:
                answer = self._connections.send(call, tries.timeout())
                if answer.status < 400:
                    return call.answer(answer.status, answer.body)
                raise problem_of(answer.status, answer.reason, answer.headers, answer.body)
            except HoldfastError as error:
                pause = tries.pause(error)
            time.sleep(pause)

    def follow(self, flow: Flow[T]) -> T:
        """Carry out what takes several calls."""
        try:
            step = next(flow)
            while True:
                try:
                    answer: Any = None
                    if isinstance(step, Call):
                        answer = self.call(step)
                    else:
                        time.sleep(step)
                except BaseException as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    # Runs

    def run(
        self, name: str, *, pool: str = "default", contract: Optional[AnyContract] = None, consumer: str = "trainer",
    ) -> "Run":
        """Open a run, or go on with the pool's active one if it has this name.

        Going on makes ``contract`` the current one, if it is given; one that
        equals the current changes nothing. Raises ConflictError if the pool
        serves a run of another name, ValueError if there is none to go on with
        and no contract to open one.
        """
        return Run(self, self.follow(_flows.open_run(name, pool, contract)), consumer)

    def open_run(self, run: str, *, consumer: str = "trainer") -> "Run":
        """A run by its id."""
        return Run(self, self.call(_calls.get_run(run)), consumer)

    def session(self, session: str) -> "Session":
        """A session by its id, which is its sample's. Nothing is sent yet."""
        return Session(self, session)

    def openai_base_url(self, session: str) -> str:
        """The base URL at which an OpenAI client library speaks to the model in a session; its key is the token, or any."""
        return self._endpoint.url + "/v1/sessions/" + quote(session, safe="")

    # Weights and engines

    def policy(self, pool: str = "default") -> documents.Policy:
        """The version of the pool's weights."""
        return self.call(_calls.policy(pool))

    def put_policy(self, version: int, pool: str = "default") -> documents.Policy:
        """Tell that the pool's engines have new weights, which were put there without :meth:`policy_update`."""
        return self.call(_calls.put_policy(pool, version))

    @contextmanager
    def policy_update(
        self, pool: str, version: int, *, mode: str = "abort", cache: str = "reset", control: str = "manage",
        pause_timeout: float = 300.0, timeout: float = 600.0,
    ) -> Iterator[documents.WeightUpdate]:
        """Put new weights into the pool's engines.

            with client.policy_update("default", 7):
                load_weights()

        The engines are paused before the block and resumed under the new version
        after it. If the block raises, or the engines cannot be paused, the update
        is cancelled and they go on under the old version: weights that the block
        has replaced by then it must have put back. ``mode`` says what happens to
        generations under way: ``abort`` ends them, and their sessions go on from
        what they had, under the new weights; ``wait`` lets them finish first;
        ``keep`` and ``in_place`` freeze them. ``cache`` (reset or salt) says how
        prefixes of the old weights are kept from being used. With
        ``control="observe"`` the trainer pauses and resumes the engines itself.
        Times are in seconds: ``pause_timeout`` bounds one engine's pausing,
        ``timeout`` each wait of this method. After a crash in the block the same
        call goes on with the same update. Raises WeightUpdateError.
        """
        course = Course(pool, version, mode, cache, control, pause_timeout, timeout)
        update = self.call(course.begin())
        try:
            yield self.follow(_flows.reach(course, update, "paused"))
        except BaseException:
            self.follow(_flows.give_up_update(course))
            raise
        self.follow(_flows.commit_update(course))

    def weight_updates(self, pool: str = "default", limit: int = 100) -> List[documents.WeightUpdate]:
        """The last entries of the pool's history of policy versions, newest first."""
        return self.call(_calls.list_weights(pool, limit))

    def pools(self) -> List[documents.Pool]:
        """All pools."""
        return self.call(_calls.pools())

    def router(self, pool: str = "default") -> Any:
        """What the pool's router knows and why it decided as it did, as plain data."""
        return self.call(_calls.router(pool))

    def instances(self, pool: str = "default") -> List[documents.Instance]:
        """The pool's engines."""
        return self.call(_calls.instances(pool))

    def register_instance(self, instance: Mapping[str, Any], pool: str = "default") -> documents.Instance:
        """Add an engine (``{"id": ..., "url": ...}``), or announce a known one anew."""
        return self.call(_calls.register_instance(pool, instance))

    def heartbeat_instance(self, instance: str, pool: str = "default") -> None:
        """Renew an engine's time to live."""
        self.call(_calls.heartbeat_instance(pool, instance))

    def drain_instance(self, instance: str, draining: bool = True, pool: str = "default") -> None:
        """Start or end draining an engine."""
        self.call(_calls.drain_instance(pool, instance, draining))

    def remove_instance(self, instance: str, pool: str = "default") -> None:
        """Take an engine out of its pool."""
        self.call(_calls.remove_instance(pool, instance))


class Run:
    """A training run, read as one consumer.

    ``info`` is the run as it was when the handle was made. As safe for threads
    as its client; its streams are for one thread each.
    """

    def __init__(self, client: Client, info: documents.RunInfo, consumer: str) -> None:
        self.client, self.info, self.consumer = client, info, consumer

    @property
    def id(self) -> str:
        """The run's id."""
        return self.info.id

    def submit(
        self, tasks: Iterable[AnyTask], *, policy_version: Optional[int] = None, key: Optional[str] = None, compress: bool = False,
    ) -> documents.Batch:
        """Release a batch of tasks: all of it or nothing.

        ``key`` makes it safe to submit again after a crash: the same key and
        tasks give the same batch, marked ``replayed``; the same key with other
        tasks is an IdempotencyKeyReusedError. Use the training step, say. Without
        it a random one is taken, which makes the client's own repetitions safe
        and no more. ``policy_version`` defaults to the pool's. ``compress`` is
        for networks slower than gzip.
        """
        return self.client.call(_calls.submit(self.id, key or uuid.uuid4().hex, tasks, policy_version, compress))

    def batch(self, batch: str) -> documents.Batch:
        """A batch by its id."""
        return self.client.call(_calls.get_batch(self.id, batch))

    def samples(
        self, *, consumer: Optional[str] = None, after: str = "", start: str = "", batch: str = "", wait: float = 30.0,
        timeout: Optional[float] = None, limit: Optional[int] = None, max_bytes: Optional[int] = None, encoding: str = "packed",
        statuses: Sequence[str] = (),
    ) -> "Samples":
        """Samples in completion order, as long as there may come more.

        Begins at ``after``, which may be any earlier place such as a checkpoint has,
        else where the consumer acknowledged last. A consumer that is not known yet
        begins at ``start``: beginning, available (what is not pruned) or now.
        ``consumer`` defaults to the run's; "" reads without a trace. ``batch``
        narrows to one batch, and is read without a consumer.
        ``wait`` bounds one poll, in seconds up to 60. The stream ends when nothing
        came for ``timeout`` seconds (0: at what is there now; None: never), and
        when the run has ended and all its samples are read. ``encoding`` is
        packed, json or none; ``statuses`` selects, all by default.
        """
        name = ("" if batch else self.consumer) if consumer is None else consumer
        query = _calls.SamplesQuery(name, after, limit, max_bytes, encoding, tuple(statuses), start, batch)
        return Samples(self, Paging(self.id, query, wait, timeout))

    def groups(
        self, *, consumer: Optional[str] = None, after: str = "", start: str = "", wait: float = 30.0, timeout: Optional[float] = None,
        limit: Optional[int] = None, max_bytes: Optional[int] = None, encoding: str = "packed",
    ) -> "Groups":
        """Whole groups, each once, in the order in which the last of their members ended.

        A group comes with all its members, also the spare, refilled and unusable
        ones. A consumer keeps to one order: one that has read :meth:`samples` is
        refused here (ConflictError). Parameters are those of :meth:`samples`;
        ``after`` is a group's or the stream's ``cursor``, such as a checkpoint has.
        """
        query = _calls.SamplesQuery(
            self.consumer if consumer is None else consumer, after, limit, max_bytes, encoding, start=start, whole_groups=True)
        return Groups(self, Paging(self.id, query, wait, timeout))

    def ack(self, cursor: str, *, consumer: Optional[str] = None) -> documents.Consumer:
        """Acknowledge every sample up to a cursor; an older one than the last changes nothing."""
        return self.client.call(_calls.ack(self.id, self.consumer if consumer is None else consumer, cursor))

    def consumers(self) -> List[documents.Consumer]:
        """All readers of the run's samples with their places."""
        return self.client.call(_calls.consumers(self.id))

    def remove_consumer(self, consumer: str) -> None:
        """Forget a reader that reads no more: neither pruning nor back-pressure waits for it any longer."""
        self.client.call(_calls.remove_consumer(self.id, consumer))

    def backlog(self) -> documents.Backlog:
        """Where the released samples are, per class."""
        return self.client.call(_calls.backlog(self.id))

    def mixture(self, window: Window = None) -> documents.Mixture:
        """The mixture and its drift, of the whole run and of a window if one is given."""
        return self.client.call(_calls.mixture(self.id, window))

    def metrics(self, window: Window = None) -> documents.Metrics:
        """Rates and latencies of sessions that ended in a window: the last seconds, or (from, to)."""
        return self.client.call(_calls.metrics(self.id, window))

    def pace(self, *, group_size: int = 1, step_samples: int = 0, ask_again: float = 15.0) -> documents.Pace:
        """How much more of each class may be released now, within the staleness bound and true to rho.

        Advice: nothing is refused for not following it. ``step_samples`` is what
        one training step consumes, ``ask_again`` in how many seconds the next
        question comes. Acknowledge samples when their step is committed: what is
        not acknowledged counts as waiting for one.
        """
        return self.client.call(_calls.pace(self.id, group_size, step_samples, ask_again))

    def export(
        self, path: "Union[str, os.PathLike[str]]", *, format: str = "", after: str = "", start: str = "", statuses: Sequence[str] = (),
    ) -> None:
        """Write the run's samples to a file, in completion order, up to those that have ended by now.

        ``format`` is jsonl or parquet, by default what the name ends in. Without a
        cursor to go on after it begins at ``start``: beginning, which is refused once
        samples are pruned, or available. The file is there when it is whole. No
        consumer's place moves.
        """
        form = format or os.path.splitext(os.fspath(path))[1].lstrip(".") or "jsonl"
        with _calls.Download(path) as download:
            self.client.call(_calls.export(self.id, form, after, start, statuses, download))

    def sessions(
        self, *, batch: str = "", task: str = "", class_name: str = "", state: str = "",
    ) -> Iterator[documents.SessionInfo]:
        """Sessions in release order, all by default."""
        after = ""
        while True:
            page = self.client.call(_calls.sessions(self.id, batch, task, class_name, state, after))
            yield from page.sessions
            if not page.next:
                return
            after = page.next

    def session(self, session: str) -> "Session":
        """A session by its id. Nothing is sent yet."""
        return Session(self.client, session)

    def policy_update(self, version: int, **terms: Any) -> ContextManager[documents.WeightUpdate]:
        """The client's policy_update for the run's pool, with the same terms."""
        return self.client.policy_update(self.info.pool, version, **terms)

    def refresh(self) -> documents.RunInfo:
        """Read the run anew."""
        self.info = self.client.call(_calls.get_run(self.id))
        return self.info

    def put_contract(self, contract: AnyContract) -> documents.ContractVersion:
        """Make a contract current for what is released from now on."""
        return self.client.call(_calls.put_contract(self.id, contract))

    def contract_history(self) -> List[documents.ContractVersion]:
        """All versions of the contract, oldest first."""
        return self.client.call(_calls.contract_history(self.id))

    def end(self) -> documents.RunInfo:
        """End the run for good. Its samples stay readable."""
        self.info = self.client.call(_calls.end_run(self.id))
        return self.info


class Session:
    """One rollout's audit trail."""

    def __init__(self, client: Client, session: str) -> None:
        self._client, self.id = client, session

    def info(self) -> documents.SessionInfo:
        """Where it stands, and where its time went."""
        return self._client.call(_calls.get_session(self.id))

    def turns(self) -> List[documents.Turn]:
        """All its model calls."""
        return self._client.follow(_flows.turns(self.id))

    def events(self) -> documents.History:
        """All that happened to it: released, held and why, admitted where, ended, delivered."""
        return self._client.follow(_flows.history(self.id))

    def audit(self) -> documents.Audit:
        """All of it in one document: released, held, admitted, every turn and retry, scored, delivered, acknowledged."""
        return self._client.call(_calls.audit(self.id))

    def cancel(self, reason: str = "") -> documents.SessionInfo:
        """End it as cancelled, at once if it is queued, else soon. Harmless once it has ended."""
        return self._client.call(_calls.cancel(self.id, reason))

    def generate(
        self, request_id: str, *, token_ids: Optional[Iterable[int]] = None, append_token_ids: Optional[Iterable[int]] = None, **sampling: Any,
    ) -> documents.HarnessTurn:
        """Make one model call in a session whose loop runs here (environment kind ``external``).

        ``token_ids`` is the whole context, which must begin with all that the
        session has; ``append_token_ids`` is what follows it; neither goes on from
        where it is. ``request_id`` tells the call from the session's others: sent
        again it gives the turn that it made, so that repetition is safe. Other
        arguments are the interface's, such as ``max_tokens`` and ``temperature``.
        Waits as long as the session is queued or held, hours if need be.
        """
        return self._client.call(_calls.generate(self.id, request_id, token_ids, append_token_ids, sampling))

    def put_columns(self, *columns: documents.Column) -> None:
        """Give further arrays for the sample, while the session is under way.

        ``session.put_columns(holdfast.Column.of("experts", array))``; at most 16
        and 32 MiB for a sample.
        """
        self._client.call(_calls.put_columns(self.id, columns))

    def complete(
        self, status: str = "completed", *, reward: Optional[float] = None, detail: Any = None, problem: str = "",
    ) -> documents.SessionInfo:
        """End a session whose loop runs here.

        ``status`` is completed, truncated or failed; ``failed`` with ``problem``
        is for a harness that broke, and is no reward of zero. Without ``reward``
        the task's scorer gives it, if it has one.
        """
        return self._client.call(_calls.complete(self.id, status, reward, detail, problem))


class _Stream(Generic[T]):
    """What streams of samples and of groups share. Going on after the end looks again."""

    def __init__(self, run: Run, paging: Paging) -> None:
        self._run, self._paging = run, paging

    def _next_page(self) -> List[documents.Sample]:
        """The next samples; none at the end of the stream."""
        return self._run.client.follow(_flows.next_page(self._run.info, self._paging))


class Samples(_Stream[documents.Sample], Iterator[documents.Sample]):
    """A run's samples in completion order. For one thread; after an error it may go on and skips nothing."""

    def __init__(self, run: Run, paging: Paging) -> None:
        super().__init__(run, paging)
        self._page: List[documents.Sample] = []
        self._given = ""

    @property
    def cursor(self) -> str:
        """The place after the last sample given out; empty before the first."""
        return self._given

    def __next__(self) -> documents.Sample:
        if not self._page:
            self._paging.begin()
            self._page = self._next_page()[::-1]
            if not self._page:
                raise StopIteration
        sample = self._page.pop()
        self._given = sample.cursor
        return sample

    def ack(self) -> Optional[documents.Consumer]:
        """Acknowledge every sample given out so far; None if there is none."""
        if not self._paging.query.consumer:
            raise ValueError("samples that are read without a consumer cannot be acknowledged")
        return self._run.ack(self._given, consumer=self._paging.query.consumer) if self._given else None


class Groups(_Stream[Group], Iterator[Group]):
    """A run's groups in the service's order. For one thread; after an error it may go on and skips nothing."""

    def __init__(self, run: Run, paging: Paging) -> None:
        super().__init__(run, paging)
        self._gathering = Gathering()
        self._ready: List[Group] = []
        self._given = ""

    @property
    def cursor(self) -> str:
        """The place after the last group given out, for the trainer's checkpoint; empty before the first."""
        return self._given

    def __next__(self) -> Group:
        self._paging.begin()
        while not self._ready:
            samples = self._next_page()
            if not samples:
                raise StopIteration
            self._ready = [group for group in map(self._gathering.add, samples) if group is not None][::-1]
        group = self._ready.pop()
        self._given = group.cursor
        return group

    def ack(self, group: Optional[Group] = None) -> Optional[documents.Consumer]:
        """Acknowledge all groups given out, or those up to ``group``.

        Call it when they are durable in the trainer. None if there is none yet.
        """
        name, cursor = self._paging.query.consumer, group.cursor if group else self._given
        if not name:
            raise ValueError("groups that are read without a consumer cannot be acknowledged")
        return self._run.ack(cursor, consumer=name) if cursor else None
