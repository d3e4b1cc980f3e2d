"""Query vectors → the best items under the rules, and their scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from segue.counts.counts import Added, Counts
from segue.data.batch import Batch, take
from segue.index.exact import GROUP
from segue.index.search import ItemIndex, Ragged
from segue.models.sequence import SequenceModel
from segue.recommend.rules import Rules, excluded_items


def search_items(
    index: ItemIndex,
    queries: Tensor,
    histories: Batch,
    rules: Sequence[Rules],
    *,
    keep_seen: bool,
    counts: Counts | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The best items of each query [B, k'] int64 and their scores [B, k'] float32, under its history and its rules.

    `counts`: what is added to the model's scores. Rows are padded with item 0 and score -inf. Queries that share their
    `only` are searched together.
    """
    groups: dict[int, list[int]] = {}
    for row, rule in enumerate(rules):
        groups.setdefault(id(rule.only), []).append(row)
    if len(groups) > 1:
        width = min(max(rule.k for rule in rules), index.n_items)
        items = np.zeros((len(rules), width), dtype=np.int64)
        scores = np.full((len(rules), width), -np.inf, dtype=np.float32)
        for group in groups.values():
            rows, own = np.array(group), [rules[row] for row in group]
            best, values = search_items(
                index, queries[rows], take(histories, rows), own, keep_seen=keep_seen, counts=counts
            )
            items[rows, : best.shape[1]], scores[rows, : best.shape[1]] = best, values
        return items, scores
    limits = np.array([rule.k for rule in rules])
    exclude = excluded_items(histories, rules, keep_seen=keep_seen)
    added = None if counts is None else counts.added(histories)
    with torch.inference_mode():
        if added is None or not len(added.items):
            best_items = index.search(queries, int(limits.max()), exclude=exclude, only=rules[0].only)
            items, scores = (part.numpy() for part in best_items)
        else:
            items, scores = _search_counted(index, queries, int(limits.max()), added, exclude, rules[0].only)
    beyond = np.arange(items.shape[1]) >= limits[:, None]
    if beyond.any():
        items, scores = np.where(beyond, 0, items), np.where(beyond, np.float32(-np.inf), scores)
    return items, scores


def _search_counted(
    index: ItemIndex, queries: Tensor, k: int, added: Added, exclude: Ragged | None, only: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The best items by the model's score plus what is added to it, as a sort of all items gives them.

    The items that the counts reach are scored apart; of all others, the model's best k are enough.
    """
    inside = slice(None) if only is None else np.isin(added.items, only)
    rows, numbers, values = added.rows[inside], added.items[inside], added.values[inside]
    reached = Ragged.of_lengths(np.bincount(rows, minlength=len(queries)), numbers)
    parts = [index.search(queries, k, exclude=reached if exclude is None else reached.joined(exclude), only=only)]
    if len(numbers):
        most = int(np.diff(reached.offsets).max())
        items, scores = index.search(queries, most, exclude=exclude, only=reached)
        parts.append((items, scores + _values_of(items.numpy(), rows, numbers, values, index.n_items + 1)))
    items, scores = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    order = np.lexsort((items.numpy(), -scores.numpy()), axis=1)[:, : min(k, index.n_items)]  # of equals, lower first
    return np.take_along_axis(items.numpy(), order, axis=1), np.take_along_axis(scores.numpy(), order, axis=1)


def _values_of(items: np.ndarray, rows: np.ndarray, numbers: np.ndarray, values: np.ndarray, columns: int) -> Tensor:
    """The value of each item of a row [B, k], given those of all pairs, which are ascending; item 0 has none."""
    keys = rows * columns + numbers
    wanted = items + np.arange(len(items))[:, None] * columns
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return torch.from_numpy(np.where(keys[index] == wanted, values[index], np.float32(0)))


def unit_vectors(model: SequenceModel, numbers: np.ndarray | None = None) -> Tensor:
    """Item vectors of length one [n, D], without biases; None is all items [V + 1, D]."""
    with torch.inference_mode():
        if numbers is None:
            vectors = model.item_features()
        else:
            vectors = model.item_features(whole_groups(numbers))[: len(numbers)]
        return functional.normalize(vectors.cpu().float(), dim=1)


def whole_groups(numbers: np.ndarray) -> Tensor:
    """Item numbers padded to whole groups: a product of fewer rows rounds differently, and the vector of an item must
    not depend on the items computed with it."""
    return torch.from_numpy(np.concatenate((numbers, np.zeros(-len(numbers) % GROUP, dtype=np.int64))))
