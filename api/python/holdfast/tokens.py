"""The tokens of a sample: ids, loss mask and log-probabilities.

On the wire they are base64 of little-endian arrays (packed) or arrays of JSON
numbers. Here they are arrays of the standard library, which offer their memory
to numpy and torch without a copy. Nothing is decoded before it is asked for.
"""

from __future__ import annotations

import binascii
import importlib
import sys
from array import array
from typing import TYPE_CHECKING, Any, Iterable, Mapping, NamedTuple, Optional, Union

from .errors import ProtocolError

if TYPE_CHECKING:
    IntArray = array[int]
    FloatArray = array[float]
else:  # before Python 3.12 the class takes no parameter
    IntArray = FloatArray = array


class NumpyTokens(NamedTuple):
    """A sample's tokens as numpy arrays that share the memory of the others."""

    token_ids: Any
    """int32"""
    loss_mask: Any
    """uint8"""
    logprobs: Optional[Any]
    """float32; None if none were asked for."""


# A typecode's size is the platform's affair; the wire's is fixed.
_INT32 = next(code for code in "il" if array(code).itemsize == 4)


class TokenArrays:
    """Tokens as they came, decoded when first asked for.

    ``document`` is the wire's ``packed`` or ``tokens`` object. Errors of the
    encoding are ProtocolErrors, raised when the array is asked for.
    """

    __slots__ = ("count", "_document", "_packed", "_token_ids", "_loss_mask", "_logprobs")

    def __init__(self, document: Mapping[str, Any], packed: bool) -> None:
        try:
            self.count: int = document["count"] if packed else len(document["token_ids"])
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"tokens without their number: {error}") from error
        self._document: Mapping[str, Any] = document
        self._packed = packed
        self._token_ids: Optional[IntArray] = None
        self._loss_mask: Optional[IntArray] = None
        self._logprobs: Optional[FloatArray] = None

    @property
    def token_ids(self) -> IntArray:
        """int32, the whole context in order."""
        values = self._token_ids
        if values is None:
            values = self._token_ids = self._read("token_ids", _INT32)
        return values

    @property
    def loss_mask(self) -> IntArray:
        """uint8: 1 where the policy generated the token."""
        values = self._loss_mask
        if values is None:
            values = self._loss_mask = self._read("loss_mask", "B")
        return values

    @property
    def logprobs(self) -> Optional[FloatArray]:
        """float32: of generated tokens, 0 elsewhere; None if none were asked for."""
        if self._logprobs is None and self._document.get("logprobs") is not None:
            self._logprobs = self._read("logprobs", "f")
        return self._logprobs

    def numpy(self) -> NumpyTokens:
        """The same memory as numpy arrays. Raises ImportError without numpy."""
        numpy: Any = importlib.import_module("numpy")
        logprobs = self.logprobs
        return NumpyTokens(
            numpy.frombuffer(self.token_ids, dtype=numpy.int32), numpy.frombuffer(self.loss_mask, dtype=numpy.uint8),
            None if logprobs is None else numpy.frombuffer(logprobs, dtype=numpy.float32),
        )

    def _read(self, name: str, code: str) -> Any:
        given: Union[str, Any] = self._document.get(name)
        try:
            values = unpack(given, code) if self._packed else array(code, given)
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"{name}: {error}") from error
        if len(values) != self.count:
            raise ProtocolError(f"{name}: {len(values)} elements for {self.count} tokens")
        return values


def unpack(text: str, code: str) -> Any:
    """Decode base64 of a little-endian array of the given typecode."""
    values = array(code)
    values.frombytes(binascii.a2b_base64(text))
    if sys.byteorder == "big":
        values.byteswap()
    return values


def pack_ids(ids: Iterable[int]) -> str:
    """Encode token ids as base64 of little-endian int32. OverflowError for what does not fit."""
    values = array(_INT32, ids)
    if sys.byteorder == "big":
        values.byteswap()
    return binascii.b2a_base64(values.tobytes(), newline=False).decode()


def unpack_turn(ids: Optional[str], logprobs: Optional[str]) -> "tuple[IntArray, Optional[FloatArray]]":
    """Decode a turn's packed tokens."""
    try:
        return unpack(ids or "", _INT32), None if logprobs is None else unpack(logprobs, "f")
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"tokens of a turn: {error}") from error
