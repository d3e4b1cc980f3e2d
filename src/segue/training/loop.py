"""The loop: batches → losses → weights, an epoch at a time, judged on validation, saved after each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from segue.data.batch import Batch, cut_by_budget, epoch_batches, gather, window_starts
from segue.data.sequences import Sequences
from segue.errors import TrainingError
from segue.layers.dropout import set_generator
from segue.layers.packed import tensors
from segue.models.sequence import SequenceModel
from segue.objective.batch_shard import BatchShard
from segue.objective.objective import Objective
from segue.process_group import SINGLE_PROCESS, ProcessGroup
from segue.training.distributed.gradients import sum_gradients
from segue.training.optimiser import optimiser, set_step_size
from segue.training.settings import TrainSettings
from segue.training.state import TrainingRecord, TrainingState

Validate = Callable[[SequenceModel], dict[str, float]]
"""What a model scores on validation; the first of the scores chooses the epoch."""
SCORE = "ndcg@10"


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Where training is, for whoever shows progress."""

    epoch: int
    epochs: int
    done: int
    """Events of this epoch learned from so far."""
    total: int
    loss: float
    """Mean over the epoch so far."""
    tokens_per_second: float
    seconds_left: float
    """If every epoch is used; an early stop comes sooner."""
    scores: dict[str, float] | None = None
    """Validation's, at the end of an epoch."""
    best_epoch: int = 0
    of: str = ""
    """What is trained, where it is not the model itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """What training looks at: rows starts[i] .. ends[i] of one user, at least two."""

    sequences: Sequences
    starts: np.ndarray
    ends: np.ndarray

    @property
    def events(self) -> int:
        """What an epoch goes through: every event but the first of each window, which follows nothing."""
        return int((self.ends - self.starts - 1).sum())

    def batches(self, tokens: int, rng: np.random.Generator) -> Iterator[Batch]:
        return epoch_batches(self.sequences, self.starts, self.ends, tokens=tokens, rng=rng)

    def in_order(self, tokens: int) -> Iterator[Batch]:
        """Every window once, as they come."""
        return _gathered(self.sequences, self.starts, self.ends, tokens)

    def histories(self, tokens: int) -> Iterator[Batch]:
        """All that each user did up to the end of its newest window."""
        users, place = np.unique(self.sequences.owners(self.starts), return_inverse=True)
        ends = np.zeros(len(users), dtype=np.int64)
        np.maximum.at(ends, place, self.ends)
        yield from _gathered(self.sequences, np.asarray(self.sequences.offsets)[users], ends, tokens)


def _gathered(sequences: Sequences, starts: np.ndarray, ends: np.ndarray, tokens: int) -> Iterator[Batch]:
    """In batches of about so many tokens."""
    for some in cut_by_budget(ends - starts, tokens):
        yield gather(sequences, starts[some], ends[some], users=sequences.owners(starts[some]))


def training_windows(sequences: Sequences, ends: np.ndarray, *, length: int, stride: int | None = None) -> Windows:
    """The newest `length` events of each user before `ends`, or with a `stride` also older windows of that length,
    each starting so many events before the next; what has fewer than two events has nothing to teach."""
    begins, ends = np.asarray(sequences.offsets)[:-1], np.asarray(ends)
    if stride is None:
        starts = np.maximum(begins, ends - length)
    else:
        owner, places = window_starts(ends - begins, length, stride)
        starts = begins[owner] + places
        ends = np.minimum(ends[owner], starts + length)
    useful = ends - starts >= 2
    if not useful.any():
        raise TrainingError(
            "No user has two events to learn from before the split; give a longer log or lower --min-user."
        )
    return Windows(sequences, starts[useful], ends[useful])


def fit(
    model: SequenceModel,
    objective: Objective,
    windows: Windows,
    *,
    settings: TrainSettings,
    epochs: int,
    validate: Validate | None,
    state_file: Path,
    progress: Callable[[TrainingProgress], None] | None = None,
    continued: bool = False,
    group: ProcessGroup = SINGLE_PROCESS,
) -> TrainingState:
    """Train up to `epochs` epochs, going on from `state_file` if it is there, and leave the best weights in `model`.

    With a validate, training stops after `patience` epochs without a better score and the best epoch is kept; without
    one, every epoch is used and the last is kept. `continued`: the model has learned before; it is judged as epoch 0,
    and an epoch must be better than that to be kept. `group`: the processes that share every batch; each ends with the
    same weights, and the first one writes the state, from which any number of them can go on.
    """
    state = TrainingState(model, optimiser(model, settings), seed=settings.seed, counted=objective.state)
    objective.meet(windows.in_order(settings.tokens), windows.histories(settings.tokens), windows.sequences.n_users)
    if group.on_first(state_file.exists):
        state.load(state_file)
    elif continued and validate:
        before = validate(model)
        state.record.history.append({"epoch": 0, **before})
        state.record.best_score = next(iter(before.values()))
    while state.record.epoch < epochs and not (validate and exhausted(state.record, settings.patience)):
        set_generator(model, _dropout(state, settings, group))
        _epoch(state, objective, windows, settings, epochs, progress, group)
        with averaged(state):
            scores = validate(model) if validate else {}
            score = next(iter(scores.values()), 0.0)
            if validate is None or score > state.record.best_score:
                state.record.best_epoch, state.record.best_score = state.record.epoch, score
                state.keep_best()
        state.record.history[-1].update(scores)
        group.on_first(lambda: state.save(state_file))
        if progress:
            progress(_step(state, epochs, windows.events, windows, scores=scores))
    with torch.no_grad():
        for parameter, best in zip(model.parameters(), state.best, strict=True):
            parameter.copy_(best)
    model.eval()
    return state


def exhausted(record: TrainingRecord, patience: int) -> bool:
    """Whether the score has not become better for `patience` epochs."""
    return record.epoch - record.best_epoch >= patience


def _dropout(state: TrainingState, settings: TrainSettings, group: ProcessGroup) -> torch.Generator:
    """What dropout draws from. One process has one generator for everything, whose state is saved. Of several, each
    needs one of its own beside the one that all share; it begins anew with every epoch, so that nothing is to be saved.
    """
    if group.size == 1:
        return state.generator
    seed = np.random.SeedSequence((settings.seed, state.record.epoch, group.rank)).generate_state(1)
    return torch.Generator().manual_seed(int(seed[0]))


def _epoch(
    state: TrainingState,
    objective: Objective,
    windows: Windows,
    settings: TrainSettings,
    epochs: int,
    progress: Callable[[TrainingProgress], None] | None,
    group: ProcessGroup,
) -> None:
    """Every user once, in one of the processes."""
    model, began, total, counted, asked, done = state.model.train(), time.perf_counter(), 0.0, 0.0, 0, 0
    assert isinstance(model, SequenceModel)
    device = next(model.parameters()).device
    for batch in windows.batches(settings.tokens, state.rng):
        passed = (state.record.epoch + done / windows.events) / settings.epochs
        done += len(batch.items) - len(batch.lengths)
        examples = objective.examples(batch, state.rng)
        if not len(examples.targets):
            continue  # nothing can be asked of these users
        part = BatchShard.of(examples, group)
        hidden = model.encode(tensors(part.own.inputs, device))
        loss = objective.loss(model, hidden, examples, state.generator, part)
        state.adamw.zero_grad(set_to_none=True)
        torch.autograd.backward(loss * objective.scale(examples))
        value = sum_gradients(list(model.parameters()), loss, group)
        if not math.isfinite(value):
            raise _diverged(f"The loss became {value}", state)
        set_step_size(state.adamw, settings, step=state.record.step, passed=passed)
        state.step(settings)
        weight = objective.weight(examples)
        total, counted, asked = total + value * weight, counted + weight, asked + len(examples.targets)
        if progress:
            progress(_step(state, epochs, done, windows, loss=total / counted, elapsed=time.perf_counter() - began))
    if not asked:
        raise TrainingError(
            f"No event before the split can be asked for: objective.task = {objective.settings.task!r} needs positive "
            "events (objective.positive) that are later than others of their user, within objective.days where it "
            "looks at days. A log without times needs objective.task = 'next-item'."
        )
    state.settle()
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        raise _diverged("The weights became infinite", state)
    state.record.epoch += 1
    state.record.seconds.append(time.perf_counter() - began)
    state.record.history.append({"epoch": state.record.epoch, "loss": total / counted, "positions": asked})


def _diverged(what: str, state: TrainingState) -> TrainingError:
    return TrainingError(
        f"{what} in epoch {state.record.epoch + 1}; the state before that epoch is kept. "
        "Go on with --resume --set train.learning_rate=… and a lower value."
    )


@contextmanager
def averaged(state: TrainingState) -> Iterator[None]:
    """Swap the averaged weights into the model, and back."""
    weights = list(state.model.parameters())
    with torch.no_grad():
        kept = [parameter.detach().clone() for parameter in weights]
        for parameter, average in zip(weights, state.average, strict=True):
            parameter.copy_(average)
        try:
            yield
        finally:
            for parameter, own in zip(weights, kept, strict=True):
                parameter.copy_(own)


def _step(
    state: TrainingState,
    epochs: int,
    done: int,
    windows: Windows,
    *,
    loss: float | None = None,
    elapsed: float | None = None,
    scores: dict[str, float] | None = None,
) -> TrainingProgress:
    """Inside an epoch `loss` and `elapsed` are given; at its end they are the last epoch's."""
    known = state.record
    inside = elapsed is not None
    seconds = elapsed if elapsed is not None else known.seconds[-1]
    speed = done / max(seconds, 1e-9)
    left = (epochs - known.epoch) * windows.events - (done if inside else 0)
    return TrainingProgress(
        epoch=known.epoch + inside,
        epochs=epochs,
        done=done,
        total=windows.events,
        loss=loss if loss is not None else float(known.history[-1]["loss"]),
        tokens_per_second=speed,
        seconds_left=left / speed,
        scores=scores,
        best_epoch=known.best_epoch,
    )
