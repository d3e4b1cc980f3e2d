"""Histories in item numbers → query vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch, take
from segue.layers.packed import tensors
from segue.models.sequence import SequenceModel
from segue.recommend.history import similar_lengths
from segue.recommend.kv_caches import KVCaches

TOKENS = 16384  # events encoded at a time
MOST_ROWS = 1024  # histories encoded, and then searched for, at a time

Queries = Iterator[tuple[np.ndarray, Tensor]]
"""Rows of a batch of histories [b], and their query vectors [b, Q]."""


def encode_queries(
    model: SequenceModel, histories: Batch, *, users: Sequence[str | None] | None = None, caches: KVCaches | None = None
) -> Queries:
    """Yield queries in groups of histories of similar length, so that memory is bounded; empty histories have none.
    With `caches`, only the new events of `users` [B] are encoded; a user of None is never cached."""
    for rows in similar_lengths(histories.lengths, model.length, tokens=TOKENS, most_rows=MOST_ROWS):
        windows = take(histories, rows, model.length, model.window_step)
        with torch.inference_mode():
            if caches is None or users is None:
                queries = model.query(tensors(windows))
            else:
                queries = caches.queries(windows, [users[row] for row in rows.tolist()])
        yield rows, queries
