"""The engine in a process of its own, so that encoding and HTTP do not wait for each other's turn at Python.

Each lane is a pipe with a thread at its far end: what goes along one lane is done one after the other, and lanes do
not hold each other up. Questions have a lane of their own, on which they are sent as they come: the engine takes up all
that have come as soon as it is done with those before, and need not wait until HTTP has a moment to send them.
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
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

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
QUERIES: Literal["questions"] = "questions"  # the lane of those
MAX_BATCH = 64  # that one engine in this process answers at once
MAX_IN_FLIGHT = 128  # questions that a lane holds, those being answered among them
SMALL = 256  # bytes of names in a question: so many of those fit into a pipe that nobody reads
STOPPING_SECONDS = 10.0
RETRIED_AFTER = 1.0  # seconds after an engine that could not be started
FITTING = 65_536  # bytes that a pipe takes at once, so that nobody waits for the other half
HERE, COMING = b"!", b"~"  # how the bell rings: it is in the pipe, or it is too large and follows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of a lane: a pipe for what is said, and one on which the engine rings when it says something.

    The event loop waits for the bell: it makes what it waits for non-blocking, which a `Connection` cannot take.
    """

    pipe: Connection[Any, Any]
    bell: Connection[Any, Any]

    def close(self) -> None:
        self.pipe.close()
        self.bell.close()


Endpoints = dict[Channel | Literal["questions"], Endpoint]


class EngineClient(Protocol):
    """A way to call an engine from an event loop."""

    async def call(self, lane: Channel, method: str, *arguments: Any) -> Any:
        """What a method of the engine gives or raises. On one lane, one call at a time."""
        ...

    def answering(self) -> JobProcessor[RecommendationQuery, EncodedAnswer]:
        """Whoever answers questions. There is one."""
        ...

    async def close(self) -> None:
        """Let go of the engine."""
        ...


class LocalEngine:
    """An engine in this process, for tests and for those who embed the service."""

    def __init__(self, engine: ServingEngine) -> None:
        self.engine = engine

    async def call(self, lane: Channel, method: str, *arguments: Any) -> Any:  # noqa: ARG002  # a thread a call
        return await asyncio.to_thread(getattr(self.engine, method), *arguments)

    def answering(self) -> JobProcessor[RecommendationQuery, EncodedAnswer]:
        async def answer(questions: Sequence[RecommendationQuery]) -> Sequence[EncodedAnswer | Exception]:
            return await asyncio.to_thread(self.engine.answer, questions)

        return BatchProcessor(answer, most=MAX_BATCH)

    async def close(self) -> None:
        self.engine.close()


class EngineProcess:
    """An engine in a child process. One that dies is started again, and what was asked of it is refused as busy."""

    popular: list[str]
    """The most frequent items of the active run, known once it is ready."""

    def __init__(self, settings: ServiceSettings) -> None:
        """Returns at once, while the engine loads: `wait_until_ready` comes before any call."""
        self._asked: dict[Channel, asyncio.Future[Any]] = {}  # what is being answered on each lane
        self._starting = asyncio.Lock()
        self._listening = 0  # lanes on which something is waited for
        self._closed = False
        self._tried = 0  # times that it was started again, or could not be
        self._answering = _QueryProcessor(self)
        self._process, self._ends = _spawned(settings)
        self._settings = msgspec.structs.replace(settings, joining=True)  # for those that come after it
        # Before multiprocessing waits for its children, at exit: this one leaves when its lanes are closed.
        atexit.register(self._close_ends)

    def wait_until_ready(self) -> None:
        """Raises what the engine refuses to start for."""
        self.popular = _ready(self._process, self._ends)

    async def call(self, lane: Channel, method: str, *arguments: Any) -> Any:
        while (before := self._asked.get(lane)) is not None and not before.done():
            await asyncio.wait([before])  # its caller has left; the next on this lane must not get its answer
        ends = self._ends
        try:
            # Sent at once, before anything else has its turn in the loop: the engine should not wait.
            ends[lane].pipe.send((method, arguments))
            self._asked[lane] = asyncio.ensure_future(self._heard(ends[lane]))
            result = await asyncio.shield(self._asked[lane])
        except (EOFError, OSError):
            # Whoever leaves meanwhile must not stop it half way.
            raise await asyncio.shield(self._start_again(ends)) from None
        if isinstance(result, _Raised):
            raise result.error
        return result

    def answering(self) -> JobProcessor[RecommendationQuery, EncodedAnswer]:
        return self._answering

    async def close(self) -> None:
        async with self._starting:
            self._closed = True
            self._close_ends()
            await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Endpoint the process: without its lanes it has nothing more to do. Blocks until it is gone."""
        self._close_ends()
        atexit.unregister(self._close_ends)
        self._process.join(STOPPING_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    async def _heard(self, end: Endpoint) -> Any:
        """What the engine says next on a lane; `EOFError` where it is gone."""
        loop, ready, bell = asyncio.get_running_loop(), asyncio.Event(), end.bell.fileno()
        self._listening += 1
        try:
            loop.add_reader(bell, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(bell)
            rung = os.read(bell, 1)
            if not rung:
                raise EOFError
            # What has come already is read here; what is still on its way, beside the loop.
            return end.pipe.recv() if rung == HERE else await asyncio.to_thread(end.pipe.recv)
        finally:
            self._listening -= 1

    async def _start_again(self, broken: Endpoints) -> OverloadedError:
        """Whichever lane notices first tries to start a new process; the others find that it was tried. Gives what to
        tell those who asked."""
        tried, sentence = self._tried, "The engine of the service is starting again; ask again in a moment."
        refusal = OverloadedError("restarting", sentence)
        async with self._starting:
            if self._closed or self._ends is not broken or self._tried != tried:
                return refusal
            self._tried += 1
            logger.error("The engine ended unexpectedly and is started again")
            self._process.kill()
            await asyncio.to_thread(self._process.join)
            while self._listening:  # with the process gone every bell rings: none may be closed while it is waited for
                await asyncio.sleep(0.001)
            self._close_ends()
            try:
                process, ends = _spawned(self._settings)
                self.popular = await asyncio.to_thread(_ready, process, ends)
                self._process, self._ends = process, ends  # not before: nobody may call an engine that loads
            except Exception as error:  # noqa: BLE001  # it may be over when the next question tries again
                reason = str(error) if isinstance(error, SegueError) else type(error).__name__
                logger.error("The engine cannot be started again: %s", reason)
                await asyncio.sleep(RETRIED_AFTER)
        return refusal

    def _close_ends(self) -> None:
        for end in self._ends.values():
            end.close()


class _QueryProcessor:
    """Questions on their way to an engine process and answers on their way back, in the same order."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._ends: Endpoints = {}  # where those under way were sent
        self._new: list[RecommendationQuery] = []  # taken on and about to be sent
        self._under_way = 0

    def take(self, question: RecommendationQuery) -> bool:
        # An engine at work does not read, and sending must not wait for it, least of all while it waits for us to read
        # its answers. One that has nothing to do reads whatever is sent.
        if self._under_way + len(self._new) == MAX_IN_FLIGHT or (self._under_way and not _small(question)):
            return False
        if not self._new:
            asyncio.get_running_loop().call_soon(self._send)
        self._new.append(question)
        return True

    async def done(self) -> list[EncodedAnswer | Exception]:
        try:
            self._send()
            answers: list[EncodedAnswer | Exception] = await self._engine._heard(self._ends[QUERIES])
            self._under_way -= len(answers)
        except Exception as error:
            if not isinstance(error, EOFError | OSError):
                logger.error("What the engine answers cannot be understood", exc_info=error)
            # Whose answers would come next is not known: nothing more may come from there.
            refusal = await self._engine._start_again(self._ends)
            self._new, self._under_way = [], 0
            raise refusal from None
        return answers

    def _send(self) -> None:
        if not self._new:
            return
        if not self._under_way:  # else an engine that was started meanwhile would answer some of them alone
            self._ends = self._engine._ends
        told = ForkingPickler.dumps(self._new)
        self._under_way += len(self._new)
        self._new = []
        with contextlib.suppress(OSError):  # it is gone, as `done` will hear
            self._ends[QUERIES].pipe.send_bytes(told)


def _small(question: RecommendationQuery) -> bool:
    """Whether it holds no list and no long name."""
    lists = (question.history, question.exclude, question.only, question.where)
    names = ((name or "").encode(errors="surrogatepass") for name in (question.user, question.model))
    return all(held is None for held in lists) and sum(map(len, names)) <= SMALL


def _spawned(settings: ServiceSettings) -> tuple[Any, Endpoints]:
    """A new engine that is loading: the process, and our ends of the lanes."""
    context = multiprocessing.get_context("spawn")
    near: Endpoints = {}
    far: Endpoints = {}
    for lane in (QUERIES, *CHANNELS):
        heard, rung = context.Pipe(duplex=False)
        ours, theirs = context.Pipe()
        near[lane], far[lane] = Endpoint(ours, heard), Endpoint(theirs, rung)
    process = context.Process(target=run_engine, args=(settings, far), name="segue-engine")
    process.start()
    for end in far.values():
        end.close()  # the child has its own; with ours open, its death would go unnoticed
    return process, near


def _ready(process: Any, near: Endpoints) -> list[str]:
    """Wait for the most frequent items, by which an engine says that it is ready."""
    try:
        begun = near["control"].pipe.recv()
    except EOFError:
        begun = _Raised(SegueError("The engine of the service ended before it was ready; its log says why."))
    if isinstance(begun, _Raised):
        for end in near.values():
            end.close()
        process.join()
        raise begun.error
    popular: list[str] = begun
    return popular


def freeze_loaded_objects() -> None:
    """What is loaded stays, so the collector of garbage need not look at it again, in the middle of a request; and it
    need not come as often as where nothing is known about what is made: requests leave nothing behind in circles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


class _Raised:
    """An exception on its way through a pipe."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def run_engine(settings: ServiceSettings, ends: Endpoints) -> None:
    """The child: load everything, say so, then serve every lane until its pipe is closed."""
    # The parent decides when this ends; a Ctrl-C in the terminal reaches both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logs(settings.log_level)
    # A question is a small matter and requests come side by side: more threads would only get in each other's way. Set
    # before torch is imported, for `torch.set_num_threads` holds for the thread that calls it.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    from segue.serving.engine.engine import ServingEngine

    try:
        engine = ServingEngine.open(settings)
        begun: Any = engine.popular(2)
    except Exception as error:  # noqa: BLE001  # the parent raises it
        begun = _Raised(error)
    try:
        ends["control"].pipe.send_bytes(_serialised(begun))
    except OSError:  # the parent is gone
        return
    if isinstance(begun, _Raised):
        return
    freeze_loaded_objects()
    lanes = [(_serve_channel, ends[lane]) for lane in CHANNELS]
    threads = [
        threading.Thread(target=serve, args=(engine, end), daemon=True)
        for serve, end in ((_serve_queries, ends[QUERIES]), *lanes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.close()


def _serve_channel(engine: ServingEngine, end: Endpoint) -> None:
    while True:
        try:
            method, arguments = end.pipe.recv()
        except (EOFError, OSError):  # the parent has closed it, or is gone
            return
        try:
            result = getattr(engine, method)(*arguments)
        except Exception as error:  # whoever asked gets it
            if not isinstance(error, SegueError):
                logger.error("The engine failed to %s", method, exc_info=error)  # where it happened is known only here
            result = _Raised(error)
        if not _tell(end, result):
            return


def _serve_queries(engine: ServingEngine, end: Endpoint) -> None:
    coming = select.poll()
    coming.register(end.pipe.fileno(), select.POLLIN)
    while True:
        try:
            questions: list[RecommendationQuery] = end.pipe.recv()
            while coming.poll(0):  # at most `MAX_IN_FLIGHT`: no more are sent
                questions += end.pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answers = engine.answer(questions)
        except Exception as error:  # whoever asked gets it
            if not isinstance(error, SegueError):
                logger.error("The engine failed to answer", exc_info=error)
            answers = [error] * len(questions)
        if not _tell(end, answers, together=len(questions)):
            return


def _tell(end: Endpoint, result: Any, *, together: int | None = None) -> bool:
    """Send a result and ring; False where nobody listens any more."""
    told = _serialised(result, together)
    fits = len(told) <= FITTING
    try:
        if fits:
            end.pipe.send_bytes(told)
        os.write(end.bell.fileno(), HERE if fits else COMING)
        if not fits:
            end.pipe.send_bytes(told)
    except OSError:
        return False
    return True


def _serialised(result: Any, together: int | None = None) -> memoryview:
    """A result as it goes through the pipe, or so many. Where it cannot, that is the result: the bell must be followed
    by one, and questions by an answer each."""
    try:
        return ForkingPickler.dumps(result)
    except Exception as error:
        logger.error("A result of the engine cannot be sent", exc_info=error)
        failed = RuntimeError("A result of the engine cannot be sent; its log says why.")
        return ForkingPickler.dumps(_Raised(failed) if together is None else [failed] * together)
