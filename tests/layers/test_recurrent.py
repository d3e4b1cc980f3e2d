"""The recurrent block equals torch's layer for each user alone."""

from __future__ import annotations

import math

import pytest
import torch
from packed_users import assert_close, batch_of, normal
from torch import Tensor, nn

from segue.layers.blocks.recurrent import GRUBlock


def block_of(width: int, seed: int = 0) -> GRUBlock:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GRUBlock(width, width, dropout=0.0).double()


def test_packed_states_are_those_of_torch_for_each_user_alone() -> None:
    """Two layers are torch's two; the last state of a packed user is that of the padded one."""
    first, second = block_of(6), block_of(6, seed=1)
    both = nn.GRU(6, 6, num_layers=2, batch_first=True).double()
    for layer, block in enumerate((first, second)):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(both, f"{name}_l{layer}").data.copy_(getattr(block.cell, f"{name}_l0").data)
    batch, x = batch_of(7, 1, 4), normal(12, 6)
    output = second(first(x, batch), batch)
    for user, own in zip(torch.split(x, [7, 1, 4]), torch.split(output, [7, 1, 4]), strict=True):
        states, last = both(user[None])
        assert_close(own, states[0], 1e-12)
        assert_close(own[-1:], last[1], 1e-12)
    assert_close(second.newest(first(x, batch), batch), output[[6, 7, 11]], 1e-12)


def test_packed_sequences_of_torch_give_the_same_gradients() -> None:
    block, batch = block_of(5), batch_of(4, 2, 6)
    weights, x = normal(12, 5, seed=3), normal(12, 5).requires_grad_()
    (block(x, batch) * weights).sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in block.parameters())]
    block.zero_grad(set_to_none=True)
    own = x.detach().requires_grad_()
    packed = nn.utils.rnn.pack_sequence(list(torch.split(own, [4, 2, 6])), enforce_sorted=False)
    states, _ = nn.utils.rnn.pad_packed_sequence(block.cell(packed)[0], batch_first=True)
    real = torch.cat([states[user, :length] for user, length in enumerate((4, 2, 6))])
    (real * weights).sum().backward()  # type: ignore[no-untyped-call]
    for mine, torchs in zip(gradients, [own.grad, *(parameter.grad for parameter in block.parameters())], strict=True):
        assert mine is not None and torchs is not None
        assert_close(mine, torchs, 1e-12)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_unit_is_torchs_form_and_not_that_of_gru4rec() -> None:
    """All weights 1, no biases, a state of .2 and then a token of .5. GRU4Rec applies r before the map, and its z
    weights the new state, torch's the old one; the same parameters give another result."""
    block = block_of(1)
    for name, parameter in block.cell.named_parameters():
        parameter.data.fill_(1.0 if "weight" in name else 0.0)
    low, high = 0.0, 2.0  # the first token that leads to .2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - sigmoid(middle)) * math.tanh(middle) < 0.2 else (low, middle)
    output = block(torch.tensor([[low], [0.5]], dtype=torch.float64), batch_of(2))
    assert_close(output, [[0.2], [0.319636]], 1e-6)
    gate = sigmoid(0.5 + 0.2)
    theirs = (1 - gate) * 0.2 + gate * math.tanh(gate * 0.2 + 0.5)
    assert theirs == pytest.approx(0.440916, abs=1e-6) and abs(output[1].item() - theirs) > 0.1


def test_a_users_first_state_does_not_depend_on_the_user_before() -> None:
    block, x = block_of(4), normal(6, 4)

    def states(first_user: Tensor) -> Tensor:
        result: Tensor = block(torch.cat((first_user, x[3:])), batch_of(3, 3))
        return result[3:]

    assert torch.equal(states(x[:3]), states(x[:3] * 100))


def test_gradients_reach_back_through_the_whole_history() -> None:
    x = normal(40, 4).requires_grad_()
    block_of(4)(x, batch_of(40))[-1].sum().backward()
    assert x.grad is not None and (x.grad.abs().sum(1) > 0).all()
