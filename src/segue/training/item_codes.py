"""The codes of items, assigned before the model with codes is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from segue.data.sequences import Sequences
from segue.evaluation.settings import EvaluateSettings
from segue.folders import complete_file
from segue.models.encoders.sasrec import SASRecSettings
from segue.models.items import ItemSettings
from segue.models.items.code_assignment import assigned_codes, learned_codes
from segue.models.items.coded import CodeSettings
from segue.objective.losses.sampled import SampledSoftmaxSettings
from segue.objective.samplers.samplers import UniformSettings
from segue.objective.settings import ObjectiveSettings
from segue.training.loop import TrainingCallback, TrainingProgress
from segue.training.settings import TrainSettings
from segue.training.train import TrainingSetup, train_for

CODES, CODES_ALL = "codes.npy", "codes-all.npy"
"""The items' codes, assigned from the training part, and from every event if a model is trained on every event."""
FEATURES_A_PART, EPOCHS = 8, 6  # of the small model; with half of both, results on MovieLens-1M were 3 % worse
TOKENS, NEGATIVES = 2000, 1000
STEPS_AN_EPOCH, LEAST_TOKENS, LEAST_STEPS = 200, 200, 500  # a short log has smaller batches and more epochs


def ensure_item_codes(
    path: Path,
    items: ItemSettings,
    train: TrainSettings,
    sequences: Sequences,
    ends: np.ndarray,
    n_items: int,
    *,
    progress: TrainingCallback | None,
) -> np.ndarray | None:
    """The items' codes in the file `path`, assigned from users' events before `ends` [U] if it does not exist yet.

    They are saved because a resumed training, on whatever machine, needs the same codes. None for a model without
    codes. While codes are learned, the state of that training is in a file beside `path`.
    """
    if not isinstance(items, CodeSettings):
        return None
    if not path.exists():
        state = path.with_suffix(".safetensors")
        assigned = assign_item_codes(items, train, sequences, ends, n_items, state_file=state, progress=progress)
        with complete_file(path, option="--out") as staging, staging.open("wb") as file:
            np.save(file, assigned)
        state.unlink(missing_ok=True)
    codes: np.ndarray = np.load(path, allow_pickle=False)
    return codes


def assign_item_codes(
    items: CodeSettings,
    train: TrainSettings,
    sequences: Sequences,
    ends: np.ndarray,
    n_items: int,
    *,
    state_file: Path,
    progress: TrainingCallback | None,
) -> np.ndarray:
    """Codes [V + 1, parts] uint8 from users' events before `ends` [U].

    Learned codes are those of the item vectors of a small model, which is trained first, with its state in
    `state_file`.
    """
    if items.assignment != "learned":
        return assigned_codes(sequences, ends, n_items, parts=items.parts, values=items.values, seed=train.seed)

    def show(step: TrainingProgress) -> None:
        if progress is not None:
            progress(replace(step, of="codes", scores=None))

    events = int((ends - np.asarray(sequences.offsets)[:-1]).sum())
    tokens = min(TOKENS, max(LEAST_TOKENS, events // STEPS_AN_EPOCH))
    steps = max(1, events // tokens)
    epochs = max(EPOCHS, -(-LEAST_STEPS // steps))
    # A SASRec of one block with a short window and sampled negatives, which is fast on any catalogue.
    setup = TrainingSetup(
        model=SASRecSettings(width=items.parts * FEATURES_A_PART, depth=1, length=50, dropout=0.1, feed_forward=1),
        objective=ObjectiveSettings(loss=SampledSoftmaxSettings(), sampler=UniformSettings(negatives=NEGATIVES)),
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
        progress=show,
    )
    small, counts = train_for(setup, sequences, ends, n_items, epochs=epochs, state_file=state_file)
    vectors = small.item_vectors()
    return learned_codes(vectors, counts, parts=items.parts, values=items.values, seed=train.seed)
