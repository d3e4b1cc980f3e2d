"""Attention of encoder and decoder, with both bodies, through the command line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine

from segue.api import train
from segue.recommend.recommender import Recommender

HISTORY_POSITIONS = [0, 1, 2, 3]
HISTORY = [f"i{number:02}" for number in (0, 1, 2, 3)]
STEPS = ["?1", "?2", "?3", "?4", "?5"]


@pytest.fixture(scope="module", params=["transformer", "gru"])
def run(
    request: pytest.FixtureRequest, cycle_data: Path, quick_recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of one epoch."""
    body = ["model.body=gru", "model.depth=1"] if request.param == "gru" else ["model.body.heads=2", "model.depth=2"]
    task = ["model=seq2seq", "model.width=16", "model.length=20", "objective.task=continuation", "train.epochs=1"]
    out: Path = tmp_path_factory.mktemp("plans") / request.param
    train(cycle_data, out=out, recipe=quick_recipe, overrides=[*task, *body])
    return out


def test_the_encoder_and_the_decoder_each_have_their_maps(line: CommandLine, run: Path) -> None:
    model = Recommender.open(run)
    attention, recurrent = model.attention(HISTORY), run.name == "gru"
    encoder = [] if recurrent else ["encoder, layer 1", "encoder, layer 2"]
    back = [] if recurrent else ["decoder, layer 1, at its steps", "decoder, layer 2, at its steps"]
    across = ["decoder, layer 1, at the history"] + ([] if recurrent else ["decoder, layer 2, at the history"])
    heads = 1 if recurrent else 2
    decoder = across if recurrent else [back[0], across[0], back[1], across[1]]
    assert list(attention) == [*encoder, *decoder]
    assert all(attention[name].shape == (heads, 4, 4) for name in encoder)
    assert all(attention[name].shape == (heads, 5, 4) for name in across)
    assert all(attention[name].shape == (heads, 5, 5) and not np.triu(attention[name], 1).any() for name in back)
    assert all(np.abs(weights.sum(-1) - 1).max() < 1e-5 for weights in attention.values())
    explanation = model.explain(HISTORY)
    for layer in explanation.attention:
        rows, columns = (HISTORY_POSITIONS if side == 4 else [None] * 5 for side in attention[layer.name].shape[1:])
        assert (layer.rows, layer.columns) == (rows, columns)
        assert np.array(layer.weights) == pytest.approx(attention[layer.name], abs=1e-6)
    plan = model.plan(HISTORY, 5, beam=1).ids
    assert [step.id for step in explanation.plan] == plan and explanation.item.id == plan[0]
    assert not model.explain(HISTORY, attention=False).plan
    arguments = ("explain", run, "--history", ",".join(HISTORY))
    short = line.does(*arguments)
    assert f"The steps choose 1 {plan[0]}, 2 {plan[1]}, 3 {plan[2]}, 4 {plan[3]}, 5 {plan[4]}." in short
    assert short.count("Attention of step 1, head by head:") == 1, "the answer comes from step 1"
    assert short.count("Attention of the newest known entry, head by head:") == (0 if recurrent else 1)
    heat_map = line.does(*arguments, "--layer", across[-1])
    assert re.findall(r"^  (\?\d)  [░▒▓█]{8}  ", heat_map, re.MULTILINE) == STEPS * heads
    if not recurrent:
        heat_map = line.does(*arguments, "--layer", back[0])
        assert len(re.findall(r"^  \?1  [░▒▓█]{2}          1 at itself$", heat_map, re.MULTILINE)) == heads
        assert re.findall(r"^  \?2  .* at (?:itself|step 1), 0\.\d+ at (?:itself|step 1)$", heat_map, re.MULTILINE)
    full = line.does(*arguments, "--layer", across[0], "--head", 1, "--query", "?3").splitlines()
    assert full[-5] == f"Attention of step 3 in {across[0]}, head 1:"
    shown = [float(text.split()[2]) for text in full[-4:]]
    assert shown == pytest.approx(attention[across[0]][0, 2].tolist(), abs=6e-5)
    line.does(*arguments, "--html", "why.html")
    page = (line.folder / "why.html").read_text(encoding="utf-8")
    assert page.count("<svg") == heads * len(attention) and "?1 attends to 4: " in page
    assert ("?5 attends to ?5: " in page) == (not recurrent)
    assert f"?1 to ?5 are the steps of a plan, which choose <bdi>{plan[0]}</bdi>, " in page


def test_the_explained_plan_obeys_the_rules_and_may_be_short(run: Path) -> None:
    """With three allowed items the plan has three steps; with none, attention has the first step only."""
    model = Recommender.open(run)
    only = [f"i{number:02}" for number in (3, 7, 8, 9)]
    shorter = model.explain(HISTORY, "i05", only=only, keep_seen=False)
    assert sorted(step.id for step in shorter.plan) == ["i07", "i08", "i09"]
    assert shorter.attention[-1].rows == [None] * 3
    empty = model.explain(HISTORY, "i05", only=HISTORY, keep_seen=False)
    assert empty.plan == [] and empty.attention[-1].rows == [None]
    whole = np.array(model.explain(HISTORY).attention[-1].weights)
    assert np.array(empty.attention[-1].weights) == pytest.approx(whole[:, :1], abs=1e-6)
    assert model.explain(["nobody"]).plan == [] and model.attention(["nobody"]) == {}
