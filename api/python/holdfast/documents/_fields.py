"""How documents declare their fields."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def class_field() -> Any:
    """``class_name``: the interface's ``class``, a word that Python keeps for itself."""
    return field(metadata={"json": "class"})
