"""Everything that needs a model: answers, neighbours, searches, explanations, switches."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from segue.errors import InputError
from segue.recommend.explain.explanation import Explanation
from segue.recommend.history import History, identifier, read_history
from segue.recommend.kv_caches import MEGABYTE
from segue.serving.engine.answering import answer_queries, read_rows, whole_histories
from segue.serving.engine.models import Models, ServedModel
from segue.serving.http.bodies import (
    MAX_ENTRIES,
    ActiveRun,
    Answer,
    CatalogueItem,
    ExplanationRequest,
    HistoryEvent,
    ItemsReceipt,
    ModelsStatus,
    PlanAnswer,
    PlanRequest,
    UserHistory,
)
from segue.serving.requests import EncodedAnswer, EncodingCounts, RecommendationQuery
from segue.serving.settings import ServiceSettings
from segue.serving.store.store import AddedItem, HistoryStore, Row, open_store

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LOOKED_UP = 64  # users that are remembered and looked up in the store at a time


class ServingEngine:
    """The models being served and the histories that they are asked about. Safe to call from several threads."""

    def __init__(self, models: Models, store: HistoryStore) -> None:
        self.models = models
        self._store = store
        # Who is forgotten while an answer is under way must not be remembered by it.
        self._answering = threading.Lock()
        self._unchecked: list[str] = []  # users remembered who are still to be looked up in the store
        self._encode = msgspec.json.Encoder().encode

    @staticmethod
    def open(settings: ServiceSettings) -> ServingEngine:
        """Load what `segue serve` was told to serve."""
        memory_bytes = settings.cache_mb * MEGABYTE // len(settings.runs)
        served = [ServedModel.open(run, memory_bytes=memory_bytes) for run in settings.runs]
        store = open_store(settings.store)
        try:
            models = Models(
                served, runs=settings.runs_folder, store=store, memory_bytes=memory_bytes, joining=settings.joining
            )
            return ServingEngine(models, store)
        except BaseException:
            store.close()
            raise

    def close(self) -> None:
        self._store.close()

    def answer(self, questions: Sequence[RecommendationQuery]) -> list[EncodedAnswer | Exception]:
        """The items that come next, for each question."""
        with self._answering:
            results = answer_queries(self.models, self._store, questions)
        return [
            result if isinstance(result, Exception) else (self._encode(result), result.fallback) for result in results
        ]

    def similar(self, item: str, k: int, model: str | None) -> Answer:
        """An item's neighbours."""
        served = self.models.named(model)
        return Answer(items=served.recommender.similar(item, k).items, model=served.name)

    def search(self, text: str, limit: int) -> list[CatalogueItem]:
        """Items of the active model's catalogue."""
        return self.models.active.catalogue.search(text, limit)

    def popular(self, k: int) -> list[str]:
        """The ids that the active model was trained on most."""
        return self.models.active.recommender.recommend([], k=k).ids

    def history(self, user: str, limit: int) -> UserHistory:
        """A user's newest events."""
        rows = self._store.newest([user], limit + 1)[0]
        return UserHistory(user=user, events=_shown(rows[-limit:], self.models.active), more=len(rows) > limit)

    def unknown(self, items: Iterable[str]) -> set[str]:
        """Those that the active model does not know."""
        knows = self.models.active.recommender.knows
        return {item for item in items if not knows(item)}

    def explain(self, asked: ExplanationRequest) -> Explanation:
        """Why an item is answered."""
        if (asked.history is None) == (asked.user is None):
            raise InputError("Give either a history or a user to explain an answer to.")
        served = self.models.named(asked.model)
        return served.recommender.explain(
            self._history_of(asked),
            asked.item,
            exclude=asked.exclude,
            only=_only(asked, served),
            keep_seen=asked.keep_seen,
            attention=asked.attention,
            now=time.time() if asked.now is None else asked.now,
        )

    def plan(self, asked: PlanRequest) -> PlanAnswer:
        """The next items as one plan."""
        if (asked.history is None) == (asked.user is None):
            raise InputError("Give either a history or a user to plan for.")
        served = self.models.named(asked.model)
        plan = served.recommender.plan(
            self._history_of(asked),
            asked.n,
            beam=asked.beam,
            exclude=asked.exclude,
            only=_only(asked, served),
            keep_seen=asked.keep_seen,
            repeats=asked.repeats,
            now=time.time() if asked.now is None else asked.now,
        )
        return PlanAnswer(
            items=plan.items, score=plan.score, unknown=plan.unknown, fallback=plan.fallback, model=served.name
        )

    def _history_of(self, asked: ExplanationRequest | PlanRequest) -> History:
        """The history that was given, or that is kept of the user who was named."""
        if asked.user is None:
            return read_history(asked.history or [])
        return read_rows(whole_histories(self._store, [identifier(asked.user)])[0][-MAX_ENTRIES:])

    def drop_user(self, user: str) -> None:
        """Remember nothing of a user, whom the store does not have any more."""
        with self._answering:
            self._unchecked = [other for other in self._unchecked if other != user]
            for model in self.models.all:
                model.memories.forget(user)

    def tidy(self) -> EncodingCounts:
        """Forget whom the store does not have any more, as another process removed them; a few are looked up at a time.

        Gives what was encoded since it was asked last.
        """
        with self._answering:
            memories = [model.memories for model in self.models.all]
            if not self._unchecked:
                self._unchecked = [user for kept in memories for user in kept.users]
            users, self._unchecked = self._unchecked[:LOOKED_UP], self._unchecked[LOOKED_UP:]
            counted = [kept.counted() for kept in memories]
        if users:
            for user, rows in zip(users, self._store.newest(users, 1), strict=True):
                if not rows:
                    self.drop_user(user)
        extended, whole = map(sum, zip(*counted, strict=True))
        return EncodingCounts(extended=extended, whole=whole, bytes=sum(kept.bytes for kept in memories))

    def served(self) -> ModelsStatus:
        """What is being served, with its report."""
        return self.models.served()

    def switch(self, name: str) -> ActiveRun:
        """Serve another run."""
        return self.models.switch(name)

    def rollback(self) -> ActiveRun:
        """Serve the previous run."""
        return self.models.rollback()

    def add_items(self, items: Sequence[AddedItem]) -> ItemsReceipt:
        """Keep new items and serve them."""
        return self.models.add_items(items)

    def follow(self) -> tuple[str, str]:
        """Serve what the store says is active, with the items added to it; gives its name and digest."""
        self.models.follow()
        return self.models.active.name, self.models.active.digest

    def check(self) -> None:
        """Raise `StoreError` when histories cannot be read."""
        self._store.check()


def _only(asked: ExplanationRequest | PlanRequest, served: ServedModel) -> Sequence[str | int] | None:
    """The ids that may be answered: those named, and those that the filters let through."""
    if asked.where is None:
        return asked.only
    fitting = served.recommender.vocabulary.ids(served.catalogue.allowed(asked.where))
    return fitting if asked.only is None else list({*map(str, asked.only)} & {*fitting})


def _shown(rows: Sequence[Row], model: ServedModel) -> list[HistoryEvent]:
    vocabulary = model.recommender.vocabulary
    titles = vocabulary.titles(vocabulary.numbers([row[0] for row in rows], unknown="zero"))
    return [
        HistoryEvent(
            item=item,
            title=title,
            time=EPOCH + timedelta(microseconds=time),
            kind=kind,
            value=value,
            known=model.recommender.knows(item),
        )
        for (item, time, kind, value), title in zip(rows, titles, strict=True)
    ]
