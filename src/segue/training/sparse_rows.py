"""Steps over a large table that touch only the rows a batch used, and an average that catches up when it is looked at.

A table whose look-ups give sparse gradients says by itself which rows a step used. They are updated by AdamW's own
kernel; every other row, and its moments, stays as it is. That is the rule of `torch.optim.SparseAdam`, and not quite
dense AdamW, which moves a row that is no longer used on for some ten steps while its moments fade, and pulls it towards
zero under weight decay. The corrections for the moments' start count all steps, as in dense AdamW. When every step uses
every row, both are the same. When a step uses few, rare rows go a shorter way each time: on a log of 12,000 items, some
8 % of the rows a step, the same validation score took about half as many epochs again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_step

LEAST_ROWS = 100_000  # from here it pays: of 11,000 look-ups at width 64 the update took 18 ms by rows and 28 whole (at
# 30,000 rows 12 and 10, at a million 20 and 750); below, the little to be won is not worth leaving dense AdamW for
LEAST_MEMORY = 1e-300  # stands for 0, which has no logarithm


class RowSteps:
    """A table and its average.

    While a row is not used its weights w stand still, and n steps of averaging with memories m₁ … mₙ leave
    w + m₁⋯mₙ (average - w). So a row's average waits, and catches up when the row is used again or all are settled.
    """

    def __init__(self, table: nn.Parameter, average: Tensor) -> None:
        self.table = table
        self.average = average
        self._fading = 0.0  # log of the product of all memories since the average was last settled
        self._faded = torch.zeros(len(table), dtype=torch.float64, device=table.device)  # the same, when last used

    @torch.no_grad()
    def step(self, adamw: torch.optim.AdamW, gradient: Tensor, memory: float) -> None:
        """Update the rows of a coalesced sparse gradient, and take them into the average."""
        rows, moments, (group,) = gradient.indices()[0], _moments(adamw, self.table), adamw.param_groups
        kept = (self.table, self.average, moments["exp_avg"], moments["exp_avg_sq"])
        weight, average, first, second = used = [tensor.index_select(0, rows) for tensor in kept]
        average.lerp_(weight, self._forgotten(self._faded[rows]))
        adamw_step(
            [weight],
            [gradient.values()],
            [first],
            [second],
            [],
            [moments["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        average.lerp_(weight, 1 - memory)
        for tensor, part in zip(kept, used, strict=True):
            tensor.index_copy_(0, rows, part)
        self._fading += math.log(max(memory, LEAST_MEMORY))
        self._faded[rows] = self._fading

    @torch.no_grad()
    def settle(self) -> None:
        """Bring the average of every row up to date."""
        self.average.lerp_(self.table, self._forgotten(self._faded))
        self._faded.zero_()
        self._fading = 0.0

    def _forgotten(self, faded: Tensor) -> Tensor:
        """1 - the product of the memories since `faded`, as a column."""
        return -torch.expm1(self._fading - faded).to(self.average.dtype)[:, None]


def _moments(adamw: torch.optim.AdamW, table: nn.Parameter) -> dict[str, Tensor]:
    """Under the names that AdamW gives them itself, so that they are saved and loaded like all others."""
    state: dict[str, Tensor] = adamw.state[table]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=table.device)
        state["exp_avg"] = torch.zeros_like(table)
        state["exp_avg_sq"] = torch.zeros_like(table)
    return state


def take_sparse_gradients(weights: Sequence[nn.Parameter]) -> dict[int, Tensor]:
    """Sparse gradients, each row once, by the weight's place; the dense ones are left where they are."""
    taken = {}
    for place, weight in enumerate(weights):
        if weight.grad is not None and weight.grad.is_sparse:
            taken[place] = weight.grad.coalesce()
            weight.grad = None
    return taken
