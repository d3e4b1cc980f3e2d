"""Counts with a weight for each feature: what they add to a model's scores, and their file in a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from segue.counts.features import FEATURES, LAGS, ItemCounts
from segue.counts.neighbours import Neighbours
from segue.data.batch import Batch
from segue.errors import FolderError

HEADER = "segue"


MOST_DENSE = 1_000_000  # cells of histories × items up to which sums are made in an array of all of them


@dataclass(frozen=True, slots=True, eq=False)
class Added:
    """What is added to the scores of some items: values[i] to item items[i] of history rows[i], each pair once."""

    rows: np.ndarray  # [N] int64, ascending
    items: np.ndarray  # [N] int64, ascending in a row
    values: np.ndarray  # [N] float32


@dataclass(frozen=True, eq=False)
class Counts:
    """Item-to-item counts and the weight of each feature, in the order of FEATURES."""

    pairs: ItemCounts
    weights: tuple[float, ...]

    @cached_property
    def used(self) -> frozenset[int]:
        """The features whose weight is not zero."""
        return frozenset(index for index, weight in enumerate(self.weights) if weight)

    def added(self, histories: Batch) -> Added:
        """What the counts add to the scores after each of these whole histories."""
        terms = self.pairs.terms(histories, self.used)
        # An item that was added after training is repeated like any other.
        columns = max(len(self.pairs.users), int(histories.items.max(initial=0)) + 1)
        none = np.zeros(0, dtype=np.int64)
        keys = np.concatenate([none, *(term.rows * columns + term.items for term in terms)])
        values = np.concatenate([none, *(term.values * self.weights[term.feature] for term in terms)])
        cells = len(histories.lengths) * columns
        if cells <= MOST_DENSE:
            sums = np.bincount(keys, weights=values, minlength=cells)
            keys = np.flatnonzero(sums)
            sums = sums[keys]
        else:
            keys, index = np.unique(keys, return_inverse=True)
            sums = np.bincount(index, weights=values, minlength=len(keys))
        return Added(keys // columns, keys % columns, sums.astype(np.float32))

    @property
    def n_bytes(self) -> int:
        """Bytes in memory."""
        matrices = (*self.pairs.followers, self.pairs.companions)
        arrays = [array for each in matrices for array in (each.offsets, each.items, each.counts)]
        derived = [*self.pairs.logarithms, self.pairs.cosines, self.pairs.users]
        return sum(array.nbytes for array in (*arrays, *derived))

    def facts(self) -> dict[str, object]:
        """The entry of a run's manifest."""
        matrices = (*self.pairs.followers, self.pairs.companions)
        return {
            "weights": {name: round(weight, 6) for name, weight in zip(FEATURES, self.weights, strict=True)},
            "pairs": sum(len(each.items) for each in matrices),
            "bytes": self.n_bytes,
        }

    def to_bytes(self) -> bytes:
        """The file's contents."""
        arrays = {"users": self.pairs.users}
        for name, pairs in zip(_names(), (*self.pairs.followers, self.pairs.companions), strict=True):
            arrays |= {f"{name}.offsets": pairs.offsets, f"{name}.items": pairs.items, f"{name}.counts": pairs.counts}
        header = msgspec.json.encode(dict(zip(FEATURES, self.weights, strict=True))).decode()
        return save(arrays, metadata={HEADER: header})

    @staticmethod
    def open(path: Path) -> Counts:
        """The counts in a file that holds `to_bytes`."""
        try:
            with safe_open(path, framework="numpy") as file:
                header = (file.metadata() or {})[HEADER]
            return Counts.of_arrays(load_file(path), header)
        except (OSError, KeyError, ValueError, msgspec.MsgspecError, SafetensorError) as error:
            raise FolderError(f"{path} holds no counts that can be read ({error}); train again.") from error

    @staticmethod
    def of_arrays(arrays: dict[str, np.ndarray], header: str) -> Counts:
        """The counts of a file's arrays and header; a ValueError if they do not fit each other."""
        weights = msgspec.json.decode(header, type=dict[str, float])
        users, matrices = arrays["users"], [_matrix(arrays, name) for name in _names()]
        if set(weights) != set(FEATURES) or any(len(each.offsets) != len(users) + 1 for each in matrices):
            raise ValueError("its arrays do not fit each other")
        *followers, companions = matrices
        return Counts(ItemCounts(tuple(followers), companions, users), tuple(weights[name] for name in FEATURES))


def _names() -> list[str]:
    """Names of the matrices in a file."""
    return [*FEATURES[:LAGS], "together"]


def _matrix(arrays: dict[str, np.ndarray], name: str) -> Neighbours:
    offsets, items, counts = (arrays[f"{name}.{part}"] for part in ("offsets", "items", "counts"))
    rows = len(offsets) - 1
    sound = (
        len(offsets)
        and offsets[0] == 0
        and offsets[-1] == len(items) == len(counts)
        and bool((np.diff(offsets) >= 0).all())
        and bool(((items > 0) & (items < rows)).all())
    )
    if not sound:
        raise ValueError(f"the matrix {name} is damaged")
    return Neighbours(offsets, items, counts)
