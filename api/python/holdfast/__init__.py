"""Client of Holdfast's REST interface, for trainers.

Synchronous: :class:`Client`. Asynchronous: :class:`holdfast.aio.AsyncClient`.
It keeps no state but its connections and, in a stream, its place; the service
keeps what was acknowledged. It does not run sessions, tokenise or train.
"""

from . import errors
from ._retry import RetryPolicy
from ._weights import WeightUpdateError
from .client import Client, Groups, Run, Samples, Session
from .documents import (
    USABLE, Admission, Audit, Backlog, Batch, ClassBacklog, ClassMetrics, ClassMixture, ClassPace, ClassShare, Column, Consumer,
    ContractVersion, Delivery, Event, HarnessTurn, History, Hold, Instance, Metrics, Mixture, MixtureSpan, Pace, Policy,
    Pool, Release, RunInfo, Sample, SamplePage, Score, Segment, Sequence, SessionInfo, Times, Turn, Usage, WeightInstance,
    WeightUpdate,
)
from .errors import (
    BodyTimeoutError, ConflictError, EngineDoesNotAnswerError, ErrorDetail, ForbiddenError, HoldfastError,
    IdempotencyKeyReusedError, InternalError, InvalidJSONError, InvalidRequestError, LimitReachedError, MethodNotAllowedError, NotFoundError,
    NotOwnerError, OverloadedError, ProblemError, ProtocolError, PrunedError, RequestTimeoutError, RunEndedError,
    StoppingError, TooLargeError, UnauthorizedError, UnavailableError, UnknownClassError, UnknownCursorError,
    UnreachableError, UnsupportedMediaTypeError,
)
from .groups import Group
from .tasks import Contract, Task, batch_key
from .tokens import NumpyTokens, TokenArrays
from .version import VERSION as __version__

__all__ = [
    "USABLE", "Admission", "Audit", "Backlog", "Batch", "BodyTimeoutError", "ClassBacklog", "ClassMetrics", "ClassMixture",
    "ClassPace", "ClassShare", "Client", "ConflictError", "Column", "Consumer", "Contract", "ContractVersion", "Delivery",
    "EngineDoesNotAnswerError", "ErrorDetail", "Event", "ForbiddenError", "Group", "Groups", "HarnessTurn", "History", "Hold",
    "HoldfastError", "IdempotencyKeyReusedError", "Instance", "InternalError", "InvalidJSONError", "InvalidRequestError",
    "LimitReachedError", "MethodNotAllowedError", "Metrics", "Mixture", "MixtureSpan", "NotFoundError", "NotOwnerError",
    "NumpyTokens", "OverloadedError", "Pace", "Policy", "Pool", "ProblemError", "ProtocolError", "PrunedError", "Release",
    "RequestTimeoutError", "RetryPolicy", "Run", "RunEndedError", "RunInfo", "Sample", "SamplePage", "Samples", "Score",
    "Segment", "Sequence", "Session", "SessionInfo", "StoppingError", "Task", "Times", "TokenArrays", "TooLargeError", "Turn",
    "UnauthorizedError", "UnavailableError", "UnknownClassError", "UnknownCursorError", "UnreachableError",
    "UnsupportedMediaTypeError", "Usage", "WeightInstance", "WeightUpdate", "WeightUpdateError", "__version__", "batch_key",
    "errors",
]
