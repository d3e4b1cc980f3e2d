"""The real `segue serve`, in its own process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

WAIT = 60  # seconds; a busy machine may take long, but not for ever


class Served:
    """A running `segue serve` and its output."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
        """`log`: the file of standard error. A full pipe that nobody reads would stop the server."""
        self.process = process
        self.url = url
        self._log = log
        self.client = httpx.Client(base_url=url, trust_env=False, timeout=WAIT)
        self.errors = b""

    def family(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def stop(self) -> None:
        """Send SIGTERM: all its processes must end, with exit code 0 and no errors."""
        family = self.family()
        self.process.send_signal(signal.SIGTERM)
        self.ended(family)

    def ended(self, family: list[psutil.Process]) -> None:
        self.process.wait(timeout=WAIT)
        self.errors = self._log.read()
        assert self.process.returncode == 0, self.errors.decode()
        assert b"Traceback" not in self.errors, self.errors.decode()
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive, "child processes are still running"

    def lines(self) -> list[dict[str, Any]]:
        """The log, whose every line is JSON."""
        return [json.loads(line) for line in self.errors.splitlines() if not line.startswith(b"The store ")]


@contextlib.contextmanager
def serving(*arguments: object, cwd: Path) -> Iterator[Served]:
    """The command in its own process, which is killed afterwards in any case."""
    command = [sys.executable, "-m", "segue.cli", "serve", *map(str, arguments), "--port", "0", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        tempfile.NamedTemporaryFile() as log,
        Path(log.name).open("ab") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, cwd=cwd, env=environment) as process,
    ):
        watch = threading.Timer(180, process.kill)
        watch.start()
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first, log.read().decode()
            server = Served(process, json.loads(first)["url"], log)
            with server.client:
                yield server
        finally:
            watch.cancel()
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
