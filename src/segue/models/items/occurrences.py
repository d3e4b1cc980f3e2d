"""Histories → a sparse matrix of histories and items, and its principal directions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from segue.data.batch import ragged_rows
from segue.models.items.svd import right_directions

EVENTS = 1 << 22  # of consecutive histories in one block, whose pairs are sorted together


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Some consecutive histories by rows and by columns, each item once per history."""

    histories: slice
    items: Tensor  # [P] int32, history after history
    begins: Tensor  # [histories] int32: where a history's items begin
    present: Tensor  # [N] int64: the items of these histories, ascending
    owners: Tensor  # [P] int32, item after item: the histories that contain it, counted from the first
    item_begins: Tensor  # [N] int32


@dataclass(frozen=True, slots=True, eq=False)
class Occurrences:
    """A matrix of histories, or pieces of them, and items: one if a history contains an item. It takes twelve bytes
    per event, and twelve for each item of a block."""

    blocks: list[_Block]
    shape: tuple[int, int]

    @classmethod
    def of(cls, items: np.ndarray, begins: np.ndarray, ends: np.ndarray, n_items: int) -> Occurrences:
        blocks, total, first = list[_Block](), np.cumsum(ends - begins), 0
        while first < len(total):  # about `EVENTS` events in a block; at least one history
            before = total[first - 1] if first else 0
            last = max(first + 1, int(np.searchsorted(total, before + EVENTS, side="right")))
            rows = slice(first, last)
            blocks.append(_block(items, begins[rows], ends[rows], rows))
            first = last
        return cls(blocks, (len(ends), n_items + 1))

    def counts(self) -> Tensor:
        """The number of rows that contain each item [V + 1]."""
        counts = torch.zeros(self.shape[1])
        for block in self.blocks:
            ends = functional.pad(block.item_begins[1:], (0, 1), value=len(block.owners))
            counts.index_add_(0, block.present, (ends - block.item_begins).float())
        return counts

    def trained(self) -> np.ndarray:
        """The items of any row, ascending."""
        return self.counts().nonzero()[:, 0].numpy()

    def directions(
        self, width: int, rng: np.random.Generator, *, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The right singular vectors [V + 1, width] and values [width], with items weighted by `weights` [V + 1]."""

        def times(other: Tensor) -> Tensor:
            """The product with a dense matrix [V + 1, X]."""
            return torch.cat([_sums(other, block.items, block.begins, weights) for block in self.blocks])

        def transposed_times(other: Tensor) -> Tensor:
            """The product of the transposed matrix with a dense one [rows, X]."""
            product = other.new_zeros(self.shape[1], other.shape[1])
            for block in self.blocks:
                product.index_add_(0, block.present, _sums(other[block.histories], block.owners, block.item_begins))
            return product if weights is None else product.mul_(weights[:, None])

        return right_directions(times, transposed_times, self.shape, width, generator=torch_generator(rng))


def torch_generator(rng: np.random.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng.integers(2**63)))


def _sums(rows: Tensor, numbers: Tensor, begins: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sums of rows, by number, from each beginning to the next, times their weights."""
    entry_weights = None if weights is None else weights[numbers]
    return functional.embedding_bag(numbers, rows, begins, mode="sum", per_sample_weights=entry_weights)


def _block(items: np.ndarray, begins: np.ndarray, ends: np.ndarray, histories: slice) -> _Block:
    lengths = ends - begins
    numbers = items[ragged_rows(begins, lengths)].astype(np.int64)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    pairs = np.unique(owners * (int(numbers.max(initial=0)) + 1) + numbers)
    owners, numbers = np.divmod(pairs, int(numbers.max(initial=0)) + 1)
    order = np.argsort(numbers, kind="stable")
    present, first = np.unique(numbers[order], return_index=True)
    return _Block(
        histories=histories,
        items=_int32(numbers),
        begins=_int32(np.searchsorted(owners, np.arange(len(lengths)))),
        present=torch.from_numpy(present),
        owners=_int32(owners[order]),
        item_begins=_int32(first),
    )


def _int32(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))
