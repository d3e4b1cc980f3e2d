"""Facts about users that no batch contains: the number of their windows, and all of their positives.

The windows of a long history are in different batches, and batches have different numbers of users. So a single batch
determines neither a user's weight nor all items that are no negatives of the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from segue.data.batch import Batch, ragged_rows
from segue.objective.tasks.examples import Examples
from segue.objective.tasks.positive import PositiveEvents


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """Weights of windows, so that over an epoch those of every user's windows sum to one."""

    windows: np.ndarray  # [U] int64: the number of each user's windows with a target
    users_a_batch: float  # on average

    @classmethod
    def of(
        cls, windows: Iterable[Batch], task: Callable[[Batch, np.random.Generator], Examples], n_users: int
    ) -> Shares:
        """From all windows, each once. Whether a window has a target does not depend on what a task samples."""
        counts, batches, rng = np.zeros(n_users, dtype=np.int64), 0, np.random.default_rng(0)
        for batch in windows:
            examples = task(batch, rng)
            if len(examples.targets):
                np.add.at(counts, _users(examples)[np.unique(examples.users)], 1)
                batches += 1
        return cls(counts, np.count_nonzero(counts) / max(1, batches))

    def rows(self, examples: Examples) -> np.ndarray:
        """The weight of each row of the inputs [B]."""
        return np.asarray(1 / np.maximum(1, self.windows[_users(examples)]))


@dataclass(frozen=True, slots=True, eq=False)
class Positives:
    """The distinct positive items of each user's whole training history."""

    begins: np.ndarray  # [U + 1] int64
    items: np.ndarray  # [P] int32

    @classmethod
    def of(cls, histories: Iterable[Batch], positive: PositiveEvents, n_users: int) -> Positives:
        """From whole training histories, in the order of their users; a user may have none."""
        counts, chunks = np.zeros(n_users, dtype=np.int64), [np.zeros(0, dtype=np.int32)]
        for batch in histories:
            assert batch.users is not None
            mask = positive(batch)
            stride = int(batch.items.max(initial=0)) + 1
            owners = np.repeat(batch.users, batch.lengths)[mask]
            users, items = np.divmod(np.unique(owners * stride + batch.items[mask]), stride)
            np.add.at(counts, users, 1)
            chunks.append(items.astype(np.int32))
        return cls(np.concatenate(([0], np.cumsum(counts))), np.concatenate(chunks))

    def own(self, examples: Examples) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of a row of the inputs and an item that is no negative of it."""
        users = _users(examples)
        counts = self.begins[users + 1] - self.begins[users]
        items = self.items[ragged_rows(self.begins[users], counts)]
        return np.repeat(np.arange(len(users)), counts), items.astype(np.int64)


def _users(examples: Examples) -> np.ndarray:
    """The users of the rows of the inputs [B]."""
    assert examples.inputs.users is not None, "training windows have users"
    return examples.inputs.users
