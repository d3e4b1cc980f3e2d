"""Attention weights from scores: soft (softmax) or hard (one key), with estimators of the gradient.

Straight-through takes one key forward and the softmax's gradient backward: biased, of low variance. REINFORCE samples
one key and learns from the loss: unbiased, of high variance, which a baseline lowers. Inference takes the best key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Choice = Literal["soft", "straight-through", "gumbel", "reinforce"]


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """Weights of the values and, for REINFORCE in training, the terms of its loss."""

    weights: Tensor  # [..., N]
    log_probability: Tensor | None = None  # [...]: of the sampled key
    entropy: Tensor | None = None  # [...]: of the distribution it was sampled from


def select_weights(
    logits: Tensor,
    may_attend: Tensor | None,
    how: Choice,
    *,
    temperature: float,
    training: bool,
    generator: torch.Generator | None,
) -> AttentionWeights:
    """Weights [..., N] from scores [..., N]. `may_attend` broadcasts to them; each row has at least one True. Outside
    training, the hard choices take the highest score."""
    if how == "soft":
        return AttentionWeights(soft_weights(logits / temperature, may_attend))
    if may_attend is not None:
        logits = logits.masked_fill(~may_attend, -math.inf)
    if not training:
        return AttentionWeights(one_hot(logits.argmax(-1), logits))
    match how:
        case "straight-through":
            return AttentionWeights(straight_through((logits / temperature).softmax(-1), logits.argmax(-1)))
        case "gumbel":
            uniform = torch.rand(logits.shape, dtype=logits.dtype, generator=generator).to(logits.device)
            noisy = logits + gumbel_noise(uniform)
            return AttentionWeights(straight_through((noisy / temperature).softmax(-1), noisy.argmax(-1)))
        case "reinforce":
            log_probabilities = (logits / temperature).log_softmax(-1)
            rows = log_probabilities.detach().exp().flatten(0, -2).cpu()  # like the generator
            samples = torch.multinomial(rows, 1, generator=generator).to(logits.device).view(logits.shape[:-1])
            of_samples = log_probabilities.gather(-1, samples[..., None]).squeeze(-1)
            return AttentionWeights(one_hot(samples, logits), of_samples, entropy(log_probabilities))


def soft_weights(logits: Tensor, may_attend: Tensor | None) -> Tensor:
    """The softmax of scores [..., N] over the keys where `may_attend` is True."""
    if may_attend is not None:
        logits = logits.masked_fill(~may_attend, -math.inf)
    return logits.softmax(-1)


def one_hot(indices: Tensor, like: Tensor) -> Tensor:
    """[...] → [..., N]: 1 at the index, 0 elsewhere."""
    return functional.one_hot(indices, like.shape[-1]).to(like.dtype)


def straight_through(probabilities: Tensor, indices: Tensor) -> Tensor:
    """One-hot weights at the indices [...], with the gradient of the probabilities [..., N]."""
    return one_hot(indices, probabilities) + (probabilities - probabilities.detach())


def gumbel_noise(uniform: Tensor) -> Tensor:
    """Gumbel noise from uniform numbers in [0, 1): the argmax of scores plus noise is a sample of their softmax."""
    least = torch.finfo(uniform.dtype).tiny  # a zero would make the noise infinite
    return -(-uniform.clamp(min=least).log()).log()


def entropy(log_probabilities: Tensor) -> Tensor:
    """Entropy of each row [..., N] → [...]; masked keys add nothing and get no gradient."""
    return -(log_probabilities.exp() * log_probabilities.masked_fill(log_probabilities == -math.inf, 0)).sum(-1)


def reinforce_loss(
    losses: Tensor, log_probability: Tensor, baseline: Tensor | float, *, entropy: Tensor, bonus: float
) -> Tensor:
    """The term whose gradient by the scores of the sampled keys is that of the mean of `losses` [M]. Each loss is
    paired with its own sample. `bonus` times the mean entropy is subtracted, so that the distribution does not
    collapse."""
    advantage = (losses - baseline).detach()
    return (advantage * log_probability).mean() - bonus * entropy.mean()
