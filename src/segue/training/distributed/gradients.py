"""The gradients of several processes → their sum, which is the gradient that a single process would have.

Each process has the gradient of its shard's part of the mean loss (`Objective.loss`), so a plain sum weighs all queries
alike. torch's DistributedDataParallel would average over processes instead. It also needs the model's `forward`, every
weight used at every step, and dense gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from segue.process_group import ProcessGroup
from segue.training.distributed.process_group import TorchProcessGroup

NONE, DENSE, SPARSE = 0, 1, 2


@torch.no_grad()
def sum_gradients(weights: Sequence[nn.Parameter], loss: Tensor, group: ProcessGroup) -> float:
    """Replace the gradients by their sums over the processes, and return the sum of the losses."""
    if not isinstance(group, TorchProcessGroup):
        return loss.item()
    # A weight that any process used has a gradient in all of them; one that none used has none.
    kinds = [NONE if weight.grad is None else SPARSE if weight.grad.is_sparse else DENSE for weight in weights]
    kinds = group.all_reduce_max(torch.tensor(kinds, dtype=torch.uint8, device=loss.device)).tolist()
    dense = [weight for weight, kind in zip(weights, kinds, strict=True) if kind == DENSE]
    gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in dense]
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), loss.detach().view(1).to(weights[0].dtype)])
    sums = torch.split(group.all_reduce_sum(flat), [*(weight.numel() for weight in dense), 1])
    for weight, total in zip(dense, sums, strict=False):
        weight.grad = total.view_as(weight)
    for weight, kind in zip(weights, kinds, strict=True):
        if kind == SPARSE:
            weight.grad = _sum_sparse(weight, group)
    return sums[-1].item()


def _sum_sparse(table: nn.Parameter, group: TorchProcessGroup) -> Tensor:
    """The sum of the sparse gradients of a table, with the rows that any process used."""
    if table.grad is None:
        rows, values = table.new_zeros(0, dtype=torch.int64), table.new_zeros(0, table.shape[1])
    else:
        gradient = table.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
    counts = group.all_gather_rows(torch.tensor([len(rows)], device=table.device), [1] * group.size).tolist()
    rows, values = group.all_gather_rows(rows, counts), group.all_gather_rows(values, counts)
    return torch.sparse_coo_tensor(rows[None], values, table.shape, check_invariants=False).coalesce()
