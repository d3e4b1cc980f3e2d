"""Caser and NextItNet: their layers and their receptive fields."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from settings_tables import model_settings
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.blocks.convolution import CaserBlock, DilatedBlock
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.sequence import SequenceModel
from segue.testing.cases import batch_of, random_users

N_ITEMS = 50


def model_of(**changed: Any) -> SequenceModel:
    settings = model_settings(**{"width": 8, "depth": 1, "dropout": 0.0, **changed})
    return build_model(settings, N_ITEMS, generator=torch.Generator().manual_seed(0)).double().eval()


def newest(model: SequenceModel, user: list[int]) -> Tensor:
    return model.encode(tensors(batch_of(user)))[-1]


def receptive_field(model: SequenceModel, length: int) -> list[int]:
    """The distances from the newest event of the events that change the newest state."""
    (user,) = random_users([length], n_items=N_ITEMS)
    before, offsets = newest(model, user), []
    for back in range(length):
        changed = [*user]
        changed[-1 - back] = changed[-1 - back] % N_ITEMS + 1
        if not torch.equal(newest(model, changed), before):
            offsets.append(back)
    return offsets


@pytest.mark.parametrize("shape", [{"dilations": [1, 2], "depth": 3}, {"dilations": [1, 2, 1, 2, 1, 2]}], ids=str)
def test_nextitnet_sees_fifty_five_events_and_not_one_more(shape: dict[str, Any]) -> None:
    """Dilations 1, 2, 1, 2, 1, 2, in a block's second convolution twice as much: 1 + Σ 2 (d + 2 d) = 55."""
    model = model_of(kind="nextitnet", kernel=3, **shape)
    assert [block.near.dilation for block in model.blocks if isinstance(block, DilatedBlock)] == [1, 2, 1, 2, 1, 2]
    assert receptive_field(model, 70) == list(range(55))


@pytest.mark.parametrize(
    ("kernel", "dilations", "sees"), [(1, [1], 1), (2, [1], 1 + 3), (3, [4], 1 + 24), (2, [1, 3], 13)]
)
def test_nextitnet_sees_as_far_as_kernel_and_dilations_say(kernel: int, dilations: list[int], sees: int) -> None:
    """From the newest event to the end of the receptive field."""
    offsets = receptive_field(model_of(kind="nextitnet", kernel=kernel, dilations=dilations), 40)
    assert offsets[0] == 0 and offsets[-1] == sees - 1


def test_nextitnet_takes_items_as_they_are_and_ends_with_a_linear_map() -> None:
    model, batch = model_of(kind="nextitnet", depth=2), tensors(batch_of([3, 1, 2], [5]))
    x = model.items.into[[3, 1, 2, 5]]
    for block in model.blocks:
        x = block(x, batch)
    torch.testing.assert_close(model.encode(batch), x, rtol=0, atol=1e-12)
    linear = model.query_transform
    assert isinstance(linear, nn.Linear)
    torch.testing.assert_close(model.head(x), functional.linear(x, linear.weight, linear.bias), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("events", "depth", "sees"), [(5, 1, 5), (1, 1, 1), (3, 2, 5)])
def test_caser_sees_its_last_events_and_not_one_more(events: int, depth: int, sees: int) -> None:
    assert receptive_field(model_of(kind="caser", image_events=events, depth=depth), 12) == list(range(sees))


def test_caser_has_as_many_filters_as_set_and_no_user_vectors() -> None:
    model = model_of(kind="caser", image_events=4, horizontal=3, vertical=2)
    (block,) = model.blocks
    assert isinstance(block, CaserBlock)
    shapes = [tuple(filters.weight.shape) for filters in block.horizontal]  # type: ignore[arg-type]
    assert shapes == [(3, 8), (3, 16), (3, 24), (3, 32)]
    assert block.vertical.weight.shape == (2, 4) and block.joined.weight.shape == (8, 3 * 4 + 2 * 8)
    names = {name for name, _ in model.named_parameters() if not name.startswith("blocks.")}
    assert names == {"items.into"}


def test_casers_dropout_is_on_the_outputs_of_its_filters() -> None:
    model, activations = model_of(kind="caser", dropout=0.5), []
    (block,) = model.blocks
    assert isinstance(block, CaserBlock)
    block.register_forward_pre_hook(lambda _, inputs: activations.append(inputs[0]))
    block.joined.register_forward_pre_hook(lambda _, inputs: activations.append(inputs[0]))
    batch = tensors(batch_of(*random_users([20] * 4, n_items=N_ITEMS)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.train().encode(batch)
        tokens, features = activations
        model.eval().encode(batch)
    whole = activations[3]
    assert torch.equal(tokens, activations[2])
    nonzero = features != 0
    assert 0.4 < np.mean(nonzero.numpy()[whole.detach().numpy() != 0]) < 0.6
    torch.testing.assert_close(features[nonzero], 2 * whole[nonzero])
