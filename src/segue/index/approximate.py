"""Item vectors → best items, by looking only at the parts of the catalogue that a question points to."""

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

from segue.index.exact import ExactIndex, Pairs, finite, read_file, reading, write_file
from segue.index.search import RECALL_AT, Joined, Ragged, Recall, recall, share_found
from segue.index.settings import IndexSettings

SAMPLE = 400  # items that ask where no questions are given
SEED = 1
LISTS = 4  # for each square root of an item: choosing among them costs no more than looking into the chosen
ROUNDS, MEMBERS = 6, 32  # rounds of k-means, and items a list that it learns from: more of either found no more
SPARE, STEP = 1.25, 64  # more is looked for than asked, as bytes may put the last ones wrong; a multiple of STEP
GROWTH = 1 / 3  # lists looked into grow with this power of the items looked for: recall stays where it was measured
REGISTER = 16  # features that the processor takes at once
LEAST_ITEMS = 50  # items of the catalogue for each one looked for; with fewer, all are scored
MOST_FLOATS = 4_000_000  # features of found items in memory at a time


class ApproximateIndex:
    """Lists of items that point the same way, an inverted file: Douze et al., "The Faiss library", 2024.

    A question looks into the `probes` lists whose centres suit it best, where a feature is a byte. What it finds there
    is scored again by whole vectors, and only then is struck out what is forbidden: whatever would beat the last answer
    was among the best that were looked for, so filters cost no recall. Where too few are left, all items are scored.
    """

    def __init__(self, exact: ExactIndex, lists: Lists, *, probes: int, recall: Recall) -> None:
        self.exact = exact
        self.lists = lists
        self.probes = probes
        self.recall = recall  # what it was measured to find

    @staticmethod
    def build(
        vectors: Tensor,
        *,
        candidates: np.ndarray | None = None,
        settings: IndexSettings | None = None,
        questions: Tensor | None = None,
    ) -> ApproximateIndex:
        """As `ExactIndex.build`. Of the `questions` [N, D] one half says how many lists must be looked into, the other
        what that finds; without any, items' own vectors ask."""
        exact = ExactIndex.build(vectors, candidates=candidates, settings=settings)
        if questions is None:
            drawn = np.random.default_rng(SEED).permutation(len(exact.numbers))[:SAMPLE]
            questions = exact.vectors[torch.from_numpy(drawn)]
        unmeasured = Recall(k=RECALL_AT, share=1.0, questions=0)
        index = ApproximateIndex(exact, Lists.of(exact.vectors), probes=1, recall=unmeasured)
        index.probes = index._enough(finite(questions[::2]))
        judged = questions[1::2]
        index.recall = Recall(k=RECALL_AT, share=recall(index, exact, judged, RECALL_AT), questions=len(judged))
        return index

    def _enough(self, questions: Tensor) -> int:
        """The fewest lists in which questions find the share of the best that the settings ask for."""
        _, best = self.exact.search(questions, RECALL_AT)

        def share(probes: int) -> float:
            depth = math.ceil(SPARE * RECALL_AT)
            return share_found(self._best(questions, depth, best.shape[1], probes=probes)[1], best)

        steps = np.unique(np.geomspace(1, len(self.lists.centres), 64).astype(np.int64)).tolist()
        return int(steps[min(bisect_left(steps, self.exact.settings.recall, key=share), len(steps) - 1)])

    @property
    def n_items(self) -> int:
        return self.exact.n_items

    def search(
        self, queries: Tensor, k: int, *, exclude: Ragged | None = None, only: np.ndarray | Ragged | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `ItemIndex.search`. What else is asked changes no answer but by rounding, and memory is bounded."""
        assert k >= 1
        if isinstance(only, Ragged):
            return self.exact.search(queries, k, exclude=exclude, only=only)
        queries, allowed = finite(queries), None if only is None else self._allowed(only)
        left = len(self.exact.numbers) if allowed is None else int(np.count_nonzero(allowed))
        depths = self._depths(k, exclude, len(queries), left)
        items = torch.zeros(len(queries), min(k, left), dtype=torch.int64)
        scores = torch.full(items.shape, -torch.inf)
        for rows, depth in _alike(depths, queries.shape[1]):
            if len(rows) == len(queries):
                items, scores = self._best(queries, depth, min(k, left), exclude, allowed)
            else:
                banned = None if exclude is None else exclude.take(rows)
                items[rows], scores[rows] = self._best(queries[rows], depth, min(k, left), banned, allowed)
        short = np.flatnonzero(scores.numpy().min(1, initial=np.inf) == -np.inf)
        if len(short):
            banned = None if exclude is None else exclude.take(short)
            items[short], scores[short] = self.exact.search(queries[short], k, exclude=banned, only=only)
        return items, scores

    def _allowed(self, only: np.ndarray) -> np.ndarray:
        """Whether each row may be an answer [n] bool."""
        wanted = np.asarray(only, dtype=np.int64)
        named = np.zeros(self.n_items + 1, dtype=bool)
        named[wanted[(wanted >= 0) & (wanted <= self.n_items)]] = True
        allowed: np.ndarray = named[self.exact.numbers]
        return allowed

    def _depths(self, k: int, exclude: Ragged | None, questions: int, left: int) -> np.ndarray:
        """Items to look for [B], so that k are left when what is forbidden is struck out; 0: all must be scored."""
        wanted = np.full(questions, float(k)) if exclude is None else np.diff(exclude.offsets) + float(k)
        items = len(self.exact.numbers)
        depths = np.ceil(wanted * (SPARE / STEP * items / max(1, left))).astype(np.int64) * STEP
        return np.where(depths * LEAST_ITEMS <= items, depths, 0)

    def _best(
        self,
        queries: Tensor,
        depth: int,
        k: int,
        banned: Ragged | None = None,
        allowed: np.ndarray | None = None,
        *,
        probes: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The best k of `depth` found items [b, k], and their scores. In numpy: a question's arrays are too small for
        torch to be as fast."""
        if probes is None:
            probes = math.ceil(self.probes * max(1.0, depth / (SPARE * RECALL_AT)) ** GROWTH)
        asked = queries.numpy()
        rows = self.lists.search(asked, depth, probes=probes)  # [b, depth], -1 is none
        rows.sort(axis=1)  # by number, so that a stable sort keeps ties in their order
        struck = rows < 0
        if allowed is not None:
            struck |= ~allowed[rows]
        if banned is not None:
            struck |= _named(rows, Pairs.of(banned, self.exact.numbers), len(self.exact.numbers))
        # not by a matrix product: it sums in an order that depends on the place of a row, and ties would be lost
        scores = np.einsum("brd,bd->br", self.exact.vectors.numpy()[rows], asked)
        scores[struck] = -np.inf
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        scores = np.take_along_axis(scores, order, axis=1)
        items = self.exact.numbers[np.take_along_axis(rows, order, axis=1)]
        items[scores == -np.inf] = 0
        return torch.from_numpy(items), torch.from_numpy(scores)

    def with_items(self, vectors: Tensor, numbers: np.ndarray, *, n_items: int) -> ApproximateIndex:
        """See `ItemIndex.with_items`. A new item is put into the list whose centre suits it best."""
        exact = self.exact.with_items(vectors, numbers, n_items=n_items)
        joined = Joined.of(self.exact.numbers, numbers)
        lists = self.lists.with_rows(vectors, joined.order, exact.vectors)
        return ApproximateIndex(exact, lists, probes=self.probes, recall=self.recall)

    def save(self, path: Path) -> None:
        """Write vectors, numbers and lists to one safetensors file, as plain numbers: nothing in it is faiss's own."""
        write_file(
            path,
            {
                "vectors": self.exact.vectors,
                "numbers": torch.from_numpy(self.exact.numbers),
                "centres": torch.from_numpy(self.lists.centres),
                "owners": torch.from_numpy(self.lists.owners),
                "ranges": torch.from_numpy(self.lists.ranges),
            },
            _Facts(n_items=self.n_items, settings=self.exact.settings, probes=self.probes, recall=self.recall),
        )

    @staticmethod
    def load(path: Path) -> ApproximateIndex:
        """Read what `save` wrote."""
        with reading(path):
            arrays, facts = read_file(path, _Facts)
            exact = ExactIndex(
                arrays["vectors"], arrays["numbers"].numpy(), n_items=facts.n_items, settings=facts.settings
            )
            centres, owners, ranges = (arrays[name].numpy() for name in ("centres", "owners", "ranges"))
            lists = Lists(centres, owners, ranges, exact.vectors)
            return ApproximateIndex(exact, lists, probes=facts.probes, recall=facts.recall)


class _Facts(msgspec.Struct, tag_field="kind", tag="approximate", forbid_unknown_fields=True, kw_only=True):
    """What the file's header says."""

    n_items: int
    settings: IndexSettings
    probes: int
    recall: Recall


class Lists:
    """Which list each item is in. They hold the items with a byte a feature, to be looked through."""

    def __init__(self, centres: np.ndarray, owners: np.ndarray, ranges: np.ndarray, vectors: Tensor) -> None:
        rows = _full_width(vectors.numpy())
        width = rows.shape[1]
        self.centres = centres  # [L, D'] float32
        self.owners = owners  # [n] int64: each item's list
        self.ranges = ranges  # [2, D'] float32: the least offset of an item from its centre, and the most less that
        shapes = (centres.shape[1:], owners.shape, ranges.shape)
        if shapes != ((width,), (len(rows),), (2, width)) or not _within(owners, len(centres)):
            raise RuntimeError("its lists are not those of its items")
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
        """Spherical k-means: direction says whom an item is an answer to, length only how often."""
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

    def with_rows(self, new: Tensor, order: np.ndarray, vectors: Tensor) -> Lists:
        """Lists of these `vectors` [n, D]: the old rows and then the `new` [m, D] ones, in this `order` [n]."""
        rows = _full_width(new.detach().to(device="cpu", dtype=torch.float32).numpy())
        nearest = self._centres.search(rows, 1)[1][:, 0]
        offsets = np.concatenate((rows - self.centres[nearest], self.ranges[:1], self.ranges[:1] + self.ranges[1:]))
        least, most = offsets.min(axis=0), offsets.max(axis=0)  # bytes must reach the new ones too
        owners = np.concatenate((self.owners, nearest))[order]
        return Lists(self.centres, owners, np.stack((least, most - least)), vectors)

    def search(self, queries: np.ndarray, depth: int, *, probes: int) -> np.ndarray:
        """The rows [B, depth] of the items that bytes say are best, -1 where the lists hold no more."""
        parameters = _parameters(min(probes, len(self.centres)))
        _, rows = self._items.search(_full_width(queries), depth, params=parameters)
        return rows


def _full_width(vectors: np.ndarray) -> np.ndarray:
    """With features of zero up to whole vector registers [X, D']: without them bytes are compared one by one."""
    spare = -vectors.shape[1] % REGISTER
    return np.concatenate((vectors, np.zeros((len(vectors), spare), vectors.dtype)), axis=1) if spare else vectors


@functools.cache
def _parameters(probes: int) -> faiss.SearchParametersIVF:
    parameters = faiss.SearchParametersIVF()
    parameters.nprobe = probes
    return parameters


def _within(owners: np.ndarray, lists: int) -> bool:
    return owners.dtype == np.int64 and bool(((owners >= 0) & (owners < lists)).all())


def _named(rows: np.ndarray, pairs: Pairs, items: int) -> np.ndarray:
    """Which of the rows [b, depth] of each question are among its pairs."""
    named = np.sort(pairs.columns + pairs.rows * items)
    if not len(named):
        return np.zeros(rows.shape, dtype=bool)
    found = rows + np.arange(len(rows))[:, None] * items
    return np.asarray(named[np.minimum(np.searchsorted(named, found), len(named) - 1)] == found)


def _alike(depths: np.ndarray, width: int) -> Iterator[tuple[np.ndarray, int]]:
    """Questions that look equally deep, as many at a time as memory allows, and how deep; without those of depth 0."""
    for depth in sorted({*depths.tolist()} - {0}):
        rows = np.flatnonzero(depths == depth)
        size = max(1, MOST_FLOATS // (depth * width))
        for begin in range(0, len(rows), size):
            yield rows[begin : begin + size], depth
