"""What happens in the service → Prometheus metrics, added up over worker processes where there are several."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

Queue = Literal["answers", "events"]
"""Where requests wait to be worked on together: for the encoder, or for a commit."""

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's own name for it
LATENCIES = [ms / 1000 for ms in (1, 2, 5, 7, 10, 15, 25, 50, 100, 250, 1000, 2500, 10_000)]
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


class Metrics:
    """The metrics of one application, in a registry of its own."""

    def __init__(self) -> None:
        # Imported here: it decides when it is imported whether its numbers are shared between processes.
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "segue_requests", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "segue_request_seconds", "Seconds to answer.", ["route"], buckets=LATENCIES, registry=registry
        )
        self._events = Counter("segue_events", "Events received.", ["outcome"], registry=registry)
        self._answers = Counter("segue_answers", "Recommendations given.", ["fallback"], registry=registry)
        self._batches = Histogram(
            "segue_batch_size", "Requests worked on together.", ["queue"], buckets=SIZES, registry=registry
        )
        self._queues = Gauge(
            "segue_queue_length", "Requests that wait.", ["queue"], multiprocess_mode="livesum", registry=registry
        )
        self._refused = Counter("segue_unavailable", "Requests answered 503.", ["reason"], registry=registry)
        self._models = Gauge(
            "segue_model_info",
            "Worker processes that serve a run; 0 once it is replaced.",
            ["name", "digest"],
            multiprocess_mode="livesum",
            registry=registry,
        )
        self._switches = Counter(
            "segue_model_switches", "Times a worker process went over to another run.", registry=registry
        )
        self._encodings = Counter(
            "segue_encodings", "Histories encoded, whole or what was new in them.", ["extent"], registry=registry
        )
        self._memory = Gauge(
            "segue_cache_bytes",
            "Encoded histories that are remembered.",
            multiprocess_mode="livesum",
            registry=registry,
        )
        self._store_errors = Counter("segue_store_errors", "Failures of the history store.", registry=registry)
        self._per_request: dict[tuple[str, str, int], tuple[Callable[[], None], Callable[[float], None]]] = {}
        self._model: tuple[str, str] | None = None
        for outcome in ("accepted", "duplicate"):  # a rate needs the zero before the first one
            self._events.labels(outcome)
        for extent in ("new", "whole"):
            self._encodings.labels(extent)

    def request(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered. `route` is a template, never a path."""
        key = (method, route, status)
        found = self._per_request.get(key)
        if found is None:  # finding a child by its labels costs more than counting
            found = (self._requests.labels(method, route, status).inc, self._seconds.labels(route).observe)
            self._per_request[key] = found
        count, observe = found
        count()
        observe(seconds)

    def events(self, *, accepted: int, duplicates: int) -> None:
        """Events were stored, or were there already."""
        self._events.labels("accepted").inc(accepted)
        self._events.labels("duplicate").inc(duplicates)

    def answer(self, fallback: str | None) -> None:
        """Recommendations were given, by the model or by what stood in for it."""
        self._answers.labels(fallback or "none").inc()

    def batch(self, queue: Queue, size: int) -> None:
        """So many requests of a queue were worked on together."""
        self._batches.labels(queue).observe(size)

    def queue(self, queue: Queue, length: int) -> None:
        """So many requests wait in this process."""
        self._queues.labels(queue).set(length)

    def unavailable(self, reason: str) -> None:
        """A request was answered 503. Reasons are a few fixed words."""
        self._refused.labels(reason).inc()

    def model(self, name: str, digest: str) -> bool:
        """This process serves this run from now on; whether it served another before, or none."""
        if self._model == (name, digest):
            return False
        if self._model is not None:
            self._models.labels(*self._model).set(0)
            self._switches.inc()
        self._model = (name, digest)
        self._models.labels(name, digest).set(1)
        return True

    def encodings(self, extended: int, whole: int, remembered: int) -> None:
        """So many histories were encoded, of which so many bytes are remembered now."""
        self._encodings.labels("new").inc(extended)
        self._encodings.labels("whole").inc(whole)
        self._memory.set(remembered)

    def store_error(self) -> None:
        """The history store failed."""
        self._store_errors.inc()

    def render(self) -> tuple[bytes, str]:
        """The metrics of all workers in Prometheus' text format, and its content type. Safe in any thread."""
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = self._registry
        if folder := os.environ.get(SHARED_FOLDER):
            _forget_ended(Path(folder))
            registry = CollectorRegistry()
            MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
        return generate_latest(registry), CONTENT_TYPE_LATEST


@contextmanager
def shared_between_workers() -> Iterator[None]:
    """For the parent: the workers started within add their metrics up, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="segue-metrics-") as folder:
        os.environ[SHARED_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[SHARED_FOLDER]


def _forget_ended(folder: Path) -> None:
    """What a worker has waiting or serves ends with it, also if it was killed; what it counted stays."""
    for file in folder.glob("gauge_live*_*.db"):
        process = int(file.stem.rpartition("_")[2])
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            with suppress(FileNotFoundError):  # another worker was quicker
                file.unlink()
        except PermissionError:
            continue  # somebody else's process has the number by now
