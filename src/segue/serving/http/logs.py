"""Log records and answered requests → JSON lines on standard error, with a request's id and without users' ids."""

from __future__ import annotations

import logging
import sqlite3
import sys
import time
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import BinaryIO, Literal, get_args

import msgspec

from segue.errors import InputError

Level = Literal["debug", "info", "warning", "error"]

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
REQUESTS = "segue.serving.requests"
SERVER_ERROR = 500
# Their texts speak of code and of tables; any other exception's may quote what a request held.
HARMLESS_TEXTS = (TypeError, AttributeError, NameError, sqlite3.Error)


class RecordLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A record of `logging`."""

    time: datetime
    level: str
    logger: str
    message: str
    request_id: str | None = None
    traceback: str | None = None


class RequestLine(msgspec.Struct, frozen=True):
    """A request that was answered, or whose client left."""

    time: datetime
    level: Level
    logger: str
    message: str
    request_id: str
    method: str
    route: str
    """The template, such as /users/{id}/history: a path holds a user's id."""
    status: int
    milliseconds: float


class JsonLogHandler(logging.Handler):
    """Writes each record and each request as one line of JSON, and goes on when nobody can read it."""

    def __init__(self, stream: BinaryIO, level: int = logging.INFO) -> None:
        super().__init__(level)
        self._stream = stream
        self._encode = msgspec.json.Encoder().encode

    def emit(self, record: logging.LogRecord) -> None:
        """A record of `logging`."""
        error = record.exc_info[1] if record.exc_info else None
        self._write(
            RecordLine(
                time=datetime.fromtimestamp(record.created, UTC),
                level=record.levelname.lower(),
                logger=record.name,
                message=_message(record),
                request_id=REQUEST_ID.get(),
                traceback=None if error is None else redacted_traceback(error),
            )
        )

    def request(self, *, request_id: str, method: str, route: str, status: int, seconds: float) -> None:
        """A request, past the machinery of `logging`, which would cost more than the rest of the guard."""
        failed = status >= SERVER_ERROR
        if self.level > (logging.WARNING if failed else logging.INFO):
            return
        self._write(
            RequestLine(
                datetime.fromtimestamp(time.time(), UTC),
                "warning" if failed else "info",
                REQUESTS,
                "answered",
                request_id,
                method,
                route,
                status,
                round(seconds * 1000, 3),
            )
        )

    def _write(self, line: RecordLine | RequestLine) -> None:
        try:
            self._stream.write(self._encode(line) + b"\n")
            self._stream.flush()
        except (OSError, ValueError):  # full, closed or gone: the service outlives its log
            pass


def configure_logs(level: Level = "info") -> JsonLogHandler:
    """Send every logger of this process, uvicorn's too, to standard error as JSON lines; again replaces the first."""
    check_level(level)
    number = logging.getLevelNamesMapping()[level.upper()]
    lines = JsonLogHandler(sys.stderr.buffer, number)
    root = logging.getLogger()
    for handler in [*root.handlers]:
        if isinstance(handler, JsonLogHandler):
            root.removeHandler(handler)
    root.addHandler(lines)
    root.setLevel(number)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.asgi"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
    # It writes paths, without a handler too if it is loud enough; `JsonLogHandler.request` is in its place.
    logging.getLogger("uvicorn.access").disabled = True
    return lines


def check_level(level: str) -> None:
    """Refuse what is no level."""
    if level not in get_args(Level):
        raise InputError(f"A log level is one of {', '.join(get_args(Level))}, got {level!r}.")


def _message(record: logging.LogRecord) -> str:
    try:
        message = record.getMessage()
    except (TypeError, ValueError, KeyError):
        return str(record.msg)
    # asyncio adds the future, and in it the text of its exception, on lines of their own
    return message.partition("\n")[0] if record.name == "asyncio" else message


def redacted_traceback(error: BaseException) -> str:
    """A traceback that says where and what kind, without the texts of exceptions: they may quote a user's id."""
    parts = []
    for each in _chain(error, set()):
        parts += [*traceback.format_tb(each.__traceback__), _kind(each)]
    return "".join(parts).rstrip("\n")


def _chain(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    """What led to the error, the first cause first, then the error."""
    if id(error) in seen:
        return
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None:
        yield from _chain(before, seen)
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _chain(each, seen)
    yield error


def _kind(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) else str(error) if isinstance(error, HARMLESS_TEXTS) else None
    return f"{type(error).__module__}.{type(error).__qualname__}{f': {text}' if text else ''}\n"
