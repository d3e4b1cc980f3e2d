"""Plans: beam search with a model of known probabilities, and the rules of plans."""

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
    """A table of item scores by the two items before; a query is such a pair, one-hot."""

    window_step = 1
    timed, input_kinds = False, ()
    length = 3

    def __init__(self, n_items: int, seed: int = 0) -> None:
        super().__init__()
        self.size = n_items + 1
        self.table = 2 * torch.randn(self.size**2, self.size, generator=torch.Generator().manual_seed(seed))
        self.query_times: list[list[int] | None] = []
        self.steps = 0

    def begin_plan(self, batch: PackedBatch) -> tuple[Tensor, Any]:
        self.query_times.append(None if batch.query_times is None else batch.query_times.tolist())
        newest = batch.items[batch.last]
        before = torch.where(batch.lengths > 1, batch.items[batch.last - 1], 0)
        return self._queries(before, newest), newest

    def extend_plan(self, decoding: Any, rows: Tensor, items: Tensor) -> tuple[Tensor, Any]:
        self.steps += 1
        return self._queries(decoding[rows], items), items

    def _queries(self, before: Tensor, newest: Tensor) -> Tensor:
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
    sequence_model = cast(SequenceModel, model)
    index = ExactIndex.build(sequence_model.item_vectors(), candidates=np.array([0, *counts]) > 0)
    return Recommender(sequence_model, index, Vocabulary(table), seen=seen)


def plan_log_probability(recommender: Recommender, history: str, plan: tuple[str, ...]) -> float:
    """The log-probability of a plan: the sum over steps of log softmax."""
    model, total = cast(Pairs, recommender.model), 0.0
    numbers = [0, *(LETTERS.index(letter) + 1 for letter in (*history, *plan))]
    for position in range(len(numbers) - len(plan), len(numbers)):
        scores = model.table[numbers[position - 2] * model.size + numbers[position - 1]].double().numpy()
        total += scores[numbers[position]] - math.log(np.exp(scores[recommender.answerable]).sum())
    return total


# --- the search ---------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(seed=st.integers(0, 500), n=st.integers(1, 3), repeats=st.booleans(), seen=st.sampled_from(["excluded", "kept"]))
def test_a_beam_over_everything_is_an_exhaustive_search(seed: int, n: int, repeats: bool, seen: Seen) -> None:
    recommender = planning(seed=seed, seen=seen)
    allowed = [letter for letter in LETTERS if seen == "kept" or letter not in "ab"]
    plans = list(
        itertools.product(allowed, repeat=n) if repeats else itertools.permutations(allowed, min(n, len(allowed)))
    )
    best = max(plans, key=lambda plan: plan_log_probability(recommender, "ab", plan))
    output = recommender.plan(["a", "b"], n, beam=len(LETTERS) ** n, repeats=repeats)
    assert output.ids == list(best)
    assert output.score == pytest.approx(plan_log_probability(recommender, "ab", best), abs=1e-5)
    assert output.score == pytest.approx(sum(step.log_probability for step in output.items))


@settings(max_examples=30)
@given(seed=st.integers(0, 500), repeats=st.booleans())
def test_a_beam_of_one_is_greedy(seed: int, repeats: bool) -> None:
    recommender = planning(seed=seed, seen="kept")
    plan: tuple[str, ...] = ()
    for _ in range(4):
        allowed = [letter for letter in LETTERS if repeats or letter not in plan]
        plan = max(((*plan, letter) for letter in allowed), key=lambda one: plan_log_probability(recommender, "c", one))
    output = recommender.plan(["c"], 4, beam=1, repeats=repeats)
    assert output.ids == list(plan)
    for position, step in enumerate(output.items):
        rise = plan_log_probability(recommender, "c", plan[: position + 1]) - plan_log_probability(
            recommender, "c", plan[:position]
        )
        assert step.log_probability == pytest.approx(rise, abs=1e-5)


def test_a_full_beam_is_never_worse_than_greedy_and_often_better() -> None:
    """Over 40 random tables of five items."""
    improved = 0
    for seed in range(40):
        recommender = planning(seed=seed, seen="kept")
        greedy, full = (recommender.plan(["a"], 3, beam=beam).score for beam in (1, 125))
        assert full >= greedy - 1e-9
        improved += full > greedy + 1e-6
    assert improved > 5


def test_a_plan_of_one_item_is_the_best_answer() -> None:
    recommender = planning(seed=4)
    for history in ("a", "ab", "edc"):
        plan, answer = recommender.plan(list(history), 1, beam=1), recommender.recommend(list(history), 1)
        assert plan.ids == answer.ids


def test_of_equally_likely_plans_the_lower_numbers_come_first() -> None:
    model = Pairs(5)
    model.table.zero_()
    recommender = planning(model=model, seen="kept")
    output = recommender.plan(["e"], 3, beam=4)
    assert output.ids == ["a", "b", "c"]
    assert [step.log_probability for step in output.items] == pytest.approx([-math.log(5)] * 3)


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
def test_a_plan_obeys_the_rules_and_is_as_long_as_they_allow(
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
    output = recommender.plan(["a", "b"], n, beam=beam, keep_seen=keep_seen, repeats=repeats, **rules)
    allowed = set("abcd") - exclude - (set() if keep_seen else set("ab"))
    allowed &= allowed if only is None else only
    assert set(output.ids) <= allowed
    assert len(output.ids) == ((n if allowed else 0) if repeats else min(n, len(allowed)))
    assert repeats or len(set(output.ids)) == len(output.ids)
    assert all(math.isfinite(step.log_probability) and step.log_probability <= 0 for step in output.items)


def test_plan_many_equals_plan_of_each_history(monkeypatch: pytest.MonkeyPatch) -> None:
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
    output = planning(model=model).plan(["a", "zzz"], 2)
    assert msgspec.json.decode(msgspec.json.encode(output)) == {
        "items": [
            {"id": "b", "title": "Title b", "log_probability": pytest.approx(-math.log(5))},
            {"id": "c", "title": "Title c", "log_probability": pytest.approx(-math.log(5))},
        ],
        "score": pytest.approx(-2 * math.log(5)),
        "unknown": ["zzz"],
        "fallback": None,
    }


@pytest.mark.parametrize("history", [[], ["zzz", "zzz", "q"]])
def test_without_a_known_item_the_plan_is_by_popularity(history: list[str]) -> None:
    """Each probability is the item's share of training events: 9, 4 and 2 of 16."""
    output = planning(counts=[1, 9, 2, 0, 4]).plan(history, 3)
    assert (output.ids, output.fallback) == (["b", "e", "c"], "popularity")
    assert [math.exp(step.log_probability) for step in output.items] == pytest.approx([9 / 16, 4 / 16, 2 / 16])
    assert output.unknown == list(dict.fromkeys(history))
    rules: dict[str, Any] = {"exclude": ["b"], "only": ["b", "c"]}
    assert planning(counts=[1, 9, 2, 0, 4]).plan(history, 3, **rules).ids == ["c"]


def test_the_request_time_reaches_the_model() -> None:
    recommender = planning()
    recommender.plan(["a"], 1, now=1_000_000)
    recommender.plan(["a"], 1)
    assert cast(Pairs, recommender.model).query_times == [[1_000_000], None]


def test_the_decoder_takes_only_the_steps_of_the_plan() -> None:
    recommender = planning()
    recommender.plan(["a"], 3)
    assert cast(Pairs, recommender.model).steps == 2
    assert BEAM > 1
    recommender = planning()
    output = recommender.plan(["a"], 10**9)
    assert sorted(output.ids) == list("bcde") and cast(Pairs, recommender.model).steps == 3, "no item is left"
    assert recommender.plan(["a"], 10**9, only=["a"]).ids == [], "no item is allowed"


def test_a_beam_that_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(InputError, match=r"^A beam of 12,800,001 over 5 items .* at most 12,800,000\.$"):
        planning().plan(["a"], 2, beam=12_800_001)
    assert planning().plan(["a"], 2, beam=1000).ids


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "3"])
@pytest.mark.parametrize("name", ["n", "beam"])
def test_n_and_beam_must_be_whole_numbers_of_at_least_one(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^{name}, .* at least 1, got {value!r}"):
        planning().plan(["a"], **{name: value})


def test_models_without_plans_are_refused() -> None:
    model = build_model(model_settings(width=8, depth=1, length=5), 5, generator=torch.Generator())
    assert not isinstance(model, Planner)
    with pytest.raises(InputError, match=r"cannot plan.*recipe seq2seq"):
        planning(model=model).plan(["a"])


def test_a_damaged_model_is_refused() -> None:
    recommender = planning()
    cast(Pairs, recommender.model).table[:, 3] = math.nan
    with pytest.raises(FolderError, match="damaged"):
        recommender.plan(["a"], 2)
