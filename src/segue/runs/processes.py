"""One training on several processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from segue.errors import SettingsError
from segue.folders import partial_of
from segue.models.build import builder_name
from segue.recommend.recommender import Recommender
from segue.runs.make import make_run, temporary_run
from segue.runs.request import TrainingRequest
from segue.training.distributed.processes import ProcessesDiedError, run_on_processes
from segue.training.loop import TrainingProgress


def make_run_on_processes(
    processes: int, request: TrainingRequest, *, progress: Callable[[TrainingProgress], None] | None
) -> Recommender:
    """`make_run` on several processes of this machine."""
    if request.encoder is not None and "<" in builder_name(request.encoder):
        raise SettingsError(
            f"encoder is {builder_name(request.encoder)}, which other processes cannot import: with processes above 1 "
            "give a function at the top level of a module."
        )
    run = request.out if request.out is not None else temporary_run()

    def receive(message: bytes) -> None:
        if progress is not None:
            progress(msgspec.msgpack.decode(message, type=TrainingProgress))

    try:
        run_on_processes(processes, _run_one_process, replace(request, out=run), receive=receive)
    except ProcessesDiedError as error:
        if not partial_of(run).exists():
            raise
        raise ProcessesDiedError(f"{error} The last finished epoch is saved: continue with --resume.") from error
    return Recommender.open(run, encoder=request.encoder)


def _run_one_process(request: TrainingRequest, send: Callable[[bytes], None]) -> None:
    make_run(request, progress=lambda step: send(msgspec.msgpack.encode(step)))
