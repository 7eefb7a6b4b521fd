"""Further arrays of a sample, such as the experts that each token was routed to."""

from __future__ import annotations

import binascii
import importlib
import sys
from array import array
from dataclasses import dataclass
from typing import Any, Dict, List

from ..errors import ProtocolError

# A typecode's size is the platform's affair; the wire's names say it.
_KINDS = {"b": "int", "h": "int", "i": "int", "l": "int", "q": "int", "B": "uint", "H": "uint", "I": "uint", "L": "uint", "Q": "uint", "f": "float", "d": "float"}


@dataclass
class Column:
    """An array with a name, in row-major order. ``data`` is base64 of little-endian values."""

    name: str
    dtype: str
    """bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32 or float64."""
    shape: List[int]
    data: str

    @classmethod
    def of(cls, name: str, values: Any) -> "Column":
        """A column of a numpy array, or of an array of the standard library. TypeError for other things."""
        if isinstance(values, array):
            if values.typecode not in _KINDS:
                raise TypeError(f"column {name}: arrays of typecode {values.typecode!r} have no dtype on the wire")
            flat = values[:]
            if sys.byteorder == "big":
                flat.byteswap()
            return cls(name, f"{_KINDS[values.typecode]}{8 * values.itemsize}", [len(values)], _base64(flat.tobytes()))
        if not hasattr(values, "dtype") or not hasattr(values, "tobytes"):
            raise TypeError(f"column {name}: expected an array of numpy or of the standard library, found {type(values).__name__}")
        little = values.astype(values.dtype.newbyteorder("<"), order="C", copy=False)
        return cls(name, values.dtype.name, list(values.shape), _base64(little.tobytes()))

    def to_bytes(self) -> bytes:
        """The values, little-endian."""
        try:
            return binascii.a2b_base64(self.data)
        except ValueError as error:
            raise ProtocolError(f"column {self.name}: {error}") from error

    def numpy(self) -> Any:
        """As a numpy array. ImportError without numpy; TypeError for a dtype that numpy does not have (bfloat16)."""
        numpy: Any = importlib.import_module("numpy")
        return numpy.frombuffer(self.to_bytes(), dtype=numpy.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)

    def to_json(self) -> Dict[str, Any]:
        """The column in the interface's form."""
        return {"name": self.name, "dtype": self.dtype, "shape": self.shape, "data": self.data}


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()
