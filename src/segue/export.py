"""A run → one ONNX file: the graph from a window of events to a query and scores, and the facts that an answer needs.

The graph takes users' windows padded on the right with zeros, oldest events first: `items` [B, N] and `lengths` [B]; if
the model uses them also `times` [B, N] and `query_times` [B] in seconds, `values` [B, N], NaN for an event without one,
and `kinds` [B, N], indices of the names in the metadata. It returns `query` [B, Q] and `scores` [B, V + 1], whose
column 0 is padding. B is any number, N at most the model's length. Item-to-item counts are not in the graph: they are
an entry of the metadata, and the reader adds them to the scores.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from segue import folders
from segue.data.batch import Batch
from segue.errors import InputError, SettingsError
from segue.layers.packed import tensors
from segue.layers.padded import PaddedBatch
from segue.models.sequence import SequenceModel
from segue.recommend.recommender import Recommender
from segue.slim import (
    FORMAT,
    ITEM_COUNTS,
    METADATA,
    ExportedCounts,
    ExportFacts,
    SlimRecommender,
    graph_inputs,
    in_short,
)

OPSET = 17
INPUTS = ("items", "lengths", "times", "query_times", "values", "kinds")
OUTPUTS = ("query", "scores")
OF_EVENTS = ("items", "times", "values", "kinds")  # [B, N]; the others have one row for each user
STAGES = ("tracing the model", "writing the file", "comparing it with torch")
MOST_BYTES = 2_000_000_000  # of an ONNX file
MOST_DIFFERENCE = 1e-5  # between the graph's numbers and torch's, relative to their largest if that is above one
NOT_EXACT = "The index of the run is approximate; the file scores every item, so some of its answers may be better."


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an export."""

    file: str
    bytes: int
    items: int
    length: int
    """The newest events of a history that the graph encodes, at most."""
    inputs: list[str]
    outputs: list[str]
    difference: float
    """The largest difference between the graph's numbers and torch's in the comparison."""
    note: str | None = None


def export_onnx(
    recommender: Recommender, path: Path, *, progress: Callable[[str, int, int], None] | None = None
) -> Export:
    """Write the file and compare it with torch; if that fails, no file is left. `progress`: called with each stage, the
    number of stages done and of all."""
    notify = progress or (lambda *_: None)
    for name in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            raise SettingsError(f"An export needs {name}, which is not installed; run `pip install 'segue[onnx]'`.")
    import onnx

    model, facts = recommender.model, _export_facts(recommender)
    entries = {METADATA: msgspec.json.encode(facts)}
    if recommender.item_counts is not None:
        entries[ITEM_COUNTS] = msgspec.json.encode(ExportedCounts.of(recommender.item_counts))
    with folders.complete_file(path, option="--onnx") as staging:
        notify(STAGES[0], 0, len(STAGES))
        _write_graph(model, facts, staging, beside=entries)
        notify(STAGES[1], 1, len(STAGES))
        graph = onnx.load_model(staging)
        onnx.helper.set_model_props(graph, {name: entry.decode() for name, entry in entries.items()})
        onnx.save_model(graph, staging)
        notify(STAGES[2], 2, len(STAGES))
        slim, difference = _compare(model, staging)
        size = staging.stat().st_size
    exact = recommender.manifest.get("index", {}).get("kind", "exact") in ("exact", "codes")
    return Export(
        file=str(path),
        bytes=size,
        items=len(facts.ids),
        length=facts.length,
        inputs=slim.inputs,
        outputs=list(OUTPUTS),
        difference=difference,
        note=None if exact else NOT_EXACT,
    )


def _export_facts(recommender: Recommender) -> ExportFacts:
    table, model, manifest = recommender.vocabulary.table, recommender.model, recommender.manifest
    return ExportFacts(
        format=FORMAT,
        segue=version("segue"),
        recipe=manifest.get("recipe", ""),
        data=manifest.get("data", {}).get("digest", ""),
        length=model.length,
        window_step=model.window_step,
        seen=recommender.seen,
        ids=table["id"].to_list(),
        titles=table["title"].cast(pl.String).to_list() if "title" in table.columns else None,
        counts=recommender.counts[1:].tolist(),
        untrained=np.flatnonzero(recommender.answerable & (recommender.counts == 0)).tolist(),
        kinds=list(recommender.known.kinds.names),
        timed=recommender.known.timed,
        twins=_twins(model.item_vectors().detach().numpy()),
    )


def _twins(vectors: np.ndarray) -> dict[int, int]:
    """Items with the same vector [V + 1, D] as an item of a lower number → the lowest such number."""
    rows = np.ascontiguousarray(vectors).view(np.dtype((np.void, vectors.dtype.itemsize * vectors.shape[1])))[:, 0]
    _, first, inverse = np.unique(rows[1:], return_index=True, return_inverse=True)
    lowest, numbers = first[inverse] + 1, np.arange(1, len(rows))
    later = lowest < numbers
    return dict(zip(numbers[later].tolist(), lowest[later].tolist(), strict=True))


class _Graph(nn.Module):
    """The traced module: windows in, queries and scores out. Item vectors are constants of it."""

    vectors: Tensor

    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("vectors", model.item_vectors().detach())

    def forward(
        self, items: Tensor, lengths: Tensor, times: Tensor, query_times: Tensor, values: Tensor, kinds: Tensor
    ) -> tuple[Tensor, Tensor]:
        query = self.model.query(PaddedBatch.of(items, lengths, times, query_times, values, kinds))
        return query, self.model.similarity.score(query, self.vectors)


def _refuse_large(weights: int, entries: dict[str, bytes]) -> None:
    """Refuse weights of so many bytes that, with the metadata, do not fit into one file."""
    size, counts = weights + sum(map(len, entries.values())), len(entries.get(ITEM_COUNTS, b""))
    if size > MOST_BYTES:
        share = (
            f" Item-to-item counts take {counts:,} of them: train with a smaller counts.neighbours." if counts else ""
        )
        raise InputError(
            f"This run cannot be exported: it has {size:,} bytes, an ONNX file {MOST_BYTES:,} at most.{share}"
        )


def _write_graph(model: SequenceModel, facts: ExportFacts, path: Path, *, beside: dict[str, bytes]) -> None:
    """Write the graph alone, as an ONNX file. `beside`: the metadata that it will get.

    This uses torch's older exporter, which traces: the newer one takes twenty times as long, needs more libraries and
    unrolls loops over events. The comparison with torch catches what a trace gets wrong.
    """
    with torch.no_grad():
        graph = _Graph(model).eval()
    _refuse_large(sum(tensor.nbytes for tensor in graph.state_dict().values()), beside)
    users, events = {0: "users"}, {0: "users", 1: "events"}
    windows = _random_windows(np.random.default_rng(0), [min(3, facts.length), 1], facts)
    feeds = graph_inputs(windows)
    try:
        with warnings.catch_warnings(), _no_output(), torch.no_grad():
            warnings.simplefilter("ignore")  # of deprecation, and of numbers that become constants
            torch.onnx.export(
                graph,
                tuple(torch.from_numpy(feeds[name]) for name in INPUTS),
                str(path),
                dynamo=False,
                opset_version=OPSET,
                input_names=list(INPUTS),
                output_names=list(OUTPUTS),
                dynamic_axes={name: events if name in OF_EVENTS else users for name in (*INPUTS, *OUTPUTS)},
                do_constant_folding=False,  # it would fold a second copy of a tied item table
            )
    except OSError:  # an error of the disk, not of the encoder
        raise
    except Exception as error:  # an encoder may raise anything
        raise InputError(
            f"This run cannot be exported: no graph can be made of its encoder ({in_short(error)})."
        ) from error


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
    """Silence standard output and error: the exporter writes to them from C++ and, if it fails, prints its graph."""
    sys.stdout.flush()
    sys.stderr.flush()
    null, saved = os.open(os.devnull, os.O_WRONLY), [os.dup(1), os.dup(2)]
    try:
        os.dup2(null, 1)
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for handle in (null, *saved):
            os.close(handle)


def _compare(model: SequenceModel, path: Path) -> tuple[SlimRecommender, float]:
    """Open the file; its numbers for random windows may differ from torch's by at most `MOST_DIFFERENCE`. Returns the
    largest difference, too."""
    difference, rng = 0.0, np.random.default_rng(0)
    try:
        slim = SlimRecommender.open(path, threads=1)
        length = slim.facts.length
        some = rng.integers(1, length + 1, 5).tolist()
        for lengths in ([1], [length], [length, 1], [1, *some, length]):
            windows = _random_windows(rng, lengths, slim.facts)
            with torch.inference_mode():
                query = model.query(tensors(windows))
                expected = query.numpy(), model.score_all(query)[:, 1:].numpy()
            queries, scores = slim.run(windows)
            for actual, reference in zip((queries, scores[:, 1:]), expected, strict=True):
                scale = np.maximum(1, np.abs(reference).max(axis=1, initial=0))
                difference = max(difference, float((np.abs(actual - reference).max(axis=1, initial=0) / scale).max()))
    except Exception as error:  # onnxruntime's errors have no common class of their own
        raise InputError(f"This run cannot be exported: its graph fails ({in_short(error)}).") from error
    if not difference <= MOST_DIFFERENCE:
        raise InputError(
            f"This run cannot be exported: the graph's numbers differ from torch's by {difference:.1e}, more than "
            f"rounding explains ({MOST_DIFFERENCE:.0e}); its encoder does something that a trace misses."
        )
    return slim, difference


def _random_windows(rng: np.random.Generator, lengths: list[int], facts: ExportFacts) -> Batch:
    """Windows of random items and kinds, some with values, with gaps of seconds to years, also before the query."""
    events = sum(lengths)
    gaps = np.exp(rng.uniform(0, np.log(1e8), events + len(lengths))).astype(np.int64)
    times, ends = np.cumsum(gaps), np.cumsum(np.array(lengths) + 1) - 1  # a query follows each user's events
    values = rng.normal(3, 2, events).astype(np.float32)
    return Batch(
        items=rng.integers(1, len(facts.ids) + 1, events),
        times=np.delete(times, ends),
        lengths=np.array(lengths, dtype=np.int64),
        query_times=times[ends],
        kinds=rng.integers(0, len(facts.kinds) + 1, events),
        values=np.where(rng.random(events) < 0.2, np.float32(np.nan), values),
    )
