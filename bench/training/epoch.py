"""Seconds of a training epoch: RecTools' models against segue's recipes with a like loss, alternately, in one run.

SASRec with the full softmax against `sasrec` and `esasrec`, with the sampled softmax against `sasrec-sampled`; HSTU
against `hstu`, and beside it a `sasrec` of the same width, depth, loss, negatives and batches. The same events,
positions, width, depth, heads, length, dropout, number type and threads on both sides. Batching is timed on both sides;
building of data sets, each process's first epoch, validation and saving are not. Each measurement is a process of its
own, and they alternate, so that a drift of the machine affects all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.tables import publish
from segue import api
from segue.errors import InputError
from segue.kinds import kind_of
from segue.objective.settings import ObjectiveSettings

ROOT = Path(__file__).parents[2]
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
SASREC_SHAPE = {"width": 64, "depth": 2, "heads": 1, "dropout": 0.2}
HSTU_SHAPE = {"width": 50, "depth": 2, "heads": 1, "dropout": 0.2}
HSTU_LOSS = (
    "objective.loss=sampled-softmax",
    "objective.sampler=uniform",
    "objective.sampler.negatives=1024",
    "objective.temperature=0.05",
    "model.similarity=cosine",
)


@dataclass(frozen=True, slots=True)
class Contest:
    """Another library's trainer, and ours compared with it: a name, the recipe and its changed settings."""

    peer: str
    options: tuple[str, ...]
    shape: dict[str, float]
    ours: dict[str, tuple[str, tuple[str, ...]]]


CONTESTS = {
    "softmax": Contest(
        "rectools-softmax",
        ("--loss", "softmax"),
        SASREC_SHAPE,
        {
            "sasrec": ("sasrec", ("model.feed_forward=1",)),
            "esasrec": ("esasrec", ("model.feed_forward=4",)),  # as the papers have it
        },
    ),
    "sampled-softmax": Contest(
        "rectools-sampled",
        ("--loss", "sampled_softmax", "--negatives", "256"),
        SASREC_SHAPE,
        {"sasrec-sampled": ("sasrec-sampled", ("model.feed_forward=1",))},
    ),
    "hstu": Contest(
        "rectools-hstu",
        ("--model", "hstu", "--loss", "sampled_softmax", "--negatives", "128"),
        HSTU_SHAPE,
        {
            "hstu": ("hstu", HSTU_LOSS),
            "sasrec-like-hstu": ("sasrec", ("model.feed_forward=1", "model.positions=oldest", *HSTU_LOSS)),
        },
    ),
}
OURS = {name: contest for contest in CONTESTS.values() for name in contest.ours}
TOKENS = 13_700  # what RecTools' 128 users have on average at this length, so that both sides make as many steps
LENGTH = 200
NOTES = (
    "RecTools also drops attention weights (its MultiheadAttention takes the same rate), segue does not: that path has "
    "no fused kernel on a CPU.",
    "RecTools: 128 users a batch, padded to the length. segue: batches of as many packed tokens as 128 users have on "
    "average.",
    "sasrec has a feed-forward part as wide as the model, like RecTools; esasrec's is gated and four times as wide.",
    "HSTU: both know the times; RecTools draws 128 negatives for each position, segue 1,024 once a batch.",
    "Sampled softmax: RecTools draws 256 negatives for each position, padding included; sasrec-sampled draws the "
    "recipe's number once a batch and shares them, so an answer is set against more. Their losses cannot be compared.",
)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench epoch", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with events.tsv.gz")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2, help="of each run; the first is not counted")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--contest", nargs="+", choices=list(CONTESTS), default=list(CONTESTS), help="which to measure")
    parser.add_argument("--child", choices=list(OURS), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.epochs < 2 or arguments.runs < 1:
        parser.error("--epochs must be at least 2 (the first is not counted) and --runs at least 1")
    if arguments.child:
        print(json.dumps(train_ours(arguments.child, arguments.data, vars(arguments))))
        return
    if not PEER_PYTHON.exists():
        raise InputError("The library to compare with is not installed; start this with `make bench SUBJECT=epoch`.")
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as folder:
        results = measure(prepared(arguments.data, Path(folder)), arguments)
    show(results)


def prepared(data: Path, folder: Path) -> Path:
    """A data folder, and beside it the training part for the other side: every event but a user's last two."""
    data_folder = api.prepare(data / "events.tsv.gz", out=folder / "data")
    offsets, ends = np.asarray(data_folder.sequences.offsets), np.asarray(data_folder.split.train_end)
    lengths = ends - offsets[:-1]
    rows = np.arange(lengths.sum()) + np.repeat(offsets[:-1] - (np.cumsum(lengths) - lengths), lengths)
    users = np.repeat(np.arange(len(lengths)), lengths)
    items, times = (
        np.asarray(array)[rows].astype(np.int64) for array in (data_folder.sequences.items, data_folder.sequences.times)
    )
    np.savez(folder / "train.npz", users=users, items=items, times=times)
    return folder


def runners(contests: list[str]) -> list[str]:
    """The other side of each contest, and after it ours."""
    return [name for contest in contests for name in (CONTESTS[contest].peer, *CONTESTS[contest].ours)]


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The results of `runs` measurements of each runner, alternately."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in runners(arguments.contest)}
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "MKL_NUM_THREADS": str(arguments.threads)}
    for run in range(arguments.runs):
        for name in results:
            command = _command(name, folder, arguments)
            process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
            if process.returncode:
                raise InputError(f"{name} failed: {(process.stderr.strip().splitlines() or ['no reason given'])[-1]}")
            result = json.loads(process.stdout.strip().splitlines()[-1])
            results[name].append(result)
            text = ", ".join(f"{seconds:.1f}" for seconds in result["seconds"])
            print(f"run {run + 1} of {arguments.runs}  {name:16} seconds an epoch: {text}", file=sys.stderr, flush=True)
    return results


def _command(name: str, folder: Path, arguments: argparse.Namespace) -> list[str]:
    numbers = [
        "--epochs",
        str(arguments.epochs),
        "--threads",
        str(arguments.threads),
        "--length",
        str(arguments.length),
    ]
    if name in OURS:
        return [sys.executable, "-m", "bench.training.epoch", "--data", str(folder / "data"), "--child", name, *numbers]
    script = str(ROOT / "bench" / "peers" / "rectools_epoch.py")
    (contest,) = (contest for contest in CONTESTS.values() if contest.peer == name)
    shape = [part for key, value in contest.shape.items() for part in (f"--{key}", str(value))]
    return [str(PEER_PYTHON), script, str(folder / "train.npz"), *contest.options, *shape, *numbers]


def train_ours(name: str, data: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """Train with segue's own loop, without validation, and print the same figures as the other side."""
    import torch

    from segue.config.recipes import read_recipe
    from segue.config.settings import make_settings
    from segue.data.dataset import Data
    from segue.evaluation.split_log import SplitLog
    from segue.models.build import build_model
    from segue.objective.objective import Objective
    from segue.training.loop import fit
    from segue.training.windows import training_windows

    torch.set_num_threads(arguments["threads"])
    recipe, changes = OURS[name].ours[name]
    shape = {**OURS[name].shape, "length": arguments["length"]}
    shaped = [f"model.{key}={value}" for key, value in shape.items()]
    settings = make_settings(read_recipe(recipe), [*shaped, *changes, f"train.tokens={TOKENS}"])
    log = Data.open(data)
    counts = SplitLog.of(log).training_counts
    objective = Objective(settings.objective, counts, log.kinds, length=arguments["length"])
    windows = training_windows(log.sequences, log.split.train_end, length=arguments["length"] + objective.extra)
    model = build_model(settings.model, len(log.vocabulary), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as folder:
        state = fit(
            model,
            objective,
            windows,
            settings=settings.train,
            epochs=arguments["epochs"],
            validate=None,
            state_file=Path(folder) / "state.safetensors",
        )
    return {
        "trainer": f"segue {name}",
        "loss": _loss_text(settings.objective),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "threads": torch.get_num_threads(),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "positions": state.record.history[-1]["positions"],
        "items": len(log.vocabulary),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": settings.train.tokens,
        "seconds": state.record.seconds,
        "losses": [epoch["loss"] for epoch in state.record.history],
    }


def _loss_text(objective: ObjectiveSettings) -> str:
    return f"sampled, {objective.negatives:,} shared" if objective.negatives else kind_of(objective.loss)


def show(results: dict[str, list[dict[str, Any]]]) -> None:
    """The table; sides with different numbers of positions are refused, as their seconds are not comparable."""
    positions = {run["positions"] for runs in results.values() for run in runs}
    if len(positions) != 1:
        raise InputError(f"The sides processed different numbers of positions: {sorted(positions)}.")
    middle = {name: statistics.median(s for run in runs for s in run["seconds"][1:]) for name, runs in results.items()}
    rows = [
        {
            "trainer": runs[0]["trainer"],
            "loss": runs[0]["loss"],
            "s/epoch": middle[name],
            "times faster": middle[OURS[name].peer] / middle[name] if name in OURS else 1.0,
            "positions": runs[0]["positions"],
            "final loss": statistics.median(run["losses"][-1] for run in runs),
            "parameters": runs[0]["parameters"],
            "threads": runs[0]["threads"],
        }
        for name, runs in results.items()
    ]
    versions = [
        f"{runs[0]['trainer']}: {runs[0]['dtype']}, "
        + ", ".join(f"{library} {version}" for library, version in runs[0]["versions"].items())
        for runs in results.values()
    ]
    title = f"A training epoch, median of {len(next(iter(results.values())))} alternated runs"
    publish("epoch", title=title, rows=rows, notes=[*versions, *NOTES], body=results)


if __name__ == "__main__":
    main(sys.argv[1:])
