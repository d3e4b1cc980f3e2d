"""Counts with a weight for each feature: what they add to a model's scores, and their file in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from segue.counts.features import FEATURES, LAGS, ItemCounts
from segue.counts.neighbours import Neighbours
from segue.data.batch import Batch
from segue.errors import FolderError

HEADER = "segue"
DENSE = 20  # cells of histories × items for each entry, up to which sums are made in an array of all cells


@dataclass(frozen=True, slots=True, eq=False)
class Added:
    """What is added to the scores of some items: values[i] to item items[i] of history rows[i], each pair once."""

    rows: np.ndarray  # [N] int64, ascending
    items: np.ndarray  # [N] int64, ascending in a row
    values: np.ndarray  # [N] float32

    def take(self, some: np.ndarray) -> Added:
        """These additions: a mask [N] bool."""
        return Added(self.rows[some], self.items[some], self.values[some])

    def find(self, rows: np.ndarray, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The index of what is added to each item of a row, and whether anything is; at least one addition is here."""
        columns = 1 + max(int(self.items.max()), int(items.max(initial=0)))
        keys = self.rows * columns + self.items
        wanted = rows * columns + items
        index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return index, np.asarray(keys[index] == wanted)


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
        if cells <= DENSE * len(keys):
            sums = np.bincount(keys, weights=values, minlength=cells)
            keys = np.flatnonzero(sums != 0)  # several times faster than of the sums
            sums = sums[keys]
        else:
            keys, index = np.unique(keys, return_inverse=True)
            sums = np.bincount(index, weights=values, minlength=len(keys))
        return Added(*np.divmod(keys, columns), sums.astype(np.float32))

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, with the float32 that the first answer derives of each pair."""
        matrices = (*self.pairs.followers, self.pairs.companions)
        arrays = [array for each in matrices for array in (each.offsets, each.items, each.counts)]
        return self.pairs.users.nbytes + sum(array.nbytes for array in arrays) + 4 * sum(len(m.items) for m in matrices)

    def facts(self) -> dict[str, object]:
        """The entry of a run's manifest."""
        matrices = (*self.pairs.followers, self.pairs.companions)
        return {
            "weights": {name: round(weight, 6) for name, weight in self.named_weights.items()},
            "pairs": sum(len(each.items) for each in matrices),
            "bytes": self.n_bytes,
        }

    @property
    def named_weights(self) -> dict[str, float]:
        """The weight of each feature."""
        return dict(zip(FEATURES, self.weights, strict=True))

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of a file, by name."""
        arrays = {"users": self.pairs.users}
        for name, pairs in zip(_names(), (*self.pairs.followers, self.pairs.companions), strict=True):
            arrays |= {f"{name}.offsets": pairs.offsets, f"{name}.items": pairs.items, f"{name}.counts": pairs.counts}
        return arrays

    def to_bytes(self) -> bytes:
        """The contents of a run's file."""
        from safetensors.numpy import save  # here, because `segue.slim` does without it

        return save(self.arrays(), metadata={HEADER: msgspec.json.encode(self.named_weights).decode()})

    @staticmethod
    def open(path: Path) -> Counts:
        """The counts in a file that holds `to_bytes`."""
        from safetensors import SafetensorError, safe_open
        from safetensors.numpy import load_file

        try:
            with safe_open(path, framework="numpy") as file:
                header = (file.metadata() or {})[HEADER]
            return Counts.of_arrays(load_file(path), msgspec.json.decode(header, type=dict[str, float]))
        except (OSError, KeyError, ValueError, msgspec.MsgspecError, SafetensorError) as error:
            raise FolderError(f"{path} holds no counts that can be read ({error}); train again.") from error

    @staticmethod
    def of_arrays(arrays: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> Counts:
        """The counts of a file's arrays and weights; a KeyError if one is missing, a ValueError if they do not fit each
        other."""
        users, matrices = arrays["users"], [_matrix(arrays, name) for name in _names()]
        if set(weights) != set(FEATURES) or any(len(each.offsets) != len(users) + 1 for each in matrices):
            raise ValueError("its arrays do not fit each other")
        *followers, companions = matrices
        return Counts(ItemCounts(tuple(followers), companions, users), tuple(weights[name] for name in FEATURES))


def _names() -> list[str]:
    """Names of the matrices in a file."""
    return [*FEATURES[:LAGS], "together"]


def _matrix(arrays: Mapping[str, np.ndarray], name: str) -> Neighbours:
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
