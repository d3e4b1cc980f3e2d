"""Recurrent and convolutional models with any task and loss: trained, evaluated, loaded, explained and served."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_service import ids, in_process_client, post_events

import segue
from segue.serving.embedded import application

SHORT = ("model.width=16", "model.dropout=0", "train.epochs=8", "train.patience=8", "train.tokens=80")
QUICK = ("train.learning_rate=1e-2", "train.averaging=0", "train.warmup=0", "train.threads=1", "evaluate.seen=keep")
HISTORY = ["i03", "i04", "i05"]

# A recipe, its overrides, and its number of attention maps.
JOURNEYS = {
    "gru4rec, recency": ("gru4rec", ("model.state_width=0", "objective.task=recency", "objective.task.cuts=8"), 0),
    "gru4rec-bprmax": (
        "gru4rec-bprmax",
        ("model.state_width=24", "objective.sampler.negatives=8", "index=approximate"),
        0,
    ),
    "narm, REINFORCE": ("narm", ("model.choice=reinforce", "model.choice.entropy_bonus=0.01"), 1),
    "caser, gBCE": ("caser", ("objective.loss=gbce", "objective.sampler=uniform", "objective.sampler.negatives=6"), 0),
    "nextitnet, cosine": ("nextitnet", ("model.depth=1", "model.similarity=cosine", "objective.temperature=0.1"), 0),
}


@pytest.mark.parametrize("name", JOURNEYS)
def test_from_a_log_to_answers_over_http(name: str, cycle_data: Path, tmp_path: Path) -> None:
    recipe, overrides, n_attention_maps = JOURNEYS[name]
    segue.train(cycle_data, out=tmp_path / "run", recipe=recipe, overrides=(*SHORT, *QUICK, *overrides))
    model = segue.load(tmp_path / "run")
    assert isinstance(model, segue.Recommender)
    assert segue.evaluate(model, data=cycle_data).metrics["hit@1"] > 0.6, "one in twelve by chance"
    answer = model.recommend(HISTORY, k=3).ids
    explanation = model.explain(HISTORY, answer[0])
    assert len(explanation.contributions) == 3 and len(explanation.attention) == n_attention_maps
    with in_process_client(application(model, store=str(tmp_path / "store.sqlite"))) as client:
        post_events(client, *({"user": "ann", "item": item} for item in HISTORY))
        assert ids(client.get("/users/ann/recommendations", params={"k": 3})) == answer
        card = client.get("/model").json()
        assert [entry["attention"] for entry in card["models"]] == [bool(n_attention_maps)]
        assert client.post("/explanations", json={"user": "ann"}).status_code == 200
