"""One evaluator for everything that scores: cases in, ranks and what was shown out.

Whoever is measured gets whole histories and returns a score for every item. Cases without any history are answered
by popularity, whoever is measured.
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
from segue.evaluation.metrics import shown
from segue.evaluation.ranks import Exclusions, candidates, ranks_among
from segue.evaluation.settings import SeenRule
from segue.layers.packed import tensors
from segue.models.sequence import SequenceModel
from segue.process_group import SINGLE_PROCESS, ProcessGroup

MOST_SCORES = 8_000_000  # scores held at a time: 32 MB
TOKENS = 32_768  # events of histories in a batch

Progress = Callable[[int, int], None]
"""Told how many cases are done, and of how many."""


class Scorer(Protocol):
    """Anything that can be measured."""

    def scores(self, histories: Batch) -> Tensor:
        """A finite score for every item [B, V + 1] float32; column 0 is padding and ignored.

        Every history is whole and has at least one event; a scorer cuts to its own length.
        """
        ...


class ModelScorer:
    """A model as a scorer. It is measured in evaluation mode, and left in the mode it was in."""

    def __init__(self, model: SequenceModel) -> None:
        self.model = model

    def scores(self, histories: Batch) -> Tensor:
        training = self.model.training
        self.model.eval()
        device = next(self.model.parameters()).device
        with torch.inference_mode():
            windows = newest(histories, self.model.length, self.model.window_step)
            queries = self.model.query(tensors(windows, device))
            scores = self.model.score_all(queries)
        self.model.train(training)
        return scores


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What one scorer did on some cases."""

    ranks: np.ndarray  # [C] int64, in the order of the cases
    shown: dict[int, np.ndarray]  # k → how often each item was among the first k [V + 1]


@dataclass(frozen=True, slots=True, eq=False)
class Evaluator:
    """The rules that hold for everyone measured."""

    sequences: Sequences
    counts: np.ndarray  # [V + 1] int64, training events; an item without any is no candidate …
    seen: SeenRule
    target_time: bool = False
    """Whether scorers are told the moment of the answer. They are not, unless the report says so."""
    answerable: np.ndarray | None = None  # [V + 1] bool: … unless this says that it is one
    readable: np.ndarray | None = None  # [V + 1] bool: what is left in histories; None: what was trained on
    group: ProcessGroup = SINGLE_PROCESS
    """The processes that share the cases. Each asks about whole batches, the same that one process would make, so that
    every score is the same; and each knows all ranks in the end."""

    @property
    def n_items(self) -> int:
        return len(self.counts) - 1

    def ranks(self, scorer: Scorer, cases: Cases, *, tokens: int = TOKENS) -> np.ndarray:
        """The ranks alone [C], which is what choosing an epoch needs."""
        result = np.zeros(len(cases), dtype=np.int64)
        for chosen, left, targets in self._answers(scorer, cases, tokens):
            result[chosen] = ranks_among(left, targets)
        return self.group.sum(result)

    def measure(
        self, scorer: Scorer, cases: Cases, ks: Sequence[int], *, tokens: int = TOKENS, progress: Progress | None = None
    ) -> Measured:
        """Ranks, and how often each item was shown at each depth."""
        result = Measured(
            ranks=np.zeros(len(cases), dtype=np.int64),
            shown={k: np.zeros(self.n_items + 1, dtype=np.int64) for k in ks},
        )
        done = 0
        for chosen, left, targets in self._answers(scorer, cases, tokens):
            result.ranks[chosen] = ranks_among(left, targets)
            lists = best(left, max(ks))
            for k, times in result.shown.items():
                times += shown(lists, k, self.n_items)
            done = min(len(cases), done + len(chosen) * self.group.size)
            if progress is not None:
                progress(done, len(cases))
        shown_by_all = {k: self.group.sum(times) for k, times in result.shown.items()}
        return Measured(ranks=self.group.sum(result.ranks), shown=shown_by_all)

    def _answers(self, scorer: Scorer, cases: Cases, tokens: int) -> Iterator[tuple[np.ndarray, Tensor, np.ndarray]]:
        """(case indexes, their scores with -inf for what is no candidate, their targets) until all are done, those of
        other processes left out."""
        most_rows = max(1, MOST_SCORES // len(self.counts))
        batches = case_batches(self.sequences, cases, tokens=tokens, most_rows=most_rows)
        for chosen, batch in self.group.shard(batches):
            seen = Exclusions.of_histories(batch) if self.seen == "excluded" else None
            targets = self.sequences.items[cases.targets[chosen]].astype(np.int64)
            yield chosen, self.left(scorer, batch, seen), targets

    def left(self, scorer: Scorer, histories: Batch, seen: Exclusions | None) -> Tensor:
        """What may be answered to whole histories: scores [B, V + 1] with -inf for what is no candidate."""
        scores = self._scores(scorer, histories if self.target_time else replace(histories, query_times=None))
        known = self.counts > 0 if self.answerable is None else self.answerable
        return candidates(scores, seen, known=known)

    def _scores(self, scorer: Scorer, histories: Batch) -> Tensor:
        """As the service answers: items that are not known are left out of histories, and what is then empty gets
        popularity."""
        known = (self.counts > 0 if self.readable is None else self.readable)[histories.items]
        owner = np.repeat(np.arange(len(histories.lengths)), histories.lengths)
        lengths = np.bincount(owner[known], minlength=len(histories.lengths))
        some = lengths > 0
        if not known.all() or not some.all():
            query_times = None if histories.query_times is None else histories.query_times[some]
            histories = histories.tokens(known, lengths[some], query_times=query_times)
        scores = scorer.scores(histories) if some.any() else torch.empty(0, len(self.counts))
        assert scores.shape == (some.sum(), len(self.counts)), f"scores of shape {tuple(scores.shape)}"
        if some.all():
            return scores
        result = torch.from_numpy(self.counts).float().repeat(len(some), 1)
        result[torch.from_numpy(some)] = scores.cpu()
        return result


def best(left: Tensor, k: int) -> np.ndarray:
    """The k best candidates of each row [B, min(k, V + 1)], best first; 0 where there are fewer."""
    scores, items = left.topk(min(k, left.shape[1]), dim=1)
    return items.masked_fill(scores == -torch.inf, 0).cpu().numpy()
