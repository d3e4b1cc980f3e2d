"""What a model is made of, in numbers."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import msgspec

from segue.errors import SettingsError

BIDIRECTIONAL = frozenset({"bert4rec"})
"""Builders whose tokens look both ways: they are asked what a mask hides. At any other token the answer is in sight."""

CONTINUING = frozenset({"seq2seq"})
"""Builders with a decoder: they are asked for what comes after a cut, item by item, and so can plan."""


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `model` of the settings."""

    builder: Literal["sasrec", "esasrec", "bert4rec", "hstu", "sasrec-meta", "seq2seq"] = "esasrec"
    """Which encoder: the original SASRec, the gated pre-norm one, BERT4Rec, which looks both ways, HSTU, which knows
    times, SASRec as HSTU's authors compare with, or an encoder and a decoder, which plans several items."""
    body: Literal["transformer", "gru"] = "transformer"
    """What seq2seq reads and continues with: attention alone, or recurrent networks with attention between them."""
    width: int = 64
    """Features of a token and of an item."""
    depth: int = 2
    """Blocks."""
    heads: int = 1
    """Attention heads; they share the width evenly."""
    length: int = 200
    """Newest events of a history that the model looks at, at most; bert4rec one less, as its question takes a place."""
    dropout: float = 0.2
    """Share of features dropped while training, on the input and on each block's updates."""
    feed_forward: int = 4
    """Hidden width of a block's feed-forward part, in multiples of `width`."""
    positions: Literal["newest", "oldest"] = "newest"
    """Where places are counted from. From the oldest, a prefix is encoded as it is inside the whole."""
    category: str = ""
    """A column of the catalogue: items with the same value share a vector. Empty: each item has its own."""
    tied: bool = True
    """One vector an item, on the way in and on the way out; or one for each."""
    inputs: Literal["items", "rated", "combined"] = "items"
    """What a token is: an item; an item and its event's value, side by side; or each a token of its own."""
    value_width: int = 8
    """Features of a value beside an item's, for inputs = 'rated'."""
    value_edges: tuple[float, ...] = (1.5, 2.5, 3.5, 4.5)
    """Where one range of values ends and the next begins, ascending; values of one range are alike to the model. The
    default has a range for each of five stars."""
    target_time: bool = True
    """Whether hstu is told the moment of the question, which at the service is now, or knows the history's times
    only."""
    output: Literal["none", "l2", "layer-norm"] = "none"
    """What is done to a question's vector before it is compared: nothing, its length made one, or its features
    centred and scaled."""
    similarity: Literal["dot", "cosine", "mol"] = "dot"
    """How a question is compared with an item: by the inner product of their vectors; by that of their directions,
    which wants a low objective.temperature; or by a mixture of logits, the products of several components of each."""
    mol_query_parts: int = 8
    """Components of a question, for similarity = 'mol'."""
    mol_item_parts: int = 4
    """Components of an item."""
    mol_part_width: int = 64
    """Features of a component."""
    mol_query_hidden: int = 512
    """Hidden width of what makes a question's components; 0: they are linear."""
    mol_gate_hidden: int = 128
    """Hidden width of the gates; 0: they are linear."""
    mol_temperature: float = 0.05
    """What the components' products are divided by; objective.temperature stays 1."""
    mol_item_dropout: float = 0.1
    """Share of an item's features dropped while training, before its components are made."""
    mol_gate_dropout: float = 0.2
    """Share of the gates dropped while training."""
    mol_balance: float = 0.001
    """What the loss charges for gates that are all alike, or that a few components have to themselves."""

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "length", "feed_forward", "value_width"):
            if getattr(self, name) < 1:
                raise SettingsError(f"model.{name} must be at least 1, got {getattr(self, name)}.")
        if self.builder in BIDIRECTIONAL and self.length < 2:
            raise SettingsError(f"model.length must be at least 2 for {self.builder}, whose question takes a place.")
        if not 0 <= self.dropout < 1:
            raise SettingsError(f"model.dropout must lie in [0, 1), got {self.dropout}.")
        if self.builder in CONTINUING and self.inputs != "items":
            raise SettingsError(
                f"model.inputs = {self.inputs!r} needs the values of events, which a plan of {self.builder} has not: "
                "leave it at 'items', or choose another builder."
            )
        self._check_widths()
        self._check_values()
        self._check_mixture()
        self._refuse_without_effect()

    def _check_widths(self) -> None:
        if self.inputs == "rated" and (self.width + self.value_width) % self.heads:
            raise SettingsError(
                f"model.width and model.value_width must add up to a multiple of model.heads, got {self.width}, "
                f"{self.value_width} and {self.heads}; change one of them."
            )
        if self.inputs != "rated" and self.width % self.heads:
            raise SettingsError(
                f"model.width must be a multiple of model.heads, got {self.width} and {self.heads}; change one of them."
            )

    def _check_values(self) -> None:
        edges = self.value_edges
        finite = all(math.isfinite(edge) for edge in edges)
        if not edges or not finite or any(low >= high for low, high in itertools.pairwise(edges)):
            raise SettingsError(f"model.value_edges must be ascending numbers, at least one, got {list(edges)}.")

    def _check_mixture(self) -> None:
        for name, sound, range_ in (
            ("mol_query_parts", self.mol_query_parts >= 1, "at least 1"),
            ("mol_item_parts", self.mol_item_parts >= 1, "at least 1"),
            ("mol_part_width", self.mol_part_width >= 1, "at least 1"),
            ("mol_query_hidden", self.mol_query_hidden >= 0, "at least 0"),
            ("mol_gate_hidden", self.mol_gate_hidden >= 0, "at least 0"),
            ("mol_temperature", 0 < self.mol_temperature < math.inf, "above 0"),
            ("mol_item_dropout", 0 <= self.mol_item_dropout < 1, "in [0, 1)"),
            ("mol_gate_dropout", 0 <= self.mol_gate_dropout < 1, "in [0, 1)"),
            ("mol_balance", 0 <= self.mol_balance < math.inf, "at least 0"),
        ):
            if not sound:
                raise SettingsError(f"model.{name} must be {range_}, got {getattr(self, name)}.")

    def _refuse_without_effect(self) -> None:
        for name in (name for name in DEFAULTS if name.startswith("mol_") and self.similarity != "mol"):
            if getattr(self, name) != DEFAULTS[name]:
                raise SettingsError(f"model.{name} belongs to model.similarity = 'mol': leave it out, or choose that.")
        recurrent = self.body == "gru"
        for name, used, where in (
            ("body", self.builder in CONTINUING, f"only {', '.join(CONTINUING)} has a choice of it"),
            ("heads", not recurrent, "body = 'gru' attends with one head"),
            ("positions", not recurrent, "body = 'gru' knows the order without places"),
            ("feed_forward", not recurrent, "body = 'gru' has no feed-forward part"),
            ("feed_forward", self.builder != "hstu", "hstu has no feed-forward part"),
            ("target_time", self.builder == "hstu", f"{self.builder} knows no times"),
            ("value_width", self.inputs == "rated", "only inputs = 'rated' have it"),
            ("value_edges", self.inputs != "items", "items alone have no values"),
        ):
            if not used and getattr(self, name) != DEFAULTS[name]:
                raise SettingsError(
                    f"model.{name} would have no effect: {where}. Leave it at {_written(DEFAULTS[name])}."
                )
        if self.output == "l2" and self.similarity == "cosine":
            raise SettingsError("model.output = 'l2' would have no effect: a cosine looks at directions. Leave it out.")


def _written(value: object) -> str:
    """As `--set` takes it."""
    return msgspec.json.encode(value).decode()


DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(ModelSettings)}
