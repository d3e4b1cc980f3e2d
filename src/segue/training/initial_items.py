"""A log → item vectors from which training begins: items of the same histories are near each other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from segue.data.sequences import Sequences
from segue.models.items.occurrences import Occurrences, torch_generator

NOISE = 0.3  # share of the random vectors that is added, so that items of the same few histories differ


@torch.no_grad()
def begin_with_companions(
    table: Tensor, sequences: Sequences, ends: np.ndarray, n_items: int, *, members: int, seed: int
) -> Tensor:
    """Replace the random rows 1 .. V of a table [V + 1 or more, D] by the principal directions of each user's events
    before `ends` [U], and return it.

    Their inner products approximate the cosines of items: users who have both, over the root of the product of each
    item's users. A random rotation spreads the directions over all features, and the mean length stays that of the
    random vectors. Each of several `members` has them in its share of the features.
    """
    rng = np.random.default_rng(seed)
    occurrences = Occurrences.of(np.asarray(sequences.items), np.asarray(sequences.offsets)[:-1], ends, n_items)
    width, users = table.shape[1] // members, occurrences.counts()
    directions, sizes = occurrences.directions(width, rng, weights=users.clamp(min=1).rsqrt())
    vectors = (directions * sizes)[1 : n_items + 1]
    some = vectors.norm(dim=1) > 0
    if some.any():
        vectors /= vectors[some].norm(dim=1).mean()
        for own in table[1 : n_items + 1].chunk(members, dim=1):
            rotation = torch.linalg.qr(torch.randn(width, width, generator=torch_generator(rng)))[0]
            length = own.norm(dim=1).mean()
            own.mul_(NOISE).add_(vectors @ rotation * length)
    return table
