"""Continue by attention alone: the decoder of Vaswani et al., "Attention Is All You Need", NeurIPS 2017."""

from __future__ import annotations

from torch import Tensor, nn

from segue.layers.blocks.transformer import DecoderBlock, Decoding
from segue.layers.decoders.decoder import EncodedHistories
from segue.layers.dropout import Dropout
from segue.layers.positions.embeddings import sinusoids

Steps = tuple[int, list[Decoding]]
"""Steps taken, and what each block keeps of them."""


class TransformerDecoder(nn.Module):
    """Steps look back at each other and across at what was read; their places are waves, so that a plan may be longer
    than any that was trained on."""

    def __init__(self, width: int, depth: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, hidden, dropout, norm="post") for _ in range(depth))
        self.drop = Dropout(dropout)

    def forward(self, inputs: Tensor, read: EncodedHistories) -> Tensor:
        """The states after each of the inputs [B, M, D], the first of which begins the plan → [B, M, D]."""
        x = self._placed(inputs, 0)
        for block in self.blocks:
            x = block(x, read.states, read.may_attend)
        return x

    def begin(self, read: EncodedHistories) -> Steps:
        """What is kept before the first step."""
        return 0, [self._block(place).start(read.states, read.may_attend) for place in range(len(self.blocks))]

    def step(self, newest: Tensor, read: EncodedHistories, kept: Steps) -> tuple[Tensor, Steps]:  # noqa: ARG002  # it is in `kept`
        """One input more [B, D] → its state [B, D], and what is kept now."""
        taken, before = kept
        x, after = self._placed(newest[:, None], taken)[:, 0], []
        for place, so_far in enumerate(before):
            x, so_far = self._block(place).step(x, so_far)
            after.append(so_far)
        return x, (taken + 1, after)

    def rows(self, kept: Steps, chosen: Tensor) -> Steps:
        """What is kept of some of the plans, some perhaps more than once."""
        taken, before = kept
        return taken, [so_far.rows(chosen) for so_far in before]

    def attention_weights(self, inputs: Tensor, read: EncodedHistories) -> list[tuple[Tensor | None, Tensor]]:
        """Where each of the steps that `forward` takes looks in each layer: back [B, heads, M, M], and across
        [B, heads, M, N]."""
        x, looks = self._placed(inputs, 0), list[tuple[Tensor | None, Tensor]]()
        for place in range(len(self.blocks)):
            block = self._block(place)
            looks.append(block.attention_weights(x, read.states, read.may_attend))
            x = block(x, read.states, read.may_attend)
        return looks

    def _placed(self, inputs: Tensor, taken: int) -> Tensor:
        """Inputs [B, M, D] that come after so many."""
        places = sinusoids(taken + inputs.shape[1], inputs.shape[2])[taken:].to(inputs)
        placed: Tensor = self.drop(inputs + places)
        return placed

    def _block(self, place: int) -> DecoderBlock:
        block = self.blocks[place]
        assert isinstance(block, DecoderBlock)
        return block
