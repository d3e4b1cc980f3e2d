"""The Transformer decoder: Vaswani et al., "Attention Is All You Need", NeurIPS 2017."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from segue.layers.attention.multi_head import Attention
from segue.layers.blocks.feed_forward import FeedForward
from segue.layers.decoders.decoder import EncodedHistories
from segue.layers.dropout import Dropout
from segue.layers.positions.embeddings import sinusoids


@dataclass(frozen=True, eq=False)
class DecoderKV:
    """Keys and values that a decoder block caches between steps."""

    across: Tensor  # [B, N, 2, H, d]: of the encoded tokens
    may_attend: Tensor | None  # [B, 1, 1, N]: True at encoded tokens, False at padding
    own: Tensor | None = None  # [B, m, 2, H, d]: of the decoder's tokens up to now; None before the first

    def rows(self, index: Tensor) -> DecoderKV:
        """The rows at these indices, which may repeat, as in beam search."""
        return DecoderKV(
            across=self.across[index],
            may_attend=None if self.may_attend is None else self.may_attend[index],
            own=None if self.own is None else self.own[index],
        )


class DecoderBlock(nn.Module):
    """A Transformer decoder block over padded tokens: causal self-attention, cross-attention to encoded tokens, and a
    feed-forward network, each followed by the norm of its residual sum."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm_own, self.norm_across, self.norm_forward = (nn.LayerNorm(width, eps=1e-5) for _ in range(3))
        self.own = Attention(width, heads, output=True, causal=True)
        self.across = Attention(width, heads, output=True, causal=False)
        self.feed_forward = FeedForward(width, hidden, dropout=0.0)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, encoded: Tensor, may_attend: Tensor | None = None) -> Tensor:
        """Tokens [B, M, D] and encoded tokens [B, N, D] → [B, M, D]; `may_attend` [B, 1, 1, N] is False at padding."""
        return self._extend(x, self.begin(encoded, may_attend))[0]

    def begin(self, encoded: Tensor, may_attend: Tensor | None = None) -> DecoderKV:
        """The cache before the first step: keys and values of the encoded tokens."""
        return DecoderKV(self.across.keys_values(encoded), may_attend)

    def step(self, x: Tensor, kv: DecoderKV) -> tuple[Tensor, DecoderKV]:
        """One more token for each row [B, D] → its output [B, D], equal to that of `forward`, and the next cache."""
        x, kv = self._extend(x[:, None], kv)
        return x[:, 0], kv

    def attention_weights(self, x: Tensor, encoded: Tensor, may_attend: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights of self-attention [B, H, M, M] and of cross-attention [B, H, M, N]; rows of padding are
        meaningless."""
        update, own = self.own.attend_with_weights(x, self.own.keys_values(x))
        x = self.norm_own(x + self.drop(update))
        _, across = self.across.attend_with_weights(x, self.across.keys_values(encoded), may_attend)
        return own, across

    def _extend(self, x: Tensor, kv: DecoderKV) -> tuple[Tensor, DecoderKV]:
        """Outputs of tokens [B, M, D] appended to those of the cache, and the next cache."""
        own = self.own.keys_values(x)
        own = own if kv.own is None else torch.cat((kv.own, own), dim=1)
        x = self.norm_own(x + self.drop(self.own.attend(x, own)))
        x = self.norm_across(x + self.drop(self.across.attend(x, kv.across, kv.may_attend)))
        return self.norm_forward(x + self.drop(self.feed_forward(x))), replace(kv, own=own)


Steps = tuple[int, list[DecoderKV]]
"""Number of steps up to now, and the cache of each block."""


class TransformerDecoder(nn.Module):
    """A stack of decoder blocks. Positions are sinusoids, so a plan may be longer than any in training."""

    def __init__(self, width: int, depth: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, hidden, dropout) for _ in range(depth))
        self.drop = Dropout(dropout)

    def forward(self, inputs: Tensor, encoded: EncodedHistories) -> Tensor:
        x = self._with_positions(inputs, 0)
        for block in self.blocks:
            x = block(x, encoded.states, encoded.may_attend)
        return x

    def begin(self, encoded: EncodedHistories) -> Steps:
        return 0, [block.begin(encoded.states, encoded.may_attend) for block in self._blocks]

    def step(self, newest: Tensor, encoded: EncodedHistories, state: Steps) -> tuple[Tensor, Steps]:  # noqa: ARG002
        # The state holds all that is needed of `encoded`.
        steps, caches = state
        x, extended = self._with_positions(newest[:, None], steps)[:, 0], []
        for block, kv in zip(self._blocks, caches, strict=True):
            x, kv = block.step(x, kv)
            extended.append(kv)
        return x, (steps + 1, extended)

    def rows(self, state: Steps, index: Tensor) -> Steps:
        steps, caches = state
        return steps, [kv.rows(index) for kv in caches]

    def attention_weights(self, inputs: Tensor, encoded: EncodedHistories) -> list[tuple[Tensor | None, Tensor]]:
        x, weights = self._with_positions(inputs, 0), list[tuple[Tensor | None, Tensor]]()
        for block in self._blocks:
            weights.append(block.attention_weights(x, encoded.states, encoded.may_attend))
            x = block(x, encoded.states, encoded.may_attend)
        return weights

    def _with_positions(self, inputs: Tensor, steps: int) -> Tensor:
        """Add positions to inputs [B, M, D] that come after this many steps."""
        positions = sinusoids(steps + inputs.shape[1], inputs.shape[2])[steps:].to(inputs)
        tokens: Tensor = self.drop(inputs + positions)
        return tokens

    @property
    def _blocks(self) -> list[DecoderBlock]:
        return cast(list[DecoderBlock], list(self.blocks))
