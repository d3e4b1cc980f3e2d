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
UNPLACED = frozenset({"gru4rec", "narm", "caser", "nextitnet"})
"""Builders without places and heads: recurrent and convolutional ones."""
SENTENCE_WIDTH = 384
"""Features that the sentence model of text_encoder = 'sentences' makes of a text."""
AT_LEAST_ONE = (
    *("width", "depth", "heads", "length", "feed_forward", "value_width", "kind_width"),
    *("kernel", "image_events", "horizontal", "vertical"),
)


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `model` of the settings."""

    builder: Literal[
        "sasrec",
        "esasrec",
        "bert4rec",
        "hstu",
        "sasrec-meta",
        "transformer",
        "gru4rec",
        "narm",
        "caser",
        "nextitnet",
        "seq2seq",
        "pinnerformer",
    ] = "esasrec"
    """Which encoder: the original SASRec, the gated pre-norm one, BERT4Rec, which looks both ways, HSTU, which knows
    times, SASRec as HSTU's authors compare with, or a Transformer whose parts are chosen; the recurrent GRU4Rec, NARM,
    which is recurrent and then looks back, and Caser and NextItNet, which are convolutions; an encoder with a decoder,
    which plans several items; or PinnerFormer, whose questions are good for days."""
    body: Literal["transformer", "gru"] = "transformer"
    """What seq2seq reads and continues with: attention alone, or recurrent networks with attention between them."""
    width: int = 64
    """Features of a token and of an item."""
    depth: int = 2
    """Blocks; for nextitnet, times that its dilations are gone through."""
    heads: int = 1
    """Attention heads; they share the width evenly."""
    length: int = 200
    """Newest events of a history that the model looks at, at most; bert4rec one less, as its question takes a place."""
    dropout: float = 0.2
    """Share of features dropped while training, on the input and on each block's updates."""
    feed_forward: int = 4
    """Hidden width of a block's feed-forward part, in multiples of `width`."""
    positions: Literal["newest", "oldest", "sinusoidal", "rotary", "buckets"] = "newest"
    """Where learned places are counted from. From the oldest, a prefix is encoded as it is inside the whole. Only
    transformer has others, with which it is so as well: waves from the oldest on, features turned by their place, and
    a number for each bucket of distances."""
    norm: Literal["pre", "post"] = "pre"
    """Whether transformer's norms stand before each part of a block, or after each sum as in the original."""
    scores: Literal["dot", "scaled-dot", "bilinear", "additive"] = "scaled-dot"
    """How transformer's queries and keys, or narm's states, make a score: by their product, by that divided by the root
    of their width, by a product with a matrix between them, or by a small network, which takes time and is narm's as
    published."""
    choice: Literal["soft", "straight-through", "gumbel", "reinforce"] = "soft"
    """What narm takes by the scores: a mean of all states, or one state alone. One is learned about as if it had been
    the mean, the highest or, with 'gumbel', a drawn one; or, drawn, from how well it went."""
    choice_temperature: float = 1.0
    """What the scores are divided by where one state is taken: a low one makes draws sure and gradients steep. It is
    the same from the first step to the last: lowered while training, as is usual for 'gumbel' (from 1 to .1), it would
    make another model of a training that stops early or is taken up again with more epochs."""
    entropy_bonus: float = 0.0
    """What the loss pays for a unit of entropy of what choice = 'reinforce' draws from, so that it goes on trying."""
    state_width: int = 0
    """Features of a state of gru4rec and narm; 0: as many as a token has."""
    kernel: int = 3
    """Events that a convolution of nextitnet sees."""
    dilations: tuple[int, ...] = (1, 2)
    """How far apart these are, in one block of nextitnet after the other; in a block's second convolution twice as
    far."""
    image_events: int = 5
    """Newest events that caser sees."""
    horizontal: int = 16
    """Filters of caser over one event, over two and so on up to all that it sees: so many of each."""
    vertical: int = 4
    """Filters of caser over a feature of all events that it sees."""
    category: str = ""
    """A column of the catalogue: items with the same value share a vector, by which one that was never trained on
    is known. Empty: each item has its own."""
    items: Literal["ids", "vectors", "ids+vectors", "codes"] = "ids"
    """What an item's vector is made of: learned for its id; made of its content, what the catalogue says of it, by a
    small network, so that an item nobody has touched is known as well; or the sum of both. Or of codes: parts that many
    items share, for catalogues whose vectors do not fit into memory."""
    code_parts: int = 8
    """Parts of an item's vector, for items = 'codes': a byte each is all that is kept of an item."""
    code_values: int = 256
    """Vectors that a part may be, at most 256; no more than there are items."""
    codes: Literal["clusters", "learned", "svd", "random"] = "clusters"
    """Which items share a part: those that come close together in the histories of training, by clusters of a singular
    value decomposition; those that a small model, trained first, has learned to be alike, which answers best; those
    that the same users had, as in RecJPQ, by the decomposition alone; or any."""
    vectors: str = ""
    """Content: a column of the catalogue that holds vectors."""
    texts: tuple[str, ...] = ()
    """Content: columns of the catalogue whose words become a vector; beside `vectors` where both are given."""
    text_encoder: Literal["hashed", "sentences"] = "hashed"
    """How words become a vector: by hashed words and pieces of words, in the directions along which the catalogue's
    differ most; or by a sentence model that knows English (the extra `sentences`), in such directions too."""
    text_width: int = 128
    """Features of the vector that the words become; of 'sentences' at most 384, which are the model's own."""
    content_hidden: int = 128
    """Hidden width of the network that reads content; 0: it is linear."""
    id_dropout: float = 0.1
    """Share of the items whose id is left out in a step of training, for items = 'ids+vectors', so that content alone
    means something."""
    tied: bool = True
    """One vector an item, on the way in and on the way out; or one for each."""
    encoder: str = ""
    """A builder from outside segue as module:name, which stands in the place of `builder` and gets the item table of
    its kind. It is given as `segue.train(…, encoder=build)`, which writes this; it cannot be set alone."""
    inputs: Literal["items", "rated", "combined", "events"] = "items"
    """What a token is: an item; an item and its event's value, side by side; each a token of its own; or a whole event,
    its item, kind, value and times side by side through a linear map."""
    value_width: int = 8
    """Features of a value beside an item's, for inputs = 'rated'."""
    value_edges: tuple[float, ...] = (1.5, 2.5, 3.5, 4.5)
    """Where one range of values ends and the next begins, ascending; values of one range are alike to the model. The
    default has a range for each of five stars."""
    kind_width: int = 16
    """Features of an event's kind, for inputs = 'events'."""
    times: tuple[Literal["absolute", "since-newest", "since-previous"], ...] = (
        "absolute",
        "since-newest",
        "since-previous",
    )
    """What inputs = 'events' know of times: the date; how long before the newest event that the model looks at, so that
    a later event's time, though nothing else of it, is known to earlier ones; and how long after the one before."""
    item_width: int = 0
    """Features of an item, for inputs = 'events' with output = 'mlp', which can have others than a token; 0: as many as
    a token has."""
    target_time: bool = True
    """Whether hstu is told the moment of the question, which at the service is now, or knows the history's times
    only."""
    output: Literal["none", "l2", "layer-norm", "mlp"] = "none"
    """What is done to a question's vector before it is compared: nothing, its length made one, its features centred and
    scaled, or a network of two layers."""
    similarity: Literal["dot", "cosine", "mol"] = "dot"
    """How a question is compared with an item: by the inner product of their vectors; by that of their directions,
    which wants a low temperature; or by a mixture of logits, the products of several components of each."""
    temperature: Literal["fixed", "learned"] = "fixed"
    """Whether what the loss divides a cosine by is objective.temperature or is learned, never below .01."""
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

    @property
    def counted_from(self) -> Literal["newest", "oldest"]:
        """Where places are counted from; distances are the same from either end."""
        return "newest" if self.positions == "newest" else "oldest"

    @property
    def has_content(self) -> bool:
        """Whether an item's vector is made of what the catalogue says of it."""
        return self.items in ("vectors", "ids+vectors")

    @property
    def item_features(self) -> int:
        """Features of an item's vector."""
        return self.item_width or self.width

    def __post_init__(self) -> None:
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise SettingsError(f"model.{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("state_width", "item_width"):
            if getattr(self, name) < 0:
                raise SettingsError(f"model.{name} must be at least 0, got {getattr(self, name)}.")
        if not self.dilations or min(self.dilations) < 1:
            raise SettingsError(f"model.dilations must be numbers of at least 1, got {list(self.dilations)}.")
        if self.builder in BIDIRECTIONAL and self.length < 2:
            raise SettingsError(f"model.length must be at least 2 for {self.builder}, whose question takes a place.")
        if not 0 <= self.dropout < 1:
            raise SettingsError(f"model.dropout must lie in [0, 1), got {self.dropout}.")
        if self.builder in CONTINUING and self.inputs != "items":
            raise SettingsError(
                f"model.inputs = {self.inputs!r} needs the values of events, which a plan of {self.builder} has not: "
                "leave it at 'items', or choose another builder."
            )
        if self.builder in BIDIRECTIONAL and self.inputs == "events":
            raise SettingsError(
                f"model.inputs = 'events' tells what happened and when, which {self.builder} is asked for: choose "
                "other inputs, or another builder."
            )
        if not 0 < self.choice_temperature < math.inf:
            raise SettingsError(f"model.choice_temperature must be above 0, got {self.choice_temperature}.")
        if not 0 <= self.entropy_bonus < math.inf:
            raise SettingsError(f"model.entropy_bonus must be at least 0, got {self.entropy_bonus}.")
        self._check_widths()
        self._check_content()
        self._check_codes()
        self._check_positions()
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

    def _check_content(self) -> None:
        for name, sound, range_ in (
            ("text_width", self.text_width >= 1, "at least 1"),
            (
                "text_width",
                self.text_encoder != "sentences" or self.text_width <= SENTENCE_WIDTH,
                f"at most {SENTENCE_WIDTH} where model.text_encoder = 'sentences'",
            ),
            ("content_hidden", self.content_hidden >= 0, "at least 0"),
            ("id_dropout", 0 <= self.id_dropout < 1, "in [0, 1)"),
        ):
            if not sound:
                raise SettingsError(f"model.{name} must be {range_}, got {getattr(self, name)}.")
        if self.category and self.items != "ids":
            raise SettingsError(
                f"model.category needs model.items = 'ids', got {self.items!r}: leave one of the two out; a category "
                "may also be one of model.texts."
            )
        if not self.has_content:
            return
        if not self.vectors and not self.texts:
            raise SettingsError(
                f"model.items = {self.items!r} needs content: name a column of the catalogue with model.vectors, or "
                'columns of words, as in model.texts = ["title"].'
            )
        if not self.tied:
            raise SettingsError(
                f"model.tied must be true where model.items = {self.items!r}: content is the same on both ways."
            )

    def _check_codes(self) -> None:
        if self.code_parts < 1:
            raise SettingsError(f"model.code_parts must be at least 1, got {self.code_parts}.")
        if not 2 <= self.code_values <= 256:
            raise SettingsError(f"model.code_values must be at least 2 and at most 256, got {self.code_values}.")
        if self.items == "codes" and self.item_features % self.code_parts:
            raise SettingsError(
                f"model.code_parts must share an item's features evenly, got {self.code_parts} parts of "
                f"{self.item_features}; change model.code_parts or model.width."
            )

    def _check_positions(self) -> None:
        if self.positions not in ("newest", "oldest") and self.builder != "transformer":
            raise SettingsError(
                f"model.positions = {self.positions!r} belongs to model.builder = 'transformer': choose that, or "
                "'newest' or 'oldest'."
            )
        if self.positions != "rotary":
            return
        if self.scores not in ("dot", "scaled-dot"):
            raise SettingsError(
                f"model.positions = 'rotary' needs scores that are products, got model.scores = {self.scores!r}: "
                "choose 'dot' or 'scaled-dot', or other positions."
            )
        width = self.width + (self.value_width if self.inputs == "rated" else 0)
        if width // self.heads % 2:
            raise SettingsError(
                f"model.positions = 'rotary' turns pairs of features, and each of {self.heads} heads has "
                f"{width // self.heads}: change model.width or model.heads so that it is even."
            )

    def _check_values(self) -> None:
        edges = self.value_edges
        finite = all(math.isfinite(edge) for edge in edges)
        if not edges or not finite or any(low >= high for low, high in itertools.pairwise(edges)):
            raise SettingsError(f"model.value_edges must be ascending numbers, at least one, got {list(edges)}.")
        if len(set(self.times)) < len(self.times):
            raise SettingsError(f"model.times must name each signal once, got {list(self.times)}.")

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
            ("feed_forward", self.builder not in {"hstu"} | UNPLACED, f"{self.builder} has no feed-forward part"),
            ("heads", self.builder not in UNPLACED, f"{self.builder} has no heads"),
            ("positions", self.builder not in UNPLACED, f"{self.builder} knows the order without them"),
            ("norm", self.builder == "transformer", f"{self.builder} has its norms where they are"),
            ("scores", self.builder in ("transformer", "narm"), f"{self.builder} has none to choose"),
            ("choice", self.builder == "narm", "it is narm's"),
            ("choice_temperature", self.choice != "soft", "it belongs to a choice that is not 'soft'"),
            ("entropy_bonus", self.choice == "reinforce", "it belongs to choice = 'reinforce'"),
            ("state_width", self.builder in ("gru4rec", "narm"), "it belongs to gru4rec and narm"),
            ("kernel", self.builder == "nextitnet", "it is nextitnet's"),
            ("dilations", self.builder == "nextitnet", "they are nextitnet's"),
            ("image_events", self.builder == "caser", "it is caser's"),
            ("horizontal", self.builder == "caser", "it is caser's"),
            ("vertical", self.builder == "caser", "it is caser's"),
            ("target_time", self.builder == "hstu", f"{self.builder} knows no times"),
            ("value_width", self.inputs == "rated", "only inputs = 'rated' have it"),
            ("value_edges", self.inputs in ("rated", "combined"), "only inputs = 'rated' and 'combined' have ranges"),
            ("kind_width", self.inputs == "events", "only inputs = 'events' have kinds"),
            ("times", self.inputs == "events", "only inputs = 'events' have times"),
            ("item_width", self.inputs == "events" and self.output == "mlp", "items have a token's width"),
            ("temperature", self.similarity == "cosine", "it is a cosine's"),
            ("vectors", self.has_content, f"items = {self.items!r} has no content"),
            ("texts", self.has_content, f"items = {self.items!r} has no content"),
            ("text_encoder", bool(self.texts), "it belongs to model.texts"),
            ("text_width", bool(self.texts), "it belongs to model.texts"),
            ("content_hidden", self.has_content, f"items = {self.items!r} has no content"),
            ("code_parts", self.items == "codes", "it belongs to items = 'codes'"),
            ("code_values", self.items == "codes", "it belongs to items = 'codes'"),
            # "svd" was the default once, so runs of any kind may be written with it.
            ("codes", self.items == "codes" or self.codes == "svd", "it belongs to items = 'codes'"),
            ("id_dropout", self.items == "ids+vectors", "it belongs to items = 'ids+vectors'"),
        ):
            # What a builder from outside makes of its settings is not known here.
            if not used and not self.encoder and getattr(self, name) != DEFAULTS[name]:
                raise SettingsError(
                    f"model.{name} would have no effect: {where}. Leave it at {_written(DEFAULTS[name])}."
                )
        if self.output == "l2" and self.similarity == "cosine":
            raise SettingsError("model.output = 'l2' would have no effect: a cosine looks at directions. Leave it out.")


def _written(value: object) -> str:
    """As `--set` takes it."""
    return msgspec.json.encode(value).decode()


DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(ModelSettings)}
