"""The group of processes that torch.distributed connects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from segue.errors import SegueError
from segue.process_group import ProcessGroup, Value


@dataclass(frozen=True)
class TorchProcessGroup(ProcessGroup):
    """A `ProcessGroup` of at least two processes, with the collective operations that gradients need."""

    rank: int
    size: int

    def shard(self, values: Iterable[Value]) -> Iterator[Value]:
        return islice(values, self.rank, None, self.size)

    def sum(self, array: np.ndarray) -> np.ndarray:
        return self.all_reduce_sum(torch.from_numpy(array)).numpy()

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over the processes, in place, with the same bits in all of them."""
        distributed.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """The maximum over the processes, in place."""
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
        return tensor

    def all_gather_rows(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all processes, in the order of their ranks. `counts`: rows of each process."""
        # Padded to one size: not every backend can exchange tensors of different sizes.
        padded = own.new_zeros(max(counts), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in counts]
        distributed.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def gather_with_gradient(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        rows: Tensor = _GatherRows.apply(own, self, counts)  # type: ignore[no-untyped-call]
        return rows

    def all_gather_objects(self, value: Value) -> list[Value]:
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def on_first(self, function: Callable[[], Value]) -> Value:
        message: list[Any] = [None, None]
        if self.rank == 0:
            try:
                message[0] = function()
            except SegueError as error:
                message[1] = error
        distributed.broadcast_object_list(message, src=0)
        result, refusal = message
        if refusal is not None:
            raise refusal
        return result  # type: ignore[no-any-return]  # the result of `function` in process 0


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: TorchProcessGroup, counts: Sequence[int]) -> Tensor:
        begin = sum(counts[: group.rank])
        ctx.own, ctx.size = slice(begin, begin + len(own)), group.size
        return group.all_gather_rows(own, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.own] * ctx.size, None, None
