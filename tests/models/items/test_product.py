"""Product quantisation after a rotation: planted parts are recovered, and vectors are only rotated."""

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


def squared_errors(vectors: Tensor, weights: Tensor, *, values: int = VALUES, seed: int = 1) -> Tensor:
    """The squared distance [n] of each vector from its quantisation."""
    pieces, codebooks = rotated_parts(vectors, weights, parts=PARTS, values=values, generator=seeded(seed))
    near = [each.centres[each.nearest(piece)] for each, piece in zip(codebooks, pieces, strict=True)]
    return (torch.cat(pieces, 1) - torch.cat(near, 1)).square().sum(1)


def test_planted_parts_are_recovered_behind_a_rotation() -> None:
    """Vectors whose three parts are each one of four: after a random rotation their parts are others, and a
    rotation back recovers them."""
    generator = seeded(7)
    centres = torch.randn(PARTS, VALUES, WIDTH // PARTS, generator=generator)
    codes = torch.randint(VALUES, (400, PARTS), generator=generator)
    straight = centres[torch.arange(PARTS), codes].flatten(1)
    rotated = straight @ torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
    codebooks = [
        Clusters.of(piece, VALUES, rounds=50, members=400, generator=seeded(1)) for piece in rotated.chunk(PARTS, dim=1)
    ]
    near = [each.centres[each.nearest(piece)] for each, piece in zip(codebooks, rotated.chunk(PARTS, 1), strict=True)]
    error = (rotated - torch.cat(near, 1)).square().sum(1).mean()
    assert sum(float(squared_errors(rotated, torch.ones(400), seed=seed).mean()) for seed in range(5)) / 5 < error / 2


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.integers(1, 30))
def test_parts_are_the_vectors_rotated_about_their_mean(seed: int, n: int) -> None:
    vectors, weights = torch.randn(n, WIDTH, generator=seeded(seed)), torch.rand(n, generator=seeded(seed + 1)) + 0.1
    pieces, codebooks = rotated_parts(vectors, weights, parts=PARTS, values=VALUES, generator=seeded(seed))
    assert all(len(each.centres) <= min(VALUES, n) for each in codebooks)
    together = torch.cat(pieces, 1)
    between = [(each[:, None] - each[None]).norm(dim=2) for each in (together, vectors)]
    assert torch.allclose(between[0], between[1], atol=1e-4)
    assert torch.allclose(weights @ together / weights.sum(), torch.zeros(WIDTH), atol=1e-4)


def test_vectors_of_larger_weight_have_smaller_errors() -> None:
    vectors = torch.randn(200, WIDTH, generator=seeded(3))
    heavy = torch.ones(200)
    heavy[:10] = 100
    assert squared_errors(vectors, heavy)[:10].mean() < 0.5 * squared_errors(vectors, torch.ones(200))[:10].mean()
