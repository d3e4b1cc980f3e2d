"""The training loop: batches → losses → weights. After each epoch, the model is validated and the state saved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from segue.errors import TrainingError
from segue.kinds import kind_of
from segue.layers.dropout import set_generator
from segue.layers.packed import tensors
from segue.models.sequence import SequenceModel
from segue.objective.batch_shard import BatchShard
from segue.objective.objective import Objective
from segue.objective.tasks.examples import Examples
from segue.process_group import SINGLE_PROCESS, ProcessGroup
from segue.training.distributed.gradients import sum_gradients
from segue.training.optimiser import optimiser, set_learning_rate
from segue.training.settings import TrainSettings
from segue.training.state import TrainingRecord, TrainingState, read_training_record
from segue.training.windows import Windows

Validate = Callable[[SequenceModel], dict[str, float]]
"""A model → its validation scores; the first score chooses the epoch."""
SCORE = "ndcg@10"
LATE = 0.02  # lead of the clock over the epochs, as a share of the training, from which it sets the step size


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The progress of training, after each step and each epoch."""

    epoch: int
    epochs: int
    done: int
    """Events of this epoch so far."""
    total: int
    loss: float
    """Mean over the epoch so far."""
    tokens_per_second: float = 0.0
    seconds_left: float = 0.0
    """If training does not stop early."""
    scores: dict[str, float] | None = None
    """Of validation, at the end of an epoch."""
    best_epoch: int = 0
    of: str = ""
    """The name of what is trained, if it is not the model itself."""
    plan: tuple[str, ...] = ()
    """Before training: the plan, in lines."""
    measured: str = ""
    """After training: the model or baseline that is measured, on `done` of `total` test cases."""


TrainingCallback = Callable[[TrainingProgress], None]


def fit(
    model: SequenceModel,
    objective: Objective,
    windows: Windows,
    *,
    settings: TrainSettings,
    epochs: int,
    validate: Validate | None,
    state_file: Path | None,
    progress: TrainingCallback | None = None,
    warm: bool = False,
    group: ProcessGroup = SINGLE_PROCESS,
) -> TrainingState:
    """Train up to `epochs` epochs, resuming from `state_file` if it exists, and leave the best weights in `model`.
    Without a `state_file` nothing is saved.

    With `validate`, training stops after `patience` epochs without a better score, and the best epoch is kept. Without
    it, the last epoch is kept. `warm`: the model is trained already; it is validated as epoch 0, and an epoch must be
    better to be kept. `group`: the processes that share every batch. All end with the same weights, process 0 writes
    the state, and any number of processes can resume from it.
    """
    state = TrainingState(model, optimiser(model, settings), seed=settings.seed, counters=objective.state)
    objective.prepare(windows.in_order(settings.tokens), windows.histories(settings.tokens), windows.sequences.n_users)
    record = state.record
    if state_file is not None and group.on_first(lambda: _can_resume(state_file, epochs)):
        record = state.load(state_file)
    elif warm and validate:
        before = validate(model)
        record.history.append({"epoch": 0, **before})
        record.best_score = next(iter(before.values()))
    record.limit, record.cut = settings.seconds, False
    while record.epoch < epochs and not (validate and exhausted(record, settings.patience)):
        if record.epoch and group.on_first(lambda: out_of_time(record)):
            record.cut = True
            break
        began, elapsed = time.perf_counter(), record.elapsed
        set_generator(model, _dropout_generator(state, settings, group))
        stopped = _epoch(state, objective, windows, settings, epochs, progress, group)
        with averaged(state):
            scores = validate(model) if validate else {}
            score = next(iter(scores.values()), 0.0)
            if validate is None or score > record.best_score:
                record.best_epoch, record.best_score = record.epoch, score
                state.keep_best()
        record.history[-1].update(scores)
        record.elapsed = elapsed + time.perf_counter() - began
        if state_file is not None:
            group.on_first(partial(state.save, state_file))
        if stopped is not None:
            raise stopped
        if progress:
            seconds, loss = record.seconds[-1], float(record.history[-1]["loss"])
            total = windows.epoch_events(settings.epoch_events)
            progress(_progress(record, epochs, total, total, seconds, loss, scores))
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), state.best)
    model.eval()
    return state


def _can_resume(state_file: Path, epochs: int) -> bool:
    """Whether training resumes from the file. Without another epoch, every state will do."""
    return state_file.exists() and not (epochs and read_training_record(state_file).interrupted)


def exhausted(record: TrainingRecord, patience: int) -> bool:
    """Whether the score has not improved for `patience` epochs."""
    return record.epoch - record.best_epoch >= patience


def out_of_time(record: TrainingRecord) -> bool:
    """Whether less than half an epoch's time is left."""
    return record.limit is not None and record.elapsed * (1 + 0.5 / max(1, record.epoch)) > record.limit


def _dropout_generator(state: TrainingState, settings: TrainSettings, group: ProcessGroup) -> torch.Generator:
    """The generator of dropout. A single process uses the shared one, whose state is saved. Each of several processes
    has its own, which need not be saved: it is seeded at the start of every epoch."""
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
    progress: TrainingCallback | None,
    group: ProcessGroup,
) -> KeyboardInterrupt | None:
    """Train on the windows of an epoch, or on as many as the time allows. Return the Ctrl-C that ended the first epoch
    early, if any: the model is validated and saved then, so that there is one."""
    record, began = state.record, time.perf_counter()
    total, weights, targets, done = 0.0, 0.0, 0, 0
    events, stopped = windows.epoch_events(settings.epoch_events), None
    state.model.train()
    try:
        for batch in windows.batches(settings.tokens, state.rng, events=settings.epoch_events):
            clock = 0.0 if record.limit is None else group.on_first(partial(_share_of_time, record, began))
            if clock >= 1 and targets:
                record.cut = True
                break
            passed = (record.epoch + done / events) / settings.epochs
            # A training that time does not cut does not depend on the clock.
            set_learning_rate(state.adamw, settings, step=record.step, passed=max(passed, clock - LATE))
            done += len(batch.items) - len(batch.lengths)
            examples = objective.examples(batch, state.rng)
            if not len(examples.targets):
                continue
            value, weight = _step(state, objective, examples, settings, group), objective.weight(examples)
            total, weights, targets = total + value * weight, weights + weight, targets + len(examples.targets)
            if progress:
                seconds = time.perf_counter() - began
                progress(_progress(record, epochs, done, events, seconds, total / weights))
    except KeyboardInterrupt as interrupt:
        if record.epoch or not targets or group.size > 1:
            raise
        stopped, record.interrupted = interrupt, True
    if not targets:
        raise TrainingError(
            f"No event before the split can be a target: objective.task = {kind_of(objective.settings.task)!r} needs "
            "positive events (objective.task.positive) later than other events of their user, and within "
            "objective.task.days if it has that key. A log without times needs objective.task = 'next-item'."
        )
    state.settle()
    if not all(bool(weight.isfinite().all()) for weight in state.model.parameters()):
        raise _diverged("The weights became infinite", record)
    record.epoch += 1
    record.seconds.append(time.perf_counter() - began)
    record.history.append({"epoch": record.epoch, "loss": total / weights, "positions": targets})
    return stopped


def _step(
    state: TrainingState, objective: Objective, examples: Examples, settings: TrainSettings, group: ProcessGroup
) -> float:
    """Update the weights by the examples of a batch; return the loss."""
    model, shard = state.model, BatchShard.of(examples, group)
    assert isinstance(model, SequenceModel)
    hidden = model.encode(tensors(shard.own.inputs, next(model.parameters()).device))
    loss = objective.loss(model, hidden, examples, state.generator, shard)
    state.adamw.zero_grad(set_to_none=True)
    torch.autograd.backward(loss * objective.scale(examples))
    value = sum_gradients(list(model.parameters()), loss, group)
    if not math.isfinite(value):
        raise _diverged(f"The loss became {value}", state.record)
    state.step(settings)
    return value


def _share_of_time(record: TrainingRecord, began: float) -> float:
    """The share of the limit that has passed, in an epoch that began at this time of `perf_counter`."""
    assert record.limit is not None
    return (record.elapsed + time.perf_counter() - began) / record.limit


def _diverged(what: str, record: TrainingRecord) -> TrainingError:
    return TrainingError(
        f"{what} in epoch {record.epoch + 1}; the state before that epoch is kept. "
        "Continue with --resume --set train.learning_rate=… and a lower value."
    )


@contextmanager
def averaged(state: TrainingState) -> Iterator[None]:
    """Give the model the averaged weights; restore its own afterwards."""
    weights = tuple(state.model.parameters())
    own = [parameter.detach().clone() for parameter in weights]
    with torch.no_grad():
        torch._foreach_copy_(weights, state.average)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, own)


def _progress(
    record: TrainingRecord,
    epochs: int,
    done: int,
    total: int,
    seconds: float,
    loss: float,
    scores: dict[str, float] | None = None,
) -> TrainingProgress:
    """The progress within the next epoch or, with validation's `scores`, at the end of the last one of the record."""
    inside, speed = scores is None, done / max(seconds, 1e-9)
    left = ((epochs - record.epoch) * total - (done if inside else 0)) / speed
    if record.limit is not None:
        left = min(left, record.limit - record.elapsed - (seconds if inside else 0.0))
    return TrainingProgress(
        epoch=record.epoch + inside,
        epochs=epochs,
        done=done,
        total=total,
        loss=loss,
        tokens_per_second=speed,
        seconds_left=max(0.0, left),
        scores=scores,
        best_epoch=record.best_epoch,
    )
