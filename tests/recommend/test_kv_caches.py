"""Who is asked about again is remembered, in bounded memory, and answered as if nobody were."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from segue.data.batch import Batch, newest
from segue.data.vocabulary import Vocabulary
from segue.index.exact import ExactIndex
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.recommend import kv_caches as kv_caches_module
from segue.recommend.history import History
from segue.recommend.kv_caches import LEAST_EVENTS, KVCaches
from segue.recommend.recommender import Recommender
from segue.recommend.rules import Rules

N_ITEMS = 40
PLENTY = 10**8


def model_of(**changed: Any) -> SequenceModel:
    numbers: dict[str, Any] = {"builder": "hstu", "width": 8, "depth": 2, "length": 32, "positions": "oldest"}
    generator = torch.Generator().manual_seed(1)
    return build_model(ModelSettings(**(numbers | changed)), N_ITEMS, generator=generator).eval()


def history(user: int, events: int) -> Batch:
    rng = np.random.default_rng(user)
    items = rng.integers(1, N_ITEMS + 1, 300)[:events]
    return Batch(items=items, times=np.cumsum(items * 1000), lengths=np.array([events]), query_times=np.array([10**7]))


def joined(*users: Batch) -> Batch:
    return Batch(
        items=np.concatenate([user.items for user in users]),
        times=np.concatenate([user.times for user in users]),
        lengths=np.concatenate([user.lengths for user in users]),
        query_times=np.concatenate([user.query_times for user in users if user.query_times is not None]),
    )


def asked_about(memories: KVCaches, *users: tuple[str | None, int]) -> None:
    """Ask about users by name, each with so many events of its own, and see that the questions are right."""
    model = memories._model
    windows = newest(joined(*(history(len(name or ""), events) for name, events in users)), 32, model.window_step)
    with torch.inference_mode():
        expected = model.query(tensors(windows))
    found = memories.queries(windows, [name for name, _ in users])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_from_the_second_question_on_only_what_is_new_is_encoded() -> None:
    memories = KVCaches(model_of(), most_bytes=PLENTY)
    for events, counts in ((20, (0, 1)), (20, (0, 1)), (21, (1, 0)), (21, (1, 0)), (23, (1, 0)), (32, (0, 1))):
        asked_about(memories, ("anna", events))
        assert memories.counted() == counts, events
    asked_about(memories, ("anna", 33))  # the window moves on: encoded whole, and remembered
    asked_about(memories, ("anna", 34))
    asked_about(memories, ("anna", 30))  # events were deleted
    asked_about(memories, ("anna", 31))
    assert memories.counted() == (2, 2)
    assert memories.users == ["anna"]


def test_users_with_and_without_a_memory_are_asked_about_together() -> None:
    memories = KVCaches(model_of(), most_bytes=PLENTY)
    for events in range(18, 40):
        asked_about(memories, ("bo", events), (None, 9), ("cleo", 30), ("x" * events, 20), ("bo", events))
    assert memories.users == ["cleo", "bo"]
    extended, whole = memories.counted()
    assert (extended + whole, extended) == (22 * 5, 20 + 2 * 20)


def test_who_is_asked_about_once_in_a_while_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_caches_module, "RECENT", 3)
    memories = KVCaches(model_of(), most_bytes=PLENTY)
    for name in ("a", "bb", "ccc", "dddd") * 3:
        asked_about(memories, (name, 20))
    assert memories.users == [] and memories.bytes == 0
    asked_about(memories, ("ccc", 20))
    assert memories.users == ["ccc"]


def test_short_histories_are_not_worth_it() -> None:
    memories = KVCaches(model_of(), most_bytes=PLENTY)
    for events in (LEAST_EVENTS - 2, LEAST_EVENTS - 1, LEAST_EVENTS - 1):
        asked_about(memories, ("anna", events))
    assert memories.users == []
    for events in (LEAST_EVENTS, LEAST_EVENTS):
        asked_about(memories, ("anna", events))
    assert memories.users == ["anna"]


def test_memory_is_bounded_and_those_used_longest_ago_go_first() -> None:
    memories = KVCaches(model_of(), most_bytes=PLENTY)
    for _ in range(2):
        asked_about(memories, ("anna", 20))
    one = memories.bytes
    assert one > 2 * 2 * 8 * 32 * 4, "blocks, keys and values, width, room"
    memories = KVCaches(model_of(), most_bytes=int(2.9 * one))
    for name in ("a", "bb", "ccc"):
        for _ in range(2):
            asked_about(memories, (name, 20))
            assert memories.bytes <= 2.9 * one
    assert memories.users == ["bb", "ccc"]
    asked_about(memories, ("bb", 21))
    for _ in range(2):
        asked_about(memories, ("dddd", 20))
    assert memories.users == ["bb", "dddd"]
    for user in memories.users:
        memories.forget(user)
    assert memories.bytes == 0


def test_a_memory_too_large_for_the_bound_is_not_kept() -> None:
    memories = KVCaches(model_of(), most_bytes=100)
    for events in (20, 21, 22):
        asked_about(memories, ("anna", events))
    assert (memories.users, memories.bytes, memories.counted()) == ([], 0, (0, 3))


@pytest.mark.parametrize(
    ("most_bytes", "changed"),
    [(0, {}), (PLENTY, {"positions": "newest"}), (PLENTY, {"builder": "bert4rec", "length": 33})],
    ids=["no memory", "counted from the newest", "looking both ways"],
)
def test_what_cannot_or_must_not_be_remembered_is_encoded_whole(most_bytes: int, changed: dict[str, Any]) -> None:
    memories = KVCaches(model_of(**changed), most_bytes=most_bytes)
    for events in (20, 21, 22):
        asked_about(memories, ("anna", events))
    assert (memories.users, memories.bytes, memories.counted()) == ([], 0, (0, 3))


def test_of_who_is_forgotten_nothing_is_left() -> None:
    memories = KVCaches(model_of(), most_bytes=PLENTY)
    for name in ("anna", "anna", "bo", "bo"):
        asked_about(memories, (name, 20))
    memories.forget("anna")
    memories.forget("nobody")
    assert memories.users == ["bo"]
    asked_about(memories, ("anna", 20))
    assert memories.users == ["bo"], "it was the first question about her"


def test_answers_are_those_of_a_recommender_that_remembers_nothing() -> None:
    """Over steps of the window, with rules, unknown items and users without any event."""
    model = model_of(target_time=True)
    ids = [f"i{number}" for number in range(N_ITEMS)]
    index = ExactIndex.build(model.item_vectors())
    recommender = Recommender(model, index, Vocabulary(pl.DataFrame({"id": ids, "count": [1] * N_ITEMS})))
    memories = KVCaches(model, most_bytes=PLENTY)
    rng = np.random.default_rng(3)
    items = [*rng.choice([*ids, "unknown"], 90)]
    rules = [Rules(k=3, keep_seen=True), Rules(k=5), Rules(k=2, only=np.array([3, 4, 5]), keep_seen=True)]
    for events in range(17, 90):
        histories = [
            History(items[begin:events], [time * 10**9 for time in range(begin, events)], [None] * (events - begin))
            for begin in (0, 1, events)
        ]
        query_times = np.full(3, events * 1000 + int(rng.integers(0, 10**6)))
        users: list[str | None] = ["anna", "bo", "nobody"]
        remembered = recommender.answer(histories, rules, query_times=query_times, users=users, caches=memories)
        plain = recommender.answer(histories, rules, query_times=query_times)
        assert [answer.ids for answer in remembered] == [answer.ids for answer in plain]
        assert [answer.unknown for answer in remembered] == [answer.unknown for answer in plain]
        scores = [[item.score for answer in answers for item in answer.items] for answers in (remembered, plain)]
        assert scores[0] == pytest.approx(scores[1], rel=0, abs=1e-5)
    extended, whole = memories.counted()
    assert extended > 5 * whole
