"""Run `segue serve` as a process that can be queried and killed."""

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
    """A service at a port of its own."""

    def __init__(self, arguments: Sequence[str], *, port: int, log: Path, segue: Sequence[str] = SEGUE) -> None:
        self.port = port
        self._log = log
        command = [*segue, "serve", *arguments, "--host", HOST, "--port", str(port)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        self.pid = self._process.pid

    def wait_ready(self) -> float:
        """Wait until it is ready; return the seconds that took."""
        start = time.monotonic()
        while time.monotonic() < start + READY_SECONDS:
            if self._process.poll() is not None:
                raise InputError(f"The service ended by itself; its log ends with: {self.log_end()}")
            try:
                status, _ = ask(self.port, "GET", "/health/ready", timeout=5.0)
            except (OSError, http.client.HTTPException):
                status = 0
            if status == http.HTTPStatus.OK:
                return time.monotonic() - start
            time.sleep(0.02)
        raise InputError(
            f"The service was not ready within {READY_SECONDS:.0f} seconds; its log ends with: {self.log_end()}"
        )

    def kill(self) -> None:
        """Send kill -9."""
        self._process.kill()
        self._process.wait(STOP_SECONDS)

    def stop(self) -> bool:
        """Send SIGTERM; return whether it ended by itself in time."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

    def log_end(self) -> str:
        return self._log.read_text(errors="replace").strip()[-1000:] or "(nothing)"


def free_port() -> int:
    """A port that is free now, and stays free for a server that is killed and restarted."""
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def ask(port: int, method: str, path: str, body: Any = None, *, timeout: float = 60.0) -> tuple[int, Any]:
    """Send one request on a new connection; return the status and the JSON of the answer, or its text."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        return exchange(connection, method, path, body)
    finally:
        connection.close()


def exchange(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Send one request on an open connection."""
    data = None if body is None else json.dumps(body).encode()
    connection.request(method, path, data, {} if data is None else {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    try:
        return response.status, json.loads(text)
    except ValueError:
        return response.status, text.decode(errors="replace")
