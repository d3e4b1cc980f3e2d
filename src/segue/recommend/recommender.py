"""Ids in, ids out: a trained model, its index and its vocabulary answer any history."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import torch
from torch import Tensor

from segue import folders
from segue.data.batch import MICROSECONDS, Batch, newest, take
from segue.data.vocabulary import Vocabulary
from segue.errors import FolderError, InputError
from segue.index.build import load_index
from segue.index.codes import CodeIndex
from segue.index.exact import ExactIndex
from segue.index.search import ItemIndex, Ragged
from segue.layers.packed import tensors
from segue.models.build import Builder
from segue.models.checkpoint import DESCRIPTION, WEIGHTS, load_model, read_description, save_model
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.models.similarity.mol import MixtureOfLogits
from segue.recommend.answer import BEAM, Plan, Ranking, Recommendation
from segue.recommend.explain.contributions import explain_history, looks, steps_of, with_steps
from segue.recommend.explain.explanation import Explanation
from segue.recommend.history import (
    Moment,
    ReadHistory,
    identifier,
    microseconds,
    pack_histories,
    read_histories,
    read_history,
)
from segue.recommend.known_items import KnownItems, similar_lengths
from segue.recommend.new_items import directions, extended, new_items
from segue.recommend.plan import Search, plan_histories
from segue.recommend.rules import Rules, left_out

TOKENS = 16384  # events encoded at a time
MOST_ROWS = 1024  # histories answered at a time

ITEMS, INDEX = "items.parquet", "index.safetensors"
NEEDED = (DESCRIPTION, WEIGHTS, ITEMS, INDEX)
OF_TRAINING = ("training.safetensors", "start.safetensors", "start-all.safetensors")
"""Its state: of the items that were there, and larger than all the rest."""

Seen = Literal["excluded", "kept"]
Encode = Callable[[Batch, np.ndarray], Tensor]
"""Windows, and the rows of the questions that they belong to → what the index is asked [B, Q]."""


class Recommender:
    """Answers which items come next. Made by `segue.train` and `segue.load`; it never changes.

    An item that was never trained on, and of which the model knows no content, is unknown to it: it is named where it
    occurs in a history and never answered.
    """

    def __init__(
        self,
        model: SequenceModel,
        index: ItemIndex,
        vocabulary: Vocabulary,
        *,
        seen: Seen = "excluded",
        settings: ModelSettings | None = None,
        manifest: dict[str, Any] | None = None,
        folder: Path | None = None,
        changed: bool = False,
    ) -> None:
        """`vocabulary` has the counts of training; `seen`: what becomes of a history's items unless asked otherwise;
        `changed`: whether items were added since it was opened from the folder."""
        self.model = model.eval()
        self.index = index
        self.vocabulary = vocabulary
        self.seen = seen
        self.settings = settings
        self.manifest = manifest or {}
        self.folder = folder
        self.changed = changed
        counts = np.concatenate(([0], vocabulary.table["count"].to_numpy())).astype(np.int64)  # [V + 1]
        self.counts, self.answerable = counts, model.answerable(counts)
        self.answerable[len(counts) - self.added :] = True  # none is added of which nothing is known
        self.known = KnownItems(vocabulary, counts, self.answerable, kinds=model.told_kinds, timed=model.timed)

    @staticmethod
    def open(folder: Path | str, *, encoder: Builder | None = None) -> Recommender:
        """The Recommender in a run folder; `encoder`: the builder that it was trained with, if one was given."""
        folder = Path(folder)
        manifest = folders.read_manifest(folder, "run")
        missing = [name for name in NEEDED if name not in manifest["files"]]
        if missing:
            raise FolderError(f"{folder} is damaged: it has no {missing[0]}; train again.")
        # Only what is read here: the state of training beside it is larger than all the rest.
        folders.verify_contents(folder, manifest, "run", names=NEEDED)
        vocabulary = Vocabulary(pl.read_parquet(folder / ITEMS))
        index = load_index(folder / INDEX)
        model = load_model(folder, encoder)
        sizes = {len(vocabulary), index.n_items, model.items.n_items}
        if len(sizes) > 1:
            raise FolderError(f"{folder} is damaged: its model, index and items.parquet differ in size; train again.")
        return Recommender(
            model,
            index,
            vocabulary,
            seen=manifest["seen"],
            settings=read_description(folder).settings,
            manifest=manifest,
            folder=folder,
        )

    def save(self, folder: Path | str) -> None:
        """Copy the run folder, with the items that were added. The copy is complete or not there at all."""
        if self.folder is None:
            raise FolderError("This Recommender was not opened from a run folder, so there is nothing to copy.")
        with folders.complete_folder(Path(folder)) as staging:
            left = (*NEEDED, *OF_TRAINING) if self.changed else ()
            for name in (*self.manifest["files"], folders.MANIFEST):
                if name not in left:
                    (staging / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(self.folder / name, staging / name)
            if self.changed:
                self._write_items(staging)

    def _write_items(self, staging: Path) -> None:
        """What the items added make different of the run folder."""
        assert self.settings is not None
        save_model(self.model, self.settings, staging)
        self.vocabulary.table.write_parquet(staging / ITEMS)
        self.index.save(staging / INDEX)
        facts = {name: fact for name, fact in self.manifest.items() if name not in ("kind", "format", "files")}
        folders.write_manifest(staging, "run", facts)

    @property
    def added(self) -> int:
        """Items that were added since the run was trained; they have the last numbers."""
        return int(self.manifest.get("added", {}).get("items", 0))

    def with_items(self, table: pl.DataFrame) -> Recommender:
        """A Recommender that answers these items too, by their content; nothing is trained, and this one stays as it
        is.

        table: the column `id`, and those of the catalogue that the run was trained with: title, vectors, texts,
            category; one that is missing is null. An item that was added before gets the new content; one that the run
            was trained with is refused, and so is one without content, each with a sentence that names it.

        `save` keeps it.
        """
        found = new_items(self, table)
        found.refuse_misfits()
        model, index, vocabulary, numbers = extended(self, found.rows)
        trained = self.manifest.get("added", {}).get("run") or (self.folder and self.folder.resolve().name)
        added = {"items": self.added + len(vocabulary) - len(self.vocabulary), "run": trained}
        longer = Recommender(
            model,
            index,
            vocabulary,
            seen=self.seen,
            settings=self.settings,
            manifest=self.manifest | {"items": len(vocabulary), "added": added},
            folder=self.folder,
            changed=True,
        )
        if "_directions" in self.__dict__:  # to make them of all items again takes long where there are many
            longer._directions = self._directions.with_items(
                directions(model, numbers), numbers, n_items=len(vocabulary)
            )
        return longer

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
        read = read_histories(histories)
        query_times = None if now is None else np.full(len(read), microseconds(now) // MICROSECONDS)
        rules = self.rules(k=k, exclude=exclude, only=only, keep_seen=keep_seen)
        return self.answer(read, [rules] * len(read), query_times=query_times)

    def answer(
        self,
        histories: Sequence[ReadHistory],
        rules: Sequence[Rules],
        *,
        query_times: np.ndarray | None = None,
        encode: Encode | None = None,
    ) -> list[Recommendation]:
        """The same for histories that were read, each with rules of its own; `query_times` [B]: the questions' seconds.

        `encode`: another way to the same questions; see `KVCaches`.
        """
        return self.known.answers(
            histories, lambda batch: self.rank(batch, rules, encode=encode), query_times=query_times
        )

    def plan(
        self,
        history: Iterable[Any] | ReadHistory,
        n: int = 5,
        *,
        beam: int = BEAM,
        exclude: Iterable[Any] | None = None,
        only: Iterable[Any] | None = None,
        keep_seen: bool | None = None,
        repeats: bool = False,
        now: Moment | None = None,
    ) -> Plan:
        """The next n items as one plan: `plan_many` for one history."""
        return self.plan_many(
            [history], n, beam=beam, exclude=exclude, only=only, keep_seen=keep_seen, repeats=repeats, now=now
        )[0]

    def plan_many(
        self,
        histories: Iterable[Iterable[Any] | ReadHistory],
        n: int = 5,
        *,
        beam: int = BEAM,
        exclude: Iterable[Any] | None = None,
        only: Iterable[Any] | None = None,
        keep_seen: bool | None = None,
        repeats: bool = False,
        now: Moment | None = None,
    ) -> list[Plan]:
        """The next n items of each history as one plan, in the order they come; fewer only where fewer remain.

        Where `recommend_many` ranks items that stand each for itself, here each is chosen knowing those before it. For
        models that can plan, such as those of the recipe seq2seq; others refuse.

        histories, exclude, only, keep_seen, now: as for `recommend_many`. A history without any known id gets the most
            frequent items, and the plan says so.
        beam: plans that are followed side by side; with one, each item is the likeliest after those before it.
        repeats: whether an item may come twice.
        """
        search = Search(n=n, beam=beam, repeats=repeats)
        read = read_histories(histories)
        query_times = None if now is None else np.full(len(read), microseconds(now) // MICROSECONDS)
        rules = self.rules(k=1, exclude=exclude, only=only, keep_seen=keep_seen)
        return plan_histories(self, read, rules, search, query_times=query_times)

    def embed(self, histories: Iterable[Iterable[Any]], *, now: Moment | None = None) -> np.ndarray:
        """A vector for each history [n, D] float32, as `segue embed` writes it for everyone in a log.

        Its inner product with an item's vector is the item's score; where items have biases, its last feature is 1. A
        history without any known id has none: its row is not a number.

        histories, now: as for `recommend_many`.
        """
        read = read_histories(histories)
        query_times = None if now is None else np.full(len(read), microseconds(now) // MICROSECONDS)
        packed = pack_histories(
            read, self.vocabulary, known=self.answerable, kinds=self.known.kinds, query_times=query_times
        )
        return self.embed_batch(packed.batch)

    @cached_property
    def embedding_width(self) -> int:
        """Features of an embedding; refused where scores are no inner product of two vectors."""
        if isinstance(self.model.similarity, MixtureOfLogits):
            raise InputError(
                "This run scores items by a mixture of logits (model.similarity = 'mol'), which is no inner product of "
                "two vectors, so it has no embeddings; train one with model.similarity = 'dot' or 'cosine'."
            )
        return int(self.model.item_vectors(torch.zeros(1, dtype=torch.int64)).shape[1])

    def embed_batch(self, histories: Batch) -> np.ndarray:
        """`embed` for whole histories in numbers, of items that are known. Memory is bounded as in `rank`."""
        vectors = np.full((len(histories.lengths), self.embedding_width), np.nan, dtype=np.float32)
        with torch.inference_mode():
            for rows in similar_lengths(histories, self.model.length, TOKENS, MOST_ROWS):
                windows = take(histories, rows, self.model.length, self.model.window_step)
                vectors[rows] = self.model.query(tensors(windows)).numpy()
        return vectors

    def rules(
        self,
        *,
        k: int,
        exclude: Iterable[Any] | None = None,
        only: Iterable[Any] | None = None,
        keep_seen: bool | None = None,
    ) -> Rules:
        """Rules in ids → rules in numbers; unknown ids are ignored."""
        return self.known.rules(k=k, exclude=exclude, only=only, keep_seen=keep_seen)

    def knows(self, item: str) -> bool:
        """Whether an id is an item that may be answered and read."""
        return bool(self.answerable[self.vocabulary.numbers([item], unknown="zero")[0]])

    def similar(self, item: str | int, k: int = 10) -> Recommendation:
        """The k items nearest to an item: the score is the cosine of their vectors."""
        Rules(k=k)  # refuses what is no number of items
        number = self.known_number(item, "so nothing is known to be similar to it")
        index = self._directions
        if isinstance(index, CodeIndex):
            query = directions(self.model, np.array([number]))
        else:
            query = index.vectors[int(np.searchsorted(index.numbers, number))][None]
        items, scores = index.search(query, k, exclude=Ragged.of_lists([[number]]))
        ranking = Ranking(items.numpy(), scores.numpy(), np.zeros(1, dtype=bool))
        return Recommendation(items=self.known.scored(ranking)[0])

    def known_number(self, item: str | int, consequence: str) -> int:
        """The number of an item that must be known; else it is refused, and the sentence ends with the consequence."""
        name = identifier(item)
        number = int(self.vocabulary.numbers([name], unknown="zero")[0])
        if not self.answerable[number]:
            reason = "was never trained on" if number else f"is not one of the {len(self.vocabulary)} items of this run"
            raise InputError(f"The item {name!r} {reason}, {consequence}.")
        return number

    def explain(
        self,
        history: Iterable[Any] | ReadHistory,
        item: str | int | None = None,
        *,
        now: Moment | None = None,
        exclude: Iterable[Any] | None = None,
        only: Iterable[Any] | None = None,
        keep_seen: bool | None = None,
        attention: bool = True,
    ) -> Explanation:
        """Why an item is answered: what each entry of the history did for its score, and where the model looked.

        An entry's contribution is the item's score with the whole history less its score without that entry, which
        holds for any model. Beside it stand the attention weights of models that have them.

        item: an id; None is the best answer. It may also be one that the rules forbid: its rank is then None.
        now, exclude, only, keep_seen: as for `recommend_many`; they decide the best answer and the rank.
        attention: whether the weights are wanted.
        """
        query_times = None if now is None else np.array([microseconds(now) // MICROSECONDS])
        return explain_history(
            self,
            read_history(history),
            self.rules(k=1, exclude=exclude, only=only, keep_seen=keep_seen),
            item=None if item is None else self.known_number(item, "so it has no score to explain"),
            query_times=query_times,
            attention=attention,
        )

    def attention(self, history: Iterable[Any]) -> dict[str, np.ndarray]:
        """All attention weights of the n newest known entries that the model has room for, by the layer's name, in the
        order of the model: `layer 1`, `layer 2` and so on, or where in the model they stand.

        Each is [heads, n, n]: row = who looks, column = at whom, oldest first. A model that puts a token of its own
        after the history, to ask with, has one row and column more, the last. Where a decoder looks, at the history or
        back at its own steps, the rows are the steps of a plan of five items, each the likeliest after those before it.
        Empty where the model has none to show or knows no entry.
        """
        read = read_history(history)
        packed = pack_histories([read], self.vocabulary, known=self.answerable, kinds=self.known.kinds)
        window = newest(packed.batch, self.model.length, self.model.window_step)
        window = with_steps(self, window, steps_of(self, read, self.rules(k=1)))
        return {each.name: each.weights[0].numpy() for each in looks(self.model, window)}

    def rank(self, histories: Batch, rules: Sequence[Rules], *, encode: Encode | None = None) -> Ranking:
        """Answers in numbers to whole histories of items that are known, some perhaps empty; each has its rules.

        Memory is bounded: histories are encoded and answered in groups of similar length.
        """

        def find(rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
            windows = take(histories, rows, self.model.length, self.model.window_step)
            queries = self.model.query(tensors(windows)) if encode is None else encode(windows, rows)
            for part, only in _by_only(rules, rows):
                chosen = rows[part]
                yield chosen, *self._search(take(histories, chosen), queries[part], chosen, rules, only)

        with torch.inference_mode():
            return self.known.ranking(
                histories, rules, find, length=self.model.length, tokens=TOKENS, most_rows=MOST_ROWS
            )

    def _search(
        self, histories: Batch, queries: Tensor, rows: np.ndarray, rules: Sequence[Rules], only: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ask the index for rows that share their `only`."""
        own = [rules[row] for row in rows.tolist()]
        forbidden = left_out(histories, own, keep_seen=self.seen == "kept")
        found, values = self.index.search(queries, max(rule.k for rule in own), exclude=forbidden, only=only)
        return found.numpy(), values.numpy()

    @cached_property
    def _directions(self) -> ExactIndex | CodeIndex:
        """An index of item vectors of length one."""
        if isinstance(self.index, CodeIndex):
            return self.index.by_direction()
        return ExactIndex.build(directions(self.model), candidates=self.answerable)


def _by_only(rules: Sequence[Rules], rows: np.ndarray) -> Iterator[tuple[np.ndarray | slice, np.ndarray | None]]:
    """(places in `rows`, the list of allowed items that their rules share), so that each list is searched once."""
    if all(rules[row].only is None for row in rows.tolist()):
        yield slice(None), None
        return
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(rows.tolist()):
        groups.setdefault(id(rules[row].only), []).append(place)
    for places in groups.values():
        yield np.array(places), rules[rows[places[0]]].only
