"""Prometheus metrics of the service, summed over its worker processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

Queue = Literal["answers", "events"]
"""The queues whose requests are processed in batches: for the encoder, and for a commit."""

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # the variable that prometheus_client reads
LATENCIES = [ms / 1000 for ms in (1, 2, 5, 7, 10, 15, 25, 50, 100, 250, 1000, 2500, 10_000)]
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


class Metrics:
    """The metrics of one application, in a registry of its own."""

    def __init__(self) -> None:
        # Imported here: on import, prometheus_client decides whether it shares its numbers between processes.
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = registry = CollectorRegistry()
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        gauge = partial(Gauge, registry=registry, multiprocess_mode="livesum")
        self._requests = counter("segue_requests", "Requests answered.", ["method", "route", "status"])
        self._seconds = histogram(
            "segue_request_seconds", "Seconds from a request to its response.", ["route"], buckets=LATENCIES
        )
        self._events = counter("segue_events", "Events received.", ["outcome"])
        self._answers = counter("segue_answers", "Recommendations returned.", ["fallback"])
        self._batches = histogram("segue_batch_size", "Requests processed in one batch.", ["queue"], buckets=SIZES)
        self._queues = gauge("segue_queue_length", "Requests waiting in the queue.", ["queue"])
        self._unavailable = counter("segue_unavailable", "Requests answered 503.", ["reason"])
        self._models = gauge(
            "segue_model_info", "Worker processes with this active run; 0 after a switch.", ["name", "digest"]
        )
        self._switches = counter("segue_model_switches", "Switches of a worker process to another run.")
        self._encodings = counter("segue_encodings", "Histories encoded: whole, or only their new events.", ["extent"])
        self._cache = gauge("segue_cache_bytes", "Bytes of the KV caches of histories.")
        self._store_errors = counter("segue_store_errors", "Failures of the history store.")
        self._per_request: dict[tuple[str, str, int], tuple[Callable[[], None], Callable[[float], None]]] = {}
        self._model: tuple[str, str] | None = None
        for outcome in ("accepted", "duplicate"):  # a rate over time needs the zero before the first event
            self._events.labels(outcome)
        for extent in ("new", "whole"):
            self._encodings.labels(extent)

    def request(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request. `route` is a template, never a path."""
        key = (method, route, status)
        children = self._per_request.get(key)
        if children is None:  # a lookup by labels costs more than counting
            children = (self._requests.labels(method, route, status).inc, self._seconds.labels(route).observe)
            self._per_request[key] = children
        count, observe = children
        count()
        observe(seconds)

    def events(self, *, accepted: int, duplicates: int) -> None:
        """Count events that were stored, and those stored before."""
        self._events.labels("accepted").inc(accepted)
        self._events.labels("duplicate").inc(duplicates)

    def answer(self, fallback: str | None) -> None:
        """Count an answer of the model, or of its fallback."""
        self._answers.labels(fallback or "none").inc()

    def batch(self, queue: Queue, size: int, waiting: int) -> None:
        """Count the requests of a batch, and set the number of those that wait."""
        self._batches.labels(queue).observe(size)
        self.queue(queue, waiting)

    def queue(self, queue: Queue, length: int) -> None:
        """Set the number of requests waiting in this process."""
        self._queues.labels(queue).set(length)

    def unavailable(self, reason: str) -> None:
        """Count a 503 response. Reasons are a few fixed words, such as `store`."""
        self._unavailable.labels(reason).inc()
        if reason == "store":
            self._store_errors.inc()

    def model(self, name: str, digest: str) -> bool:
        """Set the active run of this process; return whether it changed."""
        if self._model == (name, digest):
            return False
        if self._model is not None:
            self._models.labels(*self._model).set(0)
            self._switches.inc()
        self._model = (name, digest)
        self._models.labels(name, digest).set(1)
        return True

    def encodings(self, extended: int, whole: int, cache_bytes: int) -> None:
        """Count histories encoded by their new events alone, and whole; set the size of the KV caches."""
        self._encodings.labels("new").inc(extended)
        self._encodings.labels("whole").inc(whole)
        self._cache.set(cache_bytes)

    def render(self) -> tuple[bytes, str]:
        """The metrics of all workers in Prometheus' text format, and its content type. Thread-safe."""
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = self._registry
        if folder := os.environ.get(SHARED_FOLDER):
            # Remove the gauges of workers that ended or were killed; their counters stay.
            for file in Path(folder).glob("gauge_live*_*.db"):
                try:
                    os.kill(int(file.stem.rpartition("_")[2]), 0)
                except ProcessLookupError:
                    file.unlink(missing_ok=True)  # another worker may have removed it
                except PermissionError:
                    continue  # another user's process has the number now
            registry = CollectorRegistry()
            MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
        return generate_latest(registry), CONTENT_TYPE_LATEST


@contextmanager
def shared_between_workers() -> Iterator[None]:
    """Sum the metrics of the worker processes started inside, through a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="segue-metrics-") as folder:
        os.environ[SHARED_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[SHARED_FOLDER]
