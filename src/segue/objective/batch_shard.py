"""The examples of a batch → the shard of one process.

Every process makes the same examples of the whole batch, which is cheap, and encodes only its own users. So all
processes have the batch's targets and negatives without communication.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import cut_evenly, take
from segue.objective.tasks.examples import Examples
from segue.process_group import SINGLE_PROCESS, ProcessGroup


@dataclass(frozen=True, slots=True, eq=False)
class BatchShard:
    """Consecutive users of the examples, with their queries."""

    own: Examples
    """With fewer users than processes, the inputs may be those of another process's user, without any query, because a
    model cannot encode an empty batch."""
    whole: Examples
    rows: tuple[np.ndarray, ...]  # for each process: its queries' rows among all queries, ascending
    group: ProcessGroup

    @staticmethod
    def of(examples: Examples, group: ProcessGroup = SINGLE_PROCESS) -> BatchShard:
        if group.size == 1:
            return BatchShard(examples, examples, (np.arange(len(examples.targets)),), group)
        users = examples.users
        cuts = cut_evenly(examples.inputs.lengths, group.size)
        rows = tuple(np.flatnonzero((users >= a) & (users < b)) for a, b in pairwise(cuts))
        first, last = int(cuts[group.rank]), int(cuts[group.rank + 1])
        if first == last:
            first, last = (first, first + 1) if first < len(examples.inputs.lengths) else (first - 1, first)
        return BatchShard(_between(examples, first, last, rows[group.rank]), examples, rows, group)

    @property
    def own_rows(self) -> np.ndarray:
        return self.rows[self.group.rank]

    def query_states(self, hidden: Tensor) -> Tensor:
        """The states of the shard's queries [m, D] among those of its inputs [T, D]."""
        positions = self.own.positions
        return hidden if positions is None else hidden[torch.from_numpy(positions).to(hidden.device)]

    def gather(self, own: Tensor) -> Tensor:
        """Rows of the shard's queries [m, …] → rows of all queries [M, …]; see `gather_with_gradient`."""
        gathered = self.group.gather_with_gradient(own, [len(rows) for rows in self.rows])
        if self.group.size == 1:
            return gathered
        return gathered[torch.from_numpy(np.argsort(np.concatenate(self.rows))).to(own.device)]


def _between(examples: Examples, first: int, last: int, rows: np.ndarray) -> Examples:
    """The users first .. last - 1 with the queries `rows`."""
    before = int(examples.inputs.lengths[:first].sum())
    # Without positions every state is a query, unless the users are another process's.
    all_states = examples.positions is None and len(rows) == examples.inputs.lengths[first:last].sum()
    positions = rows if examples.positions is None else examples.positions[rows]
    shard = Examples(
        inputs=take(examples.inputs, np.arange(first, last)),
        targets=examples.targets[rows],
        positions=None if all_states else positions - before,
        weights=None if examples.weights is None else examples.weights[rows],
        grouped=examples.grouped,
    )
    if examples.own is None:
        return shard
    owners, items = examples.own
    inside = (owners >= first) & (owners < last)
    return replace(shard, own=(owners[inside] - first, items[inside]))
