"""The queries and answers between HTTP and the engine, and the errors of requests that the service cannot fulfil."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from segue.errors import InputError, SegueError
from segue.recommend.history import History

FilterValue = str | int | float | bool

EncodedAnswer = tuple[bytes, str | None]
"""An answer as JSON, and the fallback that replaced the model, if any."""


class RecommendationQuery(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """A user with a stored history, or a given history, and the rules for the answer."""

    user: str | None = None
    history: History | None = None
    k: int = 10
    keep_seen: bool | None = None
    exclude: Sequence[str | int] | None = None
    only: Sequence[str | int] | None = None
    where: Mapping[str, Sequence[FilterValue]] | None = None
    now: int | None = None  # seconds
    model: str | None = None


class OverloadedError(SegueError):
    """The service cannot fulfil the request in time; the same request may succeed a little later."""

    def __init__(self, reason: Literal["queue", "deadline", "stopping", "restarting"], sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class UnknownModelError(InputError):
    """The request names a model that is not served."""


class CannotSwitchError(SegueError):
    """The requested run cannot be served; the current one stays."""
