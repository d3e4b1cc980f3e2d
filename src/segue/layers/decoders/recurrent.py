"""A bidirectional recurrent encoder and a recurrent decoder that attends to its states: Bahdanau, Cho and Bengio,
"Neural Machine Translation by Jointly Learning to Align and Translate", ICLR 2015."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from segue.layers.attention.scores import make_score
from segue.layers.attention.weights import soft_weights
from segue.layers.blocks.block import WithoutAttention
from segue.layers.decoders.decoder import EncodedHistories
from segue.layers.dropout import Dropout
from segue.layers.packed import PackedBatch, pack, pad


class BidirectionalGRU(WithoutAttention):
    """The states of a forward and a backward GRU, side by side: [T, D] → [T, 2D]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, depth, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        # Packed: with padding, the state of the backward GRU would depend on the number of padding tokens.
        inside = pack_padded_sequence(pad(x, batch), batch.lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.gru(inside)[0], batch_first=True)  # [B, N, 2D]
        return pack(states, batch)


class RecurrentDecoder(nn.Module):
    """A GRU over the items of a plan and a context: before each step, its state attends to the history, with additive
    scores."""

    def __init__(self, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.depth = depth
        self.first = nn.Linear(2 * width, depth * width)
        self.score = make_score("additive", width, 2 * width, width)
        self.gru = nn.GRU(3 * width, width, depth, batch_first=True)
        self.output = nn.Linear(3 * width, width)
        self.drop = Dropout(dropout)

    def extra_repr(self) -> str:
        """Show in a printed model which kernel it uses: additive scores are no inner products."""
        return "fused=never"

    def forward(self, inputs: Tensor, encoded: EncodedHistories) -> Tensor:
        state, outputs = self.begin(encoded), []
        for step in range(inputs.shape[1]):  # the attention of a step needs the state before it
            output, state = self.step(inputs[:, step], encoded, state)
            outputs.append(output)
        return torch.stack(outputs, dim=1)

    def begin(self, encoded: EncodedHistories) -> Tensor:
        """The first state [B, depth, D], from the final states of both encoder GRUs."""
        width = encoded.states.shape[2] // 2
        final = torch.cat((encoded.newest[:, :width], encoded.states[:, 0, width:]), dim=1)
        return torch.tanh(self.first(final)).view(final.shape[0], self.depth, width)

    def step(self, newest: Tensor, encoded: EncodedHistories, state: Tensor) -> tuple[Tensor, Tensor]:
        context = (self.weights(encoded, state) @ encoded.states)[:, 0]  # [B, 2D]
        joined = torch.cat((self.drop(newest), context), dim=1)[:, None]
        _, hidden = self.gru(joined, state.transpose(0, 1).contiguous())
        output = self.output(self.drop(torch.cat((hidden[-1], context), dim=1)))
        return output, hidden.transpose(0, 1)

    def rows(self, state: Tensor, index: Tensor) -> Tensor:
        return state[index]

    def weights(self, encoded: EncodedHistories, state: Tensor) -> Tensor:
        """Attention weights of the next step [B, 1, N]."""
        scores: Tensor = self.score(state[:, -1:], encoded.states)
        mask = None if encoded.may_attend is None else encoded.may_attend[:, 0]
        return soft_weights(scores, mask)

    def attention_weights(self, inputs: Tensor, encoded: EncodedHistories) -> list[tuple[Tensor | None, Tensor]]:
        state, weights = self.begin(encoded), []
        for step in range(inputs.shape[1]):
            weights.append(self.weights(encoded, state))
            _, state = self.step(inputs[:, step], encoded, state)
        return [(None, torch.stack(weights, dim=2))]
