"""Warm start: the initial weights of a training, transferred from another run and saved with the new one."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from segue.data.vocabulary import Vocabulary
from segue.errors import InputError
from segue.folders import write_whole
from segue.models.build import build_model
from segue.models.checkpoint import save_weights
from segue.models.items.coded import CodeTable
from segue.models.items.tables import CategorySettings, DataFacts
from segue.models.sequence import SequenceModel
from segue.models.warm_start import ITEM_CODES, merge_codes, transfer_weights
from segue.training.item_codes import CODES
from segue.training.state import read_best
from segue.training.train import STATE, TrainingSetup

TRAINED_ITEMS = "trained.npy"
"""In a run trained on every event: the items of its training part [V + 1] bool."""
WARM_START, WARM_START_ALL = "warm-start.safetensors", "warm-start-all.safetensors"
"""The initial weights of the training that chooses the epoch, and of training on every event if these differ."""


def write_warm_start(
    old: SequenceModel,
    folder: Path,
    *,
    all_events: bool,
    setup: TrainingSetup,
    facts: DataFacts,
    before: Vocabulary,
    now: Vocabulary,
    trained: np.ndarray,
    out: Path,
) -> None:
    """Transfer the weights of the run in `folder` to another catalogue and write them to files in `out`.

    `trained` [V + 1]: the items of the new training part. A run trained on every event (`all_events`) has seen the
    events that the next one is validated on. So choosing the epoch starts from the weights by which the run's own epoch
    was chosen.
    """
    if not before.table["id"].is_in(now.table["id"].to_list()).any():
        raise InputError(
            f"None of the {len(before)} items of {folder} is in the data, so no weights can be transferred: give data "
            "of the same catalogue, or leave --from out."
        )
    seen = np.concatenate(([False], before.table["count"].to_numpy() > 0))
    transfers = [(old, WARM_START, seen)]
    if all_events:
        chosen = copy.deepcopy(old)
        read_best(chosen, folder / STATE)
        if isinstance(chosen.items, CodeTable):
            chosen.items.codes.copy_(_codes_of_choice(folder))
        seen_by_chosen = np.load(folder / TRAINED_ITEMS) if (folder / TRAINED_ITEMS).exists() else np.zeros_like(seen)
        transfers = [(chosen, WARM_START, seen_by_chosen), (old, WARM_START_ALL, seen)]
    items = setup.model.items
    for model, name, items_seen in transfers:
        generator = torch.Generator().manual_seed(setup.train.seed)  # new rows are initialised as in a new model
        new = build_model(setup.model, len(now), generator=generator, facts=facts, encoder=setup.encoder)
        transfer_weights(
            model,
            new,
            before=before,
            now=now,
            # Trained items have codes, and so do those of earlier runs that are not trained any more.
            had_codes=items_seen | _any_code(model.items.codes) if isinstance(model.items, CodeTable) else None,
            has_codes=trained,
            category=items.column if isinstance(items, CategorySettings) else "",
        )
        save_weights(new, out / name)


def fill_codes(folder: Path, codes: np.ndarray, *, trained: np.ndarray, coded: np.ndarray) -> None:
    """Give codes to items of the warm start that only have held-out events, before training on every event.

    `codes` [V + 1, parts]: those assigned from all events; they are meaningful for the items `coded` [V + 1].
    `trained` [V + 1]: the items of the training part.
    """
    path = folder / WARM_START_ALL
    weights = load_file(path if path.exists() else folder / WARM_START)
    known = trained | _any_code(weights[ITEM_CODES])
    weights[ITEM_CODES] = merge_codes(weights[ITEM_CODES], known, new=torch.from_numpy(codes), coded=coded)
    write_whole(path, save(weights))


def _any_code(codes: Tensor) -> np.ndarray:
    """Items with codes [V + 1]; the codes of an item without any are zeros."""
    return (codes != 0).any(1).numpy()


def _codes_of_choice(folder: Path) -> Tensor:
    """The codes with which the epoch of a run was chosen: of its warm start, or its own."""
    if (folder / WARM_START).exists():
        return load_file(folder / WARM_START)[ITEM_CODES]
    return torch.from_numpy(np.load(folder / CODES, allow_pickle=False))
