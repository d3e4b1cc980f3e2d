"""The engine in a process of its own, so that encoding and HTTP do not compete for one interpreter lock.

Each channel is a pair of pipes with a thread of the engine at the other end. Calls on one channel run one after the
other; channels do not block each other. Queries have a channel of their own and are sent as they come: as soon as the
engine has answered a batch, it reads all queries that have arrived since, and answers them as the next batch.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import multiprocessing
import os
import select
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from segue.errors import SegueError
from segue.serving.engine.batching import BatchProcessor, JobProcessor
from segue.serving.http.logs import configure_logs
from segue.serving.requests import EncodedAnswer, OverloadedError, RecommendationQuery
from segue.serving.settings import ServiceSettings

if TYPE_CHECKING:
    from segue.serving.engine.engine import ServingEngine

Channel = Literal["events", "lookups", "explanations", "plans", "deletions", "control"]

CHANNELS: tuple[Channel, ...] = get_args(Channel)
QUERIES: Literal["queries"] = "queries"  # the channel of recommendation queries
MAX_BATCH = 64  # queries that an engine in this process answers together
MAX_IN_FLIGHT = 128  # queries that were sent and have no answer
MAX_SHORT_QUERY = 256  # bytes of names in a query: `MAX_IN_FLIGHT` of them fit into a pipe that is not read
STOPPING_SECONDS = 10.0
RETRY_SECONDS = 1.0  # after an engine that could not be started
PIPE_BYTES = 65_536  # that can be written to an empty pipe without blocking
WRITTEN, FOLLOWS = b"!", b"~"  # notifications: the message is in the pipe; it is too large for that and follows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of a channel: a pipe for messages, and one on which the engine notifies that it sends one.

    The event loop waits for notifications: it needs a non-blocking file, and a `Connection` must block.
    """

    messages: Connection[Any, Any]
    notifications: Connection[Any, Any]

    def close(self) -> None:
        self.messages.close()
        self.notifications.close()


Endpoints = dict[Channel | Literal["queries"], Endpoint]


class LocalEngine:
    """An engine in this process, for tests and for programs that embed the service."""

    def __init__(self, engine: ServingEngine) -> None:
        self.engine = engine
        self.queries: JobProcessor[RecommendationQuery, EncodedAnswer] = BatchProcessor(
            lambda queries: asyncio.to_thread(engine.answer, queries), max_batch=MAX_BATCH
        )

    async def call(self, channel: Channel, method: str, *arguments: Any) -> Any:  # noqa: ARG002  # a thread per call
        """Return or raise what a method of the engine does."""
        return await asyncio.to_thread(getattr(self.engine, method), *arguments)

    async def close(self) -> None:
        self.engine.close()


class EngineProcess:
    """An engine in a child process. If it dies it is started again, and pending calls fail with `OverloadedError`."""

    popular: list[str]
    """The most frequent items of the active run, known once the engine is ready."""

    def __init__(self, settings: ServiceSettings) -> None:
        """Start the process and return at once: call `wait_until_ready` before anything else."""
        self._pending: dict[Channel, asyncio.Future[Any]] = {}  # the current call of each channel
        self._restarting = asyncio.Lock()
        self._receiving = 0  # channels on which an answer is awaited
        self._closed = False
        self._restarts = 0  # attempts, also those that failed
        self.queries: JobProcessor[RecommendationQuery, EncodedAnswer] = _QueryProcessor(self)
        self._process, self._endpoints = _spawn(settings)
        self._settings = msgspec.structs.replace(settings, joining=True)  # for its successors
        # Runs at exit before multiprocessing waits for its children: this one ends when its channels are closed.
        atexit.register(self._close_endpoints)

    def wait_until_ready(self) -> None:
        """Block until the engine is loaded; raises the error that prevents it from starting."""
        self.popular = _wait_until_ready(self._process, self._endpoints)

    async def call(self, channel: Channel, method: str, *arguments: Any) -> Any:
        """Return or raise what a method of the engine does. A channel runs one call at a time."""
        while (pending := self._pending.get(channel)) is not None and not pending.done():
            await asyncio.wait([pending])  # its caller was cancelled; its answer must not go to the next caller
        endpoints = self._endpoints
        try:
            endpoints[channel].messages.send((method, arguments))  # before any other task runs
            self._pending[channel] = asyncio.ensure_future(self._receive(endpoints[channel]))
            result = await asyncio.shield(self._pending[channel])
        except (EOFError, OSError):
            # The restart must finish even if the caller is cancelled.
            raise await asyncio.shield(self._restart(endpoints)) from None
        if isinstance(result, Exception):
            raise result
        return result

    async def close(self) -> None:
        async with self._restarting:
            self._closed = True
            self._close_endpoints()
            await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Close the channels, which ends the process, and block until it has ended."""
        self._close_endpoints()
        atexit.unregister(self._close_endpoints)
        self._process.join(STOPPING_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    async def _receive(self, endpoint: Endpoint) -> Any:
        """The next message of a channel; `EOFError` if the engine has died."""
        loop, notified, file = asyncio.get_running_loop(), asyncio.Event(), endpoint.notifications.fileno()
        self._receiving += 1
        try:
            loop.add_reader(file, notified.set)
            try:
                await notified.wait()
            finally:
                loop.remove_reader(file)
            notification = os.read(file, 1)
            if not notification:
                raise EOFError
            # A message that is still being written would block the loop.
            receive = endpoint.messages.recv
            return receive() if notification == WRITTEN else await asyncio.to_thread(receive)
        finally:
            self._receiving -= 1

    async def _restart(self, broken: Endpoints) -> OverloadedError:
        """Start a new process, unless another channel has tried it meanwhile; returns the error for the callers."""
        attempts, sentence = self._restarts, "The engine of the service is starting again; retry in a moment."
        refusal = OverloadedError("restarting", sentence)
        async with self._restarting:
            if self._closed or self._endpoints is not broken or self._restarts != attempts:
                return refusal
            self._restarts += 1
            logger.error("The engine ended unexpectedly and is started again")
            self._process.kill()
            await asyncio.to_thread(self._process.join)
            while self._receiving:  # each of them sees the end of its pipe; a file must not be closed before
                await asyncio.sleep(0.001)
            self._close_endpoints()
            try:
                process, endpoints = _spawn(self._settings)
                self.popular = await asyncio.to_thread(_wait_until_ready, process, endpoints)
                self._process, self._endpoints = process, endpoints  # only now: calls need a loaded engine
            except Exception as error:  # noqa: BLE001  # the next call tries again
                reason = str(error) if isinstance(error, SegueError) else type(error).__name__
                logger.error("The engine cannot be started again: %s", reason)
                await asyncio.sleep(RETRY_SECONDS)
        return refusal

    def _close_endpoints(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.close()


EngineClient = LocalEngine | EngineProcess


class _QueryProcessor:
    """Sends queries to an engine process and receives their answers, in the same order."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._endpoints: Endpoints = {}  # to which the queries in flight were sent
        self._unsent: list[RecommendationQuery] = []
        self._in_flight = 0

    def submit(self, query: RecommendationQuery) -> bool:
        # A busy engine does not read. Sending must not block on it, because it may block on sending its answers to this
        # process. An idle engine reads whatever is sent.
        if self._in_flight + len(self._unsent) == MAX_IN_FLIGHT or (self._in_flight and not _is_short(query)):
            return False
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(query)
        return True

    async def results(self) -> list[EncodedAnswer | Exception]:
        try:
            self._send()
            answers: list[EncodedAnswer | Exception] = await self._engine._receive(self._endpoints[QUERIES])
            self._in_flight -= len(answers)
        except Exception as error:
            if not isinstance(error, EOFError | OSError):
                logger.error("An answer of the engine cannot be read", exc_info=error)
            # Which answers come next is unknown, so nothing more may be read from this process.
            refusal = await self._engine._restart(self._endpoints)
            self._unsent, self._in_flight = [], 0
            raise refusal from None
        return answers

    def _send(self) -> None:
        if not self._unsent:
            return
        if not self._in_flight:  # all queries in flight go to one process
            self._endpoints = self._engine._endpoints
        message = ForkingPickler.dumps(self._unsent)
        self._in_flight += len(self._unsent)
        self._unsent = []
        with contextlib.suppress(OSError):  # the engine has died: `results` raises it
            self._endpoints[QUERIES].messages.send_bytes(message)


def _is_short(query: RecommendationQuery) -> bool:
    """Whether a query has no list and no long name."""
    lists = (query.history, query.exclude, query.only, query.where)
    names = ((name or "").encode(errors="surrogatepass") for name in (query.user, query.model))
    return all(part is None for part in lists) and sum(map(len, names)) <= MAX_SHORT_QUERY


def _spawn(settings: ServiceSettings) -> tuple[Any, Endpoints]:
    """Start an engine; returns the process, which is still loading, and our endpoints."""
    context = multiprocessing.get_context("spawn")
    ours: Endpoints = {}
    theirs: Endpoints = {}
    for channel in (QUERIES, *CHANNELS):
        notifications, notify = context.Pipe(duplex=False)
        near, far = context.Pipe()
        ours[channel], theirs[channel] = Endpoint(near, notifications), Endpoint(far, notify)
    process = context.Process(target=run_engine, args=(settings, theirs), name="segue-engine")
    process.start()
    for endpoint in theirs.values():
        endpoint.close()  # the child has copies; an open one here would hide its death
    return process, ours


def _wait_until_ready(process: Any, endpoints: Endpoints) -> list[str]:
    """Wait for an engine's first message, its most frequent items."""
    try:
        popular: list[str] | Exception = endpoints["control"].messages.recv()
    except EOFError:
        popular = SegueError("The engine of the service ended before it was ready; its log says why.")
    if isinstance(popular, Exception):
        for endpoint in endpoints.values():
            endpoint.close()
        process.join()
        raise popular
    return popular


def freeze_loaded_objects() -> None:
    """Exclude everything loaded so far from garbage collection, and collect more rarely: requests leave no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def run_engine(settings: ServiceSettings, endpoints: Endpoints) -> None:
    """Main function of the child: load the engine, send its first message, serve each channel until it is closed."""
    # The parent decides when this process ends; Ctrl-C in a terminal reaches both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logs(settings.log_level)
    # Queries are small and run side by side: more threads would only compete. Set before torch is imported, because
    # `torch.set_num_threads` holds only for the thread that calls it.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    from segue.serving.engine.engine import ServingEngine

    try:
        engine = ServingEngine.open(settings)
        first: list[str] | Exception = engine.popular(2)
    except Exception as error:  # noqa: BLE001  # the parent raises it
        first = error
    try:
        endpoints["control"].messages.send_bytes(_serialised(first))
    except OSError:  # the parent has ended
        return
    if isinstance(first, Exception):
        return
    freeze_loaded_objects()
    threads = [
        threading.Thread(target=_serve_channel, args=(engine, endpoint, channel), daemon=True)
        for channel, endpoint in endpoints.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.close()


def _serve_channel(engine: ServingEngine, endpoint: Endpoint, channel: Channel | Literal["queries"]) -> None:
    """Run the calls of a channel one by one, or answer all queries that have arrived together, until it is closed."""
    messages, of_queries = endpoint.messages, channel == QUERIES
    arrived = select.poll()
    arrived.register(messages.fileno(), select.POLLIN)
    while True:
        try:
            message = messages.recv()
            while of_queries and arrived.poll(0):  # at most `MAX_IN_FLIGHT` queries: no more are sent
                message += messages.recv()
        except (EOFError, OSError):  # the parent has closed the channel, or has ended
            return
        n_answers = len(message) if of_queries else None
        method, arguments = ("answer", (message,)) if of_queries else message
        try:
            result = getattr(engine, method)(*arguments)
        except Exception as error:  # the caller gets it
            if not isinstance(error, SegueError):
                logger.error("The engine failed to %s", method, exc_info=error)  # only this process has the traceback
            result = _failure(error, n_answers)
        serialised = _serialised(result, n_answers)
        fits = len(serialised) <= PIPE_BYTES
        try:
            if fits:
                messages.send_bytes(serialised)
            os.write(endpoint.notifications.fileno(), WRITTEN if fits else FOLLOWS)
            if not fits:
                messages.send_bytes(serialised)
        except OSError:
            return


def _failure(error: Exception, n_answers: int | None) -> Exception | list[Exception]:
    """An error as the result of a call, which its caller raises, or of each of `n_answers` queries."""
    return error if n_answers is None else [error] * n_answers


def _serialised(result: Any, n_answers: int | None = None) -> memoryview:
    """A result, or `n_answers` of them, as a message. If it cannot be serialised, the message is that error: the
    parent waits for a message, and for one answer per query."""
    try:
        return ForkingPickler.dumps(result)
    except Exception as error:
        logger.error("A result of the engine cannot be sent", exc_info=error)
        failure = RuntimeError("A result of the engine cannot be sent; its log says why.")
        return ForkingPickler.dumps(_failure(failure, n_answers))
