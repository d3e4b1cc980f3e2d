"""Query vectors → the best items under the rules, and their scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from segue.counts.counts import Added, Counts
from segue.data.batch import Batch, take
from segue.index.exact import GROUP, ExactIndex
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

    The model's best items are searched so far that k of them are not pushed down: no other item can pass those, unless
    something is added to its score. Such items are scored apart.
    """
    if isinstance(index, ExactIndex):
        items, scores = index.search(queries, k, exclude=exclude, only=only, added=added)
        return items.numpy(), scores.numpy()
    pushed = np.bincount(added.rows[added.values < 0], minlength=len(queries))
    best = index.search(queries, k + int(pushed.max()), exclude=exclude, only=only)
    found, values = (part.numpy() for part in best)
    if not found.shape[1]:
        return found, values
    row = np.arange(len(queries))[:, None]
    _, same = added.find(row, found)
    values, candidates = np.where(same, np.float32(-np.inf), values), _allowed(added, exclude, only)
    if len(candidates.rows):
        theirs = _by_row(candidates, _scores(index, queries, candidates) + candidates.values, len(queries))
        found, values = (np.concatenate(both, axis=1) for both in zip((found, values), theirs, strict=True))
    order = np.lexsort((found, -values), axis=1)[:, : min(k, index.n_items)]  # of equals, lower first
    found, values = found[row, order], values[row, order]
    return np.where(values > -np.inf, found, 0), values


def _allowed(added: Added, exclude: Ragged | None, only: np.ndarray | None) -> Added:
    """The additions to items that the rules allow."""
    if only is not None:
        added = added.take(np.isin(added.items, only))
    if exclude is None or not len(added.rows):
        return added
    at, same = added.find(exclude.owners, exclude.numbers)
    allowed = np.ones(len(added.rows), dtype=bool)
    allowed[at[same]] = False
    return added.take(allowed)


def _scores(index: ItemIndex, queries: Tensor, added: Added) -> np.ndarray:
    """The model's score of each of these items [N]; -inf if the index does not have it."""
    exact = getattr(index, "exact", index)  # an approximate index has all vectors, too; its class needs faiss
    if isinstance(exact, ExactIndex):
        rows = np.minimum(np.searchsorted(exact.numbers, added.items), len(exact.numbers) - 1)
        scores = np.einsum("nd,nd->n", exact.vectors.numpy()[rows], queries.float().numpy(force=True)[added.rows])
        return np.where(exact.numbers[rows] == added.items, scores, np.float32(-np.inf))
    lengths = np.bincount(added.rows, minlength=len(queries))
    found, values = index.search(queries, int(lengths.max()), only=Ragged.of_lengths(lengths, added.items))
    at, same = added.find(np.arange(len(queries))[:, None], found.numpy())
    scores = np.full(len(added.rows), -np.inf, dtype=np.float32)
    scores[at[same]] = values.numpy()[same]
    return scores


def _by_row(candidates: Added, scores: np.ndarray, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Items and scores [N] as arrays [n_rows, most of a row], padded with item 0 and score -inf."""
    column = np.arange(len(scores)) - np.searchsorted(candidates.rows, candidates.rows)
    items = np.zeros((n_rows, int(column.max()) + 1), dtype=np.int64)
    padded = np.full(items.shape, -np.inf, dtype=np.float32)
    items[candidates.rows, column], padded[candidates.rows, column] = candidates.items, scores
    return items, padded


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
