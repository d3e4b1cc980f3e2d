"""Processes that work on one thing: who this one is among them, and what they tell each other.

One process alone is a team too: every call gives back what it got, so that callers need not ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, distributed

from segue.errors import SegueError

Thing = TypeVar("Thing")


@dataclass(frozen=True, slots=True)
class Team:
    """Some processes of torch.distributed, or one that knows of no others."""

    rank: int = 0
    """Of this process: 0 is the first, which writes and speaks for all."""
    size: int = 1

    def mine(self, things: Iterable[Thing]) -> Iterator[Thing]:
        """Every `size`-th thing. All processes see the same things, and together they have each once."""
        return islice(things, self.rank, None, self.size)

    def total(self, array: np.ndarray) -> np.ndarray:
        """The sum over the processes. Where each number is one process's and 0 elsewhere, nothing is rounded."""
        return array if self.size == 1 else self.added_up(torch.from_numpy(array)).numpy()

    def added_up(self, tensor: Tensor) -> Tensor:
        """The sum over the processes, in place: the same bits everywhere."""
        if self.size > 1:
            distributed.all_reduce(tensor)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest over the processes, in place."""
        if self.size > 1:
            distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
        return tensor

    def rows(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all processes, the first process's first; `counts` says how many each has."""
        if self.size == 1:
            return own
        # Unequal parts are filled up: that is what every backend of torch can exchange.
        padded = own.new_zeros(max(counts), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in counts]
        distributed.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def gathered(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """`rows`, to be learned through, by a loss that every process computes of them all and takes a `size`-th of.

        So weights behind the gathering, whose gradients all processes have, are learned from once when gradients are
        added up. A process's own rows get their gradient there alone, and get all of it.
        """
        if self.size == 1:
            return own
        whole: Tensor = _Gathered.apply(own, self, counts)  # type: ignore[no-untyped-call]
        return whole

    def told(self, thing: Thing) -> list[Thing]:
        """What each process has to tell, the first process's first; all of them wait for it."""
        if self.size == 1:
            return [thing]
        everyone: list[Any] = [None] * self.size
        distributed.all_gather_object(everyone, thing)
        return everyone

    def by_first(self, do: Callable[[], Thing]) -> Thing:
        """Let the first process do something for all: everyone gets its result, or what it was refused with."""
        if self.size == 1:
            return do()
        told: list[Any] = [None, None]
        if self.rank == 0:
            try:
                told[0] = do()
            except SegueError as error:
                told[1] = error
        distributed.broadcast_object_list(told, src=0)
        result, refusal = told
        if refusal is not None:
            raise refusal
        return result  # type: ignore[no-any-return]  # what travelled is what `do` gave


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, team: Team, counts: Sequence[int]) -> Tensor:
        begin = sum(counts[: team.rank])
        ctx.own, ctx.size = slice(begin, begin + len(own)), team.size
        return team.rows(own, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.own] * ctx.size, None, None


ALONE = Team()
