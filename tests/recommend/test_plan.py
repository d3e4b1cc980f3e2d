"""Plans: the laws of the search with a model whose chances are known by hand, and the rules that plans keep."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import msgspec
import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from settings_tables import model_settings
from torch import Tensor, nn

from segue.data.vocabulary import Vocabulary
from segue.errors import FolderError, InputError
from segue.index.exact import ExactIndex
from segue.layers.packed import PackedBatch
from segue.models.build import build_model
from segue.models.sequence import SequenceModel
from segue.recommend import plan as plan_module
from segue.recommend.answer import BEAM
from segue.recommend.plan import Planner
from segue.recommend.recommender import Recommender, Seen

LETTERS = list("abcde")


class Pairs(nn.Module):
    """The score of an item depends on the two before it, by a table; a question is the number of such a pair."""

    window_step = 1
    timed, input_kinds = False, ()
    length = 3

    def __init__(self, n_items: int, seed: int = 0) -> None:
        super().__init__()
        self.size = n_items + 1
        self.table = 2 * torch.randn(self.size**2, self.size, generator=torch.Generator().manual_seed(seed))
        self.asked: list[list[int] | None] = []
        self.steps = 0

    def begin_plan(self, batch: PackedBatch) -> tuple[Tensor, Any]:
        self.asked.append(None if batch.query_times is None else batch.query_times.tolist())
        newest = batch.items[batch.last]
        before = torch.where(batch.lengths > 1, batch.items[batch.last - 1], 0)
        return self._questions(before, newest), newest

    def extend_plan(self, decoding: Any, rows: Tensor, items: Tensor) -> tuple[Tensor, Any]:
        self.steps += 1
        return self._questions(decoding[rows], items), items

    def _questions(self, before: Tensor, newest: Tensor) -> Tensor:
        return nn.functional.one_hot(before * self.size + newest, self.size**2).float()

    def score_all(self, queries: Tensor) -> Tensor:
        return queries @ self.table

    def answerable(self, counts: np.ndarray) -> np.ndarray:
        return counts > 0

    def query(self, batch: PackedBatch) -> Tensor:
        return self.begin_plan(batch)[0]

    def item_vectors(self) -> Tensor:
        return self.table.T


def planning(
    *, seed: int = 0, counts: list[int] | None = None, seen: Seen = "excluded", model: nn.Module | None = None
) -> Recommender:
    model = model or Pairs(len(LETTERS), seed)
    counts = counts or [5, 4, 3, 2, 1]
    table = pl.DataFrame({"id": LETTERS, "count": counts, "title": [f"Title {name}" for name in LETTERS]})
    known = cast(SequenceModel, model)
    index = ExactIndex.build(known.item_vectors(), candidates=np.array([0, *counts]) > 0)
    return Recommender(known, index, Vocabulary(table), seen=seen)


def chance(recommender: Recommender, history: str, plan: tuple[str, ...]) -> float:
    """The log of a plan's chance, step by step, by the softmax's own formula."""
    model, total = cast(Pairs, recommender.model), 0.0
    known = [0, *(LETTERS.index(letter) + 1 for letter in (*history, *plan))]
    for place in range(len(known) - len(plan), len(known)):
        scores = model.table[known[place - 2] * model.size + known[place - 1]].double().numpy()
        total += scores[known[place]] - math.log(np.exp(scores[recommender.answerable]).sum())
    return total


# --- the search ---------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(seed=st.integers(0, 500), n=st.integers(1, 3), repeats=st.booleans(), seen=st.sampled_from(["excluded", "kept"]))
def test_a_beam_over_everything_is_an_exhaustive_search(seed: int, n: int, repeats: bool, seen: Seen) -> None:
    recommender = planning(seed=seed, seen=seen)
    free = [letter for letter in LETTERS if seen == "kept" or letter not in "ab"]
    every = list(itertools.product(free, repeat=n) if repeats else itertools.permutations(free, min(n, len(free))))
    best = max(every, key=lambda plan: chance(recommender, "ab", plan))
    found = recommender.plan(["a", "b"], n, beam=len(LETTERS) ** n, repeats=repeats)
    assert found.ids == list(best)
    assert found.score == pytest.approx(chance(recommender, "ab", best), abs=1e-5)
    assert found.score == pytest.approx(sum(step.log_probability for step in found.items))


@settings(max_examples=30)
@given(seed=st.integers(0, 500), repeats=st.booleans())
def test_a_beam_of_one_takes_the_likeliest_item_each_time(seed: int, repeats: bool) -> None:
    recommender = planning(seed=seed, seen="kept")
    plan: tuple[str, ...] = ()
    for _ in range(4):
        free = [letter for letter in LETTERS if repeats or letter not in plan]
        plan = max(((*plan, letter) for letter in free), key=lambda one: chance(recommender, "c", one))
    found = recommender.plan(["c"], 4, beam=1, repeats=repeats)
    assert found.ids == list(plan)
    for place, step in enumerate(found.items):
        rise = chance(recommender, "c", plan[: place + 1]) - chance(recommender, "c", plan[:place])
        assert step.log_probability == pytest.approx(rise, abs=1e-5)


def test_a_wider_beam_finds_what_a_greedy_one_walks_past() -> None:
    """In most worlds of five items; and it is never worse where it sees everything."""
    better = 0
    for seed in range(40):
        recommender = planning(seed=seed, seen="kept")
        greedy, all_ = (recommender.plan(["a"], 3, beam=beam).score for beam in (1, 125))
        assert all_ >= greedy - 1e-9
        better += all_ > greedy + 1e-6
    assert better > 5


def test_the_first_of_one_is_the_best_answer() -> None:
    recommender = planning(seed=4)
    for history in ("a", "ab", "edc"):
        plan, answer = recommender.plan(list(history), 1, beam=1), recommender.recommend(list(history), 1)
        assert plan.ids == answer.ids


def test_of_equally_likely_plans_the_lower_numbers_come_first() -> None:
    model = Pairs(5)
    model.table.zero_()
    recommender = planning(model=model, seen="kept")
    found = recommender.plan(["e"], 3, beam=4)
    assert found.ids == ["a", "b", "c"]
    assert [step.log_probability for step in found.items] == pytest.approx([-math.log(5)] * 3)


# --- rules --------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    seed=st.integers(0, 100),
    beam=st.integers(1, 12),
    n=st.integers(1, 7),
    exclude=st.sets(st.sampled_from(LETTERS)),
    only=st.none() | st.sets(st.sampled_from(LETTERS)),
    keep_seen=st.none() | st.booleans(),
    repeats=st.booleans(),
)
def test_a_plan_keeps_the_rules_and_is_as_long_as_they_let_it(
    seed: int,
    beam: int,
    n: int,
    exclude: set[str],
    only: set[str] | None,
    keep_seen: bool | None,
    repeats: bool,
) -> None:
    recommender = planning(seed=seed, counts=[5, 4, 3, 2, 0])
    rules: dict[str, Any] = {"exclude": sorted(exclude), "only": None if only is None else sorted(only)}
    found = recommender.plan(["a", "b"], n, beam=beam, keep_seen=keep_seen, repeats=repeats, **rules)
    free = set("abcd") - exclude - (set() if keep_seen else set("ab"))
    free &= free if only is None else only
    assert set(found.ids) <= free
    assert len(found.ids) == ((n if free else 0) if repeats else min(n, len(free)))
    assert repeats or len(set(found.ids)) == len(found.ids)
    assert all(math.isfinite(step.log_probability) and step.log_probability <= 0 for step in found.items)


def test_histories_are_planned_for_together_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    recommender = planning(seed=2)
    histories = [["a", "b"], [], ["zzz"], ["c"], ["a", "b", "c", "d"], ["a", "b", "c", "d", "e"]]
    alone = [recommender.plan(history, 3, beam=3) for history in histories]
    assert recommender.plan_many(histories, 3, beam=3) == alone
    assert [len(plan.items) for plan in alone] == [3, 3, 3, 3, 1, 0]
    monkeypatch.setattr(plan_module, "MOST_PROBABILITIES", 40)  # two histories at a time
    assert recommender.plan_many(histories, 3, beam=3) == alone
    assert recommender.plan_many([]) == []


def test_json_shape() -> None:
    model = Pairs(5)
    model.table.zero_()
    found = planning(model=model).plan(["a", "zzz"], 2)
    assert msgspec.json.decode(msgspec.json.encode(found)) == {
        "items": [
            {"id": "b", "title": "Title b", "log_probability": pytest.approx(-math.log(5))},
            {"id": "c", "title": "Title c", "log_probability": pytest.approx(-math.log(5))},
        ],
        "score": pytest.approx(-2 * math.log(5)),
        "unknown": ["zzz"],
        "fallback": None,
    }


@pytest.mark.parametrize("history", [[], ["zzz", "zzz", "q"]])
def test_nothing_known_gets_the_most_frequent_items(history: list[str]) -> None:
    """Each as likely as its share of training: 9, 4 and 2 of 16 events."""
    found = planning(counts=[1, 9, 2, 0, 4]).plan(history, 3)
    assert (found.ids, found.fallback) == (["b", "e", "c"], "popularity")
    assert [math.exp(step.log_probability) for step in found.items] == pytest.approx([9 / 16, 4 / 16, 2 / 16])
    assert found.unknown == list(dict.fromkeys(history))
    rules: dict[str, Any] = {"exclude": ["b"], "only": ["b", "c"]}
    assert planning(counts=[1, 9, 2, 0, 4]).plan(history, 3, **rules).ids == ["c"]


def test_the_moment_of_the_question_reaches_the_model() -> None:
    recommender = planning()
    recommender.plan(["a"], 1, now=1_000_000)
    recommender.plan(["a"], 1)
    assert cast(Pairs, recommender.model).asked == [[1_000_000], None]


def test_no_step_is_taken_that_nobody_needs() -> None:
    recommender = planning()
    recommender.plan(["a"], 3)
    assert cast(Pairs, recommender.model).steps == 2
    assert BEAM > 1
    recommender = planning()
    found = recommender.plan(["a"], 10**9)
    assert sorted(found.ids) == list("bcde") and cast(Pairs, recommender.model).steps == 3, "no more items are left"
    assert recommender.plan(["a"], 10**9, only=["a"]).ids == [], "nor is any here"


def test_a_beam_that_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(InputError, match=r"^A beam of 12,800,001 over 5 items .* at most 12,800,000\.$"):
        planning().plan(["a"], 2, beam=12_800_001)
    assert planning().plan(["a"], 2, beam=1000).ids


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "3"])
@pytest.mark.parametrize("name", ["n", "beam"])
def test_what_is_no_number_of_items_or_plans_is_refused(name: str, wrong: Any) -> None:
    with pytest.raises(InputError, match=rf"^{name}, .* at least 1, got {wrong!r}"):
        planning().plan(["a"], **{name: wrong})


def test_models_that_cannot_plan_say_so() -> None:
    model = build_model(model_settings(width=8, depth=1, length=5), 5, generator=torch.Generator())
    assert not isinstance(model, Planner)
    with pytest.raises(InputError, match=r"cannot plan.*recipe seq2seq"):
        planning(model=model).plan(["a"])


def test_a_damaged_model_is_refused() -> None:
    recommender = planning()
    cast(Pairs, recommender.model).table[:, 3] = math.nan
    with pytest.raises(FolderError, match="damaged"):
        recommender.plan(["a"], 2)
