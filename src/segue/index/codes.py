"""Items known by codes → best items, exactly: a score is a sum of a few numbers out of small tables, and items that
cannot be among the best are left before all of theirs are added up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from segue.errors import SettingsError
from segue.index.exact import Pairs, allowed_rows, best_columns, finite, finite_items, read_file, reading, write_file
from segue.index.search import Ragged
from segue.models.similarity import LEAST_LENGTH

CHUNK = 1 << 18  # items looked at together: what is known of them so far stays in the cache
SAMPLE = 4096  # of a chunk's items, by which it is guessed which look best
LOOKING_BEST = 1024  # items of which the first border is made, at least
FEW = 1 / 16  # share of items from which down it is faster to go on with them alone
ROUNDING = 4e-6  # of the largest sum that there can be: what the order of adding may change

Columns = slice | np.ndarray
"""Some items of an index, by their places in it, ascending."""


class CodeIndex:
    """The codes of the items that may be answered, in the order of their numbers, and the vectors that codes stand for.

    Codes are taken in pairs, so that a score takes half as many steps. Of every item only the two pairs are added that
    tell items apart best; where the most that the others could add leaves an item below the k-th best found so far, it
    is dropped. That is the idea of Petrov, Macdonald and Tonellotto, "Efficient Recommendation with Millions of Items
    by Dynamic Pruning of Sub-Item Embeddings", SIGIR 2025; their lists of the items of each code want compiled code.
    """

    def __init__(
        self, centroids: Tensor, pairs: Tensor, numbers: np.ndarray, *, n_items: int, lengths: Tensor | None
    ) -> None:
        self.centroids = centroids  # [parts, values, d] float32
        self.pairs = pairs  # [pairs, n] int32: two codes of an item as one, first · values + second
        self.numbers = numbers  # [n] int64, ascending: the items of these columns
        self.lengths = lengths  # [n] float32: of the items' vectors, where scores are divided by them
        self._n_items = n_items

    @staticmethod
    def build(
        centroids: Tensor, codes: Tensor, *, candidates: np.ndarray | None = None, normal: bool = False
    ) -> CodeIndex:
        """From the vectors that parts may be [parts, values, d] and the codes of all items [V + 1, parts] uint8; row 0
        is padding and never an answer.

        `candidates` [V + 1] bool: items that may be answered. `normal`: items count as if their length were one.
        """
        assert candidates is None or len(candidates) == len(codes)
        allowed = np.ones(len(codes), dtype=bool) if candidates is None else np.array(candidates, dtype=bool)
        allowed[0] = False
        numbers, centroids = np.flatnonzero(allowed).astype(np.int64), finite_items(centroids)
        pairs = _paired(codes.cpu().numpy(), numbers, centroids.shape[1])
        lengths = _lengths(centroids, pairs) if normal else None
        return CodeIndex(centroids, pairs, numbers, n_items=len(codes) - 1, lengths=lengths)

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

    def codes(self, columns: Columns = slice(None)) -> Tensor:
        """The codes of these columns [c, parts] uint8."""
        parts, values = self.centroids.shape[:2]
        both = self.pairs[:, columns]
        apart = torch.stack((both.div(values, rounding_mode="floor"), both % values), dim=1).flatten(0, 1)
        if parts % 2:  # the last part stands alone
            apart = torch.cat((apart[: parts - 1], both[-1:]))
        return apart.T.to(torch.uint8).contiguous()

    def _best(
        self, question: _Question, k: int, allowed: np.ndarray | None, banned: np.ndarray | None
    ) -> tuple[np.ndarray, Tensor]:
        """The k best columns and their scores, chunk by chunk; each chunk knows the k-th best of those before it."""
        columns, scores, border = np.zeros(0, dtype=np.int64), torch.zeros(0), -math.inf
        for some in self._chunks(allowed):
            sums = question.first_sums(self._pairs(some, question.order[:2]))
            if border == -math.inf:
                border = self._first_border(question, some, sums, k, banned)
            here = self._survivors(question, some, sums, border, banned)
            columns = np.concatenate((columns, here))
            scores = torch.cat((scores, self._scores(question, here)))
            # Earlier columns stand first, so that of equal scores those of lower numbers are taken.
            order, best = best_columns(scores[None], k)
            columns, scores = columns[order[0].numpy()], best[0]
            border = float(scores[-1]) if len(columns) == k else -math.inf
        return columns, scores

    def _chunks(self, allowed: np.ndarray | None) -> Iterator[Columns]:
        count = len(self.numbers) if allowed is None else len(allowed)
        for begin in range(0, count, CHUNK):
            some = slice(begin, min(begin + CHUNK, count))
            yield some if allowed is None else allowed[some]

    def _first_border(
        self, question: _Question, some: Columns, sums: np.ndarray, k: int, banned: np.ndarray | None
    ) -> float:
        """A score that k items reach: that of the k-th best among those whose first sums are the highest; -inf where
        they are too few."""
        step = -(-len(sums) // SAMPLE)
        sample = sums[::step]
        place = max(0, len(sample) - 1 - max(LOOKING_BEST, 4 * k) // step)
        high = np.flatnonzero(sums >= np.partition(sample, place)[place])
        scores = self._scores(question, _without(_of(some, high), banned))
        return -math.inf if len(scores) < k else float(torch.topk(scores, k).values[-1])

    def _survivors(
        self, question: _Question, some: Columns, sums: np.ndarray, border: float, banned: np.ndarray | None
    ) -> np.ndarray:
        """The columns whose scores may reach the border, ascending."""
        if border == -math.inf:
            return _without(_of(some, np.arange(len(sums))), banned)
        least = border - ROUNDING * abs(border)
        high = sums >= self._needed(question, some, least, added=2)
        for added, pair in enumerate(question.order[2:-1], 3):
            if np.count_nonzero(high) < FEW * len(high):
                kept = np.flatnonzero(high)
                some, sums = _of(some, kept), sums[kept]
            sums += question.tables[pair].index_select(0, *self._pairs(some, [pair])).numpy()
            high = sums >= self._needed(question, some, least, added=added)
        return _without(_of(some, np.flatnonzero(high)), banned)

    def _needed(self, question: _Question, some: Columns, least: float, *, added: int) -> float | np.ndarray:
        """What a sum of so many pairs must be for a score of `least`, if the others add the most they can."""
        rest = question.rest(added)
        if self.lengths is None:
            return np.float32(least - rest)
        needed: np.ndarray = self.lengths[some].numpy() * np.float32(least) - np.float32(rest)
        return needed

    def _scores(self, question: _Question, columns: np.ndarray) -> Tensor:
        """Always summed in one order, so that equal codes have equal scores."""
        found = torch.zeros(len(columns))
        for table, places in zip(question.tables, self._pairs(columns, range(len(self.pairs))), strict=True):
            found += table.index_select(0, places)
        return found if self.lengths is None else found / self.lengths[columns]

    def _pairs(self, some: Columns, which: range | list[int]) -> list[Tensor]:
        """These pairs of some columns, each [c]."""
        if isinstance(some, slice):
            return [self.pairs[pair, some] for pair in which]
        places = torch.from_numpy(some)
        return [self.pairs[pair].index_select(0, places) for pair in which]

    def with_items(self, vectors: Tensor, numbers: np.ndarray, *, n_items: int) -> CodeIndex:  # noqa: ARG002
        """Refused; see `ItemIndex.with_items`."""
        raise SettingsError("No item can be added to an index of codes, as these come from the log: train again.")

    def save(self, path: Path) -> None:
        """Write what codes stand for, the items' codes and their numbers to one safetensors file."""
        arrays = {"centroids": self.centroids, "codes": self.codes(), "numbers": torch.from_numpy(self.numbers)}
        write_file(path, arrays, _Facts(n_items=self.n_items, normal=self.lengths is not None))

    @staticmethod
    def load(path: Path) -> CodeIndex:
        """Read what `save` wrote."""
        with reading(path):
            arrays, facts = read_file(path, _Facts)
            centroids, codes, numbers = arrays["centroids"], arrays["codes"].numpy(), arrays["numbers"].numpy()
            pairs = _paired(codes, np.arange(len(codes)), centroids.shape[1])
            lengths = _lengths(centroids, pairs) if facts.normal else None
            return CodeIndex(centroids, pairs, numbers, n_items=facts.n_items, lengths=lengths)


class _Facts(msgspec.Struct, tag_field="kind", tag="codes", forbid_unknown_fields=True):
    """What the file's header says."""

    n_items: int
    normal: bool


class _Question:
    """A question's products with all that a pair of codes may stand for."""

    def __init__(self, centroids: Tensor, asked: Tensor) -> None:
        products = (centroids @ asked.view(len(centroids), -1, 1))[:, :, 0]  # [parts, values]
        self.tables = _pair_tables(products)
        self._most = [float(table.max()) for table in self.tables]
        apart = [most - float(table.mean()) for most, table in zip(self._most, self.tables, strict=True)]
        self.order = sorted(range(len(apart)), key=lambda pair: -apart[pair])
        """Pairs, those first that tell items apart best."""
        self._rounding = ROUNDING * float(products.abs().amax(1).sum())

    def first_sums(self, places: list[Tensor]) -> np.ndarray:
        """What the first pairs, of which these are some items' [c], add up to."""
        found = self.tables[self.order[0]].index_select(0, places[0])
        if len(places) > 1:
            found += self.tables[self.order[1]].index_select(0, places[1])
        sums: np.ndarray = found.numpy()
        return sums

    def rest(self, added: int) -> float:
        """The most that is still to come after so many pairs, and what rounding may hide."""
        return sum(self._most[pair] for pair in self.order[added:]) + self._rounding


def _pair_tables(table: Tensor) -> list[Tensor]:
    """Numbers of each part's values [parts, values] → their sums for all pairs of values of two parts, each flat."""
    return [(two[0][:, None] + two[1]).flatten() if len(two) == 2 else two[0].contiguous() for two in table.split(2)]


def _paired(codes: np.ndarray, rows: np.ndarray, values: int) -> Tensor:
    """The codes [V, parts] of these rows, two by two [pairs, n] int32; of an odd number the last stands alone."""
    pairs = np.empty((-(-codes.shape[1] // 2), len(rows)), dtype=np.int32)
    for pair, row in enumerate(pairs):
        row[:] = codes[rows, 2 * pair]
        if 2 * pair + 1 < codes.shape[1]:
            row *= values
            row += codes[rows, 2 * pair + 1]
    return torch.from_numpy(pairs)


def _lengths(centroids: Tensor, pairs: Tensor) -> Tensor:
    """The lengths of items' vectors [n]: squares add up part by part."""
    squares = torch.zeros(pairs.shape[1])
    for table, places in zip(_pair_tables(centroids.square().sum(2)), pairs, strict=True):
        squares += table.index_select(0, places)
    return squares.sqrt_().clamp_(min=LEAST_LENGTH)


def _of(some: Columns, places: np.ndarray) -> np.ndarray:
    """The columns at these places among some."""
    columns: np.ndarray = places + some.start if isinstance(some, slice) else some[places]
    return columns


def _without(columns: np.ndarray, banned: np.ndarray | None) -> np.ndarray:
    if banned is None or not len(banned):
        return columns
    kept: np.ndarray = columns[~np.isin(columns, banned)]
    return kept
