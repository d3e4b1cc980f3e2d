"""A run folder → a loaded model with its catalogue, KV caches and card."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from segue.errors import FolderError
from segue.folders import verify_contents
from segue.recommend.kv_caches import KVCaches
from segue.recommend.new_items import NewItems, new_items
from segue.recommend.plan import Planner
from segue.recommend.recommender import Recommender
from segue.serving.engine.catalogue_search import CatalogueSearch, new_rows
from segue.serving.http.bodies import ModelCard
from segue.serving.store.store import AddedItem

METRICS = "metrics.json"
CACHE_BYTES = 256_000_000

logger = logging.getLogger(__name__)


class ServedModel:
    """A run that is loaded and has passed its self-test."""

    def __init__(self, name: str, recommender: Recommender, *, cache_bytes: int = CACHE_BYTES) -> None:
        """`cache_bytes`: bound of the KV caches."""
        self.name = name
        self.recommender = recommender
        self.kv_caches = KVCaches(recommender.model, most_bytes=cache_bytes)
        self.catalogue = CatalogueSearch(recommender.vocabulary)
        self.left_out: dict[str, str] = {}  # ids of items that could not be added, and why
        self._self_test()
        report = None
        if recommender.folder is not None and METRICS in recommender.manifest.get("files", {}):
            verify_contents(recommender.folder, recommender.manifest, "run", names=(METRICS,))
            report = msgspec.json.decode((recommender.folder / METRICS).read_bytes(), type=dict[str, Any])
        self.card = ModelCard(
            name=name,
            seen=recommender.seen,
            length=recommender.model.length,
            attention=bool(recommender.attention(recommender.recommend([], k=1).ids)),
            plan=isinstance(recommender.model, Planner),
            columns=self.catalogue.columns,
            report=report,
            **self._item_facts(),
        )

    @staticmethod
    def open(folder: Path, *, cache_bytes: int = CACHE_BYTES) -> ServedModel:
        """Load a run folder; the model is named after it."""
        return ServedModel(folder.resolve().name, Recommender.open(folder), cache_bytes=cache_bytes)

    def new_items(self, items: Sequence[AddedItem]) -> NewItems:
        """The items that the model can take, and why it cannot take the others."""
        return new_items(self.recommender, new_rows(items, self.recommender.vocabulary))

    def with_items(self, items: Sequence[AddedItem]) -> ServedModel:
        """A copy that also serves these items, as far as it can take them; none of them if that fails unexpectedly."""
        served, ids = copy.copy(self), {item.id for item in items}
        try:
            new = self.new_items(items)
            if new.rows.height:
                recommender = served.recommender = self.recommender.with_items(new.rows)
                served.catalogue = CatalogueSearch(recommender.vocabulary)
                served._self_test()
                if new.changed:  # the caches hold tokens of their old content
                    served.kv_caches = KVCaches(recommender.model, most_bytes=self.kv_caches.most_bytes)
                else:
                    self.kv_caches.use_model(recommender.model)
            misfits = {item: why for item, why in new.misfits.items() if not served.recommender.knows(item)}
        except Exception as error:
            logger.error("The run %s cannot take the items added", self.name, exc_info=error)
            served, misfits = copy.copy(self), dict.fromkeys(ids, "it could not be taken: see the log")
        served.left_out = {item: why for item, why in self.left_out.items() if item not in ids} | misfits
        served.card = msgspec.structs.replace(self.card, **served._item_facts())
        return served

    def _item_facts(self) -> dict[str, Any]:
        """The facts of the card that added items change."""
        manifest = self.recommender.manifest
        # For every reader of the API: without file digests and without the folders of this machine.
        public = {
            name: {key: part for key, part in fact.items() if key != "folder"} if isinstance(fact, dict) else fact
            for name, fact in manifest.items()
            if name != "files"
        }
        return {
            "items": len(self.recommender.vocabulary),
            "added": self.recommender.added,
            "left_out": len(self.left_out),
            "left_out_because": next(iter(self.left_out.values()), None),
            "manifest": {"data": {}} | public | {"recipe": Path(manifest.get("recipe", "")).name},
        }

    def _self_test(self) -> None:
        """Answer two queries before any request: a broken model fails here, and lazy initialisation is done."""
        popular = self.recommender.recommend([], k=1).ids
        answer = self.recommender.recommend(popular, k=1, keep_seen=True)
        if not answer.items or not np.isfinite(answer.items[0].score):
            raise FolderError(f"The run {self.name} does not answer its self-test; train it again.")
        self.recommender.similar(popular[0], k=1)
