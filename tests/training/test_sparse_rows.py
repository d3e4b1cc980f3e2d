"""Learning by rows: the rows a step used are AdamW's, the others stand still, and the average knows both."""

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
WIDTH = 8  # fills a vector register: what is left over at the end of a tensor may be rounded another way
SAMPLED = {"loss": "sampled-softmax", "sampler": "uniform", "sampler__negatives": 6}


def state_of(settings: TrainSettings, *, by_rows: bool) -> tuple[IdTable, TrainingState]:
    """Training of a table, with a weight beside it that is always learned whole."""
    items = IdTable(N_ITEMS, WIDTH, tied=True)
    nn.init.normal_(items.into, generator=torch.Generator().manual_seed(3))
    items.clear_padding()
    items.sparse_gradients = by_rows
    model = nn.ModuleList([items, nn.Linear(WIDTH, 1, bias=False)])
    nn.init.ones_(list(model.parameters())[-1])
    return items, TrainingState(model, optimiser(model, settings), seed=1)


def loss_of(rows: Tensor, step: int) -> Tensor:
    """Its gradient at a row depends on the row, on how often it is used and on the step."""
    return (rows * torch.linspace(-1, 2, WIDTH) + (step + 1) * rows**2).sum()


def take_step(items: IdTable, state: TrainingState, settings: TrainSettings, used: Tensor) -> None:
    state.adamw.zero_grad(set_to_none=True)
    rows = items.input(used)
    beside = list(state.model.parameters())[-1]
    torch.autograd.backward(loss_of(rows, state.record.step) + (rows.detach() @ beside.T).sum())
    set_learning_rate(state.adamw, settings, step=state.record.step, passed=0.0)
    state.step(settings)


def moments_of(items: IdTable, state: TrainingState) -> list[Tensor]:
    return [state.adamw.state[items.into][name] for name in ("exp_avg", "exp_avg_sq", "step")]


def draws(steps: int, most: int = 12) -> list[Tensor]:
    """Which rows each step uses: a few, some of them twice, padding among them."""
    rng = np.random.default_rng(4)
    return [torch.from_numpy(rng.integers(0, min(N_ITEMS // 2 + step, N_ITEMS) + 1, most)) for step in range(steps)]


def test_when_every_step_uses_every_row_it_is_dense_adamw_bit_for_bit() -> None:
    settings = TrainSettings(weight_decay=0.1, warmup=3, averaging=0.8, learning_rate=0.1)
    found = []
    for by_rows in (True, False):
        items, state = state_of(settings, by_rows=by_rows)
        for step in range(8):
            take_step(items, state, settings, torch.arange(N_ITEMS + 1).roll(step))
        state.settle()
        found.append([items.into.detach(), *state.average, *moments_of(items, state)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert found[0][-1] == 8 and (found[0][0][0] == 0).all()


def test_rows_that_are_not_used_stand_still_bit_for_bit() -> None:
    settings = TrainSettings(weight_decay=0.1, warmup=0, learning_rate=0.1)
    items, state = state_of(settings, by_rows=True)
    take_step(items, state, settings, torch.tensor([1, 2, 3]))
    before = [tensor.clone() for tensor in (items.into.detach(), *moments_of(items, state)[:2])]
    take_step(items, state, settings, torch.tensor([3, 0, 4, 3, 9]))
    for old, new in zip(before, (items.into.detach(), *moments_of(items, state)[:2]), strict=True):
        changed = (old != new).all(1).nonzero()[:, 0].tolist()
        assert changed == [3, 4, 9]
        assert (old != new).any(1).sum() == 3


def test_sparse_adam_does_the_same() -> None:
    """torch's own, which also leaves moments of unused rows and counts every step; it has no weight decay."""
    settings = TrainSettings(learning_rate=0.05, warmup=0)
    items, state = state_of(settings, by_rows=True)
    table = nn.Parameter(items.into.detach().clone())
    theirs = torch.optim.SparseAdam([table], lr=0.05, betas=(0.9, 0.98))
    for step, used in enumerate(draws(15)):
        take_step(items, state, settings, used)
        rows = nn.functional.embedding(used, table, padding_idx=0, sparse=True)
        table.grad = None
        torch.autograd.backward(loss_of(rows, step))
        theirs.step()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(items.into, table, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("averaging", [0.0, 0.5, 0.97])
def test_an_average_that_waits_is_the_one_that_followed(averaging: float) -> None:
    """Settled in the middle as well, as at an epoch's end; followed in float64."""
    settings = TrainSettings(averaging=averaging, learning_rate=0.05, warmup=5)
    items, state = state_of(settings, by_rows=True)
    followed = items.into.detach().double()
    for step, used in enumerate(draws(60)):
        take_step(items, state, settings, used)
        memory = min(averaging, (1 + step) / (10 + step))
        followed = memory * followed + (1 - memory) * items.into.detach().double()
        if step in (20, 21, 59):
            state.settle()
            torch.testing.assert_close(state.average[0].double(), followed, rtol=1e-6, atol=1e-6)
    if averaging == 0:
        assert torch.equal(state.average[0], items.into)


def a_log() -> Log:
    """Forty users of a catalogue of which a batch uses a part."""
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
    """A loss over every item leaves a dense gradient, and so the whole table to be learned."""
    recipe, log = recipe_of(model={"items__tied": tied, "dropout": 0.0}, objective=loss), a_log()
    model = build_model(recipe.model, N_ITEMS, generator=torch.Generator().manual_seed(1))
    objective = Objective(recipe.objective, log.counts)
    batch = next(log.windows(recipe).batches(50, np.random.default_rng(0)))
    dense = gradients_of(model, objective, batch)
    model.items.sparse_gradients = True
    found = gradients_of(model, objective, batch)
    looked_up = {
        (True, True): {"items.into"},
        (False, True): {"items.into", "items.out"},
        (False, False): {"items.into"},
    }
    assert {name for name, gradient in found.items() if gradient.is_sparse} == looked_up.get((tied, bool(loss)), set())
    assert found.keys() == dense.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.to_dense() if gradient.is_sparse else gradient, dense[name])


def chosen_by_rows(recipe: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> dict[str, Tensor]:
    monkeypatch.setattr(train, "LEAST_ROWS", N_ITEMS)
    model, _ = a_log().chosen(recipe, folder, **more)
    return weights_of(model)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_training_by_rows_is_taken_up_to_the_same_numbers(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(epochs=3, tokens=30, objective=SAMPLED, model={"items__tied": tied})
    dense, _ = a_log().chosen(recipe, tmp_path / "dense")
    whole = chosen_by_rows(recipe, tmp_path / "whole", monkeypatch)
    assert not same_weights(whole, weights_of(dense)), "a large table is learned by rows"

    def stop(step: TrainingProgress) -> None:
        if step.epoch == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chosen_by_rows(recipe, tmp_path / "stopped", monkeypatch, progress=stop)
    assert same_weights(chosen_by_rows(recipe, tmp_path / "stopped", monkeypatch), whole)
    assert all((table[0] == 0).all() for name, table in whole.items() if name.startswith("items."))


def test_what_is_validated_and_saved_is_the_average_of_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, seen = recipe_of(epochs=2, tokens=30, objective=SAMPLED, averaging=0.9), []
    loss = Objective.loss

    def watched(self: Objective, model: SequenceModel, *rest: Any) -> Tensor:
        seen.append(model.items.into.detach().clone())
        return loss(self, model, *rest)

    monkeypatch.setattr(Objective, "loss", watched)
    kept = chosen_by_rows(recipe, tmp_path, monkeypatch)
    saved = load_file(tmp_path / STATE)
    place = next(name for name, tensor in saved.items() if name.startswith("weight.") and len(tensor) == N_ITEMS + 1)
    average = seen[0]
    for step, weights in enumerate([*seen[1:], saved[place]]):
        memory = min(0.9, (1 + step) / (10 + step))
        average = memory * average + (1 - memory) * weights
    torch.testing.assert_close(saved[place.replace("weight", "average")], average, rtol=1e-5, atol=1e-6)
    best = saved[place.replace("weight", "best")]
    assert torch.equal(kept["items.into"], best)
