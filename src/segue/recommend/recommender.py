"""Ids in, ids out: a trained model, its index and its vocabulary answer any history."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import torch
from torch import Tensor
from torch.nn import functional

from segue import folders
from segue.data.batch import Batch, cut_by_budget, ragged_rows
from segue.data.vocabulary import Vocabulary
from segue.errors import FolderError, InputError
from segue.index.exact import ExactIndex
from segue.index.search import ItemIndex, Ragged
from segue.layers.packed import tensors
from segue.models.checkpoint import DESCRIPTION, WEIGHTS, load_model
from segue.models.sequence import SequenceModel
from segue.recommend.answers import Ranking, Recommendation, ScoredItem
from segue.recommend.history import Moment, identifier, identifiers, pack_histories

TOKENS = 16384  # events encoded at a time
MOST_ROWS = 1024  # histories answered at a time

ITEMS, INDEX = "items.parquet", "index.safetensors"
NEEDED = (DESCRIPTION, WEIGHTS, ITEMS, INDEX)

Seen = Literal["excluded", "kept"]


class Recommender:
    """Answers which items come next. Made by `segue.train` and `segue.load`; it never changes.

    An item that was never trained on is unknown to it: it is named where it occurs in a history and never answered.
    """

    def __init__(
        self,
        model: SequenceModel,
        index: ItemIndex,
        vocabulary: Vocabulary,
        *,
        seen: Seen = "excluded",
        manifest: dict[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        """`vocabulary` has the counts of training; `seen`: what becomes of a history's items unless asked otherwise."""
        self.model = model.eval()
        self.index = index
        self.vocabulary = vocabulary
        self.seen = seen
        self.manifest = manifest or {}
        self.folder = folder
        self.counts = np.concatenate(([0], vocabulary.table["count"].to_numpy())).astype(np.int64)  # [V + 1]
        self.trained = self.counts > 0

    @staticmethod
    def open(folder: Path | str) -> Recommender:
        """The Recommender in a run folder."""
        folder = Path(folder)
        manifest = folders.read_manifest(folder, "run")
        missing = [name for name in NEEDED if name not in manifest["files"]]
        if missing:
            raise FolderError(f"{folder} is damaged: it has no {missing[0]}; train again.")
        # Only what is read here: the state of training beside it is larger than all the rest.
        folders.verify_contents(folder, manifest, "run", names=NEEDED)
        vocabulary = Vocabulary(pl.read_parquet(folder / ITEMS))
        index = ExactIndex.load(folder / INDEX)
        model = load_model(folder)
        sizes = {len(vocabulary), index.n_items, len(model.item_vectors()) - 1}
        if len(sizes) > 1:
            raise FolderError(f"{folder} is damaged: its model, index and items.parquet differ in size; train again.")
        return Recommender(model, index, vocabulary, seen=manifest["seen"], manifest=manifest, folder=folder)

    def save(self, folder: Path | str) -> None:
        """Copy the run folder. The copy is complete or not there at all."""
        if self.folder is None:
            raise FolderError("This Recommender was not opened from a run folder, so there is nothing to copy.")
        with folders.complete_folder(Path(folder)) as staging:
            for name in (*self.manifest["files"], folders.MANIFEST):
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.folder / name, staging / name)

    def recommend(
        self,
        history: Iterable[Any],
        k: int = 10,
        *,
        now: Moment | None = None,
        exclude: Iterable[Any] | None = None,
        only: Iterable[Any] | None = None,
        keep_seen: bool | None = None,
    ) -> Recommendation:
        """The k items that come next: `recommend_many` for one history."""
        return self.recommend_many([history], k, now=now, exclude=exclude, only=only, keep_seen=keep_seen)[0]

    def recommend_many(
        self,
        histories: Iterable[Iterable[Any]],
        k: int = 10,
        *,
        now: Moment | None = None,
        exclude: Iterable[Any] | None = None,
        only: Iterable[Any] | None = None,
        keep_seen: bool | None = None,
    ) -> list[Recommendation]:
        """The k items that come next in each history, best first; fewer only where fewer remain.

        histories: each a list of entries, oldest first: an id, or {item, time?, kind?, value?}. Where every entry has
            a time they are sorted by it. An unknown id is skipped and named in the answer; a history without any
            known id is answered by popularity, and the answer says so. The model sees the newest entries it has room
            for; seen items are those of the whole history.
        now: the moment of the question, for models that use it.
        exclude: ids that are no answer.
        only: ids that may be an answer. Ids unknown to the model are ignored; with none known, the answer is empty.
        keep_seen: whether items of the history may be answered; None is the run's own way.
        """
        packed = pack_histories(histories, self.vocabulary, known=self.trained, now=now)
        ranking = self.rank(
            packed.batch,
            k,
            exclude=None if exclude is None else self.numbers(exclude, "exclude"),
            only=None if only is None else self.numbers(only, "only"),
            keep_seen=keep_seen,
        )
        answers = self._scored(ranking)
        return [
            Recommendation(items=items, unknown=unknown, fallback="popularity" if fallback else None)
            for items, unknown, fallback in zip(answers, packed.unknown, ranking.fallback.tolist(), strict=True)
        ]

    def similar(self, item: str | int, k: int = 10) -> Recommendation:
        """The k items nearest to an item: the score is the cosine of their vectors."""
        _check_k(k)
        name = identifier(item)
        number = int(self.vocabulary.numbers([name], unknown="zero")[0])
        if not self.trained[number]:
            reason = "was never trained on" if number else f"is not one of the {len(self.vocabulary)} items of this run"
            raise InputError(f"The item {name!r} {reason}, so nothing is known to be similar to it.")
        vectors, index = self._directions
        items, scores = index.search(vectors[number : number + 1], k, exclude=Ragged.of_lists([[number]]))
        ranking = Ranking(items.numpy(), scores.numpy(), np.zeros(1, dtype=bool))
        return Recommendation(items=self._scored(ranking)[0])

    def rank(
        self,
        histories: Batch,
        k: int,
        *,
        exclude: np.ndarray | None = None,
        only: np.ndarray | None = None,
        keep_seen: bool | None = None,
    ) -> Ranking:
        """The same in numbers: whole histories of items that were trained on, some perhaps empty.

        Memory is bounded: histories are encoded and answered in groups of similar length.
        """
        _check_k(k)
        keep = self.seen == "kept" if keep_seen is None else keep_seen
        empty = histories.lengths == 0
        width = min(k, len(self.vocabulary))
        items = np.zeros((len(empty), width), dtype=np.int64)
        scores = np.full((len(empty), width), -np.inf, dtype=np.float32)
        if empty.any():
            items[empty], scores[empty] = self._popular(width, exclude=exclude, only=only)
        for rows in self._groups(histories):
            with torch.inference_mode():
                queries = self.model.query(tensors(_take(histories, rows, self.model.length)))
                left_out = _left_out(_take(histories, rows, None), exclude, keep_seen=keep)
                found, values = self.index.search(queries, k, exclude=left_out, only=only)
            items[rows, : found.shape[1]], scores[rows, : found.shape[1]] = found.numpy(), values.numpy()
        return Ranking(items=items, scores=scores, fallback=empty)

    def numbers(self, ids: Iterable[Any], name: str) -> np.ndarray:
        """Numbers of the ids that are known; `name` is what the caller calls the list."""
        numbers = self.vocabulary.numbers(identifiers(ids, name), unknown="zero")
        return numbers[numbers > 0]

    def _groups(self, histories: Batch) -> Iterator[np.ndarray]:
        """Rows of histories that are not empty, shortest first, as many at a time as the budgets allow."""
        rows = np.flatnonzero(histories.lengths)
        lengths = np.minimum(histories.lengths[rows], self.model.length)
        order = np.argsort(lengths, kind="stable")
        for group in cut_by_budget(lengths[order], TOKENS):
            for begin in range(0, len(group), MOST_ROWS):
                yield rows[order[group[begin : begin + MOST_ROWS]]]

    def _popular(
        self, width: int, *, exclude: np.ndarray | None, only: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The items trained on most [width] and how often; equal counts, the lower number first."""
        allowed = self.trained.copy()
        if only is not None:
            allowed &= np.isin(np.arange(len(allowed)), only)
        if exclude is not None:
            allowed[exclude] = False
        best = self._by_count[allowed[self._by_count]][:width]
        items = np.zeros(width, dtype=np.int64)
        scores = np.full(width, -np.inf, dtype=np.float32)
        items[: len(best)], scores[: len(best)] = best, self.counts[best]
        return items, scores

    @cached_property
    def _by_count(self) -> np.ndarray:
        return np.argsort(-self.counts, kind="stable")

    @cached_property
    def _directions(self) -> tuple[Tensor, ItemIndex]:
        """Item vectors of length one [V + 1, D], and an index of them."""
        with torch.inference_mode():
            vectors = functional.normalize(self.model.item_vectors().detach().cpu().float(), dim=1)
        return vectors, ExactIndex.build(vectors, candidates=self.trained)

    def _scored(self, ranking: Ranking) -> list[list[ScoredItem]]:
        """Numbers → ids and titles, without the padding at the end of a row."""
        answered = ranking.items > 0
        numbers = ranking.items[answered]
        ids, titles = self.vocabulary.ids(numbers), self.vocabulary.titles(numbers)
        scored = list(map(ScoredItem, ids, titles, ranking.scores[answered].tolist()))
        ends = np.cumsum(answered.sum(axis=1)).tolist()
        return [scored[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _check_k(k: object) -> None:
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise InputError(f"k, the number of items asked for, must be a whole number of at least 1, got {k!r}.")


def _take(histories: Batch, rows: np.ndarray, length: int | None) -> Batch:
    """Some histories of a batch, with at most `length` newest events each."""
    lengths = histories.lengths[rows]
    kept = lengths if length is None else np.minimum(lengths, length)
    chosen = ragged_rows(np.cumsum(histories.lengths)[rows] - kept, kept)
    return histories.tokens(chosen, kept, asked=None if histories.asked is None else histories.asked[rows])


def _left_out(histories: Batch, exclude: np.ndarray | None, *, keep_seen: bool) -> Ragged | None:
    """What is no answer to each history: its own items, unless they are kept, and what the caller excludes."""
    rows = np.arange(len(histories.lengths))
    shared = np.zeros(0, dtype=np.int64) if exclude is None else exclude
    if keep_seen:
        return Ragged.of_lengths(np.full(len(rows), len(shared)), np.tile(shared, len(rows))) if len(shared) else None
    if not len(shared):
        return Ragged.of_lengths(histories.lengths, histories.items)
    owners = np.concatenate((np.repeat(rows, histories.lengths), np.repeat(rows, len(shared))))
    numbers = np.concatenate((histories.items, np.tile(shared, len(rows))))
    return Ragged.of_lengths(histories.lengths + len(shared), numbers[np.argsort(owners, kind="stable")])
