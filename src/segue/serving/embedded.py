"""Recommenders in this process → an ASGI application without a process of its own for the engine.

`segue serve` loads runs in the engine's process, which can build only segue's own encoders. A run with another encoder
is loaded by the program that has its builder, and served from there:

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
from segue.serving.http.guard import Guard
from segue.serving.http.keys import Keys, check_binding
from segue.serving.http.metrics import Metrics
from segue.serving.service import Service
from segue.serving.settings import STORE
from segue.serving.store.store import open_store


def application(
    model: Recommender, *beside: Recommender, store: str = STORE, host: str = "127.0.0.1", keys: Path | None = None
) -> Guard:
    """The application of `segue serve` over Recommenders, for any ASGI server. The first one is the active model.

    A model is named after its run folder. `host`: where the server will listen; only this machine, unless there are
    keys, as for `segue serve`.
    """
    known = Keys.load(keys, os.environ)
    check_binding(host, known)
    served = [
        ServedModel("model" if one.folder is None else one.folder.resolve().name, one) for one in (model, *beside)
    ]
    opened = open_store(store)
    try:
        engine = ServingEngine(Models(served, runs=None, store=opened), opened)
    except BaseException:
        opened.close()
        raise
    metrics = Metrics()
    app = create_app(Service(LocalEngine(engine), opened, metrics), examples=() if known else engine.popular(2))
    return Guard(app, keys=known, metrics=metrics, host=host)
