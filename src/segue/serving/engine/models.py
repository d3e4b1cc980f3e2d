"""The models being served: one active run, and perhaps a second; switched between two requests, in every replica."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from segue.errors import InputError, SegueError
from segue.folders import MANIFEST
from segue.recommend.new_items import refusal
from segue.serving.engine.served_model import CACHE_BYTES, ServedModel
from segue.serving.http.bodies import ActiveRun, ItemsReceipt, ModelsStatus
from segue.serving.requests import CannotSwitchError, UnknownModelError
from segue.serving.store.store import AddedItem, HistoryStore, RunSelection

RETRY_SECONDS = 10.0  # after a run that could not be loaded
MIN_SHARED = 0.5  # of the items being served that a run must know; below it the run has another catalogue

logger = logging.getLogger(__name__)


class Models:
    """The active run, and perhaps another beside it.

    A switch is written to the store, which every worker and replica follows. A service that starts with another run
    than the last start switches to that run. One that starts with the same run, and a process that joins a running
    service, serve the store's active run.
    """

    def __init__(
        self,
        served: Sequence[ServedModel],
        *,
        runs: Path | None,
        store: HistoryStore,
        cache_bytes: int = CACHE_BYTES,
        joining: bool = False,
    ) -> None:
        """`served`: the active one first. `runs`: the folder of runs that may be switched to. `cache_bytes`: bound of
        the KV caches of such a run. `joining`: the service is running, and this process joins it."""
        assert served
        names = [model.name for model in served]
        if len(set(names)) < len(names):
            raise InputError(f"Models need different names; two runs are both called {names[0]!r}. Rename a folder.")
        self.all = tuple(served)  # the active one first; replaced as a whole, so that no reader sees half a switch
        self._folders = {model.name: model.recommender.folder for model in served}
        self._runs = runs
        self._cache_bytes = cache_bytes
        self._store = store
        self._switching = threading.Lock()
        self._selection: RunSelection
        self._items_version = 0  # of the store's added items, up to which the models know them
        self._failed: tuple[int, float] | None = None  # a version that could not be loaded, and when to try again
        self._follow_items()
        self._select_first(joining=joining)

    @property
    def active(self) -> ServedModel:
        """The model that answers unless a request names another."""
        return self.all[0]

    def named(self, name: str | None) -> ServedModel:
        """A model being served; None is the active one."""
        for model in self.all:
            if name is None or name == model.name:
                return model
        names = ", ".join(model.name for model in self.all)
        raise UnknownModelError(f"No model called {name!r} is being served; there is: {names}.")

    def status(self) -> ModelsStatus:
        """The models being served and the runs that may be switched to."""
        cards = [model.card for model in self.all]
        return ModelsStatus(cards[0].name, self._selection.previous, switchable=self._switchable(), models=cards)

    def switch(self, name: str | None) -> ActiveRun:
        """Serve another run from the next request on, in all replicas; None is the previous one. It is loaded and
        checked first; if that fails nothing changes."""
        with self._switching:
            selection = self._store.active() or self._selection
            if name is not None:
                self._runs_folder()  # raises if the runs are fixed
            elif selection.previous is not None:
                name = selection.previous
            else:
                raise CannotSwitchError("There is no run to go back to: no switch was made.")
            model = self._load(name)
            if name != selection.run:  # otherwise it may have failed to load before
                version = selection.version
                selection = RunSelection(name, selection.run, selection.started_with, version + 1)
                if not self._store.activate(selection, expected=version):
                    raise CannotSwitchError("Another switch came first; see GET /model, then try again.")
            self._serve(model, selection)
            return ActiveRun(active=name, previous=selection.previous)

    def add_items(self, items: Sequence[AddedItem]) -> ItemsReceipt:
        """Store items unseen in training, for every replica, and recommend them from the next request on.

        If the active run takes new items at all, an item that it cannot take is refused, and none is stored.
        """
        with self._switching:
            if refusal(self.active.recommender) is None:
                self.active.new_items(items).refuse_misfits()
            self._store.add_items(items)
            self._follow_items()
            active = self.active
        ids = dict.fromkeys(item.id for item in items)
        reasons = [active.left_out[item] for item in ids if item in active.left_out]
        return ItemsReceipt(accepted=len(ids), served=len(ids) - len(reasons), reason=reasons[0] if reasons else None)

    def follow(self) -> bool:
        """Serve the items that another worker or replica added, and the run that it switched to; returns whether
        anything changed."""
        with self._switching:
            added = self._follow_items()
            selection = self._store.active() or self._selection
            if selection.version == self._selection.version and selection.run == self.active.name:
                return added
            version, retry_time = self._failed or (None, 0.0)
            if selection.version == version and time.monotonic() < retry_time:
                return added
            try:
                self._serve(self._load(selection.run), selection)
            except CannotSwitchError:
                self._failed = selection.version, time.monotonic() + RETRY_SECONDS
                raise
            return True

    def _follow_items(self) -> bool:
        """Serve the items added to the store since the last call; returns whether there are any."""
        version, items = self._store.items(self._items_version)
        if items:
            self.all = tuple(model.with_items(items) for model in self.all)
            self._items_version = version
        return bool(items)

    def _serve(self, model: ServedModel, selection: RunSelection) -> None:
        """Serve a model from the next query on. If it was the second of two, the two are exchanged."""
        before, *others = self.all
        self.all = (model, *(before if other is model else other for other in others))
        self._selection = selection

    def _select_first(self, *, joining: bool) -> None:
        """Agree with the store on the active run: after a restart the one that was switched to, if it can be served."""
        own = self.active.name
        while True:
            stored = self._store.active()
            if stored is not None and (joining or stored.started_with == own):
                self._selection = stored
                try:
                    self._serve(self._load(stored.run), stored)
                except SegueError as error:
                    logger.error("The run %s was active and cannot be served: %s", stored.run, error)
                return
            if stored is None:
                previous, version = None, None
            else:
                previous, version = stored.previous if stored.run == own else stored.run, stored.version
            self._selection = RunSelection(own, previous, started_with=own, version=(version or 0) + 1)
            if self._store.activate(self._selection, expected=version):
                return

    def _load(self, name: str) -> ServedModel:
        """A run by name, loaded and checked to fit the items being served."""
        for model in self.all:
            if model.name == name:
                return model
        folder = self._folders.get(name)
        if folder is None:
            runs, known = self._runs_folder(), self._switchable()
            if name not in known:  # names of a listed folder: a path or dots cannot be among them
                listed = ", ".join(known) or "none"
                raise CannotSwitchError(f"There is no run called {name!r} under --runs; there is: {listed}.")
            folder = runs / name
        try:
            model = ServedModel.open(folder, cache_bytes=self._cache_bytes)
        except SegueError as error:
            raise CannotSwitchError(f"The run {name!r} cannot be served: {error}") from error
        except Exception as error:
            logger.error("The run %s cannot be loaded", name, exc_info=error)
            raise CannotSwitchError(f"The run {name!r} cannot be served: it is damaged; train it again.") from error
        served = self.active.recommender
        trained = served.vocabulary.table["id"][: len(served.vocabulary) - served.added].to_list()
        shared = np.count_nonzero(model.recommender.vocabulary.numbers(trained, unknown="zero"))
        if shared < MIN_SHARED * len(trained):
            raise CannotSwitchError(
                f"The run {name!r} knows {shared:,} of the {len(trained):,} items being served: it was trained on "
                "another catalogue. Start a service of its own for it."
            )
        _, items = self._store.items(0)
        return model.with_items(items) if items else model

    def _runs_folder(self) -> Path:
        if self._runs is None:
            raise CannotSwitchError("This service serves fixed runs; start it with --runs FOLDER to switch among them.")
        return self._runs

    def _switchable(self) -> list[str]:
        if self._runs is None:
            return []
        try:
            names = {path.name for path in self._runs.iterdir() if (path / MANIFEST).is_file()}
        except OSError as error:
            logger.error("The folder of --runs cannot be read: %s", error.strerror)
            names = set()
        return sorted(names | set(self._folders))
