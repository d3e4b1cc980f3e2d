"""Shared fixtures: a planted log, its data folder and a run, made once per worker."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from command_line import CommandLine
from hypothesis import HealthCheck, settings
from planted_logs import cycle_log, titled_items
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from bench.serving.postgres import PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# How long an example takes depends on the machine and on what else it does: a slow example is not an error.
# Fifty examples instead of a hundred: the suite is run many times, each time with other examples.
settings.register_profile("segue", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("segue")

# Modules whose tests go to one worker, because their fixtures are slow: services and a browser, pairs of
# processes, a Spark session, a search. (xdist's own groups are marks, which it does not find since pytest 9.2.)
TOGETHER = {
    "test_page.py": "page",
    "test_hostile.py": "hostile",
    "test_replicas.py": "replicas",
    "test_processes.py": "processes",
    "test_spark_files.py": "spark",
    "test_spark_prepare.py": "spark",
    "test_spark_answers.py": "spark",
    "test_tune.py": "tune",
    "test_tuning.py": "tune",
    "test_window_journey.py": "window",
}


class GroupedScheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Gives the next test to the next free worker, except groups of modules."""

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER.get(Path(nodeid.split("::")[0]).name, nodeid)


def pytest_collection_finish() -> None:
    """Exclude modules and collected tests from garbage collection, which took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupedScheduling:
    return GroupedScheduling(config, log)


QUICK = """
[model]
kind = "sasrec"
width = 16
depth = 1
length = 20
dropout = 0.0
feed_forward = 1
positions = "oldest"

[train]
epochs = 3
patience = 3
tokens = 500
learning_rate = 1e-2
averaging = 0.0
warmup = 0
threads = 1
"""


@pytest.fixture(scope="session")
def quick_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings that train in a second."""
    path = tmp_path_factory.mktemp("recipe") / "quick.toml"
    path.write_text(QUICK)
    return path


@pytest.fixture(scope="session")
def cycle_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of the cycle log."""
    from segue.api import prepare

    folder = tmp_path_factory.mktemp("cycle")
    (folder / "log.csv").write_text(cycle_log())
    prepare(folder / "log.csv", out=folder / "data")
    return folder / "data"


@pytest.fixture(scope="session")
def cycle_run(cycle_data: Path, quick_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the cycle log."""
    from segue.api import train

    out = tmp_path_factory.mktemp("run") / "cycle"
    train(cycle_data, out=out, recipe=quick_recipe)
    return out


@pytest.fixture(scope="session")
def content_run(quick_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the cycle log whose item vectors come from the titles."""
    from segue.api import prepare, train

    folder = tmp_path_factory.mktemp("content")
    (folder / "log.csv").write_text(cycle_log())
    (folder / "items.csv").write_text(titled_items())
    data = prepare(folder / "log.csv", items=folder / "items.csv", out=folder / "data")
    content = [
        "model.items=vectors",
        'model.items.texts=["title"]',
        "model.items.text_encoder.width=12",
        "train.epochs=2",
    ]
    train(data, out=folder / "run", recipe=quick_recipe, overrides=content)
    return folder / "run"


@pytest.fixture(scope="session")
def segue_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The real command line, in its own process."""

    def run(*arguments: object, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "segue.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=cwd,
            timeout=timeout,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )

    return run


@pytest.fixture
def line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CommandLine:
    """The command line in this process, in the folder `tmp_path`."""
    return CommandLine(capsys, monkeypatch, tmp_path)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A real PostgreSQL, one per worker, started by the first test that uses it."""
    server = PostgresServer(durable=False)
    yield server
    server.close()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """An empty database."""
    return postgres_server.new_database()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A real Spark session, which segue finds running. Small: queries that run once are not optimised."""
    from segue.data.spark.session import open_session

    small = "--conf spark.sql.shuffle.partitions=2 --conf spark.sql.codegen.wholeStage=false"
    java = "'-XX:TieredStopAtLevel=1 -XX:+UseSerialGC'"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_SUBMIT_ARGS", f"{small} --driver-java-options {java} pyspark-shell")
        with open_session() as session:
            yield session
