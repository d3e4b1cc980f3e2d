"""Which runs are served: loaded, checked, and switched between two requests, as the store says for every replica."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from segue.errors import FolderError, InputError, SegueError
from segue.folders import MANIFEST, verify_contents
from segue.models.checkpoint import WEIGHTS
from segue.recommend.kv_caches import KVCaches
from segue.recommend.new_items import NewItems, new_items, refusal
from segue.recommend.plan import Planner
from segue.recommend.recommender import Recommender
from segue.serving.engine.catalogue_search import CatalogueSearch, new_rows
from segue.serving.http.bodies import ActiveRun, ItemsReceipt, ModelCard, ModelsStatus
from segue.serving.requests import CannotSwitchError, UnknownModelError
from segue.serving.store.store import AddedItem, HistoryStore, RunSelection

METRICS = "metrics.json"
MEMORY_BYTES = 256_000_000
RETRIED_AFTER = 10.0  # seconds after a run that could not be followed
LEAST_SHARED = (
    0.5  # of the items being served that another run must know: below it, it was trained on another catalogue
)

logger = logging.getLogger(__name__)


class ServedModel:
    """A run that is loaded and has answered."""

    def __init__(self, name: str, recommender: Recommender, *, memory_bytes: int = MEMORY_BYTES) -> None:
        """`memory_bytes`: the most that may be remembered of encoded histories."""
        self.name = name
        self.recommender = recommender
        self.memories = KVCaches(recommender.model, most_bytes=memory_bytes)
        self.catalogue = CatalogueSearch(recommender.vocabulary)
        self.left_out: dict[str, str] = {}  # ids of items that were to be added, and why they are not
        self._answer_something()
        self.card = self._card()

    @staticmethod
    def open(folder: Path, *, memory_bytes: int = MEMORY_BYTES) -> ServedModel:
        """Load the run of a folder; its name is the folder's."""
        return ServedModel(folder.resolve().name, Recommender.open(folder), memory_bytes=memory_bytes)

    def fitting(self, items: Sequence[AddedItem]) -> NewItems:
        """Those of these items that it can take, and why not the others."""
        return new_items(self.recommender, new_rows(items, self.recommender.vocabulary))

    def with_items(self, items: Sequence[AddedItem]) -> ServedModel:
        """The same run with these items too, as far as it can take them; this one goes on as it is."""
        found, served = self.fitting(items), copy.copy(self)
        if found.rows.height:
            recommender = served.recommender = self.recommender.with_items(found.rows)
            served.catalogue = CatalogueSearch(recommender.vocabulary)
            served._answer_something()
            if found.changed:  # what was remembered was read with their old content
                served.memories = KVCaches(recommender.model, most_bytes=self.memories.most_bytes)
            else:
                self.memories.follow(recommender.model)
        named = {item.id for item in items}
        misfits = {item: why for item, why in found.misfits.items() if not served.recommender.knows(item)}
        served.left_out = {item: why for item, why in self.left_out.items() if item not in named} | misfits
        served.card = msgspec.structs.replace(
            self.card,
            items=len(served.recommender.vocabulary),
            added=served.recommender.added,
            left_out=len(served.left_out),
            left_out_because=next(iter(served.left_out.values()), None),
            manifest=_without_places(served.recommender.manifest),
        )
        return served

    @property
    def digest(self) -> str:
        """Tells runs of one name apart: the start of the SHA-256 of the weights."""
        return str(self.recommender.manifest.get("files", {}).get(WEIGHTS, {}).get("sha256", ""))[:12]

    def _card(self) -> ModelCard:
        """What the run says of itself."""
        model, facts = self.recommender, self.recommender.manifest
        return ModelCard(
            name=self.name,
            seen=model.seen,
            items=len(model.vocabulary),
            length=model.model.length,
            attention=bool(model.attention(model.recommend([], k=1).ids)),
            plan=isinstance(model.model, Planner),
            columns=self.catalogue.columns,
            added=model.added,
            left_out=0,
            left_out_because=None,
            manifest=_without_places(facts),
            report=self._report(),
        )

    def _report(self) -> dict[str, Any] | None:
        folder = self.recommender.folder
        if folder is None or METRICS not in self.recommender.manifest.get("files", {}):
            return None
        verify_contents(folder, self.recommender.manifest, "run", names=(METRICS,))
        return msgspec.json.decode((folder / METRICS).read_bytes(), type=dict[str, Any])

    def _answer_something(self) -> None:
        """A question or two before anyone asks: what is wrong with the model shows here, and what is slow is done."""
        popular = self.recommender.recommend([], k=1).ids
        answer = self.recommender.recommend(popular, k=1, keep_seen=True)
        if not answer.items or not np.isfinite(answer.items[0].score):
            raise FolderError(f"The run {self.name} does not answer its self-test; train it again.")
        self.recommender.similar(popular[0], k=1)


def _without_places(facts: dict[str, Any]) -> dict[str, Any]:
    """A manifest for everyone: what was made of what, and not where on which machine."""
    told = {
        name: {key: part for key, part in fact.items() if key != "folder"} if isinstance(fact, dict) else fact
        for name, fact in facts.items()
        if name != "files"
    }
    return {"data": {}} | told | {"recipe": Path(facts.get("recipe", "")).name}


def _with_items(model: ServedModel, items: Sequence[AddedItem]) -> ServedModel:
    """A model with items that were kept already: whatever is wrong with them, it goes on without."""
    try:
        return model.with_items(items)
    except Exception as error:
        logger.error("The run %s cannot take the items added", model.name, exc_info=error)
        left = copy.copy(model)
        left.left_out = model.left_out | {item.id: "it could not be taken: see the log" for item in items}
        left.card = msgspec.structs.replace(
            model.card, left_out=len(left.left_out), left_out_because=next(iter(left.left_out.values()))
        )
        return left


class Models:
    """The active run, and perhaps another beside it.

    A switch is written to the store, which every worker and replica follows. A service that is started with another run
    than the last one was switches to it; started with the same, it goes on with what was being served, and so does a
    process of a service that has begun.
    """

    def __init__(
        self,
        served: Sequence[ServedModel],
        *,
        runs: Path | None,
        store: HistoryStore,
        memory_bytes: int = MEMORY_BYTES,
        joining: bool = False,
    ) -> None:
        """`served`: the first is the one to begin with. `runs`: the folder of runs that may be switched to, with so
        many bytes to remember encoded histories in. `joining`: the service is running, and this process only joins."""
        assert served
        names = [model.name for model in served]
        if len(set(names)) < len(names):
            raise InputError(f"Two runs are both called {names[0]!r}; rename a folder: models are told apart by name.")
        self._served = tuple(served)  # the active one first; replaced as a whole, so that no reader sees half a switch
        self._paths = {model.name: model.recommender.folder for model in served}
        self._runs = runs
        self._memory_bytes = memory_bytes
        self._store = store
        self._switching = threading.Lock()
        self._state: RunSelection
        self._items_version = 0  # of the store: the added items up to here are known to the models being served
        self._unfit: tuple[int, float] | None = None  # a version that could not be followed, and when to try again
        self._take_items()
        self._begin(joining=joining)

    @property
    def active(self) -> ServedModel:
        """The model that answers unless another is asked for."""
        return self._served[0]

    @property
    def all(self) -> tuple[ServedModel, ...]:
        """Every model being served, the active one first."""
        return self._served

    def named(self, name: str | None) -> ServedModel:
        """A model being served; None is the active one."""
        served = self._served
        for model in served:
            if name is None or name == model.name:
                return model
        names = ", ".join(model.name for model in served)
        raise UnknownModelError(f"No model called {name!r} is being served; there is: {names}.")

    def served(self) -> ModelsStatus:
        """All that is being served."""
        served, state = self._served, self._state
        return ModelsStatus(
            active=served[0].name,
            previous=state.previous,
            switchable=self._switchable(),
            models=[model.card for model in served],
        )

    def switch(self, name: str) -> ActiveRun:
        """Serve another run from the next request on. It is loaded and checked first; a bad one changes nothing."""
        with self._switching:
            self._refuse_where_fixed()
            state = self._agreed_state()
            loaded = self._loaded(name)
            if name == state.run:  # perhaps it could not be loaded before
                self._serve(loaded, state)
                return ActiveRun(active=name, previous=state.previous)
            return self._switch(loaded, msgspec.structs.replace(state, run=name, previous=state.run))

    def rollback(self) -> ActiveRun:
        """Serve the previous run again."""
        with self._switching:
            state = self._agreed_state()
            if state.previous is None:
                raise CannotSwitchError("There is no run to go back to: none was switched away from.")
            loaded = self._loaded(state.previous)
            return self._switch(loaded, msgspec.structs.replace(state, run=state.previous, previous=state.run))

    def add_items(self, items: Sequence[AddedItem]) -> ItemsReceipt:
        """Keep items that no run was trained on, for every replica, and answer them from the next request on.

        Where the active run takes new items at all, those that it cannot take are refused, and none is kept.
        """
        with self._switching:
            if refusal(self.active.recommender) is None:
                self.active.fitting(items).refuse_misfits()
            self._store.add_items(items)
            self._take_items()
            active = self.active
        named = dict.fromkeys(item.id for item in items)
        left = [active.left_out[name] for name in named if name in active.left_out]
        return ItemsReceipt(accepted=len(named), served=len(named) - len(left), reason=left[0] if left else None)

    def _take_items(self) -> bool:
        """Serve what was added to the store since it was looked at last; whether anything was."""
        version, items = self._store.items(self._items_version)
        if items:
            self._served = tuple(_with_items(model, items) for model in self._served)
            self._items_version = version
        return bool(items)

    def follow(self) -> bool:
        """Take up the items that another worker or replica added, and the run that it switched to; whether anything
        changed."""
        with self._switching:
            added = self._take_items()
            state = self._agreed_state()
            if state.version == self._state.version and state.run == self.active.name:
                return added
            version, again = self._unfit or (None, 0.0)
            if state.version == version and time.monotonic() < again:
                return added
            try:
                self._serve(self._loaded(state.run), state)
            except CannotSwitchError:
                self._unfit = state.version, time.monotonic() + RETRIED_AFTER
                raise
            return True

    def _agreed_state(self) -> RunSelection:
        """What all replicas serve, or should: a run that cannot be loaded here is in the way of no switch."""
        return self._store.active() or self._state

    def _switch(self, loaded: ServedModel, state: RunSelection) -> ActiveRun:
        state = msgspec.structs.replace(state, version=state.version + 1)
        if not self._store.activate(state, expected=state.version - 1):
            raise CannotSwitchError("Another switch came first; see GET /model, then ask again.")
        self._serve(loaded, state)
        return ActiveRun(active=state.run, previous=state.previous)

    def _serve(self, loaded: ServedModel, state: RunSelection) -> None:
        """From the next question on. Of two side by side, both stay: the other one stands beside now."""
        before, *beside = self._served
        self._served = (loaded, *(before if model is loaded else model for model in beside))
        self._state = state

    def _begin(self, *, joining: bool) -> None:
        """Agree with the store on what is active: after a restart, the run that was switched to, where it can be."""
        own = self.active
        while True:
            state = self._store.active()
            if state is not None and (joining or state.started_with == own.name):
                self._state = state
                try:
                    self._serve(self._loaded(state.run), state)
                except SegueError as error:
                    logger.error("The run %s was active and cannot be served: %s", state.run, error)
                return
            if state is None:
                self._state = RunSelection(run=own.name, previous=None, started_with=own.name, version=1)
            else:
                previous = state.previous if state.run == own.name else state.run
                self._state = RunSelection(
                    run=own.name, previous=previous, started_with=own.name, version=state.version + 1
                )
            if self._store.activate(self._state, expected=None if state is None else state.version):
                return

    def _loaded(self, name: str) -> ServedModel:
        """A run by name, loaded and found fit to take over."""
        for model in self._served:
            if model.name == name:
                return model
        folder = self._paths.get(name) or self._folder(name)
        try:
            loaded = ServedModel.open(folder, memory_bytes=self._memory_bytes)
        except SegueError as error:
            raise CannotSwitchError(f"The run {name!r} cannot be served: {error}") from error
        except Exception as error:
            logger.error("The run %s cannot be loaded", name, exc_info=error)
            raise CannotSwitchError(f"The run {name!r} cannot be served: it is damaged; train it again.") from error
        served = self.active.recommender
        known = served.vocabulary.table["id"][: len(served.vocabulary) - served.added].to_list()
        numbers = loaded.recommender.vocabulary.numbers(known, unknown="zero")
        if np.count_nonzero(numbers) < LEAST_SHARED * len(known):
            raise CannotSwitchError(
                f"The run {name!r} knows {np.count_nonzero(numbers):,} of the {len(known):,} items being served: it "
                "was trained on another catalogue. Start a service of its own for it."
            )
        _, items = self._store.items(0)
        return _with_items(loaded, items) if items else loaded

    def _folder(self, name: str) -> Path:
        self._refuse_where_fixed()
        if name not in self._switchable():  # the list of a folder: a path, or dots, cannot be in it
            known = ", ".join(self._switchable()) or "none"
            raise CannotSwitchError(f"There is no run called {name!r} under --runs; there is: {known}.")
        assert self._runs is not None
        return self._runs / name

    def _refuse_where_fixed(self) -> None:
        if self._runs is None:
            raise CannotSwitchError("This service serves fixed runs; start it with --runs FOLDER to switch among them.")

    def _switchable(self) -> list[str]:
        if self._runs is None:
            return []
        try:
            found = {path.name for path in self._runs.iterdir() if (path / MANIFEST).is_file()}
        except OSError as error:
            logger.error("The folder of --runs cannot be read: %s", error.strerror)
            found = set()
        return sorted(found | set(self._paths))
