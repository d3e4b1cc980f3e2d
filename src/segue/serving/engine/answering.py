"""Queries of many requests → one batch through the encoder → one answer each."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from segue.recommend.history import History
from segue.recommend.rules import Rules, read_rules
from segue.serving.engine.models import Models
from segue.serving.engine.served_model import ServedModel
from segue.serving.http.bodies import Answer
from segue.serving.requests import RecommendationQuery
from segue.serving.store.store import HistoryStore, Row

FIRST_READ = 1000  # events of a user; a longer history is read a second time, whole
MAX_HISTORY = 100_000  # newest events of a user that are read, so that no request waits for a robot's million

Queries = Sequence[RecommendationQuery]


def answer_queries(models: Models, store: HistoryStore, queries: Queries) -> list[Answer | Exception]:
    """Answers in the order of the queries; an exception is the answer to a query that cannot be used."""
    results: dict[int, Answer | Exception] = {}
    groups: dict[ServedModel, dict[int, Rules]] = {}  # by model, the rules of each of its queries
    for index, query in enumerate(queries):
        try:
            model = models.named(query.model)
            groups.setdefault(model, {})[index] = _rules(model, query)
        except Exception as error:  # noqa: BLE001  # it must not fail the other queries of the batch
            results[index] = error
    for model, rules in groups.items():
        answers = _answer_with(model, store, [queries[index] for index in rules], list(rules.values()))
        results.update(zip(rules, answers, strict=True))
    return [results[index] for index in range(len(queries))]


def _answer_with(model: ServedModel, store: HistoryStore, queries: Queries, rules: Sequence[Rules]) -> list[Answer]:
    now = int(time.time())
    users = [query.user for query in queries if query.user is not None]
    stored = iter(stored_histories(store, users) if users else ())  # of all users in one read
    recommendations = model.recommender.answer(
        [history_of_rows(next(stored)) if query.history is None else query.history for query in queries],
        rules,
        query_times=np.array([now if query.now is None else query.now for query in queries], dtype=np.int64),
        users=[query.user for query in queries],
        caches=model.kv_caches,
    )
    return [
        Answer(items=one.items, unknown=one.unknown, fallback=one.fallback, untimed=one.untimed, model=model.name)
        for one in recommendations
    ]


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


def stored_histories(store: HistoryStore, users: Sequence[str]) -> list[list[Row]]:
    """All events of some users, oldest first. Few users have so many that a second read is needed."""
    histories = store.newest(users, FIRST_READ)
    return [
        store.newest([user], MAX_HISTORY)[0] if len(rows) == FIRST_READ else rows
        for user, rows in zip(users, histories, strict=True)
    ]


def history_of_rows(rows: Sequence[Row]) -> History:
    """Stored events as a history."""
    return History(
        items=[row[0] for row in rows],
        times=[row[1] for row in rows],
        values=[row[3] for row in rows],
        kinds=[row[2] for row in rows],
    )
