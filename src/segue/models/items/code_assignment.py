"""What training met → codes of items: alike where they come close together in histories, or the same users had them,
or a model has learned that they are, or drawn by lot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from segue.data.batch import ragged_rows
from segue.data.sequences import Sequences
from segue.models.items.clusters import Clusters
from segue.models.items.product_quantisation import rotated_parts
from segue.models.items.svd import right_directions

EVENTS = 1 << 22  # of consecutive histories at a time, where pairs are sorted
NOISE = 1e-5  # of what is scaled to [0, 1]: items that are equal share out their bins by lot
SHAKE = 1e-3  # of the length of what is clustered: items that are equal share out clusters by lot
STRETCH = 10  # events of a history that count as close together
FEATURES_A_PART = 4  # that are clustered: with twice as many MovieLens-1M was learned no better
COMMONNESS = 2.0  # how much further items are apart by how often they come than by any other feature
ROUNDS, MEMBERS = 25, 64  # of k-means, and items a cluster that it learns from
PUSHES = 3  # by which items that have all codes in common are told apart; those that are left are counted


def assigned_codes(
    sequences: Sequences,
    ends: np.ndarray,
    n_items: int,
    *,
    parts: int,
    values: int,
    seed: int,
    method: Literal["clusters", "svd", "random"] = "clusters",
) -> np.ndarray:
    """Codes [V + 1, parts] uint8 of what each user had before `ends` [U].

    Items that nobody had take no part in that: nothing is learned of them.
    """
    begins, ends = np.asarray(sequences.offsets)[:-1], np.asarray(ends)
    if method == "clusters":
        begins, ends = _stretches(begins, ends)
    had = _Had.of(sequences.items, begins, ends, n_items)
    rng, trained, values = np.random.default_rng(seed), had.trained(), min(values, n_items)
    codes = np.zeros((n_items + 1, parts), dtype=np.uint8)
    if not len(trained):
        return codes
    match method:
        case "clusters":
            codes[trained] = _by_clusters(had, trained, parts, values, rng)
        case "svd":
            codes[trained] = _by_directions(had, trained, parts, values, rng)
        case "random":
            codes[trained] = np.stack([even_bins(rng.random(len(trained)), values) for _ in range(parts)], axis=1)
    return codes


def _by_directions(had: _Had, trained: np.ndarray, parts: int, values: int, rng: np.random.Generator) -> np.ndarray:
    """RecJPQ's own: the matrix of users and items, one where a user had an item, is brought down to a feature for each
    part, and the items in the order of a feature are shared out evenly among the values of its code."""
    features = had.directions(parts, rng)[0].numpy()[trained]
    noise = NOISE * rng.standard_normal(features.T.shape)
    return np.stack([even_bins(scaled(one) + by, values) for one, by in zip(features.T, noise, strict=True)], axis=1)


def _by_clusters(had: _Had, trained: np.ndarray, parts: int, values: int, rng: np.random.Generator) -> np.ndarray:
    """The matrix has a row for each stretch of a history, so that items are alike which come close together. A part has
    several features and its code names the cluster of an item among them, as in product quantisation: one feature a
    part, as above, would spend all of the code on a few features and nothing on the others."""
    features = _places(had, trained, parts * FEATURES_A_PART, rng)
    generator = _generator(rng)
    pieces = [features[:, part::parts] for part in range(parts)]
    found = [Clusters.of(each, values, rounds=ROUNDS, members=MEMBERS, generator=generator) for each in pieces]
    return _nearest(pieces, found, rng)


def learned_codes(vectors: Tensor, counts: np.ndarray, *, parts: int, values: int, seed: int) -> np.ndarray:
    """Codes [V + 1, parts] uint8 of the vectors [V + 1, X] that a model has learned of items, whose training events are
    `counts` [V + 1]. What common items are like is told more exactly: most answers are theirs."""
    rng, trained = np.random.default_rng(seed), np.flatnonzero(counts)
    codes, values = np.zeros((len(counts), parts), dtype=np.uint8), min(values, len(counts) - 1)
    if len(trained):
        weights = torch.from_numpy(counts[trained]).to(vectors).sqrt()
        generator = _generator(rng)
        chosen = rotated_parts(vectors[trained], weights, parts=parts, values=values, generator=generator)
        codes[trained] = _nearest(*chosen, rng)
    return codes


def _nearest(pieces: Sequence[Tensor], found: Sequence[Clusters], rng: np.random.Generator) -> np.ndarray:
    """The cluster of each part [n, X] of items, and of items that would have all in common, in some part the next."""
    parts = len(pieces)
    codes = np.stack([each.nearest(piece).numpy() for each, piece in zip(found, pieces, strict=True)], axis=1)
    codes, lot = codes.astype(np.uint8), rng.integers(0, parts, len(codes))
    for push in range(PUSHES):
        late = _like_an_earlier(codes)
        chosen = (lot[late] + push) % parts
        for part, each in enumerate(found):  # one part of theirs, by lot, is that of the cluster next to their own
            moved = late[chosen == part]
            codes[moved, part] = each.second_nearest(pieces[part][moved])
    return codes


def _places(had: _Had, trained: np.ndarray, width: int, rng: np.random.Generator) -> Tensor:
    """Where items lie [n, width]: in which direction, whatever their number, and how common they are.

    Common items weigh less in the matrix, or all directions would be theirs; but no item much more than the average,
    or a few that one history alone holds would have directions to themselves (as in regularised spectral clustering).
    """
    counts = had.counts()
    directions, sizes = had.directions(width, rng, weights=(counts + counts[trained].mean()).rsqrt())
    features = directions[trained].mul_(sizes)
    del directions
    features[:, 0] = 0  # the first says above all how common items are, for which there is something better
    features /= features.norm(dim=1, keepdim=True).clamp_(min=1e-12)
    common = counts[trained].log()
    features[:, 0] = COMMONNESS * (common - common.mean()) / (common.std(correction=0) + 1e-6) / width**0.5
    generator = _generator(rng)
    for feature in features.T:
        feature.add_(torch.randn(feature.shape, generator=generator), alpha=SHAKE)
    return features


def _like_an_earlier(codes: np.ndarray) -> np.ndarray:
    """The items whose codes are those of an item before them."""
    return np.delete(np.arange(len(codes)), np.unique(_names(codes), return_index=True)[1])


def _stretches(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Histories in pieces of `STRETCH` events, the last of each maybe shorter: where they begin and end."""
    pieces = -(-(ends - begins) // STRETCH)
    first = np.repeat(begins, pieces) + STRETCH * ragged_rows(np.zeros_like(pieces), pieces)
    return first, np.minimum(first + STRETCH, np.repeat(ends, pieces))


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
    _, sizes = np.unique(_names(codes[numbers]), return_counts=True)
    return int(sizes[sizes > 1].sum())


def _names(codes: np.ndarray) -> np.ndarray:
    """All codes of an item as one."""
    rows = np.ascontiguousarray(codes)
    return rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]


@dataclass(frozen=True, slots=True, eq=False)
class _Some:
    """What is in some consecutive histories, both ways round, each item once a history."""

    histories: slice
    items: Tensor  # [P] int32, history after history
    begins: Tensor  # [histories] int32: where a history's items begin
    met: Tensor  # [N] int64: the items that are in any of them, ascending
    owners: Tensor  # [P] int32, item after item: the histories it is in, counted from the first
    item_begins: Tensor  # [N] int32


@dataclass(frozen=True, slots=True, eq=False)
class _Had:
    """A matrix of histories, or stretches of them, and items, one where it holds an item: twelve bytes an event, and
    twelve for each item that some of them hold."""

    some: list[_Some]
    shape: tuple[int, int]

    @classmethod
    def of(cls, items: np.ndarray, begins: np.ndarray, ends: np.ndarray, n_items: int) -> _Had:
        taken = [_some(items, begins[one], ends[one], one) for one in _consecutive(ends - begins)]
        return cls(taken, (len(ends), n_items + 1))

    def counts(self) -> Tensor:
        """In how many rows each item is [V + 1]."""
        counts = torch.zeros(self.shape[1])
        for part in self.some:
            ends = functional.pad(part.item_begins[1:], (0, 1), value=len(part.owners))
            counts.index_add_(0, part.met, (ends - part.item_begins).float())
        return counts

    def trained(self) -> np.ndarray:
        """The items that are in any row, ascending."""
        return self.counts().nonzero()[:, 0].numpy()

    def directions(
        self, width: int, rng: np.random.Generator, *, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Those along which rows differ most [V + 1, width], items having `weights` [V + 1] in them, and by how much
        [width]."""

        def times(other: Tensor) -> Tensor:
            """The product with a full matrix [V + 1, X]."""
            return torch.cat([_sums(other, part.items, part.begins, weights) for part in self.some])

        def turned_times(other: Tensor) -> Tensor:
            """The product of the turned matrix with a full one [rows, X]."""
            found = other.new_zeros(self.shape[1], other.shape[1])
            for part in self.some:
                found.index_add_(0, part.met, _sums(other[part.histories], part.owners, part.item_begins))
            return found if weights is None else found.mul_(weights[:, None])

        return right_directions(times, turned_times, self.shape, width, generator=_generator(rng))


def _generator(rng: np.random.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng.integers(2**63)))


def _sums(rows: Tensor, numbers: Tensor, begins: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sums of the rows that are named from each beginning to the next, times their weights."""
    each = None if weights is None else weights[numbers]
    return functional.embedding_bag(numbers, rows, begins, mode="sum", per_sample_weights=each)


def _consecutive(lengths: np.ndarray) -> Iterator[slice]:
    """All histories, so many at a time that their events are about `EVENTS`; one at least."""
    reached, begin = np.cumsum(lengths), 0
    while begin < len(lengths):
        before = reached[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(reached, before + EVENTS, side="right")))
        yield slice(begin, end)
        begin = end


def _some(items: np.ndarray, begins: np.ndarray, ends: np.ndarray, histories: slice) -> _Some:
    lengths = ends - begins
    had = items[ragged_rows(begins, lengths)].astype(np.int64)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    pairs = np.unique(owners * (int(had.max(initial=0)) + 1) + had)
    owners, had = np.divmod(pairs, int(had.max(initial=0)) + 1)
    order = np.argsort(had, kind="stable")
    met, first = np.unique(had[order], return_index=True)
    return _Some(
        histories=histories,
        items=_int32(had),
        begins=_int32(np.searchsorted(owners, np.arange(len(lengths)))),
        met=torch.from_numpy(met),
        owners=_int32(owners[order]),
        item_begins=_int32(first),
    )


def _int32(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))
