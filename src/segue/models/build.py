"""Settings → a model, started from a generator."""

from __future__ import annotations

from collections.abc import Callable

import torch

from segue.models.bert4rec import bert4rec
from segue.models.esasrec import esasrec
from segue.models.sasrec import sasrec
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings

BUILDERS: dict[str, Callable[[ModelSettings, int, torch.Generator], SequenceModel]] = {
    "sasrec": sasrec,
    "esasrec": esasrec,
    "bert4rec": bert4rec,
}


def build_model(settings: ModelSettings, n_items: int, *, generator: torch.Generator) -> SequenceModel:
    """A new model. The caller's global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        return BUILDERS[settings.builder](settings, n_items, generator)
