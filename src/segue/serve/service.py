"""What the routes ask: answers batched through the encoder, durable events that share commits, switches followed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from segue.data.batch import MICROSECONDS
from segue.errors import InputError, SegueError
from segue.recommend.answers import Explanation, Recommendation
from segue.recommend.history import identifier, microseconds
from segue.serve.answering import Question, answer_questions, whole_histories
from segue.serve.batching import Batching, one_by_one
from segue.serve.bodies import (
    Answer,
    CatalogueItem,
    EventBody,
    EventsKept,
    ExplanationRequest,
    KeptEvent,
    KeptHistory,
    ModelsServed,
    Switched,
)
from segue.serve.metrics import Metrics
from segue.serve.models import Models, ServedModel
from segue.serve.store import Event, HistoryStore, Row

MOST_QUESTIONS = 512  # that may wait; at a thousand answers a second, half a second
QUESTIONS_TOGETHER = 64
QUESTION_WAIT = 0.001  # seconds the first question of a batch waits for others
MOST_WRITES = 2048  # requests with events that may wait
WRITES_TOGETHER = 256
MOST_ASIDE = 128  # searches, histories, neighbours
MOST_EXPLANATIONS = 16
DEADLINE = 2.0  # seconds; for an explanation, which encodes a history as often as it has entries, five times that
FOLLOWED_EVERY = 0.5  # seconds between two looks at which run is active
RETRIED_AFTER = 10.0  # seconds after a run that could not be followed
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EARLIEST, LATEST = -62_135_596_800 * MICROSECONDS, 253_402_300_799 * MICROSECONDS  # the years 1 and 9999

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Service:
    """One process's share of the service. Threads beside the event loop do what takes time: one encodes, one writes,
    one looks things up, one explains. Nothing about users is kept in memory."""

    def __init__(self, models: Models, store: HistoryStore, metrics: Metrics) -> None:
        self.models = models
        self.store = store
        self.metrics = metrics
        self._answering = Batching(
            "answering",
            self._answer_together,
            most_waiting=MOST_QUESTIONS,
            most_together=QUESTIONS_TOGETHER,
            wait=QUESTION_WAIT,
        )
        self._writing = Batching(
            "writing", self._write_together, most_waiting=MOST_WRITES, most_together=WRITES_TOGETHER
        )
        self._aside = Batching[Callable[[], object], object](
            "aside", one_by_one, most_waiting=MOST_ASIDE, most_together=1
        )
        self._explaining = Batching[Callable[[], Explanation], Explanation](
            "explaining", one_by_one, most_waiting=MOST_EXPLANATIONS, most_together=1
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the store's active run; at the end, finish what was asked and close the store."""
        self._tell_model()
        following = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
            for part in (self._answering, self._writing, self._aside, self._explaining):
                await asyncio.to_thread(part.close)
            self.store.close()

    async def answer(self, question: Question) -> Answer:
        """The items that come next."""
        answer = await self._answering.ask(question, deadline=DEADLINE)
        self.metrics.answer(answer.fallback)
        return answer

    async def keep(self, bodies: Sequence[EventBody]) -> EventsKept:
        """Events, on disk when this returns; all of them or none."""
        now = time.time_ns() // 1000
        events = [_event(body, now) for body in bodies]
        kept = await self._writing.ask(events, deadline=DEADLINE)
        known = self.models.active.recommender.knows
        accepted = sum(kept)
        self.metrics.events(accepted=accepted, duplicates=len(kept) - accepted)
        unknown = dict.fromkeys(event.item for event in events if not known(event.item))
        return EventsKept(accepted=accepted, duplicates=len(kept) - accepted, unknown=list(unknown))

    async def similar(self, item: str, k: int, model: str | None) -> Answer:
        """An item's neighbours."""

        def look() -> Answer:
            served = self.models.named(model)
            found: Recommendation = served.recommender.similar(item, k)
            return Answer(items=found.items, model=served.name)

        return await self._beside(look)

    async def search(self, text: str, limit: int) -> list[CatalogueItem]:
        """Items of the active model's catalogue."""
        return await self._beside(lambda: self.models.active.catalogue.search(text, limit))

    async def history(self, user: str, limit: int) -> KeptHistory:
        """A user's newest events."""

        def look() -> KeptHistory:
            rows = self.store.last([user], limit + 1)[0]
            events = _shown(rows[-limit:], self.models.active)
            return KeptHistory(user=user, events=events, more=len(rows) > limit)

        return await self._beside(look)

    async def forget(self, user: str) -> int:
        """Remove a user; how many events there were."""
        return await self._beside(lambda: self.store.forget(user))

    async def explain(self, asked: ExplanationRequest) -> Explanation:
        """Why an item is answered."""
        if (asked.history is None) == (asked.user is None):
            raise InputError("Give either a history or a user to explain an answer to.")

        def work() -> Explanation:
            recommender = self.models.named(asked.model).recommender
            entries = asked.history if asked.user is None else self._entries(identifier(asked.user))
            return recommender.explain(entries or [], asked.item, keep_seen=asked.keep_seen, attention=asked.attention)

        return await self._explaining.ask(work, deadline=5 * DEADLINE)

    async def switch(self, name: str | None) -> Switched:
        """Serve another run; None is the previous one. Loading it takes its time and stops nobody."""
        switched = await asyncio.to_thread(self.models.rollback if name is None else lambda: self.models.switch(name))
        self._tell_model()
        return switched

    async def served(self) -> ModelsServed:
        """What is being served, with its report."""
        return await self._beside(self.models.served)

    async def check(self) -> None:
        """Whether the store can be used, else its own sentence."""
        await self._beside(self.store.check)

    def _tell_model(self) -> None:
        active = self.models.active
        self.metrics.model(active.name, active.digest)

    async def _beside(self, look: Callable[[], T]) -> T:
        found: object = await self._aside.ask(look, deadline=DEADLINE)
        return found  # type: ignore[return-value]  # the thread serves calls of every type

    def _entries(self, user: str) -> list[dict[str, object]]:
        rows = whole_histories(self.store, [user])[0]
        return [{"item": item, "time": time / MICROSECONDS, "value": value} for item, time, _, value in rows]

    def _answer_together(self, questions: Sequence[Question]) -> list[Answer | Exception]:
        self.metrics.batch("answers", len(questions))
        self.metrics.queue("answers", self._answering.waiting)
        return answer_questions(self.models, self.store, questions)

    def _write_together(self, requests: Sequence[Sequence[Event]]) -> list[list[bool] | Exception]:
        """Requests' events in one commit."""
        self.metrics.batch("events", len(requests))
        self.metrics.queue("events", self._writing.waiting)
        kept = iter(self.store.append([event for events in requests for event in events]))
        return [[next(kept) for _ in events] for events in requests]

    async def _follow(self) -> None:
        """Within a second of a switch elsewhere, this process serves the same run."""
        while True:
            pause = FOLLOWED_EVERY
            try:
                if await asyncio.to_thread(self.models.follow):
                    self._tell_model()
            except SegueError as error:
                logger.error("The active run cannot be followed: %s", error)
                pause = RETRIED_AFTER
            await asyncio.sleep(pause)


def _event(body: EventBody, now: int) -> Event:
    moment = now if body.time is None else microseconds(body.time)
    if not EARLIEST <= moment <= LATEST:
        raise InputError(f"The time {body.time!r} is not within the years 1 to 9999.")
    return Event(
        user=identifier(body.user),
        item=identifier(body.item),
        time=moment,
        kind=body.kind,
        value=body.value,
        id=None if body.id is None else identifier(body.id),
    )


def _shown(rows: Sequence[Row], model: ServedModel) -> list[KeptEvent]:
    vocabulary = model.recommender.vocabulary
    titles = vocabulary.titles(vocabulary.numbers([row[0] for row in rows], unknown="zero"))
    return [
        KeptEvent(
            item=item,
            title=title,
            time=EPOCH + timedelta(microseconds=time),
            kind=kind,
            value=value,
            known=model.recommender.knows(item),
        )
        for (item, time, kind, value), title in zip(rows, titles, strict=True)
    ]
