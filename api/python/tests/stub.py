"""A scripted server for faults that the real service does not commit on demand."""

from __future__ import annotations

import json
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable, Dict, List, NamedTuple, Optional


class Request(NamedTuple):
    """A request as it arrived; names of headers are in lower case."""

    method: str
    path: str
    headers: Dict[str, str]
    body: bytes
    connection: int


class Stub:
    """Answers each request with the next step of a script.

    A step is called with the handler of the request, whose body has been read
    unless the step has ``early`` set.
    """

    def __init__(self, *steps: Callable[["Handler"], None]) -> None:
        self.steps = list(steps)
        self.requests: List[Request] = []
        self.released = threading.Event()
        self._lock = threading.Lock()
        self._connections = 0
        stub = self

        class Bound(Handler):
            owner = stub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Stub":
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def next_step(self) -> Callable[["Handler"], None]:
        """The step for the coming request; the last one stays."""
        with self._lock:
            return self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]

    def connected(self) -> int:
        """Numbers a new connection."""
        with self._lock:
            self._connections += 1
            return self._connections


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    owner: Stub
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        """Number the connection."""
        super().setup()
        self.number = self.owner.connected()

    def handle_any(self) -> None:
        """Take the next step of the script."""
        step = self.owner.next_step()
        body = b"" if getattr(step, "early", False) else self.rfile.read(int(self.headers.get("Content-Length", "0")))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.owner.requests.append(Request(self.command, self.path, headers, body, self.number))
        step(self)

    do_GET = do_POST = do_PUT = do_DELETE = handle_any

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""


Step = Callable[[Handler], None]


def answer(document: Any = None, status: int = 200, headers: Optional[Dict[str, str]] = None, body: Optional[bytes] = None) -> Step:
    """A whole answer with a length."""

    def step(handler: Handler) -> None:
        data = json.dumps(document).encode() if body is None else body
        handler.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return step


def problem(status: int, kind: str, detail: str = "so it is", retry_after: str = "", **fields: Any) -> Step:
    """A problem document of the service's."""
    document = {"type": f"urn:holdfast:problem:{kind}", "title": kind, "status": status, "detail": detail, "request_id": "r-1", **fields}
    headers = {"Content-Type": "application/problem+json"}
    if retry_after:
        headers["Retry-After"] = retry_after
    return answer(document, status, headers)


def hang_up(handler: Handler) -> None:
    """End the connection without a word."""
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def reset(handler: Handler) -> None:
    """Break the connection, as a killed process does."""
    handler.close_connection = True
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def hang(handler: Handler) -> None:
    """Say nothing until the test is over."""
    handler.owner.released.wait(30)
    handler.close_connection = True


def raw(data: bytes, close: bool = True) -> Step:
    """Bytes as they are, then perhaps the end of the connection."""

    def step(handler: Handler) -> None:
        handler.wfile.write(data)
        handler.wfile.flush()
        if close:
            hang_up(handler)

    return step


def then_close(step: Step) -> Step:
    """An answer after which the server closes the connection without having said so."""

    def both(handler: Handler) -> None:
        step(handler)
        handler.wfile.flush()
        hang_up(handler)

    return both
