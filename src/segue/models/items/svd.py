"""Truncated singular value decomposition of a matrix that is given by its products.

By random projection: Halko et al., "Finding Structure with Randomness", 2011.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SPARE, ITERATIONS = 16, 4  # extra features, and power iterations
LEAST_VALUE = 1e-4  # of the largest singular value; smaller ones are noise
TALL = 1_000_000  # a matrix of as many rows is orthonormalised by products: ten times as fast, and in place
AT_A_TIME = 1 << 17  # rows of a tall matrix in a product

Product = Callable[[Tensor], Tensor]
"""The product of the matrix, or of its transpose, with a dense matrix."""


def right_directions(
    times: Product, transposed_times: Product, shape: tuple[int, int], width: int, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The right singular vectors of the largest singular values [columns, width], and these values [width]; zeros
    beyond the rank."""
    rows, columns = shape
    n_values = min(width, rows, columns)
    if not n_values:
        return torch.zeros(columns, width), torch.zeros(width)
    n_features = min(n_values + SPARE, rows, columns)
    basis = _orthonormal(times(torch.randn(columns, n_features, generator=generator)))
    for _ in range(ITERATIONS):
        basis = _orthonormal(transposed_times(basis))
        basis = _orthonormal(times(basis))
    left, values = _left(transposed_times(basis))
    rank = min(n_values, int((values > LEAST_VALUE * values[0]).sum()))
    directions, strengths = torch.zeros(columns, width), torch.zeros(width)
    directions[:, :rank], strengths[:rank] = left[:, :rank], values[:rank]
    return directions, strengths


def _orthonormal(matrix: Tensor) -> Tensor:
    """An orthonormal basis of the column space."""
    if len(matrix) < TALL:
        basis: Tensor = torch.linalg.qr(matrix).Q
        return basis
    for _ in range(2):  # the second pass corrects the rounding errors of the first
        eigenvalues, rotation = torch.linalg.eigh(_gram(matrix))
        eigenvalues = eigenvalues.clamp(min=eigenvalues[-1] * torch.finfo(eigenvalues.dtype).eps)
        _multiply(matrix, rotation / eigenvalues.sqrt())
    return matrix


def _left(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors and singular values, the largest first."""
    if len(matrix) < TALL:
        left, values, _ = torch.linalg.svd(matrix, full_matrices=False)
        return left, values
    eigenvalues, rotation = torch.linalg.eigh(_gram(matrix))
    values, rotation = eigenvalues.clamp(min=0).sqrt().flip(0), rotation.flip(1)
    _multiply(matrix, rotation / values.clamp(min=torch.finfo(torch.float32).tiny))
    return matrix, values


def _gram(matrix: Tensor) -> Tensor:
    """The Gram matrix of the columns [X, X] float64."""
    gram = torch.zeros(matrix.shape[1], matrix.shape[1], dtype=torch.float64)
    for part in torch.split(matrix, AT_A_TIME):
        part = part.double()
        gram.addmm_(part.T, part)
    return gram


def _multiply(matrix: Tensor, factor: Tensor) -> None:
    """Multiply in place by a square matrix on the right."""
    for part in torch.split(matrix, AT_A_TIME):
        part.copy_(part.double() @ factor)
