"""A run → one ONNX file: the graph from a window of events to a question and scores, and what a runtime must know.

The graph takes users' windows as rectangles, oldest events first and zeros after a user's own: `items` [B, N] and
`lengths` [B]; where the model looks at them also `times` [B, N] and `query_times` [B], in seconds, `values` [B, N], nan
where there is none, and `kinds` [B, N], numbers of the names in the metadata. It gives `query` [B, Q] and `scores`
[B, V + 1], column 0 meaning nothing. B is any number, N at most the model's length.
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
from segue.slim import FORMAT, METADATA, Facts, SlimRecommender, graph_inputs, in_short

OPSET = 17
INPUTS = ("items", "lengths", "times", "query_times", "values", "kinds")
OUTPUTS = ("query", "scores")
STAGES = ("tracing the model", "writing the file", "comparing it with torch")
MOST_BYTES = 2_000_000_000  # of an ONNX file
MOST_DIFFERENCE = 1e-5  # between the graph's numbers and torch's; where the largest of them is above one, its share
NOT_EXACT = "The run looks its answers up approximately; from the file every item is scored, so some may be better."


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    file: str
    bytes: int
    items: int
    length: int
    """Newest events of a history that the graph takes."""
    inputs: list[str]
    outputs: list[str]
    difference: float
    """The largest between the graph's numbers and torch's that the check met."""
    note: str | None = None


def export_onnx(
    recommender: Recommender, path: Path, *, progress: Callable[[str, int, int], None] | None = None
) -> Export:
    """Write the file, complete and compared with torch, or nothing. `progress`: told of each stage, how many are done
    and of how many."""

    def begin(stage: int) -> None:
        if progress is not None:
            progress(STAGES[stage], stage, len(STAGES))

    for name in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            raise SettingsError(f"An export needs {name}, which is not installed; run `pip install 'segue[onnx]'`.")
    model, facts = recommender.model, _facts_of(recommender)
    with folders.complete_file(path, option="--onnx") as staging:
        begin(0)
        _write_graph(model, facts, staging)
        begin(1)
        _add_facts(facts, staging)
        begin(2)
        made, difference = _checked(model, staging)
        size = staging.stat().st_size
    exact = recommender.manifest.get("index", {}).get("kind", "exact") in ("exact", "codes")
    return Export(
        file=str(path),
        bytes=size,
        items=len(facts.ids),
        length=facts.length,
        inputs=made.inputs,
        outputs=list(OUTPUTS),
        difference=difference,
        note=None if exact else NOT_EXACT,
    )


def _facts_of(recommender: Recommender) -> Facts:
    table, model, manifest = recommender.vocabulary.table, recommender.model, recommender.manifest
    return Facts(
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
    """Items whose vector [V + 1, D] an item with a lower number has → the lowest such number."""
    rows = np.ascontiguousarray(vectors).view(np.dtype((np.void, vectors.dtype.itemsize * vectors.shape[1])))[:, 0]
    _, first, which = np.unique(rows[1:], return_index=True, return_inverse=True)
    lowest, numbers = first[which] + 1, np.arange(1, len(rows))
    later = lowest < numbers
    return dict(zip(numbers[later].tolist(), lowest[later].tolist(), strict=True))


class _Graph(nn.Module):
    """What is traced: windows in, questions and scores out. The items' side is made once, here."""

    vectors: Tensor

    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("vectors", model.item_vectors().detach())

    def forward(
        self, items: Tensor, lengths: Tensor, times: Tensor, query_times: Tensor, values: Tensor, kinds: Tensor
    ) -> tuple[Tensor, Tensor]:
        question = self.model.query(PaddedBatch.of(items, lengths, times, query_times, values, kinds))
        return question, self.model.similarity.score(question, self.vectors)


def _write_graph(model: SequenceModel, facts: Facts, path: Path) -> None:
    """The graph alone, as an ONNX file.

    By torch's exporter that traces, though it is the older one: the newer takes twenty times as long, needs more
    libraries and takes loops over events apart. What a trace could get wrong, the comparison with torch sees.
    """
    with torch.no_grad():
        graph = _Graph(model).eval()
    size = sum(tensor.nbytes for tensor in graph.state_dict().values())
    if size > MOST_BYTES:
        raise InputError(f"This run cannot be exported: it has {size:,} bytes, an ONNX file {MOST_BYTES:,} at most.")
    users, events = {0: "users"}, {0: "users", 1: "events"}
    windows = _random_windows(np.random.default_rng(0), [min(3, facts.length), 1], facts)
    feeds = graph_inputs(windows)
    try:
        with warnings.catch_warnings(), _no_output(), torch.no_grad():
            warnings.simplefilter("ignore")  # it calls itself outdated, and warns of numbers that are constants here
            torch.onnx.export(
                graph,
                tuple(torch.from_numpy(feeds[name]) for name in INPUTS),
                str(path),
                dynamo=False,
                opset_version=OPSET,
                input_names=list(INPUTS),
                output_names=list(OUTPUTS),
                dynamic_axes={
                    "items": events,
                    "lengths": users,
                    "times": events,
                    "query_times": users,
                    "values": events,
                    "kinds": events,
                    "query": users,
                    "scores": users,
                },
                do_constant_folding=False,  # it would fold a second copy of a tied item table
            )
    except OSError:  # what the disk refuses is no fault of the encoder
        raise
    except Exception as error:  # which may fail in any way of its own
        raise InputError(
            f"This run cannot be exported: no graph can be made of its encoder ({in_short(error)})."
        ) from error


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
    """Nothing is written on the terminal: the exporter thinks aloud from outside Python, and where it fails it writes
    its whole graph to standard output."""
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere, kept = os.open(os.devnull, os.O_WRONLY), [os.dup(1), os.dup(2)]
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for handle in (nowhere, *kept):
            os.close(handle)


def _add_facts(facts: Facts, path: Path) -> None:
    """Put into the file's metadata what a graph cannot say."""
    import onnx

    model = onnx.load_model(path)
    onnx.helper.set_model_props(model, {METADATA: msgspec.json.encode(facts).decode()})
    onnx.save_model(model, path)


def _checked(model: SequenceModel, path: Path) -> tuple[SlimRecommender, float]:
    """What the file answers with, and how far its numbers are from torch's: too far is refused."""
    try:
        made = SlimRecommender.open(path, threads=1)
        difference = _difference(model, made)
    except Exception as error:  # onnxruntime's errors have no common class of their own
        raise InputError(f"This run cannot be exported: its graph fails ({in_short(error)}).") from error
    if not difference <= MOST_DIFFERENCE:
        raise InputError(
            f"This run cannot be exported: the graph's numbers differ from torch's by {difference:.1e}, more than "
            f"rounding explains ({MOST_DIFFERENCE:.0e}); its encoder does something that a trace misses."
        )
    return made, difference


def _difference(model: SequenceModel, made: SlimRecommender) -> float:
    """How far the file's numbers are from torch's over random windows."""
    length, rng, worst = made.facts.length, np.random.default_rng(0), 0.0
    some = rng.integers(1, length + 1, 5).tolist()
    for lengths in ([1], [length], [length, 1], [1, *some, length]):
        windows = _random_windows(rng, lengths, made.facts)
        with torch.inference_mode():
            question = model.query(tensors(windows))
            expected = question.numpy(), model.score_all(question)[:, 1:].numpy()
        questions, scores = made.run(windows)
        for found, wanted in zip((questions, scores[:, 1:]), expected, strict=True):
            most = np.maximum(1, np.abs(wanted).max(axis=1, initial=0))
            worst = max(worst, float((np.abs(found - wanted).max(axis=1, initial=0) / most).max()))
    return worst


def _random_windows(rng: np.random.Generator, lengths: list[int], facts: Facts) -> Batch:
    """Windows of any items and kinds, some with values, seconds to years apart and before the question."""
    events = sum(lengths)
    gaps = np.exp(rng.uniform(0, np.log(1e8), events + len(lengths))).astype(np.int64)
    times, ends = np.cumsum(gaps), np.cumsum(np.array(lengths) + 1) - 1  # a question comes after each user's events
    values = rng.normal(3, 2, events).astype(np.float32)
    return Batch(
        items=rng.integers(1, len(facts.ids) + 1, events),
        times=np.delete(times, ends),
        lengths=np.array(lengths, dtype=np.int64),
        query_times=times[ends],
        kinds=rng.integers(0, len(facts.kinds) + 1, events),
        values=np.where(rng.random(events) < 0.2, np.float32(np.nan), values),
    )
