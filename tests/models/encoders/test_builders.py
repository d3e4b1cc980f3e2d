"""Each builder: its tokens and its last layers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from settings_tables import model_settings
from torch import Tensor
from torch.nn import functional

from segue.data.batch import Batch
from segue.errors import SettingsError
from segue.kinds import kind_of
from segue.layers.blocks.transformer import GatedBlock, SASRecBlock
from segue.layers.packed import PackedBatch, tensors
from segue.models.build import build_model
from segue.models.encoders import ModelSettings
from segue.models.sequence import SequenceModel

BATCH: PackedBatch = tensors(Batch(items=np.array([3, 1, 2]), times=np.arange(3), lengths=np.array([3])))


def model_of(settings: ModelSettings) -> SequenceModel:
    return build_model(settings, 5, generator=torch.Generator().manual_seed(0)).double().eval()


def through_blocks(model: SequenceModel, tokens: Tensor) -> Tensor:
    for block in model.blocks:
        tokens = block(tokens, BATCH)
    return tokens


def test_sasrec_scales_its_items_and_ends_with_a_norm() -> None:
    """x0 = E √D + P, oldest first; after the blocks a layer norm with 1e-8."""
    model = model_of(model_settings(kind="sasrec", width=4, length=7, feed_forward=1, positions="oldest"))
    assert [type(block) for block in model.blocks] == [SASRecBlock, SASRecBlock]
    tokens = model.items.into[[3, 1, 2]] * math.sqrt(4) + model.positions.table[[0, 1, 2]]
    expected = functional.layer_norm(through_blocks(model, tokens), (4,), eps=1e-8)
    torch.testing.assert_close(model.encode(BATCH), expected, rtol=0, atol=1e-12)


def test_esasrec_takes_its_items_as_they_are_and_ends_without_a_norm() -> None:
    """Positions counted from the newest, which is 0."""
    model = model_of(model_settings(kind="esasrec", width=4, length=7, depth=3, positions="newest"))
    assert [type(block) for block in model.blocks] == [GatedBlock] * 3
    tokens = model.items.into[[3, 1, 2]] + model.positions.table[[2, 1, 0]]
    torch.testing.assert_close(model.encode(BATCH), through_blocks(model, tokens), rtol=0, atol=1e-12)


def test_the_default_is_gated_blocks_with_four_times_the_width() -> None:
    assert kind_of(model_settings()) == "esasrec" and model_settings().feed_forward == 4
    (block,) = model_of(model_settings(width=6, depth=1)).blocks
    assert isinstance(block, GatedBlock)
    assert block.feed_forward.outer.weight.shape == (6, 24) and block.feed_forward.inner.weight.shape == (48, 6)


@pytest.mark.parametrize("builder", ["sasrec", "esasrec", "bert4rec"])
def test_dropout_is_on_the_tokens_too(builder: str) -> None:
    """Half of the features of a token are zero, the rest doubled; nothing else comes before the blocks."""
    settings = model_settings(kind=builder, width=64, depth=1, dropout=0.5)
    model, tokens = model_of(settings), []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0]))
    with torch.random.fork_rng(devices=[]):
        model.encode(BATCH)
        model.train().encode(BATCH)
    whole, dropped = tokens
    zeros = dropped == 0
    assert 0.3 < zeros.double().mean() < 0.7
    torch.testing.assert_close(dropped[~zeros], 2 * whole[~zeros])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"width": 10, "heads": 4}, ["model.width", "model.heads", "10", "4"]),
        ({"width": 0}, ["model.width", "0"]),
        ({"depth": 0}, ["model.depth"]),
        ({"heads": -1}, ["model.heads"]),
        ({"length": 0}, ["model.length"]),
        ({"feed_forward": 0}, ["model.feed_forward"]),
        ({"dropout": 1.0}, ["model.dropout", "1.0"]),
        ({"dropout": -0.1}, ["model.dropout"]),
        ({"dropout": math.nan}, ["model.dropout"]),
    ],
    ids=str,
)
def test_impossible_shapes_are_refused_by_name(changed: dict[str, float], words: list[str]) -> None:
    with pytest.raises(SettingsError) as error:
        model_settings(**changed)
    assert all(word in str(error.value) for word in words)
