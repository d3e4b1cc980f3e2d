"""Mixture of logits: the formula, the gates, what learning drops and adds, and memory."""

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
    """In float64, nothing zero by accident."""
    made = built(WIDTH, **changed).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return made


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_close(found: Tensor, expected: Tensor | np.ndarray, atol: float = 1e-10) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=0, atol=atol)


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


def mapped(part: Any, x: np.ndarray) -> np.ndarray:
    """A linear map in numpy."""
    product: np.ndarray = x @ part.weight.detach().numpy().T
    return product if part.bias is None else np.asarray(product + part.bias.detach().numpy())


def opened(part: nn.Module, x: np.ndarray) -> np.ndarray:
    """A gate's linear maps in numpy, with a SiLU between two."""
    if isinstance(part, nn.Linear):
        return mapped(part, x)
    assert isinstance(part, nn.Sequential)
    return mapped(part[2], silu(mapped(part[0], x)))


def written_out(made: MixtureOfLogits, state: np.ndarray, vector: np.ndarray) -> float:
    """One pair's score, step by step from the words, in evaluation."""
    if isinstance(made.query_tower, nn.Linear):
        ours = mapped(made.query_tower, state)
    else:
        first, second = np.split(mapped(made.query_tower.inner, state), 2)
        ours = mapped(made.query_tower.outer, silu(first) * second)
    theirs = mapped(made.item_tower, vector)
    parts = made.mixture.part_width
    pair = np.array(
        [
            f @ g / np.linalg.norm(f) / np.linalg.norm(g) / made.temperature
            for g in theirs.reshape(-1, parts)
            for f in ours.reshape(-1, parts)
        ]
    )
    w = opened(made.query_gate, state) * opened(made.item_gate, vector) + opened(made.mixture.gate, pair)
    shares = np.exp(silu(w)) / np.exp(silu(w)).sum()
    return float(shares @ pair)


@pytest.mark.parametrize("query_hidden", [0, 5])
@pytest.mark.parametrize("gate_hidden", [0, 7])
def test_a_score_is_as_it_is_written(query_hidden: int, gate_hidden: int) -> None:
    made = mixture_of_logits(query_hidden=query_hidden, gate_hidden=gate_hidden).eval()
    states, vectors = normal(4, WIDTH), normal(5, WIDTH, seed=2)
    expected = [[written_out(made, state, vector) for vector in vectors.numpy()] for state in states.numpy()]
    assert_close(made.score(made.query(states), made.item(vectors)), np.array(expected))


@pytest.mark.parametrize("seed", range(3))
def test_one_component_each_is_the_cosine_whatever_the_gates(seed: int) -> None:
    """29.5: divided by the temperature. The towers leave everything as it is."""
    made = mixture_of_logits(seed=seed, query_parts=1, item_parts=1, part_width=WIDTH, query_hidden=0, temperature=0.2)
    assert isinstance(made.query_tower, nn.Linear)
    with torch.no_grad():
        for tower in (made.query_tower, made.item_tower):
            tower.weight.copy_(torch.eye(WIDTH))
            tower.bias.zero_()
    states, vectors = normal(4, WIDTH), normal(5, WIDTH, seed=2)
    expected = torch.cosine_similarity(states[:, None], vectors[None], dim=2) / 0.2
    assert_close(made.score(made.query(states), made.item(vectors)), expected)


# --- laws ---------------------------------------------------------------------------------------------------------


def test_components_have_length_one_and_nothing_is_not_made_longer() -> None:
    made = mixture_of_logits(temperature=0.25)
    ours = made.mixture.side(made.query(normal(4, WIDTH))).components
    theirs = made.mixture.side(made.item(normal(5, WIDTH))).components
    assert (ours.shape, theirs.shape) == ((4, 3, 4), (5, 2, 4))
    assert_close(ours.norm(dim=2), torch.full((4, 3), 4.0, dtype=torch.float64))
    assert_close(theirs.norm(dim=2), torch.ones(5, 2, dtype=torch.float64))
    with torch.no_grad():
        made.item_tower.bias.zero_()
    vectors = torch.zeros(1, WIDTH, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(made.score(made.query(normal(4, WIDTH)), made.item(vectors)).sum(), vectors)
    assert slope.isfinite().all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 4), st.integers(0, 5), st.integers(1, 30), st.integers(0, 2**32))
def test_tiles_change_nothing_and_own_items_are_scored_like_all(rows: int, columns: int, tile: int, seed: int) -> None:
    made = mixture_of_logits(seed=seed).eval()
    queries, items = made.query(normal(rows, WIDTH, seed=seed)), made.item(normal(columns, WIDTH, seed=seed + 1))
    whole = made.score(queries, items)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mol, "TILE_PAIRS", tile)
        patch.setattr(mol, "KEPT_PAIRS", 10)
        assert_close(made.score(queries, items), whole)
        assert_close(made.own(queries, items.expand(rows, *items.shape)), whole)
    assert whole.shape == (rows, columns)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_gradients_do_not_depend_on_tiles(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for tile, kept in ((1000, 1000), (4, 1000), (4, 0)):
        monkeypatch.setattr(mol, "TILE_PAIRS", tile)
        monkeypatch.setattr(mol, "KEPT_PAIRS", kept)
        made, states, vectors = (
            mixture_of_logits(),
            normal(5, WIDTH).requires_grad_(),
            normal(6, WIDTH).requires_grad_(),
        )
        queries, items = made.query(states), made.item(vectors)
        scores = made.own(queries, items.expand(5, -1, -1)) if own else made.score(queries, items)
        found.append(torch.autograd.grad(scores.square().sum(), [states, vectors, *made.parameters()]))
    for whole, *others in zip(*found, strict=True):
        for other in others:
            assert_close(whole, other, atol=1e-7)


class Asked(nn.Module):
    """Both sides and what is made of them in one call."""

    def __init__(self, made: MixtureOfLogits, what: str) -> None:
        super().__init__()
        self.made = made
        self.what = what

    def forward(self, states: Tensor, vectors: Tensor) -> Tensor:
        queries, items = self.made.query(states), self.made.item(vectors)
        if self.what == "shared":
            return self.made.score(queries, items)
        if self.what == "own":
            return self.made.own(queries, items[:, None].expand(-1, 2, -1))
        extra = self.made.extra_loss(queries, items)
        assert extra is not None
        return extra


@pytest.mark.parametrize("what", ["shared", "own", "extra"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("kept", [0, 1000])
def test_gradient_check(what: str, dropout: float, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the states, the vectors and every weight; what is dropped is the same each time."""
    monkeypatch.setattr(mol, "TILE_PAIRS", 2)
    monkeypatch.setattr(mol, "KEPT_PAIRS", kept)
    small: dict[str, Any] = {"query_parts": 2, "part_width": 2, "query_hidden": 2, "gate_hidden": 2, "balance": 1.0}
    asked = Asked(mixture_of_logits(**small, item_dropout=dropout, gate_dropout=dropout), what)
    names = [name for name, _ in asked.named_parameters()]

    def scores(states: Tensor, vectors: Tensor, *weights: Tensor) -> Tensor:
        set_generator(asked, torch.Generator().manual_seed(4))
        found: Tensor = torch.func.functional_call(asked, dict(zip(names, weights, strict=True)), (states, vectors))
        return found

    inputs = [normal(3, WIDTH), normal(3, WIDTH, seed=2), *(weight.detach().clone() for weight in asked.parameters())]
    assert torch.autograd.gradcheck(scores, [part.requires_grad_() for part in inputs], fast_mode=True)


class LargestMade(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers how many numbers the largest tensor made under it has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.numbers = max(self.numbers, made.numel())
        return made


@pytest.mark.parametrize("rows", [1, 8])
def test_a_large_catalogue_needs_bounded_memory(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gates of all pairs have 40,000 numbers or more; forwards and backwards 5,000 are made at a time."""
    monkeypatch.setattr(mol, "TILE_PAIRS", 50)
    monkeypatch.setattr(mol, "KEPT_PAIRS", 300)
    made = mixture_of_logits(gate_hidden=100)
    queries, items = made.query(normal(rows, WIDTH)).detach(), made.item(normal(400, WIDTH)).detach()
    with LargestMade() as largest:
        scores = made.score(queries, items.requires_grad_())
        torch.autograd.backward(scores.sum())
    assert scores.numel() == rows * 400
    assert largest.numbers <= max(50 * 100, items.numel())


# --- while learning -----------------------------------------------------------------------------------------------


def test_dropped_gates_count_nothing_and_the_others_add_up_to_one() -> None:
    openness, logits = normal(1000, 8), normal(1000, 8, seed=2)
    kept = normal(1000, 8, seed=3) > -0.5
    kept[0] = False
    shares = gates(openness, kept)
    assert (shares[~kept] == 0).all() and (shares[kept] > 0).all()
    assert_close(shares[1:].sum(1), torch.ones(999, dtype=torch.float64))
    plain = gates(openness)
    assert_close(shares[1] / shares[1].max(), plain[1] * kept[1] / (plain[1] * kept[1]).max())
    assert_close(mixed(logits, openness, kept), (shares * logits).sum(1))
    assert mixed(logits, openness, kept)[0] == 0, "where nothing is kept nothing is left"


def scores_of(made: MixtureOfLogits, seed: int) -> Tensor:
    set_generator(made, torch.Generator().manual_seed(seed))
    return made.score(made.query(normal(50, WIDTH)), made.item(normal(40, WIDTH, seed=2)))


@pytest.mark.parametrize("name", ["item_dropout", "gate_dropout"])
def test_dropout_draws_from_the_trainers_generator_and_only_while_training(name: str) -> None:
    changed: dict[str, Any] = {name: 0.3}
    made = mixture_of_logits(**changed)
    assert torch.equal(scores_of(made, 1), scores_of(made, 1))
    assert (scores_of(made, 1) != scores_of(made, 2)).any()
    made.eval()
    assert torch.equal(scores_of(made, 1), scores_of(made, 2))
    assert_close(scores_of(made, 1), scores_of(mixture_of_logits().eval(), 1))


def test_the_gates_of_an_item_see_all_of_it() -> None:
    """Only what its components are made of is dropped."""
    made, vectors = mixture_of_logits(item_dropout=0.5), normal(20, WIDTH)
    first, second = (made.mixture.side(made.item(vectors)) for _ in range(2))
    assert torch.equal(first.gate, second.gate) and (first.components != second.components).any()


def test_the_share_of_dropped_gates_is_the_one_asked_for() -> None:
    made = mixture_of_logits(gate_dropout=0.25)
    shares = made.mixture.gates(
        made.mixture.side(made.query(normal(400, WIDTH))), made.mixture.side(made.item(normal(400, WIDTH))[:, None])
    )
    assert (shares == 0).double().mean().item() == pytest.approx(0.25, abs=0.03)


def test_what_learning_adds_is_the_answers_imbalance() -> None:
    made, states, vectors = mixture_of_logits(balance=0.3).eval(), normal(7, WIDTH), normal(7, WIDTH, seed=2)
    queries, answers = made.query(states), made.item(vectors)
    extra = made.extra_loss(queries, answers)
    assert extra is not None
    shares = []
    for query, answer in zip(queries, answers, strict=True):
        sides = made.mixture.side(query[None]), made.mixture.side(answer[None, None])
        shares.append(made.mixture.gates(*sides)[0, 0])
    assert_close(extra, 0.3 * imbalance(torch.stack(shares)))
    assert mixture_of_logits(balance=0.0).extra_loss(queries, answers) is None
    assert Dot().extra_loss(states, vectors) is None


def test_a_step_against_the_imbalance_lowers_it() -> None:
    made, states, vectors = mixture_of_logits(balance=1.0), normal(30, WIDTH), normal(30, WIDTH, seed=2)
    found: list[float] = []
    for _ in range(2):
        extra = made.extra_loss(made.query(states), made.item(vectors))
        assert extra is not None
        found.append(extra.item())
        slopes = torch.autograd.grad(extra, list(made.parameters()))
        with torch.no_grad():
            for weight, slope in zip(made.parameters(), slopes, strict=True):
                weight.sub_(slope, alpha=0.01)
    assert found[1] < found[0]


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
    made = shape_of(
        similarity__temperature=0.3,
        similarity__item_dropout=0.25,
        similarity__gate_dropout=0.5,
        similarity__balance=0.7,
    ).similarity.build(10)
    assert isinstance(made, MixtureOfLogits)
    assert (made.temperature, made.balance) == (0.3, 0.7)
    assert (made.drop_item.dropped, made.mixture.drop.dropped) == (64, 128)
    assert (made.mixture.query_parts, made.mixture.item_parts, made.mixture.part_width) == (3, 2, 4)
    assert {name: tuple(weight.shape) for name, weight in made.named_parameters()} == {
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
def test_settings_that_cannot_be_are_refused_by_name(changed: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"model\.similarity\.\w+: expected|There is no key"):
        shape_of(**changed)


def test_weights_start_from_the_generator() -> None:
    """Xavier-normal, biases zero, whatever the global state."""
    made = built(64, query_hidden=256, part_width=64)
    xavier_init(made, torch.Generator().manual_seed(1))
    again = built(64, query_hidden=256, part_width=64)
    xavier_init(again, torch.Generator().manual_seed(1))
    for (name, one), other in zip(made.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.dim() == 2 or (one == 0).all(), name
    assert made.item_tower.weight.std().item() == pytest.approx(math.sqrt(2 / (64 + 128)), rel=0.05)


def test_a_model_scores_through_it(tmp_path: Path) -> None:
    model = build_model(shape_of(), 20, generator=torch.Generator().manual_seed(0)).eval()
    queries, items, some = model.head(normal(4, 8).float()), model.item_vectors(), torch.tensor([7, 0, 20, 7])
    made = model.similarity
    assert isinstance(made, MixtureOfLogits)
    assert_close(model.item_vectors(some), items[some], atol=1e-6)
    scores = model.score_all(queries)
    assert scores.shape == (4, 21) and scores.abs().max() <= 1 / made.temperature + 1e-4
    assert_close(made.own(queries, items[some].expand(4, -1, -1)), scores[:, some], atol=1e-4)
    save_model(model, shape_of(), tmp_path)
    assert torch.equal(load_model(tmp_path).score_all(queries), scores)


def test_a_mixture_alone_scores_what_the_whole_scores() -> None:
    """So that an index needs the items and this, and no model."""
    made = mixture_of_logits().eval()
    alone = Mixture(query_parts=3, item_parts=2, part_width=4, gate_hidden=7).double().eval()
    alone.load_state_dict(made.mixture.state_dict())
    queries, items = made.query(normal(4, WIDTH)), made.item(normal(5, WIDTH))
    assert torch.equal(alone.score(alone.side(queries), alone.side(items)), made.score(queries, items))
