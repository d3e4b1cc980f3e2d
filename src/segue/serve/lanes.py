"""The engine in a process of its own, so that encoding and HTTP do not wait for each other's turn at Python.

Each lane is a pipe with a thread at its far end: what goes along one lane is done one after the other, and lanes do
not hold each other up.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from segue.errors import SegueError
from segue.serve.logs import configure_logs
from segue.serve.refusals import OverloadedError
from segue.serve.settings import ServiceSettings

if TYPE_CHECKING:
    from segue.serve.engine import Engine

Lane = Literal["answers", "events", "lookups", "explanations", "control"]

LANES: tuple[Lane, ...] = get_args(Lane)
STOPPING_SECONDS = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class End:
    """One end of a lane: a pipe for what is said, and one on which the engine rings before it says something.

    The event loop waits for the bell: it makes what it waits for non-blocking, which a `Connection` cannot take.
    """

    pipe: Connection[Any, Any]
    bell: Connection[Any, Any]

    def close(self) -> None:
        self.pipe.close()
        self.bell.close()


Ends = dict[Lane, End]


class Lanes(Protocol):
    """A way to call an engine from an event loop."""

    async def call(self, lane: Lane, method: str, *arguments: Any) -> Any:
        """What a method of the engine gives or raises. On one lane, one call at a time."""
        ...

    async def close(self) -> None:
        """Let go of the engine."""
        ...


class Here:
    """An engine in this process, for tests and for those who embed the service."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def call(self, lane: Lane, method: str, *arguments: Any) -> Any:  # noqa: ARG002  # a thread a call
        return await asyncio.to_thread(getattr(self.engine, method), *arguments)

    async def close(self) -> None:
        self.engine.close()


class EngineProcess:
    """An engine in a child process. One that dies is started again, and what was asked of it is refused as busy."""

    def __init__(self, settings: ServiceSettings) -> None:
        """Returns when the engine is ready; what it refuses to start for is raised here."""
        self._settings = settings
        self._starting = asyncio.Lock()
        self._closed = False
        self._process, self._ends, self.popular = _started(settings)

    async def call(self, lane: Lane, method: str, *arguments: Any) -> Any:
        ends = self._ends
        end = ends[lane]
        try:
            end.pipe.send((method, arguments))
            await _rung(end.bell)
            result = end.pipe.recv()
        except (EOFError, OSError):
            await self._start_again(ends)
            sentence = "The engine of the service is starting again; ask again in a moment."
            raise OverloadedError("restarting", sentence) from None
        if isinstance(result, _Raised):
            raise result.error
        return result

    async def close(self) -> None:
        async with self._starting:
            self._closed = True
            await asyncio.to_thread(self.end)

    def end(self) -> None:
        """End the process: without its pipes it has nothing more to do. Blocks until it is gone."""
        for end in self._ends.values():
            end.close()
        self._process.join(STOPPING_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    async def _start_again(self, broken: Ends) -> None:
        """Whichever lane notices first starts the new process; the others find it started."""
        async with self._starting:
            if self._closed or self._ends is not broken:
                return
            logger.error("The engine ended unexpectedly and is started again")
            await asyncio.to_thread(self.end)
            self._process, self._ends, self.popular = await asyncio.to_thread(_started, self._settings)


async def _rung(bell: Connection[Any, Any]) -> None:
    """Wait until the engine rings; `EOFError` where it is gone."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(bell.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(bell.fileno())
    if not os.read(bell.fileno(), 1):
        raise EOFError


def _started(settings: ServiceSettings) -> tuple[Any, Ends, list[str]]:
    """A new engine: the process, our ends of the lanes, and the most frequent items by which it says it is ready."""
    context = multiprocessing.get_context("spawn")
    near: Ends = {}
    far: Ends = {}
    for lane in LANES:
        heard, rung = context.Pipe(duplex=False)
        ours, theirs = context.Pipe()
        near[lane], far[lane] = End(ours, heard), End(theirs, rung)
    process = context.Process(target=run_engine, args=(settings, far), name="segue-engine")
    process.start()
    for end in far.values():
        end.close()  # the child has its own; with ours open, its death would go unnoticed
    try:
        begun = near["control"].pipe.recv()
    except EOFError:
        begun = _Raised(SegueError("The engine of the service ended before it was ready; its log says why."))
    if isinstance(begun, _Raised):
        for end in near.values():
            end.close()
        process.join()
        process.close()
        raise begun.error
    return process, near, begun


def settle() -> None:
    """What is loaded stays, so the collector of garbage need not look at it again, in the middle of a request; and it
    need not come as often as where nothing is known about what is made: requests leave nothing behind in circles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


class _Raised:
    """An exception on its way through a pipe."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def run_engine(settings: ServiceSettings, ends: Ends) -> None:
    """The child: load everything, say so, then serve every lane until its pipe is closed."""
    # The parent decides when this ends; a Ctrl-C in the terminal reaches both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logs(settings.log_level)
    # A question is a small matter and requests come side by side: more threads would only get in each other's way. Set
    # before torch is imported, for `torch.set_num_threads` holds for the thread that calls it.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    from segue.serve.engine import Engine

    try:
        engine = Engine.open(settings)
        ends["control"].pipe.send(engine.popular(2))
    except Exception as error:  # noqa: BLE001  # the parent raises it
        ends["control"].pipe.send(_Raised(error))
        return
    settle()
    threads = [threading.Thread(target=_serve_lane, args=(engine, end), daemon=True) for end in ends.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.close()


def _serve_lane(engine: Engine, end: End) -> None:
    while True:
        try:
            method, arguments = end.pipe.recv()
        except (EOFError, OSError):  # the parent has closed it, or is gone
            return
        try:
            result = getattr(engine, method)(*arguments)
        except Exception as error:  # noqa: BLE001  # whoever asked gets it
            result = _Raised(error)
        told = _told(result)
        try:
            os.write(end.bell.fileno(), b"!")
            end.pipe.send_bytes(told)
        except OSError:
            return


def _told(result: Any) -> memoryview:
    """A result as it goes through the pipe. Where it cannot, that is the result: the bell must be followed by one."""
    try:
        return ForkingPickler.dumps(result)
    except Exception as error:
        logger.error("A result of the engine cannot be sent", exc_info=error)
        return ForkingPickler.dumps(_Raised(RuntimeError("A result of the engine cannot be sent; its log says why.")))
