"""Questions whose states were drawn: what the loss needs so that the draws are learned from, too."""

from __future__ import annotations

import torch
from torch import Tensor

from segue.layers.attention.weights import reinforce_loss
from segue.models.sampled_attention import SampledAttention


def even_weights(questions: Tensor, weights: Tensor | None) -> Tensor:
    """The questions' weights [M], those not given all alike, made so that a loss says by them what each question lost:
    see `with_draws`. They add up to one."""
    given = questions.new_ones(len(questions)) if weights is None else weights.to(questions.dtype)
    return (given / given.sum()).detach().requires_grad_()


def with_draws(loss: Tensor, weights: Tensor, draws: SampledAttention, states: Tensor) -> Tensor:
    """The same number with the gradient that the draws lack (REINFORCE, Williams 1992): where it went worse than
    usual, what was drawn becomes less likely.

    `loss` is a mean of the questions' losses by `weights` [M], so that its derivative in a weight is what the question
    lost above the mean. `states` [M] says of which state each question was asked; `draws` are the questions' states'.
    What is usual for a state is the mean over the questions of all others, on which its own draw has no influence, so
    that the gradient is right on average; a batch of one state has no others, and nothing is usual.
    """
    (above,) = torch.autograd.grad(loss, weights, retain_graph=True)
    share = weights.detach()
    of_state = torch.zeros(int(states.max()) + 1, dtype=share.dtype, device=share.device)
    others = 1 - of_state.index_add(0, states, share)[states]
    own = of_state.index_add(0, states, share * above)[states]  # of all questions of the state, above the mean
    usual = torch.where(others > LEAST_OTHERS, -own / others, -loss.detach())
    scale = share * len(share)  # a mean by weights from a plain one
    extra = reinforce_loss(
        scale * above, draws.log_probability, scale * usual, entropy=scale * draws.entropy, bonus=draws.bonus
    )
    return loss + (extra - extra.detach())


LEAST_OTHERS = 1e-6  # below, rounding is all that is left of the others
