"""Query vectors → the best items under the rules, and their scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from segue.data.batch import Batch, take
from segue.index.exact import GROUP
from segue.index.search import ItemIndex
from segue.models.sequence import SequenceModel
from segue.recommend.rules import Rules, excluded_items


def search_items(
    index: ItemIndex, queries: Tensor, histories: Batch, rules: Sequence[Rules], *, keep_seen: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The best items of each query [B, k'] int64 and their scores [B, k'] float32, under its history and its rules.

    Rows are padded with item 0 and score -inf. Queries that share their `only` are searched together.
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
            best, values = search_items(index, queries[rows], take(histories, rows), own, keep_seen=keep_seen)
            items[rows, : best.shape[1]], scores[rows, : best.shape[1]] = best, values
        return items, scores
    limits = np.array([rule.k for rule in rules])
    exclude = excluded_items(histories, rules, keep_seen=keep_seen)
    with torch.inference_mode():
        best_items = index.search(queries, int(limits.max()), exclude=exclude, only=rules[0].only)
    items, scores = (part.numpy() for part in best_items)
    beyond = np.arange(items.shape[1]) >= limits[:, None]
    if beyond.any():
        items, scores = np.where(beyond, 0, items), np.where(beyond, np.float32(-np.inf), scores)
    return items, scores


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
