"""The operations of the interface as values, for both clients to carry out.

A call says what is sent, how its answer is read, and whether doing it twice
changes no more than doing it once. Nothing here does I/O.
"""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, BinaryIO, Callable, Dict, Generic, Iterable, List, Mapping, Optional, Sequence, Tuple, Type, TypeVar, Union
from urllib.parse import quote, urlencode

from . import _decode, documents
from .errors import HoldfastError, ProtocolError
from .tasks import AnyContract, AnyTask, batch_body, contract_json, to_json
from .tokens import pack_ids

T = TypeVar("T")

Window = Union[None, float, Tuple[Optional[datetime], Optional[datetime]]]
"""The last so many seconds, or from and to, of which either may be None."""


@dataclass
class Call(Generic[T]):
    """One request, which may be sent more than once if it is ``repeatable``."""

    method: str
    path: Sequence[str]
    read: Callable[[Any], T]
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Optional[bytes] = None
    repeatable: bool = True
    wait_seconds: float = 0.0
    """How long the service may wait by the caller's own wish; adds to the time of a try."""
    upload: bool = False
    """A batch: the service takes minutes over it if it must."""
    sink: Optional["Download"] = None
    """Takes the body of a success as it comes, instead of it being kept in memory."""

    def target(self, prefix: str) -> str:
        """Path and query of the request line."""
        target = prefix + "/api/v1/" + "/".join(quote(piece, safe="") for piece in self.path)
        given = {name: value for name, value in self.query.items() if value not in (None, "")}
        return target + "?" + urlencode(given) if given else target

    def answer(self, status: int, body: bytes) -> T:
        """Read the answer of a success."""
        if status == 204 or self.sink is not None:
            return self.read(None)
        try:
            document = json.loads(body)
        except ValueError as error:
            raise ProtocolError(f"{self.method} {'/'.join(self.path)}: the answer is not JSON: {error}") from error
        return self.read(document)


class Download:
    """A file that is there when all of it has come, and not before: until then it is beside its place, as ``.part``.

    A context manager: leaving it with an error leaves nothing behind.
    """

    def __init__(self, path: "Union[str, os.PathLike[str]]") -> None:
        self._path, self._part = os.fspath(path), os.fspath(path) + ".part"
        self._file: Optional[BinaryIO] = None

    def begin(self) -> None:
        """Take a body from its beginning: a repeated call begins anew."""
        try:
            if self._file is None:
                self._file = open(self._part, "wb")
            self._file.seek(0)
            self._file.truncate()
        except OSError as error:
            raise self._failed(error) from error

    def write(self, piece: bytes) -> None:
        """Take what comes next of the body."""
        assert self._file is not None
        try:
            self._file.write(piece)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> HoldfastError:
        # Not to be taken for a failure of the connection, which would be tried again.
        return HoldfastError(f"writing {self._part}: {error}")

    def __enter__(self) -> "Download":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._file is None:
            return
        self._file.close()
        if kind is None:
            os.replace(self._part, self._path)
        else:
            os.unlink(self._part)


def _reader(cls: Type[T]) -> Callable[[Any], T]:
    return lambda document: _decode.decode(cls, document)


def _member(name: str, cls: Type[T]) -> Callable[[Any], List[T]]:
    def read(document: Any) -> List[T]:
        if not isinstance(document, dict) or not isinstance(document.get(name), list):
            raise ProtocolError(f"expected an object with a list of {name}")
        return [_decode.decode(cls, one) for one in document[name]]

    return read


def _nothing(_: Any) -> None:
    return None


def _json(document: Any) -> bytes:
    return to_json(document).encode()


def _window(window: Window) -> Dict[str, str]:
    if window is None:
        return {}
    if isinstance(window, tuple):
        begin, end = window
        bounds = {"from": begin, "to": end}
        return {name: _decode.format_time(when) for name, when in bounds.items() if when is not None}
    return {"window": str(float(window))}


def create_run(name: str, pool: str, contract: AnyContract) -> Call[documents.RunInfo]:
    """Not repeatable: a second run would conflict with the first."""
    body = _json({"name": name, "pool": pool, "contract": contract_json(contract)})
    return Call("POST", ["runs"], _reader(documents.RunInfo), body=body, repeatable=False)


def active_runs(pool: str) -> Call[List[documents.RunInfo]]:
    return Call("GET", ["runs"], _member("runs", documents.RunInfo), {"pool": pool, "state": "active"})


def get_run(run: str) -> Call[documents.RunInfo]:
    return Call("GET", ["runs", run], _reader(documents.RunInfo))


def end_run(run: str) -> Call[documents.RunInfo]:
    return Call("POST", ["runs", run, "end"], _reader(documents.RunInfo))


def put_contract(run: str, contract: AnyContract) -> Call[documents.ContractVersion]:
    return Call("PUT", ["runs", run, "contract"], _reader(documents.ContractVersion), body=_json(contract_json(contract)))


def contract_history(run: str) -> Call[List[documents.ContractVersion]]:
    return Call("GET", ["runs", run, "contract", "history"], _member("versions", documents.ContractVersion))


def submit(
    run: str, key: str, tasks: Iterable[AnyTask], policy_version: Optional[int], compress: bool,
) -> Call[documents.Batch]:
    """Repeatable, since the key makes it so."""
    body, headers = batch_body(tasks, policy_version), {"Idempotency-Key": key}
    if compress:
        body = gzip.compress(body, 1, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Call("POST", ["runs", run, "batches"], _reader(documents.Batch), headers=headers, body=body, upload=True)


def get_batch(run: str, batch: str) -> Call[documents.Batch]:
    return Call("GET", ["runs", run, "batches", batch], _reader(documents.Batch))


@dataclass(frozen=True)
class SamplesQuery:
    """Which samples to read, and how; empty and None mean the service's own choice."""

    consumer: str = ""
    after: str = ""
    limit: Optional[int] = None
    max_bytes: Optional[int] = None
    encoding: str = "packed"
    statuses: Tuple[str, ...] = ()
    start: str = ""
    batch: str = ""
    whole_groups: bool = False


MAX_WAIT_SECONDS = 60.0
"""The longest that the service lets a poll wait."""


def samples(run: str, query: SamplesQuery, wait: float) -> Call[documents.SamplePage]:
    wait = min(max(wait, 0.0), MAX_WAIT_SECONDS)
    parameters = {
        "consumer": query.consumer, "after": query.after, "limit": query.limit, "max_bytes": query.max_bytes,
        "encoding": query.encoding, "status": ",".join(query.statuses), "wait": f"{wait:.3f}s" if wait > 0 else None,
        "groups": "whole" if query.whole_groups else None, "start": query.start, "batch": query.batch,
    }
    return Call("GET", ["runs", run, "samples"], documents.page_of, parameters, wait_seconds=wait)


def ack(run: str, consumer: str, cursor: str) -> Call[documents.Consumer]:
    return Call("POST", ["runs", run, "ack"], _reader(documents.Consumer), body=_json({"consumer": consumer, "cursor": cursor}))


def consumers(run: str) -> Call[List[documents.Consumer]]:
    return Call("GET", ["runs", run, "consumers"], _member("consumers", documents.Consumer))


def remove_consumer(run: str, consumer: str) -> Call[None]:
    return Call("DELETE", ["runs", run, "consumers", consumer], _nothing)


def backlog(run: str) -> Call[documents.Backlog]:
    return Call("GET", ["runs", run, "backlog"], _reader(documents.Backlog))


def mixture(run: str, window: Window) -> Call[documents.Mixture]:
    return Call("GET", ["runs", run, "mixture"], _reader(documents.Mixture), _window(window))


def metrics(run: str, window: Window) -> Call[documents.Metrics]:
    return Call("GET", ["runs", run, "metrics"], _reader(documents.Metrics), _window(window))


def pace(run: str, group_size: int, step_samples: int, ask_again: float) -> Call[documents.Pace]:
    parameters = {"group_size": group_size, "step_samples": step_samples, "ask_again_seconds": ask_again}
    return Call("GET", ["runs", run, "pace"], _reader(documents.Pace), parameters)


_EXPORT_SECONDS = 6 * 3600.0


def export(run: str, form: str, after: str, start: str, statuses: Sequence[str], sink: Download) -> Call[None]:
    parameters = {"format": form, "after": after, "start": start, "status": ",".join(statuses)}
    return Call("GET", ["runs", run, "export"], _nothing, parameters, wait_seconds=_EXPORT_SECONDS, sink=sink)


def sessions(
    run: str, batch: str = "", task: str = "", class_name: str = "", state: str = "", after: str = "", limit: int = 1000,
) -> Call[documents.SessionPage]:
    parameters = {"batch": batch, "task": task, "class": class_name, "state": state, "after": after, "limit": limit}
    return Call("GET", ["runs", run, "sessions"], _reader(documents.SessionPage), parameters)


def get_session(session: str) -> Call[documents.SessionInfo]:
    return Call("GET", ["sessions", session], _reader(documents.SessionInfo))


def turns(session: str, after: int, limit: int = 1000) -> Call[documents.TurnPage]:
    return Call("GET", ["sessions", session, "turns"], _reader(documents.TurnPage), {"after": after, "limit": limit})


def events(session: str, after: int, limit: int = 1000) -> Call[documents.EventPage]:
    return Call("GET", ["sessions", session, "events"], _reader(documents.EventPage), {"after": after, "limit": limit})


def audit(session: str) -> Call[documents.Audit]:
    return Call("GET", ["sessions", session, "audit"], _reader(documents.Audit))


def cancel(session: str, reason: str) -> Call[documents.SessionInfo]:
    return Call("POST", ["sessions", session, "cancel"], _reader(documents.SessionInfo), body=_json({"reason": reason}))


_TURN_SECONDS = 24 * 3600.0


def generate(
    session: str, request_id: str, token_ids: Optional[Iterable[int]], append_token_ids: Optional[Iterable[int]], sampling: Mapping[str, Any],
) -> Call[documents.HarnessTurn]:
    """Repeatable: sent again with its request id, a call gives the turn that it made."""
    asked: Dict[str, Any] = {**sampling, "request_id": request_id, "encoding": "packed"}
    if token_ids is not None:
        asked["packed_token_ids"] = pack_ids(token_ids)
    if append_token_ids is not None:
        asked["packed_append_token_ids"] = pack_ids(append_token_ids)
    return Call("POST", ["sessions", session, "generate"], documents.turn_of, body=_json(asked), wait_seconds=_TURN_SECONDS)


def put_columns(session: str, columns: Iterable[documents.Column]) -> Call[None]:
    """Repeatable: a column that is there already is replaced by the same."""
    body = _json({"columns": [column.to_json() for column in columns]})
    return Call("POST", ["sessions", session, "columns"], _nothing, body=body, upload=True)


def complete(session: str, status: str, reward: Optional[float], detail: Any, problem: str) -> Call[documents.SessionInfo]:
    end: Dict[str, Any] = {"status": status}
    given = {"reward": reward, "detail": detail, "problem": problem or None}
    end.update({name: value for name, value in given.items() if value is not None})
    return Call("POST", ["sessions", session, "complete"], _reader(documents.SessionInfo), body=_json(end))


def pools() -> Call[List[documents.Pool]]:
    return Call("GET", ["pools"], _member("pools", documents.Pool))


def policy(pool: str) -> Call[documents.Policy]:
    return Call("GET", ["pools", pool, "policy"], _reader(documents.Policy))


def put_policy(pool: str, version: int) -> Call[documents.Policy]:
    return Call("PUT", ["pools", pool, "policy"], _reader(documents.Policy), body=_json({"policy_version": version}))


def begin_weights(pool: str, version: int, terms: Mapping[str, Any]) -> Call[documents.WeightUpdate]:
    """Repeatable: asking the same again returns the update."""
    body = _json({"policy_version": version, **terms})
    return Call("POST", ["pools", pool, "weight-updates"], _reader(documents.WeightUpdate), body=body)


def get_weights(pool: str, version: int) -> Call[documents.WeightUpdate]:
    return Call("GET", ["pools", pool, "weight-updates", str(version)], _reader(documents.WeightUpdate))


def commit_weights(pool: str, version: int) -> Call[documents.WeightUpdate]:
    return Call("POST", ["pools", pool, "weight-updates", str(version), "commit"], _reader(documents.WeightUpdate))


def cancel_weights(pool: str, version: int) -> Call[documents.WeightUpdate]:
    return Call("POST", ["pools", pool, "weight-updates", str(version), "cancel"], _reader(documents.WeightUpdate))


def list_weights(pool: str, limit: int) -> Call[List[documents.WeightUpdate]]:
    return Call("GET", ["pools", pool, "weight-updates"], _member("updates", documents.WeightUpdate), {"limit": limit})


def instances(pool: str) -> Call[List[documents.Instance]]:
    return Call("GET", ["pools", pool, "instances"], _member("instances", documents.Instance))


def register_instance(pool: str, instance: Mapping[str, Any]) -> Call[documents.Instance]:
    return Call("POST", ["pools", pool, "instances"], _reader(documents.Instance), body=_json(instance))


def heartbeat_instance(pool: str, instance: str) -> Call[None]:
    return Call("POST", ["pools", pool, "instances", instance, "heartbeat"], _nothing)


def drain_instance(pool: str, instance: str, draining: bool) -> Call[None]:
    return Call("POST", ["pools", pool, "instances", instance, "drain"], _nothing, body=_json({"draining": draining}))


def remove_instance(pool: str, instance: str) -> Call[None]:
    return Call("DELETE", ["pools", pool, "instances", instance], _nothing)


def router(pool: str) -> Call[Any]:
    return Call("GET", ["pools", pool, "router"], lambda document: document)
