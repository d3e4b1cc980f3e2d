"""The codes of items by which a model that is to be trained will know them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from segue.data.sequences import Sequences
from segue.evaluate.settings import EvaluateSettings
from segue.models.assign import assigned_codes, learned_codes
from segue.models.settings import ModelSettings
from segue.objective.settings import ObjectiveSettings
from segue.train.loop import Step
from segue.train.run import Recipe, train_for
from segue.train.settings import TrainSettings

FEATURES_A_PART = 8
FIRST = TrainSettings(epochs=6, tokens=2000, stride=1.0, learning_rate=2e-3, decay=1.0)


def item_codes(
    model: ModelSettings,
    train: TrainSettings,
    sequences: Sequences,
    ends: np.ndarray,
    n_items: int,
    *,
    state_file: Path,
    progress: Callable[[Step], None] | None,
) -> np.ndarray | None:
    """Codes [V + 1, parts] uint8 of what each user had before `ends` [U]; None where the settings ask for none.

    Where they are to be learned, a small model is trained first, whose state is in `state_file`, and the vectors that
    it has of items become codes.
    """
    if model.items != "codes" or model.codes != "learned":
        return assigned_codes(model, sequences, ends, n_items, seed=train.seed)
    small = Recipe(
        model=ModelSettings(
            builder="sasrec",
            width=model.code_parts * FEATURES_A_PART,
            depth=1,
            length=50,
            dropout=0.1,
            feed_forward=1,
        ),
        objective=ObjectiveSettings(loss="sampled-softmax", sampler="uniform", negatives=1000),
        train=msgspec.structs.replace(FIRST, seed=train.seed, threads=train.threads, device=train.device),
        evaluate=EvaluateSettings(),
    )

    def shown(step: Step) -> None:
        if progress is not None:
            progress(replace(step, of="codes", scores=None))  # nobody judges it

    known, counts = train_for(
        small, sequences, ends, n_items, epochs=FIRST.epochs, state_file=state_file, progress=shown
    )
    return learned_codes(model, known.item_vectors(), counts, seed=train.seed)
