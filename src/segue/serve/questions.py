"""What a request asks for, in ids, on its way from HTTP to the engine, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from segue.recommend.history import ReadHistory

Value = str | int | float | bool

Encoded = tuple[bytes, str | None]
"""An answer as JSON, and what stood in for the model where it had nothing to go by."""


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
