"""The attention of a model: maps of its weights for explanations, and the samples of hard attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from segue.layers.packed import PackedBatch
from segue.models.sequence import SequenceModel


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMap:
    """The attention weights of one layer."""

    name: str
    """Such as "layer 1" or "decoder, layer 1, at the history"; unique within a model."""
    weights: Tensor  # [B, heads, M, N]: rows are queries, columns keys
    rows: Literal["tokens", "steps"] = "tokens"
    """The queries: the model's tokens or a decoder's steps. Tokens are the history's and then the query token, if the
    model has one. The recommendations come from the last token or the first step."""
    columns: Literal["tokens", "steps"] = "tokens"
    """The keys."""


@runtime_checkable
class HasAttentionMaps(Protocol):
    """A model whose attention maps have names and shapes of their own."""

    def attention_maps(self, batch: PackedBatch) -> list[AttentionMap]:
        """All attention maps, in the order of computation; the last is nearest to the output.

        For a model with a decoder, a batch may hold a plan after the history (`histories`): the maps then have a row
        for each of its steps, the first of which has the start token as input."""
        ...


def attention_maps(model: SequenceModel, batch: PackedBatch) -> list[AttentionMap]:
    """All attention maps of a model, named "layer 1" and so on if it has no names; none without attention."""
    if isinstance(model, HasAttentionMaps):
        return model.attention_maps(batch)
    weights = model.attention(batch)
    return [] if weights is None else [AttentionMap(f"layer {n}", own) for n, own in enumerate(weights, start=1)]


@dataclass(frozen=True, slots=True, eq=False)
class SampledAttention:
    """The samples of hard attention that some states were computed with, for REINFORCE."""

    log_probability: Tensor  # [M]
    entropy: Tensor  # [M]: of the distributions sampled from
    bonus: float
    """Reward of a unit of entropy."""


@runtime_checkable
class SamplingModel(Protocol):
    """A model whose states may depend on samples, each state on its own."""

    def sampled_attention(self, states: Tensor) -> SampledAttention | None:
        """The samples of states [M, D] that `encode` returned; None if nothing was sampled."""
        ...
