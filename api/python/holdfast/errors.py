"""What can go wrong, as one tree of exceptions.

Every refusal of the service is a :class:`ProblemError`, made from its problem
document (RFC 9457). Its class says what a trainer should do about it; the
document's own words are in its attributes. What never got an answer is an
:class:`UnreachableError`. Bad arguments are plain ``ValueError`` and
``TypeError``: nothing was sent then.
"""

from __future__ import annotations

import email.utils
import json
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Type

__all__ = [
    "BodyTimeoutError", "ConflictError", "EngineDoesNotAnswerError", "ErrorDetail", "ForbiddenError",
    "HoldfastError", "IdempotencyKeyReusedError", "InternalError", "InvalidJSONError", "InvalidRequestError",
    "LimitReachedError", "MethodNotAllowedError", "NotFoundError", "NotOwnerError", "OverloadedError", "ProblemError",
    "ProtocolError", "PrunedError", "RequestTimeoutError", "RunEndedError", "StoppingError", "TooLargeError",
    "UnauthorizedError", "UnavailableError", "UnknownClassError", "UnknownCursorError", "UnreachableError",
    "UnsupportedMediaTypeError",
]


class HoldfastError(Exception):
    """Everything that this package raises about the service."""


class UnreachableError(HoldfastError):
    """No answer: the connection could not be made, broke, or took too long.

    ``sent`` is False if the service certainly has not got the request.
    """

    def __init__(self, message: str, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


class ProtocolError(HoldfastError):
    """The answer is not what the interface describes."""


@dataclass(frozen=True)
class ErrorDetail:
    """One thing wrong with a request."""

    location: str
    """Where: body, path, query or header, and the path in it, such as body.tasks[3].class."""
    message: str
    offset_bytes: Optional[int] = None
    """Byte of the decompressed body at which reading stopped, from 0."""
    value: Any = None
    """The value found there, if it is short."""


class ProblemError(HoldfastError):
    """A refusal by the service; the attributes are those of its problem document."""

    def __init__(
        self, status: int, type: str, title: str, detail: str, request_id: str = "",
        errors: Optional[List[ErrorDetail]] = None, retry_after: Optional[float] = None,
    ) -> None:
        super().__init__(f"{detail or title} (status {status})")
        self.status = status
        self.type = type
        """Names the kind for programs, such as urn:holdfast:problem:invalid-request."""
        self.title = title
        self.detail = detail
        self.request_id = request_id
        """Stands in the service's log as well."""
        self.errors = errors or []
        self.retry_after = retry_after
        """Seconds that the service asks to wait; None if it does not."""

    def __reduce__(self) -> Any:
        # Trainers send exceptions between processes; the default would lose the attributes.
        return (self.__class__, (self.status, self.type, self.title, self.detail, self.request_id, self.errors, self.retry_after))


class InvalidJSONError(ProblemError):
    """400: the body is not JSON; ``errors[0].offset_bytes`` tells the byte."""


class UnauthorizedError(ProblemError):
    """401: a token is required, or the one sent is not known."""


class ForbiddenError(ProblemError):
    """403: the token's role may not do this."""


class NotFoundError(ProblemError):
    """404: there is no such thing, or no such path."""


class MethodNotAllowedError(ProblemError):
    """405: the path does not take this method."""


class BodyTimeoutError(ProblemError):
    """408: the body stopped arriving."""


class ConflictError(ProblemError):
    """409: conflict with what exists."""


class IdempotencyKeyReusedError(ConflictError):
    """409: the key was used before with another body; nothing was released."""


class RunEndedError(ConflictError):
    """409: the run has ended and accepts no batches."""


class LimitReachedError(ConflictError):
    """409: a limit of the task is reached; the session takes no further turn."""


class PrunedError(ProblemError):
    """410: what was asked for is pruned; ``first`` is the place from which samples are left, if it was samples."""

    @property
    def first(self) -> str:
        """A cursor to go on from; empty if none was told."""
        return str(self.errors[0].value or "") if self.errors else ""


class TooLargeError(ProblemError):
    """413: split the batch."""


class UnsupportedMediaTypeError(ProblemError):
    """415: not JSON, or compressed in a way the service does not know."""


class InvalidRequestError(ProblemError):
    """422: a field is not acceptable; ``errors`` names it."""


class UnknownClassError(InvalidRequestError):
    """422: a task's class is not declared by the run's contract."""


class UnknownCursorError(InvalidRequestError):
    """422: not a cursor of this run that this consumer was given."""


class EngineDoesNotAnswerError(InvalidRequestError):
    """422: the engine to be registered does not answer; nothing was stored. 502: a turn's engine failed it."""


class OverloadedError(ProblemError):
    """429, beyond the client's own repetitions: nothing was done."""


class InternalError(ProblemError):
    """500: a defect of the service."""


class UnavailableError(ProblemError):
    """502, 503 or 504, beyond the client's own repetitions."""


class RequestTimeoutError(UnavailableError):
    """503: the request took longer than the service allows; nothing was half done."""


class StoppingError(UnavailableError):
    """503: the service is stopping."""


class NotOwnerError(UnavailableError):
    """503: another process runs the pool's router."""


_TYPE_PREFIX = "urn:holdfast:problem:"

_BY_KIND: Dict[str, Type[ProblemError]] = {
    "invalid-json": InvalidJSONError, "invalid-request": InvalidRequestError, "unknown-class": UnknownClassError,
    "unknown-cursor": UnknownCursorError, "pruned": PrunedError, "engine-does-not-answer": EngineDoesNotAnswerError,
    "unauthorized": UnauthorizedError, "forbidden": ForbiddenError, "not-found": NotFoundError,
    "method-not-allowed": MethodNotAllowedError, "conflict": ConflictError,
    "limit-reached": LimitReachedError, "idempotency-key-reused": IdempotencyKeyReusedError, "run-ended": RunEndedError, "too-large": TooLargeError,
    "unsupported-media-type": UnsupportedMediaTypeError, "body-timeout": BodyTimeoutError,
    "overloaded": OverloadedError, "not-owner": NotOwnerError, "unavailable": UnavailableError,
    "timeout": RequestTimeoutError, "stopping": StoppingError, "internal": InternalError,
}

# For kinds that a newer service knows and this package does not, and for what
# something between client and service answered.
_BY_STATUS: Dict[int, Type[ProblemError]] = {
    400: InvalidJSONError, 401: UnauthorizedError, 403: ForbiddenError, 404: NotFoundError,
    405: MethodNotAllowedError, 408: BodyTimeoutError, 409: ConflictError, 410: PrunedError, 413: TooLargeError,
    415: UnsupportedMediaTypeError, 422: InvalidRequestError, 429: OverloadedError, 500: InternalError,
    502: UnavailableError, 503: UnavailableError, 504: UnavailableError,
}


def problem_of(status: int, reason: str, headers: Mapping[str, str], body: bytes) -> ProblemError:
    """Make the exception of an answer that is no success; names of headers are in lower case."""
    document: Any = None
    if headers.get("content-type", "").split(";")[0].strip() == "application/problem+json":
        try:
            document = json.loads(body)
        except ValueError:
            document = None
    if not isinstance(document, dict):
        text = body[:200].decode("utf-8", "replace").strip()
        document = {"type": "about:blank", "title": reason, "detail": f"{status} {reason}: {text}"}
    return problem_from(status, document, reason, _retry_after(headers.get("retry-after", "")))


def problem_from(status: int, document: Mapping[str, Any], reason: str = "", retry_after: Optional[float] = None) -> ProblemError:
    """Make the exception of a problem document."""
    kind = str(document.get("type", ""))
    made = _BY_STATUS.get(status, ProblemError)
    if kind.startswith(_TYPE_PREFIX):
        made = _BY_KIND.get(kind[len(_TYPE_PREFIX):], made)
    return made(
        status, kind, str(document.get("title", reason)), str(document.get("detail", "")),
        str(document.get("request_id", "")), _details(document.get("errors")), retry_after,
    )


def _details(given: Any) -> List[ErrorDetail]:
    if not isinstance(given, list):
        return []
    return [
        ErrorDetail(str(one.get("location", "")), str(one.get("message", "")), one.get("offset_bytes"), one.get("value"))
        for one in given if isinstance(one, dict)
    ]


def _retry_after(text: str) -> Optional[float]:
    """Read a Retry-After header: seconds, or a date."""
    text = text.strip()
    if text.isdigit():
        return float(text)
    try:
        then = email.utils.parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError):
        return None
    return max(0.0, then.timestamp() - time.time())
