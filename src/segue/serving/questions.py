"""What a request asks for, in ids, on its way from HTTP to the engine, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from segue.recommend.history import ReadHistory

Value = str | int | float | bool

Encoded = tuple[bytes, str | None]
"""An answer as JSON, and what stood in for the model where it had nothing to go by."""


class Encodings(NamedTuple):
    """How questions were encoded, since this was asked last."""

    extended: int
    """What was new in the history alone."""
    whole: int
    """All of what the model looks at."""
    bytes: int
    """What is remembered for the former, now."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A user's kept history or one given, and the rules of the answer."""

    user: str | None = None
    history: ReadHistory | None = None
    k: int = 10
    keep_seen: bool | None = None
    exclude: Sequence[str | int] | None = None
    only: Sequence[str | int] | None = None
    where: Mapping[str, Sequence[Value]] | None = None
    now: int | None = None  # seconds
    model: str | None = None
