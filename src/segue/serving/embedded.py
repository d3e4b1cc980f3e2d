"""Runs that are open in this process → an ASGI application, with no other process beside it.

`segue serve` opens its runs in the engine's process, which can build segue's own encoders and no others. A run whose
encoder came from outside is opened by the program that has the builder, and served from there:

    model = segue.load("run", encoder=build)
    uvicorn.run(application(model, store="histories.sqlite"), host="127.0.0.1", port=8000)
"""

from __future__ import annotations

import os
from pathlib import Path

from segue.recommend.recommender import Recommender
from segue.serving.engine.channel import LocalEngine
from segue.serving.engine.engine import ServingEngine
from segue.serving.engine.models import Models
from segue.serving.engine.served_model import ServedModel
from segue.serving.http.app import create_app
from segue.serving.http.bodies import MAX_BODY_BYTES
from segue.serving.http.guard import Guard
from segue.serving.http.keys import Keys, check_binding
from segue.serving.http.metrics import Metrics
from segue.serving.service import Service
from segue.serving.settings import STORE
from segue.serving.store.store import open_store


def application(
    model: Recommender, *beside: Recommender, store: str = STORE, host: str = "127.0.0.1", keys: Path | None = None
) -> Guard:
    """What `segue serve` answers with, over Recommenders; any ASGI server runs it. The first is the active one.

    A model is called like its run folder. `host`: where the server will listen; only this machine, unless there are
    keys, as for `segue serve`.
    """
    known = Keys.load(keys, os.environ)
    check_binding(host, known)
    served = [ServedModel(_name(one), one) for one in (model, *beside)]
    opened = open_store(store)
    try:
        engine = ServingEngine(Models(served, runs=None, store=opened), opened)
    except BaseException:
        opened.close()
        raise
    metrics = Metrics()
    app = create_app(Service(LocalEngine(engine), opened, metrics), examples=() if known else engine.popular(2))
    return Guard(app, keys=known, metrics=metrics, max_body_bytes=MAX_BODY_BYTES, host=host)


def _name(model: Recommender) -> str:
    return "model" if model.folder is None else model.folder.resolve().name
