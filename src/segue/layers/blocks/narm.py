"""NARM's attention over recurrent states [T, D]."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from segue.layers.attention.multi_head import fused_attention, fused_scale
from segue.layers.attention.scores import Product, ScoreKind, make_score
from segue.layers.attention.weights import AttentionWeights, Choice, select_weights
from segue.layers.dropout import Dropout
from segue.layers.packed import PackedBatch, pack, pad


class NarmBlock(nn.Module):
    """Each state and a mixture of its user's states up to it, joined and mapped to one vector: [T, S] → [T, D]. It
    is at every event what the original has after a session's last.

    Where what is looked at is drawn, training has to know how likely it was: then two features come after the others,
    the logarithm of that chance and the entropy of what was drawn from, and nothing may follow but the question.
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
        self._scale = fused_scale(self.score, choice, temperature)

    def extra_repr(self) -> str:
        """So that a model that is printed says which kernel it uses."""
        return f"choice={self.choice}, fused={'never' if self._scale is None else 'always'}"

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        states = pad(x, batch)
        if self._scale is not None:
            return self._with_local(x, pack(self._fused(states, states, causal=True), batch))
        how = self._looked(states)
        result = self._with_local(x, pack(how.weights @ states, batch))
        if how.log_probability is None or how.entropy is None:
            return result
        return torch.cat((result, pack(torch.stack((how.log_probability, how.entropy), dim=-1), batch)), dim=1)

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        asking, states = x[batch.last], pad(x, batch)
        if self._scale is not None:
            return self._with_local(asking, self._fused(asking[:, None], states, batch.may_attend)[:, 0])
        looks = None if batch.may_attend is None else batch.may_attend[:, 0]
        how = self._chosen(self.score(asking[:, None], states), looks)
        return self._with_local(asking, (how.weights @ states)[:, 0])

    def attention_weights(self, x: Tensor, batch: PackedBatch) -> Tensor:
        return self._looked(pad(x, batch)).weights[:, None]

    def _with_local(self, states: Tensor, local: Tensor) -> Tensor:
        result: Tensor = self.joined(self.drop(torch.cat((local, states), dim=1)))
        return result

    def _fused(
        self, asking: Tensor, states: Tensor, may_attend: Tensor | None = None, *, causal: bool = False
    ) -> Tensor:
        """Mixtures [B, M, D] of padded states [B, N, D] for those that ask, without their weights."""
        assert isinstance(self.score, Product)
        q, kept = self.score.asking(asking)[:, None], states[:, None]  # one head
        return fused_attention(q, kept, kept, attn_mask=may_attend, is_causal=causal, scale=self._scale)[:, 0]

    def _looked(self, states: Tensor) -> AttentionWeights:
        """How much each of the padded states [B, N, D] takes of itself and those before it [B, N, N]."""
        back = torch.ones(states.shape[1], states.shape[1], dtype=torch.bool, device=states.device).tril()
        return self._chosen(self.score(states, states, causal=True), back)

    def _chosen(self, logits: Tensor, looks: Tensor | None) -> AttentionWeights:
        return select_weights(
            logits,
            looks,
            self.choice,
            temperature=self.temperature,
            training=self.training,
            generator=self.generator,
        )
