"""A trained model, its index and its vocabulary → answers in ids to any history."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import polars as pl
import torch

from segue import folders
from segue.counts.counts import Counts
from segue.data.batch import Batch, take
from segue.data.vocabulary import Kinds, Vocabulary
from segue.errors import FolderError, InputError
from segue.index.build import load_index
from segue.index.codes import CodeIndex
from segue.index.exact import ExactIndex
from segue.index.search import ItemIndex, Ragged
from segue.models.build import Builder
from segue.models.checkpoint import SETTINGS, WEIGHTS, load_model, read_model_settings, save_weights
from segue.models.encoders import ModelSettings
from segue.models.sequence import SequenceModel
from segue.models.similarity.mol import MixtureOfLogits
from segue.recommend.answer import (
    BEAM,
    BaseRecommender,
    Explanation,
    Plan,
    Ranking,
    Recommendation,
    ScoredItem,
    begin_ranking,
    named_items,
    recommendations,
)
from segue.recommend.explain.explain import attention_of, explain_history
from segue.recommend.history import History, KnownItems, Timestamp, identifier, pack_histories, read_histories
from segue.recommend.kv_caches import KVCaches
from segue.recommend.new_items import extended, new_items
from segue.recommend.plan import BeamSearch, plan_histories
from segue.recommend.query import Queries, encode_queries
from segue.recommend.rules import Filters, Rules, read_rules
from segue.recommend.search import search_items, unit_vectors

ITEMS, INDEX, COUNTS = "items.parquet", "index.safetensors", "counts.safetensors"
NEEDED = (SETTINGS, WEIGHTS, ITEMS, INDEX)
OF_TRAINING = ("training.safetensors", "warm-start.safetensors", "warm-start-all.safetensors")
"""Training state. It has only the items that were trained, and is larger than the rest of the run."""

Seen = Literal["excluded", "kept"]


class Recommender(BaseRecommender):
    """Recommends the items that come next. Made by `segue.train` and `segue.load`; it never changes.

    An item without training events whose content the model does not know is unknown: in a history it is skipped and
    named, and it is never recommended.
    """

    def __init__(
        self,
        model: SequenceModel,
        index: ItemIndex,
        vocabulary: Vocabulary,
        *,
        item_counts: Counts | None = None,
        seen: Seen = "excluded",
        settings: ModelSettings | None = None,
        manifest: dict[str, Any] | None = None,
        folder: Path | None = None,
        changed: bool = False,
    ) -> None:
        """`vocabulary` has the training counts. `item_counts`: what is added to the model's scores. `seen`: whether
        items of the history are recommended by default. `changed`: whether items were added since the run was opened
        from its folder."""
        self.model = model.eval()
        self.index = index
        self.vocabulary = vocabulary
        self.item_counts = item_counts
        self.seen = seen
        self.settings = settings
        self.manifest = manifest or {}
        self.folder = folder
        self.changed = changed
        self.counts = np.concatenate(([0], vocabulary.table["count"].to_numpy())).astype(np.int64)  # [V + 1]
        self.answerable = model.answerable(self.counts)
        self.answerable[len(self.counts) - self.added :] = True  # items are only added if their content is known
        self.known = KnownItems(vocabulary, self.counts, self.answerable, Kinds(model.input_kinds), timed=model.timed)

    @staticmethod
    def open(folder: Path | str, *, encoder: Builder | None = None) -> Recommender:
        """The Recommender of a run folder. `encoder`: the builder that it was trained with, if it is not segue's."""
        folder = Path(folder)
        manifest = folders.read_manifest(folder, "run")
        missing = [name for name in NEEDED if name not in manifest["files"]]
        if missing:
            raise FolderError(f"{folder} is damaged: it has no {missing[0]}; train again.")
        # Only the files that are read here: the training state is larger than all of them.
        folders.verify_contents(folder, manifest, "run", names=(*NEEDED, COUNTS))
        vocabulary = Vocabulary(pl.read_parquet(folder / ITEMS))
        index = load_index(folder / INDEX)
        item_counts = Counts.open(folder / COUNTS) if COUNTS in manifest["files"] else None
        settings = read_model_settings(folder)
        model = load_model(folder, encoder, settings=settings)
        if not len(vocabulary) == index.n_items == model.items.n_items:
            raise FolderError(f"{folder} is damaged: its model, index and items.parquet differ in size; train again.")
        return Recommender(
            model,
            index,
            vocabulary,
            item_counts=item_counts,
            seen=manifest["seen"],
            settings=settings,
            manifest=manifest,
            folder=folder,
        )

    def save(self, folder: Path | str) -> None:
        """Copy the run folder, with the items that were added. The copy is complete or not there at all."""
        if self.folder is None:
            raise FolderError("This Recommender was not opened from a run folder, so there is nothing to copy.")
        with folders.complete_folder(Path(folder)) as staging:
            rewritten = (WEIGHTS, ITEMS, INDEX, *OF_TRAINING) if self.changed else ()
            for name in (*self.manifest["files"], folders.MANIFEST):
                if name not in rewritten:
                    (staging / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(self.folder / name, staging / name)
            if self.changed:
                save_weights(self.model, staging / WEIGHTS)
                self.vocabulary.table.write_parquet(staging / ITEMS)
                self.index.save(staging / INDEX)
                facts = {name: fact for name, fact in self.manifest.items() if name not in ("kind", "format", "files")}
                folders.write_manifest(staging, "run", facts)

    @property
    def added(self) -> int:
        """Number of items added since the run was trained; they have the last numbers."""
        return int(self.manifest.get("added", {}).get("items", 0))

    def with_items(self, table: pl.DataFrame) -> Recommender:
        """A Recommender that also recommends these items, by their content. Nothing is trained, and this Recommender
        does not change. `save` writes the added items.

        table: the column `id`, and the catalogue columns that the run was trained with: title, vectors, texts,
            category; a missing column is null. An item that was added before gets the new content. An item of the
            training and an item without content are refused by name.
        """
        additions = new_items(self, table)
        additions.refuse_misfits()
        model, index, vocabulary, numbers = extended(self, additions.rows)
        trained = self.manifest.get("added", {}).get("run") or (self.folder and self.folder.resolve().name)
        added = {"items": self.added + len(vocabulary) - len(self.vocabulary), "run": trained}
        result = Recommender(
            model,
            index,
            vocabulary,
            item_counts=self.item_counts,
            seen=self.seen,
            settings=self.settings,
            manifest=self.manifest | {"items": len(vocabulary), "added": added},
            folder=self.folder,
            changed=True,
        )
        if "_unit_index" in self.__dict__:  # building it for all items again takes long on a large catalogue
            vectors = unit_vectors(model, numbers)
            result._unit_index = self._unit_index.with_items(vectors, numbers, n_items=len(vocabulary))
        return result

    def answer(
        self,
        histories: Sequence[History],
        rules: Sequence[Rules],
        *,
        query_times: np.ndarray | None = None,
        users: Sequence[str | None] | None = None,
        caches: KVCaches | None = None,
    ) -> list[Recommendation]:
        """`recommend_many` for histories as they were read, each with its own rules. `query_times` [B]: seconds.
        `users`, `caches`: as for `encode_queries`."""
        batch, unknown = pack_histories(histories, self.known, query_times=query_times)
        queries = encode_queries(self.model, batch, users=users, caches=caches)
        return recommendations(self.known, histories, unknown, self.rank(batch, rules, queries))

    def rank(self, histories: Batch, rules: Sequence[Rules], queries: Queries | None = None) -> Ranking:
        """See `BaseRecommender.rank`. `queries`: those of the histories; None: encode them without caches."""
        ranking = begin_ranking(self.known, histories.lengths, rules)
        for rows, vectors in encode_queries(self.model, histories) if queries is None else queries:
            own = [rules[row] for row in rows.tolist()]
            whole, keep = take(histories, rows), self.seen == "kept"
            best = search_items(self.index, vectors, whole, own, keep_seen=keep, counts=self.item_counts)
            ranking.fill(rows, *best)
        return ranking

    def plan(
        self,
        history: Iterable[Any] | History,
        n: int = 5,
        *,
        beam: int = BEAM,
        repeats: bool = False,
        now: Timestamp | None = None,
        **filters: Unpack[Filters],
    ) -> Plan:
        """The next n items as one plan: `plan_many` for one history."""
        return self.plan_many([history], n, beam=beam, repeats=repeats, now=now, **filters)[0]

    def plan_many(
        self,
        histories: Iterable[Iterable[Any] | History],
        n: int = 5,
        *,
        beam: int = BEAM,
        repeats: bool = False,
        now: Timestamp | None = None,
        **filters: Unpack[Filters],
    ) -> list[Plan]:
        """The next n items of each history as one plan, in order; fewer only if fewer remain.

        `recommend_many` scores each item alone; here each item is chosen given those before it. Only models with a
        decoder can plan, such as those of the recipe seq2seq; others raise an InputError. A plan is the model's alone:
        item-to-item counts have no part in its probabilities.

        histories, now, filters: as for `recommend_many`; filters are exclude, only and keep_seen. A history without any
            known id gets the most frequent items, and the plan has `fallback` set.
        beam: width of the beam search; with 1, each item is the likeliest after those before it.
        repeats: whether an item may occur twice in a plan.
        """
        search = BeamSearch(n=n, beam=beam, repeats=repeats)
        read, query_times = read_histories(histories, now)
        rules = read_rules(self.known, k=1, **filters)
        return plan_histories(self, read, rules, search, query_times)

    def embed(self, histories: Iterable[Iterable[Any]], *, now: Timestamp | None = None) -> np.ndarray:
        """The embedding of each history [n, D] float32, as `segue embed` writes it for all users of a log.

        Its inner product with the embedding of an item is the model's score of the item, without item-to-item counts;
        if items have biases, its last feature is 1. The row of a history without any known id is NaN.

        histories, now: as for `recommend_many`.
        """
        read, query_times = read_histories(histories, now)
        return self.embed_batch(pack_histories(read, self.known, query_times=query_times)[0])

    @cached_property
    def embedding_width(self) -> int:
        """Features of an embedding; raises an InputError if scores are not inner products of two vectors."""
        if isinstance(self.model.similarity, MixtureOfLogits):
            raise InputError(
                "This run scores items by a mixture of logits (model.similarity = 'mol'), which is no inner product of "
                "two vectors, so it has no embeddings; train one with model.similarity = 'dot' or 'cosine'."
            )
        return int(self.model.item_vectors(torch.zeros(1, dtype=torch.int64)).shape[1])

    def embed_batch(self, histories: Batch) -> np.ndarray:
        """`embed` for whole histories of known items, in numbers."""
        vectors = np.full((len(histories.lengths), self.embedding_width), np.nan, dtype=np.float32)
        for rows, queries in encode_queries(self.model, histories):
            vectors[rows] = queries.numpy()
        return vectors

    def knows(self, item: str) -> bool:
        """Whether an id is an item that the model can read and recommend."""
        return bool(self.answerable[self.vocabulary.numbers([item], unknown="zero")[0]])

    def similar(self, item: str | int, k: int = 10) -> Recommendation:
        """The k items most similar to an item: the score is the cosine of their vectors, and item-to-item counts
        have no part in it."""
        Rules(k=k)  # refuses a k that is no number of items
        number = self.known_number(item, "so no item is known to be similar to it")
        index = self._unit_index
        if isinstance(index, CodeIndex):
            query = unit_vectors(self.model, np.array([number]))
        else:
            query = index.vectors[int(np.searchsorted(index.numbers, number))][None]
        items, scores = index.search(query, k, exclude=Ragged.of_lists([[number]]))
        return Recommendation(items=named_items(ScoredItem, self.known, items.numpy(), scores.numpy())[0])

    @cached_property
    def _unit_index(self) -> ExactIndex | CodeIndex:
        if isinstance(self.index, CodeIndex):
            return self.index.by_cosine()
        return ExactIndex.build(unit_vectors(self.model), candidates=self.answerable)

    def known_number(self, item: str | int, consequence: str) -> int:
        """The number of a known item; an unknown one raises an InputError that ends with `consequence`."""
        name = identifier(item)
        number = int(self.vocabulary.numbers([name], unknown="zero")[0])
        if not self.answerable[number]:
            reason = "was never trained on" if number else f"is not one of the {len(self.vocabulary)} items of this run"
            raise InputError(f"The item {name!r} {reason}, {consequence}.")
        return number

    def explain(
        self,
        history: Iterable[Any] | History,
        item: str | int | None = None,
        *,
        now: Timestamp | None = None,
        attention: bool = True,
        **filters: Unpack[Filters],
    ) -> Explanation:
        """Why an item is recommended: what counts add, the contribution of each entry of the history, and the attention
        weights.

        The contribution of an entry is the item's score with the whole history minus its score without that entry. It
        is defined for every model; attention weights only for models that have attention.

        item: an id; None is the best item. If the rules forbid the item, its rank is None.
        now, filters: as for `recommend_many`; they decide the best item and the rank.
        attention: whether to compute attention weights.
        """
        (read,), query_times = read_histories([history], now)
        rules = read_rules(self.known, k=1, **filters)
        number = None if item is None else self.known_number(item, "so it has no score to explain")
        return explain_history(self, read, rules, item=number, query_times=query_times, attention=attention)

    def attention(self, history: Iterable[Any]) -> dict[str, np.ndarray]:
        """Attention weights of the n newest known entries by layer name (such as `layer 1`), in the order of the model.

        Each is [heads, n, n]: rows are the tokens that attend, columns the tokens attended to, oldest first. A model
        that appends a query token to the history has one row and column more. In a decoder, rows are the steps of a
        plan of five items, each the likeliest after those before it. Empty without attention or without known entry.
        """
        (read,), _ = read_histories([history])
        layers, _ = attention_of(self, read, Rules(k=1))
        return {layer.name: layer.weights[0].numpy() for layer in layers}
