"""Self-attention over packed tokens: a token looks at itself and its user's earlier tokens, or at all its user's.

The product is scaled by 1/sqrt(head width) and torch's fused kernel does it on the right-padded view. Looking back
only, `is_causal` alone is an exact mask there; looking both ways, padding has to be masked out as well. No attention
dropout: it would force the slow kernel on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.one_token import mapped
from segue.layers.packed import PackedBatch, pack, pad


class SelfAttention(nn.Module):
    """Queries from one stream, keys and values from another (often the same), in `heads` heads.

    `output` says whether a projection follows after the heads are joined; the original SASRec has none. `causal` says
    that no token looks at a later one.
    """

    def __init__(self, width: int, heads: int, *, output: bool, causal: bool) -> None:
        super().__init__()
        assert width % heads == 0
        self.heads = heads
        self.causal = causal
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width) if output else nn.Identity()

    def forward(self, queries: Tensor, keys: Tensor, batch: PackedBatch) -> Tensor:
        q, k, v = self._heads(queries, keys, batch)
        looks = None if self.causal else batch.may_look
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=looks, is_causal=self.causal)  # [B, H, N, d]
        return self._joined(mixed, batch)

    def newest(self, queries: Tensor, keys: Tensor, batch: PackedBatch) -> Tensor:
        """What each user's newest token gets, whose query [B, D] is given: it may look at all of the user's tokens."""
        q = self.query(queries).view(batch.size, 1, self.heads, -1).transpose(1, 2)  # [B, H, 1, d]
        padded = pad(self.key_value(keys), batch)  # [B, N, 2D]
        k, v = padded.view(batch.size, batch.longest, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=batch.may_look)
        result: Tensor = self.output(mixed.reshape(batch.size, -1))
        return result

    def kept(self, keys: Tensor) -> Tensor:
        """What tokens that come later need of these [T, 2, H, d]."""
        result: Tensor = self.key_value(keys).view(len(keys), 2, self.heads, -1)
        return result

    def one_token(self) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
        """What a token gets whose query's stream [D] is given, and the stream [D] that its keys and values, the last
        of those kept [2, H, n, d], are made from."""
        assert self.causal, "what a token gets must not depend on those that come after it"
        heads, query, key_value, output = self.heads, mapped(self.query), mapped(self.key_value), mapped(self.output)
        scale = np.float32(1 / math.sqrt(self.query.out_features // heads))

        def attend(asking: np.ndarray, stream: np.ndarray, kept: np.ndarray) -> np.ndarray:
            kept[:, :, -1] = key_value(stream).reshape(2, heads, -1)
            queries = query(asking)
            queries *= scale
            mixed = np.empty_like(queries)
            # Heads are few, mostly one: a loop over them begins sooner than products of all of them.
            for q, k, v, m in zip(queries.reshape(heads, -1), *kept, mixed.reshape(heads, -1), strict=True):
                weights = k.dot(q)
                weights -= weights.max()
                np.exp(weights, out=weights)
                weights /= weights.sum()
                weights.dot(v, out=m)
            return output(mixed)

        return attend

    def weights(self, queries: Tensor, keys: Tensor, batch: PackedBatch) -> Tensor:
        """The softmax weights [B, H, N, N]: row = who looks, column = at whom; rows of padding are meaningless."""
        q, k, _ = self._heads(queries, keys, batch)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # [B, H, N, N]
        looks = batch.may_look
        if self.causal:
            looks = torch.ones(batch.longest, batch.longest, dtype=torch.bool, device=scores.device).tril()
        return (scores if looks is None else scores.masked_fill(~looks, -math.inf)).softmax(-1)

    def _heads(self, queries: Tensor, keys: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Each [B, H, N, d]."""
        if batch.rectangular and queries is not keys:  # nothing is moved, so nothing need be moved together
            rows = batch.size, batch.longest
            q = self.query(queries).view(*rows, self.heads, -1).transpose(1, 2)
            k, v = self.key_value(keys).view(*rows, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
            return q, k, v
        if queries is keys:  # one stream: one product and one padding instead of two
            weight = torch.cat((self.query.weight, self.key_value.weight))
            bias = torch.cat((self.query.bias, self.key_value.bias))
            joined = functional.linear(queries, weight, bias)  # [T, 3D]
        else:
            joined = torch.cat((self.query(queries), self.key_value(keys)), dim=-1)
        padded = pad(joined, batch)  # [B, N, 3D]
        parts = padded.view(batch.size, batch.longest, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return parts[0], parts[1], parts[2]

    def _joined(self, mixed: Tensor, batch: PackedBatch) -> Tensor:
        joined = mixed.transpose(1, 2).reshape(batch.size, batch.longest, -1)  # [B, N, D]
        result: Tensor = self.output(pack(joined, batch))
        return result
