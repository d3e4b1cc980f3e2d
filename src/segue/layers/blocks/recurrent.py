"""Recurrent blocks over packed tokens [T, D], and NARM's attention over their states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from segue.layers.attention.multi_head import fused_attention
from segue.layers.attention.scores import Product, ScoreKind, make_score
from segue.layers.attention.weights import AttentionWeights, Choice, select_weights
from segue.layers.blocks.block import WithoutAttention
from segue.layers.dropout import Dropout
from segue.layers.packed import PackedBatch, pack, pad


class GRUBlock(WithoutAttention):
    """A layer of gated recurrent units, from each user's oldest token to its newest: [T, D] → [T, S].

    The units are torch's: gate z keeps the old state, and gate r is applied after the old state's linear map. The layer
    runs on the right-padded view, two to four times as fast on a CPU as torch's packed sequences.
    """

    def __init__(self, width: int, state_width: int, dropout: float) -> None:
        super().__init__()
        self.cell = nn.GRU(width, state_width, batch_first=True)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        states, _ = self.cell(pad(x, batch))  # [B, N, S]
        result: Tensor = self.drop(pack(states, batch))
        return result


def gru_blocks(width: int, state_width: int, depth: int, dropout: float) -> list[GRUBlock]:
    """`depth` layers: the first reads tokens [T, width], the others states."""
    return [GRUBlock(state_width if layer else width, state_width, dropout) for layer in range(depth)]


class NarmBlock(nn.Module):
    """Each state and an attention-weighted sum of its user's states up to it, mapped to one vector: [T, S] → [T, D].

    The original computes this after a session's last event; here it is computed at every event. With sampled attention
    ("reinforce"), training needs the samples' probabilities: two features are appended, the log-probability and the
    entropy, so nothing but the query may follow this block.
    """

    def __init__(
        self, state_width: int, width: int, dropout: float, *, scores: ScoreKind, choice: Choice, temperature: float
    ) -> None:
        super().__init__()
        self.score = make_score(scores, state_width, state_width, state_width, activation="hard-sigmoid")
        self.joined = nn.Linear(2 * state_width, width, bias=False)
        self.drop = Dropout(dropout)
        self.choice: Choice = choice
        self.temperature = temperature
        self.generator: torch.Generator | None = None
        self._scale: float | None = None  # of the fused kernel; None: it cannot be used
        if isinstance(self.score, Product) and choice == "soft":
            self._scale = self.score.scale / temperature

    def extra_repr(self) -> str:
        """Show in a printed model which kernel it uses."""
        return f"choice={self.choice}, fused={'never' if self._scale is None else 'always'}"

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        states = pad(x, batch)
        if self._scale is not None:
            return self._with_local(x, pack(self._fused(states, states, causal=True), batch))
        selected = self._causal_weights(states)
        result = self._with_local(x, pack(selected.weights @ states, batch))
        if selected.log_probability is None or selected.entropy is None:
            return result
        terms = torch.stack((selected.log_probability, selected.entropy), dim=-1)
        return torch.cat((result, pack(terms, batch)), dim=1)

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        queries, states = x[batch.last], pad(x, batch)
        if self._scale is not None:
            return self._with_local(queries, self._fused(queries[:, None], states, batch.may_attend)[:, 0])
        mask = None if batch.may_attend is None else batch.may_attend[:, 0]
        selected = self._select(self.score(queries[:, None], states), mask)
        return self._with_local(queries, (selected.weights @ states)[:, 0])

    def attention_weights(self, x: Tensor, batch: PackedBatch) -> Tensor:
        return self._causal_weights(pad(x, batch)).weights[:, None]

    def _with_local(self, states: Tensor, local: Tensor) -> Tensor:
        result: Tensor = self.joined(self.drop(torch.cat((local, states), dim=1)))
        return result

    def _fused(
        self, queries: Tensor, states: Tensor, may_attend: Tensor | None = None, *, causal: bool = False
    ) -> Tensor:
        """Weighted sums [B, M, D] of padded states [B, N, D], by the fused kernel."""
        assert isinstance(self.score, Product)
        q, kv = self.score.project(queries)[:, None], states[:, None]  # one head
        return fused_attention(q, kv, kv, attn_mask=may_attend, is_causal=causal, scale=self._scale)[:, 0]

    def _causal_weights(self, states: Tensor) -> AttentionWeights:
        """Weights of padded states [B, N, D] over themselves and those before them [B, N, N]."""
        causal = torch.ones(states.shape[1], states.shape[1], dtype=torch.bool, device=states.device).tril()
        return self._select(self.score(states, states, causal=True), causal)

    def _select(self, logits: Tensor, mask: Tensor | None) -> AttentionWeights:
        return select_weights(
            logits, mask, self.choice, temperature=self.temperature, training=self.training, generator=self.generator
        )
