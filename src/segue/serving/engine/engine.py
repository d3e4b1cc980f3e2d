"""The calls that need a model: answers, many in one batch through the encoder, and the others one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import numpy as np

from segue.errors import InputError
from segue.models.checkpoint import WEIGHTS
from segue.recommend.answer import Explanation
from segue.recommend.history import History, identifier, read_history
from segue.recommend.kv_caches import MEGABYTE
from segue.recommend.rules import Rules, read_rules
from segue.serving.engine.models import Models
from segue.serving.engine.served_model import ServedModel
from segue.serving.http import bodies
from segue.serving.requests import EncodedAnswer, RecommendationQuery
from segue.serving.settings import ServiceSettings
from segue.serving.store.store import HistoryStore, Row, open_store

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST_READ = 1000  # events of a user; a longer history is read a second time, whole
MAX_HISTORY = 100_000  # newest events of a user that are read, so that no request waits for a robot's million
USERS_PER_CHECK = 64  # cached users that are looked up in the store at a time


class ServingEngine:
    """The models being served, over the store of histories. Safe to call from several threads.

    Most of its methods are those of `Service`, which calls them.
    """

    def __init__(self, models: Models, store: HistoryStore) -> None:
        self.models = models
        self._store = store
        # A user who is deleted while an answer is computed must not be cached by it.
        self._answering = threading.Lock()
        self._unchecked: list[str] = []  # cached users to be looked up in the store
        self._encode = msgspec.json.Encoder().encode
        self.status, self.switch, self.add_items = models.status, models.switch, models.add_items
        self.close = store.close

    @staticmethod
    def open(settings: ServiceSettings) -> ServingEngine:
        """Load the runs of the settings and open the store."""
        cache_bytes = settings.cache_mb * MEGABYTE // len(settings.runs)
        served = [ServedModel.open(run, cache_bytes=cache_bytes) for run in settings.runs]
        store = open_store(settings.store)
        try:
            runs, joining = settings.runs_folder, settings.joining
            models = Models(served, runs=runs, store=store, cache_bytes=cache_bytes, joining=joining)
            return ServingEngine(models, store)
        except BaseException:
            store.close()
            raise

    def answer(self, queries: Sequence[RecommendationQuery]) -> list[EncodedAnswer | Exception]:
        """The next items in the order of the queries; an exception is the answer to a query that cannot be used."""
        results: dict[int, EncodedAnswer | Exception] = {}
        groups: dict[ServedModel, dict[int, Rules]] = {}  # by model, the rules of each of its queries
        with self._answering:
            for index, query in enumerate(queries):
                try:
                    model = self.models.named(query.model)
                    groups.setdefault(model, {})[index] = _rules(model, query)
                except Exception as error:  # noqa: BLE001  # it must not fail the other queries of the batch
                    results[index] = error
            for model, rules in groups.items():
                answers = self._answer_with(model, [queries[index] for index in rules], list(rules.values()))
                results.update(zip(rules, answers, strict=True))
        return [results[index] for index in range(len(queries))]

    def _answer_with(
        self, model: ServedModel, queries: Sequence[RecommendationQuery], rules: Sequence[Rules]
    ) -> Iterator[EncodedAnswer]:
        now = int(time.time())
        stored = iter(self._stored_rows([query.user for query in queries if query.user is not None]))
        recommendations = model.recommender.answer(
            [history_of_rows(next(stored)) if query.history is None else query.history for query in queries],
            rules,
            query_times=np.array([now if query.now is None else query.now for query in queries], dtype=np.int64),
            users=[query.user for query in queries],
            caches=model.kv_caches,
        )
        for one in recommendations:
            answer = bodies.Answer(
                items=one.items, unknown=one.unknown, fallback=one.fallback, untimed=one.untimed, model=model.name
            )
            yield self._encode(answer), one.fallback

    def _stored_rows(self, users: Sequence[str]) -> list[list[Row]]:
        """All events of some users, oldest first. Few users have so many that a second read is needed."""
        histories = self._store.newest(users, FIRST_READ) if users else []
        return [
            self._store.newest([user], MAX_HISTORY)[0] if len(rows) == FIRST_READ else rows
            for user, rows in zip(users, histories, strict=True)
        ]

    def similar(self, item: str, k: int, model: str | None) -> bodies.Answer:
        served = self.models.named(model)
        return bodies.Answer(items=served.recommender.similar(item, k).items, model=served.name)

    def search(self, text: str, limit: int) -> list[bodies.CatalogueItem]:
        return self.models.active.catalogue.search(text, limit)

    def popular(self, k: int) -> list[str]:
        """The most frequent ids in the active model's training."""
        return self.models.active.recommender.recommend([], k=k).ids

    def history(self, user: str, limit: int) -> bodies.UserHistory:
        rows, model = self._store.newest([user], limit + 1)[0], self.models.active.recommender
        newest = rows[-limit:]
        titles = model.vocabulary.titles(model.vocabulary.numbers([row[0] for row in newest], unknown="zero"))
        events = [
            bodies.HistoryEvent(
                item=item,
                title=title,
                time=EPOCH + timedelta(microseconds=time),
                kind=kind,
                value=value,
                known=model.knows(item),
            )
            for (item, time, kind, value), title in zip(newest, titles, strict=True)
        ]
        return bodies.UserHistory(user=user, events=events, more=len(rows) > limit)

    def unknown(self, items: Iterable[str]) -> set[str]:
        """The items that the active model does not know."""
        knows = self.models.active.recommender.knows
        return {item for item in items if not knows(item)}

    def explain(self, request: bodies.ExplanationRequest) -> Explanation:
        history, served, rules = self._inputs(request, "explain an answer to")
        return served.recommender.explain(history, request.item, attention=request.attention, **rules)

    def plan(self, request: bodies.PlanRequest) -> bodies.PlanAnswer:
        history, served, rules = self._inputs(request, "plan for")
        plan = served.recommender.plan(history, request.n, beam=request.beam, repeats=request.repeats, **rules)
        return bodies.PlanAnswer(
            items=plan.items, score=plan.score, unknown=plan.unknown, fallback=plan.fallback, model=served.name
        )

    def _inputs(self, request: bodies.HistoryRequest, purpose: str) -> tuple[History, ServedModel, dict[str, Any]]:
        """The history of the request, or the stored one of its user; the model; the rules and the request time."""
        if (request.history is None) == (request.user is None):
            raise InputError(f"Give either a history or a user to {purpose}.")
        if request.user is None:
            history = read_history(request.history or [])
        else:
            history = history_of_rows(self._stored_rows([identifier(request.user)])[0][-bodies.MAX_ENTRIES :])
        served = self.models.named(request.model)
        only: Sequence[str | int] | None = request.only
        if request.where is not None:
            matches = served.recommender.vocabulary.ids(served.catalogue.allowed(request.where))
            only = matches if only is None else list({*map(str, only)} & {*matches})
        now = time.time() if request.now is None else request.now
        return history, served, {"exclude": request.exclude, "only": only, "keep_seen": request.keep_seen, "now": now}

    def drop_user(self, user: str) -> None:
        """Drop the KV caches of a user whom the store does not have any more."""
        with self._answering:
            self._unchecked = [other for other in self._unchecked if other != user]
            for model in self.models.all:
                model.kv_caches.drop(user)

    def drop_deleted(self) -> tuple[int, int, int]:
        """Look up the next few cached users and drop those that another process deleted from the store.

        Returns the histories encoded since the last call, by their new events alone and whole, and the bytes of the
        KV caches.
        """
        with self._answering:
            caches = [model.kv_caches for model in self.models.all]
            if not self._unchecked:
                self._unchecked = [user for cache in caches for user in cache.users]
            users, self._unchecked = self._unchecked[:USERS_PER_CHECK], self._unchecked[USERS_PER_CHECK:]
            counts = [cache.pop_counts() for cache in caches]
        if users:
            for user, rows in zip(users, self._store.newest(users, 1), strict=True):
                if not rows:
                    self.drop_user(user)
        extended, whole = map(sum, zip(*counts, strict=True))
        return extended, whole, sum(cache.bytes for cache in caches)

    def follow(self) -> tuple[str, str]:
        """Serve the store's active run, with the items added since; returns its name and the start of the SHA-256 of
        its weights, which tells runs of one name apart."""
        self.models.follow()
        files = self.models.active.recommender.manifest.get("files", {})
        return self.models.active.name, str(files.get(WEIGHTS, {}).get("sha256", ""))[:12]

    def check(self) -> None:
        self._store.check()


def _rules(model: ServedModel, query: RecommendationQuery) -> Rules:
    """A query's rules over the model's item numbers."""
    if query.exclude is None and query.only is None and query.where is None:
        return Rules(k=query.k, keep_seen=query.keep_seen)
    known = model.recommender.known
    rules = read_rules(known, k=query.k, exclude=query.exclude, only=query.only, keep_seen=query.keep_seen)
    if not query.where:
        return rules
    allowed = model.catalogue.allowed(query.where)
    only = allowed if rules.only is None else np.intersect1d(rules.only, allowed)
    return Rules(k=rules.k, keep_seen=rules.keep_seen, exclude=rules.exclude, only=only)


def history_of_rows(rows: Sequence[Row]) -> History:
    """Stored events as a history."""
    return History(
        items=[row[0] for row in rows],
        times=[row[1] for row in rows],
        values=[row[3] for row in rows],
        kinds=[row[2] for row in rows],
    )
