"""`segue serve` and its arguments → a process that answers, can be asked, and can be killed."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from segue.errors import InputError

READY_SECONDS = 120.0
STOP_SECONDS = 20.0
HOST = "127.0.0.1"
PRELOADED = ("torch", "litestar", "uvicorn")  # what takes long to import, and starts no thread by it


class Process(Protocol):
    """What the two ways to start a server have in common."""

    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...
    def gone(self, seconds: float) -> bool:
        """Whether it has ended, waiting at most so long."""
        ...


Launch = Callable[[Sequence[str], Path], Process]
"""A server with these arguments of `segue`, writing what it says to this file."""


class Command:
    """The command as a user starts it."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        with log.open("ab") as said:
            self._child = subprocess.Popen([sys.executable, "-m", "segue.cli", *arguments], stdout=said, stderr=said)
        self.pid = self._child.pid

    def kill(self) -> None:
        self._child.kill()

    def gone(self, seconds: float) -> bool:
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


class Forked:
    """The same in a process forked from one that has done the slow imports: ten servers for the start of one."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self._child = context.Process(target=_become, args=(list(arguments), log), daemon=True)
        self._child.start()
        assert self._child.pid is not None
        self.pid: int = self._child.pid

    def kill(self) -> None:
        self._child.kill()

    def gone(self, seconds: float) -> bool:
        self._child.join(seconds)
        return not self._child.is_alive()


def _become(arguments: list[str], log: Path) -> None:
    """Be `segue` with these arguments: the function that the installed command calls."""
    with log.open("ab") as said:
        os.dup2(said.fileno(), sys.stdout.fileno())
        os.dup2(said.fileno(), sys.stderr.fileno())
    sys.argv = ["segue", *arguments]
    from segue.cli import main

    main()


class Server:
    """A service at an address of its own."""

    def __init__(self, arguments: Sequence[str], *, port: int, log: Path, launch: Launch = Command) -> None:
        self.port = port
        self._log = log
        self._process = launch(["serve", *arguments, "--host", HOST, "--port", str(port)], log)
        self.pid = self._process.pid

    def wait_ready(self) -> float:
        """Return when it answers that it is ready, with the seconds that took."""
        began = time.monotonic()
        while time.monotonic() < began + READY_SECONDS:
            if self._process.gone(0.0):
                raise InputError(f"The service ended by itself: {self.said()}")
            try:
                status, _ = ask(self.port, "GET", "/health/ready", timeout=5.0)
            except (OSError, http.client.HTTPException):
                status = 0
            if status == http.HTTPStatus.OK:
                return time.monotonic() - began
            time.sleep(0.02)
        raise InputError(f"The service was not ready within {READY_SECONDS:.0f} seconds: {self.said()}")

    def kill(self) -> None:
        """kill -9: no chance to finish anything."""
        self._process.kill()
        self._process.gone(STOP_SECONDS)

    def stop(self) -> bool:
        """SIGTERM; whether it left by itself in time."""
        if not self._process.gone(0.0):
            os.kill(self.pid, signal.SIGTERM)
        if self._process.gone(STOP_SECONDS):
            return True
        self.kill()
        return False

    def said(self) -> str:
        """The end of what it wrote."""
        return self._log.read_text(errors="replace").strip()[-1000:] or "it said nothing"


def free_port() -> int:
    """A port that nothing uses now. A server bound to it, killed and started again finds it free."""
    with socket.create_server((HOST, 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def ask(port: int, method: str, path: str, body: Any = None, *, timeout: float = 60.0) -> tuple[int, Any]:
    """One request on a connection of its own: the status, and the JSON that came, or else the text."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        return exchange(connection, method, path, body)
    finally:
        connection.close()


def exchange(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """One request on a connection that may be used again."""
    sent = None if body is None else json.dumps(body).encode()
    connection.request(method, path, sent, {} if sent is None else {"Content-Type": "application/json"})
    response = connection.getresponse()
    said = response.read()
    try:
        return response.status, json.loads(said)
    except ValueError:
        return response.status, said.decode(errors="replace")
