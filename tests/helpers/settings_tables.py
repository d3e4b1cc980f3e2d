"""Settings for tests, from keywords: `similarity__query_parts=2` is the key model.similarity.query_parts."""

from __future__ import annotations

import functools
from typing import Any

from segue.index.settings import AutoSettings, IndexSettings
from segue.kinds import decode, override, variants_of
from segue.models.encoders import ModelSettings
from segue.models.encoders.bert4rec import BERT4RecSettings
from segue.models.encoders.esasrec import ESASRecSettings
from segue.models.encoders.seq2seq import Seq2SeqSettings
from segue.objective.settings import ObjectiveSettings


def model_settings(**keys: Any) -> Any:
    """The section `model`, of the kind esasrec unless `kind` says otherwise. Which keys it has depends on its kind."""
    return _decoded(keys, ModelSettings, "model", ESASRecSettings())


def objective_settings(**keys: Any) -> ObjectiveSettings:
    """The section `objective`."""
    settings: ObjectiveSettings = _decoded(keys, ObjectiveSettings, "objective", None)
    return settings


def index_settings(**keys: Any) -> IndexSettings:
    """The section `index`."""
    settings: IndexSettings = _decoded(keys, IndexSettings, "index", AutoSettings())
    return settings


def _decoded(keys: dict[str, Any], annotation: Any, path: str, default: Any) -> Any:
    """The settings; they are immutable, so equal keys are decoded once."""
    items = tuple((key, type(value), value) for key, value in keys.items())  # by type, because True == 1
    try:
        return _decoded_once(items, annotation, path, default)
    except TypeError:  # a list or a table among the values
        return _decoded_once.__wrapped__(items, annotation, path, default)


@functools.cache
def _decoded_once(items: tuple[tuple[str, type, Any], ...], annotation: Any, path: str, default: Any) -> Any:
    keys = {key: value for key, _, value in items}
    table: dict[str, Any] = {}
    for key in sorted(keys, key=lambda key: (key.count("__"), key != "kind")):
        table = override(table, annotation, key.split("__"), keys[key], path=path, default=default)
    return decode(table, annotation, path=path, default=default)


BUILDERS = variants_of(ModelSettings)
"""The settings of every encoder, by kind."""
BIDIRECTIONAL = {kind for kind, settings in BUILDERS.items() if issubclass(settings, BERT4RecSettings)}
CONTINUING = {kind for kind, settings in BUILDERS.items() if issubclass(settings, Seq2SeqSettings)}
UNPLACED = {kind for kind, settings in BUILDERS.items() if "positions" not in settings.__struct_fields__} - CONTINUING
"""Encoders without positions and heads: recurrent and convolutional ones."""
