"""HTTP/1.1 over asyncio streams, as much of it as the service speaks.

A waiting request costs a socket and a suspended coroutine, no thread, so that
hundreds of long polls are cheap. Bodies come with a length, in chunks, or until
the end of the connection; there is no pipelining, no proxy, no redirect.
"""

from __future__ import annotations

import asyncio
from typing import Any, Callable, Dict, List, Optional, Tuple

from ._calls import Call, Download
from ._endpoint import Answer, Endpoint, keep_alive
from .errors import ProtocolError, UnreachableError

_LINE_BYTES = 1 << 16
_HEADERS = 256
_SEND_BYTES = 1 << 18


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        """Close without sending what is still waiting to be sent."""
        self.writer.transport.abort()

    def usable(self) -> bool:
        """False once the other side has hung up or said something unasked."""
        return not self.reader.at_eof() and not self.writer.is_closing() and self.reader.exception() is None


class AsyncConnections:
    """A pool of connections to one service, for one event loop.

    ``max_idle`` bounds the connections kept for later, not those at work.
    """

    def __init__(self, endpoint: Endpoint, max_idle: int) -> None:
        self._endpoint = endpoint
        self._idle: List[_Connection] = []
        self._max_idle = max_idle
        self._closed = False

    async def close(self) -> None:
        """Close idle connections; those at work close when their request is over."""
        self._closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        # Lets the transports drop their sockets before the loop ends.
        await asyncio.sleep(0)

    async def send(self, call: Call[Any], timeout: float) -> Answer:
        """Send a call once. Raises UnreachableError, ProtocolError."""
        end = asyncio.get_running_loop().time() + timeout
        head = [f"{call.method} {call.target(self._endpoint.prefix)} HTTP/1.1"]
        head += [f"{name}: {value}" for name, value in self._endpoint.headers(call).items()]
        request = ("\r\n".join(head) + "\r\n\r\n").encode("ascii")
        # What may not be sent twice goes over a new connection: see the threads' pool.
        connection = self._take() if call.repeatable else None
        if connection is not None:
            try:
                return await self._exchange(connection, call, request, end)
            except UnreachableError:
                if asyncio.get_running_loop().time() >= end:
                    raise
        return await self._exchange(await self._connect(end), call, request, end)

    def _take(self) -> Optional[_Connection]:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable():
                return connection
            connection.close()
        return None

    async def _connect(self, end: float) -> _Connection:
        at = self._endpoint
        opening = asyncio.open_connection(at.host, at.port, ssl=at.tls, limit=_LINE_BYTES)
        try:
            reader, writer = await asyncio.wait_for(opening, _left(end))
        except (OSError, asyncio.TimeoutError) as error:
            raise UnreachableError(f"connecting to {at.url}: {str(error) or 'timed out'}", sent=False) from error
        keep_alive(writer.get_extra_info("socket"))
        return _Connection(reader, writer)

    async def _exchange(self, connection: _Connection, call: Call[Any], request: bytes, end: float) -> Answer:
        keep, where = False, f"{call.method} {self._endpoint.url}"
        try:
            answer, keep = await asyncio.wait_for(_converse(connection, request, call.body, call.sink), _left(end))
            return answer
        except asyncio.TimeoutError as error:
            raise UnreachableError(f"{where}: timed out") from error
        except (OSError, EOFError) as error:
            raise UnreachableError(f"{where}: {error or type(error).__name__}") from error
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise ProtocolError(f"{where}: not HTTP: {error}") from error
        finally:
            # Also when the caller's task is cancelled: a poll that nobody waits for ends.
            if keep and not self._closed and len(self._idle) < self._max_idle:
                self._idle.append(connection)
            else:
                connection.abort()


async def _converse(connection: _Connection, head: bytes, body: Optional[bytes], sink: Optional[Download]) -> Tuple[Answer, bool]:
    # The service may answer, and hang up, before the body is through.
    sending = asyncio.ensure_future(_send(connection.writer, head, body))
    try:
        answer, reusable = await _read_answer(connection.reader, sink)
        return answer, reusable and sending.done() and not sending.cancelled() and sending.exception() is None
    finally:
        if not sending.done():
            sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


def _left(end: float) -> float:
    return max(end - asyncio.get_running_loop().time(), 0.001)


async def _send(writer: asyncio.StreamWriter, head: bytes, body: Optional[bytes]) -> None:
    writer.write(head)
    view = memoryview(body or b"")
    for begin in range(0, len(view), _SEND_BYTES):
        writer.write(view[begin:begin + _SEND_BYTES])
        await writer.drain()
    await writer.drain()


async def _read_answer(reader: asyncio.StreamReader, sink: Optional[Download]) -> Tuple[Answer, bool]:
    while True:
        version, status, reason = _status_line(await _line(reader))
        headers = await _read_headers(reader)
        if status >= 200:
            break
    pieces: List[bytes] = []
    take = pieces.append
    if sink is not None and status < 400:
        sink.begin()
        take = sink.write
    ended = await _read_body(reader, status, headers, take)
    asked_to_close = "close" in headers.get("connection", "").lower()
    return Answer(status, reason, headers, b"".join(pieces)), ended and version == "HTTP/1.1" and not asked_to_close


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readuntil(b"\n")
    return line.rstrip(b"\r\n")


def _status_line(line: bytes) -> Tuple[str, int, str]:
    pieces = line.decode("latin-1").split(" ", 2)
    if len(pieces) < 2 or pieces[0] not in ("HTTP/1.1", "HTTP/1.0") or len(pieces[1]) != 3:
        raise ValueError(f"status line {line[:80]!r}")
    return pieces[0], int(pieces[1]), pieces[2] if len(pieces) > 2 else ""


async def _read_headers(reader: asyncio.StreamReader) -> Dict[str, str]:
    headers: Dict[str, str] = {}
    for _ in range(_HEADERS):
        line = await _line(reader)
        if not line:
            return headers
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon or not name or name != name.strip():
            raise ValueError(f"header {line[:80]!r}")
        key, value = name.lower(), value.strip()
        headers[key] = f"{headers[key]}, {value}" if key in headers else value
    raise ValueError("too many headers")


async def _read_body(reader: asyncio.StreamReader, status: int, headers: Dict[str, str], take: Callable[[bytes], None]) -> bool:
    """Read a body, piece by piece if it comes so; False if the connection had to end for it."""
    if status in (204, 304):
        return True
    if headers.get("transfer-encoding", "").lower() == "chunked":
        await _read_chunks(reader, take)
        return True
    if "transfer-encoding" in headers:
        raise ValueError(f"transfer encoding {headers['transfer-encoding']!r}")
    if "content-length" in headers:
        length = headers["content-length"]
        if not length.isdigit():
            raise ValueError(f"content length {length!r}")
        take(await reader.readexactly(int(length)))
        return True
    take(await reader.read(-1))
    return False


async def _read_chunks(reader: asyncio.StreamReader, take: Callable[[bytes], None]) -> None:
    while True:
        size = int((await _line(reader)).split(b";", 1)[0], 16)
        if size < 0:
            raise ValueError("negative chunk")
        if size == 0:
            await _read_headers(reader)  # trailers
            return
        take(await reader.readexactly(size))
        if await _line(reader):
            raise ValueError("a chunk is longer than it says")
