"""The interface of processes that share one training or evaluation. The group that runs on torch.distributed is in
`segue.training.distributed`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from torch import Tensor

Value = TypeVar("Value")


class ProcessGroup:
    """A group of one process, whose operations return their input. Groups of several are subclasses.

    All processes of a group must make the same calls in the same order.
    """

    rank: int = 0
    """The number of this process. Process 0 writes files and logs for all."""
    size: int = 1

    def shard(self, values: Iterable[Value]) -> Iterator[Value]:
        """Every `size`-th value. Each value belongs to exactly one process, if all pass the same values."""
        return iter(values)

    def sum(self, array: np.ndarray) -> np.ndarray:
        """The sum over the processes. It is exact if at most one process has a number other than 0."""
        return array

    def gather_with_gradient(self, own: Tensor, counts: Sequence[int]) -> Tensor:  # noqa: ARG002
        """The rows of all processes, in the order of their ranks, with gradients. `counts`: rows of each process.

        Every process must compute the same loss of all rows and divide it by `size`: the gradients of the processes
        are summed, so weights that all of them use get their gradient once. Rows get their full gradient in the
        process that they come from.
        """
        return own

    def all_gather_objects(self, value: Value) -> list[Value]:
        """The values of all processes, in the order of their ranks; waits for all of them."""
        return [value]

    def on_first(self, function: Callable[[], Value]) -> Value:
        """Call the function in process 0 and return its result in all. Its SegueError is raised in all."""
        return function()


SINGLE_PROCESS = ProcessGroup()
