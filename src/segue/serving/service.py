"""The operations behind the HTTP routes: batched answers, durable events that share commits, switches of the run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from functools import partial
from typing import Any

from segue.data.timestamps import MICROSECONDS
from segue.errors import InputError, SegueError
from segue.recommend.answer import Explanation
from segue.recommend.history import identifier, microseconds
from segue.serving.engine.batching import Batcher, BatchProcessor
from segue.serving.engine.channel import Channel, EngineClient
from segue.serving.http import bodies
from segue.serving.http.metrics import Metrics
from segue.serving.requests import EncodedAnswer, OverloadedError, RecommendationQuery
from segue.serving.store.store import AddedItem, Event, HistoryStore

MAX_QUERIES = 512  # waiting; at a thousand answers a second, half a second
QUERY_DELAY = 0.002  # seconds that the first query after a pause waits for others
MAX_WRITES = 2048  # waiting requests with events
MAX_WRITE_BATCH = 256
WRITE_DELAY = 0.005  # seconds that the first of them waits for others: a commit costs as much for one event as for many
MAX_KNOWN_ITEMS = 100_000  # items cached as known to the active model
MAX_ITEM_REQUESTS = 64  # waiting requests with new items
MAX_CALLS: dict[Channel, int] = {"lookups": 128, "explanations": 16, "plans": 16}  # that wait; lookups: all others
MAX_DELETIONS = 64  # users that wait to be deleted
UNKNOWN_DEADLINE = 1.0  # seconds for the engine to find the unknown items of stored events
WRITE_DEADLINE = 10.0  # seconds: a deletion may lock the store, and an event is worth the wait
DELETE_DEADLINE = 30.0  # seconds: a large file is rewritten
DEADLINE = 2.0  # seconds
LONG_DEADLINE = 10.0  # of an explanation, which encodes a history once per entry, and a plan, once per planned item
FOLLOW_SECONDS = 0.5  # between two reads of the active run
DATETIME_MIN, DATETIME_MAX = -62_135_596_800 * MICROSECONDS, 253_402_300_799 * MICROSECONDS  # the years 1 and 9999

WriteResult = tuple[list[bool], set[str]]  # which events are new, and the unknown items
EngineCall = tuple[Any, ...]  # a method of the engine and its arguments
logger = logging.getLogger(__name__)


class Service:
    """The service in one process: bounded queues before the engine and the store. It holds no data of users."""

    def __init__(self, engine: EngineClient, store: HistoryStore, metrics: Metrics) -> None:
        self.store = store
        self.metrics = metrics
        self._engine = engine
        self._queries = Batcher[RecommendationQuery, EncodedAnswer](
            engine.queries, max_waiting=MAX_QUERIES, delay=QUERY_DELAY, on_results=partial(metrics.batch, "answers")
        )
        self._writes = Batcher[Sequence[Event], WriteResult](
            BatchProcessor(self._write, max_batch=MAX_WRITE_BATCH),
            max_waiting=MAX_WRITES,
            delay=WRITE_DELAY,
            on_results=partial(metrics.batch, "events"),
        )
        self._calls: dict[Channel, Batcher[EngineCall, Any]] = {
            channel: Batcher(BatchProcessor(partial(self._call_engine, channel)), max_waiting=max_waiting)
            for channel, max_waiting in MAX_CALLS.items()
        }
        self._additions = Batcher[list[AddedItem], bodies.ItemsReceipt](
            BatchProcessor(self._add_items), max_waiting=MAX_ITEM_REQUESTS
        )
        self._deletions = Batcher[str, int](
            BatchProcessor(self._delete_users, max_batch=MAX_DELETIONS), max_waiting=MAX_DELETIONS
        )
        self._control = asyncio.Lock()
        self._known_items: set[str] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the store's active run; at the end, finish the requests that wait, then close engine and store."""
        async with contextlib.AsyncExitStack() as closing:
            closing.callback(self.store.close)
            closing.push_async_callback(self._engine.close)
            await self._engine.open()
            following = asyncio.create_task(self._follow())
            try:
                yield
            finally:
                following.cancel()
                queues: list[Batcher[Any, Any]] = [self._queries, self._writes, self._additions, self._deletions]
                waiting = [queue.close() for queue in (*queues, *self._calls.values())]
                await asyncio.gather(following, *waiting, return_exceptions=True)

    async def answer(self, query: RecommendationQuery) -> bytes:
        """The next items, as the JSON of an `Answer`."""
        answer, fallback = await self._queries.run(query, deadline=DEADLINE)
        self.metrics.answer(fallback)
        return answer

    async def add_events(self, new: Sequence[bodies.EventBody]) -> bodies.EventsReceipt:
        """Store events, all or none; they are on disk when this returns."""
        now = time.time_ns() // 1000
        events = [_event(body, now) for body in new]
        is_new, unknown = await self._writes.run(events, deadline=WRITE_DEADLINE)
        accepted = sum(is_new)
        self.metrics.events(accepted=accepted, duplicates=len(is_new) - accepted)
        items = dict.fromkeys(event.item for event in events if event.item in unknown)
        return bodies.EventsReceipt(accepted=accepted, duplicates=len(is_new) - accepted, unknown=list(items))

    def add_items(self, new: Sequence[bodies.NewItem]) -> Awaitable[bodies.ItemsReceipt]:
        """Store items unseen in training, all or none; they are on disk when this returns."""
        items = []
        for body in new:
            reserved = sorted({"id", "count", "title"} & body.details.keys())
            if reserved:
                raise InputError(
                    f"The details of an item cannot have a column called {reserved[0]!r}, which is segue's own."
                )
            title = {} if body.title is None else {"title": body.title}
            items.append(AddedItem(_checked_id(body.id), {**title, **body.details}))
        return self._additions.run(items, deadline=WRITE_DEADLINE)

    def similar(self, item: str, k: int, model: str | None) -> Awaitable[bodies.Answer]:
        return self._call("lookups", "similar", item, k, model)

    def search(self, text: str, limit: int) -> Awaitable[list[bodies.CatalogueItem]]:
        """Items of the active model's catalogue."""
        return self._call("lookups", "search", text, limit)

    def history(self, user: str, limit: int) -> Awaitable[bodies.UserHistory]:
        return self._call("lookups", "history", user, limit)

    def explain(self, request: bodies.ExplanationRequest) -> Awaitable[Explanation]:
        return self._call("explanations", "explain", request, deadline=LONG_DEADLINE)

    def plan(self, request: bodies.PlanRequest) -> Awaitable[bodies.PlanAnswer]:
        return self._call("plans", "plan", request, deadline=LONG_DEADLINE)

    def models(self) -> Awaitable[bodies.ModelsStatus]:
        """The models being served, with their reports."""
        return self._call("lookups", "status")

    def check(self) -> Awaitable[None]:
        """Raise `StoreError` if the store cannot be used."""
        return self._call("lookups", "check")

    def delete_user(self, user: str) -> Awaitable[int]:
        """Delete a user; returns the number of events deleted."""
        return self._deletions.run(user, deadline=DELETE_DEADLINE)

    async def switch(self, name: str | None) -> bodies.ActiveRun:
        """Serve another run, None: the previous one. Loading it takes long and blocks no request."""
        async with self._control:
            active: bodies.ActiveRun = await self._engine.call("control", "switch", name)
            await self._follow_run()
        return active

    async def render_metrics(self) -> tuple[bytes, str]:
        """The metrics in Prometheus' text format, with the current queue lengths, and their content type."""
        self.metrics.queue("answers", self._queries.waiting)
        self.metrics.queue("events", self._writes.waiting)
        return await asyncio.to_thread(self.metrics.render)

    def _call(self, channel: Channel, *call: Any, deadline: float | None = None) -> Awaitable[Any]:
        return self._calls[channel].run(call, deadline=DEADLINE if deadline is None else deadline)

    async def _call_engine(self, channel: Channel, calls: Sequence[EngineCall]) -> list[Any]:
        return [await self._engine.call(channel, *calls[0])]

    async def _delete_users(self, users: Sequence[str]) -> list[int]:
        """Delete from the store first, so that the engine cannot read a user again after it has dropped the caches.
        One call for all users rewrites the file once."""
        counts = await asyncio.to_thread(self.store.delete_users, users)
        with contextlib.suppress(OverloadedError):  # an engine that restarts has no caches
            for user in users:
                await self._engine.call("deletions", "drop_user", user)
        return counts

    async def _add_items(self, requests: Sequence[list[AddedItem]]) -> list[bodies.ItemsReceipt]:
        async with self._control:
            return [await self._engine.call("control", "add_items", requests[0])]

    async def _write(self, requests: Sequence[Sequence[Event]]) -> list[WriteResult | Exception]:
        """Store the events of several requests in one commit, and find the items that are unknown to the model."""
        events = [event for request in requests for event in request]
        is_new = iter(await asyncio.to_thread(self.store.append, events))
        known = self._known_items  # a switch replaces the set
        new = {event.item for event in events} - known
        unknown: set[str] = set()
        try:
            if new:  # the engine is called only about items that are not cached
                async with asyncio.timeout(UNKNOWN_DEADLINE):
                    unknown = await self._engine.call("events", "unknown", new)
                if len(known) > MAX_KNOWN_ITEMS:
                    known.clear()
                known |= new - unknown
        except (SegueError, TimeoutError):
            pass  # The engine restarts. The events are on disk and must be acknowledged before later requests time out.
        return [([next(is_new) for _ in request], unknown) for request in requests]

    async def _follow_run(self) -> None:
        """Serve the store's active run, and export it as a metric."""
        if self.metrics.model(*await self._engine.call("control", "follow")):
            self._known_items = set()

    async def _follow(self) -> None:
        """Within a second of a switch in another process, this process serves the same run."""
        while True:
            for step in (self._follow_run, self._drop_deleted):  # users are dropped also if a run cannot be followed
                try:
                    async with self._control:
                        await step()
                except OverloadedError:
                    pass  # the engine restarts
                except Exception as error:  # noqa: BLE001  # nothing may end this loop
                    reason = str(error) if isinstance(error, SegueError) else type(error).__name__
                    logger.error("The store cannot be followed: %s", reason)
            await asyncio.sleep(FOLLOW_SECONDS)

    async def _drop_deleted(self) -> None:
        """Drop the caches of users deleted by other processes, and count encodings."""
        self.metrics.encodings(*await self._engine.call("control", "drop_deleted"))


def _event(body: bodies.EventBody, now: int) -> Event:
    time = now if body.time is None else microseconds(body.time)
    if not DATETIME_MIN <= time <= DATETIME_MAX:
        raise InputError(f"The time {body.time!r} is not within the years 1 to 9999.")
    return Event(
        user=_checked_id(body.user),
        item=_checked_id(body.item),
        time=time,
        kind=body.kind,
        value=body.value,
        id=None if body.id is None else _checked_id(body.id),
    )


def _checked_id(id: str | int) -> str:
    """An id as text. Its length is checked here because the body's type bounds only ids that are text."""
    name = identifier(id)
    if len(name) > bodies.MAX_ID:
        raise InputError(f"An id has at most {bodies.MAX_ID} characters, got a number of {len(name)} digits.")
    return name
