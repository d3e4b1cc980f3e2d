"""One history and one item → what each event did for the item's score, and who looked at whom on the way to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import torch
from torch import nn

from segue.data.batch import Batch, newest, window_begins
from segue.errors import InputError
from segue.index.search import ItemIndex
from segue.layers.packed import tensors
from segue.models.attention_map import AttentionMap, Mapped, attention_maps
from segue.models.sequence import SequenceModel
from segue.recommend.answer import PlannedItem, ScoredItem
from segue.recommend.explain.explanation import Attention, Contribution, Explanation
from segue.recommend.history import ReadHistory, pack_histories
from segue.recommend.plan import Planner, Search, plan_histories
from segue.recommend.rules import Rules

if TYPE_CHECKING:
    from segue.recommend.recommender import Recommender

TOKENS = 16384  # events encoded at a time
MOST_ENTRIES = 64  # of an `Attention`, a side: its size grows with their square
FIRST_LOOK = 100  # answers among which an item is looked for first; ten times as many each time it is not there


def explain_history(
    recommender: Recommender,
    history: ReadHistory,
    rules: Rules,
    *,
    item: int | None = None,
    query_times: np.ndarray | None = None,
    attention: bool = True,
) -> Explanation:
    """Why an item, by its number (None: the best answer), is answered to a history that was read, under `rules`.

    `query_times` [1]: the question's seconds. See `Recommender.explain`.
    """
    vocabulary = recommender.vocabulary
    packed = pack_histories(
        [history], vocabulary, known=recommender.answerable, kinds=recommender.known.kinds, query_times=query_times
    )
    number = _best_answer(recommender, packed.batch, rules) if item is None else item
    chosen = np.array([number])
    ranking = recommender.rank(packed.batch, [Rules(k=1, keep_seen=True, only=chosen)])
    fallback = bool(ranking.fallback[0])
    score = float(recommender.counts[number] if fallback else ranking.scores[0, 0])  # one without events is no answer
    numbers = vocabulary.numbers(history.items, unknown="zero")
    known = recommender.answerable[numbers]
    added = np.full(len(numbers), np.nan)
    added[known] = contributions(recommender.model, recommender.index, packed.batch, number, score)
    window = newest(packed.batch, recommender.model.length, recommender.model.window_step)
    plan = steps_of(recommender, history, rules, query_times=query_times) if attention else []
    maps = looks(recommender.model, with_steps(recommender, window, plan)) if attention else []
    places = np.flatnonzero(known)[len(packed.batch.items) - len(window.items) :].tolist()
    return Explanation(
        item=ScoredItem(id=vocabulary.ids(chosen)[0], title=vocabulary.titles(chosen)[0], score=score),
        rank=_place(recommender, packed.batch, rules, number),
        contributions=[
            Contribution(item=name, title=title, known=is_known, contribution=None if np.isnan(value) else value)
            for name, title, is_known, value in zip(
                history.items, vocabulary.titles(numbers), known.tolist(), added.tolist(), strict=True
            )
        ],
        attention=[told(each, places) for each in maps],
        plan=plan,
        unknown=packed.unknown[0],
        fallback="popularity" if fallback else None,
        untimed=msgspec.UNSET if fallback else recommender.known.untimed(history),
    )


def _best_answer(recommender: Recommender, history: Batch, rules: Rules) -> int:
    number = int(recommender.rank(history, [replace(rules, k=1)]).items[0, 0])
    if not number:
        raise InputError(
            "Under these rules no item is left to answer, so there is none to explain; name an item, or allow more."
        )
    return number


def _place(recommender: Recommender, history: Batch, rules: Rules, item: int) -> int | None:
    """The item's place among the answers that the rules allow; None where it is not one of them."""
    allowed = np.array([item] if rules.only is None or item in rules.only else [], dtype=np.int64)
    if not recommender.rank(history, [replace(rules, k=1, only=allowed)]).items[0, 0]:
        return None
    k = min(FIRST_LOOK, len(recommender.vocabulary))
    while not (found := recommender.rank(history, [replace(rules, k=k)]).items[0] == item).any():
        assert k < len(recommender.vocabulary), "an item that may be answered stands somewhere"
        k = min(10 * k, len(recommender.vocabulary))
    return int(found.argmax()) + 1


def contributions(model: SequenceModel, index: ItemIndex, history: Batch, item: int, score: float) -> np.ndarray:
    """`score`, that of the item after the whole history, less its score without each event [n] float64.

    A history without one event is cut to what the model has room for like any other, so that in a long one older
    events may take a place. NaN for events that the model has no room for, and for an only one: without it nothing is
    left to score by.
    """
    events = len(history.items)
    added = np.full(events, np.nan)
    if events < 2:
        return added
    shorter, whole = window_begins(np.array([events - 1, events]), model.length, model.window_step).tolist()
    near = history.tokens(np.arange(shorter, events), history.lengths - shorter, query_times=history.query_times)
    inside = np.arange(whole - shorter, events - shorter)  # places in `near` that the model looks at
    step = max(1, TOKENS // (len(near.items) - 1))
    for begin in range(0, len(inside), step):
        left_out = inside[begin : begin + step]
        added[left_out + shorter] = score - _scores(model, index, _without_each(near, left_out), item)
    return added


def _without_each(history: Batch, places: np.ndarray) -> Batch:
    """One history as many times as there are places, each time without the event at that place."""
    rest = np.arange(len(history.items) - 1)
    rows = rest + (rest >= places[:, None])  # [places, n - 1]
    query_times = None if history.query_times is None else np.repeat(history.query_times, len(places))
    return history.tokens(rows.ravel(), np.full(len(places), len(rest)), query_times=query_times)


def _scores(model: SequenceModel, index: ItemIndex, histories: Batch, item: int) -> np.ndarray:
    """The item's score after each history [B], from where answers take theirs."""
    with torch.inference_mode():
        _, scores = index.search(model.query(tensors(histories)), 1, only=np.array([item]))
    return scores[:, 0].numpy().astype(np.float64)


def steps_of(
    recommender: Recommender, history: ReadHistory, rules: Rules, *, query_times: np.ndarray | None = None
) -> list[PlannedItem]:
    """What the steps of a decoder choose whose attention is shown, each the likeliest after those before it; none where
    nothing of the history is known, and of models that do not plan."""
    if not (isinstance(recommender.model, Planner) and isinstance(recommender.model, Mapped)):
        return []
    (plan,) = plan_histories(recommender, [history], rules, Search(beam=1), query_times=query_times)
    return [] if plan.fallback else plan.items


def looks(model: nn.Module, history: Batch) -> list[AttentionMap]:
    """Who looked at whom in one history, no longer than the model has room for, and in the steps that continue it:
    weights [1, heads, M, N] float32.

    None for an empty history, and where the model has no attention to show.
    """
    if not len(history.items):
        return []
    with torch.inference_mode():
        return attention_maps(model, tensors(history))


def with_steps(recommender: Recommender, history: Batch, plan: Sequence[PlannedItem]) -> Batch:
    """One history, and after it what the steps that choose a plan are fed: its items but the last, which have neither a
    time nor a kind nor a value."""
    items = recommender.vocabulary.numbers([step.id for step in plan[:-1]], unknown="error")
    if not len(items):
        return history

    def longer(events: np.ndarray) -> np.ndarray:
        return np.concatenate((events, np.zeros(len(items), events.dtype)))

    return Batch(
        items=np.concatenate((history.items, items)),
        times=longer(history.times),
        lengths=history.lengths + len(items),
        query_times=history.query_times,
        kinds=None if history.kinds is None else longer(history.kinds),
        values=None if history.values is None else longer(history.values),
        histories=history.lengths,
    )


def told(looked: AttentionMap, places: Sequence[int]) -> Attention:
    """The newest part of a layer's weights as an answer carries it; `places` are those of the events in the whole
    history."""
    weights = looked.weights[0].numpy().astype(np.float64)

    def side(who: Literal["tokens", "steps"], size: int) -> tuple[list[int | None], slice]:
        if who == "steps":
            return [None] * min(size, MOST_ENTRIES), slice(MOST_ENTRIES)
        first = max(0, len(places) - MOST_ENTRIES)
        return [*places[first:], *[None] * (size - len(places))], slice(first, None)  # None: a token that is no event

    (rows, looking), (columns, seen) = side(looked.rows, weights.shape[1]), side(looked.columns, weights.shape[2])
    return Attention(name=looked.name, rows=rows, columns=columns, weights=weights[:, looking, seen].round(6).tolist())
