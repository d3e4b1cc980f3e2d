"""What training knows of users beyond a batch: the windows in which each is asked, and all that each is asked for.

A user with a long history has several windows, which come in different batches, and a batch of long windows has few
users. So neither a user's weight nor the items that are no negatives of it can be seen in a batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from segue.data.batch import Batch, ragged_rows
from segue.objective.tasks.examples import Examples, Task
from segue.objective.tasks.positive import PositiveEvents


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """How much a window counts, so that over an epoch the windows of every user count one together."""

    windows: np.ndarray  # [U] int64: of each user, those of which anything is asked
    users_a_batch: float
    """On average."""

    @classmethod
    def of(cls, windows: Iterable[Batch], task: Task, n_users: int) -> Shares:
        """Of all windows, each once. Whether a window is asked anything does not depend on what a task draws."""
        counts, batches, rng = np.zeros(n_users, dtype=np.int64), 0, np.random.default_rng(0)
        for batch in windows:
            examples = task(batch, rng)
            if len(examples.targets):
                np.add.at(counts, _users(examples)[np.unique(examples.users)], 1)
                batches += 1
        return cls(counts, np.count_nonzero(counts) / max(1, batches))

    def rows(self, examples: Examples) -> np.ndarray:
        """What each row of the inputs counts [B]."""
        return np.asarray(1 / np.maximum(1, self.windows[_users(examples)]))


@dataclass(frozen=True, slots=True, eq=False)
class Positives:
    """The distinct items that each user is to be asked for, wherever in its training history they are."""

    begins: np.ndarray  # [U + 1] int64
    items: np.ndarray  # [P] int32

    @classmethod
    def of(cls, histories: Iterable[Batch], positive: PositiveEvents, n_users: int) -> Positives:
        """Of whole training histories, in the order of their users; a user may have none."""
        counts, found = np.zeros(n_users, dtype=np.int64), [np.zeros(0, dtype=np.int32)]
        for batch in histories:
            assert batch.users is not None
            meant = positive(batch)
            stride = int(batch.items.max(initial=0)) + 1
            owners = np.repeat(batch.users, batch.lengths)[meant]
            users, items = np.divmod(np.unique(owners * stride + batch.items[meant]), stride)
            np.add.at(counts, users, 1)
            found.append(items.astype(np.int32))
        return cls(np.concatenate(([0], np.cumsum(counts))), np.concatenate(found))

    def own(self, examples: Examples) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the inputs and items, which are no negatives of theirs."""
        users = _users(examples)
        counts = self.begins[users + 1] - self.begins[users]
        items = self.items[ragged_rows(self.begins[users], counts)]
        return np.repeat(np.arange(len(users)), counts), items.astype(np.int64)


def _users(examples: Examples) -> np.ndarray:
    """Whose the rows of the inputs are [B]."""
    assert examples.inputs.users is not None, "windows of training say whose they are"
    return examples.inputs.users
