from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from segue.objective.losses import softmax
from segue.objective.losses.softmax import full_softmax


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def case(rows: int, n_items: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    targets = torch.randint(n_items, (rows,), generator=torch.Generator().manual_seed(seed))
    return normal(rows, width, seed=seed), normal(n_items, width, seed=seed + 1), targets


def plain(hidden: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """All logits at once, by torch."""
    losses = functional.cross_entropy(hidden @ matrix.T, targets, reduction="none")
    return losses.mean() if weights is None else (losses * weights).sum() / weights.sum()


@pytest.fixture(params=[(1, 1), (21, 1), (35, 1), (1, 4), (7 * 64, 64), (1 << 20, 64)], ids=lambda sizes: f"{sizes}")
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over seven items: tiles of one, three, five, four, sixty-four and very many rows."""
    monkeypatch.setattr(softmax, "TILE_SCORES", request.param[0])
    monkeypatch.setattr(softmax, "LEAST_TILE", request.param[1])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("rows", [1, 4, 10, 11])
@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "weighted"])
def test_equal_to_the_plain_form(rows: int, weighted: bool) -> None:
    hidden, matrix, targets = case(rows, 7, 3, seed=rows)
    weights = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) if weighted else None
    ours = [hidden.clone().requires_grad_(), matrix.clone().requires_grad_()]
    theirs = [hidden.clone().requires_grad_(), matrix.clone().requires_grad_()]
    result, expected = full_softmax(ours[0], ours[1], targets, weights), plain(theirs[0], theirs[1], targets, weights)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    torch.autograd.backward(result * 3)
    torch.autograd.backward(expected * 3)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("tiles")
def test_gradient_check() -> None:
    hidden, matrix, targets = case(5, 7, 3)
    weights = torch.tensor([1.0, 2, 0, 4, 5], dtype=torch.float64)
    inputs = (hidden.requires_grad_(), matrix.requires_grad_())
    assert torch.autograd.gradcheck(lambda h, m: full_softmax(h, m, targets), inputs)
    assert torch.autograd.gradcheck(lambda h, m: full_softmax(h, m, targets, weights), inputs)


def test_gradient_of_either_input_alone() -> None:
    hidden, matrix, targets = case(5, 7, 3)
    assert torch.autograd.gradcheck(lambda h: full_softmax(h, matrix, targets), (hidden.clone().requires_grad_(),))
    assert torch.autograd.gradcheck(lambda m: full_softmax(hidden, m, targets), (matrix.clone().requires_grad_(),))
    assert not full_softmax(hidden, matrix, targets).requires_grad


def test_inputs_are_not_changed() -> None:
    hidden, matrix, targets = case(5, 7, 3)
    before = hidden.clone(), matrix.clone()
    torch.autograd.backward(full_softmax(hidden.requires_grad_(), matrix.requires_grad_(), targets))
    assert torch.equal(hidden, before[0]) and torch.equal(matrix, before[1])


def test_float32_is_as_good_as_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "TILE_SCORES", 5000)
    hidden, matrix, targets = case(300, 100, 16)
    exact = plain(hidden, matrix, targets)
    result = full_softmax(hidden.float(), matrix.float(), targets)
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(exact.item(), rel=1e-5)


def test_loss_of_g23() -> None:
    matrix = torch.tensor([[1.2], [-0.5], [0.3], [0], [-1], [0.8]], dtype=torch.float64)
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    loss = full_softmax(hidden, matrix.requires_grad_(), torch.tensor([0]))
    assert loss.item() == pytest.approx(0.982667, abs=1e-6)
    torch.autograd.backward(loss)
    assert matrix.grad is not None
    gradient = matrix.grad[:, 0]
    assert gradient[0].item() == pytest.approx(math.exp(-0.982667) - 1, abs=1e-6)
    assert gradient[1].item() == pytest.approx(math.exp(-0.5 - 2.182667), abs=1e-6)
    assert gradient.sum().item() == pytest.approx(0, abs=1e-12)


def test_equal_logits_cost_log_v() -> None:
    assert full_softmax(torch.zeros(3, 2), normal(3706, 2).float(), torch.tensor([0, 5, 3705])).item() == pytest.approx(
        8.217708, abs=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("logits", "target", "loss"),
    [
        ([1e4, -1e4, 0], 0, 0),
        ([1e4, -1e4, 0], 1, 2e4),
        ([1e4, -1e4, 0], 2, 1e4),
        ([-1e4, -1e4, -1e4], 1, math.log(3)),
        ([1e4, 1e4, 0], 0, math.log(2)),
        ([1e4, 1e4, 1e4], 2, math.log(3)),
    ],
)
def test_extreme_logits(logits: list[float], target: int, loss: float, dtype: torch.dtype) -> None:
    matrix = torch.tensor(logits, dtype=dtype)[:, None].requires_grad_()
    hidden = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    result = full_softmax(hidden, matrix, torch.tensor([target]))
    assert result.item() == pytest.approx(loss, rel=1e-6, abs=1e-5)
    torch.autograd.backward(result)
    assert matrix.grad is not None and hidden.grad is not None and torch.isfinite(hidden.grad).all()
    expected = torch.tensor(logits, dtype=torch.float64).softmax(0)
    expected[target] -= 1
    torch.testing.assert_close(matrix.grad[:, 0].double(), expected, rtol=0, atol=1e-6)


def test_values_that_are_not_finite_reach_the_loss() -> None:
    hidden = torch.tensor([[1.0], [math.nan]])
    assert math.isnan(full_softmax(hidden, torch.ones(3, 1), torch.tensor([0, 1])).item())
    assert not math.isfinite(full_softmax(torch.tensor([[math.inf]]), torch.ones(3, 1), torch.tensor([0])).item())


def test_only_the_proportion_of_weights_matters() -> None:
    hidden, matrix, targets = case(4, 6, 2)
    weights = torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
    equal = full_softmax(hidden, matrix, targets).item()
    assert full_softmax(hidden, matrix, targets, 7 * torch.ones_like(weights)).item() == pytest.approx(equal, abs=1e-12)
    one = full_softmax(hidden, matrix, targets, weights).item()
    assert full_softmax(hidden, matrix, targets, weights / 100).item() == pytest.approx(one, abs=1e-12)
    assert one != pytest.approx(equal, abs=1e-3)


def test_a_row_of_weight_zero_has_no_effect() -> None:
    hidden, matrix, targets = case(4, 6, 2)
    weights = torch.tensor([1.0, 0, 3, 0], dtype=torch.float64)
    result = full_softmax(hidden.requires_grad_(), matrix, targets, weights)
    rows = torch.tensor([0, 2])
    assert result.item() == pytest.approx(plain(hidden[rows], matrix, targets[rows], weights[rows]).item(), abs=1e-12)
    torch.autograd.backward(result)
    assert hidden.grad is not None and (hidden.grad[[1, 3]] == 0).all()


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the size of the largest tensor computed under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor):
            self.numbers = max(self.numbers, output.numel())
        return output


def test_the_whole_logits_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 states and 1000 items in tiles of 20 rows: at most a tile, or one of the inputs, forward and backward."""
    monkeypatch.setattr(softmax, "TILE_SCORES", 20_000)
    monkeypatch.setattr(softmax, "LEAST_TILE", 1)
    hidden, matrix, targets = case(500, 1000, 8)
    inputs = (hidden.requires_grad_(), matrix.requires_grad_())
    with LargestTensor() as ours:
        torch.autograd.backward(full_softmax(*inputs, targets))
    with LargestTensor() as theirs:
        torch.autograd.backward(plain(*inputs, targets))
    assert ours.numbers == 20_000
    assert theirs.numbers == 500_000


def test_loss_falls_when_the_answer_scores_higher() -> None:
    hidden, matrix, targets = case(1, 6, 1)
    losses = []
    for _ in range(4):
        losses.append(full_softmax(torch.ones_like(hidden), matrix, targets).item())
        matrix[targets] += 1
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1] + 1
