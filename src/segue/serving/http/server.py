"""Run the service: bind the port, load the runs, then report the address and serve."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from uvicorn.supervisors import Multiprocess

from segue.data.dataset import Data
from segue.errors import InputError
from segue.folders import read_manifest
from segue.serving.engine.channel import EngineProcess, freeze_loaded_objects
from segue.serving.http.guard import Guard, RateLimit
from segue.serving.http.keys import NO_ADDRESS, Keys, check_binding
from segue.serving.http.logs import configure_logs
from segue.serving.http.metrics import Metrics, shared_between_workers
from segue.serving.service import Service
from segue.serving.settings import ServiceSettings
from segue.serving.store.fill import FillReport, fill_store
from segue.serving.store.store import open_store

SHUTDOWN_SECONDS = 10  # for requests in flight
SETTINGS_VARIABLE = "SEGUE_SERVICE"  # the environment variable with the settings of worker processes


def serve(
    settings: ServiceSettings,
    *,
    port: int = 8000,
    started: Callable[[str], None] | None = None,
    before: Callable[[], None] | None = None,
) -> None:
    """Serve until interrupted.

    `port`: 0 takes any free one. `started`: called with the address. `before`: called once the port is bound and the
    settings are checked, such as to fill the store.
    """
    check_binding(settings.host, Keys.load(settings.keys, os.environ))
    for run in settings.runs:
        read_manifest(run, "run")
    with listening_socket(settings.host, port) as listening:
        if before is not None:
            before()
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        url = f"http://{host}:{listening.getsockname()[1]}"
        if settings.workers > 1:
            _serve_with_workers(settings, listening, lambda: started and started(url))
            return
        server = uvicorn.Server(_configuration(make_app(settings)))
        # End on SIGTERM also before the server has its own handler, and with exit code 0: after a signal, uvicorn
        # raises it again for the handler that was there before.
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread:
            before_serving = signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
        try:
            if started is not None:
                started(url)
            server.run(sockets=[listening])
        finally:
            if in_main_thread:
                signal.signal(signal.SIGTERM, before_serving)


def fill_histories(url: str, data: Path | str, progress: Callable[[int, int], None] | None = None) -> FillReport:
    """Write a data folder's histories into an empty store; `progress` gets the events written and their total."""
    log = Data.open(data)
    events = log.sequences.n_events
    with contextlib.closing(open_store(url)) as store:
        return fill_store(store, log, None if progress is None else lambda done: progress(done, events))


def make_app(settings: ServiceSettings) -> Guard:
    """The application of one process, behind its guard."""
    keys = Keys.load(settings.keys, os.environ)
    logs = configure_logs(settings.log_level)
    engine = EngineProcess(settings)
    from segue.serving.http.app import create_app  # the framework is imported while the engine imports torch

    metrics = Metrics()
    engine.wait_until_ready()
    service = Service(engine, open_store(settings.store), metrics)
    app = create_app(service, examples=() if keys else engine.popular)
    freeze_loaded_objects()
    return Guard(
        app,
        keys=keys,
        metrics=metrics,
        logs=logs,
        rate_limit=None if settings.rate_limit is None else RateLimit(settings.rate_limit / settings.workers),
        allowed_origins=settings.origins,
        host=settings.host,
    )


def worker_app() -> Guard:
    """The application of a worker process, with the settings in its environment."""
    return make_app(
        msgspec.json.decode(os.environ[SETTINGS_VARIABLE], type=ServiceSettings, dec_hook=lambda kind, text: kind(text))
    )


def _serve_with_workers(settings: ServiceSettings, listening: socket.socket, started: Callable[[], Any]) -> None:
    """Serve with several processes on one port; one that dies is replaced."""
    configure_logs(settings.log_level)
    trial = EngineProcess(settings)  # so that a broken run or store is reported once, not by every worker
    trial.wait_until_ready()
    trial.end()
    worker_settings = msgspec.structs.replace(settings, joining=True)
    os.environ[SETTINGS_VARIABLE] = msgspec.json.encode(worker_settings, enc_hook=str).decode()
    configuration = _configuration("segue.serving.http.server:worker_app", factory=True, workers=settings.workers)
    try:
        with shared_between_workers():
            started()
            Multiprocess(configuration, sockets=[listening]).run()
    finally:
        del os.environ[SETTINGS_VARIABLE]


def _configuration(app: Guard | str, **options: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,  # a client could forge them
        ws="none",
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        **options,
    )


def listening_socket(host: str, port: int) -> socket.socket:
    """Bind the port; raise an InputError with the reason if that fails."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port must be a number from 0 to 65535, got {port}.")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        if isinstance(error, socket.gaierror | UnicodeError) or number == errno.EADDRNOTAVAIL:
            reason = NO_ADDRESS.format(host)
        elif number == errno.EADDRINUSE:
            reason = f"Port {port} of {host} is in use; choose another with --port."
        elif number == errno.EACCES:
            reason = f"No permission to use port {port}; choose one from 1024 on with --port."
        else:
            reason = f"{host}, port {port} cannot be listened on: {error.strerror or error}."
        raise InputError(reason) from error
