"""A trained and measured model → a run folder: all files that an answer needs, without any user's data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial as bind
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import torch

from segue import folders
from segue.config.settings import settings_toml
from segue.counts.counts import Counts
from segue.data.dataset import Data
from segue.evaluation.evaluate import Evaluation
from segue.evaluation.report import REPORT
from segue.evaluation.settings import SeenRule
from segue.evaluation.split_log import SplitLog
from segue.index.build import build_index, index_facts, sample_queries
from segue.models.checkpoint import WEIGHTS, save_weights
from segue.models.items.code_assignment import shared_codes
from segue.models.items.coded import CodeTable
from segue.models.sequence import SequenceModel
from segue.recommend.recommender import COUNTS
from segue.runs.partial import PartialRun
from segue.runs.read import HISTORY, RANKS, SETTINGS
from segue.runs.resume import copy_training_files
from segue.training.state import TrainingRecord
from segue.training.warm_start import TRAINED_ITEMS


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModel:
    """The result of training."""

    partial: PartialRun
    """With the settings that it was trained with."""
    model: SequenceModel
    counts: np.ndarray
    """Events of each item that the model was trained on [V + 1]."""
    chosen: TrainingRecord
    """How the epoch was chosen."""
    item_counts: Counts | None
    """What is added to the model's scores; None for nothing."""
    fitted: dict[str, float] | None
    """What the counts were worth on validation; None if they were not wanted."""
    evaluation: Evaluation
    seen: SeenRule
    processes: int


def write_run(run: Path, data: Data, trained: TrainedModel) -> None:
    """Write the run folder; it appears complete or not at all."""
    partial, model, counts = trained.partial, trained.model, trained.counts
    settings = partial.settings
    with folders.complete_folder(run, overwrite="run" if partial.replaces else None) as staging:
        (staging / SETTINGS).write_text(settings_toml(settings))
        save_weights(model, staging / WEIGHTS)
        table = data.vocabulary.table.with_columns(pl.Series("count", counts[1:].astype(np.int64)))
        table.write_parquet(staging / "items.parquet")
        queries = bind(sample_queries, model, data.sequences, data.split.cases("valid", "last"))
        index = build_index(model, model.answerable(counts), settings.index, queries=queries)
        index.save(staging / "index.safetensors")
        if trained.item_counts is not None:
            (staging / COUNTS).write_bytes(trained.item_counts.to_bytes())
        folders.write_json(staging / REPORT, trained.evaluation.report)
        np.save(staging / RANKS, trained.evaluation.ranks)
        lines = [msgspec.json.encode(line) for line in trained.chosen.history]
        (staging / HISTORY).write_bytes(b"\n".join(lines) + b"\n")
        copy_training_files(partial.folder, staging)
        manifest = _manifest(partial, data, trained) | {"index": index_facts(index, queries)}
        if isinstance(model.items, CodeTable):
            items = np.flatnonzero(counts[1:]) + 1
            manifest["codes"] = {"shared": shared_codes(model.items.codes.numpy(), items)}
            if partial.record.all_events:
                np.save(staging / TRAINED_ITEMS, SplitLog.of(data).training_counts > 0)
        folders.write_manifest(staging, "run", manifest)


def _manifest(partial: PartialRun, data: Data, trained: TrainedModel) -> dict[str, Any]:
    chosen, record = trained.chosen, partial.record
    counts = {**(trained.item_counts.facts() if trained.item_counts else {}), **(trained.fitted or {})}
    return {
        "segue": version("segue"),
        "torch": str(torch.__version__),
        "recipe": record.recipe,
        "data": {
            "folder": str(data.folder.absolute()),
            "digest": data.digest,
            "counts": {name: data.manifest["counts"][name] for name in ("users", "items", "events")},
            "split": data.manifest["split"],
        },
        "from": record.origin,
        "items": len(data.vocabulary),
        "seen": trained.seen,
        "all": record.all_events,
        **({"counts": counts} if counts else {}),
        **({"derived": record.derived} if record.derived else {}),
        "training": {
            "epochs": chosen.epoch,
            "best_epoch": chosen.best_epoch,
            "best_score": chosen.best_score,
            "processes": trained.processes,
            **({"launchers": sorted(record.launchers)} if record.launchers else {}),
            "threads": partial.settings.train.threads or torch.get_num_threads(),
            "seconds": [round(seconds, 3) for seconds in chosen.seconds],
        },
    }
