"""The engine in its own process: same answers and errors as in this process, and a restart after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import signal
import socket
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from segue.errors import FolderError, InputError
from segue.recommend.history import read_history
from segue.recommend.recommender import Recommender
from segue.serving.engine.batching import Batcher, JobProcessor
from segue.serving.engine.channel import (
    CHANNELS,
    MAX_IN_FLIGHT,
    Channel,
    EngineProcess,
    _framed,
    _QueryProcessor,
    _serialised,
)
from segue.serving.requests import EncodedAnswer, OverloadedError, UnknownModelError
from segue.serving.requests import RecommendationQuery as Query
from segue.serving.settings import ServiceSettings

Answering = JobProcessor[Query, EncodedAnswer]


def test_the_life_of_an_engine(cycle_run: Path, tmp_path: Path) -> None:
    """One engine for all steps: starting one takes seconds."""
    run = tmp_path / "run"
    shutil.copytree(cycle_run, run)
    settings = ServiceSettings(runs=(run,), store=str(tmp_path / "store.sqlite"), log_level="error")
    known = Recommender.open(cycle_run)

    async def main() -> None:
        engine = EngineProcess(settings)
        try:
            engine.wait_until_ready()
            await engine.open()
            queue = engine.queries
            await answers_as_in_this_process(engine, known)
            await answers_queries_in_order(queue, known)
            await a_full_write_buffer_refuses(queue)
            await long_names_do_not_block(queue)
            await a_large_result_and_a_cancelled_caller(engine)
            run.rename(tmp_path / "elsewhere")  # the first restart fails
            await killed_while_busy(engine, queue)
            (tmp_path / "elsewhere").rename(run)
            for channel in CHANNELS:
                assert await until_answered(engine, channel) == known.recommend([], k=2).ids
            await answers_queries_in_order(queue, known)
        finally:
            await engine.close()

    asyncio.run(main())


async def answers_as_in_this_process(engine: EngineProcess, known: Recommender) -> None:
    popular = known.recommend([], k=2).ids
    assert engine.popular == popular
    neighbours = await engine.call("lookups", "similar", popular[0], 3, None)
    assert [item.id for item in neighbours.items] == known.similar(popular[0], 3).ids
    with pytest.raises(InputError, match="'nothing' is not one of"):
        await engine.call("lookups", "similar", "nothing", 3, None)
    known_items, unknown = await asyncio.gather(
        engine.call("lookups", "search", "", 5), engine.call("explanations", "unknown", [popular[0], "x"])
    )
    assert len(known_items) == 5 and unknown == {"x"}


async def answers_queries_in_order(queue: Answering, known: Recommender) -> None:
    """In order, up to the bound in flight; also a query with a number that msgpack cannot encode."""
    ids = known.recommend([], k=5).ids
    query_with_rules = Query(history=read_history(ids[:1]), k=3, exclude=[10**30], where={})
    queries = [
        query_with_rules,
        query_with_rules,
        *(Query(user="nobody", k=1 + number % 5) for number in range(MAX_IN_FLIGHT - 3)),
        query_with_rules,
    ]
    for query in queries:
        assert queue.submit(query)
        await asyncio.sleep(0)  # sent one by one
    assert not queue.submit(queries[-1])
    answers: list[EncodedAnswer | Exception] = []
    while len(answers) < MAX_IN_FLIGHT:
        answers += await queue.results()
    assert len(answers) == MAX_IN_FLIGHT
    for query, answer in zip(queries, answers, strict=True):
        assert not isinstance(answer, Exception)
        expected = known.recommend(ids[:1], k=3).ids if query is query_with_rules else ids[: query.k]
        assert [item["id"] for item in msgspec.json.decode(answer[0])["items"]] == expected


async def a_full_write_buffer_refuses(queue: Answering) -> None:
    large = Query(user="n" * 500_000)
    accepted = 0
    while queue.submit(large):  # nothing is awaited, so nothing more is written
        accepted += 1
    assert 1 < accepted < 10
    answers: list[EncodedAnswer | Exception] = []
    while len(answers) < accepted:
        answers += await queue.results()
    assert len(answers) == accepted


async def long_names_do_not_block(queue: Answering) -> None:
    """The error for an unknown model repeats its name, so answers are as large as queries."""
    batcher = Batcher(queue, max_waiting=100)
    runs = [batcher.run(Query(model=f"{number:06}" * 10_000), deadline=20) for number in range(20)]
    first = asyncio.gather(*runs, return_exceptions=True)
    await asyncio.sleep(0.001)  # these queries are in flight
    late = asyncio.gather(*(batcher.run(Query(model="late" * 15_000), deadline=20) for _ in range(5)))
    refusals = await first
    for number, error in enumerate(refusals):
        assert isinstance(error, UnknownModelError) and f"{number:06}" in str(error), "each caller gets its own error"
    with pytest.raises(UnknownModelError, match="late"):
        await late


async def a_large_result_and_a_cancelled_caller(engine: EngineProcess) -> None:
    many = {f"item {number}" for number in range(20_000)}  # more than a socket takes at once
    assert await engine.call("events", "unknown", many) == many
    leaving = asyncio.ensure_future(engine.call("events", "unknown", {"left"}))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await engine.call("events", "unknown", {"stayed"}) == {"stayed"}, "not another caller's answer"


async def killed_while_busy(engine: EngineProcess, queue: Answering) -> None:
    os.kill(engine._process.pid, signal.SIGSTOP)  # so that it cannot answer before it is killed
    os.waitid(os.P_PID, engine._process.pid, os.WSTOPPED)
    busy = [asyncio.ensure_future(engine.call(channel, "search", "", 20)) for channel in CHANNELS]
    assert queue.submit(Query(user="nobody"))
    busy.append(asyncio.ensure_future(queue.results()))
    await asyncio.sleep(0)
    os.kill(engine._process.pid, signal.SIGKILL)
    refusals = await asyncio.gather(*busy, return_exceptions=True)
    assert all("starting again" in str(error) for error in refusals), refusals


async def until_answered(engine: EngineProcess, channel: Channel) -> list[str]:
    async with asyncio.timeout(60):
        while True:
            try:
                popular: list[str] = await engine.call(channel, "popular", 2)
            except OverloadedError:
                continue
            return popular


def test_an_engine_that_cannot_start_reports_a_sentence(tmp_path: Path) -> None:
    engine = EngineProcess(ServiceSettings(runs=(tmp_path / "nowhere",), store=str(tmp_path / "store.sqlite")))
    with pytest.raises(FolderError, match="nowhere does not exist"):
        engine.wait_until_ready()
    engine.end()


def test_unreadable_answers_end_the_channel() -> None:
    """Whose answers come next would not be known: everyone is refused, and nobody gets another's."""
    restarts: list[object] = []

    class Odd:
        """An engine whose process sends no list of answers."""

        _streams: Any = None

        async def _restart(self, streams: object) -> OverloadedError:
            restarts.append(streams)
            return OverloadedError("restarting", "starting again")

    async def main() -> None:
        near, far = socket.socketpair(socket.AF_UNIX)
        engine = Odd()
        reader, writer = await asyncio.open_unix_connection(sock=near)
        engine._streams = {"queries": (reader, writer)}
        far.sendall(_framed(b"not to be read"))
        batcher = Batcher(_QueryProcessor(cast(EngineProcess, engine)), max_waiting=100)
        runs = (batcher.run(Query(user=name), deadline=5) for name in "abc")
        refusals = await asyncio.gather(*runs, return_exceptions=True)
        assert [str(error) for error in refusals] == ["starting again"] * 3
        assert restarts == [engine._streams]
        far.close()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    asyncio.run(main())


def test_unsendable_results_fail_for_each_caller() -> None:
    failed = pickle.loads(_serialised([lambda: 0], n_answers=3))
    assert [str(error) for error in failed] == ["A result of the engine cannot be sent; its log says why."] * 3
