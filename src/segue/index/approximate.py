"""The approximate index: an inverted file of item vectors, of which a query scores a few lists."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import faiss
import msgspec
import numpy as np
import torch
from torch import Tensor

from segue.index.exact import ExactIndex, Pairs, finite, is_allowed, write_file
from segue.index.search import RECALL_AT, BestItems, Only, Ragged, Recall, merged_rows, recall, recall_of_scores
from segue.index.settings import CHUNK, RECALL

SAMPLE = 400  # item vectors that serve as queries if none are given
SEED = 1
LISTS = 4  # times the square root of the items: then choosing lists costs no more than scanning the chosen ones
ROUNDS, MEMBERS = 6, 32  # rounds of k-means, and items of each list that it is fitted to: more did not raise recall
SPARE = 1.25  # candidates per result, as 8-bit scores misplace the last ones
STEP = 64  # candidates are a multiple of this
GROWTH = 1 / 3  # probes grow with this power of the candidates, which keeps recall as measured
REGISTER = 16  # features in a vector register
LEAST_ITEMS = 50  # items of the catalogue for each candidate; with fewer, all are scored
MAX_FLOATS = 4_000_000  # features of candidates in memory at a time


class ApproximateIndex:
    """An inverted file with 8-bit features: Douze et al., "The Faiss library", 2024.

    A query scans the `probes` lists with the best centres. Candidates are then scored with their full vectors, and only
    then filtered: every item that would beat the last result was among the candidates, so filters cost no recall. If
    too few are left, all items are scored.
    """

    def __init__(self, exact: ExactIndex, lists: Lists, *, probes: int, recall: Recall) -> None:
        self.exact = exact
        self.n_items = exact.n_items
        self.lists = lists
        self.probes = probes
        self.recall = recall

    @staticmethod
    def build(
        vectors: Tensor,
        *,
        candidates: np.ndarray | None = None,
        chunk: int = CHUNK,
        least_recall: float = RECALL,
        queries: Tensor | None = None,
    ) -> ApproximateIndex:
        """See `ExactIndex.build`. One half of the `queries` [N, D] sets the number of probes, the other half measures
        the recall; without queries, item vectors are used."""
        exact = ExactIndex.build(vectors, candidates=candidates, chunk=chunk)
        if queries is None:
            rows = np.random.default_rng(SEED).permutation(len(exact.numbers))[:SAMPLE]
            queries = exact.vectors[torch.from_numpy(rows)]
        unmeasured = Recall(k=RECALL_AT, share=1.0, queries=0)
        index = ApproximateIndex(exact, Lists.of(exact.vectors), probes=1, recall=unmeasured)
        some, others = finite(queries[::2]), queries[1::2]
        _, best = exact.search(some, RECALL_AT)

        def share(probes: int) -> float:
            index.probes = probes
            return recall_of_scores(index._best(some, math.ceil(SPARE * RECALL_AT), best.shape[1])[1], best)

        steps = np.unique(np.geomspace(1, len(index.lists.centres), 64).astype(np.int64)).tolist()
        index.probes = int(steps[min(bisect_left(steps, least_recall, key=share), len(steps) - 1)])
        index.recall = Recall(k=RECALL_AT, share=recall(index, exact, others, RECALL_AT), queries=len(others))
        return index

    def search(self, queries: Tensor, k: int, *, exclude: Ragged | None = None, only: Only = None) -> BestItems:
        """See `ItemIndex.search`. Results do not depend on the other queries but for rounding; memory is bounded."""
        assert k >= 1
        if isinstance(only, Ragged):
            return self.exact.search(queries, k, exclude=exclude, only=only)
        queries, allowed = finite(queries), None if only is None else is_allowed(self.exact.numbers, only)
        remaining = len(self.exact.numbers) if allowed is None else int(np.count_nonzero(allowed))
        items = torch.zeros(len(queries), min(k, remaining), dtype=torch.int64)
        scores = torch.full(items.shape, -torch.inf)
        for rows, depth in self._by_depth(k, exclude, queries, remaining):
            if len(rows) == len(queries):
                items, scores = self._best(queries, depth, min(k, remaining), exclude, allowed)
            else:
                banned = None if exclude is None else exclude.take(rows)
                items[rows], scores[rows] = self._best(queries[rows], depth, min(k, remaining), banned, allowed)
        short = np.flatnonzero(scores.numpy().min(1, initial=np.inf) == -np.inf)
        if len(short):
            banned = None if exclude is None else exclude.take(short)
            items[short], scores[short] = self.exact.search(queries[short], k, exclude=banned, only=only)
        return items, scores

    def _by_depth(
        self, k: int, exclude: Ragged | None, queries: Tensor, remaining: int
    ) -> Iterator[tuple[np.ndarray, int]]:
        """Yield groups of queries that fit in memory, and the number of candidates that each needs to have k left after
        filtering. Queries for which all items must be scored are left out."""
        results = np.full(len(queries), float(k)) if exclude is None else np.diff(exclude.offsets) + float(k)
        items = len(self.exact.numbers)
        depths = np.ceil(results * (SPARE / STEP * items / max(1, remaining))).astype(np.int64) * STEP
        for depth in np.unique(depths[(depths > 0) & (depths * LEAST_ITEMS <= items)]).tolist():
            rows = np.flatnonzero(depths == depth)
            size = max(1, MAX_FLOATS // (depth * queries.shape[1]))
            for begin in range(0, len(rows), size):
                yield rows[begin : begin + size], depth

    def _best(
        self, queries: Tensor, depth: int, k: int, banned: Ragged | None = None, allowed: np.ndarray | None = None
    ) -> BestItems:
        """The best k of `depth` candidates [b, k], and their scores; in numpy, which is faster than torch for the small
        arrays of a query."""
        probes = math.ceil(self.probes * max(1.0, depth / (SPARE * RECALL_AT)) ** GROWTH)
        vectors = queries.numpy()
        rows = self.lists.search(vectors, depth, probes=probes)  # [b, depth], -1: none
        rows.sort(axis=1)  # by number: a stable sort then keeps ties in the order of numbers
        forbidden = rows < 0
        if allowed is not None:
            forbidden |= ~allowed[rows]
        if banned is not None:
            pairs, items = Pairs.of(banned, self.exact.numbers), len(self.exact.numbers)
            keys, cells = np.sort(pairs.columns + pairs.rows * items), rows + np.arange(len(rows))[:, None] * items
            if len(keys):
                forbidden |= keys[np.minimum(np.searchsorted(keys, cells), len(keys) - 1)] == cells
        # No matrix product: its order of summation depends on the index of a row, which would break ties.
        scores = np.einsum("brd,bd->br", self.exact.vectors.numpy()[rows], vectors)
        scores[forbidden] = -np.inf
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        scores = np.take_along_axis(scores, order, axis=1)
        numbers = self.exact.numbers[np.take_along_axis(rows, order, axis=1)]
        numbers[scores == -np.inf] = 0
        return torch.from_numpy(numbers), torch.from_numpy(scores)

    def with_items(self, vectors: Tensor, numbers: np.ndarray, *, n_items: int) -> ApproximateIndex:
        """See `ItemIndex.with_items`. A new item joins the list with the best centre."""
        exact = self.exact.with_items(vectors, numbers, n_items=n_items)
        _, order = merged_rows(self.exact.numbers, numbers)
        lists = self.lists.with_rows(vectors, order, exact.vectors)
        return ApproximateIndex(exact, lists, probes=self.probes, recall=self.recall)

    def save(self, path: Path) -> None:
        """Write vectors, numbers and lists to one safetensors file, independent of faiss's formats."""
        write_file(
            path,
            {
                "vectors": self.exact.vectors,
                "numbers": torch.from_numpy(self.exact.numbers),
                "centres": torch.from_numpy(self.lists.centres),
                "owners": torch.from_numpy(self.lists.owners),
                "ranges": torch.from_numpy(self.lists.ranges),
            },
            _Facts(n_items=self.n_items, chunk=self.exact.chunk, probes=self.probes, recall=self.recall),
        )

    @staticmethod
    def of_file(arrays: dict[str, Tensor], header: str) -> ApproximateIndex:
        """The index in the contents of a file that `save` wrote."""
        facts = msgspec.json.decode(header, type=_Facts)
        exact = ExactIndex(arrays["vectors"], arrays["numbers"].numpy(), n_items=facts.n_items, chunk=facts.chunk)
        centres, owners, ranges = (arrays[name].numpy() for name in ("centres", "owners", "ranges"))
        lists = Lists(centres, owners, ranges, exact.vectors)
        return ApproximateIndex(exact, lists, probes=facts.probes, recall=facts.recall)


class _Facts(msgspec.Struct, tag_field="kind", tag="approximate", forbid_unknown_fields=True, kw_only=True):
    n_items: int
    chunk: int
    probes: int
    recall: Recall


class Lists:
    """The inverted lists: the list of each item, and the items' vectors in 8 bits a feature."""

    def __init__(self, centres: np.ndarray, owners: np.ndarray, ranges: np.ndarray, vectors: Tensor) -> None:
        rows = _full_width(vectors.numpy())
        width = rows.shape[1]
        self.centres = centres  # [L, D'] float32
        self.owners = owners  # [n] int64: each item's list
        self.ranges = ranges  # [2, D'] float32: minimum and range of the items' offsets from their centres
        shapes = (centres.shape[1:], owners.shape, ranges.shape)
        inside = owners.dtype == np.int64 and bool(((owners >= 0) & (owners < len(centres))).all())
        if shapes != ((width,), (len(rows),), (2, width)) or not inside:
            raise RuntimeError("its lists do not match its items")
        self._centres = faiss.IndexFlatIP(width)
        self._centres.add(centres)
        self._items = faiss.IndexIVFScalarQuantizer(
            self._centres, width, len(centres), faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
        )
        faiss.copy_array_to_vector(ranges.ravel(), self._items.sq.trained)
        self._items.is_trained = True
        self._items.add_core(len(rows), faiss.swig_ptr(rows), None, faiss.swig_ptr(owners))

    @staticmethod
    def of(vectors: Tensor) -> Lists:
        """Fit lists by spherical k-means, which uses only the directions of vectors."""
        rows = _full_width(vectors.numpy())
        items, width = rows.shape
        if not items:
            return Lists(np.zeros((1, width), "f4"), np.zeros(0, "i8"), np.zeros((2, width), "f4"), vectors)
        means = faiss.Kmeans(
            width,
            min(items, round(LISTS * items**0.5)),
            niter=ROUNDS,
            seed=SEED,
            spherical=True,
            max_points_per_centroid=MEMBERS,
            min_points_per_centroid=1,
        )
        means.train(rows)
        centres, owners = np.asarray(means.centroids), means.index.search(rows, 1)[1][:, 0].copy()
        least, most = torch.from_numpy(rows - centres[owners]).aminmax(dim=0)
        return Lists(centres, owners, torch.stack((least, most - least)).numpy(), vectors)

    def with_rows(self, new: Tensor, order: np.ndarray | slice, vectors: Tensor) -> Lists:
        """Lists of `vectors` [n, D], which are the old rows followed by the `new` ones [m, D], in this `order` [n]."""
        rows = _full_width(new.detach().to(device="cpu", dtype=torch.float32).numpy())
        nearest = self._centres.search(rows, 1)[1][:, 0]
        offsets = np.concatenate((rows - self.centres[nearest], self.ranges[:1], self.ranges[:1] + self.ranges[1:]))
        least, most = offsets.min(axis=0), offsets.max(axis=0)  # the 8-bit range must cover the new items
        owners = np.concatenate((self.owners, nearest))[order]
        return Lists(self.centres, owners, np.stack((least, most - least)), vectors)

    def search(self, queries: np.ndarray, depth: int, *, probes: int) -> np.ndarray:
        """The rows [B, depth] of the best items by 8-bit vectors; -1 if the lists have no more."""
        parameters = _parameters(min(probes, len(self.centres)))
        _, rows = self._items.search(_full_width(queries), depth, params=parameters)
        return rows


def _full_width(vectors: np.ndarray) -> np.ndarray:
    """Append zero features up to whole vector registers [X, D']: otherwise faiss compares bytes one by one."""
    spare = -vectors.shape[1] % REGISTER
    return np.concatenate((vectors, np.zeros((len(vectors), spare), vectors.dtype)), axis=1) if spare else vectors


@functools.cache
def _parameters(probes: int) -> faiss.SearchParametersIVF:
    parameters = faiss.SearchParametersIVF()
    parameters.nprobe = probes
    return parameters
