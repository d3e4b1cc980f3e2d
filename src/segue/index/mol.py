"""The items of a mixture of logits → best items: by scoring every item, or in two stages, groups of items first."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from segue.data.batch import ragged_rows
from segue.index.exact import (
    Pairs,
    allowed_rows,
    answerable,
    best_columns,
    finite,
    finite_items,
    read_file,
    reading,
    write_file,
)
from segue.index.search import Joined, Ragged
from segue.models.items.clusters import Clusters
from segue.models.similarity.mol import Mixture, Side

CHUNK = 4096  # items taken out of the table at a time, so that they stay in the cache
GROUPS = 8  # for each square root of an item: scoring all of them costs no more than scoring those that are kept
ROUNDS, MEMBERS = 4, 16  # rounds of k-means, and items a group that it learns from
SEED = 1


class Cut(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the first stage keeps for the second. Where it keeps everything, answers are those of scoring all."""

    averaged: int = 32768
    """Items whose groups have the best scores, made of products that are averaged over the group."""


class MolIndex:
    """Both parts of the items that may be answered, their components and gates, in the order of their numbers.

    In two stages, items that are alike form a group, whose components and gates are its items' means, so that its
    products are averages of theirs. Groups are scored as items are; then the items of the best groups are. The stages
    of Ding and Zhai, "Retrieval with Learned Similarities", WWW 2025, the products of each pair of components over all
    items and that of their means, cost a processor more: the first read all that scores are made of, and the second
    finds what gates would choose if all were open alike: where they are sharp it misses what groups find.
    """

    def __init__(
        self,
        mixture: Mixture,
        items: Side,
        numbers: np.ndarray,
        *,
        n_items: int,
        cut: Cut | None = None,
        groups: Groups | None = None,
    ) -> None:
        """Without a `cut` every item is scored. `groups`: those of an index made before."""
        self.mixture = mixture  # in evaluation mode
        self.items = items  # [n, parts, part width] and [n, P] float32
        self.numbers = numbers  # [n] int64, ascending: the items of these rows
        self.cut = cut
        self.groups = Groups.of(items) if cut is not None and groups is None else groups
        self._n_items = n_items

    @staticmethod
    def build(
        mixture: Mixture, vectors: Tensor, *, candidates: np.ndarray | None = None, cut: Cut | None = None
    ) -> MolIndex:
        """From what all items are compared by [V + 1, I]; row 0 is padding and never an answer.

        `candidates` [V + 1] bool: items that may be answered; the others, as a rule never trained on, are left out.
        """
        kept, numbers = answerable(vectors, candidates)
        items = Side(*(part.contiguous() for part in mixture.side(kept)))
        return MolIndex(mixture.settled(), items, numbers, n_items=len(vectors) - 1, cut=cut)

    @property
    def n_items(self) -> int:
        return self._n_items

    @torch.no_grad()
    def search(
        self, queries: Tensor, k: int, *, exclude: Ragged | None = None, only: np.ndarray | Ragged | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `ItemIndex.search`. One question after the other: little is gained by more, and memory is bounded."""
        assert k >= 1
        asked = self.mixture.side(finite(queries))
        pool = allowed_rows(self.numbers, only)
        width = min(k, len(self.numbers) if pool is None else len(pool))
        items = torch.zeros(len(queries), width, dtype=torch.int64)
        scores = torch.full((len(queries), width), -math.inf)
        for row in range(len(queries) if width else 0):
            question = Side(*(part[row : row + 1] for part in asked))
            allowed = self._allowed(slice(row, row + 1), pool, exclude, only)
            rows = pool if self.cut is None else self._first_stage(self.cut, question, allowed, width)
            found = self._scores(question, rows)
            found.masked_fill_(torch.from_numpy(~allowed if rows is None else ~allowed[rows]), -math.inf)
            columns, values = best_columns(found, width)
            numbers = torch.from_numpy(self.numbers if rows is None else self.numbers[rows])[columns]
            items[row, : columns.shape[1]] = numbers.masked_fill_(values == -math.inf, 0)
            scores[row, : columns.shape[1]] = values
        return items, scores

    def _allowed(
        self, question: slice, pool: np.ndarray | None, exclude: Ragged | None, only: np.ndarray | Ragged | None
    ) -> np.ndarray:
        """Whether each row may answer this question [n] bool."""
        allowed = np.full(len(self.numbers), pool is None)
        if isinstance(only, Ragged):
            allowed[Pairs.of(only.rows(question), self.numbers).columns] = True
        elif pool is not None:
            allowed[pool] = True
        if exclude is not None:
            allowed[Pairs.of(exclude.rows(question), self.numbers).columns] = False
        return allowed

    def _first_stage(self, cut: Cut, question: Side, allowed: np.ndarray, k: int) -> np.ndarray:
        """The allowed rows of the best groups, ascending: so many groups that what is kept is allowed, too."""
        assert self.groups is not None
        order = np.argsort(-self.mixture.score(question, self.groups.centres)[0].numpy(), kind="stable")
        held = np.cumsum(self.groups.allowed_sizes(allowed)[order])
        enough = np.searchsorted(held, min(max(k, cut.averaged), held[-1])) + 1
        rows = self.groups.members(order[:enough])
        return np.sort(rows[allowed[rows]])

    def _scores(self, question: Side, rows: np.ndarray | None) -> Tensor:
        """Of these rows, or of all [1, c]. Parts are of about one size: products of a few rows round differently, and
        ties between equal items would be lost."""
        if rows is None:
            return self.mixture.score(question, self.items)
        parts = np.array_split(rows, max(1, -(-len(rows) // CHUNK)))
        taken = (Side(*(part.index_select(0, torch.from_numpy(some)) for part in self.items)) for some in parts)
        return torch.cat([self.mixture.score(question, some) for some in taken], dim=1)

    @torch.no_grad()
    def with_items(self, vectors: Tensor, numbers: np.ndarray, *, n_items: int) -> MolIndex:
        """See `ItemIndex.with_items`. A new item joins the group whose mean is nearest."""
        joined = Joined.of(self.numbers, numbers)
        new = self.mixture.side(finite_items(vectors))
        items = Side(*(torch.cat(both)[joined.order] for both in zip(self.items, new, strict=True)))
        groups = None if self.groups is None else self.groups.with_rows(new, joined.order, items)
        return MolIndex(self.mixture, items, joined.numbers, n_items=n_items, cut=self.cut, groups=groups)

    def save(self, path: Path) -> None:
        """Write items, numbers, groups and what scores them to one safetensors file: no model is needed."""
        arrays = {
            "components": self.items.components,
            "gate": self.items.gate,
            "numbers": torch.from_numpy(self.numbers),
        }
        arrays |= {f"mixture.{name}": weight for name, weight in self.mixture.state_dict().items()}
        if self.groups is not None:
            arrays |= {"owners": torch.from_numpy(self.groups.owners)}
        facts = _Facts(
            n_items=self.n_items,
            cut=self.cut,
            query_parts=self.mixture.query_parts,
            item_parts=self.mixture.item_parts,
            part_width=self.mixture.part_width,
            gate_hidden=self.mixture.gate_hidden,
        )
        write_file(path, arrays, facts)

    @staticmethod
    def load(path: Path) -> MolIndex:
        """Read what `save` wrote."""
        with reading(path):
            arrays, facts = read_file(path, _Facts)
            prefix = "mixture."
            weights = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
            mixture = Mixture.of_weights(
                facts.query_parts, facts.item_parts, facts.part_width, facts.gate_hidden, weights=weights
            )
            items, numbers = Side(arrays["components"], arrays["gate"]), arrays["numbers"].numpy()
            groups = None if facts.cut is None else Groups(arrays["owners"].numpy(), items)
            return MolIndex(mixture, items, numbers, n_items=facts.n_items, cut=facts.cut, groups=groups)


class _Facts(msgspec.Struct, tag_field="kind", tag="mol", forbid_unknown_fields=True, kw_only=True):
    """What the file's header says."""

    n_items: int
    cut: Cut | None
    query_parts: int
    item_parts: int
    part_width: int
    gate_hidden: int


class Groups:
    """Items that are alike, and what stands for all of a group."""

    def __init__(self, owners: np.ndarray, items: Side) -> None:
        self.owners = owners  # [n] int64: each item's group
        self.sizes = np.bincount(owners, minlength=1)
        self._order = np.argsort(owners, kind="stable")  # group after group
        sizes, rows = torch.from_numpy(self.sizes).clamp(min=1), torch.from_numpy(owners)
        sums = (part.new_zeros(len(sizes), *part.shape[1:]).index_add_(0, rows, part) for part in items)
        self.centres = Side(*(part / sizes.view(-1, *[1] * (part.dim() - 1)) for part in sums))

    @staticmethod
    def of(items: Side) -> Groups:
        """By the mean of an item's components, in which all of them have a part."""
        means = items.components.mean(1)
        return Groups(alike(means, round(GROUPS * math.sqrt(len(means)))).numpy(), items)

    def with_rows(self, new: Side, order: np.ndarray | slice, items: Side) -> Groups:
        """Groups of these `items`: the old rows and then the `new` ones, in this `order` [n]."""
        nearest = Clusters(self.centres.components.mean(1)).nearest(new.components.mean(1)).numpy()
        return Groups(np.concatenate((self.owners, nearest))[order], items)

    def allowed_sizes(self, allowed: np.ndarray) -> np.ndarray:
        """How many of each group's items are allowed [n] bool."""
        return self.sizes - np.bincount(self.owners[np.flatnonzero(~allowed)], minlength=len(self.sizes))

    def members(self, groups: np.ndarray) -> np.ndarray:
        """The rows of these groups' items."""
        rows: np.ndarray = self._order[ragged_rows((np.cumsum(self.sizes) - self.sizes)[groups], self.sizes[groups])]
        return rows


@torch.no_grad()
def alike(vectors: Tensor, count: int) -> Tensor:
    """Each vector's group [n] of at most `count`."""
    if not len(vectors):
        return torch.zeros(0, dtype=torch.int64)
    first = torch.Generator().manual_seed(SEED)
    return Clusters.of(vectors, count, rounds=ROUNDS, members=MEMBERS, generator=first).nearest(vectors)
