"""The exact index of items with codes: scores are sums of table entries, and items that cannot be among the best are
dropped before their sums are complete."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from segue.data.batch import ragged_rows
from segue.errors import SettingsError
from segue.index.exact import best_columns, candidate_numbers, finite, search_singly, write_file
from segue.index.search import BestItems, Only, Ragged
from segue.models.similarity.dot import LEAST_LENGTH

CHUNK = 1 << 18  # items scanned at a time, so that their sums stay in the cache
GOOD, BEST = 4096, 1024  # items that are best by one pair, and the best of these by two, which set the first threshold
FEW = 1 / 4  # share of the items in lists below which scanning lists is faster than scanning all
ROUNDING = 2.5e-7  # relative rounding error of a sum, for each number added

Columns = slice | np.ndarray
"""Some items of an index, by their columns."""


class CodeIndex:
    """The codes of the items that may be recommended, in the order of their numbers, and the centroids of the codes.

    Codes are taken in pairs, which halves the additions, and each value of a pair has a list of its items. The k-th
    best score found so far is a threshold, which is split into a share for each pair. An item that reaches it reaches
    the share of one pair at least, so only lists that do are scanned. Their items are narrowed pair by pair: an item is
    dropped when even the highest values of its other pairs leave it below the threshold. After Petrov, Macdonald and
    Tonellotto, "Efficient Recommendation with Millions of Items by Dynamic Pruning of Sub-Item Embeddings", SIGIR 2025.
    """

    def __init__(
        self, centroids: Tensor, pairs: np.ndarray, numbers: np.ndarray, *, n_items: int, normal: bool
    ) -> None:
        self.centroids = centroids  # [parts, values, d] float32
        self.pairs = pairs  # [pairs, n] uint16: first code · values + second code
        self.numbers = numbers  # [n] int64, ascending: the items of these columns
        self.lengths = _lengths(centroids, pairs) if normal else None  # [n] float32: divisors of scores
        self.n_items = n_items
        self._lists = [_Lists(pair, centroids.shape[1] ** 2) for pair in pairs]

    @staticmethod
    def build(
        centroids: Tensor, codes: Tensor, *, candidates: np.ndarray | None = None, normal: bool = False
    ) -> CodeIndex:
        """The index of centroids [parts, values, d] and all items' codes [V + 1, parts] uint8; see `ExactIndex.build`.

        `normal`: items are scored as if their vectors had length 1.
        """
        numbers, centroids = candidate_numbers(len(codes), candidates), finite(centroids, "An item vector")
        pairs = _pair_codes(codes.cpu().numpy(), numbers, centroids.shape[1])
        return CodeIndex(centroids, pairs, numbers, n_items=len(codes) - 1, normal=normal)

    def by_cosine(self) -> CodeIndex:
        """The index of the same items with length 1; it shares this one's arrays."""
        if self.lengths is not None:
            return self
        normal = copy.copy(self)
        normal.lengths = _lengths(self.centroids, self.pairs)
        return normal

    def search(self, queries: Tensor, k: int, *, exclude: Ragged | None = None, only: Only = None) -> BestItems:
        """See `ItemIndex.search`."""
        return search_singly(self._best, self.numbers, queries, k, exclude, only)

    def _best(
        self, vector: Tensor, k: int, allowed: np.ndarray | None, banned: np.ndarray | None
    ) -> tuple[np.ndarray, Tensor]:
        """See `OneSearch`."""
        query = _Query(self.centroids, vector)
        threshold = self._first_threshold(query, k, banned) if allowed is None else -math.inf
        columns_in_lists = self._by_lists(query, threshold) if allowed is None else None
        if columns_in_lists is not None:
            columns = _without(columns_in_lists, banned)
            return _best_of(columns, self._scores(query, columns), k)
        columns, scores = np.zeros(0, dtype=np.int64), torch.zeros(0)
        count = len(self.numbers) if allowed is None else len(allowed)
        for begin in range(0, count, CHUNK):
            some = slice(begin, min(begin + CHUNK, count))
            chunk = some if allowed is None else allowed[some]
            sums = self._sums(query, chunk, query.order[:2])
            here = _without(self._narrowed(query, chunk, sums, threshold, query.order[2:]), banned)
            merged = torch.cat((scores, self._scores(query, here)))
            columns, scores = _best_of(np.concatenate((columns, here)), merged, k)
            threshold = float(scores[-1]) if len(columns) == k else threshold
        return columns, scores

    def _first_threshold(self, query: _Query, k: int, banned: np.ndarray | None) -> float:
        """A score that k items reach: the k-th best among the items with the highest sums of the first two pairs; -inf
        if there are too few."""
        lists, best = self._lists[query.order[0]], max(BEST, 4 * k)
        columns = _without(lists.items(query.highest_values(max(GOOD, 4 * best), lists.sizes)), banned)
        if len(columns) > best:
            columns = columns[np.argpartition(self._sums(query, columns, query.order[:2]), -best)[-best:]]
        return -math.inf if len(columns) < k else float(torch.topk(self._scores(query, columns), k).values[-1])

    def _by_lists(self, query: _Query, threshold: float) -> np.ndarray | None:
        """The columns [n] that may reach the threshold, ascending, from the lists that reach their pair's share of it;
        None if these are many, or if there is no threshold yet."""
        least = threshold - query.rounding * abs(threshold)
        if self.lengths is not None:
            least *= float(self.lengths.min() if least > 0 else self.lengths.max())
        shares = query.shares(least - query.highest_sum(()))  # of the least sum with which any item may reach it
        if shares is None:
            return None
        high = [np.flatnonzero(table >= share) for table, share in zip(query.tables, shares, strict=True)]
        sizes = [lists.sizes[values] for lists, values in zip(self._lists, high, strict=True)]
        if sum(int(size.sum()) for size in sizes) >= FEW * len(self.numbers):
            return None
        columns = []
        for pair, (values, size) in enumerate(zip(high, sizes, strict=True)):
            sums = np.repeat(query.tables[pair][values], size)
            others = [other for other in query.order if other != pair]
            columns.append(self._narrowed(query, self._lists[pair].items(values), sums, threshold, others))
        return np.unique(np.concatenate(columns))

    def _narrowed(
        self, query: _Query, some: Columns, sums: np.ndarray, threshold: float, others: Sequence[int]
    ) -> np.ndarray:
        """The columns that may reach the threshold, given the sums of all pairs but `others`."""
        if threshold == -math.inf:
            return _select(some, np.arange(len(sums)))
        reaching = np.flatnonzero(sums >= self._needed(query, some, threshold, others))
        columns, sums = _select(some, reaching), sums.take(reaching)
        for done, pair in enumerate(others, 1):
            sums += self._sums(query, columns, [pair])
            reaching = np.flatnonzero(sums >= self._needed(query, columns, threshold, others[done:]))
            columns, sums = columns.take(reaching), sums.take(reaching)
        return columns

    def _needed(self, query: _Query, some: Columns, threshold: float, others: Sequence[int]) -> np.float32 | np.ndarray:
        """The least sum with which an item may reach the threshold, if its other pairs have their highest values."""
        least = threshold - query.rounding * abs(threshold)
        if self.lengths is None:
            return np.float32(least - query.highest_sum(others))
        needed: np.ndarray = np.float32(least) * self.lengths[some] - np.float32(query.highest_sum(others))
        return needed

    def _scores(self, query: _Query, columns: np.ndarray) -> Tensor:
        """Scores of columns, always summed in one order, so that equal codes have equal scores."""
        sums = self._sums(query, columns, range(len(self.pairs)))
        return torch.from_numpy(sums if self.lengths is None else sums / self.lengths[columns])

    def _sums(self, query: _Query, some: Columns, pairs: Sequence[int]) -> np.ndarray:
        """The sums of these pairs' values for some columns [c]."""
        sums: np.ndarray | None = None
        for pair in pairs:
            both = self.pairs[pair][some] if isinstance(some, slice) else self.pairs[pair].take(some)
            values = query.tables[pair].take(both)
            sums = values if sums is None else np.add(sums, values, out=sums)
        assert sums is not None
        return sums

    def with_items(self, vectors: Tensor, numbers: np.ndarray, *, n_items: int) -> CodeIndex:  # noqa: ARG002
        """Refused; see `ItemIndex.with_items`."""
        raise SettingsError("Items cannot be added to an index of codes, which come from the log; train again.")

    def save(self, path: Path) -> None:
        """Write centroids, codes [n, parts] uint8 and numbers to one safetensors file."""
        parts, values = self.centroids.shape[:2]
        codes = np.empty((len(self.numbers), parts), dtype=np.uint8)
        for part, both in zip(range(0, parts, 2), self.pairs, strict=True):
            both_codes = [both] if part + 1 == parts else np.divmod(both, values)
            codes[:, part : part + 2] = np.stack(both_codes, axis=1)
        arrays = {
            "centroids": self.centroids,
            "codes": torch.from_numpy(codes),
            "numbers": torch.from_numpy(self.numbers),
        }
        write_file(path, arrays, _Facts(n_items=self.n_items, normal=self.lengths is not None))

    @staticmethod
    def of_file(arrays: dict[str, Tensor], header: str) -> CodeIndex:
        """The index in the contents of a file that `save` wrote."""
        facts = msgspec.json.decode(header, type=_Facts)
        centroids, codes, numbers = arrays["centroids"], arrays["codes"].numpy(), arrays["numbers"].numpy()
        pairs = _pair_codes(codes, np.arange(len(codes)), centroids.shape[1])
        return CodeIndex(centroids, pairs, numbers, n_items=facts.n_items, normal=facts.normal)


class _Facts(msgspec.Struct, tag_field="kind", tag="codes", forbid_unknown_fields=True):
    n_items: int
    normal: bool


class _Lists:
    """The items of each value of a pair."""

    def __init__(self, pair: np.ndarray, values: int) -> None:
        self._order = np.argsort(pair, kind="stable").astype(np.int32)  # by value
        self.sizes = np.bincount(pair, minlength=values)
        self._begins = np.cumsum(self.sizes) - self.sizes

    def items(self, values: np.ndarray) -> np.ndarray:
        """The columns of these values, one value after another."""
        rows = ragged_rows(self._begins[values], self.sizes[values])
        columns: np.ndarray = self._order[rows].astype(np.int64)
        return columns


class _Query:
    """A query's products with the centroids of each pair of codes."""

    def __init__(self, centroids: Tensor, query: Tensor) -> None:
        self._products = (centroids @ query.view(len(centroids), -1, 1))[:, :, 0].numpy()  # [parts, values]
        self.tables = _pair_tables(self._products)
        self._firsts = np.arange(0, len(centroids), 2)  # first part of each pair
        self._highest = np.add.reduceat(self._products.max(axis=1).astype(np.float64), self._firsts)
        self._means = np.add.reduceat(self._products.mean(axis=1, dtype=np.float64), self._firsts)
        self.order: list[int] = np.argsort(self._means - self._highest, kind="stable").tolist()
        """Pairs, those first whose highest value is furthest above their mean."""
        self.rounding = ROUNDING * (len(self.tables) + 12)  # includes the rounding of products
        self._error = self.rounding * float(np.abs(self._products).max(axis=1).sum())

    def highest_sum(self, pairs: Sequence[int]) -> float:
        """The highest sum of these pairs, plus the rounding error."""
        return float(sum(self._highest[pair] for pair in pairs)) + self._error

    def shares(self, total: float) -> list[np.float32] | None:
        """Split a sum among the pairs so that about equally few items reach each share: each is the same number of
        standard deviations above its pair's mean. None if the sum is -inf or all deviations are 0."""
        deviations = np.sqrt(np.add.reduceat(self._products.var(axis=1, dtype=np.float64), self._firsts))
        if total == -math.inf or not deviations.sum():
            return None
        above = (total - self._means.sum()) / deviations.sum()
        # Rounded down: the shares must not add up to more than the sum.
        return [np.nextafter(np.float32(share), np.float32(-math.inf)) for share in self._means + above * deviations]

    def highest_values(self, least: int, sizes: np.ndarray) -> np.ndarray:
        """The highest values of the first pair: as many as `least` items have, or all. `sizes`: number of items of each
        value."""
        first = 2 * self.order[0]
        ranked = np.argsort(-self._products[first : first + 2], axis=1)
        count = values = ranked.shape[1]
        side = math.ceil(math.sqrt(least / max(1, sizes.sum()) * values ** len(ranked))) if len(ranked) > 1 else least
        while True:
            count = min(side, values)
            highest = ranked[0, :count]
            if len(ranked) > 1:
                highest = (highest[:, None] * values + ranked[1, :count]).ravel()
            if count == values or sizes[highest].sum() >= least:
                return highest
            side *= 2


def _pair_tables(table: np.ndarray) -> list[np.ndarray]:
    """Numbers of each part's values [parts, values] → the sums for all pairs of values of two parts, each flattened."""
    return [
        (table[part][:, None] + table[part + 1]).ravel() if part + 1 < len(table) else table[part]
        for part in range(0, len(table), 2)
    ]


def _pair_codes(codes: np.ndarray, rows: np.ndarray, values: int) -> np.ndarray:
    """The codes [V, parts] of these rows in pairs [pairs, n] uint16; the last of an odd number stays single."""
    pairs = np.empty((-(-codes.shape[1] // 2), len(rows)), dtype=np.uint16)
    for pair, row in enumerate(pairs):
        row[:] = codes[rows, 2 * pair]
        if 2 * pair + 1 < codes.shape[1]:
            row *= np.uint16(values)
            row += codes[rows, 2 * pair + 1]
    return pairs


def _lengths(centroids: Tensor, pairs: np.ndarray) -> np.ndarray:
    """Lengths of the items' vectors [n], from the sums of squares of the parts."""
    squares = np.zeros(pairs.shape[1], dtype=np.float32)
    for table, pair in zip(_pair_tables(centroids.square().sum(2).numpy()), pairs, strict=True):
        squares += table[pair]
    return np.maximum(np.sqrt(squares), np.float32(LEAST_LENGTH))


def _best_of(columns: np.ndarray, scores: Tensor, k: int) -> tuple[np.ndarray, Tensor]:
    """The k best columns and their scores; among equal ones the first, which have lower numbers."""
    order, best = best_columns(scores[None], k)
    return columns[order[0].numpy()], best[0]


def _select(some: Columns, indices: np.ndarray) -> np.ndarray:
    """The columns at these indices of `some`."""
    columns: np.ndarray = indices + some.start if isinstance(some, slice) else some.take(indices)
    return columns


def _without(columns: np.ndarray, banned: np.ndarray | None) -> np.ndarray:
    if banned is None or not len(banned):
        return columns
    remaining: np.ndarray = columns[~np.isin(columns, banned)]
    return remaining
