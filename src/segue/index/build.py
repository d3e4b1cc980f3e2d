"""A model's items → an index, or a file → an index: the one place that chooses among the kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from segue.data.batch import case_batches, newest
from segue.data.sequences import Sequences
from segue.data.split import Cases
from segue.errors import FolderError
from segue.index.codes import CodeIndex
from segue.index.exact import ExactIndex, read_header, reading
from segue.index.mol import Cut, MolIndex
from segue.index.search import RECALL_AT, ItemIndex, Recall, recall
from segue.index.settings import IndexSettings, faiss_installed, refuse_misfit
from segue.layers.packed import tensors
from segue.models.items.coded import CodeTable
from segue.models.sequence import SequenceModel
from segue.models.similarity.dot import Dot
from segue.models.similarity.mol import MixtureOfLogits

LEAST_APPROXIMATE = 70_000  # items from which on a question of one thread is answered at least twice as fast
LEAST_TWO_STAGE = 2 * Cut().averaged  # items of which the first stage leaves out at least half
SAMPLE, TOKENS = 400, 16384  # questions that say what an approximation finds, and events encoded at a time
SAMPLE_OF_ALL = 50  # questions to a mixture of logits: scoring all items takes long there

Chosen = Literal["exact", "approximate", "two-stage", "codes"]
Questions = Callable[[], Tensor | None]
"""Gives questions [N, Q] like those that will be asked, or None where there are none to draw."""


def build_index(
    model: SequenceModel,
    candidates: np.ndarray,
    settings: IndexSettings,
    *,
    questions: Questions | None = None,
) -> ItemIndex:
    """An index of the items that may be answered, `candidates` [V + 1] bool. `questions`: what an approximation is
    fitted to and measured on, where one is made."""
    mixture = model.similarity.mixture if isinstance(model.similarity, MixtureOfLogits) else None
    coded = isinstance(model.items, CodeTable)
    kind = _chosen(settings, int(np.count_nonzero(candidates[1:])), mixed=mixture is not None, coded=coded)
    with _evaluated(model):
        if kind == "codes":
            assert isinstance(model.items, CodeTable) and isinstance(model.similarity, Dot)
            table, normal = model.items, model.similarity.normal
            return CodeIndex.build(table.centroids, table.codes, candidates=candidates, normal=normal)
        vectors = model.item_vectors()
        index: ItemIndex
        if mixture is not None:
            index = MolIndex.build(mixture, vectors, candidates=candidates, cut=Cut() if kind == "two-stage" else None)
        elif kind == "exact":
            index = ExactIndex.build(vectors, candidates=candidates, settings=settings)
        else:
            from segue.index.approximate import ApproximateIndex

            asked = None if questions is None else questions()
            index = ApproximateIndex.build(vectors, candidates=candidates, settings=settings, questions=asked)
    return index


def _chosen(settings: IndexSettings, items: int, *, mixed: bool, coded: bool) -> Chosen:
    refuse_misfit(settings.kind, similarity="mol" if mixed else "dot", items="codes" if coded else "ids")
    if settings.kind != "auto":
        return settings.kind
    if mixed:
        return "two-stage" if items >= LEAST_TWO_STAGE else "exact"
    if coded:
        return "codes"
    return "approximate" if items >= LEAST_APPROXIMATE and faiss_installed() else "exact"


@contextmanager
def _evaluated(model: SequenceModel) -> Iterator[None]:
    """In evaluation mode without gradients; it is left in the mode it was in."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def sample_questions(model: SequenceModel, sequences: Sequences, cases: Cases) -> Tensor | None:
    """What a model asks in some cases, drawn by lot; None where no case has a history."""
    asking = np.flatnonzero(cases.targets > cases.starts)
    drawn = np.random.default_rng(1).permutation(asking)[:SAMPLE]
    some = Cases(users=cases.users[drawn], starts=cases.starts[drawn], targets=cases.targets[drawn])
    device = next(model.parameters()).device
    found = []
    with _evaluated(model):
        for _, histories in case_batches(sequences, some, tokens=TOKENS, most_rows=SAMPLE):
            windows = newest(histories, model.length, model.window_step)
            found.append(model.query(tensors(windows, device)).cpu())
    return torch.cat(found) if found else None


def index_facts(index: ItemIndex, questions: Questions) -> dict[str, Any]:
    """What a run's manifest says of its index: its kind, and what it finds if it does not look at everything."""
    if isinstance(index, ExactIndex):
        return {"kind": "exact"}
    if isinstance(index, CodeIndex):
        return {"kind": "codes"}
    if isinstance(index, MolIndex) and index.cut is None:
        return {"kind": "exact"}
    if isinstance(index, MolIndex):
        return {"kind": "two-stage", "recall": _mol_recall(index, questions)}
    from segue.index.approximate import ApproximateIndex

    assert isinstance(index, ApproximateIndex)
    return {"kind": "approximate", "lists": len(index.lists.centres), "probes": index.probes, "recall": index.recall}


def _mol_recall(index: MolIndex, questions: Questions) -> Recall | None:
    asked = questions()
    if asked is None:
        return None
    exact = MolIndex(index.mixture, index.items, index.numbers, n_items=index.n_items)
    judged = asked[:: max(1, len(asked) // SAMPLE_OF_ALL)]
    return Recall(k=RECALL_AT, share=recall(index, exact, judged, RECALL_AT), questions=len(judged))


def load_index(path: Path) -> ItemIndex:
    """Read what an index of any kind wrote with `save`."""
    with reading(path):
        kind = read_header(path, _Kind).kind
    if kind == "exact":
        return ExactIndex.load(path)
    if kind == "mol":
        return MolIndex.load(path)
    if kind == "codes":
        return CodeIndex.load(path)
    if kind != "approximate":
        raise FolderError(f"{path} holds an index of a kind {kind!r} that is not known here; was segue newer there?")
    if not faiss_installed():
        raise FolderError(
            f"{path} is an index for faiss, which is not installed; run `pip install 'segue[ann]'`, or train again "
            "with --set index.kind=exact."
        )
    from segue.index.approximate import ApproximateIndex

    return ApproximateIndex.load(path)


class _Kind(msgspec.Struct):
    """What every header says."""

    kind: str = "exact"
