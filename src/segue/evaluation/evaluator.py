"""Cases → ranks, and how often each item was shown, for anything that scores items.

A scorer gets whole histories and returns a score for every item. Cases without a history are ranked by popularity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
from segue.evaluation.split_log import SplitLog
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
    """A model as a scorer. It scores in evaluation mode; the mode is restored afterwards."""

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

    ranks: np.ndarray  # int64, of all targets in the order of the cases
    shown: dict[int, np.ndarray]  # k → how often each item was among the first k [V + 1]
    entropy: dict[int, np.ndarray] = field(default_factory=dict)  # k → of each case's list [C], if it was measured


@dataclass(frozen=True, slots=True, eq=False)
class Evaluator:
    """The rules that are the same for every scorer."""

    sequences: Sequences
    counts: np.ndarray  # [V + 1] int64, training events
    seen: SeenRule
    target_time: bool = False
    """Whether scorers get the target's timestamp, which the report shows."""
    answerable: np.ndarray | None = None  # [V + 1] bool: the candidates; None: items with training events
    readable: np.ndarray | None = None  # [V + 1] bool: items left in histories; None: items with training events
    group: ProcessGroup = SINGLE_PROCESS
    """The processes that share the cases. Each scores whole batches, the same ones that a single process would make, so
    that every score is the same. All of them get all ranks."""

    @staticmethod
    def of_model(
        model: SequenceModel, log: SplitLog, *, seen: SeenRule, group: ProcessGroup = SINGLE_PROCESS
    ) -> Evaluator:
        """The rules for a model that was trained on the log's training part."""
        counts = log.training_counts
        known = model.answerable(counts)
        return Evaluator(
            sequences=log.sequences,
            counts=counts,
            seen=seen,
            target_time=model.target_time,
            answerable=known,
            readable=known,
            group=group,
        )

    @property
    def n_items(self) -> int:
        return len(self.counts) - 1

    def ranks(self, scorer: Scorer, cases: Cases, *, tokens: int = TOKENS) -> np.ndarray:
        """The ranks alone [C], by which the epoch is chosen."""
        return self.measure(scorer, cases, (), tokens=tokens).ranks

    def measure(
        self,
        scorer: Scorer,
        cases: Cases,
        ks: Sequence[int],
        *,
        tokens: int = TOKENS,
        progress: CasesDone | None = None,
    ) -> Measurement:
        """The ranks, and how often each item was shown at each depth."""
        ranks = np.zeros(len(cases), dtype=np.int64)
        shown = {k: np.zeros(self.n_items + 1, dtype=np.int64) for k in ks}
        for chosen, batch in self.batches(cases, tokens=tokens, progress=progress):
            scores = self.scores(scorer, batch, Exclusions.of_histories(batch) if self.seen == "excluded" else None)
            ranks[chosen] = ranks_among(scores, self.sequences.items[cases.targets[chosen]])
            lists = top_items(scores, max(ks)) if ks else np.empty((0, 0), dtype=np.int64)
            for k, times in shown.items():
                times += times_shown(lists, k, self.n_items)
        return Measurement(self.group.sum(ranks), {k: self.group.sum(times) for k, times in shown.items()})

    def batches(
        self, cases: Cases, *, tokens: int = TOKENS, progress: CasesDone | None = None
    ) -> Iterator[tuple[np.ndarray, Batch]]:
        """This process's cases, batch by batch: their indices and histories."""
        done, most_rows = 0, max(1, MOST_SCORES // len(self.counts))
        batches = case_batches(self.sequences, cases, tokens=tokens, most_rows=most_rows)
        for chosen, batch in self.group.shard(batches):
            yield chosen, batch
            done = min(len(cases), done + len(chosen) * self.group.size)
            if progress is not None:
                progress(done, len(cases))

    def scores(self, scorer: Scorer, histories: Batch, seen: Exclusions | None) -> Tensor:
        """The scores of whole histories [B, V + 1], with -inf for items that are no candidates.

        Like the service: unreadable items are left out of histories, and empty histories get popularity.
        """
        known = self.counts > 0 if self.answerable is None else self.answerable
        readable, some = self.readable_part(histories)
        scores = scorer.scores(readable) if some.any() else torch.empty(0, len(self.counts))
        assert scores.shape == (some.sum(), len(self.counts)), f"scores of shape {tuple(scores.shape)}"
        if not some.all():
            scored, scores = scores, torch.from_numpy(self.counts).float().repeat(len(some), 1)
            scores[torch.from_numpy(some)] = scored.cpu()
        return candidate_scores(scores, seen, known=known)

    def readable_part(self, histories: Batch) -> tuple[Batch, np.ndarray]:
        """The histories that a scorer gets, without unreadable items, and which of all histories they are [B] bool: one
        that is left without events has none."""
        histories = histories if self.target_time else replace(histories, query_times=None)
        readable = (self.counts > 0 if self.readable is None else self.readable)[histories.items]
        owner = np.repeat(np.arange(len(histories.lengths)), histories.lengths)
        lengths = np.bincount(owner[readable], minlength=len(histories.lengths))
        some = lengths > 0
        if readable.all() and some.all():
            return histories, some
        times = None if histories.query_times is None else histories.query_times[some]
        return histories.tokens(readable, lengths[some], query_times=times), some


def top_items(scores: Tensor, k: int) -> np.ndarray:
    """The k best candidates of each row [B, min(k, V + 1)], best first; 0 where there are fewer."""
    best, items = scores.topk(min(k, scores.shape[1]), dim=1)
    return items.masked_fill(best == -torch.inf, 0).cpu().numpy()
