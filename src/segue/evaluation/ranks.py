"""Scores → ranks over the full catalogue.

A rank is the number of candidates that score at least as high as the target, itself included. So a tie counts against
the scorer (pessimistic), and a constant scorer gets nothing. Candidates are the items known to training that the seen
filter leaves; a target that is not among them is a miss.
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
    """Items that are no candidates of some queries: items[i] is none of query rows[i]. Repeats are harmless."""

    rows: np.ndarray  # [N] int64
    items: np.ndarray  # [N] int64

    @staticmethod
    def of_histories(batch: Batch) -> Exclusions:
        """Every item of the whole histories, also those before the model's window."""
        return Exclusions(rows=np.repeat(np.arange(len(batch.lengths)), batch.lengths), items=batch.items)


def candidate_scores(scores: Tensor, seen: Exclusions | None = None, *, known: np.ndarray | None = None) -> Tensor:
    """A copy of the scores [B, V + 1] with -inf for items that are no candidates; column 0 is padding.

    `known` [V + 1]: True for the candidates. Scores that are not finite are refused: every comparison with NaN is
    false, which would look like rank 1.
    """
    items = scores[:, 1:]
    if items.numel():
        extremes = torch.stack((items.amin(dim=1), items.amax(dim=1)))  # NaN if any is; faster than testing each score
        if not torch.isfinite(extremes).all():
            bad = int((~torch.isfinite(items)).sum())
            raise TrainingError(
                f"{bad} of {items.numel()} scores are not finite numbers, so nothing can be ranked. "
                "The model has diverged: train it again with a lower train.learning_rate."
            )
    barred = torch.zeros(scores.shape[1], dtype=scores.dtype)
    if known is not None:
        barred[torch.from_numpy(~np.asarray(known, dtype=bool))] = -torch.inf
    result = scores + barred.to(scores.device)  # [B, V + 1]; adding is three times as fast as masked_fill
    result[:, PADDING] = -torch.inf
    if seen is not None and len(seen.rows):
        rows, columns = (torch.from_numpy(array).to(scores.device) for array in (seen.rows, seen.items))
        result[rows, columns] = -torch.inf
    return result


def ranks_among(scores: Tensor, targets: np.ndarray) -> np.ndarray:
    """The targets' ranks [B] int64 by the scores that `candidate_scores` returned: 1 the best, MISS for no candidate.

    The target's score is read from the same tensor: a second dot product could differ in its last bit.
    """
    columns = torch.from_numpy(np.asarray(targets, dtype=np.int64)).to(scores.device)
    own = scores.gather(1, columns[:, None])  # [B, 1]
    counts = (scores >= own).sum(dim=1, dtype=torch.int32).long()  # summing into int64 is six times slower
    return counts.masked_fill(own[:, 0] == -torch.inf, MISS).cpu().numpy()


def ranks_within(scores: Tensor, rows: np.ndarray, targets: np.ndarray, depth: int) -> np.ndarray:
    """Ranks [N] of several targets in a row, target i in row rows[i]. Up to `depth` they equal `ranks_among`.

    A rank beyond it is depth + 1, so that the best depth + 1 scores of a row are enough.
    """
    line, columns = (torch.from_numpy(np.asarray(one, dtype=np.int64)).to(scores.device) for one in (rows, targets))
    own = scores[line, columns]  # [N]
    best = scores.topk(min(depth + 1, scores.shape[1]), dim=1).values  # [B, depth + 1]
    counts = torch.zeros_like(line)
    for column in best.T:  # not all at once: a user may have many targets
        counts += column[line] >= own
    return counts.masked_fill(own == -torch.inf, MISS).cpu().numpy()
