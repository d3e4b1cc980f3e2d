"""Encoding only the new events of a window gives the same query as encoding all of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import N_ITEMS, model_of
from torch import Tensor

from segue.data.batch import Batch, newest, ragged_rows, window_begins
from segue.layers.packed import tensors
from segue.models.kv_cache import CAPACITY_STEP, MAX_NEW_TOKENS, IncrementalEncoder, KVCache, window_of
from segue.models.sequence import SequenceModel

SMALL_MIXTURE: dict[str, Any] = {
    "similarity": "mol",
    "similarity__query_parts": 2,
    "similarity__item_parts": 2,
    "similarity__part_width": 4,
    "similarity__query_hidden": 8,
    "similarity__gate_hidden": 8,
    "similarity__temperature": 1.0,  # a low one would make all differences larger
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sasrec": ("sasrec", {}),
    "sasrec, one head, untied": ("sasrec", {"heads": 1, "items__tied": False}),
    "sasrec, mixture of logits": ("sasrec", SMALL_MIXTURE),
    "transformer": ("transformer", {}),
    "transformer, post, bilinear, sinusoidal": (
        "transformer",
        {"norm": "post", "scores": "bilinear", "positions": "sinusoidal"},
    ),
    "transformer, rotary, combined": ("transformer", {"positions": "rotary", "inputs": "combined"}),
    "transformer, additive, buckets, one head": (
        "transformer",
        {"heads": 1, "scores": "additive", "positions": "buckets"},
    ),
    "esasrec": ("esasrec", {}),
    "esasrec, combined, layer norm": ("esasrec", {"inputs": "combined", "output": "layer-norm"}),
    "sasrec-meta, cosine": ("sasrec-meta", {"similarity": "cosine"}),
    "sasrec-meta, rated": ("sasrec-meta", {"inputs": "rated"}),
    "hstu": ("hstu", {}),
    "hstu, now": ("hstu", {"target_time": True, "similarity": "cosine"}),
    "hstu, now, one head": ("hstu", {"target_time": True, "heads": 1}),
    "hstu, now, rated": ("hstu", {"target_time": True, "inputs": "rated", "output": "l2"}),
    "hstu, combined": ("hstu", {"inputs": "combined"}),
    "hstu, combined, now": ("hstu", {"target_time": True, "inputs": "combined"}),
}

LONG = ("sasrec", "hstu, now")


def assert_alike(actual: np.ndarray, expected: Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(actual), expected, rtol=1e-5, atol=1e-5)


@cache
def case_of(name: str, length: int = 16) -> tuple[SequenceModel, IncrementalEncoder]:
    builder, changed = CASES[name]
    model = model_of(builder, length=length, **{"positions": "oldest", **changed})
    return model, IncrementalEncoder(model)


def history_of(events: int, seed: int = 0, *, values: bool = True) -> Batch:
    """The history of one user: gaps from none to weeks, some events without a value."""
    rng = np.random.default_rng(seed)
    stars = rng.integers(1, 6, events).astype(np.float32)
    times = np.cumsum(np.exp(rng.uniform(0, 14, events)).astype(np.int64) - 1)
    return Batch(
        items=rng.integers(1, N_ITEMS + 1, events),
        times=times,
        lengths=np.array([events]),
        query_times=times[-1:] + rng.integers(0, 10**6),
        values=np.where(rng.random(events) < 0.3, np.float32(np.nan), stars) if values else None,
    )


def every_window(model: SequenceModel, history: Batch) -> Batch:
    """The window after each event of the history; the query comes some time after the event."""
    lengths = np.arange(1, len(history.items) + 1)
    begins = window_begins(lengths, model.length, model.window_step)
    query_times = history.times + np.random.default_rng(1).integers(0, 10**6, len(lengths))
    return history.tokens(ragged_rows(begins, lengths - begins), lengths - begins, query_times=query_times)


def full_pass(model: SequenceModel, windows: Batch) -> Tensor:
    with torch.inference_mode():
        return model.query(tensors(windows))


def query_of(encoder: IncrementalEncoder, kv_cache: KVCache | None, window: Batch) -> tuple[np.ndarray, KVCache, bool]:
    """The query, the KV cache after it, and whether only the new events were encoded."""
    query = None if kv_cache is None else encoder.extend(kv_cache, window)
    if query is not None and kv_cache is not None:
        return query, kv_cache, True
    queries, (kv_cache,) = encoder.encode(window, [0])
    return queries[0].numpy(), kv_cache, False


@pytest.mark.parametrize("name", CASES)
def test_between_window_steps_only_new_events_are_encoded(name: str) -> None:
    model, encoder = case_of(name, length=48)
    events = 1000 if name in LONG else 150
    windows = every_window(model, history_of(events))
    kv_cache, queries, extended = None, [], []
    for row in range(events):
        query, kv_cache, incremental = query_of(encoder, kv_cache, window_of(windows, row))
        queries.append(query)
        extended.append(incremental)
    assert_alike(np.stack(queries), full_pass(model, windows))
    begins = window_begins(np.arange(1, events + 1), model.length, model.window_step)
    assert model.window_step == 12
    assert extended == [False, *(begins[1:] == begins[:-1]).tolist()]


change = st.one_of(
    st.tuples(st.just("append"), st.integers(0, MAX_NEW_TOKENS + 1)),
    st.tuples(st.just("late"), st.integers(0, 30)),
    st.tuples(st.just("delete"), st.integers(0, 30)),
    st.tuples(st.just("value"), st.integers(0, 30)),
    st.tuples(st.just("time"), st.integers(0, 30)),
    st.tuples(st.just("later"), st.integers(0, 10**7)),
)


def changed(history: Batch, what: str, number: int, more: Batch) -> Batch:
    """The history after a change."""
    rows = np.arange(len(history.items))
    query_times, index = history.query_times, number % len(rows)
    assert query_times is not None and history.values is not None and more.values is not None
    columns = [history.items, history.times, history.values]
    if what == "append":
        new = slice(len(rows), len(rows) + number)
        columns = [
            np.concatenate((old, of[new]))
            for old, of in zip(columns, (more.items, more.times, more.values), strict=True)
        ]
    elif what == "late":
        columns = [
            np.insert(old, index, value) for old, value in zip(columns, (7, history.times[index], 2.0), strict=True)
        ]
    elif what == "delete" and len(rows) > 1:
        columns = [np.delete(old, index) for old in columns]
    elif what == "value":
        columns[2] = np.where(rows == index, np.float32(number % 6), history.values)
    elif what == "time":
        columns[1] = np.where(rows == index, history.times // 2, history.times)
    else:
        query_times = query_times + number
    items, times, values = columns
    return Batch(items=items, times=times, lengths=np.array([len(items)]), query_times=query_times, values=values)


@pytest.mark.parametrize("name", ["esasrec", "sasrec-meta, rated", "hstu, combined, now", "hstu, now"])
@settings(max_examples=12)
@given(first=st.integers(1, 20), changes=st.lists(change, min_size=1, max_size=12))
def test_after_any_change_of_a_history_the_query_is_that_of_the_full_pass(
    name: str, first: int, changes: list[tuple[str, int]]
) -> None:
    model, encoder = case_of(name)
    more = history_of(200, seed=3)
    history, kv_cache = history_of(first, seed=3), None
    for what, number in [("later", 0), *changes]:
        history = changed(history, what, number, more)
        window = newest(history, model.length, model.window_step)
        query, kv_cache, _ = query_of(encoder, kv_cache, window)
        assert_alike(query[None], full_pass(model, window))


def test_a_repeated_query_is_cached_unless_its_time_matters() -> None:
    window = history_of(12)
    later = replace(window, query_times=window.times[-1:] + 10**8)
    for name, counts in (("esasrec", False), ("hstu", False), ("hstu, now", True)):
        model, encoder = case_of(name)
        _, (kv_cache,) = encoder.encode(window, [0])
        query, again = encoder.extend(kv_cache, window), encoder.extend(kv_cache, window)
        assert query is not None and again is not None
        assert (again is query) is not counts
        moved = encoder.extend(kv_cache, later)
        assert moved is not None
        assert_alike(moved[None], full_pass(model, later))
        assert np.allclose(moved, query) is not counts


@pytest.mark.parametrize("name", ["sasrec", "hstu, combined, now"])
def test_users_encoded_together_have_separate_caches(name: str) -> None:
    """For the chosen users, whether the longest of the batch fits or not."""
    model, encoder = case_of(name)
    for lengths in ([9, 10, 12], [1, 15, 2, 3]):
        users = [history_of(length + 1, seed=length) for length in lengths]
        before, after = (
            Batch(
                items=np.concatenate([user.items[: len(user.items) - less] for user in users]),
                times=np.concatenate([user.times[: len(user.items) - less] for user in users]),
                lengths=np.array(lengths) + 1 - less,
                query_times=np.concatenate([user.times[-1:] + 50 for user in users]),
                values=np.concatenate([user.values[: len(user.items) - less] for user in users]),  # type: ignore[index]
            )
            for less in (1, 0)
        )
        queries, caches = encoder.encode(before, [2, 0])
        assert_alike(queries.numpy(), full_pass(model, before))
        expected = full_pass(model, after)
        for row, kv_cache in zip((2, 0), caches, strict=True):
            query = encoder.extend(kv_cache, window_of(after, row))
            assert query is not None
            assert_alike(query, expected[row])


def test_a_cache_grows_with_its_history_up_to_the_window() -> None:
    model, encoder = case_of("sasrec", length=CAPACITY_STEP + 5)
    windows = every_window(model, history_of(CAPACITY_STEP + 5))
    _, (kv_cache,) = encoder.encode(window_of(windows, 0), [0])
    capacities, sizes = [], []
    for row in range(1, CAPACITY_STEP + 5):
        assert encoder.extend(kv_cache, window_of(windows, row)) is not None
        capacities.append(kv_cache.kv.shape[3])
        sizes.append(kv_cache.size)
    assert capacities == [CAPACITY_STEP] * (CAPACITY_STEP - 1) + [CAPACITY_STEP + 5] * 5
    assert sizes[-1] > kv_cache.kv.nbytes == 2 * 2 * 8 * (CAPACITY_STEP + 5) * 4  # blocks, K and V, width


def test_too_many_new_events_and_other_first_events_are_not_extended() -> None:
    _, encoder = case_of("sasrec", length=64)
    history = history_of(40)

    def part(first: int, last: int) -> Batch:
        rows = np.arange(first, last)
        return history.tokens(rows, np.array([len(rows)]), query_times=history.query_times)

    _, (kv_cache,) = encoder.encode(part(0, 10), [0])
    assert encoder.extend(kv_cache, part(0, 11 + MAX_NEW_TOKENS)) is None
    assert encoder.extend(kv_cache, part(1, 12)) is None
    assert encoder.extend(kv_cache, part(0, 9)) is None
    assert encoder.extend(kv_cache, part(0, 10 + MAX_NEW_TOKENS)) is not None, "a refusal leaves the cache unchanged"


def test_no_values_equal_missing_values() -> None:
    """Whether a batch has values depends on the other users of the batch."""
    model, encoder = case_of("sasrec-meta, rated")
    without = history_of(10, values=False)
    missing = replace(without, values=np.full(10, np.nan, dtype=np.float32))
    _, (kv_cache,) = encoder.encode(without.tokens(np.arange(9), np.array([9])), [0])
    for window in (missing, without):
        query = encoder.extend(kv_cache, window)
        assert query is not None
        assert_alike(query[None], full_pass(model, missing))


def test_closed_gates_cause_no_warnings() -> None:
    """Logits of some hundreds: the exponential of their negative is infinite."""
    for builder in ("hstu", "esasrec"):
        model = model_of(builder, positions="oldest")
        with torch.no_grad():
            for block in model.blocks:
                for parameter in block.parameters():
                    parameter.mul_(30)
        encoder, window = IncrementalEncoder(model), history_of(20)
        _, (kv_cache,) = encoder.encode(
            window.tokens(np.arange(19), np.array([19]), query_times=window.query_times), [0]
        )
        query = encoder.extend(kv_cache, window)
        assert query is not None
        torch.testing.assert_close(torch.from_numpy(query)[None], full_pass(model, window), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("builder", "positions", "incremental"),
    [
        ("sasrec", "oldest", True),
        ("esasrec", "oldest", True),
        ("hstu", "oldest", True),
        ("sasrec-meta", "oldest", True),
        ("transformer", "oldest", True),
        ("transformer", "sinusoidal", True),
        ("transformer", "rotary", True),
        ("transformer", "buckets", True),
        ("transformer", "newest", False),
        ("sasrec", "newest", False),
        ("hstu", "newest", False),
        ("bert4rec", "oldest", False),
        ("bert4rec", "newest", False),
        ("gru4rec", "oldest", False),
        ("narm", "oldest", False),
        ("caser", "oldest", False),
        ("nextitnet", "oldest", False),
    ],
)
def test_bidirectional_models_and_positions_from_the_newest_are_not_incremental(
    builder: str, positions: str, incremental: bool
) -> None:
    """Nor models whose later tokens do not need a row of each earlier one, which is what a KV cache holds."""
    model = model_of(builder, positions=positions)
    assert model.incremental is incremental
    assert model.window_step == (16 if incremental else 1)
    assert model_of(builder, positions=positions, length=3).window_step == 1
