"""One item instead of a mean: scores → weights that are zero but at one place, and ways to learn through that.

Straight-through looks at one and learns as if it had looked at all: biased, of little variance. REINFORCE draws one and
learns from how well it went: exact on average, of much variance, which a baseline lowers. Answers take the best.
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
    """How much of each value is taken, and for REINFORCE in training what its loss needs."""

    weights: Tensor  # [..., N]
    log_probability: Tensor | None = None  # [...]: of what was drawn
    entropy: Tensor | None = None  # [...]: of what it was drawn from


def select_weights(
    logits: Tensor,
    may_attend: Tensor | None,
    how: Choice,
    *,
    temperature: float,
    training: bool,
    generator: torch.Generator | None,
) -> AttentionWeights:
    """Weights [..., N] from scores [..., N]; `may_attend`, which broadcasts to them, is True where one may look, which
    is somewhere in every row.

    A low temperature makes soft weights harder. Where it is not training, hard kinds take the highest score.
    """
    if may_attend is not None:
        logits = logits.masked_fill(~may_attend, -math.inf)
    if how == "soft":
        return AttentionWeights(_sharper(logits, temperature).softmax(-1))
    if not training:
        return AttentionWeights(one_hot(logits.argmax(-1), logits))
    match how:
        case "straight-through":
            return AttentionWeights(straight_through(_sharper(logits, temperature).softmax(-1), logits.argmax(-1)))
        case "gumbel":
            noise = torch.rand(logits.shape, dtype=logits.dtype, generator=generator).to(logits.device)
            noisy = logits + gumbel_noise(noise)
            return AttentionWeights(straight_through(_sharper(noisy, temperature).softmax(-1), noisy.argmax(-1)))
        case "reinforce":
            log_probabilities = _sharper(logits, temperature).log_softmax(-1)
            drawn = _drawn(log_probabilities.detach().exp(), generator)
            return AttentionWeights(
                one_hot(drawn, logits), log_probability_of(log_probabilities, drawn), entropy(log_probabilities)
            )


def one_hot(places: Tensor, like: Tensor) -> Tensor:
    """[...] → [..., N]: one at the place."""
    return functional.one_hot(places, like.shape[-1]).to(like.dtype)


def straight_through(chances: Tensor, drawn: Tensor) -> Tensor:
    """One at what was drawn, with the gradient of the chances [..., N]."""
    return one_hot(drawn, chances) + (chances - chances.detach())


def gumbel_noise(uniform: Tensor) -> Tensor:
    """Numbers that make the highest of scores a draw by their softmax, from numbers that are uniform in [0, 1)."""
    least = torch.finfo(uniform.dtype).tiny  # a zero would make the noise infinite
    return -(-uniform.clamp(min=least).log()).log()


def log_probability_of(log_probabilities: Tensor, drawn: Tensor) -> Tensor:
    """[..., N] at what was drawn [...]."""
    return log_probabilities.gather(-1, drawn[..., None]).squeeze(-1)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Of each row [..., N] → [...]; where one may not look there is none, and no gradient."""
    return -(log_probabilities.exp() * log_probabilities.masked_fill(log_probabilities == -math.inf, 0)).sum(-1)


def reinforce_loss(
    losses: Tensor, log_probability: Tensor, baseline: Tensor | float, *, entropy: Tensor, bonus: float
) -> Tensor:
    """What is added to the mean of `losses` [M] so that its gradient reaches the scores of what was drawn.

    Each loss meets its own draw; neither it nor the baseline is learned from here. `bonus` is what a unit of entropy
    [M] is worth: it keeps draws from settling on one place early.
    """
    surprise = (losses - baseline).detach()
    return (surprise * log_probability).mean() - bonus * entropy.mean()


def _sharper(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits / temperature


def _drawn(chances: Tensor, generator: torch.Generator | None) -> Tensor:
    """A place for each row [..., N] → [...]."""
    rows = chances.reshape(-1, chances.shape[-1])
    drawn = torch.multinomial(rows.cpu(), 1, generator=generator).to(chances.device)  # there the generator lives
    return drawn.view(chances.shape[:-1])
