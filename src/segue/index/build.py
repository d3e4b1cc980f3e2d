"""Build the index of a model, or load one from a file: the only module that chooses the kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from segue.data.batch import case_batches, newest
from segue.data.sequences import Sequences
from segue.data.split import Cases
from segue.errors import FolderError
from segue.index.codes import CodeIndex
from segue.index.exact import HEADER, ExactIndex
from segue.index.mol import Cut, MolIndex
from segue.index.search import RECALL_AT, ItemIndex, Recall, recall
from segue.index.settings import (
    ApproximateSettings,
    AutoSettings,
    ExactSettings,
    IndexSettings,
    faiss_installed,
    refuse_misfit,
)
from segue.kinds import kind_of
from segue.layers.packed import tensors
from segue.models.items.coded import CodeTable
from segue.models.sequence import SequenceModel
from segue.models.similarity.dot import Dot
from segue.models.similarity.mol import MixtureOfLogits

LEAST_APPROXIMATE = 70_000  # items from which on a query on one thread is at least twice as fast
LEAST_TWO_STAGE = 2 * Cut().averaged  # items of which the first stage drops at least half
SAMPLE, TOKENS = 400, 16384  # queries that measure recall, and events encoded at a time
SAMPLE_OF_ALL = 50  # queries for a mixture of logits, where scoring all items is slow

SampleQueries = Callable[[], Tensor | None]
"""Returns typical queries [N, Q], or None if there are none."""


def build_index(
    model: SequenceModel, candidates: np.ndarray, settings: IndexSettings, *, queries: SampleQueries | None = None
) -> ItemIndex:
    """An index of the `candidates` [V + 1] bool. An approximate index is fitted to and measured on `queries`."""
    mixture = model.similarity.mixture if isinstance(model.similarity, MixtureOfLogits) else None
    kind, coded = kind_of(settings), isinstance(model.items, CodeTable)
    refuse_misfit(settings, mixture=mixture is not None, codes=coded)
    if isinstance(settings, AutoSettings):
        items = int(np.count_nonzero(candidates[1:]))
        if mixture is not None:
            kind = "two-stage" if items >= LEAST_TWO_STAGE else "exact"
        elif coded:
            kind = "codes"
        else:
            kind = "approximate" if items >= LEAST_APPROXIMATE and faiss_installed() else "exact"
    with _evaluation_mode(model):
        if kind == "codes":
            assert isinstance(model.items, CodeTable) and isinstance(model.similarity, Dot)
            table, normal = model.items, model.similarity.normal
            return CodeIndex.build(table.centroids, table.codes, candidates=candidates, normal=normal)
        vectors = model.item_vectors()
        if mixture is not None:
            return MolIndex.build(mixture, vectors, candidates=candidates, cut=Cut() if kind == "two-stage" else None)
        assert isinstance(settings, ExactSettings)
        if kind == "exact":
            return ExactIndex.build(vectors, candidates=candidates, chunk=settings.chunk)
        from segue.index.approximate import ApproximateIndex

        assert isinstance(settings, ApproximateSettings | AutoSettings)
        sample = None if queries is None else queries()
        return ApproximateIndex.build(
            vectors, candidates=candidates, chunk=settings.chunk, least_recall=settings.recall, queries=sample
        )


@contextmanager
def _evaluation_mode(model: SequenceModel) -> Iterator[None]:
    """Put the model in evaluation mode, without gradients; restore its mode afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def sample_queries(model: SequenceModel, sequences: Sequences, cases: Cases) -> Tensor | None:
    """The model's queries of some random cases; None if no case has a history."""
    with_history = np.flatnonzero(cases.targets > cases.starts)
    rows = np.random.default_rng(1).permutation(with_history)[:SAMPLE]
    some = Cases(users=cases.users[rows], starts=cases.starts[rows], targets=cases.targets[rows])
    device = next(model.parameters()).device
    queries = []
    with _evaluation_mode(model):
        for _, histories in case_batches(sequences, some, tokens=TOKENS, most_rows=SAMPLE):
            windows = newest(histories, model.length, model.window_step)
            queries.append(model.query(tensors(windows, device)).cpu())
    return torch.cat(queries) if queries else None


def index_facts(index: ItemIndex, queries: SampleQueries) -> dict[str, Any]:
    """The entry of a run's manifest: the kind of its index and, if it is approximate, the recall."""
    if isinstance(index, CodeIndex):
        return {"kind": "codes"}
    if isinstance(index, MolIndex) and index.cut is not None:
        sample, measured = queries(), None
        if sample is not None:
            exact = MolIndex(index.mixture, index.items, index.numbers, n_items=index.n_items)
            some = sample[:: max(1, len(sample) // SAMPLE_OF_ALL)]
            measured = Recall(k=RECALL_AT, share=recall(index, exact, some, RECALL_AT), queries=len(some))
        return {"kind": "two-stage", "recall": measured}
    if isinstance(index, ExactIndex | MolIndex):
        return {"kind": "exact"}
    from segue.index.approximate import ApproximateIndex

    assert isinstance(index, ApproximateIndex)
    return {"kind": "approximate", "lists": len(index.lists.centres), "probes": index.probes, "recall": index.recall}


def load_index(path: Path) -> ItemIndex:
    """Load an index of any kind from a file that its `save` wrote."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = (file.metadata() or {})[HEADER]
        kind = msgspec.json.decode(header, type=dict[str, Any]).get("kind")
        if kind == "exact":
            return ExactIndex.of_file(load_file(path), header)
        if kind == "mol":
            return MolIndex.of_file(load_file(path), header)
        if kind == "codes":
            return CodeIndex.of_file(load_file(path), header)
        if kind != "approximate":
            raise FolderError(f"{path} holds an index of the unknown kind {kind!r}; update segue, or train again.")
        if not faiss_installed():
            raise FolderError(
                f"{path} needs faiss, which is not installed; run `pip install 'segue[ann]'`, or train again "
                "with --set index=exact."
            )
        from segue.index.approximate import ApproximateIndex

        return ApproximateIndex.of_file(load_file(path), header)
    except (OSError, KeyError, RuntimeError, msgspec.MsgspecError, safetensors.SafetensorError) as error:
        raise FolderError(f"{path} is not an index that can be read ({error}); train again.") from error
