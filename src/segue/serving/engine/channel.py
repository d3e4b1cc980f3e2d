"""The engine in a process of its own, so that encoding and HTTP do not compete for one interpreter lock.

Each channel is a Unix socket: asyncio streams at this end, a thread of the engine at the other. A message is its length
and its bytes: queries and their answers in msgpack, other calls pickled, because a process and its child may exchange
any object. Calls on one channel run in sequence; channels do not block each other. Queries have a channel of
their own and are sent as they come: as soon as the engine has answered a batch, it reads all queries that have arrived
since, and answers them as the next batch.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

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
MAX_BUFFERED = 1 << 20  # bytes of them that the socket has not taken yet
STOPPING_SECONDS = 10.0
RETRY_SECONDS = 1.0  # after an engine that could not be started
PICKLED = b"\x80"  # the first byte of a pickle; no array in msgpack begins with it
HEADER_BYTES = 4  # before each message: its length, the highest byte first
RECEIVED_BYTES = 1 << 18  # at a time: all that waits in a socket

logger = logging.getLogger(__name__)

Message = bytes | memoryview
Received = TypeVar("Received")
Sockets = dict[Channel | Literal["queries"], socket.socket]
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Streams = dict[Channel | Literal["queries"], Stream]

PACK = msgspec.msgpack.Encoder().encode
QUERY = msgspec.msgpack.Decoder(RecommendationQuery)
ANSWERS = msgspec.msgpack.Decoder(list[EncodedAnswer])


class LocalEngine:
    """An engine in this process, for tests and for programs that embed the service."""

    def __init__(self, engine: ServingEngine) -> None:
        self.engine = engine
        self.queries: JobProcessor[RecommendationQuery, EncodedAnswer] = BatchProcessor(
            lambda queries: asyncio.to_thread(engine.answer, queries), max_batch=MAX_BATCH
        )

    async def open(self) -> None:
        """Nothing has to be opened."""

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
        """Start the process and return at once: call `wait_until_ready`, then `open`, before anything else."""
        self._pending: dict[Channel, asyncio.Future[Any]] = {}  # the current call of each channel
        self._restarting = asyncio.Lock()
        self._closed = False
        self._restarts = 0  # attempts, also those that failed
        self.queries: JobProcessor[RecommendationQuery, EncodedAnswer] = _QueryProcessor(self)
        self._process, self._sockets = _spawn(settings)
        self._streams: Streams = {}  # the same channels, once they are open
        self._settings = msgspec.structs.replace(settings, joining=True)  # for its successors
        # Runs at exit before multiprocessing waits for its children: this one ends when its channels are closed.
        atexit.register(self._close_sockets)

    def wait_until_ready(self) -> None:
        """Block until the engine is loaded; raises the error that prevents it from starting."""
        self.popular = _wait_until_ready(self._process, self._sockets)

    async def open(self) -> None:
        """From now on the running event loop reads the channels."""
        self._streams = {
            channel: await asyncio.open_unix_connection(sock=end, limit=RECEIVED_BYTES)
            for channel, end in self._sockets.items()
        }

    async def call(self, channel: Channel, method: str, *arguments: Any) -> Any:
        """Return or raise what a method of the engine does. A channel runs one call at a time."""
        while (pending := self._pending.get(channel)) is not None and not pending.done():
            await asyncio.wait([pending])  # its caller was cancelled; its answer must not go to the next caller
        streams = self._streams
        _write(streams[channel], ForkingPickler.dumps((method, arguments)))  # before any other task runs
        self._pending[channel] = asyncio.ensure_future(_read(streams[channel]))
        try:
            result = ForkingPickler.loads(await asyncio.shield(self._pending[channel]))
        except (EOFError, OSError):
            # The restart must finish even if the caller is cancelled.
            raise await asyncio.shield(self._restart(streams)) from None
        if isinstance(result, Exception):
            raise result
        return result

    async def close(self) -> None:
        async with self._restarting:
            self._closed = True
            self._abort_streams()
            await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Close the channels, which ends the process, and block until it has ended."""
        self._close_sockets()
        atexit.unregister(self._close_sockets)
        self._process.join(STOPPING_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    async def _restart(self, broken: Streams) -> OverloadedError:
        """Start a new process, unless another channel has tried it meanwhile; returns the error for the callers."""
        attempts, sentence = self._restarts, "The engine of the service is starting again; retry in a moment."
        refusal = OverloadedError("restarting", sentence)
        async with self._restarting:
            if self._closed or self._streams is not broken or self._restarts != attempts:
                return refusal
            self._restarts += 1
            logger.error("The engine ended unexpectedly and is started again")
            self._process.kill()
            await asyncio.to_thread(self._process.join)
            self._abort_streams()
            self._close_sockets()
            try:
                process, sockets = _spawn(self._settings)
                self.popular = await asyncio.to_thread(_wait_until_ready, process, sockets)
                self._process, self._sockets = process, sockets
                await self.open()  # only now: calls need a loaded engine
            except Exception as error:  # noqa: BLE001  # the next call tries again
                reason = str(error) if isinstance(error, SegueError) else type(error).__name__
                logger.error("The engine cannot be started again: %s", reason)
                await asyncio.sleep(RETRY_SECONDS)
        return refusal

    def _abort_streams(self) -> None:
        for _, writer in self._streams.values():
            writer.transport.abort()

    def _close_sockets(self) -> None:
        _close(self._sockets)


EngineClient = LocalEngine | EngineProcess


class _QueryProcessor:
    """Sends queries to an engine process and receives their answers, in the same order."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._streams: Streams = {}  # to which the queries in flight were sent
        self._in_flight = 0

    def submit(self, query: RecommendationQuery) -> bool:
        if not self._in_flight:  # all queries in flight go to one process
            self._streams = self._engine._streams
        elif self._in_flight == MAX_IN_FLIGHT or self._buffered_bytes() > MAX_BUFFERED:
            return False
        _write(self._streams[QUERIES], _packed(query))
        self._in_flight += 1
        return True

    async def results(self) -> list[EncodedAnswer | Exception]:
        try:
            answers: list[Any] = _unpacked(await _read(self._streams[QUERIES]), ANSWERS)
            self._in_flight -= len(answers)
        except Exception as error:
            if not isinstance(error, EOFError | OSError):
                logger.error("An answer of the engine cannot be read", exc_info=error)
            # Which answers come next is unknown, so nothing more may be read from this process.
            refusal = await self._engine._restart(self._streams)
            self._in_flight = 0
            raise refusal from None
        return answers

    def _buffered_bytes(self) -> int:
        return self._streams[QUERIES][1].transport.get_write_buffer_size()


def _write(stream: Stream, message: Message) -> None:
    """Send a message, or nothing if the engine has died: reading raises it."""
    if not stream[1].is_closing():
        stream[1].write(_framed(message))


async def _read(stream: Stream) -> bytes:
    """The next message; `EOFError` or `OSError` if the engine has died."""
    length = await stream[0].readexactly(HEADER_BYTES)
    return await stream[0].readexactly(int.from_bytes(length, "big"))


def _framed(message: Message) -> bytes:
    return b"".join((len(message).to_bytes(HEADER_BYTES, "big"), message))


def _packed(value: Any) -> Message:
    """Queries or answers in msgpack, or pickled if they hold what it has no form for: an error, a very large number."""
    try:
        return PACK(value)
    except (TypeError, OverflowError, UnicodeEncodeError):
        return ForkingPickler.dumps(value)


def _unpacked(message: bytes | bytearray, decoder: msgspec.msgpack.Decoder[Received]) -> Received:
    """The value that was packed."""
    value: Received = ForkingPickler.loads(message) if message.startswith(PICKLED) else decoder.decode(message)
    return value


def _close(sockets: Sockets) -> None:
    """Close this process's ends, at once also where a stream still holds one."""
    for end in sockets.values():
        with contextlib.suppress(OSError):  # it is closed, or the engine has died
            end.shutdown(socket.SHUT_RDWR)
        end.close()


def _spawn(settings: ServiceSettings) -> tuple[Any, Sockets]:
    """Start an engine; returns the process, which is still loading, and our ends of the channels."""
    context = multiprocessing.get_context("spawn")
    ours: Sockets = {}
    theirs: Sockets = {}
    for channel in (QUERIES, *CHANNELS):
        ours[channel], theirs[channel] = socket.socketpair(socket.AF_UNIX)
    process = context.Process(target=run_engine, args=(settings, theirs), name="segue-engine")
    process.start()
    for end in theirs.values():
        end.close()  # the child has copies; an open one here would hide its death
    return process, ours


def _wait_until_ready(process: Any, sockets: Sockets) -> list[str]:
    """Wait for an engine's first message, its most frequent items."""
    popular: list[str] | Exception
    try:
        popular = ForkingPickler.loads(next(_arrived(sockets["control"]))[0])
    except (StopIteration, OSError):
        popular = SegueError("The engine of the service ended before it was ready; its log says why.")
    if isinstance(popular, Exception):
        _close(sockets)
        process.join()
        raise popular
    return popular


def freeze_loaded_objects() -> None:
    """Exclude everything loaded so far from garbage collection, and collect more rarely: requests leave no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def run_engine(settings: ServiceSettings, sockets: Sockets) -> None:
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
        sockets["control"].sendall(_framed(_serialised(first)))
    except OSError:  # the parent has ended
        return
    if isinstance(first, Exception):
        return
    freeze_loaded_objects()
    threads = [
        threading.Thread(target=_serve_channel, args=(engine, end, channel), daemon=True)
        for channel, end in sockets.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.close()


def _serve_channel(engine: ServingEngine, end: socket.socket, channel: Channel | Literal["queries"]) -> None:
    """Run the calls of a channel one by one, or answer all queries that have arrived together, until it is closed."""
    with end, contextlib.suppress(OSError):  # the parent has ended
        for messages in _arrived(end):
            if channel == QUERIES:
                _reply(end, "answer", partial(_answer, engine, messages), len(messages))
                continue
            for method, arguments in map(ForkingPickler.loads, messages):
                _reply(end, method, partial(getattr(engine, method), *arguments))


def _answer(engine: ServingEngine, messages: Sequence[bytearray]) -> Any:
    return engine.answer([_unpacked(message, QUERY) for message in messages])


def _reply(end: socket.socket, method: str, call: Callable[[], Any], n_answers: int | None = None) -> None:
    """Send the result of a call, or the error that it raises; for a batch of queries, `n_answers` of them."""
    try:
        result = call()
    except Exception as error:  # the caller gets it
        if not isinstance(error, SegueError):  # only this process has the traceback
            logger.error("The engine failed to %s", method, exc_info=error)
        result = _failure(error, n_answers)
    end.sendall(_framed(_serialised(result, n_answers)))


def _arrived(end: socket.socket) -> Iterator[list[bytearray]]:
    """The messages that have arrived since the last time, at least one, until the other end is closed."""
    received = bytearray()
    while part := end.recv(RECEIVED_BYTES):
        received += part
        messages = []
        while len(received) >= (after := HEADER_BYTES + int.from_bytes(received[:HEADER_BYTES], "big")):
            messages.append(received[HEADER_BYTES:after])
            del received[:after]
        if messages:
            yield messages


def _failure(error: Exception, n_answers: int | None) -> Exception | list[Exception]:
    """An error as the result of a call, which its caller raises, or of each of `n_answers` queries."""
    return error if n_answers is None else [error] * n_answers


def _serialised(result: Any, n_answers: int | None = None) -> Message:
    """A result, or `n_answers` of them, as a message. If it cannot be serialised, the message is that error: the
    parent waits for a message, and for one answer per query."""
    try:
        return ForkingPickler.dumps(result) if n_answers is None else _packed(result)
    except Exception as error:
        logger.error("A result of the engine cannot be sent", exc_info=error)
        failure = RuntimeError("A result of the engine cannot be sent; its log says why.")
        return ForkingPickler.dumps(_failure(failure, n_answers))
