"""The exact index: it scores every item. The recall of other indices is measured against it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from segue.counts.counts import Added
from segue.errors import FolderError
from segue.index.search import BestItems, Only, Ragged, merged_rows
from segue.index.settings import CHUNK

HEADER = "segue"
MAX_SCORES = 4_000_000  # scores in memory at a time
# Rows are multiplied in groups of this size. A matrix product sums a last, partial group in another order, so equal
# vectors could differ in the last bit of their scores, and their tie would be broken.
GROUP = 16


class ExactIndex:
    """The vectors of the items that may be recommended, in the order of their numbers."""

    def __init__(self, vectors: Tensor, numbers: np.ndarray, *, n_items: int, chunk: int = CHUNK) -> None:
        self._groups = _whole_groups(vectors)
        self.vectors = self._groups[: len(vectors)]  # [n, D] float32
        self.numbers = numbers  # [n] int64, ascending: the items of these rows
        self.chunk = chunk
        self.n_items = n_items
        self._chunk = -(-chunk // GROUP) * GROUP

    @staticmethod
    def build(vectors: Tensor, *, candidates: np.ndarray | None = None, chunk: int = CHUNK) -> ExactIndex:
        """The index of the vectors of all items [V + 1, D]; row 0 is padding and never returned.

        `candidates` [V + 1] bool: items that may be recommended; usually those seen in training.
        """
        numbers = candidate_numbers(len(vectors), candidates)
        rows = finite(vectors[torch.from_numpy(numbers).to(vectors.device)], "An item vector")
        return ExactIndex(rows, numbers, n_items=len(vectors) - 1, chunk=chunk)

    def search(
        self, queries: Tensor, k: int, *, exclude: Ragged | None = None, only: Only = None, added: Added | None = None
    ) -> BestItems:
        """See `ItemIndex.search`. Memory is bounded by `MAX_SCORES`. `added`: what is added to some scores."""
        assert k >= 1
        queries = finite(queries)
        pool = None if only is None else np.flatnonzero(is_allowed(self.numbers, only))
        numbers = self.numbers if pool is None else self.numbers[pool]
        width = min(k, len(numbers))
        if not width or not len(queries):
            return torch.zeros(len(queries), width, dtype=torch.int64), torch.zeros(len(queries), width)
        block = max(1, MAX_SCORES // min(self._chunk, len(numbers)))
        results = []
        for begin in range(0, len(queries), block):
            rows = slice(begin, min(begin + block, len(queries)))
            banned = None if exclude is None else Pairs.of(exclude.rows(rows), numbers)
            allowed = Pairs.of(only.rows(rows), numbers) if isinstance(only, Ragged) else None
            additions = None if added is None else Additions.of(added, rows, numbers)
            columns, scores = self._best(queries[rows], pool, width, banned, allowed, additions)
            items = torch.from_numpy(numbers)[columns]
            results.append((items.masked_fill_(scores == -torch.inf, 0), scores))
        if len(results) == 1:
            return results[0]
        return torch.cat([items for items, _ in results]), torch.cat([scores for _, scores in results])

    def _best(
        self,
        queries: Tensor,
        pool: np.ndarray | None,
        k: int,
        banned: Pairs | None,
        allowed: Pairs | None,
        additions: Additions | None,
    ) -> tuple[Tensor, Tensor]:
        """The best k columns of the pool for each query, and their scores, chunk by chunk."""
        columns, scores = torch.empty(0), torch.empty(0)
        count = len(self.numbers) if pool is None else len(pool)
        for first in range(0, count, self._chunk):
            chunk, size = slice(first, first + self._chunk), min(self._chunk, count - first)
            some = None if pool is None else torch.from_numpy(pool[chunk])
            vectors = self._groups[chunk] if some is None else _whole_groups(self.vectors[some])
            products = (queries @ vectors.T)[:, :size]  # [b, c]
            if additions is not None:
                of, at, added = additions.chunk(first, size)
                products.numpy()[of, at] += added
            if allowed is not None:
                row, column = allowed.chunk(first, size)
                forbidden = torch.ones(products.shape, dtype=torch.bool)
                forbidden[row, column] = False
                products.masked_fill_(forbidden, -torch.inf)
            if banned is not None:
                products[banned.chunk(first, size)] = -torch.inf
            here, values = best_columns(products, k)
            if first == 0:
                columns, scores = here, values
                continue
            # Earlier chunks have lower numbers: a stable sort keeps ties in the order of numbers.
            merged, order = torch.sort(torch.cat((scores, values), dim=1), dim=1, descending=True, stable=True)
            columns = torch.cat((columns, here + first), dim=1).gather(1, order[:, :k])
            scores = merged[:, :k]
        return columns, scores

    def with_items(self, vectors: Tensor, numbers: np.ndarray, *, n_items: int) -> ExactIndex:
        """See `ItemIndex.with_items`."""
        merged, order = merged_rows(self.numbers, numbers)
        rows = torch.cat((self.vectors, finite(vectors, "An item vector")))[order]
        return ExactIndex(rows, merged, n_items=n_items, chunk=self.chunk)

    def save(self, path: Path) -> None:
        """Write vectors, numbers and the chunk size to one safetensors file."""
        write_file(
            path,
            {"vectors": self.vectors, "numbers": torch.from_numpy(self.numbers)},
            _Facts(n_items=self.n_items, chunk=self.chunk),
        )

    @staticmethod
    def of_file(arrays: dict[str, Tensor], header: str) -> ExactIndex:
        """The index in the contents of a file that `save` wrote."""
        facts = msgspec.json.decode(header, type=_Facts)
        return ExactIndex(arrays["vectors"], arrays["numbers"].numpy(), n_items=facts.n_items, chunk=facts.chunk)


class _Facts(msgspec.Struct, tag_field="kind", tag="exact", forbid_unknown_fields=True):
    n_items: int
    chunk: int


def _whole_groups(vectors: Tensor) -> Tensor:
    """Append rows of zeros up to a multiple of `GROUP`."""
    return functional.pad(vectors, (0, 0, 0, -len(vectors) % GROUP)) if len(vectors) % GROUP else vectors


def finite(vectors: Tensor, name: str = "A query") -> Tensor:
    """Vectors as float32 on the CPU; refuse numbers that are not finite. `name`: for the error message."""
    vectors = vectors.detach().to(device="cpu", dtype=torch.float32).contiguous()
    if not math.isfinite(float(vectors.sum())) and not bool(torch.isfinite(vectors).all()):
        raise FolderError(f"{name} has numbers that are not finite: the model is damaged; train it again.")
    return vectors


def write_file(path: Path, arrays: dict[str, Tensor], facts: msgspec.Struct) -> None:
    """Write one safetensors file; the tag of `facts` names the kind of index."""
    # One entry, because safetensors writes several in any order, and equal indices must be equal files.
    save_file(arrays, path, metadata={HEADER: msgspec.json.encode(facts).decode()})


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """(query, column of the pool) pairs."""

    rows: np.ndarray
    columns: np.ndarray

    @staticmethod
    def of(ragged: Ragged, numbers: np.ndarray) -> Pairs:
        """Convert item numbers to columns of the pool of items `numbers`; drop items outside it."""
        columns = np.searchsorted(numbers, ragged.numbers)
        inside = numbers[np.minimum(columns, len(numbers) - 1)] == ragged.numbers
        rows = ragged.owners
        return Pairs(rows, columns) if inside.all() else Pairs(rows[inside], columns[inside])

    def chunk(self, first: int, size: int) -> tuple[Tensor, Tensor]:
        """The pairs with columns in a chunk; columns count from its first."""
        columns = self.columns - first
        inside = (columns >= 0) & (columns < size)
        if inside.all():
            return torch.from_numpy(self.rows), torch.from_numpy(columns)
        return torch.from_numpy(self.rows[inside]), torch.from_numpy(columns[inside])


@dataclass(frozen=True, slots=True, eq=False)
class Additions:
    """What is added to the score of (query, column of the pool) pairs."""

    pairs: Pairs
    values: np.ndarray  # [N] float32

    @staticmethod
    def of(added: Added, rows: slice, numbers: np.ndarray) -> Additions:
        """The additions to these queries; items outside the pool are dropped."""
        own = slice(*np.searchsorted(added.rows, (rows.start, rows.stop)))
        items = added.items[own]
        columns = items - 1 if numbers[-1] == len(numbers) else np.searchsorted(numbers, items)
        inside = numbers[np.minimum(columns, len(numbers) - 1)] == items
        pairs = Pairs((added.rows[own] - rows.start)[inside], columns[inside])
        return Additions(pairs, added.values[own][inside])

    def chunk(self, first: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The pairs with columns in a chunk, which count from its first, and their values."""
        columns = self.pairs.columns - first
        inside = (columns >= 0) & (columns < size)
        return self.pairs.rows[inside], columns[inside], self.values[inside]


def best_columns(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The min(k, c) highest columns of each row [B, c] and their scores, by score, then by column ascending.

    torch.topk does not define which of several equal scores it returns, so k + 1 are requested: if the (k + 1)-th
    equals the k-th, the row's columns are selected again, lowest first.
    """
    k = min(k, scores.shape[1])
    values, columns = torch.topk(scores, min(k + 1, scores.shape[1]), dim=1)
    equal = values[:, 1:] == values[:, :-1]
    if not bool(equal.any()):
        return columns[:, :k], values[:, :k]
    if values.shape[1] > k:
        tied = torch.nonzero(equal[:, k - 1]).squeeze(1)
        columns = columns[:, :k]
        if len(tied):
            rows, threshold = scores[tied], values[tied, k - 1 : k]
            above, same = rows > threshold, rows == threshold
            missing = k - above.sum(dim=1, keepdim=True)
            selected = above | (same & (same.cumsum(dim=1) <= missing))
            columns[tied] = torch.nonzero(selected)[:, 1].view(len(tied), k)
    columns = columns.sort(dim=1).values
    values, order = torch.sort(scores.gather(1, columns), dim=1, descending=True, stable=True)
    return columns.gather(1, order), values


def candidate_numbers(rows: int, candidates: np.ndarray | None) -> np.ndarray:
    """The numbers [n] int64 of the candidates in a table of so many `rows`, ascending, without padding."""
    assert candidates is None or len(candidates) == rows
    allowed = np.ones(rows, dtype=bool) if candidates is None else np.array(candidates, dtype=bool)
    allowed[0] = False
    return np.flatnonzero(allowed).astype(np.int64)


def is_allowed(numbers: np.ndarray, only: np.ndarray | Ragged) -> np.ndarray:
    """Which of the items `numbers` [n], which are ascending, any query allows [n] bool."""
    wanted = only.numbers if isinstance(only, Ragged) else np.asarray(only, dtype=np.int64)
    mask = np.zeros(numbers[-1] + 1 if len(numbers) else 0, dtype=bool)
    mask[wanted[(wanted >= 0) & (wanted < len(mask))]] = True
    allowed: np.ndarray = mask[numbers]
    return allowed


OneSearch = Callable[[Tensor, int, np.ndarray | None, np.ndarray | None], tuple[np.ndarray, Tensor]]
"""A query [D], the most results, the allowed columns, ascending (None: all), and the excluded ones (None: none) → the
best columns and their scores."""


def search_singly(
    best: OneSearch, numbers: np.ndarray, queries: Tensor, k: int, exclude: Ragged | None, only: Only
) -> BestItems:
    """`ItemIndex.search` of an index of items `numbers`, one query at a time."""
    assert k >= 1
    queries = finite(queries)
    pool = None if only is None else np.flatnonzero(is_allowed(numbers, only))
    width = min(k, len(numbers) if pool is None else len(pool))
    items = torch.zeros(len(queries), width, dtype=torch.int64)
    scores = torch.full((len(queries), width), -torch.inf)
    for row in range(len(queries) if width else 0):
        one = slice(row, row + 1)
        allowed = np.unique(Pairs.of(only.rows(one), numbers).columns) if isinstance(only, Ragged) else pool
        banned = None if exclude is None else Pairs.of(exclude.rows(one), numbers).columns
        columns, values = best(queries[row], width, allowed, banned)
        items[row, : len(columns)] = torch.from_numpy(numbers[columns])
        scores[row, : len(columns)] = values
    return items.masked_fill_(scores == -torch.inf, 0), scores
