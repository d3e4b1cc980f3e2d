"""The weights that training begins with where it goes on from another run, which need not stay where it is."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from segue.data.vocabulary import Vocabulary
from segue.errors import InputError
from segue.models.build import build_model
from segue.models.carry import carry_over
from segue.models.checkpoint import save_weights
from segue.models.codes import CodeTable
from segue.models.facts import Facts
from segue.models.sequence import SequenceModel
from segue.train.codes import CODES
from segue.train.run import CHOOSING, Recipe
from segue.train.state import read_best

START, START_ALL = "start.safetensors", "start-all.safetensors"
"""What choosing the epochs begins with; and training on every event, where the two differ."""


def write_start(
    old: SequenceModel,
    folder: Path,
    *,
    everything: bool,
    recipe: Recipe,
    facts: Facts,
    before: Vocabulary,
    now: Vocabulary,
    out: Path,
) -> None:
    """Carry the weights of a run over to a catalogue, into files in `out`.

    A run trained on every event (`everything`) has seen what the next one is judged by: there choosing the epochs goes
    on from the weights that chose the run's own, which are in its `folder`.
    """
    if not before.table["id"].is_in(now.table["id"].to_list()).any():
        raise InputError(
            f"None of the {len(before)} items of {folder} is in the data, so nothing can be carried over: give data of "
            "the same catalogue, or leave --from out."
        )
    chosen = old
    if everything:
        chosen = copy.deepcopy(old)
        read_best(chosen, folder / CHOOSING)
        if isinstance(chosen.items, CodeTable):
            chosen.items.codes.copy_(_codes_that_chose(folder))
    for model, name in ((chosen, START), (old, START_ALL))[: 1 + everything]:
        first = torch.Generator().manual_seed(recipe.train.seed)  # rows that are new begin as a new model's do
        new = build_model(recipe.model, len(now), generator=first, facts=facts, encoder=recipe.encoder)
        carry_over(model, new, before=before, now=now, category=recipe.model.category)
        save_weights(new, out / name)


def _codes_that_chose(folder: Path) -> Tensor:
    """The codes of a run trained on every event, before that: it began with those of another run, or found its own."""
    if (folder / START).exists():
        return load_file(folder / START)["items.codes"]
    return torch.from_numpy(np.load(folder / CODES, allow_pickle=False))
