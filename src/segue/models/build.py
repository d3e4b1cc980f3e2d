"""Settings → a model, started from a generator."""

from __future__ import annotations

from collections.abc import Callable

import torch

from segue.errors import SettingsError
from segue.models.encoders.bert4rec import bert4rec
from segue.models.encoders.caser import caser
from segue.models.encoders.esasrec import esasrec
from segue.models.encoders.gru4rec import gru4rec
from segue.models.encoders.hstu import hstu, sasrec_meta
from segue.models.encoders.narm import narm
from segue.models.encoders.nextitnet import nextitnet
from segue.models.encoders.pinnerformer import pinnerformer
from segue.models.encoders.sasrec import sasrec
from segue.models.encoders.seq2seq import seq2seq
from segue.models.encoders.transformer import transformer
from segue.models.facts import NO_FACTS, Facts
from segue.models.items.code_assignment import code_values
from segue.models.items.coded import CodeTable
from segue.models.items.content import ContentTable
from segue.models.items.tables import CategoryTable, IdTable, ItemTable
from segue.models.sequence import SequenceModel
from segue.models.settings import BIDIRECTIONAL, ModelSettings

Builder = Callable[[ModelSettings, ItemTable, torch.Generator], SequenceModel]
"""Settings and the item table → a model over that table, with weights drawn from the generator."""

BUILDERS: dict[str, Builder] = {
    "sasrec": sasrec,
    "esasrec": esasrec,
    "bert4rec": bert4rec,
    "hstu": hstu,
    "sasrec-meta": sasrec_meta,
    "transformer": transformer,
    "gru4rec": gru4rec,
    "narm": narm,
    "caser": caser,
    "nextitnet": nextitnet,
    "seq2seq": seq2seq,
    "pinnerformer": pinnerformer,
}


def build_model(
    settings: ModelSettings,
    n_items: int,
    *,
    generator: torch.Generator,
    facts: Facts = NO_FACTS,
    encoder: Builder | None = None,
) -> SequenceModel:
    """A new model. `facts`: what the settings ask for, as `facts_of` finds it; `encoder`: the builder from outside,
    where `model.encoder` names one.

    The caller's global random state is left as it was.
    """
    assert (facts.categories is not None) == bool(settings.category)
    assert (facts.content is not None) == settings.has_content
    assert (facts.codes is not None) == (settings.items == "codes")
    refuse_other_builder(settings, encoder, whose="The model")
    with torch.random.fork_rng(devices=[]):
        items = make_items(settings, n_items, facts)
        items.kinds = facts.kinds
        built: object = (encoder or BUILDERS[settings.builder])(settings, items, generator)
    if not isinstance(built, SequenceModel):
        raise SettingsError(
            f"An encoder must be a function that builds a SequenceModel, and {settings.encoder} gave "
            f"{type(built).__name__}; docs/your-model.md shows one that works."
        )
    if isinstance(built.items, ContentTable):
        built.items.begin(generator)
    built.kinds = facts.kinds
    return built


def make_items(settings: ModelSettings, n_items: int, facts: Facts) -> ItemTable:
    """A vector for each item, for each category where the facts have them, or of the items' content or codes.

    Models that look both ways have a mask and, as BERT4Rec does, a bias for each item. Not so where scores are no
    inner products of a bias's kind: of a cosine or a mixture; nor where items share their vector or its parts or have
    content, for what was never trained on would have none.
    """
    mask = settings.builder in BIDIRECTIONAL
    if facts.content is not None:
        assert len(facts.content) == n_items + 1
        ids, hidden = settings.items == "ids+vectors", settings.content_hidden
        dropped = settings.id_dropout if ids else 0.0
        return ContentTable(facts, settings.item_features, hidden=hidden, ids=ids, id_dropout=dropped, mask=mask)
    if facts.codes is not None:
        assert len(facts.codes) == n_items + 1
        values = code_values(settings, n_items)
        return CodeTable(facts.codes, settings.item_features, values=values, tied=settings.tied, mask=mask)
    if facts.categories is not None:
        assert len(facts.categories) == n_items + 1
        return CategoryTable(facts.categories, settings.item_features, tied=settings.tied, mask=mask)
    bias = mask and settings.similarity == "dot"
    return IdTable(n_items, settings.item_features, tied=settings.tied, mask=mask, bias=bias)


def builder_name(build: Builder) -> str:
    """How settings name a builder from outside."""
    named = build if hasattr(build, "__qualname__") else type(build)
    return f"{named.__module__}:{named.__qualname__}"


def refuse_other_builder(settings: ModelSettings, encoder: Builder | None, *, whose: str) -> None:
    """A model can only be built by the builder that its settings name. The module may be another: what was trained
    in a script, as `__main__`, is opened by those who import it. `whose`: the sentence's subject."""
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
            "by model.builder, and docs/your-model.md shows one of your own."
        )
    given = builder_name(encoder)
    if not settings.encoder:
        raise SettingsError(
            f"{whose} has an encoder of segue's own, {settings.builder}, and not {given}: leave encoder= out."
        )
    if settings.encoder.rpartition(":")[2] != given.rpartition(":")[2]:
        raise SettingsError(f"{whose} has the encoder {settings.encoder}, and encoder= gives {given}: give that one.")
