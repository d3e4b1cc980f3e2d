"""The engine in a process of its own: it answers and refuses as it would here, and comes back when killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from segue.errors import FolderError, InputError
from segue.recommend.recommender import Recommender
from segue.serve.lanes import EngineProcess
from segue.serve.questions import Question
from segue.serve.refusals import OverloadedError
from segue.serve.settings import ServiceSettings


def test_an_engine_process(cycle_run: Path, tmp_path: Path) -> None:
    settings = ServiceSettings(runs=(cycle_run,), store=str(tmp_path / "store.sqlite"), log_level="error")
    known = Recommender.open(cycle_run)
    popular = known.recommend([], k=2).ids

    async def main() -> None:
        engine = EngineProcess(settings)
        try:
            assert engine.popular == popular
            neighbours = await engine.call("lookups", "similar", popular[0], 3, None)
            assert [item.id for item in neighbours.items] == known.similar(popular[0], 3).ids
            with pytest.raises(InputError, match="'nothing' is not one of"):
                await engine.call("lookups", "similar", "nothing", 3, None)
            (answer,) = await engine.call("answers", "answer", [Question(user="nobody", k=2)])
            assert answer[1] == "popularity" and popular[0].encode() in answer[0]
            both = asyncio.gather(
                engine.call("lookups", "search", "", 5), engine.call("explanations", "unknown", [popular[0], "x"])
            )
            found, unknown = await both
            assert len(found) == 5 and unknown == {"x"}, "lanes do not wait for each other"

            os.kill(engine._process.pid, signal.SIGKILL)
            with pytest.raises(OverloadedError, match="starting again"):
                await engine.call("lookups", "popular", 2)
            assert await engine.call("answers", "popular", 2) == popular, "a new one has taken its place"
        finally:
            await engine.close()

    asyncio.run(main())


def test_what_an_engine_cannot_start_with_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="nowhere does not exist"):
        EngineProcess(ServiceSettings(runs=(tmp_path / "nowhere",), store=str(tmp_path / "store.sqlite")))
