from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from packed_users import assert_close, batch_of, normal
from torch import Tensor, nn
from torch.nn import functional
from torch_twins import torch_encoder

from segue.layers.attention.multi_head import Attention, Relative
from segue.layers.attention.scores import ScoreKind
from segue.layers.blocks.feed_forward import FeedForward, SwiGLU
from segue.layers.blocks.transformer import GatedBlock, PostNormBlock, PreNormBlock, SASRecBlock
from segue.layers.dropout import set_generator
from segue.layers.packed import PackedBatch
from segue.layers.positions.relative import RelativeBuckets, Rotary

G_TOKENS = [[1.0, 0, -1], [0.5, 1, 0]]
Kind = type[SASRecBlock] | type[GatedBlock] | type[PreNormBlock] | type[PostNormBlock]
EYE = torch.eye(3, dtype=torch.float64)


def golden_tokens() -> Tensor:
    return torch.tensor(G_TOKENS, dtype=torch.float64)


def clear(module: nn.Module) -> None:
    """Set every linear map to zero; norms keep their initialisation."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            for parameter in part.parameters():
                nn.init.zeros_(parameter)


def identity_attention(attention: Attention) -> None:
    with torch.no_grad():
        attention.query.weight.copy_(EYE)
        attention.key_value.weight.copy_(torch.cat((EYE, EYE)))
        if isinstance(attention.output, nn.Linear):
            attention.output.weight.copy_(EYE)


def golden_sasrec() -> SASRecBlock:
    """G21: all projections I, W1 = I, W2 = I / 2."""
    block = SASRecBlock(3, 1, 3, 0.0).double()
    clear(block)
    identity_attention(block.attention)
    with torch.no_grad():
        block.feed_forward.inner.weight.copy_(EYE)
        block.feed_forward.outer.weight.copy_(EYE / 2)
    return block


def golden_gated() -> GatedBlock:
    """G22: all projections I, gates zero."""
    block = GatedBlock(3, 1, 3, 0.0).double()
    clear(block)
    identity_attention(block.attention)
    with torch.no_grad():
        block.feed_forward.inner.weight.copy_(torch.cat((EYE, EYE)))
        block.feed_forward.outer.weight.copy_(EYE)
    return block


def randomise(block: nn.Module, seed: int = 0) -> None:
    with torch.no_grad():
        for index, parameter in enumerate(block.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed + index, dtype=parameter.dtype))


def test_sasrec_block_of_g21() -> None:
    block, x, batch = golden_sasrec(), golden_tokens(), batch_of(2)
    assert_close(block.norm_query(x)[0], torch.tensor([1.224745, 0, -1.224745], dtype=torch.float64), 1e-6)
    assert_close(block.attention_weights(x, batch)[0, 0], [[1, 0], [0.5, 0.5]], 1e-6)
    output = block(x, batch)
    assert_close(output, [[1.837117, 0, -1.224745], [0.516546, 1.523548, -1.360063]], 1e-6)
    last_norm = nn.LayerNorm(3, eps=1e-8).double()
    assert_close(last_norm(output), [[1.297771, -0.162221, -1.135550], [0.242581, 1.085302, -1.327883]], 1e-6)


def test_middle_of_sasrec_block_of_g21() -> None:
    """Without the feed-forward part, the output is the second norm."""
    block = golden_sasrec()
    nn.init.zeros_(block.feed_forward.outer.weight)
    output = block(golden_tokens(), batch_of(2))
    assert_close(output, [[1.224745, 0, -1.224745], [0.344364, 1.015698, -1.360063]], 1e-6)


def test_gated_block_of_g22() -> None:
    block, x, batch = golden_gated(), golden_tokens(), batch_of(2)
    assert_close(block.attention_weights(x, batch)[0, 0], [[1, 0], [0.296097, 0.703903]], 1e-6)
    assert_close(block(x, batch), [[2.192037, 0, -1.442041], [0.694093, 1.887867, -0.428969]], 1e-6)


def test_middle_of_gated_block_of_g22() -> None:
    block = golden_gated()
    nn.init.zeros_(block.feed_forward.outer.weight)
    output = block(golden_tokens(), batch_of(2))
    assert_close(output, [[1.612368, 0, -1.612368], [0.681320, 1.431038, -0.612358]], 1e-6)


def test_goldens_do_not_depend_on_other_users() -> None:
    """The golden user between two others, in one batch."""
    others = normal(4, 3, seed=1)
    x, batch = torch.cat((others[:1], golden_tokens(), others[1:])), batch_of(1, 2, 3)
    assert_close(golden_sasrec()(x, batch)[2], torch.tensor([0.516546, 1.523548, -1.360063]).double(), 1e-6)
    assert_close(golden_gated()(x, batch)[2], torch.tensor([0.694093, 1.887867, -0.428969]).double(), 1e-6)


def test_gated_block_reads_its_gates_from_the_stream_before_the_norm() -> None:
    """x1 = x + σ(G1 x + g1) MHA(LN x); x2 = x1 + σ(G2 x1 + g2) W2 (silu(W1 LN x1) · W3 LN x1), with W1 over W3."""
    block, batch, x = GatedBlock(4, 2, 6, 0.0).double(), batch_of(3, 1), normal(4, 4, seed=50)
    randomise(block)

    def norm(layer: nn.LayerNorm, stream: Tensor) -> Tensor:
        return functional.layer_norm(stream, (4,), layer.weight, layer.bias, 1e-5)

    def gate(layer: nn.Linear, stream: Tensor) -> Tensor:
        return torch.sigmoid(stream @ layer.weight.T + layer.bias)

    normal_x = norm(block.norm_attention, x)
    middle = x + gate(block.gate_attention, x) * block.attention(normal_x, normal_x, batch)
    into = norm(block.norm_forward, middle)
    inner = block.feed_forward.inner.weight
    update = (functional.silu(into @ inner[:6].T) * (into @ inner[6:].T)) @ block.feed_forward.outer.weight.T
    assert_close(block(x, batch), middle + gate(block.gate_forward, middle) * update, 1e-12)


TRANSFORMERS: dict[str, Callable[[int], PreNormBlock | PostNormBlock]] = {
    "pre-norm, back": lambda heads: PreNormBlock(4, heads, 6, 0.0),
    "pre-norm, both ways": lambda heads: PreNormBlock(4, heads, 6, 0.0, causal=False),
    "post-norm, back": lambda heads: PostNormBlock(4, heads, 6, 0.0),
    "post-norm, both ways": lambda heads: PostNormBlock(4, heads, 6, 0.0, causal=False),
    "BERT's": lambda heads: PostNormBlock(4, heads, 6, 0.0, causal=False, activation=functional.gelu, eps=1e-12),
}


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformer_blocks_equal_torchs(name: str, heads: int) -> None:
    """torch.nn.TransformerEncoderLayer with the same weights, each user alone; its mask is True at masked keys."""
    block, batch, x = TRANSFORMERS[name](heads).double(), batch_of(3, 1, 5), normal(9, 4, seed=51)
    randomise(block)
    theirs, output, begin = torch_encoder(block), block(x, batch), 0
    for length in (3, 1, 5):
        own = slice(begin, begin + length)
        blocked = torch.ones(length, length, dtype=torch.bool).triu(1) if block.causal else None
        assert_close(output[own], theirs(x[None, own], src_mask=blocked)[0], 1e-12)
        begin += length
    assert block.causal is not (name.endswith("both ways") or name == "BERT's")


@pytest.mark.parametrize("kind", [PreNormBlock, PostNormBlock])
@pytest.mark.parametrize(
    ("scores", "positions"),
    [
        *product(("dot", "scaled-dot"), ("none", "rotary", "buckets")),
        *product(("bilinear", "additive"), ("none", "buckets")),  # rotary positions need products
    ],
)
def test_a_token_step_equals_its_row_of_the_block(
    kind: type[PreNormBlock] | type[PostNormBlock], scores: ScoreKind, positions: str
) -> None:
    relatives: dict[str, Relative] = {"rotary": Rotary(9, 2), "buckets": RelativeBuckets(2, 9, causal=True)}
    relative = relatives.get(positions)
    block, x = kind(4, 2, 6, 0.0, scores=scores, relative=relative), normal(7, 4, seed=52, dtype=torch.float32)
    randomise(block)
    expected, step = block(x, batch_of(7)).detach(), block.token_step()
    kv = np.zeros((2, 2, 7, 2), dtype=np.float32)  # keys and values, heads, tokens, features of a head
    for position in range(7):
        output = step(x[position].numpy(), kv[:, :, : position + 1], None)
        torch.testing.assert_close(torch.from_numpy(output), expected[position], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(kv), block.keys_values(x).permute(1, 2, 0, 3), rtol=1e-4, atol=1e-4)


def test_feed_forward_has_no_activation_after_its_second_map() -> None:
    part = FeedForward(2, 2, 0.0).double()
    with torch.no_grad():
        part.inner.weight.copy_(torch.eye(2))
        part.inner.bias.copy_(torch.tensor([0.0, 1.0]))
        part.outer.weight.copy_(-torch.eye(2))
        part.outer.bias.copy_(torch.tensor([0.5, 0.0]))
    output = part(torch.tensor([[2.0, 3.0], [-1.0, -4.0]], dtype=torch.float64))
    assert output.tolist() == [[-1.5, -4], [0.5, 0]]


def test_swiglu_of_known_silu_values() -> None:
    """silu(-1, 0, 1, 2) = -.268941, 0, .731059, 1.761594, here times 1, 2, 3, 4."""
    part = SwiGLU(8, 4, 0.0).double()
    with torch.no_grad():
        part.inner.weight.copy_(torch.eye(8))
        part.outer.weight.zero_()[:4].copy_(torch.eye(4))
    x = torch.tensor([[-1.0, 0, 1, 2, 1, 2, 3, 4]], dtype=torch.float64)
    assert_close(part(x)[:, :4], [[-0.268941, 0, 3 * 0.731059, 4 * 1.761594]], 5e-6)
    assert len(list(part.parameters())) == 2, "no biases"


def test_swiglu_gradients() -> None:
    part, x = SwiGLU(3, 4, 0.0).double(), normal(5, 3).requires_grad_()
    assert torch.autograd.gradcheck(part, (x,))
    assert torch.autograd.gradcheck(lambda _: part(x.detach()), (part.inner.weight,))


def test_swiglu_of_known_slopes() -> None:
    """silu'(0) = .5 and silu'(1) = .927671, here with a second half of 1."""
    part = SwiGLU(2, 1, 0.0).double()
    with torch.no_grad():
        part.inner.weight.copy_(torch.eye(2))
        part.outer.weight.copy_(torch.tensor([[1.0], [0.0]]))
    x = torch.tensor([[0.0, 1], [1, 1]], dtype=torch.float64, requires_grad=True)
    torch.autograd.backward(part(x).sum())
    assert x.grad is not None
    assert_close(x.grad, [[0.5, 0], [0.927671, 0.731059]], 1e-6)


@pytest.mark.parametrize("kind", [SASRecBlock, GatedBlock, PreNormBlock, PostNormBlock])
@pytest.mark.parametrize("batch", [batch_of(2, 1, 3), batch_of(2, 2)], ids=["ragged", "rectangular"])
def test_gradients_of_blocks(kind: Kind, batch: PackedBatch) -> None:
    block = kind(4, 2, 5, 0.0).double()
    randomise(block)
    x = normal(len(batch.items), 4, seed=30).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: block(x, batch), (x,))
    checked = 0
    for parameter in block.parameters():
        assert torch.autograd.gradcheck(lambda _: block(x.detach(), batch), (parameter,), fast_mode=True)
        checked += 1
    assert checked == {SASRecBlock: 12, GatedBlock: 16, PreNormBlock: 14, PostNormBlock: 14}[kind]


@pytest.mark.parametrize("kind", [SASRecBlock, GatedBlock, PreNormBlock, PostNormBlock])
@pytest.mark.parametrize("batch", [batch_of(2, 1, 3), batch_of(2, 2)], ids=["ragged", "rectangular"])
def test_newest_equals_the_newest_rows_of_the_block(kind: Kind, batch: PackedBatch) -> None:
    block = kind(4, 2, 5, 0.0).double()
    randomise(block)
    x = normal(len(batch.items), 4, seed=31)
    assert_close(block.newest(x, batch), block(x, batch)[batch.last], 1e-12)


def test_newest_of_g21_and_g22() -> None:
    x, batch = golden_tokens(), batch_of(2)
    assert_close(golden_sasrec().newest(x, batch), [[0.516546, 1.523548, -1.360063]], 1e-6)
    assert_close(golden_gated().newest(x, batch), [[0.694093, 1.887867, -0.428969]], 1e-6)


def test_dropout_is_on_the_updates_of_a_gated_block_and_not_on_its_stream() -> None:
    """At one half each number of an update is zero or doubled; the gates and the stream are unchanged."""
    block, x, batch = GatedBlock(8, 2, 8, 0.5).double(), normal(60, 8, seed=40), batch_of(30, 30)
    randomise(block)
    set_generator(block, torch.Generator().manual_seed(0))
    nn.init.zeros_(block.feed_forward.outer.weight)
    whole = block.eval()(x, batch) - x
    update = block.train()(x, batch) - x
    zeros = update.abs() < 1e-12
    assert 0.35 < zeros.double().mean() < 0.65
    assert_close(update[~zeros], 2 * whole[~zeros], 1e-9)


def test_dropout_is_on_the_feed_forward_part_of_a_sasrec_block() -> None:
    block, x, batch = SASRecBlock(8, 2, 8, 0.5).double(), normal(60, 8, seed=41), batch_of(30, 30)
    set_generator(block, torch.Generator().manual_seed(0))
    outer = block.feed_forward.outer
    nn.init.zeros_(outer.weight)
    nn.init.zeros_(outer.bias)
    middle = block.eval()(x, batch)
    assert torch.equal(block.train()(x, batch), middle), "no dropout on attention and residuals"
    nn.init.ones_(outer.bias)
    update = block(x, batch) - middle
    zeros = update.abs() < 1e-12
    assert 0.35 < zeros.double().mean() < 0.65
    assert_close(update[~zeros], torch.full_like(update[~zeros], 2), 1e-9)


def test_dropout_is_on_both_updates_of_a_post_norm_block_and_not_on_its_stream() -> None:
    """All updates are one: the input of a norm is the stream plus zero or two."""
    block, x, batch = PostNormBlock(8, 2, 8, 0.5).double().train(), normal(60, 8, seed=42), batch_of(30, 30)
    set_generator(block, torch.Generator().manual_seed(0))
    assert isinstance(block.attention.output, nn.Linear)
    for last in (block.attention.output, block.feed_forward.outer):
        nn.init.zeros_(last.weight)
        nn.init.ones_(last.bias)
    streams: list[Tensor] = []
    for norm in (block.norm_attention, block.norm_forward):
        norm.register_forward_hook(lambda _, inputs, output: streams.extend((inputs[0], output)))
    block(x, batch)
    for update in (streams[0] - x, streams[2] - streams[1]):
        zeros = update.abs() < 1e-12
        assert 0.35 < zeros.double().mean() < 0.65
        assert_close(update[~zeros], torch.full_like(update[~zeros], 2), 1e-9)
    assert block.feed_forward.drop.dropped == 0, "no dropout between the two maps"


def test_dropout_is_on_both_updates_of_a_pre_norm_block_and_not_on_its_stream() -> None:
    """All updates are one: the stream gets zero or two of each."""
    block, x, batch = PreNormBlock(8, 2, 8, 0.5).double().train(), normal(60, 8, seed=43), batch_of(30, 30)
    set_generator(block, torch.Generator().manual_seed(0))
    assert isinstance(block.attention.output, nn.Linear)
    for last in (block.attention.output, block.feed_forward.outer):
        nn.init.zeros_(last.weight)
        nn.init.ones_(last.bias)
    update = block(x, batch) - x
    counts = [((update - amount).abs() < 1e-9).double().mean().item() for amount in (0, 2, 4)]
    assert counts == pytest.approx([0.25, 0.5, 0.25], abs=0.12) and sum(counts) == pytest.approx(1)
    assert block.feed_forward.drop.dropped == 0, "no dropout between the two maps"
