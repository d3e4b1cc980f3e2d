"""One history and one item → an explanation: the contribution of each event to the item's score, what counts add to it,
and the attention weights of the model that encodes the history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import torch

from segue.counts.features import HORIZON
from segue.data.batch import Batch, newest, window_begins
from segue.errors import InputError
from segue.layers.packed import tensors
from segue.models.attention import AttentionMap, HasAttentionMaps, attention_maps
from segue.models.sequence import SequenceModel
from segue.recommend.answer import Attention, Contribution, Explanation, PlannedItem, ScoredItem, untimed
from segue.recommend.explain.words import count_reasons
from segue.recommend.history import History, pack_histories
from segue.recommend.plan import BeamSearch, Planner, plan_histories
from segue.recommend.query import TOKENS
from segue.recommend.rules import Rules

if TYPE_CHECKING:
    from segue.recommend.recommender import Recommender

MOST_ENTRIES = 64  # rows and columns of an `Attention`: its size grows with their square
FIRST_SEARCH = 100  # best items among which the item's rank is searched first, and then among ten times as many


def explain_history(
    recommender: Recommender,
    history: History,
    rules: Rules,
    *,
    item: int | None = None,
    query_times: np.ndarray | None = None,
    attention: bool = True,
) -> Explanation:
    """See `Recommender.explain`. `item`: its number; None is the best item. `query_times` [1]: seconds."""
    vocabulary = recommender.vocabulary
    batch, unknown = pack_histories([history], recommender.known, query_times=query_times)
    number = int(recommender.rank(batch, [replace(rules, k=1)]).items[0, 0]) if item is None else item
    if not number:
        raise InputError(
            "Under these rules no item is left to answer, so there is none to explain; name an item, or allow more."
        )
    chosen = np.array([number])
    ranking = recommender.rank(batch, [Rules(k=1, keep_seen=True, only=chosen)])
    fallback = bool(ranking.fallback[0])
    # By popularity, an item without training events is not ranked: its score is its count, 0.
    score = float(recommender.counts[number] if fallback else ranking.scores[0, 0])
    numbers = vocabulary.numbers(history.items, unknown="zero")
    known = recommender.answerable[numbers]
    differences = np.full(len(numbers), np.nan)
    differences[known] = contributions(recommender, batch, number, score)
    counts = recommender.item_counts
    counted = [] if counts is None else count_reasons(counts, vocabulary, batch.items, number)
    layers, steps = attention_of(recommender, history, rules, query_times=query_times) if attention else ([], [])
    entries = np.flatnonzero(known)[_window_begin(recommender.model, len(batch.items)) :].tolist()
    return Explanation(
        item=ScoredItem(id=vocabulary.ids(chosen)[0], title=vocabulary.titles(chosen)[0], score=score),
        rank=_rank(recommender, batch, rules, number),
        contributions=[
            Contribution(item=name, title=title, known=is_known, contribution=None if np.isnan(value) else value)
            for name, title, is_known, value in zip(
                history.items, vocabulary.titles(numbers), known.tolist(), differences.tolist(), strict=True
            )
        ],
        counts=counted,
        counts_score=sum(reason.score for reason in counted),
        attention=[shown_attention(layer, entries) for layer in layers],
        plan=steps,
        unknown=unknown[0],
        fallback="popularity" if fallback else None,
        untimed=msgspec.UNSET if fallback else untimed(recommender.known, history),
    )


def _window_begin(model: SequenceModel, events: int) -> int:
    """The index of the first event that the model encodes of a history of so many events."""
    return int(window_begins(np.array([events]), model.length, model.window_step)[0])


def _rank(recommender: Recommender, history: Batch, rules: Rules, item: int) -> int | None:
    """The item's rank among the items that the rules allow, 1 the best; None if they do not allow it."""
    allowed = np.array([item] if rules.only is None or item in rules.only else [], dtype=np.int64)
    if not recommender.rank(history, [replace(rules, k=1, only=allowed)]).items[0, 0]:
        return None
    k = min(FIRST_SEARCH, len(recommender.vocabulary))
    while not (matches := recommender.rank(history, [replace(rules, k=k)]).items[0] == item).any():
        assert k < len(recommender.vocabulary), "an allowed item has a rank"
        k = min(10 * k, len(recommender.vocabulary))
    return int(matches.argmax()) + 1


def contributions(recommender: Recommender, history: Batch, item: int, score: float) -> np.ndarray:
    """`score`, that of the item after the whole history, minus its score without each event [n] float64.

    A history without one event is cut to the model's length like any other, so that an older event may come into its
    window. NaN for events that neither the model nor the counts read, and for the only event of a history: without it
    there is no score.
    """
    model, counts, events = recommender.model, recommender.item_counts, len(history.items)
    differences = np.full(events, np.nan)
    if events < 2:
        return differences
    first = _window_begin(model, events - 1)
    read = np.arange(min(_window_begin(model, events), events if counts is None else max(0, events - HORIZON)), events)
    step = max(1, TOKENS // (events - 1 - first))
    for start in range(0, len(read), step):
        removed = read[start : start + step]
        with torch.inference_mode():
            queries = model.query(tensors(_copies_without(history, removed, first)))
            scores = recommender.index.search(queries, 1, only=np.array([item]))[1][:, 0].numpy().astype(np.float64)
        if counts is not None:
            added = counts.added(_copies_without(history, removed, max(0, events - 1 - HORIZON)))
            own = added.items == item
            scores[added.rows[own]] += added.values[own]
        differences[removed] = score - scores
    return differences


def _copies_without(history: Batch, removed: np.ndarray, first: int) -> Batch:
    """Copies of a history, each without one of the events `removed` [m] and then from its event `first` on."""
    rest = np.arange(first, len(history.items) - 1)
    rows = rest + (rest >= removed[:, None])  # [m, n - 1 - first]
    query_times = None if history.query_times is None else np.repeat(history.query_times, len(removed))
    return history.tokens(rows.ravel(), np.full(len(removed), len(rest)), query_times=query_times)


def attention_of(
    recommender: Recommender, history: History, rules: Rules, *, query_times: np.ndarray | None = None
) -> tuple[list[AttentionMap], list[PlannedItem]]:
    """The attention weights [1, heads, M, N] of each layer for one history, and the items that the steps of a decoder
    choose. Both are empty for a history without known items; a model without attention has no weights.

    The history is cut to the model's length. A decoder whose attention can be shown chooses each item as the likeliest
    after those before it, under `rules`; other models choose none. `query_times` [1]: seconds.
    """
    model = recommender.model
    batch, _ = pack_histories([history], recommender.known, query_times=query_times)
    if not len(batch.items):
        return [], []
    window, steps = newest(batch, model.length, model.window_step), []
    if isinstance(model, Planner) and isinstance(model, HasAttentionMaps):
        (plan,) = plan_histories(recommender, [history], rules, BeamSearch(beam=1), query_times)
        steps = plan.items
    chosen = recommender.vocabulary.numbers([step.id for step in steps[:-1]], unknown="error")
    if len(chosen):  # the decoder is fed these items, which have no time, kind or value

        def padded(events: np.ndarray) -> np.ndarray:
            return np.concatenate((events, np.zeros(len(chosen), events.dtype)))

        window = replace(
            window,
            items=np.concatenate((window.items, chosen)),
            times=padded(window.times),
            lengths=window.lengths + len(chosen),
            kinds=None if window.kinds is None else padded(window.kinds),
            values=None if window.values is None else padded(window.values),
            histories=window.lengths,
        )
    with torch.inference_mode():
        return attention_maps(model, tensors(window)), steps


def shown_attention(layer: AttentionMap, entries: Sequence[int]) -> Attention:
    """The newest part of a layer's weights, as an explanation has it.

    entries: the index in the whole history of each event that the model encoded.
    """
    weights = layer.weights[0].numpy().astype(np.float64)

    def side(axis: Literal["tokens", "steps"], size: int) -> tuple[list[int | None], slice]:
        if axis == "steps":
            return [None] * min(size, MOST_ENTRIES), slice(MOST_ENTRIES)
        first = max(0, len(entries) - MOST_ENTRIES)
        return [*entries[first:], *[None] * (size - len(entries))], slice(first, None)  # None: a token without event

    (rows, of_rows), (columns, of_columns) = side(layer.rows, weights.shape[1]), side(layer.columns, weights.shape[2])
    shown = weights[:, of_rows, of_columns].round(6).tolist()
    return Attention(name=layer.name, rows=rows, columns=columns, weights=shown)
