"""Settings → a model with random initial weights.

No folder holds code: a run with an encoder from outside segue names its builder, and the caller passes it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from segue.errors import SettingsError
from segue.kinds import kind_of
from segue.models.encoders import ModelSettings
from segue.models.items.content import ContentTable
from segue.models.items.tables import NO_FACTS, DataFacts
from segue.models.sequence import Parts, SequenceModel
from segue.models.similarity.dot import DotSettings

Builder = Callable[[Any, Parts, torch.Generator], SequenceModel]
"""An encoder from outside segue: the section `model`, the parts of the model and the generator of its initial weights
→ a model."""


def build_model(
    settings: ModelSettings,
    n_items: int,
    *,
    generator: torch.Generator,
    facts: DataFacts = NO_FACTS,
    encoder: Builder | None = None,
) -> SequenceModel:
    """Build a new model, without a change of the global random state. `facts`: what `settings.items.facts` returns;
    `encoder`: the builder from outside, if `model.encoder` names one.

    Bidirectional models have a mask and, as in BERT4Rec, a bias for each item. There is no bias if scores are not plain
    inner products, or if items share weights or have content: items unseen in training would have none."""
    refuse_other_builder(settings, encoder, whose="The model")
    mask, width, item_width = settings.bidirectional, settings.width, settings.item_width
    bias = mask and isinstance(settings.similarity, DotSettings)
    with torch.random.fork_rng(devices=[]):
        parts = Parts(
            items=settings.items.table(facts, n_items, item_width, mask=mask, bias=bias),
            inputs=settings.inputs.build(item_width, width, len(facts.kinds)),
            similarity=settings.similarity.build(item_width),
            output=settings.output.build(width),
        )
        model: object = settings.build(parts, generator) if encoder is None else encoder(settings, parts, generator)
    if not isinstance(model, SequenceModel):
        raise SettingsError(
            f"An encoder must be a function that builds a SequenceModel, and {settings.encoder} returned "
            f"{type(model).__name__}; see docs/your-model.md for an example."
        )
    if isinstance(model.items, ContentTable):
        model.items.begin(generator)
    model.kinds = facts.kinds
    return model


def builder_name(build: Builder) -> str:
    """The name of a builder from outside in the settings."""
    owner = build if hasattr(build, "__qualname__") else type(build)
    return f"{owner.__module__}:{owner.__qualname__}"


def refuse_other_builder(settings: ModelSettings, encoder: Builder | None, *, whose: str) -> None:
    """Refuse a builder other than the one that the settings name. Its module may differ: a script trains a model as
    `__main__`, and other programs import the builder. `whose`: the subject of the message."""
    if encoder is None and settings.encoder:
        raise SettingsError(
            f"{whose} has an encoder from outside segue, {settings.encoder}, and no folder holds code: give its "
            "builder in Python, as in segue.load(folder, encoder=build) or segue.train(data, encoder=build)."
        )
    if encoder is None:
        return
    if not callable(encoder):
        raise SettingsError(
            f"encoder= must be a function that builds a model, and {encoder!r} is none; segue's own encoders are named "
            "by model.kind, and docs/your-model.md shows one of your own."
        )
    name = builder_name(encoder)
    if not settings.encoder:
        raise SettingsError(
            f"{whose} has an encoder of segue's own, {kind_of(settings)}, and not {name}: leave encoder= out."
        )
    if settings.encoder.rpartition(":")[2] != name.rpartition(":")[2]:
        raise SettingsError(f"{whose} has the encoder {settings.encoder}, and encoder= gives {name}: give that one.")
