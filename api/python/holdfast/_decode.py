"""Reading JSON documents into dataclasses.

Fields that a dataclass does not declare are passed over, so that a newer
service may say more than this package knows. A field that is missing though it
has no default, or is of another kind, is a ProtocolError that names it.
"""

from __future__ import annotations

import dataclasses
import re
from datetime import datetime, timedelta, timezone
from typing import Any, Callable, Dict, List, Tuple, Type, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import ProtocolError

T = TypeVar("T")

Decoder = Callable[[Any], Any]

_plans: Dict[type, List[Tuple[str, str, Decoder, bool]]] = {}


def decode(cls: Type[T], document: Any) -> T:
    """Read a JSON object into a dataclass; a field's metadata may give its name in JSON."""
    if not isinstance(document, dict):
        raise ProtocolError(f"{cls.__name__}: expected an object, found {type(document).__name__}")
    plan = _plans.get(cls)
    if plan is None:
        plan = _plans[cls] = _plan(cls)
    values: Dict[str, Any] = {}
    for name, key, read, required in plan:
        if document.get(key) is not None:
            try:
                values[name] = read(document[key])
            except (TypeError, ValueError, AttributeError) as error:
                raise ProtocolError(f"{cls.__name__}.{key}: {error}") from error
        elif required:
            raise ProtocolError(f"{cls.__name__}.{key}: is missing")
    return cls(**values)


def _plan(cls: type) -> List[Tuple[str, str, Decoder, bool]]:
    hints = get_type_hints(cls)
    plan = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        plan.append((field.name, field.metadata.get("json", field.name), _decoder(hints[field.name]), required))
    return plan


def _decoder(hint: Any) -> Decoder:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Union:  # Optional
        return _decoder(next(arg for arg in args if arg is not type(None)))
    if origin is list:
        item = _decoder(args[0])
        return lambda value: [item(one) for one in _of(list, value)]
    if origin is dict:
        item = _decoder(args[1])
        return lambda value: {key: item(one) for key, one in _of(dict, value).items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        made = hint
        return lambda value: decode(made, value)
    if hint is datetime:
        return parse_time
    if hint is float:
        return _float
    if hint in (int, str, bool):
        kind = hint
        return lambda value: _of(kind, value)
    return lambda value: value


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _float(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"expected a number, found {type(value).__name__}")
    return float(value)


_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(?:Z|([+-])(\d\d):(\d\d))")


def parse_time(text: str) -> datetime:
    """Read an RFC 3339 time; what is finer than a microsecond is cut off."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"not a time: {text!r}")
    whole, fraction, sign, hours, minutes = match.groups()
    zone = timezone.utc
    if sign:
        offset = timedelta(hours=int(hours), minutes=int(minutes))
        zone = timezone(-offset if sign == "-" else offset)
    micros = int((fraction or "0")[:6].ljust(6, "0"))
    return datetime.strptime(whole, "%Y-%m-%dT%H:%M:%S").replace(microsecond=micros, tzinfo=zone)


def format_time(when: datetime) -> str:
    """Write a time for a query; one without a zone is refused, since it could mean anything."""
    if when.tzinfo is None:
        raise ValueError(f"the time {when.isoformat()} has no time zone")
    return when.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")
