"""REINFORCE: the gradient of a loss for the samples that the states of its queries depend on.

A model whose states depend on samples returns the probabilities of the samples with its states; the objective, which
knows the loss of each query, adds the missing gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from segue.layers.attention.weights import reinforce_loss
from segue.models.attention import SampledAttention

LEAST_OTHERS = 1e-6  # a total weight of the other queries below this is only rounding error


def leaf_weights(queries: Tensor, weights: Tensor | None) -> Tensor:
    """The weights of the queries [M], None: equal ones, scaled to sum to one. They require a gradient: the loss's
    derivative by a weight gives `with_reinforce` the loss of each query."""
    weights = queries.new_ones(len(queries)) if weights is None else weights.to(queries.dtype)
    return (weights / weights.sum()).detach().requires_grad_()


def with_reinforce(loss: Tensor, weights: Tensor, samples: SampledAttention, states: Tensor) -> Tensor:
    """The same value with the gradient of the samples (REINFORCE, Williams 1992): samples whose loss is above the
    baseline become less likely.

    `loss` is the mean of the queries' losses by `weights` [M], so that its derivative by a weight is the query's loss
    minus the mean. `states` [M]: the number of each query's state; `samples`: those of the queries' states. The
    baseline of a state is the mean loss over the queries of all other states. It does not depend on the state's own
    sample, so the gradient is unbiased. In a batch of one state the baseline is 0.
    """
    (centred,) = torch.autograd.grad(loss, weights, retain_graph=True)
    share = weights.detach()
    zeros = torch.zeros(int(states.max()) + 1, dtype=share.dtype, device=share.device)
    others = 1 - zeros.index_add(0, states, share)[states]
    own = zeros.index_add(0, states, share * centred)[states]  # of all queries of the state
    baseline = torch.where(others > LEAST_OTHERS, -own / others, -loss.detach())
    scale = share * len(share)  # the plain mean of `reinforce_loss` becomes the weighted mean
    extra = reinforce_loss(
        scale * centred, samples.log_probability, scale * baseline, entropy=scale * samples.entropy, bonus=samples.bonus
    )
    return loss + (extra - extra.detach())
