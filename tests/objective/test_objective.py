"""The objective as the loop sees it: settings in, one number out; and the settings that are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from segue.data.batch import Batch
from segue.errors import SettingsError
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.objective.objective import Objective
from segue.objective.sampler import PopularitySampler
from segue.objective.settings import ObjectiveSettings
from segue.objective.task import Examples, next_item

N_ITEMS = 9
COUNTS = np.array([0, 5, 3, 1, 4, 1, 5, 9, 2, 6])
BATCH = Batch(items=np.array([1, 9, 3, 4, 3, 7]), times=np.arange(6), lengths=np.array([4, 2]))


def settings_of(**chosen: Any) -> ObjectiveSettings:
    return msgspec.convert(chosen, ObjectiveSettings)


def sampled(sampler: str, negatives: int = 4, **more: Any) -> ObjectiveSettings:
    return settings_of(loss="sampled-softmax", sampler=sampler, negatives=negatives, **more)


def case(*, tied: bool = True) -> tuple[SequenceModel, Tensor, Examples]:
    shape = ModelSettings(width=4, depth=1, length=8, dropout=0.0, tied=tied)
    model = build_model(shape, N_ITEMS, generator=torch.Generator().manual_seed(0))
    examples = next_item(BATCH)
    return model, model.encode(tensors(examples.inputs)), examples


def loss_of(
    settings: ObjectiveSettings, examples: Examples | None = None, *, tied: bool = True, seed: int = 0
) -> Tensor:
    model, hidden, all_of_them = case(tied=tied)
    generator = torch.Generator().manual_seed(seed)
    return Objective(settings, COUNTS).loss(model, hidden, examples or all_of_them, generator)


@pytest.mark.parametrize("tied", [True, False])
def test_softmax_is_over_the_items_and_not_over_padding(tied: bool) -> None:
    model, hidden, examples = case(tied=tied)
    logits, targets = model.score_all(hidden)[:, 1:], torch.from_numpy(examples.targets) - 1
    expected = functional.cross_entropy(logits, targets)
    assert loss_of(settings_of(), tied=tied).item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("chosen", [settings_of(), sampled("uniform")], ids=["softmax", "sampled-softmax"])
def test_only_the_questioned_states_count_and_by_their_weight(chosen: ObjectiveSettings) -> None:
    _, _, examples = case()
    answers = examples.targets
    some = Examples(
        inputs=examples.inputs,
        targets=answers[[2, 3]],
        positions=np.array([2, 3]),
        weights=np.array([1.0, 3.0], dtype=np.float32),
    )
    each = [
        loss_of(chosen, Examples(inputs=examples.inputs, targets=answers[[at]], positions=np.array([at]))).item()
        for at in (2, 3)
    ]
    assert loss_of(chosen, some).item() == pytest.approx((each[0] + 3 * each[1]) / 4, abs=1e-5)


def by_hand(log_q: np.ndarray, negatives: list[int], *, tied: bool) -> float:
    """Sampled softmax written out row by row; log_q [V + 1]."""
    model, hidden, examples = case(tied=tied)
    scores, losses = model.score_all(hidden).detach().numpy(), []
    for row, target in zip(scores, examples.targets, strict=True):
        corrected = row - log_q
        others = [corrected[item] for item in negatives if item != target]
        losses.append(np.logaddexp.reduce([corrected[target], *others]) - corrected[target])
    return float(np.mean(losses))


@pytest.mark.parametrize("tied", [True, False])
def test_sampled_softmax_corrects_positives_and_negatives_by_popularity(tied: bool) -> None:
    """In the draws of this seed are two collisions with a target."""
    weight = COUNTS[1:] ** 0.75
    log_q = np.concatenate(([0.0], np.log(weight / weight.sum())))
    negatives = PopularitySampler(COUNTS, 0.75).draw(6, torch.Generator().manual_seed(3)).items.tolist()
    assert set(negatives) & {9, 3, 4, 7}
    found = loss_of(sampled("popularity", 6, power=0.75), tied=tied, seed=3).item()
    assert found == pytest.approx(by_hand(log_q, negatives, tied=tied), abs=1e-5)


def test_uniform_negatives_need_no_correction() -> None:
    objective = Objective(sampled("uniform", 5), COUNTS)
    assert objective.sampler is not None
    negatives = objective.sampler.draw(5, torch.Generator().manual_seed(2)).items.tolist()
    found = loss_of(sampled("uniform", 5), seed=2).item()
    assert found == pytest.approx(by_hand(np.zeros(N_ITEMS + 1), negatives, tied=True), abs=1e-5)


def test_a_batch_of_other_negatives_each_time() -> None:
    assert loss_of(sampled("uniform"), seed=1).item() != loss_of(sampled("uniform"), seed=2).item()


@pytest.mark.parametrize("chosen", [settings_of(), sampled("uniform"), sampled("popularity")])
def test_nothing_reaches_the_padding_row(chosen: ObjectiveSettings) -> None:
    model, hidden, examples = case(tied=False)
    torch.autograd.backward(Objective(chosen, COUNTS).loss(model, hidden, examples, torch.Generator()))
    for table in (model.items.into, model.items.out):
        assert table is not None and table.grad is not None
        assert (table.grad[0] == 0).all() and (table.grad != 0).any()


def test_a_window_is_one_longer_than_the_model() -> None:
    assert Objective(settings_of(), COUNTS).extra == 1


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ({"loss": "sampled-softmax"}, ["objective.sampler", "uniform", "popularity", "objective.negatives"]),
        ({"loss": "sampled-softmax", "sampler": "uniform"}, ["objective.negatives", "at least 1", "0"]),
        ({"loss": "sampled-softmax", "negatives": 5}, ["objective.sampler", "uniform", "popularity"]),
        ({"loss": "sampled-softmax", "sampler": "uniform", "negatives": -1}, ["objective.negatives", "-1"]),
        ({"sampler": "uniform"}, ["objective.sampler", "sampled-softmax"]),
        ({"negatives": 10}, ["objective.negatives", "sampled-softmax"]),
        ({"power": 0.75}, ["objective.power", "popularity"]),
        (
            {"loss": "sampled-softmax", "sampler": "uniform", "negatives": 5, "power": 0.75},
            ["objective.power", "popularity"],
        ),
    ],
    ids=str,
)
def test_impossible_pairs_are_refused_with_what_to_change(chosen: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        ObjectiveSettings(**chosen)
    assert all(word in str(caught.value) for word in named), str(caught.value)


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"loss": "softmax"},
        {"loss": "sampled-softmax", "sampler": "uniform", "negatives": 1},
        {"loss": "sampled-softmax", "sampler": "popularity", "negatives": 9, "power": 0.75},
    ],
    ids=str,
)
def test_possible_settings(chosen: dict[str, Any]) -> None:
    assert (Objective(settings_of(**chosen), COUNTS).sampler is None) == (chosen.get("loss") != "sampled-softmax")


@pytest.mark.parametrize("power", [float("nan"), float("inf"), -float("inf")])
def test_a_power_that_is_no_number_is_refused(power: float) -> None:
    """TOML can say inf and nan; the sampler would draw from nothing."""
    with pytest.raises(SettingsError, match=r"objective\.power"):
        sampled("popularity", 4, power=power)


@pytest.mark.parametrize(
    "unknown", [{"loss": "hinge"}, {"sampler": "zipf"}, {"task": "masked"}, {"temperature": 1.0}], ids=str
)
def test_unknown_names_are_refused(unknown: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        settings_of(**unknown)
