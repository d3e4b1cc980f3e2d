"""Attention: queries look at keys and get a mixture of values. One module for all of it.

Over packed tokens a token looks at itself and its user's earlier tokens, or at all its user's; over padded ones queries
may look at keys of another stream. Scores are of any kind, and the softmax over them may choose one value instead of a
mean. torch's fused kernel does the mixing wherever scores are products and nothing else is asked; `fused` says so.
Looking back only, `is_causal` alone is an exact mask on the right-padded view; looking both ways, padding has to be
masked out as well. No attention dropout: it would force the slow kernel on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.attention.scores import Product, Score, ScoreKind, make_score
from segue.layers.attention.weights import AttentionWeights, Choice, select_weights
from segue.layers.incremental import numpy_map
from segue.layers.packed import PackedBatch, pack, pad
from segue.layers.positions.embeddings import RelativeBuckets, Rotary

fused_attention = functional.scaled_dot_product_attention

Relative = Rotary | RelativeBuckets


def fused_scale(score: Score, choice: Choice, temperature: float) -> float | None:
    """What the fused kernel multiplies products by; None where it cannot do the mixing, as scores are no products or
    one value is chosen instead of a mean."""
    return score.scale / temperature if isinstance(score, Product) and choice == "soft" else None


class Attention(nn.Module):
    """Queries from one stream, keys and values from another (often the same), in `heads` heads."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        output: bool,
        causal: bool,
        scores: ScoreKind = "scaled-dot",
        relative: Relative | None = None,
        choice: Choice = "soft",
        temperature: float = 1.0,
    ) -> None:
        """`output`: a projection follows after the heads are joined; the original SASRec has none.

        `causal`: no token looks at a later one. `scores`: heads share what is learned of them, their projections are
        their own. `relative`: how distances count; only a product of turned features leaves nothing but them.
        """
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
        self.choice: Choice = choice
        self.temperature = temperature
        self.generator: torch.Generator | None = None
        # Looked at with every call: numbers are found faster than parts.
        self._scale = fused_scale(self.score, choice, temperature)
        self._learned_bias = isinstance(relative, RelativeBuckets)
        self._plain = self._scale is not None and relative is None and type(self.score) is Product

    @property
    def fused(self) -> bool:
        """Whether torch's fused kernel does the mixing: of products, softly. A bias that is learned forbids it while
        gradients are wanted."""
        return self._scale is not None and not (self._learned_bias and torch.is_grad_enabled())

    def extra_repr(self) -> str:
        """So that a model that is printed says which kernel it uses."""
        kernel = "never" if self._scale is None else "without gradients" if self._learned_bias else "always"
        return f"heads={self.heads}, causal={self.causal}, choice={self.choice}, fused={kernel}"

    def forward(self, queries: Tensor, keys: Tensor, batch: PackedBatch) -> Tensor:
        """Of packed tokens [T, D], each among its user's."""
        q, k, v = self._heads(queries, keys, batch)
        looks = None if self.causal else batch.may_attend
        if self._plain:  # training and answers come here so often that the way to the kernel is kept short
            mixed = fused_attention(q, k, v, attn_mask=looks, is_causal=self.causal, scale=self._scale)
        else:
            mixed = self._mixed(q, k, v, looks)
        result: Tensor = self.output(pack(_joined(mixed), batch))
        return result

    def newest(self, queries: Tensor, keys: Tensor, batch: PackedBatch) -> Tensor:
        """What each user's newest token gets, whose query [B, D] is given: it may look at all of the user's tokens."""
        if self._plain:
            mixed = self._mixed_streams(queries, keys, batch)
        else:
            q = self.query(queries).view(batch.size, 1, self.heads, -1).transpose(1, 2)  # [B, H, 1, d]
            padded = pad(self.key_value(keys), batch)  # [B, N, 2D]
            k, v = padded.view(batch.size, batch.longest, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
            q, k, bias = self._related(q, k, batch.lengths[:, None] - 1)
            mixed = self._kernel(q, k, v, batch.may_attend, bias).reshape(batch.size, -1)
        result: Tensor = self.output(mixed)
        return result

    def _mixed_streams(self, queries: Tensor, keys: Tensor, batch: PackedBatch) -> Tensor:
        """`newest` up to the output [B, D], without a key and a value for every token: what is asked goes through the
        keys' weights and meets the streams themselves, and their mixture goes through the values' weights.

        Products and sums may change places. The keys' bias adds the same to all scores of a query, which a softmax
        does not see; heads that share a stream are so many queries to it.
        """
        width = keys.shape[-1]
        of_keys, of_values = self.key_value.weight.view(2, self.heads, -1, width)  # [H, d, D]
        q = self.query(queries).view(batch.size, self.heads, -1).transpose(0, 1)  # [H, B, d]
        asking = (q @ of_keys).transpose(0, 1)[:, None]  # [B, 1, H, D]
        streams = pad(keys, batch)[:, None]  # [B, 1, N, D]
        mixed = fused_attention(asking, streams, streams, attn_mask=batch.may_attend, scale=self._scale)[:, 0]
        values = mixed.transpose(0, 1) @ of_values.transpose(1, 2)  # [H, B, d]
        mixed_values: Tensor = values.transpose(0, 1).flatten(1) + self.key_value.bias[width:]
        return mixed_values

    def keys_values(self, keys: Tensor) -> Tensor:
        """What tokens that come later, or queries of another stream, need of these [..., D] → [..., 2, H, d]."""
        result: Tensor = self.key_value(keys).view(*keys.shape[:-1], 2, self.heads, -1)
        return result

    def attend(self, queries: Tensor, kept: Tensor, may_attend: Tensor | None = None) -> Tensor:
        """What padded queries [B, M, D] get from tokens of which this is kept [B, N, 2, H, d]. `may_attend`
        [B, 1, 1, N] is True where one may. Where tokens look back only, the queries are the last M tokens'."""
        result: Tensor = self.output(_joined(self._mixed(*self._asked_among(queries, kept), may_attend)))
        return result

    def attend_with_weights(
        self, queries: Tensor, kept: Tensor, may_attend: Tensor | None = None
    ) -> tuple[Tensor, AttentionWeights]:
        """The same, and how much was taken of each [B, H, M, N], with what REINFORCE has to know."""
        q, k, v = self._asked_among(queries, kept)
        q, k, bias = self._placed(q, k)
        how = self._chosen(q, k, self._looks(q, k, may_attend), bias)
        result: Tensor = self.output(_joined(how.weights @ v))
        return result, how

    def weights(self, queries: Tensor, keys: Tensor, batch: PackedBatch) -> Tensor:
        """The weights [B, H, N, N]: row = who looks, column = at whom; rows of padding are meaningless."""
        q, k, _ = self._heads(queries, keys, batch)
        q, k, bias = self._placed(q, k)
        return self._chosen(q, k, self._looks(q, k, None if self.causal else batch.may_attend), bias).weights

    def token_step(self) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
        """What a token gets whose query's stream [D] is given, and the stream [D] that its keys and values, the last
        of those kept [2, H, n, d], are made from."""
        assert self.causal, "what a token gets must not depend on those that come after it"
        assert self.choice == "soft" and self.temperature == 1
        heads, query, key_value, output = (
            self.heads,
            numpy_map(self.query),
            numpy_map(self.key_value),
            numpy_map(self.output),
        )
        score = self.score.token_step()
        score = self.relative.token_step(score) if isinstance(self.relative, Rotary) else score
        bias = self.relative.token_step() if isinstance(self.relative, RelativeBuckets) else None
        unbiased = [None] * heads

        def attend(asking: np.ndarray, stream: np.ndarray, kept: np.ndarray) -> np.ndarray:
            kept[:, :, -1] = key_value(stream).reshape(2, heads, -1)
            queries = query(asking)
            mixed = np.empty_like(queries)
            biases = unbiased if bias is None else bias(kept.shape[2])  # [H, n]
            # Heads are few, mostly one: a loop over them begins sooner than products of all of them.
            for q, k, v, m, b in zip(queries.reshape(heads, -1), *kept, mixed.reshape(heads, -1), biases, strict=True):
                weights = score(q, k)
                if b is not None:
                    weights += b
                weights -= weights.max()
                np.exp(weights, out=weights)
                weights /= weights.sum()
                weights.dot(v, out=m)
            return output(mixed)

        return attend

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, may_attend: Tensor | None) -> Tensor:
        """Mixtures [B, H, M, d] for queries that are the last of the keys' tokens, or another stream's."""
        q, k, bias = self._placed(q, k)
        if self.causal and self.fused and may_attend is None and bias is None and q.shape[2] == k.shape[2]:
            return fused_attention(self._asking(q), k, v, is_causal=True, scale=self._scale)
        return self._kernel(q, k, v, self._looks(q, k, may_attend), bias)

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, looks: Tensor | None, bias: Tensor | None) -> Tensor:
        """The same with all that is to be looked at, and what is added to scores."""
        if not self.fused:
            assert self.choice != "reinforce" or not self.training, (
                "REINFORCE needs probabilities: see `attend_with_weights`"
            )
            return self._chosen(q, k, looks, bias).weights @ v
        if bias is not None:
            looks = bias if looks is None else torch.where(looks, bias, -math.inf)
        return fused_attention(self._asking(q), k, v, attn_mask=looks, scale=self._scale)

    def _asking(self, q: Tensor) -> Tensor:
        """Queries whose products with keys the fused kernel is to take."""
        return self.score.asking(q) if isinstance(self.score, Product) else q

    def _chosen(self, q: Tensor, k: Tensor, looks: Tensor | None, bias: Tensor | None) -> AttentionWeights:
        """How much is taken of each value [B, H, M, N]."""
        square = self.causal and q.shape[2] == k.shape[2]  # scores of later keys will be masked: they need not be made
        logits = self.score(q, k, causal=square)
        return select_weights(
            logits if bias is None else logits + bias,
            looks,
            self.choice,
            temperature=self.temperature,
            training=self.training,
            generator=self.generator,
        )

    def _looks(self, q: Tensor, k: Tensor, may_attend: Tensor | None) -> Tensor | None:
        """Where queries may look, True: at what is given, and where tokens look back only, not ahead."""
        rows, columns = q.shape[2], k.shape[2]
        if not self.causal or rows == 1:
            return may_attend
        back = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
        return back if may_attend is None else back & may_attend

    def _placed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries that are the last of the keys' tokens."""
        return self._related(q, k, torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device))

    def _related(self, q: Tensor, k: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries at these places, [M] or [B, M], and keys that know of their distance, and the bias of it."""
        if self.relative is None:
            return q, k, None
        keys = torch.arange(k.shape[2], device=k.device)
        if isinstance(self.relative, Rotary):
            return self.relative(q, places), self.relative(k, keys), None
        bias = self.relative(places, keys)
        return q, k, bias if bias.dim() == 4 else bias[None]

    def _asked_among(self, queries: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each [B, H, M or N, d]."""
        q = self.query(queries).view(*queries.shape[:2], self.heads, -1).transpose(1, 2)
        k, v = kept.permute(2, 0, 3, 1, 4)
        return q, k, v

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


def _joined(mixed: Tensor) -> Tensor:
    """[B, H, M, d] → [B, M, D]."""
    return mixed.transpose(1, 2).flatten(2)
