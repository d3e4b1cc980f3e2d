"""Questions of many requests → one batch through the encoder → an answer each."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from segue.errors import SegueError
from segue.recommend.history import History
from segue.recommend.rules import Rules
from segue.serving.engine.models import Models, ServedModel
from segue.serving.http.bodies import Answer
from segue.serving.requests import RecommendationQuery
from segue.serving.store.store import HistoryStore, Row

READ_AT_ONCE = 1000  # events of a user; who has more is read again
LONGEST_HISTORY = 100_000  # a user's newest events that count; a question must not wait for a robot's million

Queries = Sequence[RecommendationQuery]


def answer_queries(
    models: Models, store: HistoryStore, questions: Sequence[RecommendationQuery]
) -> list[Answer | Exception]:
    """All answers; what is wrong with one question is the answer to it alone."""
    results: dict[int, Answer | Exception] = {}
    groups: dict[ServedModel, list[int]] = {}
    for place, question in enumerate(questions):
        try:
            groups.setdefault(models.named(question.model), []).append(place)
        except SegueError as error:
            results[place] = error
    for model, places in groups.items():
        answers = _answers(model, store, [questions[place] for place in places])
        results.update(zip(places, answers, strict=True))
    return [results[place] for place in range(len(questions))]


def _answers(
    model: ServedModel, store: HistoryStore, questions: Sequence[RecommendationQuery]
) -> list[Answer | Exception]:
    rules = [_rules(model, question) for question in questions]
    sound = [question for question, rule in zip(questions, rules, strict=True) if isinstance(rule, Rules)]
    now = int(time.time())
    answers = model.recommender.answer(
        _histories(store, sound),
        [rule for rule in rules if isinstance(rule, Rules)],
        query_times=np.array([now if question.now is None else question.now for question in sound], dtype=np.int64),
        users=[question.user for question in sound],
        caches=model.memories,
    )
    named = (
        Answer(items=one.items, unknown=one.unknown, fallback=one.fallback, untimed=one.untimed, model=model.name)
        for one in answers
    )
    return [rule if isinstance(rule, Exception) else next(named) for rule in rules]


def _rules(model: ServedModel, question: RecommendationQuery) -> Rules | Exception:
    """A question's rules in the model's numbers, or what is wrong with them."""
    if question.exclude is None and question.only is None and question.where is None:
        return Rules(k=question.k, keep_seen=question.keep_seen)
    try:
        rules = model.recommender.rules(
            k=question.k, exclude=question.exclude, only=question.only, keep_seen=question.keep_seen
        )
        if not question.where:
            return rules
        allowed = model.catalogue.allowed(question.where)
        only = allowed if rules.only is None else np.intersect1d(rules.only, allowed)
        return Rules(k=rules.k, keep_seen=rules.keep_seen, exclude=rules.exclude, only=only)
    except Exception as error:  # noqa: BLE001  # one question's trouble is not the batch's
        return error


def _histories(store: HistoryStore, questions: Sequence[RecommendationQuery]) -> list[History]:
    """Each question's whole history, those of users read from the store together."""
    users = [question.user for question in questions if question.user is not None]
    rows = iter(whole_histories(store, users) if users else ())
    return [read_rows(next(rows)) if question.history is None else question.history for question in questions]


def whole_histories(store: HistoryStore, users: Sequence[str]) -> list[list[Row]]:
    """The events of some users: few have so many that a second look is needed."""
    found = store.newest(users, READ_AT_ONCE)
    return [
        store.newest([user], LONGEST_HISTORY)[0] if len(rows) == READ_AT_ONCE else rows
        for user, rows in zip(users, found, strict=True)
    ]


def read_rows(rows: Sequence[Row]) -> History:
    """Kept events as a history."""
    return History(
        items=[row[0] for row in rows],
        times=[row[1] for row in rows],
        values=[row[3] for row in rows],
        kinds=[row[2] for row in rows],
    )
