"""Where the service is, and what every request carries."""

from __future__ import annotations

import socket
import ssl
from typing import Dict, NamedTuple, Optional
from urllib.parse import urlsplit

from ._calls import Call
from .version import VERSION


class Answer(NamedTuple):
    """An answer, read whole; names of headers are in lower case."""

    status: int
    reason: str
    headers: Dict[str, str]
    body: bytes


def keep_alive(sock: Optional[socket.socket]) -> None:
    """Let the system ask after the other side, so that a wait of hours notices a machine that is gone."""
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Endpoint:
    """A service's address. ``tls`` is None for plain http."""

    def __init__(self, url: str, token: Optional[str], tls: Optional[ssl.SSLContext]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
            raise ValueError(f"service URL {url!r}: must be an http or https URL such as http://127.0.0.1:8080")
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.prefix = parts.path.rstrip("/")
        self.tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._headers = {"Host": parts.netloc, "User-Agent": f"holdfast-python/{VERSION}", "Accept": "application/json"}
        if token:
            if any(not "!" <= character <= "~" for character in token):
                raise ValueError("the token must be printable ASCII without spaces")
            self._headers["Authorization"] = "Bearer " + token

    def headers(self, call: "Call[object]") -> Dict[str, str]:
        """Headers of a call. Values that would break the request apart are a ValueError."""
        headers = {**self._headers, **call.headers}
        if call.body is not None:
            headers["Content-Type"] = "application/json"
        if call.body is not None or call.method in ("POST", "PUT"):
            headers["Content-Length"] = str(len(call.body or b""))
        for name, value in headers.items():
            if any(not " " <= character <= "~" for character in value):
                raise ValueError(f"header {name}: must be printable ASCII, is {value!r}")
        return headers
