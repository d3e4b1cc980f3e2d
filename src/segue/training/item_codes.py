"""The codes of items by which a model that is to be trained will know them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from segue.data.sequences import Sequences
from segue.evaluation.settings import EvaluateSettings
from segue.folders import complete_file
from segue.models.items.code_assignment import assigned_codes, learned_codes
from segue.models.settings import ModelSettings
from segue.objective.settings import ObjectiveSettings
from segue.training.loop import TrainingProgress
from segue.training.run import TrainingSetup, train_for
from segue.training.settings import TrainSettings

CODES, CODES_ALL = "codes.npy", "codes-all.npy"
"""The items' codes, found once, in the training part; and in every event, where a model is trained on them."""
FEATURES_A_PART, EPOCHS = 8, 6  # of the small model: with half of both, MovieLens-1M was learned 3 % worse
TOKENS, NEGATIVES = 2000, 1000
STEPS_AN_EPOCH, LEAST_TOKENS, LEAST_STEPS = 200, 200, 500  # a short log takes smaller steps, and more epochs


def kept_codes(
    path: Path,
    model: ModelSettings,
    train: TrainSettings,
    sequences: Sequences,
    ends: np.ndarray,
    n_items: int,
    *,
    progress: Callable[[TrainingProgress], None] | None,
) -> np.ndarray | None:
    """The items' codes by what users had before `ends` [U], out of the file `path`, or found and kept there: where
    training is taken up, on whatever machine, they must be the same. None where the settings ask for none.

    While they are learned, the state of that is in a file beside it.
    """
    if model.items != "codes":
        return None
    if not path.exists():
        state = path.with_suffix(".safetensors")
        found = item_codes(model, train, sequences, ends, n_items, state_file=state, progress=progress)
        with complete_file(path, option="--out") as staging, staging.open("wb") as file:
            np.save(file, found)
        state.unlink(missing_ok=True)
    codes: np.ndarray = np.load(path, allow_pickle=False)
    return codes


def item_codes(
    model: ModelSettings,
    train: TrainSettings,
    sequences: Sequences,
    ends: np.ndarray,
    n_items: int,
    *,
    state_file: Path,
    progress: Callable[[TrainingProgress], None] | None,
) -> np.ndarray:
    """Codes [V + 1, parts] uint8 of what each user had before `ends` [U].

    Where they are to be learned, a small model is trained first, whose state is in `state_file`, and the vectors that
    it has of items become codes.
    """
    if model.codes != "learned":
        return assigned_codes(model, sequences, ends, n_items, seed=train.seed)

    def shown(step: TrainingProgress) -> None:
        if progress is not None:
            progress(replace(step, of="codes", scores=None))  # nobody judges it

    small = _small(model.code_parts, int((ends - np.asarray(sequences.offsets)[:-1]).sum()), train)
    epochs = small.train.epochs
    known, counts = train_for(small, sequences, ends, n_items, epochs=epochs, state_file=state_file, progress=shown)
    return learned_codes(model, known.item_vectors(), counts, seed=train.seed)


def _small(parts: int, events: int, train: TrainSettings) -> TrainingSetup:
    """A SASRec of one block that looks at little and samples its negatives, so that any catalogue is soon learned."""
    tokens = min(TOKENS, max(LEAST_TOKENS, events // STEPS_AN_EPOCH))
    steps = max(1, events // tokens)
    epochs = max(EPOCHS, -(-LEAST_STEPS // steps))
    return TrainingSetup(
        model=ModelSettings(
            builder="sasrec",
            width=parts * FEATURES_A_PART,
            depth=1,
            length=50,
            dropout=0.1,
            feed_forward=1,
        ),
        objective=ObjectiveSettings(loss="sampled-softmax", sampler="uniform", negatives=NEGATIVES),
        train=TrainSettings(
            epochs=epochs,
            tokens=tokens,
            stride=1.0,
            learning_rate=2e-3,
            decay=1.0,
            seed=train.seed,
            threads=train.threads,
            device=train.device,
        ),
        evaluate=EvaluateSettings(),
    )
