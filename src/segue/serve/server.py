"""Run the service: everything is loaded and the port bound before anyone is told that it serves."""

from __future__ import annotations

import errno
import gc
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import uvicorn
from uvicorn.supervisors import Multiprocess

from segue.data.dataset import Data
from segue.errors import InputError
from segue.serve.app import MOST_BYTES, create_app
from segue.serve.fill import FillReport, fill_store
from segue.serve.guard import Guard
from segue.serve.keys import Keys, check_binding
from segue.serve.limits import RateLimit
from segue.serve.logs import configure_logs
from segue.serve.metrics import Metrics, shared_between_workers
from segue.serve.models import Models, ServedModel
from segue.serve.service import Service
from segue.serve.settings import ServiceSettings
from segue.serve.store import open_store

STOPPING_SECONDS = 10  # requests in flight get this long at the end
HANDED_OVER = "SEGUE_SERVICE"  # the environment variable in which workers find their settings


def serve(
    settings: ServiceSettings,
    *,
    port: int = 8000,
    started: Callable[[str], None] | None = None,
) -> None:
    """Answer requests until interrupted. `started` is told the address; port 0 takes any free one."""
    check_binding(settings.host, Keys.load(settings.keys, os.environ))
    with listening_socket(settings.host, port) as listening:
        shown = f"[{settings.host}]" if ":" in settings.host else settings.host
        url = f"http://{shown}:{listening.getsockname()[1]}"
        if settings.workers > 1:
            _serve_with_workers(settings, listening, lambda: started and started(url))
            return
        server = uvicorn.Server(_configuration(make_app(settings)))
        if started is not None:
            started(url)
        server.run(sockets=[listening])


def fill(url: str, data: Path | str, progress: Callable[[int, int], None] | None = None) -> FillReport:
    """Put a data folder's histories into a store that is empty; `progress` is told the events done, and of how many."""
    log = Data.open(data)
    store = open_store(url)
    try:
        events = log.sequences.n_events
        return fill_store(store, log, None if progress is None else lambda done: progress(done, events))
    finally:
        store.close()


def make_app(settings: ServiceSettings) -> Guard:
    """The guarded application of one process."""
    # A question is a small matter and requests come side by side: more threads would only get in each other's way.
    torch.set_num_threads(1)
    keys = Keys.load(settings.keys, os.environ)
    logs = configure_logs(settings.log_level)
    metrics = Metrics()
    served = [ServedModel.open(run) for run in settings.runs]
    store = open_store(settings.store)
    service = Service(Models(served, runs=settings.runs_folder, store=store), store, metrics)
    app = create_app(service, examples=not keys)
    gc.collect()
    gc.freeze()  # what is loaded now stays: the collector need not look at it again, in the middle of a request
    return Guard(
        app,
        keys=keys,
        metrics=metrics,
        most_bytes=MOST_BYTES,
        logs=logs,
        rate_limit=None if settings.rate_limit is None else RateLimit(settings.rate_limit / settings.workers),
        allowed_origins=settings.origins,
        host=settings.host,
    )


def worker_app() -> Guard:
    """The application of a worker process, which finds its settings in the environment."""
    return make_app(msgspec.json.decode(os.environ[HANDED_OVER], type=ServiceSettings))


def _serve_with_workers(settings: ServiceSettings, listening: socket.socket, started: Callable[[], Any]) -> None:
    """Several processes on one port; one that dies is replaced."""
    for run in settings.runs:
        ServedModel.open(run)  # what is wrong with a run is said once, here, and not by every worker
    os.environ[HANDED_OVER] = msgspec.json.encode(settings).decode()
    configuration = _configuration("segue.serve.server:worker_app", factory=True, workers=settings.workers)
    try:
        with shared_between_workers():
            started()
            Multiprocess(configuration, sockets=[listening]).run()
    finally:
        del os.environ[HANDED_OVER]


def _configuration(app: Guard | str, **more: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=STOPPING_SECONDS,
        **more,
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
