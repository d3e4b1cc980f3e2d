"""One history → the attention weights of the model that encodes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from segue.data.batch import Batch, newest
from segue.layers.packed import tensors
from segue.models.attention_map import AttentionMap, HasAttentionMaps, attention_maps
from segue.recommend.answer import PlannedItem
from segue.recommend.explain.explanation import Attention
from segue.recommend.history import History, pack_histories
from segue.recommend.plan import BeamSearch, Planner, plan_histories
from segue.recommend.rules import Rules

if TYPE_CHECKING:
    from segue.recommend.recommender import Recommender

MOST_ENTRIES = 64  # rows and columns of an `Attention`: its size grows with their square


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
        (plan,) = plan_histories(recommender, [history], rules, BeamSearch(beam=1), query_times=query_times)
        steps = plan.items
    if len(steps) > 1:
        window = _continued(window, recommender.vocabulary.numbers([step.id for step in steps[:-1]], unknown="error"))
    with torch.inference_mode():
        return attention_maps(model, tensors(window)), steps


def _continued(history: Batch, items: np.ndarray) -> Batch:
    """One history followed by the items [n] that a decoder is fed, which have no time, kind or value."""

    def padded(events: np.ndarray) -> np.ndarray:
        return np.concatenate((events, np.zeros(len(items), events.dtype)))

    return Batch(
        items=np.concatenate((history.items, items)),
        times=padded(history.times),
        lengths=history.lengths + len(items),
        query_times=history.query_times,
        kinds=None if history.kinds is None else padded(history.kinds),
        values=None if history.values is None else padded(history.values),
        histories=history.lengths,
    )


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
