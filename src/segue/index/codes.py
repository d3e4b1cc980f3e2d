"""Items known by codes → best items, exactly: a score is a sum of a few numbers out of small tables, and items that
cannot be among the best are left before all of theirs are added up."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from segue.data.batch import ragged_rows
from segue.errors import SettingsError
from segue.index.exact import (
    Pairs,
    allowed_rows,
    answerable_numbers,
    best_columns,
    finite,
    finite_items,
    read_file,
    reading,
    write_file,
)
from segue.index.search import Ragged
from segue.models.similarity.dot import LEAST_LENGTH

CHUNK = 1 << 18  # items looked at together where nothing says which: what is known of them stays in the cache
GOOD, BEST = 4096, 1024  # items that are good by one pair, and the best of them by two, which give the first border
FEW = 1 / 4  # share of items from which down it is faster to go on with them alone
ROUNDING = 2.5e-7  # of the largest sum that there can be, for each number added: what their order may change

Columns = slice | np.ndarray
"""Some items of an index, by their places in it."""


class CodeIndex:
    """The codes of the items that may be answered, in the order of their numbers, and the vectors that codes stand for.

    Codes are taken in pairs, so that a score takes half as many steps, and for each value of a pair there is a list of
    the items that have it. A good item is good by one pair at least: where the k-th best found so far is shared out
    among the pairs, it reaches the share of one of them, so only lists that do are looked at. Their items go on from
    pair to pair, fewer each time, while the most that the other pairs could add does not leave them below. After
    Petrov, Macdonald and Tonellotto, "Efficient Recommendation with Millions of Items by Dynamic Pruning of Sub-Item
    Embeddings", SIGIR 2025.
    """

    def __init__(
        self, centroids: Tensor, pairs: np.ndarray, numbers: np.ndarray, *, n_items: int, normal: bool
    ) -> None:
        self.centroids = centroids  # [parts, values, d] float32
        self.pairs = pairs  # [pairs, n] uint16: two codes of an item as one, first · values + second
        self.numbers = numbers  # [n] int64, ascending: the items of these columns
        self.lengths = _lengths(centroids, pairs) if normal else None  # [n] float32: what scores are divided by
        self._n_items = n_items
        self._lists = [_Lists(pair, centroids.shape[1] ** 2) for pair in pairs]

    @staticmethod
    def build(
        centroids: Tensor, codes: Tensor, *, candidates: np.ndarray | None = None, normal: bool = False
    ) -> CodeIndex:
        """From the vectors that parts may be [parts, values, d] and the codes of all items [V + 1, parts] uint8; row 0
        is padding and never an answer.

        `candidates` [V + 1] bool: items that may be answered. `normal`: items count as if their length were one.
        """
        numbers, centroids = answerable_numbers(len(codes), candidates), finite_items(centroids)
        pairs = _paired(codes.cpu().numpy(), numbers, centroids.shape[1])
        return CodeIndex(centroids, pairs, numbers, n_items=len(codes) - 1, normal=normal)

    def by_direction(self) -> CodeIndex:
        """The same items, as if their lengths were one; what is kept of them is shared."""
        if self.lengths is not None:
            return self
        turned = copy.copy(self)
        turned.lengths = _lengths(self.centroids, self.pairs)
        return turned

    @property
    def n_items(self) -> int:
        return self._n_items

    def search(
        self, queries: Tensor, k: int, *, exclude: Ragged | None = None, only: np.ndarray | Ragged | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `ItemIndex.search`."""
        assert k >= 1
        queries = finite(queries)
        pool = allowed_rows(self.numbers, only)
        width = min(k, len(self.numbers) if pool is None else len(pool))
        items = torch.zeros(len(queries), width, dtype=torch.int64)
        scores = torch.full((len(queries), width), -torch.inf)
        for row in range(len(queries) if width else 0):
            one = slice(row, row + 1)
            allowed = np.unique(Pairs.of(only.rows(one), self.numbers).columns) if isinstance(only, Ragged) else pool
            banned = None if exclude is None else Pairs.of(exclude.rows(one), self.numbers).columns
            columns, found = self._best(_Question(self.centroids, queries[row]), width, allowed, banned)
            items[row, : len(columns)] = torch.from_numpy(self.numbers[columns])
            scores[row, : len(columns)] = found
        return items, scores

    @property
    def codes(self) -> np.ndarray:
        """The items' codes [n, parts] uint8."""
        parts, values = self.centroids.shape[:2]
        codes = np.empty((len(self.numbers), parts), dtype=np.uint8)
        for pair, both in enumerate(self.pairs):
            alone = 2 * pair + 1 == parts
            codes[:, 2 * pair] = both if alone else both // values
            if not alone:
                codes[:, 2 * pair + 1] = both % values
        return codes

    def _best(
        self, question: _Question, k: int, allowed: np.ndarray | None, banned: np.ndarray | None
    ) -> tuple[np.ndarray, Tensor]:
        """The k best columns and their scores, of those that are `allowed`, ascending, or of all."""
        border = self._first_border(question, k, banned) if allowed is None else -math.inf
        listed = self._by_lists(question, border) if allowed is None else None
        if listed is not None:
            columns = _without(listed, banned)
            return _taken(columns, self._scores(question, columns), k)
        columns, scores = np.zeros(0, dtype=np.int64), torch.zeros(0)
        for some in _chunks(len(self.numbers) if allowed is None else len(allowed)):
            chunk = some if allowed is None else allowed[some]
            sums = self._sums(question, chunk, question.order[:2])
            here = _without(self._narrowed(question, chunk, sums, border, question.order[2:]), banned)
            found = torch.cat((scores, self._scores(question, here)))
            columns, scores = _taken(np.concatenate((columns, here)), found, k)
            border = float(scores[-1]) if len(columns) == k else border
        return columns, scores

    def _first_border(self, question: _Question, k: int, banned: np.ndarray | None) -> float:
        """A score that k items reach: that of the k-th best where the first two pairs add most; -inf where there are
        too few."""
        lists, best = self._lists[question.order[0]], max(BEST, 4 * k)
        columns = _without(lists.items(question.highest(max(GOOD, 4 * best), lists.sizes)), banned)
        if len(columns) > best:
            columns = columns[np.argpartition(self._sums(question, columns, question.order[:2]), -best)[-best:]]
        return -math.inf if len(columns) < k else float(torch.topk(self._scores(question, columns), k).values[-1])

    def _by_lists(self, question: _Question, border: float) -> np.ndarray | None:
        """The columns [n], ascending, that may reach the border, of those in lists that reach a pair's share of it;
        None where these would be many, or nothing is known of the border."""
        shares = question.shares(self._least_sum(question, border))
        if shares is None:
            return None
        high = [np.flatnonzero(table >= share) for table, share in zip(question.tables, shares, strict=True)]
        sizes = [lists.sizes[values] for lists, values in zip(self._lists, high, strict=True)]
        if sum(int(size.sum()) for size in sizes) >= FEW * len(self.numbers):
            return None
        kept = []
        for pair, (values, size) in enumerate(zip(high, sizes, strict=True)):
            sums = np.repeat(question.tables[pair][values], size)
            others = [other for other in question.order if other != pair]
            kept.append(self._narrowed(question, self._lists[pair].items(values), sums, border, others))
        return np.unique(np.concatenate(kept))

    def _narrowed(
        self, question: _Question, some: Columns, sums: np.ndarray, border: float, others: Sequence[int]
    ) -> np.ndarray:
        """The columns whose scores may reach the border, given what all pairs but some `others` add."""
        if border == -math.inf:
            return _of(some, np.arange(len(sums)))
        kept = np.flatnonzero(sums >= self._needed(question, some, border, others))
        columns, sums = _of(some, kept), sums.take(kept)
        for place, pair in enumerate(others, 1):
            sums += self._sums(question, columns, [pair])
            kept = np.flatnonzero(sums >= self._needed(question, columns, border, others[place:]))
            columns, sums = columns.take(kept), sums.take(kept)
        return columns

    def _needed(
        self, question: _Question, some: Columns, border: float, others: Sequence[int]
    ) -> np.float32 | np.ndarray:
        """What the sum must be for a score at the border, if the other pairs add the most they can."""
        least = border - question.rounding * abs(border)
        if self.lengths is None:
            return np.float32(least - question.most(others))
        needed: np.ndarray = np.float32(least) * self.lengths[some] - np.float32(question.most(others))
        return needed

    def _least_sum(self, question: _Question, border: float) -> float:
        """What all pairs of any item must add up to for a score at the border."""
        least = border - question.rounding * abs(border)
        if self.lengths is not None:
            least *= float(self.lengths.min() if least > 0 else self.lengths.max())
        return least - question.most(())

    def _scores(self, question: _Question, columns: np.ndarray) -> Tensor:
        """Always summed in one order, so that equal codes have equal scores."""
        found = self._sums(question, columns, range(len(self.pairs)))
        return torch.from_numpy(found if self.lengths is None else found / self.lengths[columns])

    def _sums(self, question: _Question, some: Columns, pairs: Sequence[int]) -> np.ndarray:
        """What these pairs of some columns add up to [c]."""
        found: np.ndarray | None = None
        for pair in pairs:
            both = self.pairs[pair][some] if isinstance(some, slice) else self.pairs[pair].take(some)
            added = question.tables[pair].take(both)
            found = added if found is None else np.add(found, added, out=found)
        assert found is not None
        return found

    def with_items(self, vectors: Tensor, numbers: np.ndarray, *, n_items: int) -> CodeIndex:  # noqa: ARG002
        """Refused; see `ItemIndex.with_items`."""
        raise SettingsError("No item can be added to an index of codes, as these come from the log: train again.")

    def save(self, path: Path) -> None:
        """Write what codes stand for, the items' codes and their numbers to one safetensors file."""
        arrays = {
            "centroids": self.centroids,
            "codes": torch.from_numpy(self.codes),
            "numbers": torch.from_numpy(self.numbers),
        }
        write_file(path, arrays, _Facts(n_items=self.n_items, normal=self.lengths is not None))

    @staticmethod
    def load(path: Path) -> CodeIndex:
        """Read what `save` wrote."""
        with reading(path):
            arrays, facts = read_file(path, _Facts)
            centroids, codes, numbers = arrays["centroids"], arrays["codes"].numpy(), arrays["numbers"].numpy()
            pairs = _paired(codes, np.arange(len(codes)), centroids.shape[1])
            return CodeIndex(centroids, pairs, numbers, n_items=facts.n_items, normal=facts.normal)


class _Facts(msgspec.Struct, tag_field="kind", tag="codes", forbid_unknown_fields=True):
    """What the file's header says."""

    n_items: int
    normal: bool


class _Lists:
    """The items that have each value of a pair."""

    def __init__(self, pair: np.ndarray, values: int) -> None:
        self._order = np.argsort(pair, kind="stable").astype(np.int32)  # value after value
        self.sizes = np.bincount(pair, minlength=values)
        self._begins = np.cumsum(self.sizes) - self.sizes

    def items(self, values: np.ndarray) -> np.ndarray:
        """The columns of these values, one after the other."""
        rows = ragged_rows(self._begins[values], self.sizes[values])
        columns: np.ndarray = self._order[rows].astype(np.int64)
        return columns


class _Question:
    """A question's products with all that a pair of codes may stand for."""

    def __init__(self, centroids: Tensor, asked: Tensor) -> None:
        self._products = (centroids @ asked.view(len(centroids), -1, 1))[:, :, 0].numpy()  # [parts, values]
        self.tables = _pair_tables(self._products)
        self._firsts = np.arange(0, len(centroids), 2)  # parts that pairs begin with
        self._most = np.add.reduceat(self._products.max(axis=1).astype(np.float64), self._firsts)
        self._means = np.add.reduceat(self._products.mean(axis=1, dtype=np.float64), self._firsts)
        self.order: list[int] = np.argsort(self._means - self._most, kind="stable").tolist()
        """Pairs, those first that tell items apart best."""
        self.rounding = ROUNDING * (len(self.tables) + 12)  # the products are rounded too
        self._hidden = self.rounding * float(np.abs(self._products).max(axis=1).sum())

    def most(self, pairs: Sequence[int]) -> float:
        """The most that these pairs may add, and what rounding may hide."""
        return float(sum(self._most[pair] for pair in pairs)) + self._hidden

    def shares(self, total: float) -> list[np.float32] | None:
        """A sum shared out among the pairs, so that about as few items reach each share: as many deviations above what
        a pair adds on average. None where it is -inf, or no pair tells items apart."""
        apart = np.sqrt(np.add.reduceat(self._products.var(axis=1, dtype=np.float64), self._firsts))
        if total == -math.inf or not apart.sum():
            return None
        above = (total - self._means.sum()) / apart.sum()
        # Rounded down: what the shares add up to must not be above the sum.
        return [np.nextafter(np.float32(share), np.float32(-math.inf)) for share in self._means + above * apart]

    def highest(self, wanted: int, sizes: np.ndarray) -> np.ndarray:
        """Values of the first pair that add most, so many that `wanted` items have them, or all. `sizes`: how many
        items have each value."""
        first = 2 * self.order[0]
        ranked = np.argsort(-self._products[first : first + 2], axis=1)
        count = values = ranked.shape[1]
        side = math.ceil(math.sqrt(wanted / max(1, sizes.sum()) * values ** len(ranked))) if len(ranked) > 1 else wanted
        while True:
            count = min(side, values)
            found = ranked[0, :count]
            if len(ranked) > 1:
                found = (found[:, None] * values + ranked[1, :count]).ravel()
            if count == values or sizes[found].sum() >= wanted:
                return found
            side *= 2


def _pair_tables(table: np.ndarray) -> list[np.ndarray]:
    """Numbers of each part's values [parts, values] → their sums for all pairs of values of two parts, each flat."""
    return [
        (table[part][:, None] + table[part + 1]).ravel() if part + 1 < len(table) else table[part]
        for part in range(0, len(table), 2)
    ]


def _paired(codes: np.ndarray, rows: np.ndarray, values: int) -> np.ndarray:
    """The codes [V, parts] of these rows, two by two [pairs, n] uint16; of an odd number the last stands alone."""
    pairs = np.empty((-(-codes.shape[1] // 2), len(rows)), dtype=np.uint16)
    for pair, row in enumerate(pairs):
        row[:] = codes[rows, 2 * pair]
        if 2 * pair + 1 < codes.shape[1]:
            row *= np.uint16(values)
            row += codes[rows, 2 * pair + 1]
    return pairs


def _lengths(centroids: Tensor, pairs: np.ndarray) -> np.ndarray:
    """The lengths of items' vectors [n]: squares add up part by part."""
    squares = np.zeros(pairs.shape[1], dtype=np.float32)
    for table, pair in zip(_pair_tables(centroids.square().sum(2).numpy()), pairs, strict=True):
        squares += table[pair]
    return np.maximum(np.sqrt(squares), np.float32(LEAST_LENGTH))


def _chunks(count: int) -> Iterator[slice]:
    return (slice(begin, min(begin + CHUNK, count)) for begin in range(0, count, CHUNK))


def _taken(columns: np.ndarray, scores: Tensor, k: int) -> tuple[np.ndarray, Tensor]:
    """The k best and their scores; of equal ones those that stand first, which have lower numbers."""
    order, best = best_columns(scores[None], k)
    return columns[order[0].numpy()], best[0]


def _of(some: Columns, places: np.ndarray) -> np.ndarray:
    """The columns at these places among some."""
    columns: np.ndarray = places + some.start if isinstance(some, slice) else some.take(places)
    return columns


def _without(columns: np.ndarray, banned: np.ndarray | None) -> np.ndarray:
    if banned is None or not len(banned):
        return columns
    kept: np.ndarray = columns[~np.isin(columns, banned)]
    return kept
