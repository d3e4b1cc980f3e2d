"""Sparse (row-wise) updates: AdamW for the rows of a step, no change of others, and an average of every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cycle_logs import Log, recipe_of, same_weights, sequences_of, weights_of
from safetensors.torch import load_file
from torch import Tensor, nn

from segue.data.batch import Batch
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.items.tables import IdTable
from segue.models.sequence import SequenceModel
from segue.objective.objective import Objective
from segue.training import train
from segue.training.loop import TrainingProgress
from segue.training.optimiser import optimiser, set_learning_rate
from segue.training.settings import TrainSettings
from segue.training.state import TrainingState
from segue.training.train import STATE

N_ITEMS = 40
WIDTH = 8  # fills a vector register: the remainder of a tensor may be rounded differently
SAMPLED = {"loss": "sampled-softmax", "sampler": "uniform", "sampler__negatives": 6}


def state_of(settings: TrainSettings, *, by_rows: bool) -> tuple[IdTable, TrainingState]:
    """A table and its training state, with a further weight that has dense updates."""
    items = IdTable(N_ITEMS, WIDTH, tied=True)
    nn.init.normal_(items.into, generator=torch.Generator().manual_seed(3))
    items.clear_padding()
    items.sparse_gradients = by_rows
    model = nn.ModuleList([items, nn.Linear(WIDTH, 1, bias=False)])
    nn.init.ones_(list(model.parameters())[-1])
    return items, TrainingState(model, optimiser(model, settings), seed=1)


def loss_of(rows: Tensor, step: int) -> Tensor:
    """A loss whose gradient at a row depends on the row, its number of uses and the step."""
    return (rows * torch.linspace(-1, 2, WIDTH) + (step + 1) * rows**2).sum()


def take_step(items: IdTable, state: TrainingState, settings: TrainSettings, used: Tensor) -> None:
    state.adamw.zero_grad(set_to_none=True)
    rows = items.input(used)
    dense_weight = list(state.model.parameters())[-1]
    torch.autograd.backward(loss_of(rows, state.record.step) + (rows.detach() @ dense_weight.T).sum())
    set_learning_rate(state.adamw, settings, step=state.record.step, passed=0.0)
    state.step(settings)


def moments_of(items: IdTable, state: TrainingState) -> list[Tensor]:
    return [state.adamw.state[items.into][name] for name in ("exp_avg", "exp_avg_sq", "step")]


def sampled_rows(steps: int, count: int = 12) -> list[Tensor]:
    """The rows of each step: a few, some twice, padding among them."""
    rng = np.random.default_rng(4)
    return [torch.from_numpy(rng.integers(0, min(N_ITEMS // 2 + step, N_ITEMS) + 1, count)) for step in range(steps)]


def test_when_every_step_uses_every_row_it_is_dense_adamw_bit_for_bit() -> None:
    settings = TrainSettings(weight_decay=0.1, warmup=3, averaging=0.8, learning_rate=0.1)
    results = []
    for by_rows in (True, False):
        items, state = state_of(settings, by_rows=by_rows)
        for step in range(8):
            take_step(items, state, settings, torch.arange(N_ITEMS + 1).roll(step))
        state.settle()
        results.append([items.into.detach(), *state.average, *moments_of(items, state)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert results[0][-1] == 8 and (results[0][0][0] == 0).all()


def test_unused_rows_do_not_change() -> None:
    settings = TrainSettings(weight_decay=0.1, warmup=0, learning_rate=0.1)
    items, state = state_of(settings, by_rows=True)
    take_step(items, state, settings, torch.tensor([1, 2, 3]))
    before = [tensor.clone() for tensor in (items.into.detach(), *moments_of(items, state)[:2])]
    take_step(items, state, settings, torch.tensor([3, 0, 4, 3, 9]))
    for old, new in zip(before, (items.into.detach(), *moments_of(items, state)[:2]), strict=True):
        changed_rows = (old != new).all(1).nonzero()[:, 0].tolist()
        assert changed_rows == [3, 4, 9]
        assert (old != new).any(1).sum() == 3


def test_equal_to_sparse_adam() -> None:
    """torch's SparseAdam also keeps the moments of unused rows and counts every step; it has no weight decay."""
    settings = TrainSettings(learning_rate=0.05, warmup=0)
    items, state = state_of(settings, by_rows=True)
    table = nn.Parameter(items.into.detach().clone())
    sparse_adam = torch.optim.SparseAdam([table], lr=0.05, betas=(0.9, 0.98))
    for step, used in enumerate(sampled_rows(15)):
        take_step(items, state, settings, used)
        rows = nn.functional.embedding(used, table, padding_idx=0, sparse=True)
        table.grad = None
        torch.autograd.backward(loss_of(rows, step))
        sparse_adam.step()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(items.into, table, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("averaging", [0.0, 0.5, 0.97])
def test_the_deferred_average_equals_the_average_of_every_step(averaging: float) -> None:
    """Settled also in the middle, as at the end of an epoch; expected values in float64."""
    settings = TrainSettings(averaging=averaging, learning_rate=0.05, warmup=5)
    items, state = state_of(settings, by_rows=True)
    expected = items.into.detach().double()
    for step, used in enumerate(sampled_rows(60)):
        take_step(items, state, settings, used)
        decay = min(averaging, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * items.into.detach().double()
        if step in (20, 21, 59):
            state.settle()
            torch.testing.assert_close(state.average[0].double(), expected, rtol=1e-6, atol=1e-6)
    if averaging == 0:
        assert torch.equal(state.average[0], items.into)


def random_log() -> Log:
    """Forty users; a batch uses a part of the catalogue."""
    rng = np.random.default_rng(6)
    return Log.of(sequences_of(*(rng.integers(1, N_ITEMS + 1, 9).tolist() for _ in range(40))), N_ITEMS)


def gradients_of(model: SequenceModel, objective: Objective, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    examples = objective.examples(batch, np.random.default_rng(0))
    hidden = model.encode(tensors(examples.inputs))
    torch.autograd.backward(objective.loss(model, hidden, examples, torch.Generator().manual_seed(2)))
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("loss", [{}, SAMPLED], ids=["softmax", "sampled-softmax"])
def test_sparse_gradients_are_the_dense_ones(loss: dict[str, Any], tied: bool) -> None:
    """A loss over every item has a dense gradient, and so dense updates of the table."""
    recipe, log = recipe_of(model={"items__tied": tied, "dropout": 0.0}, objective=loss), random_log()
    model = build_model(recipe.model, N_ITEMS, generator=torch.Generator().manual_seed(1))
    objective = Objective(recipe.objective, log.counts)
    batch = next(log.windows(recipe).batches(50, np.random.default_rng(0)))
    dense = gradients_of(model, objective, batch)
    model.items.sparse_gradients = True
    sparse = gradients_of(model, objective, batch)
    sparse_names = {
        (True, True): {"items.into"},
        (False, True): {"items.into", "items.out"},
        (False, False): {"items.into"},
    }
    assert {name for name, gradient in sparse.items() if gradient.is_sparse} == sparse_names.get(
        (tied, bool(loss)), set()
    )
    assert sparse.keys() == dense.keys()
    for name, gradient in sparse.items():
        torch.testing.assert_close(gradient.to_dense() if gradient.is_sparse else gradient, dense[name])


def train_by_rows(recipe: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> dict[str, Tensor]:
    monkeypatch.setattr(train, "LEAST_ROWS", N_ITEMS)
    model, _ = random_log().train(recipe, folder, **more)
    return weights_of(model)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_sparse_training_resumes_to_the_same_numbers(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(epochs=3, tokens=30, objective=SAMPLED, model={"items__tied": tied})
    dense, _ = random_log().train(recipe, tmp_path / "dense")
    whole = train_by_rows(recipe, tmp_path / "whole", monkeypatch)
    assert not same_weights(whole, weights_of(dense)), "a large table has sparse updates"

    def stop(step: TrainingProgress) -> None:
        if step.epoch == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_by_rows(recipe, tmp_path / "stopped", monkeypatch, progress=stop)
    assert same_weights(train_by_rows(recipe, tmp_path / "stopped", monkeypatch), whole)
    assert all((table[0] == 0).all() for name, table in whole.items() if name.startswith("items."))


def test_the_average_of_every_step_is_validated_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, weights_by_step = recipe_of(epochs=2, tokens=30, objective=SAMPLED, averaging=0.9), []
    loss = Objective.loss

    def record_weights(self: Objective, model: SequenceModel, *rest: Any) -> Tensor:
        weights_by_step.append(model.items.into.detach().clone())
        return loss(self, model, *rest)

    monkeypatch.setattr(Objective, "loss", record_weights)
    result = train_by_rows(recipe, tmp_path, monkeypatch)
    saved = load_file(tmp_path / STATE)
    key = next(name for name, tensor in saved.items() if name.startswith("weight.") and len(tensor) == N_ITEMS + 1)
    average = weights_by_step[0]
    for step, weights in enumerate([*weights_by_step[1:], saved[key]]):
        decay = min(0.9, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * weights
    torch.testing.assert_close(saved[key.replace("weight", "average")], average, rtol=1e-5, atol=1e-6)
    best = saved[key.replace("weight", "best")]
    assert torch.equal(result["items.into"], best)
