"""Settings → a model, with weights drawn from a generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from segue.errors import SettingsError
from segue.kinds import kind_of
from segue.models.encoders import ModelSettings
from segue.models.facts import NO_FACTS, DataFacts
from segue.models.items.content import ContentTable
from segue.models.sequence import Parts, SequenceModel
from segue.models.similarity.dot import DotSettings

Builder = Callable[[Any, Parts, torch.Generator], SequenceModel]
"""An encoder from outside: the section `model` and the parts to build around → a model, with weights drawn from the
generator."""


def build_model(
    settings: ModelSettings,
    n_items: int,
    *,
    generator: torch.Generator,
    facts: DataFacts = NO_FACTS,
    encoder: Builder | None = None,
) -> SequenceModel:
    """Build a new model. `facts`: what `settings.items.facts` returns; `encoder`: the builder from outside, if
    `model.encoder` names one.

    The caller's global random state does not change.
    """
    refuse_other_builder(settings, encoder, whose="The model")
    with torch.random.fork_rng(devices=[]):
        parts = make_parts(settings, n_items, facts)
        model: object = settings.build(parts, generator) if encoder is None else encoder(settings, parts, generator)
    if not isinstance(model, SequenceModel):
        raise SettingsError(
            f"An encoder must be a function that builds a SequenceModel, and {settings.encoder} returned "
            f"{type(model).__name__}; docs/your-model.md shows one that works."
        )
    if isinstance(model.items, ContentTable):
        model.items.begin(generator)
    model.kinds = facts.kinds
    return model


def make_parts(settings: ModelSettings, n_items: int, facts: DataFacts = NO_FACTS) -> Parts:
    """The item table, inputs, similarity and output of a model.

    Bidirectional models have a mask and, as in BERT4Rec, a bias for each item. There is no bias if scores are not plain
    inner products, or if items share weights or have content: items unseen in training would have none.
    """
    mask = settings.bidirectional
    bias = mask and isinstance(settings.similarity, DotSettings)
    items = settings.items.table(facts, n_items, settings.item_width, mask=mask, bias=bias)
    return Parts(
        items=items,
        inputs=settings.inputs.build(settings.item_width, settings.width, len(facts.kinds)),
        similarity=settings.similarity.build(settings.item_width),
        output=settings.output.build(settings.width),
    )


def builder_name(build: Builder) -> str:
    """The name of a builder from outside in the settings."""
    named = build if hasattr(build, "__qualname__") else type(build)
    return f"{named.__module__}:{named.__qualname__}"


def refuse_other_builder(settings: ModelSettings, encoder: Builder | None, *, whose: str) -> None:
    """A model can only be built by the builder that its settings name. The module may differ: a model that a script
    trained, as `__main__`, is opened by others that import the builder. `whose`: the sentence's subject."""
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
