"""An encoder and a decoder memorise routes and continue them: five stops ahead, without a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from cycle_logs import Log, recipe_of, sequences_of
from routes import ROUTES, STOPS, drives, held_out_prefixes

from segue.data.vocabulary import Vocabulary
from segue.index.exact import ExactIndex
from segue.recommend.recommender import Recommender

N_ITEMS = ROUTES * STOPS
BODIES: dict[str, dict[str, Any]] = {
    "transformer": {"width": 48, "body__feed_forward": 2},
    "gru": {"width": 48, "body": "gru"},
}
EPOCHS = {"transformer": 13, "gru": 4}


@pytest.mark.parametrize("body", BODIES)
def test_five_stops_of_every_route_are_planned_from_held_out_prefixes(body: str, tmp_path: Path) -> None:
    """More than two hundred prefixes. The last epoch is used: validation is perfect long before it."""
    log = Log.of(sequences_of(*drives()), N_ITEMS)
    recipe = recipe_of(
        model={"kind": "seq2seq", "length": 12, **BODIES[body]},
        objective={"task": "continuation", "task__cuts": 4},
        epochs=EPOCHS[body],
        tokens=250,
        averaging=0.9,
    )
    model, _ = log.fit(recipe, tmp_path / "state", None)
    names = Vocabulary(pl.DataFrame({"id": [str(stop) for stop in range(1, N_ITEMS + 1)], "count": [1] * N_ITEMS}))
    recommender = Recommender(model, ExactIndex.build(model.item_vectors()), names)
    prefixes = held_out_prefixes()
    assert len(prefixes) > 200
    plans = recommender.plan_many([history for history, _ in prefixes], 5)
    mistakes = [
        history for (history, targets), plan in zip(prefixes, plans, strict=True) if plan.ids != [*map(str, targets)]
    ]
    assert not mistakes
