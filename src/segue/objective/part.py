"""A batch's examples → the part of them that one process of several learns from.

Every process makes the same examples of the whole batch, which costs little, and encodes the states of its own users
alone. So all of them know the batch's answers, its number of questions and what was drawn for it, without a word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import cut_evenly, take
from segue.objective.tasks.examples import Examples
from segue.process_group import ALONE, Team


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some consecutive users of the examples, with their questions."""

    own: Examples
    """Where there are fewer users than processes, the inputs may be those of another process's user, of whom nothing is
    asked here: a model cannot encode nobody."""
    whole: Examples
    rows: tuple[np.ndarray, ...]  # of each process: which of all questions are its own, ascending
    team: Team

    @staticmethod
    def of(examples: Examples, team: Team = ALONE) -> Part:
        if team.size == 1:
            return Part(examples, examples, (np.arange(len(examples.targets)),), team)
        users = examples.users
        cuts = cut_evenly(examples.inputs.lengths, team.size)
        rows = tuple(np.flatnonzero((users >= a) & (users < b)) for a, b in pairwise(cuts))
        first, last = int(cuts[team.rank]), int(cuts[team.rank + 1])
        if first == last:
            first, last = (first, first + 1) if first < len(examples.inputs.lengths) else (first - 1, first)
        return Part(_between(examples, first, last, rows[team.rank]), examples, rows, team)

    @property
    def own_rows(self) -> np.ndarray:
        return self.rows[self.team.rank]

    def asked(self, hidden: Tensor) -> Tensor:
        """The states that are questioned [m, D], of those of the inputs [T, D]."""
        positions = self.own.positions
        return hidden if positions is None else hidden[torch.from_numpy(positions).to(hidden.device)]

    def gathered(self, own: Tensor) -> Tensor:
        """Rows of the part's questions [m, …] → those of all questions [M, …]; see `Team.gathered`."""
        together = self.team.gathered(own, [len(rows) for rows in self.rows])
        if self.team.size == 1:
            return together
        return together[torch.from_numpy(np.argsort(np.concatenate(self.rows))).to(own.device)]


def _between(examples: Examples, first: int, last: int, rows: np.ndarray) -> Examples:
    """The users first .. last with the questions `rows`."""
    before = int(examples.inputs.lengths[:first].sum())
    # Without positions every state is questioned, unless the part is nobody's.
    everyone = examples.positions is None and len(rows) == examples.inputs.lengths[first:last].sum()
    positions = rows if examples.positions is None else examples.positions[rows]
    part = Examples(
        inputs=take(examples.inputs, np.arange(first, last)),
        targets=examples.targets[rows],
        positions=None if everyone else positions - before,
        weights=None if examples.weights is None else examples.weights[rows],
    )
    if examples.own is None:
        return part
    owners, items = examples.own
    theirs = (owners >= first) & (owners < last)
    return replace(part, own=(owners[theirs] - first, items[theirs]))
