"""`segue serve` and its arguments → a process that answers, can be asked, and can be killed."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from segue.errors import InputError

READY_SECONDS = 120.0
STOP_SECONDS = 20.0
HOST = "127.0.0.1"
SEGUE = (sys.executable, "-m", "segue")


class Server:
    """A service at an address of its own."""

    def __init__(self, arguments: Sequence[str], *, port: int, log: Path, segue: Sequence[str] = SEGUE) -> None:
        self.port = port
        self._log = log
        command = [*segue, "serve", *arguments, "--host", HOST, "--port", str(port)]
        with log.open("ab") as said:
            self._process = subprocess.Popen(command, stdout=said, stderr=said)
        self.pid = self._process.pid

    def wait_ready(self) -> float:
        """Return when it answers that it is ready, with the seconds that took."""
        began = time.monotonic()
        while time.monotonic() < began + READY_SECONDS:
            if self._process.poll() is not None:
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
        self._process.wait(STOP_SECONDS)

    def stop(self) -> bool:
        """SIGTERM; whether it left by itself in time."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

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
