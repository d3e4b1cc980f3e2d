"""Multi-head attention over packed tokens, or of padded queries over the keys and values of other tokens.

Scores are of any kind. torch's fused kernel is used for inner products (`fused`). With causal attention, `is_causal`
alone is an exact mask on the right-padded view; without, padding is masked. There is no attention dropout, which would
force the slow kernel on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.attention.scores import Product, ScoreKind, make_score
from segue.layers.attention.weights import soft_weights
from segue.layers.incremental import numpy_map
from segue.layers.packed import PackedBatch, pack, pad
from segue.layers.positions.relative import RelativeBuckets, Rotary

fused_attention = functional.scaled_dot_product_attention

Relative = Rotary | RelativeBuckets


class Attention(nn.Module):
    """Multi-head attention; queries come from one stream, keys and values from another, often the same."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        output: bool,
        causal: bool,
        scores: ScoreKind = "scaled-dot",
        relative: Relative | None = None,
    ) -> None:
        """`output`: whether a projection follows the joined heads. `causal`: no token attends to a later one. `scores`:
        heads share their parameters. `relative`: relative positions; rotary ones need inner products as scores."""
        super().__init__()
        assert width % heads == 0
        assert not isinstance(relative, Rotary) or scores in ("dot", "scaled-dot")
        self.heads = heads
        self.causal = causal
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width) if output else nn.Identity()
        self.score = make_score(scores, width // heads, width // heads, width // heads)
        self.relative = relative
        # Read in every call: plain attributes are faster than submodules.
        self._scale = self.score.scale if isinstance(self.score, Product) else None
        self._learned_bias = isinstance(relative, RelativeBuckets)
        self._plain = self._scale is not None and relative is None and type(self.score) is Product

    @property
    def fused(self) -> bool:
        """Whether torch's fused kernel is used. With a learned bias it is not while gradients are enabled."""
        return self._scale is not None and not (self._learned_bias and torch.is_grad_enabled())

    def extra_repr(self) -> str:
        """Show in a printed model which kernel it uses."""
        kernel = "never" if self._scale is None else "without gradients" if self._learned_bias else "always"
        return f"heads={self.heads}, causal={self.causal}, fused={kernel}"

    def forward(self, queries: Tensor, keys: Tensor, batch: PackedBatch) -> Tensor:
        """Packed tokens [T, D] attend to their user's tokens."""
        q, k, v = self._heads(queries, keys, batch)
        mask = None if self.causal else batch.may_attend
        if self._plain:  # the usual case: a short way to the kernel
            mixed = fused_attention(q, k, v, attn_mask=mask, is_causal=self.causal, scale=self._scale)
        else:
            mixed = self._mix_newest(q, k, v, mask)
        result: Tensor = self.output(pack(_join_heads(mixed), batch))
        return result

    def newest(self, queries: Tensor, keys: Tensor, batch: PackedBatch) -> Tensor:
        """The output of each user's newest token, whose query stream [B, D] is given."""
        if self._plain:
            mixed = self._mix_streams(queries, keys, batch)
        else:
            q = self.query(queries).view(batch.size, 1, self.heads, -1).transpose(1, 2)  # [B, H, 1, d]
            padded = pad(self.key_value(keys), batch)  # [B, N, 2D]
            k, v = padded.view(batch.size, batch.longest, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
            q, k, bias = self._apply_relative(q, k, batch.lengths[:, None] - 1)
            mixed = self._mix(q, k, v, batch.may_attend, bias).reshape(batch.size, -1)
        result: Tensor = self.output(mixed)
        return result

    def _mix_streams(self, queries: Tensor, keys: Tensor, batch: PackedBatch) -> Tensor:
        """`newest` before the output projection [B, D], without computing keys and values of all tokens: queries are
        multiplied by the key weights and attend to the streams, and the mixture is multiplied by the value weights.
        The softmax cancels the key bias. Heads share the streams and become queries."""
        width = keys.shape[-1]
        key_weights, value_weights = self.key_value.weight.view(2, self.heads, -1, width)  # [H, d, D]
        q = self.query(queries).view(batch.size, self.heads, -1).transpose(0, 1)  # [H, B, d]
        q = (q @ key_weights).transpose(0, 1)[:, None]  # [B, 1, H, D]
        streams = pad(keys, batch)[:, None]  # [B, 1, N, D]
        mixed = fused_attention(q, streams, streams, attn_mask=batch.may_attend, scale=self._scale)[:, 0]
        values = mixed.transpose(0, 1) @ value_weights.transpose(1, 2)  # [H, B, d]
        result: Tensor = values.transpose(0, 1).flatten(1) + self.key_value.bias[width:]
        return result

    def keys_values(self, keys: Tensor) -> Tensor:
        """Keys and values of tokens [..., D] → [..., 2, H, d]."""
        result: Tensor = self.key_value(keys).view(*keys.shape[:-1], 2, self.heads, -1)
        return result

    def attend(self, queries: Tensor, kv: Tensor, may_attend: Tensor | None = None) -> Tensor:
        """Padded queries [B, M, D] attend to tokens with these keys and values [B, N, 2, H, d], where `may_attend`
        [B, 1, 1, N] is True. With causal attention, the queries are those of the last M tokens."""
        result: Tensor = self.output(_join_heads(self._mix_newest(*self._split_heads(queries, kv), may_attend)))
        return result

    def attend_with_weights(
        self, queries: Tensor, kv: Tensor, may_attend: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`attend`, and the weights [B, H, M, N]."""
        q, k, v = self._split_heads(queries, kv)
        weights = self._weights_of_newest(q, k, may_attend)
        result: Tensor = self.output(_join_heads(weights @ v))
        return result, weights

    def weights(self, queries: Tensor, keys: Tensor, batch: PackedBatch) -> Tensor:
        """Attention weights [B, H, N, N]: rows are queries, columns keys; rows of padding are meaningless."""
        q, k, _ = self._heads(queries, keys, batch)
        return self._weights_of_newest(q, k, None if self.causal else batch.may_attend)

    def token_step(self) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
        """The attention of one token, in numpy: its query stream [D], its key stream [D], and the keys and values
        [2, H, n, d] up to it, of which it writes its own, the last."""
        assert self.causal, "the output of a token must not depend on later tokens"
        heads, output = self.heads, numpy_map(self.output)
        query, key_value = numpy_map(self.query), numpy_map(self.key_value)
        score = self.score.token_step()
        score = self.relative.token_step(score) if isinstance(self.relative, Rotary) else score
        bias = self.relative.token_step() if isinstance(self.relative, RelativeBuckets) else None
        no_bias = [None] * heads

        def attend(query_stream: np.ndarray, key_stream: np.ndarray, kv: np.ndarray) -> np.ndarray:
            kv[:, :, -1] = key_value(key_stream).reshape(2, heads, -1)
            queries = query(query_stream)
            mixed = np.empty_like(queries)
            biases = no_bias if bias is None else bias(kv.shape[2])  # [H, n]
            # Heads are few, often one: a loop has less overhead than products of all heads.
            for q, k, v, m, b in zip(queries.reshape(heads, -1), *kv, mixed.reshape(heads, -1), biases, strict=True):
                weights = score(q, k)
                if b is not None:
                    weights += b
                weights -= weights.max()
                np.exp(weights, out=weights)
                weights /= weights.sum()
                weights.dot(v, out=m)
            return output(mixed)

        return attend

    def _mix_newest(self, q: Tensor, k: Tensor, v: Tensor, may_attend: Tensor | None) -> Tensor:
        """Mixtures [B, H, M, d] for queries of the last M tokens, or of another stream."""
        q, k, bias = self._apply_relative_to_newest(q, k)
        if self.causal and self.fused and may_attend is None and bias is None and q.shape[2] == k.shape[2]:
            return fused_attention(self._project(q), k, v, is_causal=True, scale=self._scale)
        return self._mix(q, k, v, self._mask(q, k, may_attend), bias)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        """Mixtures [B, H, M, d] under the whole mask; the bias is added to scores."""
        if not self.fused:
            return self._weights(q, k, mask, bias) @ v
        if bias is not None:
            mask = bias if mask is None else torch.where(mask, bias, -math.inf)
        return fused_attention(self._project(q), k, v, attn_mask=mask, scale=self._scale)

    def _project(self, q: Tensor) -> Tensor:
        return self.score.project(q) if isinstance(self.score, Product) else q

    def _weights_of_newest(self, q: Tensor, k: Tensor, may_attend: Tensor | None) -> Tensor:
        """Weights [B, H, M, N] of queries of the last M tokens, or of another stream."""
        q, k, bias = self._apply_relative_to_newest(q, k)
        return self._weights(q, k, self._mask(q, k, may_attend), bias)

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        """Weights [B, H, M, N] under the whole mask; the bias is added to scores."""
        logits: Tensor = self.score(q, k, causal=self.causal and q.shape[2] == k.shape[2])
        return soft_weights(logits if bias is None else logits + bias, mask)

    def _mask(self, q: Tensor, k: Tensor, may_attend: Tensor | None) -> Tensor | None:
        """`may_attend`, and causal if the attention is; True: may attend."""
        rows, columns = q.shape[2], k.shape[2]
        if not self.causal or rows == 1:
            return may_attend
        causal = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
        return causal if may_attend is None else causal & may_attend

    def _apply_relative_to_newest(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """`_apply_relative` for queries of the last M tokens."""
        return self._apply_relative(q, k, torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device))

    def _apply_relative(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries at these positions, [M] or [B, M], and keys, both rotated, or the bias of their distances."""
        if self.relative is None:
            return q, k, None
        keys = torch.arange(k.shape[2], device=k.device)
        if isinstance(self.relative, Rotary):
            return self.relative(q, positions), self.relative(k, keys), None
        bias = self.relative(positions, keys)
        return q, k, bias if bias.dim() == 4 else bias[None]

    def _split_heads(self, queries: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [B, H, M or N, d]."""
        q = self.query(queries).view(*queries.shape[:2], self.heads, -1).transpose(1, 2)
        k, v = kv.permute(2, 0, 3, 1, 4)
        return q, k, v

    def _heads(self, queries: Tensor, keys: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of packed tokens, each [B, H, N, d]."""
        if batch.rectangular and queries is not keys:  # no padding, so nothing to join for one padding
            rows = batch.size, batch.longest
            q = self.query(queries).view(*rows, self.heads, -1).transpose(1, 2)
            k, v = self.key_value(keys).view(*rows, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
            return q, k, v
        if queries is keys:  # one product and one padding instead of two
            weight = torch.cat((self.query.weight, self.key_value.weight))
            bias = torch.cat((self.query.bias, self.key_value.bias))
            joined = functional.linear(queries, weight, bias)  # [T, 3D]
        else:
            joined = torch.cat((self.query(queries), self.key_value(keys)), dim=-1)
        padded = pad(joined, batch)  # [B, N, 3D]
        parts = padded.view(batch.size, batch.longest, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return parts[0], parts[1], parts[2]


def _join_heads(mixed: Tensor) -> Tensor:
    """[B, H, M, d] → [B, M, D]."""
    return mixed.transpose(1, 2).flatten(2)
