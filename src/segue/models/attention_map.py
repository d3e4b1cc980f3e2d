"""One attention of a model, under a name: how a model shows attention that is not a square for each of its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from segue.layers.packed import PackedBatch


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMap:
    """Who looked at whom in one layer."""

    name: str
    """Which one it is, in words that fit "layer 1" and "decoder, at the history"; no two of a model share one."""
    weights: Tensor  # [B, heads, M, N]: row = who looks, column = at whom
    rows: Literal["tokens", "steps"] = "tokens"
    """Who looks: the model's tokens, or a decoder's steps. Tokens are the history's and, where the model asks with one
    of its own, that one after them. The answer is made from the last of the tokens, or the first of the steps."""
    columns: Literal["tokens", "steps"] = "tokens"
    """Who is looked at, in the same way."""


@runtime_checkable
class HasAttention(Protocol):
    """What a model can do that has attention of one shape in each of its blocks."""

    def attention(self, batch: PackedBatch) -> Tensor | None:
        """Who looked at whom [layers, B, heads, N, N]: row = who looks, column = at whom; None where nobody does.

        The tokens are the history's and, where the model asks with one of its own, that one after them.
        """
        ...


@runtime_checkable
class HasAttentionMaps(Protocol):
    """What a model can do whose attentions have names and shapes of their own."""

    def attention_maps(self, batch: PackedBatch) -> list[AttentionMap]:
        """Every attention, in the order of the computation: the last is the one that the answer is made from.

        Of a model that plans, a batch may hold a plan after the history (`histories`): then there is a row for each of
        its steps, the first of which no item was fed to."""
        ...


def attention_maps(model: object, batch: PackedBatch) -> list[AttentionMap]:
    """Every attention of a model, those without names of their own as layers; none where it has none to show."""
    if isinstance(model, HasAttentionMaps):
        return model.attention_maps(batch)
    weights = model.attention(batch) if isinstance(model, HasAttention) else None
    if weights is None:
        return []
    return [AttentionMap(f"layer {layer}", own) for layer, own in enumerate(weights, start=1)]
