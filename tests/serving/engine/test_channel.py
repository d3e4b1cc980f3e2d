"""The engine in a process of its own: it answers and refuses as it would here, and comes back when killed."""

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
    """One engine for all of it: to start one takes seconds."""
    run = tmp_path / "run"
    shutil.copytree(cycle_run, run)
    settings = ServiceSettings(runs=(run,), store=str(tmp_path / "store.sqlite"), log_level="error")
    known = Recommender.open(cycle_run)

    async def main() -> None:
        engine = EngineProcess(settings)
        try:
            engine.wait_until_ready()
            await engine.open()
            answering = engine.queries
            await answers_as_it_would_here(engine, known)
            await answers_queries_in_order(answering, known)
            await what_the_socket_does_not_take_waits(answering)
            await long_names_block_nobody(answering)
            await a_large_result_and_a_caller_who_leaves(engine)
            run.rename(tmp_path / "elsewhere")  # the first attempt to start it again fails
            await is_killed_at_work(engine, answering)
            (tmp_path / "elsewhere").rename(run)
            for channel in CHANNELS:
                assert await until_answered(engine, channel) == known.recommend([], k=2).ids
            await answers_queries_in_order(answering, known)
        finally:
            await engine.close()

    asyncio.run(main())


async def answers_as_it_would_here(engine: EngineProcess, known: Recommender) -> None:
    popular = known.recommend([], k=2).ids
    assert engine.popular == popular
    neighbours = await engine.call("lookups", "similar", popular[0], 3, None)
    assert [item.id for item in neighbours.items] == known.similar(popular[0], 3).ids
    with pytest.raises(InputError, match="'nothing' is not one of"):
        await engine.call("lookups", "similar", "nothing", 3, None)
    found, unknown = await asyncio.gather(
        engine.call("lookups", "search", "", 5), engine.call("explanations", "unknown", [popular[0], "x"])
    )
    assert len(found) == 5 and unknown == {"x"}


async def answers_queries_in_order(answering: Answering, known: Recommender) -> None:
    """As they come, up to the bound in flight; also one with a number that msgpack does not have."""
    ids = known.recommend([], k=5).ids
    given = Query(history=read_history(ids[:1]), k=3, exclude=[10**30], where={})
    queries = [given, given, *(Query(user="nobody", k=1 + number % 5) for number in range(MAX_IN_FLIGHT - 3)), given]
    for query in queries:
        assert answering.submit(query)
        await asyncio.sleep(0)  # one by one on their way
    assert not answering.submit(queries[-1])
    answers: list[EncodedAnswer | Exception] = []
    while len(answers) < MAX_IN_FLIGHT:
        answers += await answering.results()
    assert len(answers) == MAX_IN_FLIGHT
    for query, answer in zip(queries, answers, strict=True):
        assert not isinstance(answer, Exception)
        expected = known.recommend(ids[:1], k=3).ids if query is given else ids[: query.k]
        assert [item["id"] for item in msgspec.json.decode(answer[0])["items"]] == expected


async def what_the_socket_does_not_take_waits(answering: Answering) -> None:
    large = Query(user="n" * 500_000)
    accepted = 0
    while answering.submit(large):  # nothing is awaited, so nothing more is written
        accepted += 1
    assert 1 < accepted < 10
    answers: list[EncodedAnswer | Exception] = []
    while len(answers) < accepted:
        answers += await answering.results()
    assert len(answers) == accepted


async def long_names_block_nobody(answering: Answering) -> None:
    """The refusal of a model that is not there repeats its name, so that answers are as large as queries."""
    batcher = Batcher(answering, max_waiting=100)
    runs = [batcher.run(Query(model=f"{number:06}" * 10_000), deadline=20) for number in range(20)]
    first = asyncio.gather(*runs, return_exceptions=True)
    await asyncio.sleep(0.001)  # those are under way
    late = asyncio.gather(*(batcher.run(Query(model="late" * 15_000), deadline=20) for _ in range(5)))
    refusals = await first
    for number, refused in enumerate(refusals):
        assert isinstance(refused, UnknownModelError) and f"{number:06}" in str(refused), "each got its own"
    with pytest.raises(UnknownModelError, match="late"):
        await late


async def a_large_result_and_a_caller_who_leaves(engine: EngineProcess) -> None:
    many = {f"item {number}" for number in range(20_000)}  # more than a socket takes at once
    assert await engine.call("events", "unknown", many) == many
    leaving = asyncio.ensure_future(engine.call("events", "unknown", {"left"}))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await engine.call("events", "unknown", {"stayed"}) == {"stayed"}, "not the answer to another"


async def is_killed_at_work(engine: EngineProcess, answering: Answering) -> None:
    os.kill(engine._process.pid, signal.SIGSTOP)  # so that it cannot be quicker than its end
    os.waitid(os.P_PID, engine._process.pid, os.WSTOPPED)
    busy = [asyncio.ensure_future(engine.call(channel, "search", "", 20)) for channel in CHANNELS]
    assert answering.submit(Query(user="nobody"))
    busy.append(asyncio.ensure_future(answering.results()))
    await asyncio.sleep(0)
    os.kill(engine._process.pid, signal.SIGKILL)
    refusals = await asyncio.gather(*busy, return_exceptions=True)
    assert all("starting again" in str(refused) for refused in refusals), refusals


async def until_answered(engine: EngineProcess, channel: Channel) -> list[str]:
    async with asyncio.timeout(60):
        while True:
            try:
                popular: list[str] = await engine.call(channel, "popular", 2)
            except OverloadedError:
                continue
            return popular


def test_what_an_engine_cannot_start_with_is_a_sentence(tmp_path: Path) -> None:
    engine = EngineProcess(ServiceSettings(runs=(tmp_path / "nowhere",), store=str(tmp_path / "store.sqlite")))
    with pytest.raises(FolderError, match="nowhere does not exist"):
        engine.wait_until_ready()
    engine.end()


def test_answers_that_cannot_be_understood_end_the_channel() -> None:
    """Whose answers come next would not be known: everyone is refused, and nobody gets another's."""
    broken: list[object] = []

    class Odd:
        """Its process sends what is no list of answers."""

        _streams: Any = None

        async def _restart(self, streams: object) -> OverloadedError:
            broken.append(streams)
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
        assert [str(refused) for refused in refusals] == ["starting again"] * 3
        assert broken == [engine._streams]
        far.close()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    asyncio.run(main())


def test_what_cannot_be_sent_is_a_failure_for_each_caller() -> None:
    failed = pickle.loads(_serialised([lambda: 0], n_answers=3))
    assert [str(error) for error in failed] == ["A result of the engine cannot be sent; its log says why."] * 3
