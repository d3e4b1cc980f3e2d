"""Settings → a model, started from a generator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from segue.models.bert4rec import bert4rec
from segue.models.esasrec import esasrec
from segue.models.hstu import hstu, sasrec_meta
from segue.models.items import IdTable, make_items
from segue.models.sasrec import sasrec
from segue.models.seq2seq import seq2seq
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings

BUILDERS: dict[str, Callable[[ModelSettings, IdTable, torch.Generator], SequenceModel]] = {
    "sasrec": sasrec,
    "esasrec": esasrec,
    "bert4rec": bert4rec,
    "hstu": hstu,
    "sasrec-meta": sasrec_meta,
    "seq2seq": seq2seq,
}


def build_model(
    settings: ModelSettings, n_items: int, *, generator: torch.Generator, categories: np.ndarray | None = None
) -> SequenceModel:
    """A new model. `categories` [V + 1]: each item's, where `model.category` names a column of them.

    The caller's global random state is left as it was.
    """
    assert (categories is not None) == bool(settings.category)
    with torch.random.fork_rng(devices=[]):
        return BUILDERS[settings.builder](settings, make_items(settings, n_items, categories), generator)
