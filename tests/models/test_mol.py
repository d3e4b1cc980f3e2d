"""Mixture of logits: the formula, the gates, dropout, the extra loss, and peak memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from settings_tables import model_settings
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from segue.errors import SettingsError
from segue.layers.dropout import set_generator
from segue.models.build import build_model
from segue.models.checkpoint import load_model, save_model
from segue.models.similarity import mol
from segue.models.similarity.dot import Dot
from segue.models.similarity.mol import Mixture, MixtureOfLogits, MoLSettings, gates, imbalance, mixed
from segue.models.weight_init import xavier_init

WIDTH = 6
NUMBERS: dict[str, Any] = {
    "query_parts": 3,
    "item_parts": 2,
    "part_width": 4,
    "query_hidden": 5,
    "gate_hidden": 7,
    "temperature": 0.05,
    "item_dropout": 0.0,
    "gate_dropout": 0.0,
    "balance": 0.001,
}


def built(width: int, **changed: Any) -> MixtureOfLogits:
    similarity = MoLSettings(**{**NUMBERS, **changed}).build(width)
    assert isinstance(similarity, MixtureOfLogits)
    return similarity


def mixture_of_logits(*, seed: int = 0, **changed: Any) -> MixtureOfLogits:
    """In float64, with weights that are nowhere zero."""
    similarity = built(WIDTH, **changed).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in similarity.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return similarity


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_close(actual: Tensor, expected: Tensor | np.ndarray, atol: float = 1e-10) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected), rtol=0, atol=atol)


# --- goldens ------------------------------------------------------------------------------------------------------


def test_two_by_two_by_hand() -> None:
    """G8."""
    logits = torch.tensor([0.5, -0.2, 0.1, 0.9], dtype=torch.float64) / 0.5
    openness = torch.tensor([0.2, -0.1, 0.4, 0.0], dtype=torch.float64)
    assert gates(openness).tolist() == pytest.approx([0.257173, 0.219704, 0.292732, 0.230392], abs=1e-6)
    assert mixed(logits, openness).item() == pytest.approx(0.642543, abs=1e-6)


def test_imbalance_by_hand() -> None:
    """G8b, and both ends: all rows sure of the same gate, and as many rows as gates each sure of its own."""
    shares = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.25] * 4], dtype=torch.float64)
    assert imbalance(shares).item() == pytest.approx(-0.214948, abs=1e-6)
    one, each = torch.eye(4, dtype=torch.float64)[[2, 2, 2]], torch.eye(4, dtype=torch.float64)
    assert imbalance(one).item() == pytest.approx(0, abs=1e-5)
    assert imbalance(each).item() == pytest.approx(-math.log(4), abs=1e-5)


def silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1 + np.exp(-x)))


def linear(part: Any, x: np.ndarray) -> np.ndarray:
    """A linear map in numpy."""
    product: np.ndarray = x @ part.weight.detach().numpy().T
    return product if part.bias is None else np.asarray(product + part.bias.detach().numpy())


def gate_output(part: nn.Module, x: np.ndarray) -> np.ndarray:
    """A gate's linear maps in numpy, with a SiLU between two."""
    if isinstance(part, nn.Linear):
        return linear(part, x)
    assert isinstance(part, nn.Sequential)
    return linear(part[2], silu(linear(part[0], x)))


def score_by_hand(mixture: MixtureOfLogits, state: np.ndarray, vector: np.ndarray) -> float:
    """The score of one pair, step by step from the formulas, in evaluation mode."""
    if isinstance(mixture.query_tower, nn.Linear):
        ours = linear(mixture.query_tower, state)
    else:
        first, second = np.split(linear(mixture.query_tower.inner, state), 2)
        ours = linear(mixture.query_tower.outer, silu(first) * second)
    theirs = linear(mixture.item_tower, vector)
    parts = mixture.mixture.part_width
    pair = np.array(
        [
            f @ g / np.linalg.norm(f) / np.linalg.norm(g) / mixture.temperature
            for g in theirs.reshape(-1, parts)
            for f in ours.reshape(-1, parts)
        ]
    )
    w = gate_output(mixture.query_gate, state) * gate_output(mixture.item_gate, vector) + gate_output(
        mixture.mixture.gate, pair
    )
    shares = np.exp(silu(w)) / np.exp(silu(w)).sum()
    return float(shares @ pair)


@pytest.mark.parametrize("query_hidden", [0, 5])
@pytest.mark.parametrize("gate_hidden", [0, 7])
def test_a_score_is_that_of_the_formulas(query_hidden: int, gate_hidden: int) -> None:
    similarity = mixture_of_logits(query_hidden=query_hidden, gate_hidden=gate_hidden).eval()
    states, vectors = normal(4, WIDTH), normal(5, WIDTH, seed=2)
    expected = [[score_by_hand(similarity, state, vector) for vector in vectors.numpy()] for state in states.numpy()]
    assert_close(similarity.score(similarity.query(states), similarity.item(vectors)), np.array(expected))


@pytest.mark.parametrize("seed", range(3))
def test_one_component_each_is_the_cosine_whatever_the_gates(seed: int) -> None:
    """29.5: divided by the temperature. The towers are the identity."""
    mixture = mixture_of_logits(
        seed=seed, query_parts=1, item_parts=1, part_width=WIDTH, query_hidden=0, temperature=0.2
    )
    assert isinstance(mixture.query_tower, nn.Linear)
    with torch.no_grad():
        for tower in (mixture.query_tower, mixture.item_tower):
            tower.weight.copy_(torch.eye(WIDTH))
            tower.bias.zero_()
    states, vectors = normal(4, WIDTH), normal(5, WIDTH, seed=2)
    expected = torch.cosine_similarity(states[:, None], vectors[None], dim=2) / 0.2
    assert_close(mixture.score(mixture.query(states), mixture.item(vectors)), expected)


# --- laws ---------------------------------------------------------------------------------------------------------


def test_components_have_length_one_and_zero_vectors_finite_gradients() -> None:
    mixture = mixture_of_logits(temperature=0.25)
    ours = mixture.mixture.side(mixture.query(normal(4, WIDTH))).components
    theirs = mixture.mixture.side(mixture.item(normal(5, WIDTH))).components
    assert (ours.shape, theirs.shape) == ((4, 3, 4), (5, 2, 4))
    assert_close(ours.norm(dim=2), torch.full((4, 3), 4.0, dtype=torch.float64))
    assert_close(theirs.norm(dim=2), torch.ones(5, 2, dtype=torch.float64))
    with torch.no_grad():
        mixture.item_tower.bias.zero_()
    vectors = torch.zeros(1, WIDTH, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        mixture.score(mixture.query(normal(4, WIDTH)), mixture.item(vectors)).sum(), vectors
    )
    assert gradient.isfinite().all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 4), st.integers(0, 5), st.integers(1, 30), st.integers(0, 2**32))
def test_tiles_change_nothing_and_own_items_are_scored_like_all(rows: int, columns: int, tile: int, seed: int) -> None:
    mixture = mixture_of_logits(seed=seed).eval()
    queries, items = (
        mixture.query(normal(rows, WIDTH, seed=seed)),
        mixture.item(normal(columns, WIDTH, seed=seed + 1)),
    )
    whole = mixture.score(queries, items)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mol, "TILE_PAIRS", tile)
        patch.setattr(mol, "KEPT_PAIRS", 10)
        assert_close(mixture.score(queries, items), whole)
        assert_close(mixture.own(queries, items.expand(rows, *items.shape)), whole)
    assert whole.shape == (rows, columns)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_gradients_do_not_depend_on_tiles(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = []
    for tile, pairs in ((1000, 1000), (4, 1000), (4, 0)):
        monkeypatch.setattr(mol, "TILE_PAIRS", tile)
        monkeypatch.setattr(mol, "KEPT_PAIRS", pairs)
        similarity, states, vectors = (
            mixture_of_logits(),
            normal(5, WIDTH).requires_grad_(),
            normal(6, WIDTH).requires_grad_(),
        )
        queries, items = similarity.query(states), similarity.item(vectors)
        scores = similarity.own(queries, items.expand(5, -1, -1)) if own else similarity.score(queries, items)
        gradients.append(torch.autograd.grad(scores.square().sum(), [states, vectors, *similarity.parameters()]))
    for whole, *others in zip(*gradients, strict=True):
        for other in others:
            assert_close(whole, other, atol=1e-7)


class ScoreModule(nn.Module):
    """Both sides and a score or loss of them in one call."""

    def __init__(self, similarity: MixtureOfLogits, what: str) -> None:
        super().__init__()
        self.similarity = similarity
        self.what = what

    def forward(self, states: Tensor, vectors: Tensor) -> Tensor:
        queries, items = self.similarity.query(states), self.similarity.item(vectors)
        if self.what == "shared":
            return self.similarity.score(queries, items)
        if self.what == "own":
            return self.similarity.own(queries, items[:, None].expand(-1, 2, -1))
        extra = self.similarity.extra_loss(queries, items)
        assert extra is not None
        return extra


@pytest.mark.parametrize("what", ["shared", "own", "extra"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("pairs", [0, 1000])
def test_gradient_check(what: str, dropout: float, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the states, the vectors and every weight; the dropout mask is the same each time."""
    monkeypatch.setattr(mol, "TILE_PAIRS", 2)
    monkeypatch.setattr(mol, "KEPT_PAIRS", pairs)
    small: dict[str, Any] = {"query_parts": 2, "part_width": 2, "query_hidden": 2, "gate_hidden": 2, "balance": 1.0}
    module = ScoreModule(mixture_of_logits(**small, item_dropout=dropout, gate_dropout=dropout), what)
    names = [name for name, _ in module.named_parameters()]

    def scores(states: Tensor, vectors: Tensor, *weights: Tensor) -> Tensor:
        set_generator(module, torch.Generator().manual_seed(4))
        output: Tensor = torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (states, vectors))
        return output

    inputs = [normal(3, WIDTH), normal(3, WIDTH, seed=2), *(weight.detach().clone() for weight in module.parameters())]
    assert torch.autograd.gradcheck(scores, [part.requires_grad_() for part in inputs], fast_mode=True)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the size of the largest tensor computed under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor):
            self.numbers = max(self.numbers, output.numel())
        return output


@pytest.mark.parametrize("rows", [1, 8])
def test_a_large_catalogue_needs_bounded_memory(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gates of all pairs have 40,000 numbers or more; forward and backward, 5,000 exist at a time."""
    monkeypatch.setattr(mol, "TILE_PAIRS", 50)
    monkeypatch.setattr(mol, "KEPT_PAIRS", 300)
    similarity = mixture_of_logits(gate_hidden=100)
    queries, items = similarity.query(normal(rows, WIDTH)).detach(), similarity.item(normal(400, WIDTH)).detach()
    with LargestTensor() as largest:
        scores = similarity.score(queries, items.requires_grad_())
        torch.autograd.backward(scores.sum())
    assert scores.numel() == rows * 400
    assert largest.numbers <= max(50 * 100, items.numel())


# --- in training --------------------------------------------------------------------------------------------------


def test_dropped_gates_count_nothing_and_the_others_add_up_to_one() -> None:
    openness, logits = normal(1000, 8), normal(1000, 8, seed=2)
    mask = normal(1000, 8, seed=3) > -0.5
    mask[0] = False
    shares = gates(openness, mask)
    assert (shares[~mask] == 0).all() and (shares[mask] > 0).all()
    assert_close(shares[1:].sum(1), torch.ones(999, dtype=torch.float64))
    plain = gates(openness)
    assert_close(shares[1] / shares[1].max(), plain[1] * mask[1] / (plain[1] * mask[1]).max())
    assert_close(mixed(logits, openness, mask), (shares * logits).sum(1))
    assert mixed(logits, openness, mask)[0] == 0, "a row without gates scores zero"


def scores_of(similarity: MixtureOfLogits, seed: int) -> Tensor:
    set_generator(similarity, torch.Generator().manual_seed(seed))
    return similarity.score(similarity.query(normal(50, WIDTH)), similarity.item(normal(40, WIDTH, seed=2)))


@pytest.mark.parametrize("name", ["item_dropout", "gate_dropout"])
def test_dropout_uses_the_trainers_generator_and_only_in_training(name: str) -> None:
    changed: dict[str, Any] = {name: 0.3}
    similarity = mixture_of_logits(**changed)
    assert torch.equal(scores_of(similarity, 1), scores_of(similarity, 1))
    assert (scores_of(similarity, 1) != scores_of(similarity, 2)).any()
    similarity.eval()
    assert torch.equal(scores_of(similarity, 1), scores_of(similarity, 2))
    assert_close(scores_of(similarity, 1), scores_of(mixture_of_logits().eval(), 1))


def test_the_gates_of_an_item_see_all_of_it() -> None:
    """Dropout applies only to the input of its components."""
    similarity, vectors = mixture_of_logits(item_dropout=0.5), normal(20, WIDTH)
    first, second = (similarity.mixture.side(similarity.item(vectors)) for _ in range(2))
    assert torch.equal(first.gate, second.gate) and (first.components != second.components).any()


def test_the_share_of_dropped_gates_is_the_stated_one() -> None:
    mixture = mixture_of_logits(gate_dropout=0.25)
    shares = mixture.mixture.gates(
        mixture.mixture.side(mixture.query(normal(400, WIDTH))),
        mixture.mixture.side(mixture.item(normal(400, WIDTH))[:, None]),
    )
    assert (shares == 0).double().mean().item() == pytest.approx(0.25, abs=0.03)


def test_the_extra_loss_is_the_imbalance_of_the_answers() -> None:
    similarity, states, vectors = mixture_of_logits(balance=0.3).eval(), normal(7, WIDTH), normal(7, WIDTH, seed=2)
    queries, answers = similarity.query(states), similarity.item(vectors)
    extra = similarity.extra_loss(queries, answers)
    assert extra is not None
    shares = []
    for query, answer in zip(queries, answers, strict=True):
        sides = similarity.mixture.side(query[None]), similarity.mixture.side(answer[None, None])
        shares.append(similarity.mixture.gates(*sides)[0, 0])
    assert_close(extra, 0.3 * imbalance(torch.stack(shares)))
    assert mixture_of_logits(balance=0.0).extra_loss(queries, answers) is None
    assert Dot().extra_loss(states, vectors) is None


def test_a_step_against_the_imbalance_lowers_it() -> None:
    similarity, states, vectors = mixture_of_logits(balance=1.0), normal(30, WIDTH), normal(30, WIDTH, seed=2)
    losses: list[float] = []
    for _ in range(2):
        extra = similarity.extra_loss(similarity.query(states), similarity.item(vectors))
        assert extra is not None
        losses.append(extra.item())
        gradients = torch.autograd.grad(extra, list(similarity.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(similarity.parameters(), gradients, strict=True):
                weight.sub_(gradient, alpha=0.01)
    assert losses[1] < losses[0]


# --- in a model ---------------------------------------------------------------------------------------------------


def shape_of(**changed: Any) -> Any:
    small = {
        "similarity__query_parts": 3,
        "similarity__item_parts": 2,
        "similarity__part_width": 4,
        "similarity__query_hidden": 6,
        "similarity__gate_hidden": 5,
    }
    plain = {"kind": "sasrec", "width": 8, "depth": 1, "length": 12, "similarity": "mol"}
    return model_settings(**{**plain, **small, **changed})


def test_settings_say_which_similarity() -> None:
    assert isinstance(model_settings().similarity.build(64), Dot)
    cosine = model_settings(similarity="cosine").similarity.build(64)
    assert isinstance(cosine, Dot) and cosine.normal
    similarity = shape_of(
        similarity__temperature=0.3,
        similarity__item_dropout=0.25,
        similarity__gate_dropout=0.5,
        similarity__balance=0.7,
    ).similarity.build(10)
    assert isinstance(similarity, MixtureOfLogits)
    assert (similarity.temperature, similarity.balance) == (0.3, 0.7)
    assert (similarity.drop_item.dropped, similarity.mixture.drop.dropped) == (64, 128)
    assert (similarity.mixture.query_parts, similarity.mixture.item_parts, similarity.mixture.part_width) == (3, 2, 4)
    assert {name: tuple(weight.shape) for name, weight in similarity.named_parameters()} == {
        "mixture.gate.0.weight": (5, 6),
        "mixture.gate.0.bias": (5,),
        "mixture.gate.2.weight": (6, 5),
        "mixture.gate.2.bias": (6,),
        "query_tower.inner.weight": (12, 10),
        "query_tower.inner.bias": (12,),
        "query_tower.outer.weight": (12, 6),
        "query_tower.outer.bias": (12,),
        "item_tower.weight": (8, 10),
        "item_tower.bias": (8,),
        "query_gate.0.weight": (5, 10),
        "query_gate.0.bias": (5,),
        "query_gate.2.weight": (6, 5),
        "item_gate.0.weight": (5, 10),
        "item_gate.0.bias": (5,),
        "item_gate.2.weight": (6, 5),
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"similarity__query_parts": 0},
        {"similarity__item_parts": 0},
        {"similarity__part_width": 0},
        {"similarity__query_hidden": -1},
        {"similarity__gate_hidden": -1},
        {"similarity__temperature": 0.0},
        {"similarity__item_dropout": 1.0},
        {"similarity__gate_dropout": -0.1},
        {"similarity__balance": -1.0},
        {"similarity": "dot", "similarity__balance": 0.5, "similarity__query_parts": 8},
    ],
    ids=str,
)
def test_impossible_settings_are_refused_by_name(changed: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"model\.similarity\.\w+: expected|There is no key"):
        shape_of(**changed)


def test_weights_are_initialised_from_the_generator() -> None:
    """Xavier-normal, biases zero, whatever the global state."""
    similarity = built(64, query_hidden=256, part_width=64)
    xavier_init(similarity, torch.Generator().manual_seed(1))
    again = built(64, query_hidden=256, part_width=64)
    xavier_init(again, torch.Generator().manual_seed(1))
    for (name, one), other in zip(similarity.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.dim() == 2 or (one == 0).all(), name
    assert similarity.item_tower.weight.std().item() == pytest.approx(math.sqrt(2 / (64 + 128)), rel=0.05)


def test_a_model_scores_through_it(tmp_path: Path) -> None:
    model = build_model(shape_of(), 20, generator=torch.Generator().manual_seed(0)).eval()
    queries, items, some = model.head(normal(4, 8).float()), model.item_vectors(), torch.tensor([7, 0, 20, 7])
    similarity = model.similarity
    assert isinstance(similarity, MixtureOfLogits)
    assert_close(model.item_vectors(some), items[some], atol=1e-6)
    scores = model.score_all(queries)
    assert scores.shape == (4, 21) and scores.abs().max() <= 1 / similarity.temperature + 1e-4
    assert_close(similarity.own(queries, items[some].expand(4, -1, -1)), scores[:, some], atol=1e-4)
    save_model(model, shape_of(), tmp_path)
    assert torch.equal(load_model(tmp_path).score_all(queries), scores)


def test_a_mixture_alone_scores_as_the_whole_similarity() -> None:
    """An index needs only the items and the mixture, and no model."""
    similarity = mixture_of_logits().eval()
    alone = Mixture(query_parts=3, item_parts=2, part_width=4, gate_hidden=7).double().eval()
    alone.load_state_dict(similarity.mixture.state_dict())
    queries, items = similarity.query(normal(4, WIDTH)), similarity.item(normal(5, WIDTH))
    assert torch.equal(alone.score(alone.side(queries), alone.side(items)), similarity.score(queries, items))
