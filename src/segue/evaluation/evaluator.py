"""Cases → ranks, for anything that scores items, and what was shown to users.

A scorer gets whole histories and returns a score for every item. Cases without a history are ranked by popularity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch, case_batches, newest
from segue.data.sequences import Sequences
from segue.data.split import Cases
from segue.evaluation.metrics import times_shown
from segue.evaluation.ranks import Exclusions, candidate_scores, ranks_among
from segue.evaluation.settings import SeenRule
from segue.layers.packed import tensors
from segue.models.sequence import SequenceModel
from segue.process_group import SINGLE_PROCESS, ProcessGroup

MOST_SCORES = 8_000_000  # scores in memory together: 32 MB
TOKENS = 32_768  # events of histories in a batch

CasesDone = Callable[[int, int], None]
"""Progress: called with the number of cases measured, and of all cases."""


class Scorer(Protocol):
    """Anything that can be evaluated."""

    def scores(self, histories: Batch) -> Tensor:
        """A finite score for every item [B, V + 1] float32; column 0 is padding and ignored.

        Every history is whole and has at least one event. The scorer cuts it to its own length.
        """
        ...


class ModelScorer:
    """A model as a scorer. It scores in evaluation mode and is left in the mode it was in."""

    def __init__(self, model: SequenceModel) -> None:
        self.model = model

    def scores(self, histories: Batch) -> Tensor:
        training = self.model.training
        self.model.eval()
        device = next(self.model.parameters()).device
        with torch.inference_mode():
            windows = newest(histories, self.model.length, self.model.window_step)
            scores = self.model.score_all(self.model.query(tensors(windows, device)))
        self.model.train(training)
        return scores


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """The results of one scorer on some cases."""

    ranks: np.ndarray  # [C] int64, in the order of the cases
    shown: dict[int, np.ndarray]  # k → how often each item was among the first k [V + 1]


@dataclass(frozen=True, slots=True, eq=False)
class Evaluator:
    """The rules that are the same for every scorer."""

    sequences: Sequences
    counts: np.ndarray  # [V + 1] int64, training events
    seen: SeenRule
    target_time: bool = False
    """Whether scorers get the target's timestamp. If so, the report says it."""
    answerable: np.ndarray | None = None  # [V + 1] bool: the candidates; None: items with training events
    readable: np.ndarray | None = None  # [V + 1] bool: items left in histories; None: items with training events
    group: ProcessGroup = SINGLE_PROCESS
    """The processes that share the cases. Each scores whole batches, the same ones that a single process would make, so
    that every score is the same. All of them get all ranks."""

    @property
    def n_items(self) -> int:
        return len(self.counts) - 1

    def ranks(self, scorer: Scorer, cases: Cases, *, tokens: int = TOKENS) -> np.ndarray:
        """The ranks alone [C], which is what choosing an epoch needs."""
        result = np.zeros(len(cases), dtype=np.int64)
        for chosen, scores, targets in self._scored_cases(scorer, cases, tokens):
            result[chosen] = ranks_among(scores, targets)
        return self.group.sum(result)

    def measure(
        self, scorer: Scorer, cases: Cases, ks: Sequence[int], *, progress: CasesDone | None = None
    ) -> Measurement:
        """The ranks, and how often each item was shown at each depth."""
        ranks = np.zeros(len(cases), dtype=np.int64)
        shown = {k: np.zeros(self.n_items + 1, dtype=np.int64) for k in ks}
        done = 0
        for chosen, scores, targets in self._scored_cases(scorer, cases, TOKENS):
            ranks[chosen] = ranks_among(scores, targets)
            lists = top_items(scores, max(ks))
            for k, times in shown.items():
                times += times_shown(lists, k, self.n_items)
            done = min(len(cases), done + len(chosen) * self.group.size)
            if progress is not None:
                progress(done, len(cases))
        return Measurement(self.group.sum(ranks), {k: self.group.sum(times) for k, times in shown.items()})

    def _scored_cases(
        self, scorer: Scorer, cases: Cases, tokens: int
    ) -> Iterator[tuple[np.ndarray, Tensor, np.ndarray]]:
        """(indices, candidate scores, targets) of this process's cases, batch by batch."""
        most_rows = max(1, MOST_SCORES // len(self.counts))
        batches = case_batches(self.sequences, cases, tokens=tokens, most_rows=most_rows)
        for chosen, batch in self.group.shard(batches):
            seen = Exclusions.of_histories(batch) if self.seen == "excluded" else None
            targets = self.sequences.items[cases.targets[chosen]].astype(np.int64)
            yield chosen, self.scores(scorer, batch, seen), targets

    def scores(self, scorer: Scorer, histories: Batch, seen: Exclusions | None) -> Tensor:
        """The scores of whole histories [B, V + 1], with -inf for items that are no candidates."""
        scores = self._all_scores(scorer, histories if self.target_time else replace(histories, query_times=None))
        return candidate_scores(scores, seen, known=self.counts > 0 if self.answerable is None else self.answerable)

    def _all_scores(self, scorer: Scorer, histories: Batch) -> Tensor:
        """Like the service: unreadable items are left out of histories, and empty histories get popularity."""
        readable = (self.counts > 0 if self.readable is None else self.readable)[histories.items]
        owner = np.repeat(np.arange(len(histories.lengths)), histories.lengths)
        lengths = np.bincount(owner[readable], minlength=len(histories.lengths))
        some = lengths > 0
        if not readable.all() or not some.all():
            times = None if histories.query_times is None else histories.query_times[some]
            histories = histories.tokens(readable, lengths[some], query_times=times)
        scores = scorer.scores(histories) if some.any() else torch.empty(0, len(self.counts))
        assert scores.shape == (some.sum(), len(self.counts)), f"scores of shape {tuple(scores.shape)}"
        if some.all():
            return scores
        result = torch.from_numpy(self.counts).float().repeat(len(some), 1)
        result[torch.from_numpy(some)] = scores.cpu()
        return result


def top_items(scores: Tensor, k: int) -> np.ndarray:
    """The k best candidates of each row [B, min(k, V + 1)], best first; 0 where there are fewer."""
    best, items = scores.topk(min(k, scores.shape[1]), dim=1)
    return items.masked_fill(best == -torch.inf, 0).cpu().numpy()
