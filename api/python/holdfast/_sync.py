"""HTTP over http.client, with connections kept alive and shared between threads."""

from __future__ import annotations

import http.client
import threading
import time
from typing import Any, List, Optional

from ._calls import Call
from ._endpoint import Answer, Endpoint, keep_alive
from .errors import ProtocolError, UnreachableError

_READ_BYTES = 1 << 18


class Connections:
    """A pool of connections to one service; safe for use by several threads.

    A thread has a connection to itself while a request is at work. ``max_idle``
    bounds those that are kept for later, not those at work.
    """

    def __init__(self, endpoint: Endpoint, max_idle: int) -> None:
        self._endpoint = endpoint
        self._idle: List[http.client.HTTPConnection] = []
        self._max_idle = max_idle
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Close idle connections; those at work close when their request is over."""
        with self._lock:
            self._closed = True
            idle = list(self._idle)
            self._idle.clear()
        for connection in idle:
            connection.close()

    def send(self, call: Call[Any], timeout: float) -> Answer:
        """Send a call once. Raises UnreachableError, ProtocolError."""
        end = time.monotonic() + timeout
        # An idle connection may have been closed by the other side in the very
        # moment; what may not be sent twice goes over a new one.
        connection = self._take() if call.repeatable else None
        if connection is not None:
            try:
                return self._exchange(connection, call, end)
            except UnreachableError:
                if time.monotonic() >= end:
                    raise
        return self._exchange(self._connect(end), call, end)

    def _take(self) -> Optional[http.client.HTTPConnection]:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _connect(self, end: float) -> http.client.HTTPConnection:
        at = self._endpoint
        connection: http.client.HTTPConnection
        timeout = max(end - time.monotonic(), 0.001)
        if at.tls is not None:
            connection = http.client.HTTPSConnection(at.host, at.port, timeout=timeout, context=at.tls)
        else:
            connection = http.client.HTTPConnection(at.host, at.port, timeout=timeout)
        try:
            connection.connect()
            keep_alive(connection.sock)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise UnreachableError(f"connecting to {at.url}: {error}", sent=False) from error
        return connection

    def _exchange(self, connection: http.client.HTTPConnection, call: Call[Any], end: float) -> Answer:
        keep = False
        try:
            answer, keep = self._converse(connection, call, end)
            return answer
        except http.client.IncompleteRead as error:
            raise UnreachableError(f"{call.method} {self._endpoint.url}: the answer broke off") from error
        except OSError as error:  # RemoteDisconnected and time-outs are among them
            raise UnreachableError(f"{call.method} {self._endpoint.url}: {str(error) or type(error).__name__}") from error
        except http.client.HTTPException as error:
            raise ProtocolError(f"{call.method} {self._endpoint.url}: not HTTP: {error!r}") from error
        finally:
            if keep:
                self._give_back(connection)
            else:
                connection.close()

    def _converse(self, connection: http.client.HTTPConnection, call: Call[Any], end: float) -> "tuple[Answer, bool]":
        self._limit(connection, end)
        sent = True
        try:
            connection.putrequest(call.method, call.target(self._endpoint.prefix), skip_host=True, skip_accept_encoding=True)
            for name, value in self._endpoint.headers(call).items():
                connection.putheader(name, value)
            connection.endheaders(call.body)
        except (BrokenPipeError, ConnectionResetError):
            # The service may have answered and hung up before the body was through.
            sent = False
        self._limit(connection, end)
        response = connection.getresponse()
        try:
            pieces: List[bytes] = []
            sink = call.sink if response.status < 400 else None
            if sink is not None:
                sink.begin()
            came = False
            while True:
                self._limit(connection, end)
                piece = response.read1(_READ_BYTES)
                if not piece:
                    break
                came = True
                if sink is None:
                    pieces.append(piece)
                else:
                    sink.write(piece)
            # read1 gives b"" also where a body with a length breaks off.
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            if not came and response.length is None and not response.chunked:
                # http.client takes an end amid the headers for their end.
                raise http.client.IncompleteRead(b"")
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, response.reason, headers, b"".join(pieces)), sent and not response.will_close
        finally:
            response.close()

    @staticmethod
    def _limit(connection: http.client.HTTPConnection, end: float) -> None:
        """Let the next step take no longer than the whole may."""
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        if connection.sock is not None:
            connection.sock.settimeout(left)

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < self._max_idle:
                self._idle.append(connection)
                return
        connection.close()
