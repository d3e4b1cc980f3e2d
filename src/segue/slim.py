"""A file made by `segue export` → answers, without torch: onnxruntime encodes and scores, numpy applies the rules.

    model = SlimRecommender.open("model.onnx")
    model.recommend(["espresso", "grinder"], k=10)

It needs numpy, msgspec and onnxruntime. Ids, scores and rules are those of the run that was exported.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from segue.counts.counts import Counts
from segue.data.batch import Batch, take
from segue.data.vocabulary import PADDING, Kinds
from segue.errors import FolderError, SettingsError
from segue.recommend.answer import BaseRecommender, Ranking, begin_ranking
from segue.recommend.history import KnownItems, similar_lengths
from segue.recommend.rules import Rules, excluded_items

__all__ = ["ExportFacts", "ExportedCounts", "SlimRecommender"]

FORMAT = 3
METADATA = "segue"  # key of `ExportFacts` in the file's metadata
ITEM_COUNTS = "segue.item_counts"  # key of `ExportedCounts`, which a run without item-to-item counts does not have
TOKENS = 16384  # events encoded at a time
MOST_ROWS = 64  # histories encoded and scored at a time
MOST_SCORES = 4_000_000  # scores in memory at a time


class ExportFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The data of a run that an answer needs beside the graph, as JSON in the file's metadata."""

    format: int
    segue: str
    """The version of segue that wrote the file."""
    recipe: str
    """The recipe of the run."""
    data: str
    """The digest of the data that the run was trained on."""
    length: int
    """The newest events of a history that the graph encodes, at most."""
    window_step: int
    """Events by which the window moves if a history is longer: see `segue.data.batch.window_begins`."""
    seen: Literal["excluded", "kept"]
    """Whether items of the history are recommended by default."""
    ids: list[str]
    """Ids of item 1, 2, …"""
    titles: list[str | None] | None
    """From the catalogue; null if it has none."""
    counts: list[int]
    """Events of each item in training. An item without any is unknown: never recommended, and skipped in histories."""
    untrained: list[int] = []
    """Numbers of items without training events that are known by their content."""
    kinds: list[str] = []
    """Names of the event kinds 0, 1, … that the graph distinguishes; the next number is any other kind."""
    timed: bool = False
    """Whether the graph uses the times of events."""
    twins: dict[int, int]
    """Items with the same vector as an item of a lower number → that number: their scores are made exactly equal."""


class ExportedCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A run's item-to-item counts, as JSON in the file's metadata; docs/onnx.md shows how scores are made of them."""

    weights: dict[str, float]
    """The weight of each feature."""
    arrays: bytes
    """An .npz file, in base64."""

    @staticmethod
    def of(counts: Counts) -> ExportedCounts:
        """The entry that holds these counts."""
        file = io.BytesIO()
        np.savez_compressed(file, allow_pickle=False, **counts.arrays())
        return ExportedCounts(weights=counts.named_weights, arrays=file.getvalue())

    def counts(self, n_items: int) -> Counts:
        """The counts, for a catalogue of so many items."""
        with np.load(io.BytesIO(self.arrays), allow_pickle=False) as arrays:
            counts = Counts.of_arrays(arrays, self.weights)
        if len(counts.pairs.users) > n_items + 1:
            raise ValueError("its arrays have more items than the catalogue")
        return counts


class SlimRecommender(BaseRecommender):
    """Recommends the items that come next, from an exported file. It never changes."""

    def __init__(self, session: Any, facts: ExportFacts, item_counts: Counts | None = None) -> None:
        """`session`: of onnxruntime, with the graph that the facts belong to. `item_counts`: what is added to the
        graph's scores."""
        self.facts = facts
        self.item_counts = item_counts
        counts = np.array([0, *facts.counts], dtype=np.int64)
        answerable = counts > 0
        answerable[facts.untrained] = True
        self.known = KnownItems(_Names(facts), counts, answerable, kinds=Kinds(facts.kinds), timed=facts.timed)
        self._session = session
        self.inputs: list[str] = [graph_input.name for graph_input in session.get_inputs()]
        self._most_rows = max(1, min(MOST_ROWS, MOST_SCORES // (len(facts.ids) + 1)))
        self._twins = np.array([[*facts.twins.keys()], [*facts.twins.values()]], dtype=np.int64)

    @staticmethod
    def open(path: Path | str, *, threads: int = 0) -> SlimRecommender:
        """The model of a file made by `segue export`. `threads`: used for one answer; 0 is onnxruntime's choice."""
        try:
            import onnxruntime as runtime
        except ImportError:
            raise SettingsError(
                "SlimRecommender needs onnxruntime, which is not installed; run `pip install 'segue[onnx]'`."
            ) from None
        if not Path(path).is_file():
            raise FolderError(f"{path} is no file; give one made by `segue export`.")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # errors are raised, and need not be logged as well
        try:
            session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its errors have no common class of their own
            raise FolderError(f"{path} cannot be read as a model ({in_short(error)}); export it again.") from error
        entries = session.get_modelmeta().custom_metadata_map
        if METADATA not in entries:
            raise FolderError(f"{path} is a model, but not of `segue export`: its metadata has no items; export a run.")
        facts = _read_facts(entries[METADATA], path)
        return SlimRecommender(session, facts, _read_counts(entries.get(ITEM_COUNTS), len(facts.ids), path))

    def rank(self, histories: Batch, rules: Sequence[Rules]) -> Ranking:
        """See `BaseRecommender.rank`."""
        ranking = begin_ranking(self.known, histories.lengths, rules)
        for rows in similar_lengths(histories.lengths, self.facts.length, tokens=TOKENS, most_rows=self._most_rows):
            _, scores = self.run(take(histories, rows, self.facts.length, self.facts.window_step))
            own, whole = [rules[row] for row in rows.tolist()], take(histories, rows)
            if self.item_counts is not None:
                added = self.item_counts.added(whole)
                scores[added.rows, added.items] += added.values  # each pair is there once
            exclude = excluded_items(whole, own, keep_seen=self.facts.seen == "kept")
            if exclude is not None:
                scores[exclude.owners, exclude.numbers] = -np.inf
            for row, values, rule in zip(rows, scores, own, strict=True):
                best = self._best(values, rule)
                ranking.fill(np.array([row]), best[None], values[None, best])
        return ranking

    def run(self, windows: Batch) -> tuple[np.ndarray, np.ndarray]:
        """The query vectors [B, Q] of windows of 1 … `length` events, and the scores of all items [B, V + 1],
        without item-to-item counts; column 0 is padding."""
        arrays = graph_inputs(windows)
        queries, scores = self._session.run(["query", "scores"], {name: arrays[name] for name in self.inputs})
        if not np.isfinite(scores).all():
            raise FolderError("The model's answer is not a finite number: the file is damaged; export it again.")
        scores[:, self._twins[0]] = scores[:, self._twins[1]]
        return queries, scores

    def _best(self, scores: np.ndarray, rules: Rules) -> np.ndarray:
        """The best known items [≤ k] that the rules allow; equal scores, the lower number first."""
        allowed = self.known.answerable & (scores > -np.inf)
        if rules.only is not None:
            allowed &= np.isin(np.arange(len(scores)), rules.only)
        numbers = np.flatnonzero(allowed)
        if len(numbers) > rules.k:
            threshold = np.partition(scores[numbers], -rules.k)[-rules.k]
            numbers = numbers[scores[numbers] >= threshold]
        order = np.argsort(-scores[numbers], kind="stable")
        best: np.ndarray = numbers[order[: rules.k]]
        return best


def graph_inputs(windows: Batch) -> dict[str, np.ndarray]:
    """All inputs that a graph may have: events [B, N], padded with zeros on the right, and one value for each user."""
    inside = np.arange(windows.lengths.max()) < windows.lengths[:, None]  # [B, N]

    def padded(events: np.ndarray) -> np.ndarray:
        result = np.zeros(inside.shape, dtype=events.dtype)
        result[inside] = events
        return result

    values = np.full(len(windows.items), np.nan, np.float32) if windows.values is None else windows.values
    kinds = np.zeros(len(windows.items), np.int64) if windows.kinds is None else windows.kinds
    newest = windows.times[np.cumsum(windows.lengths) - 1]  # the query time if none is given
    return {
        "items": padded(windows.items),
        "lengths": windows.lengths,
        "times": padded(windows.times),
        "query_times": newest if windows.query_times is None else windows.query_times,
        "values": padded(values),
        "kinds": padded(kinds),
    }


def _read_facts(text: str, path: Path | str) -> ExportFacts:
    try:
        number = msgspec.json.decode(text, type=dict[str, Any]).get("format")
        if number != FORMAT:
            raise FolderError(f"{path} has export format {number}, this segue reads format {FORMAT}; export it again.")
        return msgspec.json.decode(text, type=ExportFacts)
    except msgspec.MsgspecError as error:
        raise FolderError(f"{path} is damaged ({error}); export it again.") from error


def _read_counts(text: str | None, n_items: int, path: Path | str) -> Counts | None:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=ExportedCounts).counts(n_items)
    except Exception as error:  # those of a damaged .npz have no common class
        raise FolderError(
            f"{path} is damaged: its item-to-item counts cannot be read ({in_short(error)}); export it again."
        ) from error


class _Names:
    """The ids, numbers and titles of a file; see `segue.data.vocabulary.Names`."""

    def __init__(self, facts: ExportFacts) -> None:
        self._ids = ["", *facts.ids]
        self._titles = [None, *(facts.titles or [None] * len(facts.ids))]
        self._numbers = {identifier: number for number, identifier in enumerate(facts.ids, start=1)}

    def __len__(self) -> int:
        return len(self._numbers)

    def numbers(self, ids: Sequence[str], *, unknown: Literal["error", "zero"]) -> np.ndarray:
        assert unknown == "zero"
        return np.fromiter(map(self._numbers.get, ids, itertools.repeat(PADDING)), dtype=np.int64, count=len(ids))

    def ids(self, numbers: np.ndarray) -> list[str]:
        return [self._ids[number] for number in numbers.tolist()]

    def titles(self, numbers: np.ndarray) -> list[str | None]:
        return [self._titles[number] for number in numbers.tolist()]


def in_short(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(":. ")
