"""The weights that training begins with where it goes on from another run, which need not stay where it is."""

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
from segue.models.facts import Facts
from segue.models.items.coded import CodeTable
from segue.models.sequence import SequenceModel
from segue.models.warm_start import ITEM_CODES, carry_over, filled_codes
from segue.training.item_codes import CODES
from segue.training.run import CHOOSING, TrainingSetup
from segue.training.state import read_best

TRAINED = "trained.npy"
"""Of a run trained on every event, the items of the training part [V + 1] bool, which alone have codes that chose."""
START, START_ALL = "start.safetensors", "start-all.safetensors"
"""What choosing the epochs begins with; and training on every event, where the two differ."""


def write_start(
    old: SequenceModel,
    folder: Path,
    *,
    everything: bool,
    recipe: TrainingSetup,
    facts: Facts,
    before: Vocabulary,
    now: Vocabulary,
    trained: np.ndarray,
    out: Path,
) -> None:
    """Carry the weights of a run over to a catalogue, of which training will meet the items `trained` [V + 1], into
    files in `out`.

    A run trained on every event (`everything`) has seen what the next one is judged by: there choosing the epochs goes
    on from the weights that chose the run's own, which are in its `folder`.
    """
    if not before.table["id"].is_in(now.table["id"].to_list()).any():
        raise InputError(
            f"None of the {len(before)} items of {folder} is in the data, so nothing can be carried over: give data of "
            "the same catalogue, or leave --from out."
        )
    met = np.concatenate(([False], before.table["count"].to_numpy() > 0))
    starts = [(old, START, met)]
    if everything:
        chosen = copy.deepcopy(old)
        read_best(chosen, folder / CHOOSING)
        if isinstance(chosen.items, CodeTable):
            chosen.items.codes.copy_(_codes_that_chose(folder))
        trained_then = np.load(folder / TRAINED) if (folder / TRAINED).exists() else np.zeros_like(met)
        starts = [(chosen, START, trained_then), (old, START_ALL, met)]
    for model, name, then in starts:
        first = torch.Generator().manual_seed(recipe.train.seed)  # rows that are new begin as a new model's do
        new = build_model(recipe.model, len(now), generator=first, facts=facts, encoder=recipe.encoder)
        carry_over(
            model,
            new,
            before=before,
            now=now,
            had_codes=_coded(model, then),
            has_codes=trained,
            category=recipe.model.category,
        )
        save_weights(new, out / name)


def fill_codes(folder: Path, found: np.ndarray, *, trained: np.ndarray, told: np.ndarray) -> None:
    """Before training on every event, give codes to those items of the start in `folder` that only held-out events
    have: of the ones `found` [V + 1, parts] in all events, which tell something of the items `told` [V + 1].
    `trained` [V + 1]: items of the training part."""
    path = folder / START_ALL
    weights = load_file(path if path.exists() else folder / START)
    known = trained | _any_code(weights[ITEM_CODES])
    weights[ITEM_CODES] = filled_codes(weights[ITEM_CODES], known, found=torch.from_numpy(found), told=told)
    write_whole(path, save(weights))


def _coded(model: SequenceModel, trained: np.ndarray) -> np.ndarray | None:
    """Items that have codes [V + 1]: those of some runs before are not trained any more and have theirs still."""
    return trained | _any_code(model.items.codes) if isinstance(model.items, CodeTable) else None


def _any_code(codes: Tensor) -> np.ndarray:
    """Items whose codes are not all zeros, as those of items without codes are [V + 1]."""
    return (codes != 0).any(1).numpy()


def _codes_that_chose(folder: Path) -> Tensor:
    """The codes of a run trained on every event, before that: it began with those of another run, or found its own."""
    if (folder / START).exists():
        return load_file(folder / START)[ITEM_CODES]
    return torch.from_numpy(np.load(folder / CODES, allow_pickle=False))
