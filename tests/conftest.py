"""What many tests start from: a planted log, its data folder and a run, made once a worker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

QUICK = """
[model]
builder = "sasrec"
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


def cycle_log(*, users: int = 60, items: int = 12, events: int = 14, seed: int = 5) -> str:
    """A CSV in which every user walks round a cycle of items from a place of their own: the next item is certain."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, items, users)
    rows = [
        f"u{user:03},i{(starts[user] + step) % items:02},{1_600_000_000 + 97 * user + 3600 * step}"
        for user in range(users)
        for step in range(events)
    ]
    return "user,item,timestamp\n" + "\n".join(rows) + "\n"


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
    """A run on it."""
    from segue.api import train

    out = tmp_path_factory.mktemp("run") / "cycle"
    train(cycle_data, out=out, recipe=quick_recipe)
    return out


@pytest.fixture(scope="session")
def segue_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The real command line, in a process of its own."""

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
