"""The encoder-decoder: both bodies by their formulas, and plans decoded step by step as all at once."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from settings_tables import model_settings
from torch import Tensor, nn

from segue.data.batch import Batch
from segue.layers.attention.multi_head import Attention
from segue.layers.attention.scores import Additive
from segue.layers.blocks.transformer import PostNormBlock
from segue.layers.decoders.recurrent import BidirectionalGRU, RecurrentDecoder
from segue.layers.decoders.transformer import DecoderBlock
from segue.layers.dropout import set_generator
from segue.layers.packed import PackedBatch, tensors
from segue.models.attention import HasAttentionMaps
from segue.models.build import build_model
from segue.models.encoders.seq2seq import EncoderDecoder
from segue.recommend.plan import Planner

WIDTH, N_ITEMS = 6, 9
BODIES: dict[str, dict[str, Any]] = {
    "transformer": {"body__heads": 2, "body__feed_forward": 2},
    "gru": {"body": "gru"},
}
both_bodies = pytest.mark.parametrize("body", BODIES)


def model_of(body: str, *, depth: int = 2, **changed: Any) -> EncoderDecoder:
    """In float64, with weights that are nowhere zero but in the padding row."""
    shape: dict[str, Any] = {"width": WIDTH, "depth": depth, "length": 8, "dropout": 0.0, **BODIES[body], **changed}
    model = build_model(model_settings(kind="seq2seq", **shape), N_ITEMS, generator=torch.Generator()).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    model.items.clear_padding()
    return cast(EncoderDecoder, model.eval())


def packed(users: list[list[int]], histories: list[int] | None = None) -> PackedBatch:
    lengths = np.array([len(user) for user in users])
    items = np.array([item for user in users for item in user])
    cuts = None if histories is None else np.array(histories)
    return tensors(Batch(items=items, times=np.arange(len(items)), lengths=lengths, histories=cuts))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


# --- steps --------------------------------------------------------------------------------------------------------

USERS = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2], [3, 9, 4, 8]]
CUTS = [3, 2, 1]
PLANS = torch.tensor([[4, 5, 6], [9, 1, 2], [9, 4, 8]])


@both_bodies
@pytest.mark.parametrize("depth", [1, 3])
def test_queries_step_by_step_are_those_of_all_steps_at_once(body: str, depth: int) -> None:
    model = model_of(body, depth=depth)
    states = torch.split(model.encode(packed(USERS, CUTS)), [len(user) for user in USERS])
    expected = [model.head(state[cut - 1 :]) for state, cut in zip(states, CUTS, strict=True)]
    queries, decoding = model.begin_plan(packed([user[:cut] for user, cut in zip(USERS, CUTS, strict=True)]))
    for step in range(4):
        assert_close(queries, torch.stack([own[step] for own in expected]))
        if step < 3:
            queries, decoding = model.extend_plan(decoding, torch.arange(3), PLANS[:, step])


@both_bodies
def test_plans_extend_any_earlier_plan_and_some_twice(body: str) -> None:
    model = model_of(body)
    histories = [user[:cut] for user, cut in zip(USERS, CUTS, strict=True)]
    _, beginning = model.begin_plan(packed(histories))
    _, continuation = model.extend_plan(beginning, torch.tensor([2, 0, 0]), torch.tensor([5, 6, 7]))
    queries, _ = model.extend_plan(continuation, torch.tensor([1, 0, 2, 1]), torch.tensor([1, 2, 3, 4]))
    plans = [(0, [6, 1]), (2, [5, 2]), (0, [7, 3]), (0, [6, 4])]
    for query, (owner, items) in zip(queries, plans, strict=True):
        whole = packed([[*histories[owner], *items]], [len(histories[owner])])
        assert_close(query, model.head(model.encode(whole))[-1])


@both_bodies
def test_a_plan_may_be_longer_than_any_history(body: str) -> None:
    model = model_of(body, length=3)
    queries, decoding = model.begin_plan(packed([[1, 2, 3]]))
    for item in range(40):
        queries, decoding = model.extend_plan(decoding, torch.tensor([0]), torch.tensor([item % N_ITEMS + 1]))
    assert torch.isfinite(queries).all()


@both_bodies
def test_it_plans_shows_its_attention_and_is_not_incremental(body: str) -> None:
    model = model_of(body)
    assert isinstance(model, Planner) and isinstance(model, HasAttentionMaps)
    assert not model.incremental and model.window_step == 1 and not model.target_time


@both_bodies
def test_attention_has_a_row_for_each_step_of_a_plan(body: str) -> None:
    """Weights of a row add up to one, no step attends to a later one, and later steps change no row; the first row is
    that of a history without a plan."""
    model = model_of(body)
    histories = [user[:cut] for user, cut in zip(USERS, CUTS, strict=True)]
    whole, beginning = model.attention_maps(packed(USERS, CUTS)), model.attention_maps(packed(histories))
    shorter = model.attention_maps(packed([user[:-1] for user in USERS], CUTS))
    assert [each.name for each in whole] == [each.name for each in beginning]
    assert [each.rows for each in whole].count("steps") == (1 if body == "gru" else 4)
    for each, first, without in zip(whole, beginning, shorter, strict=True):
        assert_close(each.weights.sum(-1), torch.ones_like(each.weights[..., 0]))
        if each.rows == "tokens":
            assert_close(each.weights, first.weights)
            continue
        assert each.weights.shape[2] == 4 and first.weights.shape[2] == 1
        columns = [slice(None, size) if each.columns == "steps" else slice(None) for size in (1, 3)]
        assert_close(each.weights[:, :, :1, columns[0]], first.weights)
        assert_close(each.weights[:, :, :3, columns[1]], without.weights)
        if each.columns == "steps":
            assert ((each.weights > 0) == torch.ones(4, 4, dtype=torch.bool).tril()).all()
        else:
            assert not torch.allclose(each.weights[:, :, 0], each.weights[:, :, 1]), "steps attend to different events"


# --- the bodies ---------------------------------------------------------------------------------------------------


def by_hand(model: EncoderDecoder, history: list[int], plan: list[int]) -> tuple[Tensor, Tensor]:
    """The recurrent states of one user, written out with torch's cells and the formulas of additive attention, and
    the attention weights of each step."""
    decoder, (reader,) = cast(RecurrentDecoder, model.decoder), cast(list[BidirectionalGRU], list(model.blocks))
    vectors = model.items.into * math.sqrt(WIDTH)
    outputs, _ = reader.gru(vectors[history][None])
    ends = torch.cat((outputs[0, -1, :WIDTH], outputs[0, 0, WIDTH:]))
    hidden = torch.tanh(decoder.first.weight @ ends + decoder.first.bias)
    cell, score = nn.GRUCell(3 * WIDTH, WIDTH, dtype=torch.float64), cast(Additive, decoder.score)
    with torch.no_grad():
        for name, weight in cell.named_parameters():
            weight.copy_(getattr(decoder.gru, f"{name}_l0"))
    states, weights = [], []
    for newest in (model.start, *vectors[plan]):
        features = torch.tanh(outputs[0] @ score.key.weight.T + score.query.weight @ hidden)
        weights.append(torch.softmax(features @ score.vector.weight[0], 0))
        context = weights[-1] @ outputs[0]
        hidden = cell(torch.cat((newest, context))[None], hidden[None])[0]
        states.append(decoder.output.weight @ torch.cat((hidden, context)) + decoder.output.bias)
    return cast(Tensor, model.norm(torch.stack(states))), torch.stack(weights)


def test_the_recurrent_body_by_its_formulas() -> None:
    """With a longer user in the batch, so that there is padding to ignore."""
    model, batch = model_of("gru", depth=1), packed([[3, 1, 4, 5, 9], [1, 2, 3, 4, 5, 6, 7]], [3, 7])
    expected, weights = by_hand(model, [3, 1, 4], [5, 9])
    assert_close(model.encode(batch)[2:5], expected)
    (attention,) = model.attention_maps(batch)
    assert_close(attention.weights[0, 0, :, :3], weights)
    assert attention.weights.shape == (2, 1, 3, 7) and (attention.weights[0, 0, :, 3:] == 0).all()


def copy_attention(theirs: nn.MultiheadAttention, ours: Attention) -> None:
    assert isinstance(ours.output, nn.Linear)
    theirs.in_proj_weight.copy_(torch.cat((ours.query.weight, ours.key_value.weight)))
    theirs.in_proj_bias.copy_(torch.cat((ours.query.bias, ours.key_value.bias)))
    theirs.out_proj.load_state_dict(ours.output.state_dict())


@torch.no_grad()
def torch_modules(model: EncoderDecoder) -> tuple[nn.TransformerEncoder, nn.TransformerDecoder]:
    """The same weights in torch's modules, in training mode: evaluation mode has other numerics."""
    shape: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, **shape), 2, enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, **shape), 2)
    for encoder_layer, block in zip(encoder.layers, cast(list[PostNormBlock], list(model.blocks)), strict=True):
        theirs = cast(nn.TransformerEncoderLayer, encoder_layer)
        copy_attention(theirs.self_attn, block.attention)
        for part, own in (
            (theirs.norm1, block.norm_attention),
            (theirs.norm2, block.norm_forward),
            (theirs.linear1, block.feed_forward.inner),
            (theirs.linear2, block.feed_forward.outer),
        ):
            part.load_state_dict(own.state_dict())
    blocks = cast(list[DecoderBlock], list(cast(Any, model.decoder).blocks))
    for decoder_layer, step in zip(decoder.layers, blocks, strict=True):
        layer = cast(nn.TransformerDecoderLayer, decoder_layer)
        copy_attention(layer.self_attn, step.own)
        copy_attention(layer.multihead_attn, step.across)
        for part, own in (
            (layer.norm1, step.norm_own),
            (layer.norm2, step.norm_across),
            (layer.norm3, step.norm_forward),
            (layer.linear1, step.feed_forward.inner),
            (layer.linear2, step.feed_forward.outer),
        ):
            part.load_state_dict(own.state_dict())
    return encoder, decoder


def test_the_transformer_is_that_of_torch() -> None:
    """Encoded with learned positions from the newest, decoded with sines and cosines: of position 1 at width 6, say,
    sin and cos of 1, of 10000^(-1/3) and of 10000^(-2/3)."""
    model, batch = model_of("transformer"), packed([[3, 1, 4, 5, 9], [1, 2, 3, 4, 5, 6, 7]], [3, 7])
    actual = model.encode(batch)[2:5]
    encoder, decoder = torch_modules(model)
    vectors = model.items.into * math.sqrt(WIDTH)
    assert model.positions.table is not None
    outputs = encoder((vectors[[3, 1, 4]] + model.positions.table[[2, 1, 0]])[None])
    angles = [[position / 10000 ** (pair / 3) for pair in range(3)] for position in range(3)]
    positions = torch.tensor([[wave(angle) for angle in row for wave in (math.sin, math.cos)] for row in angles])
    inputs = torch.stack((model.start, *vectors[[5, 9]])) + positions.double()
    mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
    expected = decoder(inputs[None], outputs, tgt_mask=mask)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    maps = {each.name: each.weights[0] for each in model.attention_maps(batch)}
    x = inputs[None]
    for number, each in enumerate(decoder.layers, start=1):
        layer = cast(nn.TransformerDecoderLayer, each)
        update, own = layer.self_attn(x, x, x, attn_mask=mask, average_attn_weights=False)
        _, across = layer.multihead_attn(layer.norm1(x + update), outputs, outputs, average_attn_weights=False)
        torch.testing.assert_close(maps[f"decoder, layer {number}, at its steps"], own[0], rtol=0, atol=1e-6)
        weights = maps[f"decoder, layer {number}, at the history"]
        torch.testing.assert_close(weights[:, :, :3], across[0], rtol=0, atol=1e-6)
        assert (weights[:, :, 3:] == 0).all(), "no step attends to padding"
        x = layer(x, outputs, tgt_mask=mask)


@both_bodies
def test_dropout_uses_only_the_generator(body: str) -> None:
    """torch's own modules would use the global one."""
    model, before = model_of(body, dropout=0.5), torch.get_rng_state()
    set_generator(model, torch.Generator().manual_seed(1))
    batch = packed(USERS, CUTS)
    assert not torch.equal(model.train().encode(batch), model.encode(batch))
    assert torch.equal(torch.get_rng_state(), before)
