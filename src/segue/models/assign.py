"""What training met → codes of items: alike where the same users had them, or drawn by lot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from segue.data.batch import ragged_rows
from segue.data.sequences import Sequences
from segue.models.decomposition import right_directions
from segue.models.settings import ModelSettings

EVENTS = 1 << 22  # of consecutive users at a time, where pairs are sorted
NOISE = 1e-5  # of what is scaled to [0, 1]: items that are equal share out their bins by lot


def assigned_codes(
    settings: ModelSettings, sequences: Sequences, ends: np.ndarray, n_items: int, *, seed: int
) -> np.ndarray | None:
    """Codes [V + 1, parts] uint8 of what each user had before `ends` [U]; None where the settings ask for none.

    By `model.codes = "svd"` the matrix of users and items, one where a user had an item, is brought down to a feature
    for each part, and the items in the order of a feature are shared out evenly among the values of its code. Items
    that nobody had take no part in that: nothing is learned of them.
    """
    if settings.items != "codes":
        return None
    had = _Had.of(sequences, ends, n_items)
    rng, parts = np.random.default_rng(seed), settings.code_parts
    values = code_values(settings, n_items)
    trained = had.trained()
    codes = np.zeros((n_items + 1, parts), dtype=np.uint8)
    features = _features(had, parts, rng) if settings.codes == "svd" else None
    for part in range(parts):
        if features is None:
            feature = rng.random(len(trained))
        else:
            feature = scaled(features[:, part].numpy()[trained]) + NOISE * rng.standard_normal(len(trained))
        codes[trained, part] = even_bins(feature, values)
    return codes


def code_values(settings: ModelSettings, n_items: int) -> int:
    """Values of a code: more than there are items would stay empty."""
    return min(settings.code_values, n_items)


def scaled(feature: np.ndarray) -> np.ndarray:
    """From 0, the least, to 1."""
    feature = feature.astype(np.float64)
    low, high = feature.min(initial=np.inf), feature.max(initial=-np.inf)
    return (feature - low) / (high - low) if high > low else np.zeros_like(feature)


def even_bins(feature: np.ndarray, values: int) -> np.ndarray:
    """Each item's bin [n] uint8, in the order of a feature [n]: bins have as many items each, up to one."""
    bins = np.empty(len(feature), dtype=np.uint8)
    bins[np.argsort(feature, kind="stable")] = np.arange(len(feature)) * values // max(len(feature), 1)
    return bins


def shared_codes(codes: np.ndarray, numbers: np.ndarray) -> int:
    """How many of these items have codes that another of them has too."""
    rows = np.ascontiguousarray(codes[numbers])
    names = rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
    _, sizes = np.unique(names, return_counts=True)
    return int(sizes[sizes > 1].sum())


def _features(had: _Had, parts: int, rng: np.random.Generator) -> Tensor:
    """The directions along which users differ most [V + 1, parts]."""
    first = torch.Generator().manual_seed(int(rng.integers(2**63)))
    return right_directions(had.times, had.turned_times, had.shape, parts, generator=first)


@dataclass(frozen=True, slots=True, eq=False)
class _Some:
    """What some consecutive users had, both ways round, each item once a user."""

    users: slice
    items: Tensor  # [P] int32, user after user
    begins: Tensor  # [users] int32: where a user's items begin
    met: Tensor  # [N] int64: the items that any of them had, ascending
    owners: Tensor  # [P] int32, item after item: who had it, counted from the first user
    item_begins: Tensor  # [N] int32


@dataclass(frozen=True, slots=True, eq=False)
class _Had:
    """A matrix of users and items, one where a user had an item: twelve bytes an event, and no more."""

    some: list[_Some]
    shape: tuple[int, int]

    @classmethod
    def of(cls, sequences: Sequences, ends: np.ndarray, n_items: int) -> _Had:
        offsets, ends = np.asarray(sequences.offsets), np.asarray(ends)
        taken = [_some(sequences.items, offsets, ends, users) for users in _consecutive(ends - offsets[:-1])]
        return cls(taken, (len(ends), n_items + 1))

    def trained(self) -> np.ndarray:
        """The items that anybody had, ascending."""
        met = np.zeros(self.shape[1], dtype=bool)
        for part in self.some:
            met[part.met.numpy()] = True
        return np.flatnonzero(met)

    def times(self, other: Tensor) -> Tensor:
        """The product with a full matrix [V + 1, X]."""
        return torch.cat([functional.embedding_bag(part.items, other, part.begins, mode="sum") for part in self.some])

    def turned_times(self, other: Tensor) -> Tensor:
        """The product of the turned matrix with a full one [U, X]."""
        found = other.new_zeros(self.shape[1], other.shape[1])
        for part in self.some:
            added = functional.embedding_bag(part.owners, other[part.users], part.item_begins, mode="sum")
            found.index_add_(0, part.met, added)
        return found


def _consecutive(lengths: np.ndarray) -> Iterator[slice]:
    """All users, so many at a time that their events are about `EVENTS`; one at least."""
    reached, begin = np.cumsum(lengths), 0
    while begin < len(lengths):
        before = reached[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(reached, before + EVENTS, side="right")))
        yield slice(begin, end)
        begin = end


def _some(items: np.ndarray, offsets: np.ndarray, ends: np.ndarray, users: slice) -> _Some:
    begins = offsets[:-1][users]
    lengths = ends[users] - begins
    had = items[ragged_rows(begins, lengths)].astype(np.int64)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    pairs = np.unique(owners * (int(had.max(initial=0)) + 1) + had)
    owners, had = np.divmod(pairs, int(had.max(initial=0)) + 1)
    order = np.argsort(had, kind="stable")
    met, first = np.unique(had[order], return_index=True)
    return _Some(
        users=users,
        items=_int32(had),
        begins=_int32(np.searchsorted(owners, np.arange(len(lengths)))),
        met=torch.from_numpy(met),
        owners=_int32(owners[order]),
        item_begins=_int32(first),
    )


def _int32(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))
