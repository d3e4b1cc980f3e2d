"""Metrics: counters render for one application alone and summed over its workers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import segue.serving.http.metrics
from segue.serving.http.metrics import SHARED_FOLDER, Metrics, shared_between_workers


def values(text: str) -> dict[str, float]:
    """Every sample as Prometheus parses it, by name and sorted labels."""
    return {
        f"{sample.name}{sorted(sample.labels.values()) if sample.labels else ''}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def render(metrics: Metrics) -> dict[str, float]:
    return values(metrics.render()[0].decode())


def test_requests() -> None:
    metrics = Metrics()
    for seconds, status in ((0.0065, 200), (0.0065, 200), (0.3, 503)):
        metrics.request(method="GET", route="/users/{id}/history", status=status, seconds=seconds)
    metrics.request(method="POST", route="/events", status=200, seconds=0.001)
    samples = render(metrics)
    assert samples["segue_requests_total['/users/{id}/history', '200', 'GET']"] == 2
    assert samples["segue_requests_total['/users/{id}/history', '503', 'GET']"] == 1
    assert samples["segue_requests_total['/events', '200', 'POST']"] == 1
    buckets = {
        bound: samples[f"segue_request_seconds_bucket{sorted([bound, '/users/{id}/history'])}"] for bound in BOUNDS
    }
    assert buckets == dict(zip(BOUNDS, [0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3], strict=True))
    assert samples["segue_request_seconds_sum['/users/{id}/history']"] == pytest.approx(0.313)
    assert samples["segue_request_seconds_bucket['/events', '0.001']"] == 1


BOUNDS = ["0.001", "0.002", "0.005", "0.007", "0.01", "0.015", "0.025", "0.05", "0.1", "0.25", "1.0", "2.5", "10.0"]
BOUNDS.append("+Inf")


def test_everything_else() -> None:
    metrics = Metrics()
    assert render(metrics)["segue_events_total['accepted']"] == 0  # present before the first event
    metrics.events(accepted=5, duplicates=2)
    metrics.events(accepted=1, duplicates=0)
    metrics.answer(None)
    metrics.answer("popularity")
    metrics.answer("popularity")
    metrics.batch("events", 64, 0)
    metrics.batch("answers", 3, 7)
    metrics.queue("answers", 4)
    metrics.unavailable("deadline")
    metrics.unavailable("store")
    metrics.encodings(40, 3, 900)
    metrics.encodings(2, 0, 800)
    samples = render(metrics)
    expected = {
        "segue_events_total['accepted']": 6,
        "segue_events_total['duplicate']": 2,
        "segue_answers_total['none']": 1,
        "segue_answers_total['popularity']": 2,
        "segue_batch_size_bucket['2.0', 'answers']": 0,
        "segue_batch_size_bucket['4.0', 'answers']": 1,
        "segue_batch_size_sum['events']": 64,
        "segue_queue_length['answers']": 4,
        "segue_unavailable_total['deadline']": 1,
        "segue_store_errors_total": 1,
        "segue_encodings_total['new']": 42,
        "segue_encodings_total['whole']": 3,
        "segue_cache_bytes": 800,
        "segue_model_switches_total": 0,
    }
    assert {name: samples[name] for name in expected} == expected


def test_the_model_and_its_switches() -> None:
    metrics = Metrics()
    for name in ("first", "first", "second", "first"):
        metrics.model(name, f"digest of {name}")
    samples = render(metrics)
    assert samples["segue_model_info['digest of first', 'first']"] == 1
    assert samples["segue_model_info['digest of second', 'second']"] == 0
    assert samples["segue_model_switches_total"] == 2


def test_applications_have_separate_metrics() -> None:
    one, other = Metrics(), Metrics()
    one.unavailable("store")
    assert (render(one)["segue_store_errors_total"], render(other)["segue_store_errors_total"]) == (1, 0)


def test_hostile_names_are_escaped() -> None:
    metrics = Metrics()
    metrics.model('a"b\\c\nd', "☕")
    assert render(metrics)[f"segue_model_info{sorted([chr(34).join('ab') + chr(92) + 'c' + chr(10) + 'd', '☕'])}"] == 1


def test_the_content_type() -> None:
    body, content_type = Metrics().render()
    assert content_type.startswith("text/plain; version=") and body.startswith(b"# HELP segue_")


# The module alone: the package would import torch in each of these processes.
WORKER = f"""
import runpy, sys
metrics = runpy.run_path({str(Path(segue.serving.http.metrics.__file__))!r})["Metrics"]()
metrics.events(accepted=int(sys.argv[1]), duplicates=0)
metrics.request(method="GET", route="/items", status=200, seconds=0.004)
metrics.queue("answers", int(sys.argv[1]))
metrics.model("run", "digest")
print("counted", flush=True)
for _ in sys.stdin:
    print(metrics.render()[0].decode() + "END", flush=True)
"""


class Worker:
    """A process that counts and renders its metrics on request."""

    def __init__(self, number: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def count(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "counted\n"

    def render(self) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return values("".join(iter(self.process.stdout.readline, "END\n")))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(name="workers")
def two_workers() -> Iterator[list[Worker]]:
    with shared_between_workers():
        workers = [Worker(3), Worker(4)]
        try:
            for worker in workers:
                worker.count()
            yield workers
        finally:
            for worker in workers:
                worker.kill()


def test_metrics_of_workers_are_summed_and_outlive_them(workers: list[Worker]) -> None:
    first, second = workers
    both = first.render()
    assert both == second.render()
    assert both["segue_events_total['accepted']"] == 7
    assert both["segue_requests_total['/items', '200', 'GET']"] == 2
    assert both["segue_request_seconds_bucket['/items', '0.005']"] == 2
    assert both["segue_queue_length['answers']"] == 7
    assert both["segue_model_info['digest', 'run']"] == 2
    second.kill()
    alone = first.render()
    assert alone["segue_events_total['accepted']"] == 7
    assert alone["segue_queue_length['answers']"] == 3
    assert alone["segue_model_info['digest', 'run']"] == 1


def test_the_shared_folder_is_removed_afterwards() -> None:
    with shared_between_workers():
        folder = Path(os.environ[SHARED_FOLDER])
        assert folder.is_dir()
    assert SHARED_FOLDER not in os.environ and not folder.exists()
