"""Log records and requests → JSON lines on standard error, with the request's id and without users' ids."""

from __future__ import annotations

import logging
import sqlite3
import sys
import time
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import BinaryIO, Literal

import msgspec

Level = Literal["debug", "info", "warning", "error"]

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
REQUESTS = "segue.serving.requests"
SERVER_ERROR = 500
# Their messages name code and tables; the message of any other exception may quote a request.
SAFE_MESSAGES = (TypeError, AttributeError, NameError, sqlite3.Error)


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """The line of a `logging` record, or of a request that was answered or whose client closed the connection."""

    time: datetime
    level: str
    logger: str
    message: str
    request_id: str | None = None
    method: str | None = None
    route: str | None = None
    """The path template, such as /users/{id}/history: the path itself may hold a user's id."""
    status: int | None = None
    milliseconds: float | None = None
    traceback: str | None = None


class JsonLogHandler(logging.Handler):
    """Writes each record and each request as one line of JSON; a stream that fails is ignored."""

    def __init__(self, stream: BinaryIO, level: int = logging.INFO) -> None:
        super().__init__(level)
        self._stream = stream
        self._encode = msgspec.json.Encoder().encode

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record of `logging`."""
        error = record.exc_info[1] if record.exc_info else None
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):
            message = str(record.msg)
        if record.name == "asyncio":  # it adds further lines with the future and the message of its exception
            message = message.partition("\n")[0]
        self._write(
            LogLine(
                time=datetime.fromtimestamp(record.created, UTC),
                level=record.levelname.lower(),
                logger=record.name,
                message=message,
                request_id=REQUEST_ID.get(),
                traceback=None if error is None else redacted_traceback(error),
            )
        )

    def request(self, *, request_id: str, method: str, route: str, status: int, seconds: float) -> None:
        """Write a request, without a `logging` record, which would cost more than the rest of the guard."""
        failed = status >= SERVER_ERROR
        if self.level > (logging.WARNING if failed else logging.INFO):
            return
        self._write(
            LogLine(
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

    def _write(self, line: LogLine) -> None:
        try:
            self._stream.write(self._encode(line) + b"\n")
            self._stream.flush()
        except (OSError, ValueError):  # full or closed: the service runs without its log
            pass


def configure_logs(level: Level = "info") -> JsonLogHandler:
    """Write all loggers of this process, uvicorn's included, to standard error as JSON lines. A second call replaces
    the handler of the first."""
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
    # It logs paths, and above WARNING even without a handler; `JsonLogHandler.request` replaces it.
    logging.getLogger("uvicorn.access").disabled = True
    return lines


def redacted_traceback(error: BaseException) -> str:
    """A traceback with the lines of code and the exceptions' types, without their messages, which may quote an id."""
    parts = []
    for each in _chain(error, set()):
        kind, message = type(each), None
        if isinstance(each, OSError):
            message = each.strerror
        elif isinstance(each, SAFE_MESSAGES):
            message = str(each)
        type_line = f"{kind.__module__}.{kind.__qualname__}{f': {message}' if message else ''}\n"
        parts += [*traceback.format_tb(each.__traceback__), type_line]
    return "".join(parts).rstrip("\n")


def _chain(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    """The causes of an error, the first one first, then the error."""
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
