"""Layers side by side: each reads and writes its own share of the features, as in an ensemble."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from segue.layers.blocks.block import Block
from segue.layers.packed import PackedBatch


class MemberBlocks(nn.Module):
    """Blocks with attention, which share the features evenly. Attention weights are those of all members' heads."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        return torch.cat([block(share, batch) for block, share in self._shares(x)], dim=1)

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        return torch.cat([block.newest(share, batch) for block, share in self._shares(x)], dim=1)

    def attention_weights(self, x: Tensor, batch: PackedBatch) -> Tensor | None:
        weights = [block.attention_weights(share, batch) for block, share in self._shares(x)]
        return torch.cat([each for each in weights if each is not None], dim=1)

    def _shares(self, x: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """Each block with its share of the features [T, D / members]."""
        shares = x.chunk(len(self.blocks), dim=1)
        return zip((cast(Block, block) for block in self.blocks), shares, strict=True)


class MemberNorms(nn.Module):
    """A layer norm for each member's share of the features."""

    def __init__(self, width: int, members: int, *, eps: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width // members, eps=eps) for _ in range(members))

    def forward(self, x: Tensor) -> Tensor:
        shares = x.chunk(len(self.norms), dim=1)
        return torch.cat([norm(share) for norm, share in zip(self.norms, shares, strict=True)], dim=1)
