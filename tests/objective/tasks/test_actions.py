"""The objective of tasks that look ahead: a user's own positives, users of equal weight, answers as negatives."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fixed_samples import Fixed, LargestMade, model_of
from settings_tables import model_settings, objective_settings
from torch import Tensor

from segue.config.settings import make_settings
from segue.data.batch import Batch
from segue.errors import SettingsError
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.objective.losses import softmax
from segue.objective.losses.sampled import SampledQueries
from segue.objective.losses.softmax import sampled_softmax, shared_softmax
from segue.objective.objective import Objective
from segue.objective.samplers.collisions import Groups, shared_collisions
from segue.objective.samplers.samplers import SamplerSettings, TargetSampler
from segue.objective.settings import ObjectiveSettings
from segue.objective.tasks.examples import Examples

N_ITEMS = 8
COUNTS = np.r_[0, np.ones(N_ITEMS, dtype=np.int64)]
MIXED = {"loss": "sampled-softmax", "sampler": "targets+uniform", "sampler__negatives": 6}
every_sampled_loss = pytest.mark.parametrize(
    "loss", ["sampled-softmax", "bce", "gbce", "bpr", "bpr-max", "top1", "top1-max"]
)
shared_or_own = pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])


def settings_of(**changed: Any) -> ObjectiveSettings:
    return objective_settings(**{"task": "dense-all-action", **changed})


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- a user's own positives ---------------------------------------------------------------------------------------

VECTORS = [[0.7, 0.1], [-0.4, 0.3], [1.1, -0.2], [0.2, 0.9], [0.5, -0.5], [-0.3, -0.6], [0.4, 0.4], [0.9, -0.1]]
STATES = torch.tensor([[1.3, 0.2], [-0.6, 0.5], [0.3, -0.8]], dtype=torch.float64)
# The first user's positives are 1, 2, 3 and 4, the second's 3 and 5; the first has two queries.
TWO_USERS = Examples(
    inputs=Batch(items=np.array([1, 2, 3]), times=np.arange(3), lengths=np.array([2, 1])),
    targets=np.array([3, 4, 5]),
    positions=np.array([0, 1, 2]),
    own=(np.array([0, 0, 0, 0, 1, 1]), np.array([1, 2, 3, 4, 3, 5])),
)


def cost(settings: ObjectiveSettings, examples: Examples, states: Tensor, samples: list[int]) -> float:
    objective = Objective(settings, COUNTS, length=5)
    assert isinstance(settings.sampler, SamplerSettings)
    times = 1 if settings.sampler.shared else len(examples.targets)
    objective.sampler = Fixed(samples, [0.0] * (N_ITEMS + 1), times=times)
    return objective.loss(model_of(VECTORS), states, examples, torch.Generator()).item()


@every_sampled_loss
@shared_or_own
def test_own_positives_are_never_negatives_whether_targets_or_not(loss: str, shared: bool) -> None:
    """All of 1 to 5 are sampled, and each query has the loss of its samples without its user's positives."""
    keys: dict[str, Any] = {"loss": loss, "sampler": "uniform", "sampler__shared": shared}
    actual = cost(settings_of(**keys, sampler__negatives=7), TWO_USERS, STATES, [1, 2, 3, 4, 5, 6, 7])

    def alone(query: int, samples: list[int]) -> float:
        negatives = len(samples)
        inputs = Batch(items=np.array([1]), times=np.array([0]), lengths=np.array([1]))
        examples = Examples(inputs=inputs, targets=TWO_USERS.targets[[query]])
        if loss == "gbce":  # its calibration depends on the number of negatives
            samples, negatives = samples + [int(examples.targets[0])] * (7 - len(samples)), 7
        plain = settings_of(**keys, task="next-item", sampler__negatives=negatives)
        return cost(plain, examples, STATES[[query]], samples)

    expected = (alone(0, [5, 6, 7]) + alone(1, [5, 6, 7]) + alone(2, [1, 2, 4, 6, 7])) / 3
    assert actual == pytest.approx(expected, abs=1e-9)


def test_the_full_softmax_is_over_every_item() -> None:
    """Also over the user's other positives: nothing is sampled, nothing masked."""
    actual = Objective(settings_of(), COUNTS, length=5).loss(model_of(VECTORS), STATES, TWO_USERS, torch.Generator())
    logits = STATES @ torch.tensor(VECTORS, dtype=torch.float64).T
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([2, 3, 4]))
    assert actual.item() == pytest.approx(expected.item(), abs=1e-12)


def by_user(rows: int, users: int, positives: int, seed: int = 3) -> tuple[Tensor, Groups]:
    """Targets, and the positives of each user, the targets among them."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(users, (rows,), generator=generator).sort().values
    items = torch.randint(1, 40, (users, positives), generator=generator)
    targets = items[groups, torch.randint(positives, (rows,), generator=generator)]
    return targets, Groups(groups, torch.arange(users).repeat_interleave(positives), items.flatten())


@pytest.mark.parametrize("tile", [1, 1 << 20], ids=["least tiles", "one tile"])
def test_shared_softmax_is_the_sampled_one_of_all_scores_by_user(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    """Value and gradients; and the same negatives written out for each row."""
    monkeypatch.setattr(softmax, "TILE_SCORES", tile)
    monkeypatch.setattr(softmax, "LEAST_TILE", 7)
    (targets, groups), items = by_user(50, 6, 8), torch.arange(1, 31)
    parts = [normal(count, 5, seed=count) for count in (50, 51, 30)]
    results = []
    for form in range(3):
        queries, answers, samples = (
            part[: 50 if part.shape[0] > 30 else 30].clone().requires_grad_() for part in parts
        )
        if form == 0:
            collisions = shared_collisions(targets, items, groups)
            loss = shared_softmax(queries, answers, samples, collisions)
        else:
            numbers, vectors = (items, samples) if form == 1 else (items.expand(50, 30), samples.expand(50, 30, 5))
            similarity = model_of(VECTORS).similarity
            sampled = SampledQueries(similarity, queries, answers, vectors, targets, numbers, groups=groups)
            loss = sampled_softmax(*sampled.scores())
        results.append([loss.detach(), *torch.autograd.grad(loss, (queries, answers, samples))])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=1e-12)


def test_gradient_check_with_a_users_own_positives() -> None:
    (targets, groups), items = by_user(6, 2, 4), torch.arange(1, 41, 3)
    collisions = shared_collisions(targets, items, groups)
    assert len(collisions.pairs(slice(0, 6))[0]) > 0
    inputs = [normal(6, 3), normal(6, 3, seed=1), normal(len(items), 3, seed=2)]
    assert torch.autograd.gradcheck(
        lambda q, a, d: shared_softmax(q, a, d, collisions), [part.requires_grad_() for part in inputs]
    )


def test_collisions_of_a_user_are_not_written_out_for_all_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 queries of two users, who have 30 of 39 sampled items each: the pairs exist a tile at a time."""
    monkeypatch.setattr(softmax, "TILE_SCORES", 1)
    (targets, groups), items = by_user(2000, 2, 60), torch.arange(1, 40)
    with LargestMade() as largest:
        collisions = shared_collisions(targets, items, groups)
        shared_softmax(normal(2000, 2), normal(2000, 2, seed=1), normal(39, 2, seed=2), collisions)
    assert largest.numbers < 64 * 39
    assert len(collisions.columns) < 2 * 39


# --- users of equal weight ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["next-item", "dense-all-action", "all-action", "next-action"])
@pytest.mark.parametrize(
    "loss", [{}, {"loss": "bce", "sampler": "uniform", "sampler__negatives": 3}, MIXED], ids=["softmax", "bce", "mixed"]
)
def test_every_user_weighs_the_same(task: str, loss: dict[str, Any]) -> None:
    """The mean of the losses of each user's queries, with weight zero for the other's."""
    shape = model_settings(kind="sasrec", width=4, depth=1, length=9, dropout=0.0)
    model = build_model(shape, 20, generator=torch.Generator().manual_seed(0)).double()
    batch = Batch(items=np.arange(1, 10), times=np.arange(9), lengths=np.array([6, 3]))
    plain, equal = (settings_of(task=task, equal_users=equal, **loss) for equal in (False, True))
    counts = np.ones(21, dtype=np.int64)
    examples = Objective(plain, counts, length=9).examples(batch, np.random.default_rng(1))
    assert len(set(np.bincount(examples.users))) == 2, "one user has more queries"
    hidden = model.encode(tensors(examples.inputs))

    def cost_of(settings: ObjectiveSettings, weights: np.ndarray | None) -> float:
        weighted = replace(examples, weights=weights)
        objective = Objective(settings, counts, length=9)
        return objective.loss(model, hidden, weighted, torch.Generator().manual_seed(1)).item()

    each = [cost_of(plain, (examples.users == user).astype(np.float64)) for user in range(2)]
    assert cost_of(equal, None) == pytest.approx(sum(each) / 2, abs=1e-12)
    assert cost_of(plain, None) != pytest.approx(sum(each) / 2, abs=1e-3)


# --- negatives that are answers -----------------------------------------------------------------------------------


def test_only_answers_are_counted_and_sampled() -> None:
    """Inputs, which in-batch samplers use too, are not counted."""
    settings = settings_of(loss="sampled-softmax", sampler="targets", sampler__negatives=50)
    objective, model = Objective(settings, COUNTS, length=5), model_of(VECTORS)
    sampler = objective.sampler
    assert isinstance(sampler, TargetSampler) and list(objective.state) == ["target_counts"]
    for count in (1, 2):
        objective.loss(model, STATES, TWO_USERS, torch.Generator())
        assert objective.state["target_counts"].sum() == 3 * count
    log_q = sampler.log_q(torch.arange(1, N_ITEMS + 1), torch.tensor([3]))
    assert log_q.exp().tolist() == pytest.approx([0, 0, 1 / 3, 1 / 3, 1 / 3, 0, 0, 0])


def test_mixed_negatives_by_hand() -> None:
    """One state, G7's correction with q of the mixture: the answer 3 was every answer so far, so q is .5 + .5 / 8 for
    it and .5 / 8 for any other; negatives are sampled items that are no positives of the user."""
    settings = settings_of(loss="sampled-softmax", sampler="targets+uniform", sampler__negatives=40)
    objective, model = Objective(settings, COUNTS, length=5), model_of(VECTORS)
    inputs = Batch(items=np.array([1]), times=np.array([0]), lengths=np.array([1]))
    examples = Examples(inputs, np.array([3]), np.array([0]), None, (np.array([0, 0]), np.array([3, 4])))
    actual = objective.loss(model, STATES[:1], examples, torch.Generator().manual_seed(4)).item()
    assert objective.sampler is not None
    samples = objective.sampler.sample(40, torch.Generator().manual_seed(4), torch.tensor([3])).tolist()
    assert {3, 4} < set(samples)
    scores = (STATES[:1] @ torch.tensor(VECTORS, dtype=torch.float64).T)[0].tolist()
    answer = scores[2] - math.log(0.5 + 0.5 / 8)
    others = [scores[item - 1] - math.log(0.5 / 8) for item in samples if item not in (3, 4)]
    assert actual == pytest.approx(math.log(sum(map(math.exp, [answer, *others]))) - answer, abs=1e-6)


def test_other_samplers_count_nothing() -> None:
    assert Objective(settings_of(), COUNTS, length=5).state == {}
    assert Objective(settings_of(**{**MIXED, "sampler": "mixed"}), COUNTS, length=5).state == {}


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["objective.task.days=7"], ["'days'", "objective.task = 'next-item'", "no keys"]),
        (["objective.task=next-action", "objective.task.labels=7"], ["'labels'", "'next-action'", "Allowed: positive"]),
        (['objective.task.positive=[{kind="buy"}]'], ["'positive'", "objective.task = 'next-item'"]),
        (["objective.task=all-action", "objective.task.days=1e-9"], ["objective.task.days", "1 / 86400"]),
        (["objective.task=all-action", "objective.task.days=inf"], ["objective.task.days", "inf"]),
        (["objective.task=all-action", "objective.task.labels=0"], ["objective.task.labels", ">= 1"]),
        (
            ["objective.task=all-action", "objective.loss=sce", "objective.loss.bucket_items=9"],
            ["objective.loss", "hardest"],
        ),
        (["objective.task=dense-all-action", "model=bert4rec"], ["bidirectional", "'masked-item'"]),
        (["objective.task=dense-all-action", "model=seq2seq"], ["decoder", "'continuation'"]),
        (
            ["objective.task=masked-item", "model=bert4rec", "objective.equal_users=true"],
            ["objective.equal_users", "'masked-item'"],
        ),
        (["objective.task=all-action", 'objective.task.positive=[{kind="buy", most=3}]'], ["positive[0]", "most"]),
        (["objective.task=all-action", "objective.task.positive=[{}]"], ["objective.task.positive", "neither"]),
    ],
)
def test_incompatible_settings_are_refused_with_what_to_change(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(SettingsError) as error:
        make_settings({}, overrides)
    assert all(word in str(error.value) for word in words), str(error.value)
