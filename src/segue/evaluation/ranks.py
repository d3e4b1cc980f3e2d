"""Scores → ranks, by counting over the full catalogue.

A rank is the number of candidates that score at least as high as the target, itself included, so a tie counts
against it (pessimistic) and a constant scorer earns nothing. Candidates are the items known to training that the
seen filter leaves; a target that is none of them is a miss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch
from segue.data.vocabulary import PADDING
from segue.errors import TrainingError

MISS = 1 << 40  # the rank of a target that is no candidate: beyond any catalogue, and exact in float64


@dataclass(frozen=True, slots=True, eq=False)
class Exclusions:
    """Items that are no answer to some question: items[i] is none to question rows[i]. Repeats are harmless."""

    rows: np.ndarray  # [N] int64
    items: np.ndarray  # [N] int64

    @staticmethod
    def of_histories(batch: Batch) -> Exclusions:
        """Every item of the whole history, older ones than the model looks at included."""
        return Exclusions(rows=np.repeat(np.arange(len(batch.lengths)), batch.lengths), items=batch.items)


def ranks(
    scores: Tensor, targets: np.ndarray, seen: Exclusions | None = None, *, known: np.ndarray | None = None
) -> np.ndarray:
    """The targets' ranks [B] int64, 1 the best, MISS where the target is no candidate.

    `scores` [B, V + 1] stay as they are; column 0 is padding and means nothing. `known` [V + 1]: True where
    training has met the item.
    """
    return ranks_among(candidates(scores, seen, known=known), targets)


def candidates(scores: Tensor, seen: Exclusions | None = None, *, known: np.ndarray | None = None) -> Tensor:
    """A copy of the scores [B, V + 1] with -inf for everything that is no candidate."""
    check_finite(scores)
    barred = torch.zeros(scores.shape[1], dtype=scores.dtype)
    if known is not None:
        barred[torch.from_numpy(~np.asarray(known, dtype=bool))] = -torch.inf
    left = scores + barred.to(scores.device)  # [B, V + 1]; adding is three times as fast as masked_fill
    left[:, PADDING] = -torch.inf  # whatever the scorer left there
    if seen is not None and len(seen.rows):
        rows, items = (torch.from_numpy(array).to(scores.device) for array in (seen.rows, seen.items))
        left[rows, items] = -torch.inf
    return left


def ranks_among(left: Tensor, targets: np.ndarray) -> np.ndarray:
    """Ranks [B] of targets among what `candidates` left.

    The target's score is read from the same tensor: a second dot product could differ in its last bit and turn a
    tie into a loss.
    """
    wanted = torch.from_numpy(np.asarray(targets, dtype=np.int64)).to(left.device)
    own = left.gather(1, wanted[:, None])  # [B, 1]
    counted = (left >= own).sum(dim=1, dtype=torch.int32).long()  # summing into int64 is six times slower
    return counted.masked_fill(own[:, 0] == -torch.inf, MISS).cpu().numpy()


def ranks_within(left: Tensor, rows: np.ndarray, targets: np.ndarray, depth: int) -> np.ndarray:
    """Ranks [N] of several targets a row, target i in row rows[i], as `ranks_among` has them up to `depth`.

    A rank beyond is depth + 1: the best depth + 1 scores tell everything else.
    """
    line, wanted = (torch.from_numpy(np.asarray(index, dtype=np.int64)).to(left.device) for index in (rows, targets))
    own = left[line, wanted]  # [N]
    best = left.topk(min(depth + 1, left.shape[1]), dim=1).values  # [B, depth + 1]
    counted = torch.zeros_like(line)
    for column in best.T:  # not all at once: a user may have many targets
        counted += column[line] >= own
    return counted.masked_fill(own == -torch.inf, MISS).cpu().numpy()


def check_finite(scores: Tensor) -> None:
    """Refuse scores that cannot be ranked: every comparison with NaN is false, which would look like rank 1."""
    items = scores[:, 1:]
    if not items.numel():
        return
    ends = torch.stack((items.amin(dim=1), items.amax(dim=1)))  # NaN if any is; far faster than asking each score
    if not torch.isfinite(ends).all():
        bad = int((~torch.isfinite(items)).sum())
        raise TrainingError(
            f"{bad} of {items.numel()} scores are not finite numbers, so nothing can be ranked. "
            "The model has diverged: train it again with a lower train.learning_rate."
        )
