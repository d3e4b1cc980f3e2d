"""Attention of an encoder and a decoder, both bodies, through the command line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine

from segue.api import train
from segue.recommend.recommender import Recommender

HISTORY = [f"i{number:02}" for number in (0, 1, 2, 3)]
AT_HISTORY = "decoder, layer {}, at the history"


@pytest.fixture(scope="module", params=["transformer", "gru"])
def run(
    request: pytest.FixtureRequest, cycle_data: Path, quick_recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of one epoch."""
    body = ["model.body=gru", "model.feed_forward=4", "model.positions=newest"] if request.param == "gru" else []
    shape = ["model.heads=2", "model.depth=2"] if request.param == "transformer" else []
    task = ["model.builder=seq2seq", "objective.task=continuation", "train.epochs=1"]
    out: Path = tmp_path_factory.mktemp("plans") / request.param
    train(cycle_data, out=out, recipe=quick_recipe, overrides=[*task, *body, *shape])
    return out


def test_the_encoder_and_the_decoder_each_have_their_maps(line: CommandLine, run: Path) -> None:
    model = Recommender.open(run)
    found, recurrent = model.attention(HISTORY), run.name == "gru"
    encoder = [] if recurrent else ["encoder, layer 1", "encoder, layer 2"]
    decoder = [AT_HISTORY.format(layer) for layer in ([1] if recurrent else [1, 2])]
    heads = 1 if recurrent else 2
    assert list(found) == [*encoder, *decoder]
    assert all(found[name].shape == (heads, 4, 4) for name in encoder)
    assert all(found[name].shape == (heads, 1, 4) for name in decoder)
    assert all(np.abs(weights.sum(-1) - 1).max() < 1e-5 for weights in found.values())
    explanation = model.explain(HISTORY)
    assert [layer.rows for layer in explanation.attention[-len(decoder) :]] == [[None]] * len(decoder)
    asked = ("explain", run, "--history", ",".join(HISTORY))
    short = line.does(*asked)
    assert short.count("Where the question looks, head by head:") == 1
    assert short.count("Where the newest known entry looks, head by head:") == (0 if recurrent else 1)
    drawn = line.does(*asked, "--layer", decoder[-1])
    assert len(re.findall(r"^  \?  [░▒▓█]{8}  ", drawn, re.MULTILINE)) == heads
    full = line.does(*asked, "--layer", decoder[0], "--head", 1, "--query", "?").splitlines()
    assert full[-5] == f"Where the question looks in {decoder[0]}, head 1:"
    shown = [float(text.split()[2]) for text in full[-4:]]
    assert shown == pytest.approx(found[decoder[0]][0, 0].tolist(), abs=6e-5)
    line.does(*asked, "--html", "why.html")
    page = (line.folder / "why.html").read_text(encoding="utf-8")
    assert page.count("<svg") == heads * len(found) and "? looks at 4: " in page
