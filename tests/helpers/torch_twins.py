"""torch's own modules with the weights of ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from segue.layers.attention.multi_head import Attention
from segue.layers.blocks.feed_forward import FeedForward
from segue.layers.blocks.transformer import PostNormBlock, PreNormBlock
from segue.layers.decoders.transformer import DecoderBlock


def torch_attention(ours: Attention) -> nn.MultiheadAttention:
    width = ours.query.in_features
    theirs = nn.MultiheadAttention(width, ours.heads, batch_first=True, dtype=torch.float64)
    _copy(theirs, _attention(theirs, ours))
    return theirs


def torch_encoder(ours: PreNormBlock | PostNormBlock) -> nn.TransformerEncoderLayer:
    """In training mode: torch's inference path has other numerics."""
    theirs = nn.TransformerEncoderLayer(
        ours.attention.query.in_features,
        ours.attention.heads,
        ours.feed_forward.inner.out_features,
        dropout=0.0,
        activation=ours.feed_forward.activation,
        layer_norm_eps=ours.norm_attention.eps,
        batch_first=True,
        norm_first=isinstance(ours, PreNormBlock),
        dtype=torch.float64,
    )
    pairs = [
        *_attention(theirs.self_attn, ours.attention),
        *_feed_forward(theirs, ours.feed_forward),
        *_norm(theirs.norm1, ours.norm_attention),
        *_norm(theirs.norm2, ours.norm_forward),
    ]
    _copy(theirs, pairs)
    return theirs


def torch_decoder(ours: DecoderBlock) -> nn.TransformerDecoderLayer:
    theirs = nn.TransformerDecoderLayer(
        ours.own.query.in_features,
        ours.own.heads,
        ours.feed_forward.inner.out_features,
        dropout=0.0,
        layer_norm_eps=ours.norm_own.eps,
        batch_first=True,
        dtype=torch.float64,
    )
    pairs = [
        *_attention(theirs.self_attn, ours.own),
        *_attention(theirs.multihead_attn, ours.across),
        *_feed_forward(theirs, ours.feed_forward),
        *_norm(theirs.norm1, ours.norm_own),
        *_norm(theirs.norm2, ours.norm_across),
        *_norm(theirs.norm3, ours.norm_forward),
    ]
    _copy(theirs, pairs)
    return theirs


def _attention(theirs: nn.MultiheadAttention, ours: Attention) -> list[tuple[Tensor, Tensor]]:
    assert isinstance(ours.output, nn.Linear)
    return [
        (theirs.in_proj_weight, torch.cat((ours.query.weight, ours.key_value.weight))),
        (theirs.in_proj_bias, torch.cat((ours.query.bias, ours.key_value.bias))),
        (theirs.out_proj.weight, ours.output.weight),
        (theirs.out_proj.bias, ours.output.bias),
    ]


def _feed_forward(
    theirs: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, ours: FeedForward
) -> list[tuple[Tensor, Tensor]]:
    return [
        (theirs.linear1.weight, ours.inner.weight),
        (theirs.linear1.bias, ours.inner.bias),
        (theirs.linear2.weight, ours.outer.weight),
        (theirs.linear2.bias, ours.outer.bias),
    ]


def _norm(theirs: nn.LayerNorm, ours: nn.LayerNorm) -> list[tuple[Tensor, Tensor]]:
    return [(theirs.weight, ours.weight), (theirs.bias, ours.bias)]


def _copy(theirs: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    assert len(pairs) == len(list(theirs.parameters())), "a parameter of torch's module has no counterpart"
    with torch.no_grad():
        for their, our in pairs:
            their.copy_(our)
