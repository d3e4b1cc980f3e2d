"""A matrix, known by its products alone → the directions along which its rows differ most.

Truncated singular value decomposition by random projection: Halko et al., Finding Structure with Randomness, 2011.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SPARE, TURNS = 16, 4  # features beyond those wanted, and turns of the power iteration
LEAST_SIZE = 1e-4  # of the largest singular value: directions of smaller ones are noise
TALL = 1_000_000  # rows from which on a matrix is made orthonormal by products: tenfold as fast, and in place
AT_A_TIME = 1 << 17  # rows of a tall matrix in a product

Product = Callable[[Tensor], Tensor]
"""Of the matrix, or of it turned, with a full one."""


def right_directions(
    times: Product, turned_times: Product, shape: tuple[int, int], width: int, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The right singular vectors of the largest singular values [columns, width], and those values [width]; zeros where
    the rank is smaller."""
    rows, columns = shape
    wanted = min(width, rows, columns)
    if not wanted:
        return torch.zeros(columns, width), torch.zeros(width)
    some = min(wanted + SPARE, rows, columns)
    basis = _orthonormal(times(torch.randn(columns, some, generator=generator)))
    for _ in range(TURNS):
        basis = _orthonormal(turned_times(basis))
        basis = _orthonormal(times(basis))
    left, sizes = _left(turned_times(basis))
    rank = min(wanted, int((sizes > LEAST_SIZE * sizes[0]).sum()))
    directions, kept = torch.zeros(columns, width), torch.zeros(width)
    directions[:, :rank], kept[:rank] = left[:, :rank], sizes[:rank]
    return directions, kept


def _orthonormal(matrix: Tensor) -> Tensor:
    """An orthonormal basis of what its columns span."""
    if len(matrix) < TALL:
        basis: Tensor = torch.linalg.qr(matrix).Q
        return basis
    for _ in range(2):  # the second time takes back what rounding did in the first
        values, turn = torch.linalg.eigh(_gram(matrix))
        values = values.clamp(min=values[-1] * torch.finfo(values.dtype).eps)
        _multiply(matrix, turn / values.sqrt())
    return matrix


def _left(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors and singular values, the largest first."""
    if len(matrix) < TALL:
        left, sizes, _ = torch.linalg.svd(matrix, full_matrices=False)
        return left, sizes
    values, turn = torch.linalg.eigh(_gram(matrix))
    sizes, turn = values.clamp(min=0).sqrt().flip(0), turn.flip(1)
    _multiply(matrix, turn / sizes.clamp(min=torch.finfo(torch.float32).tiny))
    return matrix, sizes


def _gram(matrix: Tensor) -> Tensor:
    """Products of the columns with each other [X, X] float64."""
    found = torch.zeros(matrix.shape[1], matrix.shape[1], dtype=torch.float64)
    for part in torch.split(matrix, AT_A_TIME):
        part = part.double()
        found.addmm_(part.T, part)
    return found


def _multiply(matrix: Tensor, factor: Tensor) -> None:
    """In place, by a square matrix on the right."""
    for part in torch.split(matrix, AT_A_TIME):
        part.copy_(part.double() @ factor)
