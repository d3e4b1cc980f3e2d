"""Encode with one recurrent network, continue with another that looks back at what was read: Bahdanau, Cho and Bengio,
"Neural Machine Translation by Jointly Learning to Align and Translate", ICLR 2015."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from segue.layers.attention.scores import make_score
from segue.layers.attention.weights import select_weights
from segue.layers.blocks.transformer import WithoutAttention
from segue.layers.decoders.decoder import EncodedHistories
from segue.layers.dropout import Dropout
from segue.layers.packed import PackedBatch, pack, pad


class BidirectionalGRU(WithoutAttention):
    """Two networks read each history, one from either end; a token's state is what both know there [T, 2D]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, depth, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        # Each history ends where it ends: from padding the network that reads backwards would learn how much there is.
        inside = pack_padded_sequence(pad(x, batch), batch.lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.gru(inside)[0], batch_first=True)  # [B, N, 2D]
        return pack(states, batch)


class RecurrentDecoder(nn.Module):
    """Before each step the state asks, and what was read answers by additive attention; the answer and the item before
    make the next state."""

    def __init__(self, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.depth = depth
        self.first = nn.Linear(2 * width, depth * width)
        self.score = make_score("additive", width, 2 * width, width)
        self.gru = nn.GRU(3 * width, width, depth, batch_first=True)
        self.output = nn.Linear(3 * width, width)
        self.drop = Dropout(dropout)

    def extra_repr(self) -> str:
        """So that a model that is printed says which kernel it uses: additive scores are no products."""
        return "fused=never"

    def forward(self, inputs: Tensor, read: EncodedHistories) -> Tensor:
        """The states after each of the inputs [B, M, D], the first of which begins the plan → [B, M, D]."""
        kept, states = self.begin(read), []
        for step in range(inputs.shape[1]):  # a state is asked for before the next: there is no other order
            state, kept = self.step(inputs[:, step], read, kept)
            states.append(state)
        return torch.stack(states, dim=1)

    def begin(self, read: EncodedHistories) -> Tensor:
        """What is kept before the first step [B, depth, D]: both readers, each where it has read everything."""
        width = read.states.shape[2] // 2
        ends = torch.cat((read.newest[:, :width], read.states[:, 0, width:]), dim=1)
        return torch.tanh(self.first(ends)).view(ends.shape[0], self.depth, width)

    def step(self, newest: Tensor, read: EncodedHistories, kept: Tensor) -> tuple[Tensor, Tensor]:
        """One input more [B, D] → its state [B, D], and what is kept now."""
        context = (self.weights(read, kept) @ read.states)[:, 0]  # [B, 2D]
        _, hidden = self.gru(torch.cat((self.drop(newest), context), dim=1)[:, None], kept.transpose(0, 1).contiguous())
        state = self.output(self.drop(torch.cat((hidden[-1], context), dim=1)))
        return state, hidden.transpose(0, 1)

    def rows(self, kept: Tensor, chosen: Tensor) -> Tensor:
        return kept[chosen]

    def weights(self, read: EncodedHistories, kept: Tensor) -> Tensor:
        """Where the state looks before the next step [B, 1, N]."""
        scores: Tensor = self.score(kept[:, -1:], read.states)
        looks = None if read.may_attend is None else read.may_attend[:, 0]
        return select_weights(scores, looks, "soft", temperature=1.0, training=self.training, generator=None).weights

    def attention_weights(self, inputs: Tensor, read: EncodedHistories) -> list[tuple[Tensor | None, Tensor]]:
        """Where each of the steps that `forward` takes looks across [B, 1, M, N]; there is one layer, of one head, and
        what a step knows of those before it is in its state."""
        kept, weights = self.begin(read), []
        for step in range(inputs.shape[1]):
            weights.append(self.weights(read, kept))
            _, kept = self.step(inputs[:, step], read, kept)
        return [(None, torch.stack(weights, dim=2))]
