"""What the routes ask: answers batched through the engine, durable events that share commits, switches followed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from segue.data.batch import MICROSECONDS
from segue.errors import InputError, SegueError
from segue.recommend.explain.explanation import Explanation
from segue.recommend.history import identifier, microseconds
from segue.serving.engine.batching import Batcher, BatchProcessor
from segue.serving.engine.channel import EngineClient
from segue.serving.http.bodies import (
    MAX_ID,
    ActiveRun,
    Answer,
    CatalogueItem,
    EventBody,
    EventsReceipt,
    ExplanationRequest,
    ItemsReceipt,
    ModelsStatus,
    NewItem,
    PlanAnswer,
    PlanRequest,
    UserHistory,
)
from segue.serving.http.metrics import Metrics, Queue
from segue.serving.requests import EncodedAnswer, OverloadedError, RecommendationQuery
from segue.serving.store.store import AddedItem, Event, HistoryStore

MOST_QUESTIONS = 512  # that may wait; at a thousand answers a second, half a second
QUESTION_WAIT = 0.002  # seconds the first question after a pause waits for others
MOST_WRITES = 2048  # requests with events that may wait
WRITES_TOGETHER = 256
WRITE_WAIT = 0.005  # seconds the first of them waits for others: a commit costs much the same for one event or many
MOST_KNOWN = 100_000  # items that are remembered as known to the active model
MOST_ADDED = 64  # requests with new items that wait
MOST_LOOKUPS = 128  # searches, histories, neighbours
MOST_EXPLANATIONS = 16
MOST_PLANS = 16  # that wait to be made
MOST_FORGOTTEN = 64  # users who wait to be forgotten
UNKNOWN_DEADLINE = 1.0  # seconds for the engine to say which items of written events it does not know
WRITE_DEADLINE = 10.0  # seconds: the store may be busy with a user to forget, and an event is worth the wait
FORGET_DEADLINE = 30.0  # seconds: a large file is wiped, not only unlinked
DEADLINE = 2.0  # seconds; five times that for an explanation, which encodes a history as often as it has entries, and
# for a plan, which asks again for each of its items
FOLLOWED_EVERY = 0.5  # seconds between two looks at which run is active
EARLIEST, LATEST = -62_135_596_800 * MICROSECONDS, 253_402_300_799 * MICROSECONDS  # the years 1 and 9999

Kept = tuple[list[bool], set[str]]  # which events are new, and the items that are not known
EngineCall = tuple[Any, ...]  # a method of the engine and its arguments
logger = logging.getLogger(__name__)


class Service:
    """One process's share of the service: what may wait for what, in which bounds. Nothing about users is kept."""

    def __init__(self, lanes: EngineClient, store: HistoryStore, metrics: Metrics) -> None:
        self.store = store
        self.metrics = metrics
        self._engine = lanes
        self._answering = Batcher[RecommendationQuery, EncodedAnswer](
            lanes.answering(),
            most_waiting=MOST_QUESTIONS,
            wait=QUESTION_WAIT,
            finished=partial(self._finished, "answers"),
        )
        self._writing = Batcher[Sequence[Event], Kept](
            BatchProcessor(self._write_together, most=WRITES_TOGETHER),
            most_waiting=MOST_WRITES,
            wait=WRITE_WAIT,
            finished=partial(self._finished, "events"),
        )
        self._looking = Batcher[EngineCall, Any](BatchProcessor(self._look_one), most_waiting=MOST_LOOKUPS)
        self._explaining = Batcher[EngineCall, Any](BatchProcessor(self._explain_one), most_waiting=MOST_EXPLANATIONS)
        self._planning = Batcher[EngineCall, Any](BatchProcessor(self._plan_one), most_waiting=MOST_PLANS)
        self._adding = Batcher[list[AddedItem], ItemsReceipt](BatchProcessor(self._add_one), most_waiting=MOST_ADDED)
        self._forgetting = Batcher[str, int](
            BatchProcessor(self._forget_together, most=MOST_FORGOTTEN), most_waiting=MOST_FORGOTTEN
        )
        self._control = asyncio.Lock()
        self._known: set[str] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the store's active run; at the end, finish what was asked, then let go of engine and store."""
        following = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            following.cancel()
            parts = (
                self._answering,
                self._writing,
                self._looking,
                self._explaining,
                self._planning,
                self._adding,
                self._forgetting,
            )
            try:
                await asyncio.gather(following, *(part.close() for part in parts), return_exceptions=True)
            finally:
                try:
                    await self._engine.close()
                finally:
                    self.store.close()

    async def answer(self, question: RecommendationQuery) -> bytes:
        """The items that come next, as the JSON of an `Answer`."""
        answer, fallback = await self._answering.ask(question, deadline=DEADLINE)
        self.metrics.answer(fallback)
        return answer

    async def add_events(self, bodies: Sequence[EventBody]) -> EventsReceipt:
        """Events, on disk when this returns; all of them or none."""
        now = time.time_ns() // 1000
        events = [_event(body, now) for body in bodies]
        kept, unknown = await self._writing.ask(events, deadline=WRITE_DEADLINE)
        accepted = sum(kept)
        self.metrics.events(accepted=accepted, duplicates=len(kept) - accepted)
        items = dict.fromkeys(event.item for event in events if event.item in unknown)
        return EventsReceipt(accepted=accepted, duplicates=len(kept) - accepted, unknown=list(items))

    async def add_items(self, bodies: Sequence[NewItem]) -> ItemsReceipt:
        """Items that the active model was not trained on, on disk when this returns; all of them or none."""
        items = [AddedItem(_kept_id(body.id), _row(body)) for body in bodies]
        return await self._adding.ask(items, deadline=WRITE_DEADLINE)

    async def similar(self, item: str, k: int, model: str | None) -> Answer:
        """An item's neighbours."""
        found: Answer = await self._look("similar", item, k, model)
        return found

    async def search(self, text: str, limit: int) -> list[CatalogueItem]:
        """Items of the active model's catalogue."""
        found: list[CatalogueItem] = await self._look("search", text, limit)
        return found

    async def history(self, user: str, limit: int) -> UserHistory:
        """A user's newest events."""
        found: UserHistory = await self._look("history", user, limit)
        return found

    async def delete_user(self, user: str) -> int:
        """Remove a user; how many events there were."""
        return await self._forgetting.ask(user, deadline=FORGET_DEADLINE)

    async def explain(self, asked: ExplanationRequest) -> Explanation:
        """Why an item is answered."""
        explained: Explanation = await self._explaining.ask(("explain", asked), deadline=5 * DEADLINE)
        return explained

    async def plan(self, asked: PlanRequest) -> PlanAnswer:
        """The next items as one plan."""
        planned: PlanAnswer = await self._planning.ask(("plan", asked), deadline=5 * DEADLINE)
        return planned

    async def models(self) -> ModelsStatus:
        """What is being served, with its report."""
        found: ModelsStatus = await self._look("served")
        return found

    async def switch(self, name: str | None) -> ActiveRun:
        """Serve another run; None is the previous one. Loading it takes its time and stops nobody."""
        asked = ("rollback",) if name is None else ("switch", name)
        async with self._control:
            switched: ActiveRun = await self._engine.call("control", *asked)
            await self._tell_model()
        return switched

    async def render_metrics(self) -> tuple[bytes, str]:
        """The metrics in Prometheus' text format, with what waits at this moment, and their content type."""
        self.metrics.queue("answers", self._answering.waiting)
        self.metrics.queue("events", self._writing.waiting)
        return await asyncio.to_thread(self.metrics.render)

    async def check(self) -> None:
        """Whether the store can be used, else its own sentence."""
        await self._look("check")

    async def _look(self, method: str, *arguments: Any) -> Any:
        return await self._looking.ask((method, *arguments), deadline=DEADLINE)

    async def _look_one(self, calls: Sequence[EngineCall]) -> list[Any]:
        return [await self._engine.call("lookups", *calls[0])]

    async def _explain_one(self, calls: Sequence[EngineCall]) -> list[Any]:
        return [await self._engine.call("explanations", *calls[0])]

    async def _plan_one(self, calls: Sequence[EngineCall]) -> list[Any]:
        return [await self._engine.call("plans", *calls[0])]

    async def _forget_together(self, users: Sequence[str]) -> list[int]:
        """From the store first: what the engine reads there after it has forgotten is nothing. A file is rewritten once
        for them all."""
        removed = await asyncio.to_thread(self.store.delete_users, users)
        with contextlib.suppress(OverloadedError):  # an engine that starts again remembers nobody
            for user in users:
                await self._engine.call("deletions", "drop_user", user)
        return removed

    async def _add_one(self, requests: Sequence[list[AddedItem]]) -> list[ItemsReceipt]:
        async with self._control:
            return [await self._engine.call("control", "add_items", requests[0])]

    def _finished(self, queue: Queue, together: int, waiting: int) -> None:
        self.metrics.batch(queue, together)
        self.metrics.queue(queue, waiting)

    async def _write_together(self, requests: Sequence[Sequence[Event]]) -> list[Kept | Exception]:
        """Requests' events in one commit."""
        events = [event for request in requests for event in request]
        kept = iter(await asyncio.to_thread(self.store.append, events))
        unknown = await self._unknown({event.item for event in events})
        return [([next(kept) for _ in request], unknown) for request in requests]

    async def _unknown(self, items: set[str]) -> set[str]:
        """Those that the active model does not know; the engine is asked only about items not met before."""
        known = self._known  # a switch puts another in its place
        new = items - known
        if not new:
            return new
        try:
            async with asyncio.timeout(UNKNOWN_DEADLINE):
                unknown: set[str] = await self._engine.call("events", "unknown", new)
        except (SegueError, TimeoutError):
            # An engine that starts again: the events are on disk all the same, and the answer must say so, before
            # those that come after them have waited in vain.
            return set()
        if len(known) > MOST_KNOWN:
            known.clear()
        known |= new - unknown
        return unknown

    async def _tell_model(self) -> None:
        """Serve what is active, and count it."""
        if self.metrics.model(*await self._engine.call("control", "follow")):
            self._known = set()

    async def _follow(self) -> None:
        """Within a second of a switch elsewhere, this process serves the same run."""
        while True:
            for step in (self._tell_model, self._tidy):  # a run that cannot be followed keeps nobody's history
                try:
                    async with self._control:
                        await step()
                except OverloadedError:
                    pass  # the engine is being started again
                except Exception as error:  # noqa: BLE001  # nothing may end the following
                    reason = str(error) if isinstance(error, SegueError) else type(error).__name__
                    logger.error("The store cannot be followed: %s", reason)
            await asyncio.sleep(FOLLOWED_EVERY)

    async def _tidy(self) -> None:
        """Forget whom the store does not have any more, and count what was encoded."""
        self.metrics.encodings(*await self._engine.call("control", "tidy"))


def _event(body: EventBody, now: int) -> Event:
    moment = now if body.time is None else microseconds(body.time)
    if not EARLIEST <= moment <= LATEST:
        raise InputError(f"The time {body.time!r} is not within the years 1 to 9999.")
    return Event(
        user=_kept_id(body.user),
        item=_kept_id(body.item),
        time=moment,
        kind=body.kind,
        value=body.value,
        id=None if body.id is None else _kept_id(body.id),
    )


def _row(body: NewItem) -> dict[str, Any]:
    """What is kept of a new item beside its id: the columns of a catalogue."""
    owned = sorted({"id", "count", "title"} & body.details.keys())
    if owned:
        raise InputError(f"The details of an item cannot have a column called {owned[0]!r}, which is segue's own.")
    return {"title": body.title, **body.details} if body.title is not None else dict(body.details)


def _kept_id(id: str | int) -> str:
    """An id as a text; that of a whole number was not measured when the body was read."""
    name = identifier(id)
    if len(name) > MAX_ID:
        raise InputError(f"An id has at most {MAX_ID} characters, got a number of {len(name)} digits.")
    return name
