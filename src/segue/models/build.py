"""Settings → a model, started from a generator."""

from __future__ import annotations

from collections.abc import Callable

import torch

from segue.models.esasrec import esasrec
from segue.models.sasrec import sasrec
from segue.models.sequence import SequenceModel, start_weights
from segue.models.settings import ModelSettings

BUILDERS: dict[str, Callable[[ModelSettings, int], SequenceModel]] = {"sasrec": sasrec, "esasrec": esasrec}


def build_model(settings: ModelSettings, n_items: int, *, generator: torch.Generator) -> SequenceModel:
    """A new model. The caller's global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        model = BUILDERS[settings.builder](settings, n_items)
    start_weights(model, generator)
    return model
