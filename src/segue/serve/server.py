"""Run the application: the model is loaded and the port bound before anyone is told that it serves."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from segue.errors import InputError
from segue.recommend.recommender import Recommender
from segue.serve.app import create_app

STOPPING_SECONDS = 10  # requests in flight get this long at the end


def serve(
    run: Recommender | Path | str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    started: Callable[[str], None] | None = None,
) -> None:
    """Answer requests until interrupted. `started` is told the address; port 0 takes any free one."""
    recommender = run if isinstance(run, Recommender) else Recommender.open(run)
    with listening_socket(host, port) as listening:
        server = make_server(recommender)
        if started is not None:
            shown = f"[{host}]" if ":" in host else host
            started(f"http://{shown}:{listening.getsockname()[1]}")
        server.run(sockets=[listening])


def make_server(recommender: Recommender) -> uvicorn.Server:
    """A server that says nothing but warnings, and those through `logging`."""
    return uvicorn.Server(
        uvicorn.Config(
            create_app(recommender),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=STOPPING_SECONDS,
        )
    )


def listening_socket(host: str, port: int) -> socket.socket:
    """Bind early, so that a port in use is a sentence and not a log line of the server."""
    if not 0 <= port <= 65535:
        raise InputError(f"A port is a number from 0 to 65535, got {port}; choose one with --port.")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise InputError(_reason(error, host, port)) from error


def _reason(error: OSError, host: str, port: int) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"{host!r} is not an address of this machine; name one with --host, such as 127.0.0.1."
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} of {host} is in use; choose another with --port."
    if error.errno == errno.EACCES:
        return f"No permission to use port {port}; choose one from 1024 on with --port."
    return f"{host}, port {port} cannot be listened on: {error.strerror or error}."
