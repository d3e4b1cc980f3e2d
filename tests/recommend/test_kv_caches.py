"""KV caches of repeatedly requested users: bounded memory, and the same answers as without a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from settings_tables import model_settings

from segue.data.batch import Batch, newest
from segue.data.vocabulary import Vocabulary
from segue.index.exact import ExactIndex
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.sequence import SequenceModel
from segue.recommend import kv_caches as kv_caches_module
from segue.recommend.history import History
from segue.recommend.kv_caches import LEAST_EVENTS, KVCaches
from segue.recommend.recommender import Recommender
from segue.recommend.rules import Rules

N_ITEMS = 40
PLENTY = 10**8


def model_of(**options: Any) -> SequenceModel:
    numbers: dict[str, Any] = {"kind": "hstu", "width": 8, "depth": 2, "length": 32, "positions": "oldest"}
    generator = torch.Generator().manual_seed(1)
    return build_model(model_settings(**(numbers | options)), N_ITEMS, generator=generator).eval()


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


def request(caches: KVCaches, *users: tuple[str | None, int]) -> None:
    """Request users by name, each with a number of events, and check the query vectors."""
    model = caches._model
    windows = newest(joined(*(history(len(name or ""), events) for name, events in users)), 32, model.window_step)
    with torch.inference_mode():
        expected = model.query(tensors(windows))
    queries = caches.queries(windows, [name for name, _ in users])
    torch.testing.assert_close(queries, expected, rtol=0, atol=1e-5)


def test_from_the_second_request_on_only_new_events_are_encoded() -> None:
    caches = KVCaches(model_of(), most_bytes=PLENTY)
    for events, counts in ((20, (0, 1)), (20, (0, 1)), (21, (1, 0)), (21, (1, 0)), (23, (1, 0)), (32, (0, 1))):
        request(caches, ("anna", events))
        assert caches.pop_counts() == counts, events
    request(caches, ("anna", 33))  # the window moves on: encoded whole, and cached
    request(caches, ("anna", 34))
    request(caches, ("anna", 30))  # events were deleted
    request(caches, ("anna", 31))
    assert caches.pop_counts() == (2, 2)
    assert caches.users == ["anna"]


def test_users_with_and_without_a_cache_are_requested_together() -> None:
    caches = KVCaches(model_of(), most_bytes=PLENTY)
    for events in range(18, 40):
        request(caches, ("bo", events), (None, 9), ("cleo", 30), ("x" * events, 20), ("bo", events))
    assert caches.users == ["cleo", "bo"]
    extended, whole = caches.pop_counts()
    assert (extended + whole, extended) == (22 * 5, 20 + 2 * 20)


def test_users_requested_rarely_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_caches_module, "RECENT", 3)
    caches = KVCaches(model_of(), most_bytes=PLENTY)
    for name in ("a", "bb", "ccc", "dddd") * 3:
        request(caches, (name, 20))
    assert caches.users == [] and caches.bytes == 0
    request(caches, ("ccc", 20))
    assert caches.users == ["ccc"]


def test_short_histories_are_not_cached() -> None:
    caches = KVCaches(model_of(), most_bytes=PLENTY)
    for events in (LEAST_EVENTS - 2, LEAST_EVENTS - 1, LEAST_EVENTS - 1):
        request(caches, ("anna", events))
    assert caches.users == []
    for events in (LEAST_EVENTS, LEAST_EVENTS):
        request(caches, ("anna", events))
    assert caches.users == ["anna"]


def test_memory_is_bounded_and_the_least_recently_used_are_dropped_first() -> None:
    caches = KVCaches(model_of(), most_bytes=PLENTY)
    for _ in range(2):
        request(caches, ("anna", 20))
    one = caches.bytes
    assert one > 2 * 2 * 8 * 32 * 4, "blocks, keys and values, width, room"
    caches = KVCaches(model_of(), most_bytes=int(2.9 * one))
    for name in ("a", "bb", "ccc"):
        for _ in range(2):
            request(caches, (name, 20))
            assert caches.bytes <= 2.9 * one
    assert caches.users == ["bb", "ccc"]
    request(caches, ("bb", 21))
    for _ in range(2):
        request(caches, ("dddd", 20))
    assert caches.users == ["bb", "dddd"]
    for user in caches.users:
        caches.drop(user)
    assert caches.bytes == 0


def test_a_cache_larger_than_the_bound_is_dropped() -> None:
    caches = KVCaches(model_of(), most_bytes=100)
    for events in (20, 21, 22):
        request(caches, ("anna", events))
    assert (caches.users, caches.bytes, caches.pop_counts()) == ([], 0, (0, 3))


@pytest.mark.parametrize(
    ("most_bytes", "options"),
    [(0, {}), (PLENTY, {"positions": "newest"}), (PLENTY, {"kind": "bert4rec", "length": 33})],
    ids=["no bytes", "counted from the newest", "bidirectional"],
)
def test_windows_that_cannot_be_cached_are_encoded_whole(most_bytes: int, options: dict[str, Any]) -> None:
    caches = KVCaches(model_of(**options), most_bytes=most_bytes)
    for events in (20, 21, 22):
        request(caches, ("anna", events))
    assert (caches.users, caches.bytes, caches.pop_counts()) == ([], 0, (0, 3))


def test_a_dropped_user_is_forgotten() -> None:
    caches = KVCaches(model_of(), most_bytes=PLENTY)
    for name in ("anna", "anna", "bo", "bo"):
        request(caches, (name, 20))
    caches.drop("anna")
    caches.drop("nobody")
    assert caches.users == ["bo"]
    request(caches, ("anna", 20))
    assert caches.users == ["bo"], "her first request"


def test_answers_are_those_without_a_cache() -> None:
    """Over steps of the window, with rules, unknown items and users without any event."""
    model = model_of(target_time=True)
    ids = [f"i{number}" for number in range(N_ITEMS)]
    index = ExactIndex.build(model.item_vectors())
    recommender = Recommender(model, index, Vocabulary(pl.DataFrame({"id": ids, "count": [1] * N_ITEMS})))
    caches = KVCaches(model, most_bytes=PLENTY)
    rng = np.random.default_rng(3)
    items = [*rng.choice([*ids, "unknown"], 90)]
    rules = [Rules(k=3, keep_seen=True), Rules(k=5), Rules(k=2, only=np.array([3, 4, 5]), keep_seen=True)]
    for events in range(17, 90):
        histories = [
            History(
                items=items[begin:events],
                times=[time * 10**9 for time in range(begin, events)],
                values=[None] * (events - begin),
                kinds=[None] * (events - begin),
            )
            for begin in (0, 1, events)
        ]
        query_times = np.full(3, events * 1000 + int(rng.integers(0, 10**6)))
        users: list[str | None] = ["anna", "bo", "nobody"]
        with_cache = recommender.answer(histories, rules, query_times=query_times, users=users, caches=caches)
        without_cache = recommender.answer(histories, rules, query_times=query_times)
        assert [answer.ids for answer in with_cache] == [answer.ids for answer in without_cache]
        assert [answer.unknown for answer in with_cache] == [answer.unknown for answer in without_cache]
        scores = [
            [item.score for answer in answers for item in answer.items] for answers in (with_cache, without_cache)
        ]
        assert scores[0] == pytest.approx(scores[1], rel=0, abs=1e-5)
    extended, whole = caches.pop_counts()
    assert extended > 5 * whole
