"""The index of a mixture of logits: it scores every item, or first groups of items and then the items of the best."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from segue.data.batch import ragged_rows
from segue.index.exact import best_columns, candidate_numbers, finite, search_singly, write_file
from segue.index.search import BestItems, Only, Ragged, merged_rows
from segue.models.items.clusters import Clusters
from segue.models.similarity.mol import Mixture, Side

CHUNK = 4096  # items gathered at a time, so that they stay in the cache
GROUPS = 8  # times the square root of the items: scoring all groups then costs no more than the second stage
ROUNDS, MEMBERS = 4, 16  # rounds of k-means, and items of each group that it is fitted to
SEED = 1


class Cut(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The size of the first stage's result. If that is all items, the index is exact."""

    averaged: int = 32768
    """Items that the second stage scores: those of the groups with the best scores."""


class MolIndex:
    """Components and gates of the items that may be recommended, in the order of their numbers.

    In two stages, similar items form a group, whose components and gates are the means of its items'. Groups are scored
    like items; then the items of the best groups are scored. The first stages of Ding and Zhai, "Retrieval with Learned
    Similarities", WWW 2025, cost a CPU more: products of each pair of components with all items read everything that
    scores need, and products of the mean components ignore gates, so with sharp gates they miss items that groups find.
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
        """Without a `cut` every item is scored. `groups`: fitted before; None: fit them."""
        self.mixture = mixture  # in evaluation mode
        self.items = items  # [n, parts, part width] and [n, P] float32
        self.numbers = numbers  # [n] int64, ascending: the items of these rows
        self.cut = cut
        self.groups = Groups.of(items) if cut is not None and groups is None else groups
        self.n_items = n_items

    @staticmethod
    def build(
        mixture: Mixture, vectors: Tensor, *, candidates: np.ndarray | None = None, cut: Cut | None = None
    ) -> MolIndex:
        """The index of the flat vectors of all items [V + 1, I]; see `ExactIndex.build`."""
        numbers = candidate_numbers(len(vectors), candidates)
        rows = finite(vectors[torch.from_numpy(numbers).to(vectors.device)], "An item vector")
        items = Side(*(part.contiguous() for part in mixture.side(rows)))
        return MolIndex(mixture.settled(), items, numbers, n_items=len(vectors) - 1, cut=cut)

    def search(self, queries: Tensor, k: int, *, exclude: Ragged | None = None, only: Only = None) -> BestItems:
        """See `ItemIndex.search`. One query at a time: more together gain little and need more memory."""
        return search_singly(self._best, self.numbers, queries, k, exclude, only)

    @torch.no_grad()
    def _best(
        self, vector: Tensor, k: int, allowed: np.ndarray | None, banned: np.ndarray | None
    ) -> tuple[np.ndarray, Tensor]:
        """See `OneSearch`; excluded columns have the score -inf."""
        query, mask = self.mixture.side(vector[None]), np.full(len(self.numbers), allowed is None)
        if allowed is not None:
            mask[allowed] = True
        if banned is not None:
            mask[banned] = False
        rows = allowed if self.cut is None else self._first_stage(self.cut, query, mask, k)
        scores = self._scores(query, rows)
        scores.masked_fill_(torch.from_numpy(~mask if rows is None else ~mask[rows]), -math.inf)
        columns, values = best_columns(scores, k)
        best = columns[0].numpy()
        return best if rows is None else rows[best], values[0]

    def _first_stage(self, cut: Cut, query: Side, allowed: np.ndarray, k: int) -> np.ndarray:
        """The allowed rows of the best groups, ascending: as many groups as hold enough allowed items."""
        assert self.groups is not None
        order = np.argsort(-self.mixture.score(query, self.groups.centres)[0].numpy(), kind="stable")
        owners, sizes = self.groups.owners, self.groups.sizes
        counts = np.cumsum((sizes - np.bincount(owners[np.flatnonzero(~allowed)], minlength=len(sizes)))[order])
        enough = np.searchsorted(counts, min(max(k, cut.averaged), counts[-1])) + 1
        rows = self.groups.members(order[:enough])
        return np.sort(rows[allowed[rows]])

    def _scores(self, query: Side, rows: np.ndarray | None) -> Tensor:
        """Scores of these rows, or of all [1, c]. Chunks are of about equal size: products of a few rows round
        differently, which would break ties."""
        if rows is None:
            return self.mixture.score(query, self.items)
        chunks = np.array_split(rows, max(1, -(-len(rows) // CHUNK)))
        sides = (Side(*(part.index_select(0, torch.from_numpy(chunk)) for part in self.items)) for chunk in chunks)
        return torch.cat([self.mixture.score(query, side) for side in sides], dim=1)

    @torch.no_grad()
    def with_items(self, vectors: Tensor, numbers: np.ndarray, *, n_items: int) -> MolIndex:
        """See `ItemIndex.with_items`. A new item joins the group with the nearest mean."""
        merged, order = merged_rows(self.numbers, numbers)
        new = self.mixture.side(finite(vectors, "An item vector"))
        items = Side(*(torch.cat(both)[order] for both in zip(self.items, new, strict=True)))
        groups = None if self.groups is None else self.groups.with_rows(new, order, items)
        return MolIndex(self.mixture, items, merged, n_items=n_items, cut=self.cut, groups=groups)

    def save(self, path: Path) -> None:
        """Write items, numbers, groups and the mixture to one safetensors file, which needs no model to be read."""
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
    def of_file(arrays: dict[str, Tensor], header: str) -> MolIndex:
        """The index in the contents of a file that `save` wrote."""
        facts, prefix = msgspec.json.decode(header, type=_Facts), "mixture."
        weights = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        mixture = Mixture.of_weights(
            facts.query_parts, facts.item_parts, facts.part_width, facts.gate_hidden, weights=weights
        )
        items, numbers = Side(arrays["components"], arrays["gate"]), arrays["numbers"].numpy()
        groups = None if facts.cut is None else Groups(arrays["owners"].numpy(), items)
        return MolIndex(mixture, items, numbers, n_items=facts.n_items, cut=facts.cut, groups=groups)


class _Facts(msgspec.Struct, tag_field="kind", tag="mol", forbid_unknown_fields=True, kw_only=True):
    n_items: int
    cut: Cut | None
    query_parts: int
    item_parts: int
    part_width: int
    gate_hidden: int


class Groups:
    """Groups of similar items, with the means of their components and gates."""

    def __init__(self, owners: np.ndarray, items: Side) -> None:
        self.owners = owners  # [n] int64: each item's group
        self.sizes = np.bincount(owners, minlength=1)
        self._order = np.argsort(owners, kind="stable")  # group after group
        sizes, rows = torch.from_numpy(self.sizes).clamp(min=1), torch.from_numpy(owners)
        sums = (part.new_zeros(len(sizes), *part.shape[1:]).index_add_(0, rows, part) for part in items)
        self.centres = Side(*(part / sizes.view(-1, *[1] * (part.dim() - 1)) for part in sums))

    @staticmethod
    def of(items: Side) -> Groups:
        """Fit groups to the means of the items' components."""
        means = items.components.mean(1)
        return Groups(group_vectors(means, round(GROUPS * math.sqrt(len(means)))).numpy(), items)

    def with_rows(self, new: Side, order: np.ndarray | slice, items: Side) -> Groups:
        """Groups of `items`, which are the old rows followed by the `new` ones, in this `order` [n]."""
        nearest = Clusters(self.centres.components.mean(1)).nearest(new.components.mean(1)).numpy()
        return Groups(np.concatenate((self.owners, nearest))[order], items)

    def members(self, groups: np.ndarray) -> np.ndarray:
        """The rows of these groups' items."""
        rows: np.ndarray = self._order[ragged_rows((np.cumsum(self.sizes) - self.sizes)[groups], self.sizes[groups])]
        return rows


@torch.no_grad()
def group_vectors(vectors: Tensor, count: int) -> Tensor:
    """The group of each vector [n], of at most `count` groups."""
    if not len(vectors):
        return torch.zeros(0, dtype=torch.int64)
    generator = torch.Generator().manual_seed(SEED)
    return Clusters.of(vectors, count, rounds=ROUNDS, members=MEMBERS, generator=generator).nearest(vectors)
