"""Attention maps in answers, text and pages: self-attention, decoder steps, hard attention, negative weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
import pytest
import torch
from command_line import CommandLine
from explained import Page, explanation_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from segue.api import train
from segue.data.vocabulary import Vocabulary
from segue.errors import InputError
from segue.index.exact import ExactIndex
from segue.layers.packed import PackedBatch
from segue.models.attention import AttentionMap, attention_maps
from segue.recommend.answer import Attention, Contribution, Explanation
from segue.recommend.explain.page import html
from segue.recommend.explain.text import View, attention_lines, labels, lines
from segue.recommend.recommender import Recommender
from segue.serving.engine.served_model import ServedModel

IDS = [f"i{number}" for number in range(1, 10)]


class Plain(nn.Module):
    """A model without attention, whose query is the newest item, one-hot."""

    length = 80
    window_step = 1
    timed, input_kinds = False, ()
    incremental = False

    def answerable(self, counts: np.ndarray) -> np.ndarray:
        return counts > 0

    def query(self, batch: PackedBatch) -> Tensor:
        return torch.nn.functional.one_hot(batch.items[batch.last], len(IDS) + 1).float()

    def item_vectors(self) -> Tensor:
        return torch.eye(len(IDS) + 1)

    def item_features(self) -> Tensor:
        return self.item_vectors()

    def attention(self, batch: PackedBatch) -> Tensor | None:
        """None, as of a recurrent model."""


class Hard(Plain):
    """One layer, one head: every token attends to the oldest alone."""

    def attention(self, batch: PackedBatch) -> Tensor:
        weights = torch.zeros(1, batch.size, 1, batch.longest, batch.longest)
        weights[..., 0] = 1
        return weights


class Decoder(Plain):
    """An encoder whose two heads attend to themselves, and two decoder steps with uniform attention to the history."""

    def attention_maps(self, batch: PackedBatch) -> list[AttentionMap]:
        n = batch.longest
        return [
            AttentionMap("encoder, layer 1", torch.eye(n).expand(batch.size, 2, n, n)),
            AttentionMap("decoder, at the history", torch.full((batch.size, 1, 2, n), 1 / n), rows="steps"),
        ]


def recommender_of(model: nn.Module) -> Recommender:
    table = pl.DataFrame({"id": IDS, "count": [1] * len(IDS), "title": [None] * len(IDS)})
    index = ExactIndex.build(model.item_vectors(), candidates=np.arange(len(IDS) + 1) > 0)  # type: ignore[operator]
    return Recommender(model, index, Vocabulary(table))  # type: ignore[arg-type]


# --- in answers ---------------------------------------------------------------------------------------------------


def test_a_model_without_attention_shows_none() -> None:
    recommender = recommender_of(Plain())
    assert recommender.attention(["i1", "i2"]) == {}
    assert recommender.explain(["i1", "i2"]).attention == []
    assert not ServedModel("plain", recommender).card.attention
    assert ServedModel("hard", recommender_of(Hard())).card.attention
    assert ServedModel("decoder", recommender_of(Decoder())).card.attention


def test_hard_attention_has_the_same_form() -> None:
    recommender = recommender_of(Hard())
    one_hot = [[1.0, 0.0, 0.0]] * 3
    (layer,) = recommender.explain(["i4", "i5", "i6"]).attention
    assert layer == Attention("layer 1", [0, 1, 2], [0, 1, 2], [one_hot])
    assert recommender.attention(["i4", "i5", "i6"])["layer 1"].tolist() == [one_hot]


def test_a_decoders_rows_are_steps() -> None:
    recommender, history = recommender_of(Decoder()), ["i4", "ghost", "i5"]
    assert recommender.explain(history).attention == [
        Attention("encoder, layer 1", [0, 2], [0, 2], [[[1.0, 0.0], [0.0, 1.0]]] * 2),
        Attention("decoder, at the history", [None, None], [0, 2], [[[0.5, 0.5], [0.5, 0.5]]]),
    ]
    attention = recommender.attention(history)
    assert {name: weights.shape for name, weights in attention.items()} == {
        "encoder, layer 1": (2, 2, 2),
        "decoder, at the history": (1, 2, 2),
    }


def test_with_a_long_history_a_decoders_columns_are_the_newest_entries() -> None:
    encoder, decoder = recommender_of(Decoder()).explain(IDS * 8, "i1").attention  # 72, of which 64 are shown
    assert encoder.rows == encoder.columns == decoder.columns == list(range(8, 72))
    assert decoder.rows == [None, None]
    assert np.array(encoder.weights).shape == (2, 64, 64) and np.array(decoder.weights).shape == (1, 2, 64)
    assert decoder.weights[0][1] == [round(1 / 72, 6)] * 64


def test_maps_keep_their_order_and_layers_get_a_number() -> None:
    batch = PackedBatch(items=torch.tensor([1, 2]), times=torch.tensor([0, 0]), lengths=torch.tensor([2]))
    names = [[each.name for each in attention_maps(cast(Any, model), batch)] for model in (Plain(), Hard(), Decoder())]
    assert names == [[], ["layer 1"], ["encoder, layer 1", "decoder, at the history"]]


# --- as text ------------------------------------------------------------------------------------------------------

TRIO = [Contribution(name, None, True, 1.0) for name in ("tea", "jug", "tin")]
SOFT = [[1.0, 0.0, 0.0], [0.05, 0.95, 0.0], [0.2, 0.5, 0.3]]
SIGNED = [[0.4, 0.0, 0.0], [-0.05, 0.1, 0.0], [-0.3, 0.0, 0.2]]


def with_maps(*layers: Attention) -> Explanation:
    return explanation_of(TRIO, attention=list(layers))


def layer_of(*heads: list[list[float]], name: str = "layer 1") -> Attention:
    return Attention(name, [0, 1, 2], [0, 1, 2], [*heads])


def draw(explanation: Explanation, layer: str | None = None, head: int | None = None, query: str | None = None) -> str:
    return "\n".join(attention_lines(explanation, View(layer=layer, head=head, query=query)))


def test_a_heat_map_by_hand() -> None:
    """The largest is 1: 0.05 is at most 1/16 of it, 0.2 at most 1/4, 0.3 and 0.5 at most 9/16."""
    assert draw(with_maps(layer_of(SOFT)), layer="1").split("\n") == [
        "",
        "layer 1, head 1: rows attend to columns.",
        "  · 0, ░ to 0.062, ▒ to 0.25, ▓ to 0.56, █ to 1",
        "     1 2 3",
        "  1  ██      1 at 1 tea",
        "  2  ░░██    0.95 at 2 jug, 0.05 at 1 tea",
        "  3  ▒▒▓▓▓▓  0.5 at 2 jug, 0.3 at 3 tin",
    ]


def test_negative_weights_by_hand() -> None:
    """The largest is 0.4: 0.05 is 1/8 of it, 0.1 1/4, 0.2 1/2 and 0.3 3/4. The strongest of a row
    has the largest absolute value, and an unmasked zero is a dot."""
    assert draw(with_maps(layer_of(SIGNED)), layer="1").split("\n") == [
        "",
        "layer 1, head 1: rows attend to columns.",
        "  · 0, ░ to 0.025, ▒ to 0.1, ▓ to 0.23, █ to 0.4; - to -0.1, = to -0.4",
        "     1 2 3",
        "  1  ██      0.4 at 1 tea",
        "  2  --▒▒    0.1 at 2 jug, -0.05 at 1 tea",
        "  3  ==··▓▓  -0.3 at 1 tea, 0.2 at 3 tin",
    ]


def test_hard_attention_names_one_key_a_row() -> None:
    rows = draw(with_maps(layer_of([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])), layer="1").split("\n")[-3:]
    assert rows == ["  1  ██      1 at 1 tea", "  2  ██··    1 at 1 tea", "  3  ··██··  1 at 2 jug"]
    assert draw(with_maps(layer_of([[0.0] * 3] * 3))).endswith("layer 1, head 1: nothing")
    assert draw(with_maps(layer_of([[0.0] * 3] * 3)), layer="1").endswith("  3  ······  nothing")


def test_steps_of_a_decoder_by_hand() -> None:
    decoder = Attention("decoder, at the history", [None, None], [0, 1, 2], [[[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]]])
    explanation = with_maps(layer_of(SOFT, name="encoder, layer 1"), decoder)
    assert draw(explanation).split("\n") == [
        "",
        "Attention of the newest known entry, head by head:",
        "  encoder, layer 1, head 1: 0.5 at 2 jug, 0.3 at 3 tin, 0.2 at 1 tea",
        "",
        "Attention of step 1, head by head:",
        "  decoder, at the history, head 1: 0.75 at 3 tin, 0.25 at 2 jug",
    ]
    assert draw(explanation, layer="decoder, at the history") == draw(explanation, layer="2")
    assert draw(explanation, layer="2").split("\n")[3:] == [
        "      1 2 3",
        "  ?1  ··▒▒██  0.75 at 3 tin, 0.25 at 2 jug",
        "  ?2  ██····  1 at 1 tea",
    ]
    assert draw(explanation, layer="2", query="?1").split("\n") == [
        "",
        "Attention of step 1 in decoder, at the history, head 1:",
        "  1  tea    0.0000",
        "  2  jug    0.2500  ████████",
        "  3  tin    0.7500  ████████████████████████",
    ]


def test_a_query_token_is_the_last_row_and_column() -> None:
    layer = Attention("layer 1", [0, None], [0, None], [[[0.25, 0.75], [0.5, 0.5]]])
    explanation = with_maps(layer)
    assert draw(explanation, head=1).split("\n")[3:] == [
        "     1 ?",
        "  1  ▓▓██  0.75 at the query, 0.25 at 1 tea",
        "  ?  ████  0.5 at itself, 0.5 at 1 tea",
    ]
    assert draw(explanation, query="?") == draw(explanation)
    assert draw(explanation, layer="1", query="1").split("\n")[2:] == [
        "  1  tea          0.2500  ████████",
        "  ?  the query    0.7500  ████████████████████████",
    ]
    assert labels([3, 9, None]) == ["4", "10", "?"] and labels([None, None]) == ["?1", "?2"]


def test_layer_head_and_query_select() -> None:
    explanation = with_maps(layer_of(SOFT, SIGNED), layer_of(SIGNED, SOFT, name="layer 2"))
    assert re.findall(r"layer \d, head \d", draw(explanation)) == [
        *("layer 1, head 1", "layer 1, head 2", "layer 2, head 1", "layer 2, head 2")
    ]
    assert re.findall(r"layer \d, head \d", draw(explanation, layer="2")) == ["layer 2, head 1", "layer 2, head 2"]
    assert re.findall(r"layer \d, head \d", draw(explanation, head=2)) == ["layer 1, head 2", "layer 2, head 2"]
    assert re.findall(r"layer \d, head \d", draw(explanation, layer="layer 1", head=2)) == ["layer 1, head 2"]
    assert draw(explanation, query="2").split("\n")[1:3] == [
        "Attention of 2 jug, head by head:",
        "  layer 1, head 1: 0.95 at 2 jug, 0.05 at 1 tea",
    ]
    assert draw(explanation, layer="1", head=2, query="3").split("\n")[1:] == [
        "Attention of 3 tin in layer 1, head 2:",
        "  1  tea   -0.3000  ========================",
        "  2  jug    0.0000",
        "  3  tin    0.2000  ████████████████",
    ]


@pytest.mark.parametrize(
    ("view", "sentence"),
    [
        (View(layer="3"), r"There is no layer '3'; there is 1 \(layer 1\), 2 \(decoder\)\."),
        (View(layer="encoder"), "There is no layer 'encoder'; there is 1"),
        (View(head=3), r"There is no head 3; the heads are numbered from 1 to 2\."),
        (View(layer="2", head=2), "There is no head 2; the heads are numbered from 1 to 1"),
        (View(query="4"), r"There is no query '4' here; the queries are 1, 2, 3, \?\."),
        (View(layer="1", query="?"), r"There is no query '\?' here; the queries are 1, 2, 3\."),
    ],
)
def test_missing_layers_heads_and_queries(view: View, sentence: str) -> None:
    explanation = with_maps(layer_of(SOFT, SOFT), Attention("decoder", [None], [0, 1, 2], [[[0.0, 0.0, 1.0]]]))
    with pytest.raises(InputError, match=sentence):
        list(attention_lines(explanation, view))


def test_no_attention_is_an_error_only_on_request() -> None:
    assert draw(with_maps()) == ""
    for view in (View(layer="1"), View(head=1), View(query="1")):
        with pytest.raises(InputError, match="no attention to show, because this model has none; leave out --layer"):
            list(attention_lines(with_maps(), view))
    with pytest.raises(InputError, match="no attention to show, because no entry of the history is known"):
        list(attention_lines(explanation_of(TRIO, fallback="popularity"), View(layer="1")))


@settings(max_examples=40)
@given(
    st.integers(1, 40).flatmap(
        lambda n: st.lists(st.lists(st.integers(-9, 9), min_size=n, max_size=n), min_size=1, max_size=4)
    )
)
def test_every_cell_has_the_shade_of_its_share(whole: list[list[int]]) -> None:
    """Four shades by the square root of the share of the largest, in quarters; signs for negative weights."""
    columns: list[int | None] = [*range(len(whole[0]))]
    rows = [None] * len(whole)
    layer = Attention("decoder", list(rows), columns, [[[float(weight) for weight in row] for row in whole]])
    entries = [Contribution(f"i{column}", None, True, 1.0) for column in range(len(columns))]
    text = draw(explanation_of(entries, attention=[layer]), layer="1").split("\n")
    width, most = 2 if len(columns) <= 32 else 1, max(1, *(abs(weight) for row in whole for weight in row))
    heat_map = [line.split("  ")[2] for line in text[-len(whole) :]]
    for cells, row in zip(heat_map, whole, strict=True):
        expected = ""
        for weight in row:
            level = int(np.ceil(4 * np.sqrt(abs(weight) / most) - 1e-9))
            expected += width * ("·░▒▓█" if weight >= 0 else " --==")[level]
        assert cells == expected
    margin = 2 + len(labels(layer.rows)[0]) + 2
    header = [line[margin::width].ljust(len(columns)) for line in text[3 : -len(whole)]]
    upright = ["".join(digits).strip() for digits in zip(*header, strict=True)]
    assert upright == [str(column + 1) for column in range(len(columns))]


# --- as a page ----------------------------------------------------------------------------------------------------


def test_the_page_of_every_kind_by_hand() -> None:
    decoder = Attention("decoder, at the history", [None, None], [0, 1, 2], [[[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]]])
    text = html(with_maps(layer_of(SIGNED), decoder))
    page = Page(text)
    assert page.titles[1:] == [
        "1 attends to 1: 0.4000",
        *("2 attends to 1: -0.0500", "2 attends to 2: 0.1000"),
        *("3 attends to 1: -0.3000", "3 attends to 2: 0.0000", "3 attends to 3: 0.2000"),
        *("?1 attends to 1: 0.0000", "?1 attends to 2: 0.2500", "?1 attends to 3: 0.7500"),
        *("?2 attends to 1: 1.0000", "?2 attends to 2: 0.0000", "?2 attends to 3: 0.0000"),
    ]
    assert page.written[-2:] == ["layer 1", "decoder, at the history"]
    assert re.findall(r'viewBox="([^"]*)"', text) == ["0 0 39 39", "0 0 39 31"], "15 units of margin, 8 a cell"
    assert text.count("class=down") == 2
    quarter = next(part for part in text.split("<rect") if "?1 attends to 2" in part)
    assert 'x="23" y="15"' in quarter and 'opacity="0.500"' in quarter, "the root of a quarter of the largest, 1"
    assert "?1 to ?2 are the steps of a plan. The answer is computed from the first of them" in text
    step = Attention("decoder", [None], [0, 1, 2], [[[0.0, 0.25, 0.75]]])
    assert (
        "? is the query, a token that the model appends to the history. The answer is computed from the last"
        in html(with_maps(step))
    )
    assert "is the query" not in html(with_maps(layer_of(SOFT)))


# --- the command line ---------------------------------------------------------------------------------------------

SMALL = ["model.width=16", "model.depth=1", "model.length=20"]
SHAPES = {
    "sasrec": ["model.heads=2", "model.depth=2"],
    "bert4rec": ["model=bert4rec", "objective.task=masked-item"],
    "hstu": ["model=hstu", *SMALL],
    "narm": ["model=narm", "model.scores=additive", *SMALL],
    "hard": ["model=narm", "model.choice=straight-through", *SMALL],
    "gru4rec": ["model=gru4rec", *SMALL],
}


@pytest.fixture(name="run_of", scope="module")
def runs_of_every_kind(
    cycle_data: Path, quick_recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Run folders of one epoch by kind, trained on first use."""
    folder = tmp_path_factory.mktemp("attention")

    def run_of(name: str) -> Path:
        if not (folder / name).exists():
            train(cycle_data, out=folder / name, recipe=quick_recipe, overrides=["train.epochs=1", *SHAPES[name]])
        return folder / name

    return run_of


HISTORY = [f"i{number:02}" for number in (0, 1, 2, 3)]
ROW = re.compile(r"^  ([\d?]+)  ([·░▒▓█=\- ]+?)  (-?[\d.e-]+ at .*)$")


def shades(weights: np.ndarray) -> list[str]:
    """The cells of a heat map, from its definition."""
    level = np.ceil(4 * np.sqrt(np.abs(weights) / np.abs(weights).max())).astype(int)
    glyphs = np.where(weights >= 0, np.array(list("·░▒▓█"))[level], np.array(list(" --=="))[level])
    return ["".join(2 * glyph for glyph in row) for row in glyphs]


@pytest.mark.parametrize(
    ("name", "positions"), [("sasrec", "1234"), ("bert4rec", "1234?"), ("hstu", "1234"), ("narm", "1234")]
)
def test_the_command_draws_the_weights_that_python_gives(
    line: CommandLine, run_of: Callable[[str], Path], name: str, positions: str
) -> None:
    attention = Recommender.open(run_of(name)).attention(HISTORY)
    explain = partial(line.does, "explain", run_of(name), "--history", ",".join(HISTORY))
    short, whole = explain(), ""
    for number, (layer, heads) in enumerate(attention.items(), start=1):
        for head, weights in enumerate(heads, start=1):
            text = explain("--layer", number, "--head", head)
            whole += text[text.index(f"\n{layer}, head {head}: rows attend") :]
            heat_map_rows = [match for match in map(ROW.match, text.splitlines()) if match]
            assert [match[1] for match in heat_map_rows] == list(positions)
            expected = shades(weights.astype(np.float64).round(6))
            cells = [match[2].ljust(2 * len(positions)) for match in heat_map_rows]
            assert [row.replace("·", " ") for row in cells] == [row.replace("·", " ") for row in expected]
            last = np.abs(weights[-1]).argsort()[::-1]
            key = "itself" if last[0] == 4 else f"{last[0] + 1} {HISTORY[last[0]]}"
            assert f"  {layer}, head {head}: {weights[-1][last[0]]:.2g} at {key}, " in short
            full = explain("--layer", layer, "--head", head, "--query", positions[-1]).splitlines()[-len(positions) :]
            assert [float(row.split()[-2 if row[-1] in "█=" else -1]) for row in full] == pytest.approx(
                weights[-1], abs=6e-5
            )
    assert whole.count("rows attend") == sum(len(heads) for heads in attention.values()) > 0
    assert ("- to -" in whole) == (name == "hstu") == any((heads < 0).any() for heads in attention.values())
    lines = 3 + (name == "hstu") + 4 + 2 + sum(len(heads) for heads in attention.values())  # the times are missing
    assert len(short.splitlines()) == lines, "the default is short"


def test_the_command_shows_the_attention_of_another_entry(line: CommandLine, run_of: Callable[[str], Path]) -> None:
    explain = partial(line.does, "explain", run_of("sasrec"), "--history", "i00,ghost,i01,i02")
    output = explain("--query", 3).splitlines()
    assert output[-5] == "Attention of 3 i01, head by head:"
    assert [text.split(":")[0] for text in output[-4:]] == [
        f"  layer {layer}, head {head}" for layer in (1, 2) for head in (1, 2)
    ]
    assert all(re.fullmatch(r"[\d.]+ at \d i0\d, [\d.]+ at \d i0\d", text.split(": ")[1]) for text in output[-4:])
    heads = explain("--head", 2, "--query", 4)
    assert heads.count("Attention of 4 i02 in layer") == 2 and "head 1" not in heads
    maps = explain("--layer", "layer 2")
    assert maps.count("rows attend to columns") == 2 and "layer 1" not in maps


def test_the_command_draws_hard_attention(line: CommandLine, run_of: Callable[[str], Path]) -> None:
    """Each row has one full cell and names one key."""
    text = line.does("explain", run_of("hard"), "--history", ",".join(HISTORY), "--layer", 1)
    rows = [match for match in map(ROW.match, text.splitlines()) if match]
    assert [match[1] for match in rows] == list("1234")
    (weights_by_head,) = Recommender.open(run_of("hard")).attention(HISTORY).values()
    for position, (match, weights) in enumerate(zip(rows, weights_by_head[0], strict=True)):
        key = int(weights.argmax())
        assert weights.tolist() == [float(column == key) for column in range(4)]
        assert match[2].rstrip() == ("··" * key + "██").ljust(2 * position + 2, "·")
        assert match[3] == f"1 at {key + 1} {HISTORY[key]}"


def test_the_command_with_a_model_without_attention(line: CommandLine, run_of: Callable[[str], Path]) -> None:
    arguments = ("explain", run_of("gru4rec"), "--history", ",".join(HISTORY))
    assert len(line.does(*arguments).splitlines()) == 3 + 4, "the heading and the contributions"
    assert line.answers(*arguments)["attention"] == []
    assert line.does(*arguments, "--html", "why.html").endswith("Wrote why.html.\n")
    assert "<svg" not in (line.folder / "why.html").read_text(encoding="utf-8")
    line.refuses(*arguments, "--head", 1, says=("There is no attention to show, because this model has none",))


def test_what_the_command_refuses_to_draw(line: CommandLine, run_of: Callable[[str], Path]) -> None:
    arguments = ("explain", run_of("sasrec"), "--history", "i00,ghost,i01")
    line.refuses(*arguments, "--layer", 3, says=("There is no layer '3'; there is 1 (layer 1), 2 (layer 2).",))
    line.refuses(*arguments, "--head", 3, says=("There is no head 3; the heads are numbered from 1 to 2.",))
    line.refuses(*arguments, "--query", 2, "--html", "x.html", says=("no query '2' here; the queries are 1, 3.",))
    assert not (line.folder / "x.html").exists()
    line.refuses(*arguments, "--head", 0, says=("--head",), code=2)
    for option in (("--layer", 1), ("--head", 1), ("--query", 1)):
        line.refuses(*arguments, *option, "--json", says=("--json has all of the attention",), code=2)
    unknown = ("explain", run_of("sasrec"), "--history", "ghost", "--layer", 1)
    line.refuses(*unknown, says=("There is no attention to show, because no entry of the history is known",))


def test_the_same_text_from_python(run_of: Callable[[str], Path]) -> None:
    explanation = Recommender.open(run_of("sasrec")).explain(HISTORY)
    text = list(lines(explanation, View(layer="2", head=1)))
    assert text[-7].startswith("layer 2, head 1: rows attend") and len(text) == 3 + 4 + 8
