"""Why the service does not do what is asked: each has an HTTP status of its own in `app`."""

from __future__ import annotations

from typing import Literal

from segue.errors import InputError, SegueError

Reason = Literal["queue", "deadline", "stopping", "restarting"]


class OverloadedError(SegueError):
    """There is more to do than can be done in time; the same request may succeed a little later."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class UnknownModelError(InputError):
    """A name that is none of the models served."""


class CannotSwitchError(SegueError):
    """The run asked for cannot be served; the one being served goes on."""
