"""Logs: each line is JSON with a request id and no user's id."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from segue.errors import InputError
from segue.serving.http.logs import REQUEST_ID, JsonLogHandler, configure_logs, redacted_traceback
from segue.serving.settings import ServiceSettings

USER = "alice@example.com"


@pytest.fixture(name="stream")
def memory() -> io.BytesIO:
    return io.BytesIO()


@pytest.fixture(name="logger")
def logger_to_stream(stream: io.BytesIO) -> Iterator[logging.Logger]:
    logger = logging.getLogger("segue.tests.logs")
    handler = JsonLogHandler(stream, logging.DEBUG)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def _loggers_as_before() -> Iterator[None]:
    names = [None, "uvicorn", "uvicorn.error", "uvicorn.asgi", "uvicorn.access"]
    loggers = [logging.getLogger(name) for name in names]
    before = [(log, [*log.handlers], log.level, log.propagate, log.disabled) for log in loggers]
    yield
    for log, handlers, level, propagate, disabled in before:
        log.handlers, log.propagate, log.disabled = handlers, propagate, disabled
        log.setLevel(level)


def lines(output: bytes | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def request(log: JsonLogHandler, status: int = 200) -> None:
    log.request(request_id="r-1", method="GET", route="/users/{id}/history", status=status, seconds=0.0123456)


def test_a_record(logger: logging.Logger, stream: io.BytesIO) -> None:
    logger.warning("%d events\nlost", 3)
    (line,) = lines(stream.getvalue())
    age = datetime.now(UTC) - datetime.fromisoformat(line.pop("time"))
    assert timedelta(0) <= age < timedelta(seconds=5)
    assert line == {"level": "warning", "logger": "segue.tests.logs", "message": "3 events\nlost"}
    assert stream.getvalue().count(b"\n") == 1


def test_a_request(stream: io.BytesIO) -> None:
    request(JsonLogHandler(stream))
    (line,) = lines(stream.getvalue())
    assert datetime.fromisoformat(line.pop("time")).utcoffset() == timedelta(0)
    assert line == {
        "level": "info",
        "logger": "segue.serving.requests",
        "message": "answered",
        "request_id": "r-1",
        "method": "GET",
        "route": "/users/{id}/history",
        "status": 200,
        "milliseconds": 12.346,
    }


@pytest.mark.parametrize(
    ("level", "statuses"),
    [
        (logging.DEBUG, [200, 404, 500, 503]),
        (logging.INFO, [200, 404, 500, 503]),
        (logging.WARNING, [500, 503]),
        (logging.ERROR, []),
    ],
)
def test_requests_by_level(stream: io.BytesIO, level: int, statuses: list[int]) -> None:
    log = JsonLogHandler(stream, level)
    for status in (200, 404, 500, 503):
        request(log, status)
    assert [line["status"] for line in lines(stream.getvalue())] == statuses
    assert all(line["level"] == "warning" for line in lines(stream.getvalue()) if line["status"] >= 500)


def test_records_within_a_request_carry_its_id(logger: logging.Logger, stream: io.BytesIO) -> None:
    async def handle(name: str) -> None:
        REQUEST_ID.set(name)
        await asyncio.sleep(0)
        await asyncio.to_thread(logger.info, name)

    async def both() -> None:
        await asyncio.gather(handle("r-1"), handle("r-2"))

    asyncio.run(both())
    logger.info("outside")
    ids = {line["message"]: line.get("request_id") for line in lines(stream.getvalue())}
    assert ids == {"r-1": "r-1", "r-2": "r-2", "outside": None}


def fail(error: BaseException) -> None:
    raise error


def test_a_traceback_has_no_messages(logger: logging.Logger, stream: io.BytesIO) -> None:
    try:
        try:
            fail(KeyError(USER))
        except KeyError as error:
            raise ExceptionGroup(USER, [ValueError(USER), OSError(28, "No space left on device", USER)]) from error
    except ExceptionGroup as error:
        error.add_note(USER)
        logger.exception("Something broke")
    (line,) = lines(stream.getvalue())
    assert (line["level"], line["message"]) == ("error", "Something broke")
    text = line["traceback"]
    assert USER not in text
    kinds = ["builtins.KeyError", "builtins.ValueError", "builtins.OSError: No space left", "builtins.ExceptionGroup"]
    assert [text.index(kind) for kind in kinds] == sorted(text.index(kind) for kind in kinds)
    assert "in fail" in text and "test_logs.py" in text


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (TypeError("unsupported operand"), "builtins.TypeError: unsupported operand"),
        (sqlite3.OperationalError("database is locked"), "sqlite3.OperationalError: database is locked"),
        (InputError(f"{USER} is not known"), "segue.errors.InputError"),
        (FileNotFoundError(2, "No such file or directory", USER), "FileNotFoundError: No such file or directory"),
        (UnicodeDecodeError("utf-8", USER.encode(), 0, 1, USER), "builtins.UnicodeDecodeError"),
    ],
)
def test_safe_messages_are_logged(error: Exception, last: str) -> None:
    with pytest.raises(type(error)) as caught:
        fail(error)
    assert redacted_traceback(caught.value).endswith(last)
    assert USER not in redacted_traceback(caught.value)


def test_a_cyclic_chain_of_exceptions_ends() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert redacted_traceback(first).splitlines() == ["builtins.KeyError", "builtins.ValueError"]


def test_a_message_with_wrong_arguments(stream: io.BytesIO) -> None:
    JsonLogHandler(stream).handle(logging.makeLogRecord({"msg": "%d events", "args": (USER,)}))
    assert lines(stream.getvalue())[0]["message"] == "%d events"


def test_a_closed_log_is_ignored() -> None:
    class ClosedStream(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, _: object) -> int:
            raise BrokenPipeError

    closed = io.BytesIO()
    closed.close()
    for stream in (cast(BinaryIO, ClosedStream()), closed):
        request(JsonLogHandler(stream))


@pytest.mark.usefixtures("_loggers_as_before")
def test_every_logger_uses_the_handler_once(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("uvicorn.error").addHandler(logging.StreamHandler())
    first = configure_logs("warning")
    log = configure_logs("info")
    assert first not in logging.getLogger().handlers
    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("segue.serving").info("ready")
    logging.getLogger("segue.serving").debug("too small")
    logging.getLogger("uvicorn.access").error("GET /users/%s", USER)
    request(log)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line["message"] for line in lines(err)] == ["started", "ready", "answered"]


@pytest.mark.usefixtures("_loggers_as_before")
def test_a_task_whose_exception_is_never_retrieved(capsys: pytest.CaptureFixture[str]) -> None:
    async def leave() -> None:
        async def broken() -> None:
            raise KeyError(USER)

        task = asyncio.create_task(broken())
        await asyncio.wait([task])
        del task
        gc.collect()

    configure_logs("info")
    asyncio.run(leave())
    err = capsys.readouterr().err
    assert [line["message"] for line in lines(err)] == ["Task exception was never retrieved"]
    assert "KeyError" in err and USER not in err


def test_an_unknown_level() -> None:
    with pytest.raises(InputError, match="one of debug, info, warning, error, got 'loud'"):
        ServiceSettings(runs=(Path("run"),), log_level="loud")  # type: ignore[arg-type]
