"""Product quantisation after a turn: what was planted is found, and nothing but a turn is done to vectors."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from segue.models.items.clusters import Clusters
from segue.models.items.code_assignment import rotated_parts

PARTS, VALUES, WIDTH = 3, 4, 6


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def lost(vectors: Tensor, weights: Tensor, *, values: int = VALUES, seed: int = 1) -> Tensor:
    """The squared distance [n] of each vector from what its clusters say of it."""
    pieces, found = rotated_parts(vectors, weights, parts=PARTS, values=values, generator=seeded(seed))
    near = [each.centres[each.nearest(piece)] for each, piece in zip(found, pieces, strict=True)]
    return (torch.cat(pieces, 1) - torch.cat(near, 1)).square().sum(1)


def test_planted_parts_are_found_behind_a_turn() -> None:
    """Vectors whose three parts are each one of four: turned by lot, they have other parts, of which a
    turn back makes these again."""
    generator = seeded(7)
    centres = torch.randn(PARTS, VALUES, WIDTH // PARTS, generator=generator)
    codes = torch.randint(VALUES, (400, PARTS), generator=generator)
    straight = centres[torch.arange(PARTS), codes].flatten(1)
    turned = straight @ torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
    unturned = [
        Clusters.of(piece, VALUES, rounds=50, members=400, generator=seeded(1)) for piece in turned.chunk(PARTS, dim=1)
    ]
    near = [each.centres[each.nearest(piece)] for each, piece in zip(unturned, turned.chunk(PARTS, 1), strict=True)]
    without = (turned - torch.cat(near, 1)).square().sum(1).mean()
    assert sum(float(lost(turned, torch.ones(400), seed=seed).mean()) for seed in range(5)) / 5 < without / 2


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.integers(1, 30))
def test_parts_are_the_vectors_turned_about_their_mean(seed: int, n: int) -> None:
    vectors, weights = torch.randn(n, WIDTH, generator=seeded(seed)), torch.rand(n, generator=seeded(seed + 1)) + 0.1
    pieces, found = rotated_parts(vectors, weights, parts=PARTS, values=VALUES, generator=seeded(seed))
    assert all(len(each.centres) <= min(VALUES, n) for each in found)
    together = torch.cat(pieces, 1)
    between = [(each[:, None] - each[None]).norm(dim=2) for each in (together, vectors)]
    assert torch.allclose(between[0], between[1], atol=1e-4)
    assert torch.allclose(weights @ together / weights.sum(), torch.zeros(WIDTH), atol=1e-4)


def test_what_weighs_more_is_told_more_exactly() -> None:
    vectors = torch.randn(200, WIDTH, generator=seeded(3))
    heavy = torch.ones(200)
    heavy[:10] = 100
    assert lost(vectors, heavy)[:10].mean() < 0.5 * lost(vectors, torch.ones(200))[:10].mean()
