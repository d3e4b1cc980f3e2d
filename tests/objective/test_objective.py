"""The objective as the training loop uses it: from settings to one loss; and the settings that are refused."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from fixed_samples import Fixed, model_of
from settings_tables import model_settings, objective_settings
from torch import Tensor
from torch.nn import functional

from segue.config.describe import describe
from segue.data.batch import Batch
from segue.errors import SettingsError
from segue.kinds import Kind, kind_of, variants_of
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.sequence import SequenceModel
from segue.objective.losses import AnyLossSettings
from segue.objective.objective import Objective
from segue.objective.samplers import AnySamplerSettings
from segue.objective.samplers.samplers import InBatchSampler, PopularitySampler, SamplerSettings
from segue.objective.settings import ObjectiveSettings
from segue.objective.tasks import AnyTaskSettings
from segue.objective.tasks.examples import Examples
from segue.objective.tasks.next_item import NextItem

SAMPLED_LOSSES = ("sampled-softmax", "bce", "gbce", "bpr", "bpr-max", "top1", "top1-max")

N_ITEMS = 9
COUNTS = np.array([0, 5, 3, 1, 4, 1, 5, 9, 2, 6])
BATCH = Batch(items=np.array([1, 9, 3, 4, 3, 7]), times=np.arange(6), lengths=np.array([4, 2]))
PRESENT = torch.from_numpy(BATCH.items)


def settings_of(**changed: Any) -> ObjectiveSettings:
    return objective_settings(**changed)


def sampled(sampler: str, negatives: int = 4, **more: Any) -> ObjectiveSettings:
    return settings_of(loss="sampled-softmax", sampler=sampler, sampler__negatives=negatives, **more)


def case(*, tied: bool = True) -> tuple[SequenceModel, Tensor, Examples]:
    shape = model_settings(width=4, depth=1, length=8, dropout=0.0, items__tied=tied)
    model = build_model(shape, N_ITEMS, generator=torch.Generator().manual_seed(0))
    examples = NextItem()(BATCH, np.random.default_rng(0))
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


@pytest.mark.parametrize(
    "settings",
    [settings_of(), *(settings_of(loss=loss, sampler="uniform", sampler__negatives=4) for loss in SAMPLED_LOSSES)],
    ids=["softmax", *SAMPLED_LOSSES],
)
def test_only_queried_states_count_and_by_their_weight(settings: ObjectiveSettings) -> None:
    _, _, examples = case()
    answers = examples.targets
    some = Examples(
        inputs=examples.inputs,
        targets=answers[[2, 3]],
        positions=np.array([2, 3]),
        weights=np.array([1.0, 3.0], dtype=np.float32),
    )
    each = [
        loss_of(settings, Examples(inputs=examples.inputs, targets=answers[[at]], positions=np.array([at]))).item()
        for at in (2, 3)
    ]
    assert loss_of(settings, some).item() == pytest.approx((each[0] + 3 * each[1]) / 4, abs=1e-5)


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
    """The samples of this seed have two collisions with a target."""
    weight = COUNTS[1:] ** 0.75
    log_q = np.concatenate(([0.0], np.log(weight / weight.sum())))
    negatives = PopularitySampler(COUNTS, 0.75).sample(6, torch.Generator().manual_seed(3), PRESENT).tolist()
    assert set(negatives) & {9, 3, 4, 7}
    actual = loss_of(sampled("popularity", 6, sampler__power=0.75), tied=tied, seed=3).item()
    assert actual == pytest.approx(by_hand(log_q, negatives, tied=tied), abs=1e-5)


def test_uniform_negatives_need_no_correction() -> None:
    objective = Objective(sampled("uniform", 5), COUNTS)
    assert objective.sampler is not None
    negatives = objective.sampler.sample(5, torch.Generator().manual_seed(2), PRESENT).tolist()
    actual = loss_of(sampled("uniform", 5), seed=2).item()
    assert actual == pytest.approx(by_hand(np.zeros(N_ITEMS + 1), negatives, tied=True), abs=1e-5)


def test_another_seed_has_other_negatives() -> None:
    assert loss_of(sampled("uniform"), seed=1).item() != loss_of(sampled("uniform"), seed=2).item()


@pytest.mark.parametrize("settings", [settings_of(), sampled("uniform"), sampled("popularity")])
def test_the_padding_row_has_no_gradient(settings: ObjectiveSettings) -> None:
    model, hidden, examples = case(tied=False)
    torch.autograd.backward(Objective(settings, COUNTS).loss(model, hidden, examples, torch.Generator()))
    for table in (model.items.into, model.items.out):
        assert table is not None and table.grad is not None
        assert (table.grad[0] == 0).all() and (table.grad != 0).any()


def test_a_window_is_one_longer_than_the_model() -> None:
    assert Objective(settings_of(), COUNTS).extra == 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"loss": "sampled-softmax"}, ["objective.sampler", "uniform", "popularity"]),
        (
            {"loss": "sampled-softmax", "sampler": "uniform", "sampler__negatives": 0},
            ["objective.sampler.negatives", ">= 1", "0"],
        ),
        (
            {"loss": "sampled-softmax", "sampler": "uniform", "sampler__negatives": -1},
            ["objective.sampler.negatives", "-1"],
        ),
        ({"sampler": "uniform"}, ["objective.sampler", "sampled-softmax"]),
        ({"sampler__negatives": 10}, ["'negatives'", "objective.sampler = 'none'", "no keys"]),
        (
            {"loss": "sampled-softmax", "sampler": "uniform", "sampler__negatives": 5, "sampler__power": 0.75},
            ["'power'", "objective.sampler = 'uniform'", "negatives, shared"],
        ),
        (
            {"loss": "sampled-softmax", "loss__log_q": False, "sampler": "uniform"},
            ["objective.loss.log_q", "objective.sampler = 'uniform'"],
        ),
    ],
    ids=str,
)
def test_impossible_pairs_are_refused_with_what_to_change(changed: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingsError) as error:
        objective_settings(**changed)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"loss": "softmax"},
        {"loss": "sampled-softmax", "sampler": "uniform", "sampler__negatives": 1},
        {"loss": "sampled-softmax", "sampler": "popularity", "sampler__negatives": 9, "sampler__power": 0.75},
    ],
    ids=str,
)
def test_possible_settings(changed: dict[str, Any]) -> None:
    assert (Objective(settings_of(**changed), COUNTS).sampler is None) == (changed.get("loss") != "sampled-softmax")


@pytest.mark.parametrize("power", [float("nan"), float("inf"), -float("inf")])
def test_a_power_that_is_no_number_is_refused(power: float) -> None:
    """TOML allows inf and nan, with which the sampler has no distribution."""
    with pytest.raises(SettingsError, match=r"objective\.sampler\.power"):
        sampled("popularity", 4, sampler__power=power)


@pytest.mark.parametrize("unknown", [{"loss": "hinge"}, {"sampler": "zipf"}, {"task": "masked"}, {"tau": 1.0}], ids=str)
def test_unknown_names_are_refused(unknown: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="Allowed: "):
        settings_of(**unknown)


# --- every combination --------------------------------------------------------------------------------------------

KEYS = {key.name.removeprefix("objective.").replace(".", "__") for key in describe("objective")}
TASKS, LOSSES, SAMPLERS = (
    tuple(variants_of(choice)) for choice in (AnyTaskSettings, AnyLossSettings, AnySamplerSettings)
)
BUILDERS: dict[str, Literal["sasrec", "esasrec", "bert4rec", "seq2seq"]] = {
    "next-item": "esasrec",
    "masked-item": "bert4rec",
    "recency": "sasrec",
    "continuation": "seq2seq",
    "dense-all-action": "esasrec",
    "all-action": "sasrec",
    "next-action": "sasrec",
}
ACTIONS = ("dense-all-action", "all-action", "next-action")
MANY_ITEMS = 40
MANY_COUNTS = np.r_[0, np.arange(MANY_ITEMS) % 5 + 1]
NEGATIVES = 9

Combination = tuple[str, str, str, bool]


@functools.cache
def users() -> Batch:
    """Users of twelve, five, three and two events, a second apart, without repeated items."""
    rng = np.random.default_rng(4)
    histories = [rng.permutation(MANY_ITEMS)[:length] + 1 for length in (12, 5, 3, 2)]
    lengths = np.array([len(history) for history in histories])
    positions = np.arange(lengths.sum())
    return Batch(items=np.concatenate(histories), times=positions, lengths=lengths, kinds=positions % 2)


def objective_of(settings: ObjectiveSettings) -> Objective:
    return Objective(settings, MANY_COUNTS, ("look", "buy"), length=12)


@functools.cache
def model_for(task: str) -> SequenceModel:
    """Built once, and not to be changed. In float64, so that the effect of a small step is measurable; with weights
    that are nowhere zero but in the padding rows, so that every weight has a gradient."""
    body = "body__" if BUILDERS[task] == "seq2seq" else ""
    sizes = {f"{body}heads": 2, f"{body}feed_forward": 1}
    shape = model_settings(kind=BUILDERS[task], width=4, depth=1, length=12, dropout=0.0, **sizes)
    model = build_model(shape, MANY_ITEMS, generator=torch.Generator()).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    model.items.clear_padding()
    return model


def run_loss(settings: ObjectiveSettings, model: SequenceModel | None = None) -> tuple[Examples, Tensor]:
    """The examples and the loss of one batch, with the same negatives at each call."""
    model, objective = model or model_for(kind_of(settings.task)), objective_of(settings)
    examples = objective.examples(users(), np.random.default_rng(1))
    hidden = model.encode(tensors(examples.inputs))
    return examples, objective.loss(model, hidden, examples, torch.Generator().manual_seed(2))


def gradients_of(loss: Tensor, model: SequenceModel) -> dict[str, Tensor]:
    """The gradient in each weight; every weight must have one."""
    names, weights = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights), strict=True))


cached_loss = functools.cache(run_loss)


def is_valid(task: str, loss: str, sampler: str, _: bool) -> bool:
    """Sampled negatives if and only if the loss needs them; lambdarank for the few states of recency; sce if an item of
    high score may be a negative."""
    if loss in SAMPLED_LOSSES:
        return sampler != "none"
    fitting = {"lambdarank": task == "recency", "sce": task not in ACTIONS}
    return sampler == "none" and fitting.get(loss, True)


def combinations(*, valid: bool) -> list[Combination]:
    return [each for each in itertools.product(TASKS, LOSSES, SAMPLERS, (True, False)) if is_valid(*each) is valid]


def is_tested(combination: Combination) -> bool:
    """A sample of the valid ones: the answers of every task reach a sampler by the same code."""
    task, _, sampler, _ = combination
    apart = sampler in ("popularity", "in-batch", "mixed") if task in ACTIONS else task != "next-item"
    return (
        is_valid(*combination)
        and (sampler != "none" or combination[3])
        and not (apart and (task in ACTIONS or sampler in ("targets", "targets+uniform")))
    )


@functools.cache
def settings_for(task: str, loss: str, sampler: str, shared: bool, **more: Any) -> ObjectiveSettings:
    return settings_of(**{"task": task, "loss": loss, **negatives_of(loss, sampler, shared), **more})


def negatives_of(loss: str, sampler: str, shared: bool) -> dict[str, Any]:
    if sampler == "none":
        return {"sampler": sampler, **({"loss__bucket_items": NEGATIVES} if loss == "sce" else {})}
    return {"sampler": sampler, "sampler__negatives": NEGATIVES, "sampler__shared": shared}


def name_of(combination: Combination) -> str:
    task, loss, sampler, shared = combination
    return f"{task}-{loss}" + ("" if sampler == "none" else f"-{sampler}-{'shared' if shared else 'own'}")


def test_the_number_of_combinations() -> None:
    assert (len(TASKS), len(LOSSES), len(SAMPLERS)) == (7, 10, 7)
    assert set(SAMPLED_LOSSES) < set(LOSSES) and set(BUILDERS) == set(TASKS)
    assert (len(combinations(valid=True)), len(combinations(valid=False))) == (7 * 7 * 6 * 2 + 12 * 2, 368)
    assert len(TESTED) == 4 * 7 * 4 * 2 + 9 + 7 * 2 * 2 + 3 * 7 * 3 * 2 + 3


TESTED = list(filter(is_tested, combinations(valid=True)))


@pytest.mark.parametrize("combination", TESTED, ids=name_of)
def test_a_valid_combination_has_a_finite_loss_and_its_gradient(combination: Combination) -> None:
    """A small step against the gradient lowers the loss by the step size times the squared norm of the gradient."""
    settings = settings_for(*combination)
    model = copy.deepcopy(model_for(kind_of(settings.task)))
    _, loss = run_loss(settings, model)
    assert loss.shape == () and math.isfinite(loss.item()) and loss.item() > 0
    gradients = gradients_of(loss, model)
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    assert (gradients["items.into"][0] == 0).all(), "the padding row"
    if kind_of(settings.loss) == "lambdarank":
        return  # its gradient is not that of its value
    squared_norm = sum(gradient.square().sum().item() for gradient in gradients.values())
    expected = 1e-5 * loss.item()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.sub_(gradients[name], alpha=expected / squared_norm)
        _, lower = run_loss(settings, model)
    assert loss.item() - lower.item() == pytest.approx(expected, rel=0.05)


def test_a_step_of_lambdarank_raises_the_scores_of_answers() -> None:
    settings = settings_of(task="recency", loss="lambdarank", task__share=0.6)
    model, margins = copy.deepcopy(model_for(kind_of(settings.task))), []
    for _ in range(2):
        examples, loss = run_loss(settings, model)
        assert examples.positions is not None and len(np.unique(examples.positions)) < len(examples.positions)
        states = model.head(model.encode(tensors(examples.inputs)))[torch.from_numpy(examples.positions)]
        scores, rows = model.score_all(states).detach()[:, 1:], torch.arange(len(examples.targets))
        margins.append((scores[rows, torch.from_numpy(examples.targets) - 1] - scores.mean(1)).mean().item())
        gradients = gradients_of(loss, model)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.sub_(gradients[name], alpha=1e-3)
    assert margins[1] > margins[0] + 1e-6


def test_every_other_combination_is_refused_with_what_to_change() -> None:
    for task, loss, sampler, shared in combinations(valid=False):
        with pytest.raises(SettingsError, match=r"objective\.(loss|sampler) ") as error:
            settings_for(task, loss, sampler, shared)
        words = ("choose", "set objective.sampler to 'none'")
        assert any(word in str(error.value) for word in words), str(error.value)


# --- no option without effect -------------------------------------------------------------------------------------

OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    "task": TASKS,
    "loss": LOSSES,
    "sampler": SAMPLERS,
    "sampler__negatives": (NEGATIVES + 3,),
    "loss__bucket_items": (NEGATIVES + 3,),
    "sampler__shared": (False,),
    "sampler__power": (0.3,),
    "sampler__in_batch": (0.9,),
    "loss__log_q": (False,),
    "temperature": (0.5,),
    "loss__calibration": (0.1,),
    "loss__offset": (-1.0,),
    "loss__regularisation": (0.7,),
    "task__most": (1,),
    "task__last": (0.9,),
    "task__importance": ("linear",),
    "task__importance__alpha": (0.2,),
    "task__share": (0.6,),
    "task__cuts": (3,),
    "task__items": (1,),
    "task__days": (3 / 86400,),
    "task__labels": (1,),
    "task__positive": ([{"kind": "buy"}],),
    "equal_users": (True,),
}


def same(one: tuple[Examples, Tensor], other: tuple[Examples, Tensor]) -> bool:
    """Whether inputs, queries, targets and losses are equal."""
    pairs = ((one[0].inputs.items, other[0].inputs.items), (one[0].targets, other[0].targets))
    positions = one[0].positions, other[0].positions
    same_inputs = all(np.array_equal(mine, yours) for mine, yours in pairs)
    same_positions = None in positions if positions[0] is positions[1] else np.array_equal(*positions)  # type: ignore[arg-type]
    return same_inputs and same_positions and abs(one[1].item() - other[1].item()) < 1e-9


def changed(combination: Combination, name: str) -> Iterator[dict[str, Any]]:
    task, loss, sampler, shared = combination
    own = {"task": task, "loss": loss, **negatives_of(loss, sampler, shared)}
    if name in ("loss", "sampler"):
        own = {key: own[key] for key in ("task", "loss", "sampler")}  # another kind has its own defaults
    for value in OTHER_VALUES[name]:
        if own.get(name) != value:
            more = {"loss__bucket_items": NEGATIVES} if value == "sce" else {}
            yield {**own, name: value, **more}


def test_every_option_is_tested() -> None:
    assert OTHER_VALUES.keys() == KEYS


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_an_option_changes_something_or_is_refused_by_name(name: str) -> None:
    """Whatever the task, the loss and the sampler."""
    n_tested = 0
    for combination in [each for each in TESTED if each[3]]:
        for other in changed(combination, name):
            if (name, combination[1]) == ("temperature", "lambdarank"):
                continue  # its loss depends on ranks only; its gradient is tested below
            try:
                settings, refusal = settings_of(**other), ""
            except SettingsError as error:
                settings, refusal = settings_for(*combination), str(error)
            if refusal:
                assert f"objective.{name.split('__')[0]}" in refusal, other
            elif name == "task__labels":
                n_tested += 1  # windows are longer by so many; their use is tested with the task
                assert objective_of(settings).extra != objective_of(settings_for(*combination)).extra
            else:
                n_tested += 1
                assert not same(cached_loss(settings_for(*combination)), cached_loss(settings)), (
                    f"{name} has no effect: {other}"
                )
    assert n_tested > 0


def test_temperature_changes_the_gradient_of_lambdarank() -> None:
    model, gradients = model_for("recency"), []
    for temperature in (1.0, 0.5):
        settings = settings_of(task="recency", loss="lambdarank", temperature=temperature)
        gradients.append(gradients_of(run_loss(settings, model)[1], model)["items.into"])
    directions = [gradient / gradient.norm() for gradient in gradients]
    assert (directions[0] - directions[1]).norm() > 1e-3


@pytest.mark.parametrize("name", ["task", "loss", "sampler", "temperature", "equal_users"])
def test_an_explicit_default_changes_nothing(name: str) -> None:
    """Otherwise the test above would prove nothing."""
    default = getattr(objective_settings(), name)
    default = kind_of(default) if isinstance(default, Kind) else default
    assert same(run_loss(settings_of()), run_loss(settings_of(**{name: default})))


# --- equivalences -------------------------------------------------------------------------------------------------


SAMPLES = [3, 17, 3, 8, 1, 20, 32, 40, 5]
NO_LOG_Q = (0.0,) * (MANY_ITEMS + 1)
SLOPING_LOG_Q = tuple(-0.1 * number for number in range(MANY_ITEMS + 1))


def with_samples(
    settings: ObjectiveSettings, items: Sequence[int], log_q: Sequence[float] = NO_LOG_Q
) -> tuple[float, list[Tensor]]:
    """The loss, and its gradient in every weight, if every answer has these negatives."""
    model, objective = model_for(kind_of(settings.task)), objective_of(settings)
    examples = objective.examples(users(), np.random.default_rng(1))
    if items:
        assert len(items) == settings.negatives
        objective.sampler = Fixed(items, log_q, times=times_of(settings, examples))
    loss = objective.loss(model, model.encode(tensors(examples.inputs)), examples, torch.Generator())
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


def times_of(settings: ObjectiveSettings, examples: Examples) -> int:
    assert isinstance(settings.sampler, SamplerSettings)
    return 1 if settings.sampler.shared else len(examples.targets)


def assert_equal(one: tuple[float, list[Tensor]], other: tuple[float, list[Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], abs=1e-7)
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=1e-7)


every_task = pytest.mark.parametrize("task", TASKS)
shared_or_own = pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
every_sampled_loss = pytest.mark.parametrize("loss", SAMPLED_LOSSES)


@every_task
@shared_or_own
def test_gbce_without_calibration_is_bce(task: str, shared: bool) -> None:
    plain = settings_for(task, "bce", "uniform", shared)
    uncalibrated = settings_for(task, "gbce", "uniform", shared, loss__calibration=0.0)
    assert_equal(with_samples(uncalibrated, SAMPLES), with_samples(plain, SAMPLES))
    assert with_samples(settings_for(task, "gbce", "uniform", shared), SAMPLES)[0] != with_samples(plain, SAMPLES)[0]


@pytest.mark.parametrize("task", [task for task in TASKS if task not in ACTIONS])
@shared_or_own
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_sampled_softmax_with_every_item_once_is_softmax(task: str, shared: bool, temperature: float) -> None:
    """Recency has one target per state here: several answers of a state are no negatives of each other."""
    one_answer = {"task__share": 0.01} if task == "recency" else {}
    more = {"temperature": temperature, **one_answer}
    everything = settings_for(task, "sampled-softmax", "uniform", shared, sampler__negatives=MANY_ITEMS, **more)
    full = settings_for(task, "softmax", "none", True, **more)
    assert_equal(with_samples(everything, range(1, MANY_ITEMS + 1)), with_samples(full, []))


@every_task
@every_sampled_loss
def test_shared_negatives_equal_own_negatives_if_all_rows_sample_the_same(task: str, loss: str) -> None:
    """Also if they collide: the negatives are every item but one."""
    samples, more = list(range(2, MANY_ITEMS + 1)), {"task__share": 0.6, "task__cuts": 2} if task == "recency" else {}
    shared, own = (
        settings_for(task, loss, "popularity", shared, sampler__negatives=len(samples), temperature=0.7, **more)
        for shared in (True, False)
    )
    assert_equal(with_samples(shared, samples, SLOPING_LOG_Q), with_samples(own, samples, SLOPING_LOG_Q))


@shared_or_own
@pytest.mark.parametrize("sampler", ["uniform", "in-batch"])
def test_log_q_has_no_effect_if_all_items_are_equally_likely(sampler: str, shared: bool) -> None:
    settings = settings_for("next-item", "sampled-softmax", sampler, shared)
    corrected, objective = run_loss(settings), Objective(settings, MANY_COUNTS)
    assert objective.sampler is not None
    examples, model = corrected[0], model_for(kind_of(settings.task))
    present = torch.from_numpy(np.concatenate((examples.inputs.items, examples.targets)))
    count = NEGATIVES if shared else NEGATIVES * len(examples.targets)
    samples = objective.sampler.sample(count, torch.Generator().manual_seed(2), present)
    log_q = set(objective.sampler.log_q(samples, present).tolist())
    assert len(log_q) == 1 and log_q.pop() < 0
    objective.sampler = Fixed(samples.tolist(), NO_LOG_Q)
    plain = objective.loss(model, model.encode(tensors(examples.inputs)), examples, torch.Generator())
    assert corrected[1].item() == pytest.approx(plain.item(), abs=1e-9)


@shared_or_own
def test_log_q_is_subtracted_from_answers_and_negatives_or_from_neither(shared: bool) -> None:
    """A constant added to every log q changes nothing; without log q, nothing is subtracted."""
    items, shifted = SAMPLES, [2.0 + value for value in SLOPING_LOG_Q]
    corrected = settings_for("next-item", "sampled-softmax", "popularity", shared)
    plain = settings_for("next-item", "sampled-softmax", "popularity", shared, loss__log_q=False)
    assert_equal(with_samples(corrected, items, SLOPING_LOG_Q), with_samples(corrected, items, shifted))
    assert_equal(with_samples(plain, items, SLOPING_LOG_Q), with_samples(plain, items))
    assert with_samples(corrected, items, SLOPING_LOG_Q)[0] != pytest.approx(with_samples(plain, items)[0], abs=1e-3)


@pytest.mark.parametrize("loss", ["bce", "gbce", "bpr", "bpr-max", "top1", "top1-max"])
def test_losses_of_plain_scores_do_not_use_log_q(loss: str) -> None:
    settings = settings_for("next-item", loss, "popularity", True)
    assert_equal(with_samples(settings, SAMPLES, SLOPING_LOG_Q), with_samples(settings, SAMPLES))


def test_in_batch_negatives_are_inputs_and_answers_but_no_mask() -> None:
    """A masked item is an item of the batch; the mask itself is none."""
    settings, batches = settings_for("masked-item", "bpr", "in-batch", True), []

    class Watched(InBatchSampler):
        def sample(self, count: int, generator: torch.Generator, present: Tensor) -> Tensor:
            samples = super().sample(500, generator, present)
            batches.append((set(present.tolist()), set(samples.tolist())))
            return samples[:count]

    objective, model = Objective(settings, MANY_COUNTS), model_for(kind_of(settings.task))
    assert type(objective.sampler) is InBatchSampler
    objective.sampler = Watched(MANY_ITEMS)
    examples = objective.examples(users(), np.random.default_rng(1))
    objective.loss(model, model.encode(tensors(examples.inputs)), examples, torch.Generator())
    ((present, samples),) = batches
    assert present - {MANY_ITEMS + 1} == set(users().items.tolist()) == samples
    assert set(examples.targets.tolist()) - set(examples.inputs.items.tolist()), "some items occur only as targets"


# --- goldens ------------------------------------------------------------------------------------------------------


def one_state(
    settings: ObjectiveSettings,
    model: SequenceModel,
    state: Sequence[float],
    *,
    target: int,
    samples: Sequence[int],
    log_q: Sequence[float] | None = None,
) -> tuple[float, Tensor]:
    """The loss of one state with one target, and its gradient in the item table."""
    n_items = model.items.n_items
    objective = Objective(settings, np.ones(n_items + 1, dtype=np.int64))
    if samples:
        objective.sampler = Fixed(samples, log_q or [0.0] * (n_items + 1))
    inputs = Batch(items=np.array([1]), times=np.array([0]), lengths=np.array([1]))
    examples = Examples(inputs=inputs, targets=np.array([target]))
    hidden = torch.tensor([state], dtype=torch.float64)
    loss = objective.loss(model, hidden, examples, torch.Generator().manual_seed(0))
    return loss.item(), torch.autograd.grad(loss, model.items.into)[0]


@shared_or_own
@pytest.mark.parametrize(
    ("loss", "more", "answer", "others", "expected"),
    [
        ("sampled-softmax", {}, 1.0, (0.5, -0.2, 0.8), 1.003002),
        ("bpr", {}, 1.0, (0.5, -0.2, 0.8), 0.445166),
        ("bpr-max", {}, 1.0, (0.5, -0.2, 0.8), 0.488574),
        ("bpr-max", {"loss__regularisation": 1.0}, 1.0, (0.5, -0.2, 0.8), 0.886886),
        ("top1", {}, 1.0, (0.5, -0.2, 0.8), 0.928704),
        ("top1-max", {}, 1.0, (0.5, -0.2, 0.8), 0.983475),
        ("bce", {}, 1.2, (-0.5,), 0.737359 / 2),
        ("bce", {}, 1.2, (-0.5, 0.3, 0.0, -1.0, 0.8), 0.628204),
        ("gbce", {}, 1.2, (-0.5, 0.3, 0.0, -1.0, 0.8), 0.611749),
        ("bce", {"loss__offset": -2.0}, 3.2, (1.5,), 0.737359 / 2),
        ("gbce", {"loss__offset": 1.0}, 0.2, (-1.5, -0.7, -1.0, -2.0, -0.2), 0.611749),
    ],
)
def test_losses_by_hand(
    loss: str, more: dict[str, float], answer: float, others: tuple[float, ...], expected: float, shared: bool
) -> None:
    """Of a catalogue of eleven; by default gbce is calibrated by three quarters."""
    scores = [answer, *others, *[9.0] * (10 - len(others))]
    settings = settings_of(loss=loss, sampler="uniform", sampler__negatives=len(others), sampler__shared=shared, **more)
    model, samples = model_of([[score] for score in scores]), range(2, len(others) + 2)
    assert one_state(settings, model, [1.0], target=1, samples=samples)[0] == pytest.approx(expected, abs=1e-6)


def test_softmax_by_hand() -> None:
    model = model_of([[score] for score in (1.2, -0.5, 0.3, 0.0, -1.0, 0.8)])
    assert one_state(settings_of(), model, [1.0], target=1, samples=[])[0] == pytest.approx(0.982667, abs=1e-6)
    hardest = settings_of(loss="sce", loss__bucket_items=6)
    assert one_state(hardest, model, [1.0], target=1, samples=[])[0] == pytest.approx(0.982667, abs=1e-6)


@shared_or_own
@pytest.mark.parametrize(("log_q", "expected"), [(True, 1.137291), (False, 0.464369)])
def test_log_q_by_hand(log_q: bool, expected: float, shared: bool) -> None:
    settings = sampled("popularity", 2, loss__log_q=log_q, sampler__shared=shared)
    q = [0.0, *np.log([0.5, 0.1, 0.4])]
    actual, _ = one_state(settings, model_of([[2.0], [1.0], [0.5]]), [1.0], target=1, samples=[2, 3], log_q=q)
    assert actual == pytest.approx(expected, abs=1e-6)


@shared_or_own
def test_cosine_with_temperature_by_hand(shared: bool) -> None:
    """Lengths of vectors have no effect, nor has a negative that is the answer: the loss would be .702278 with it."""
    vectors = [[0.1, 0.2]] * 9
    vectors[3 - 1], vectors[5 - 1], vectors[7 - 1], vectors[9 - 1] = [0, 2], [-3, 4], [5, 0], [4, -3]
    settings = sampled("uniform", 4, temperature=0.05, sampler__shared=shared)
    actual, gradient = one_state(settings, model_of(vectors, "cosine"), [3, 4], target=3, samples=[7, 3, 9, 5])
    assert actual == pytest.approx(0.018180, abs=1e-6)
    assert gradient[[1, 2, 4, 6, 8]].eq(0).all() and gradient[[3, 5, 7]].ne(0).any(1).all()


# --- collisions and temperature -----------------------------------------------------------------------------------


@every_sampled_loss
def test_a_negative_that_is_the_answer_never_counts(loss: str) -> None:
    settings = settings_of(loss=loss, sampler="uniform", sampler__negatives=4)
    model = model_of([[0.7], [-0.4], [1.1], [0.2], [0.9], [0.3]])
    masked, without = (one_state(settings, model, [1.3], target=1, samples=items) for items in ([2, 1, 3, 1], [2, 3]))
    assert_equal((masked[0], [masked[1]]), (without[0], [without[1]]))
    assert masked[0] != pytest.approx(one_state(settings, model, [1.3], target=1, samples=[2, 3, 4])[0], abs=1e-3)


@every_sampled_loss
@shared_or_own
def test_answers_of_one_state_are_no_negatives_of_each_other(loss: str, shared: bool) -> None:
    """For a recency state with the targets 1 and 2, only item 3 is a negative; for a state with target 1, so is 2."""
    model, counts = model_of([[0.7], [-0.4], [1.1], [0.2]]), np.ones(5, dtype=np.int64)
    keys = {"task": "recency", "loss": loss, "sampler": "uniform", "sampler__negatives": 3}
    inputs = Batch(items=np.array([4, 4]), times=np.array([0, 1]), lengths=np.array([2]))
    hidden = torch.tensor([[1.3], [-0.6]], dtype=torch.float64)

    def cost(samples: list[int], targets: list[int], positions: list[int], *, own: bool) -> float:
        objective = Objective(settings_of(**keys, sampler__shared=not own), counts)
        objective.sampler = Fixed(samples, [0.0] * 5, times=len(targets) if own else 1)
        examples = Examples(inputs=inputs, targets=np.array(targets), positions=np.array(positions), grouped=True)
        return objective.loss(model, hidden, examples, torch.Generator()).item()

    actual = cost([1, 2, 3], [1, 2, 1], [0, 0, 1], own=not shared)
    of_first, of_second = cost([3], [1, 2], [0, 0], own=False), cost([2, 3], [1], [1], own=False)
    assert actual == pytest.approx((2 * of_first + of_second) / 3, abs=1e-9)


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "lambdarank"])
def test_temperature_divides_scores(loss: str) -> None:
    sampling = {"sampler": "uniform"} if loss in SAMPLED_LOSSES else {}
    sizes = {"sampler__negatives": 3} if sampling else {"loss__bucket_items": 3} if loss == "sce" else {}
    samples = [2, 3, 4] if sampling else []
    model = model_of([[0.7, 0.1], [-0.4, 0.3], [1.1, -0.2], [0.2, 0.9], [0.5, -0.5]])
    actual, _ = one_state(
        settings_of(loss=loss, temperature=0.4, **sampling, **sizes), model, [0.8, -0.6], target=1, samples=samples
    )
    expected, _ = one_state(settings_of(loss=loss, **sampling, **sizes), model, [2.0, -1.5], target=1, samples=samples)
    assert actual == pytest.approx(expected, abs=1e-9)
