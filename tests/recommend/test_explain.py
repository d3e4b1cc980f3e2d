"""Explanations: by hand with additive scores, and of real models by leave-one-out."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from command_line import CommandLine
from explained import HOSTILE, Page, explanation_of, values
from hypothesis import given, settings
from hypothesis import strategies as st
from small_recommenders import REAL_IDS, Votes, half_known, network_recommender, voting
from torch import nn

from segue.api import train
from segue.data.batch import window_begins
from segue.errors import InputError
from segue.layers.blocks.transformer import SASRecBlock
from segue.layers.positions.embeddings import LearnedPositions
from segue.recommend.answer import Attention, Contribution, Explanation, ScoredItem
from segue.recommend.explain import explain as explain_module
from segue.recommend.explain.page import html
from segue.recommend.explain.text import lines
from segue.recommend.recommender import Recommender


@pytest.fixture(name="learned_run", scope="module")
def learned_cycle(cycle_data: Path, quick_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained until it predicts the cycle."""
    out = tmp_path_factory.mktemp("learned") / "run"
    train(cycle_data, out=out, recipe=quick_recipe, overrides=["train.epochs=12", "train.patience=12"])
    return out


# --- contributions ------------------------------------------------------------------------------------------------


def test_contributions_by_hand() -> None:
    """For d, number 4: a gives 4, b 8 % 7 = 1, c 12 % 7 = 5."""
    explanation = voting().explain(["a", "b", "c"], "d")
    assert explanation.item == ScoredItem("d", "Title d", 10.0)
    assert explanation.contributions == [
        Contribution("a", "Title a", True, 4.0),
        Contribution("b", "Title b", True, 1.0),
        Contribution("c", "Title c", True, 5.0),
    ]
    assert (explanation.attention, explanation.unknown, explanation.fallback) == ([], [], None)


def test_an_older_entry_enters_the_window_of_a_variant() -> None:
    """The window is three: without a it is e, b, c, and e gives d 20 % 7 = 6. Older entries change nothing."""
    assert values(voting().explain(["e", "a", "b", "c"], "d")) == [None, 4 - 6, 1 - 6, 5 - 6]
    assert values(voting().explain(["f", "e", "a", "b", "c"], "d")) == [None, None, 4 - 6, 1 - 6, 5 - 6]


def test_each_of_several_equal_entries_counts_for_itself() -> None:
    assert values(voting().explain(["c", "b", "c"], "d")) == [5.0, 1.0, 5.0]


def test_unknown_entries_have_no_contribution_and_take_no_room() -> None:
    recommender = voting(counts=[1, 1, 1, 1, 0, 1])  # e is cold
    explanation = recommender.explain(["zzz", "a", "e", "b", "c", "zzz"], "d")
    assert values(explanation) == [None, 4.0, None, 1.0, 5.0, None]
    assert [entry.known for entry in explanation.contributions] == [False, True, False, True, True, False]
    assert [entry.title for entry in explanation.contributions][:3] == [None, "Title a", "Title e"]
    assert explanation.unknown == ["zzz", "e"]


def test_without_the_only_known_entry_there_is_no_score() -> None:
    explanation = voting().explain(["zzz", "c"], "d")
    assert (explanation.item.score, explanation.fallback) == (5.0, None)
    assert values(explanation) == [None, None]


def test_contributions_are_in_order_of_time() -> None:
    late, early = {"item": "a", "time": 20}, {"item": "b", "time": 10}
    entries = voting().explain(iter([late, early]), "d").contributions
    assert [(entry.item, entry.contribution) for entry in entries] == [("b", 1.0), ("a", 4.0)]


def test_variants_have_the_same_request_time_and_bounded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    recommender = voting()
    whole = recommender.explain(list("fedabc"), "d")
    model = cast(Votes, recommender.model)
    assert model.tokens.count(9) == 1  # three variants of three events, at once
    model.tokens.clear()
    model.query_times.clear()
    monkeypatch.setattr(explain_module, "TOKENS", 6)
    assert recommender.explain(list("fedabc"), "d", now=1_700_000_000) == whole
    assert max(model.tokens) == 6
    assert {time for query_times in model.query_times for time in query_times or [-1]} == {1_700_000_000}


def test_a_variant_longer_than_the_budget_is_a_batch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_module, "TOKENS", 1)
    assert values(voting().explain(["a", "b", "c"], "d")) == [4.0, 1.0, 5.0]


@pytest.mark.parametrize(
    ("positions", "length"), [("newest", 5), ("oldest", 5), ("oldest", 8)], ids=["newest", "oldest", "moving by two"]
)
@pytest.mark.parametrize("builder", ["sasrec", "esasrec", "bert4rec"])
@settings(max_examples=15, deadline=None)
@given(
    history=st.lists(st.sampled_from([*REAL_IDS, "ghost"]), min_size=1, max_size=14),
    item=st.sampled_from([name for name in REAL_IDS if name != "i2"]),
    keep_seen=st.booleans(),
)
def test_contributions_agree_with_recommend(
    builder: str, positions: str, length: int, history: list[str], item: str, keep_seen: bool
) -> None:
    """A contribution is the score minus the score from `recommend` without the entry."""
    recommender = half_known(builder, positions, length)
    model = recommender.model
    known = [position for position, name in enumerate(history) if name not in ("i2", "ghost")]
    (begin,) = window_begins(np.array([len(known)]), model.length, model.window_step)

    def score(entries: list[str]) -> float:
        return recommender.recommend(entries, only=[item], keep_seen=True).items[0].score

    explanation = recommender.explain(history, item, keep_seen=keep_seen)
    assert explanation.item.score == pytest.approx(score(history), abs=1e-5)
    answers = recommender.recommend(history, k=99, keep_seen=keep_seen)
    assert explanation.rank == (answers.ids.index(item) + 1 if item in answers.ids else None)
    assert (explanation.unknown, explanation.fallback) == (answers.unknown, answers.fallback)
    contributions = values(explanation)
    assert [entry.item for entry in explanation.contributions] == history
    for position in range(len(history)):
        if position in known[begin:] and len(known) > 1:
            expected = score(history) - score(history[:position] + history[position + 1 :])
            assert contributions[position] == pytest.approx(expected, abs=1e-5)
        else:
            assert contributions[position] is None


# --- the item and its rank ----------------------------------------------------------------------------------------


def test_without_an_item_the_best_answer_is_explained() -> None:
    recommender = voting()
    for rules in ({}, {"keep_seen": True}, {"exclude": ["d"]}, {"only": ["e", "f"]}):
        best = recommender.recommend(["a", "b", "c"], k=1, **rules).items[0]
        explanation = recommender.explain(["a", "b", "c"], **rules)
        assert (explanation.item, explanation.rank) == (best, 1)


def test_the_rank_is_among_the_allowed_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """After c come, by 3 * number % 7: b 6, e 1 (15), d 5 (12), a 3, f 4 (18), c 2 (9)."""
    order = ["b", "d", "f", "a", "c", "e"]
    recommender = voting()
    for first_search in (1, 2, 100):
        monkeypatch.setattr(explain_module, "FIRST_SEARCH", first_search)
        ranks = [recommender.explain(["c"], name, keep_seen=True).rank for name in order]
        assert ranks == [1, 2, 3, 4, 5, 6]
        assert recommender.explain(["c"], "e").rank == 5  # c was seen
        assert recommender.explain(["c"], "c").rank is None
        assert recommender.explain(["c"], "f", exclude=["b"], only=["f", "a", "b"]).rank == 1
        assert recommender.explain(["c"], "f", exclude=["f"]).rank is None
        assert recommender.explain(["c"], "f", only=["a"]).rank is None
    assert recommender.explain(["c"], "c").item.score == 2.0  # also of an item that is not allowed
    assert voting(seen="kept").explain(["c"], "c").rank == 5


def test_a_history_without_a_known_item_is_answered_by_popularity() -> None:
    recommender = voting(counts=[3, 9, 1, 0, 5, 2])
    for history in ([], ["zzz", "d", "zzz"]):
        explanation = recommender.explain(history)
        assert (explanation.item, explanation.rank) == (ScoredItem("b", "Title b", 9.0), 1)
        assert explanation.fallback == "popularity"
        assert values(explanation) == [None] * len(history)
        assert recommender.explain(history, "f").rank == 4
        assert recommender.explain(history, "f", exclude=["b"], only=["a", "b", "f"]).rank == 2
        assert recommender.explain(history, "f", exclude=["f"]).rank is None
    assert network_recommender(REAL_IDS).explain(["ghost"]).attention == []
    recommender.answerable[4] = True  # as for an item known by its content
    assert recommender.explain([], "d").item.score == 0.0, "its events in training"


@pytest.mark.parametrize(
    ("history", "item", "sentence"),
    [
        (["a"], "nobody", "The item 'nobody' is not one of the 6 items of this run, so it has no score to explain."),
        (["a"], "d", "The item 'd' was never trained on, so it has no score to explain."),
        (["a", "b", "c", "e", "f"], None, "Under these rules no item is left to answer"),
        (["a"], 1.5, "An item id is a text or a whole number"),
        ("abc", None, "A history must be a list of item ids"),
        ([{"item": "a", "when": 5}], None, "A history's entry has item, time, kind, value"),
    ],
)
def test_refusals(history: Any, item: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        voting(counts=[1, 1, 1, 0, 1, 1]).explain(history, item)


# --- attention ----------------------------------------------------------------------------------------------------


def stacked(recommender: Recommender, history: list[str]) -> np.ndarray:
    """Attention of all layers as one array [layers, heads, n, n]."""
    return np.stack([*recommender.attention(history).values()])


def attention_in(explanation: Explanation) -> np.ndarray:
    return np.array([layer.weights for layer in explanation.attention])


def test_attention_of_one_layer_from_its_definition() -> None:
    """softmax over j <= i of q_i · k_j / sqrt(head width), q from the normalised token, k from the token itself."""
    recommender = network_recommender(REAL_IDS, kind="sasrec", depth=1, heads=2, positions="oldest")
    history = ["i4", "i1", "i4", "i8"]
    model, numbers = recommender.model, recommender.vocabulary.numbers(history, unknown="error")
    block, positions = cast(SASRecBlock, model.blocks[0]), cast(LearnedPositions, model.positions)
    x = (model.items.into[numbers] * model.scale + positions.table[:4]).detach().numpy().astype(np.float64)

    def linear(layer: nn.Linear, inputs: np.ndarray) -> np.ndarray:
        return np.asarray(inputs @ layer.weight.detach().numpy().T + layer.bias.detach().numpy())

    norm = block.norm_query
    normal = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + norm.eps)
    q = linear(block.attention.query, normal * norm.weight.detach().numpy() + norm.bias.detach().numpy())
    k = linear(block.attention.key_value, x)[:, :8]
    expected = np.zeros((2, 4, 4))
    for head, row in itertools.product(range(2), range(4)):
        part = slice(4 * head, 4 * head + 4)
        powers = np.exp([q[row, part] @ k[column, part] / 2 for column in range(row + 1)])  # 2 = sqrt(4)
        expected[head, row, : row + 1] = powers / powers.sum()
    attention = recommender.attention(history)
    assert list(attention) == ["layer 1"]
    assert np.abs(attention["layer 1"] - expected).max() < 1e-5
    assert len({round(float(weight), 4) for weight in expected[:, 3].ravel()}) == 8, (
        "weights too similar to distinguish"
    )
    (layer,) = recommender.explain(history).attention
    assert (layer.name, layer.rows, layer.columns) == ("layer 1", [0, 1, 2, 3], [0, 1, 2, 3])
    assert np.abs(np.array(layer.weights) - expected).max() < 1e-5


@pytest.mark.parametrize("builder", ["sasrec", "esasrec"])
def test_attention_rows_sum_to_one_and_are_causal(builder: str) -> None:
    recommender = network_recommender(REAL_IDS, kind=builder, positions="oldest")
    whole, prefix = stacked(recommender, ["i1", "i7", "i1", "i3", "i0"]), stacked(recommender, ["i1", "i7", "i1"])
    assert whole.shape == (2, 2, 5, 5)
    assert np.abs(whole.sum(-1) - 1).max() < 1e-5
    assert (whole[..., *np.triu_indices(5, 1)] == 0).all()
    assert np.abs(whole[..., :3, :3] - prefix).max() < 1e-5


def test_attention_entries_are_those_in_the_window() -> None:
    recommender = half_known("esasrec", "newest")
    history = ["i0", "i1", "ghost", "i3", "i4", "i2", "i5", "i6", "ghost"]
    explanation = recommender.explain(history)
    assert [layer.name for layer in explanation.attention] == ["layer 1", "layer 2"]
    assert all(layer.rows == layer.columns == [1, 3, 4, 6, 7] for layer in explanation.attention)
    assert np.abs(attention_in(explanation) - stacked(recommender, ["i1", "i3", "i4", "i5", "i6"])).max() < 1e-5
    assert recommender.explain(history, attention=False).attention == []
    assert recommender.attention(["ghost"]) == {}
    assert voting().attention(["a"]) == {}


def test_a_bidirectional_model_has_a_query_token() -> None:
    """Length five: four entries, then the query token."""
    recommender = half_known("bert4rec", "newest")
    history = ["i0", "i1", "ghost", "i3", "i4", "i2", "i5", "i6", "ghost"]
    explanation, whole = recommender.explain(history), stacked(recommender, ["i3", "i4", "i5", "i6"])
    assert all(layer.rows == layer.columns == [3, 4, 6, 7, None] for layer in explanation.attention)
    assert whole.shape == (2, 2, 5, 5)
    assert np.abs(attention_in(explanation) - whole).max() < 1e-5
    assert np.abs(whole.sum(-1) - 1).max() < 1e-5
    assert (whole[..., *np.triu_indices(5, 1)] > 0).all(), "attention is not causal"


def test_with_a_long_history_the_query_token_follows_the_newest_entries() -> None:
    recommender = network_recommender(REAL_IDS, kind="bert4rec", length=91)
    history = [REAL_IDS[number] for number in np.random.default_rng(1).integers(0, 9, 100)]
    explanation, whole = recommender.explain(history, "i3"), stacked(recommender, history)
    assert all(layer.rows == layer.columns == [*range(36, 100), None] for layer in explanation.attention)
    assert whole.shape == (2, 2, 91, 91)
    assert np.abs(attention_in(explanation) - whole[..., 26:, 26:]).max() < 1e-6
    assert any("among the newest 64 entries" in line for line in lines(explanation))


def test_an_answer_has_attention_of_the_newest_entries_and_python_of_all() -> None:
    recommender = network_recommender(REAL_IDS, length=90)
    history = [REAL_IDS[number] for number in np.random.default_rng(1).integers(0, 9, 100)]
    explanation, whole = recommender.explain(history, "i3"), stacked(recommender, history)
    assert all(layer.rows == layer.columns == list(range(36, 100)) for layer in explanation.attention)
    assert whole.shape == (2, 2, 90, 90)
    assert np.abs(attention_in(explanation) - whole[..., 26:, 26:]).max() < 1e-6
    assert np.abs(whole.sum(-1) - 1).max() < 1e-5
    assert attention_in(explanation)[..., -1, :].sum(-1).max() < 1


# --- a trained model ----------------------------------------------------------------------------------------------


def test_in_a_cycle_the_newest_entry_decides(learned_run: Path) -> None:
    recommender = Recommender.open(learned_run)
    for first in range(12):
        history = [f"i{(first + step) % 12:02}" for step in range(5)]
        explanation = recommender.explain(history)
        assert explanation.item.id == f"i{(first + 5) % 12:02}"
        contributions = [value for value in values(explanation) if value is not None]
        assert len(contributions) == 5 and max(contributions) == contributions[-1] > 0


# --- as text, as JSON, as a page ----------------------------------------------------------------------------------


def square(positions: list[int | None], weights: list[list[float]]) -> Attention:
    """Attention of one head in one layer."""
    return Attention("layer 1", positions, positions, [weights])


def test_the_text() -> None:
    entries = [
        Contribution("old", "Old one", True, None),
        Contribution("up", "Up one", True, 2.0),
        Contribution("ghost", None, False, None),
        Contribution("down", None, True, -1.0),
    ]
    explanation = explanation_of(entries, unknown=["ghost"], attention=[square([1, 3], [[1.0, 0.0], [0.25, 0.75]])])
    assert list(lines(explanation)) == [
        "Why x: rank 2, with a score of 1.2500.",
        "Unknown items, left out: ghost",
        "",
        "Contribution of each entry of the history, oldest first: the score minus the score without it.",
        "  (entry 1 is unknown or older than the model's length)",
        "  2  up       +2.0000              │████████████  Up one",
        "  3  ghost             unknown to the model",
        "  4  down     -1.0000        ██████│",
        "",
        "Attention of the newest known entry, head by head:",
        "  layer 1, head 1: 0.75 at 4 down, 0.25 at 2 up",
    ]


def test_the_text_and_the_page_with_a_query_token() -> None:
    entries = [Contribution("up", None, True, 2.0), Contribution("down", None, True, -1.0)]
    weights = [[0.5, 0.25, 0.25], [0.25, 0.75, 0.0], [0.1, 0.3, 0.6]]
    explanation = explanation_of(entries, attention=[square([0, 1, None], weights)])
    assert list(lines(explanation))[-2:] == [
        "Attention of the query, head by head:",
        "  layer 1, head 1: 0.6 at itself, 0.3 at 2 down, 0.1 at 1 up",
    ]
    text = html(explanation)
    assert "? is the query" in text
    titles = Page(text).titles[1:]
    assert titles == [
        *("1 attends to 1: 0.5000", "1 attends to 2: 0.2500", "1 attends to ?: 0.2500"),
        *("2 attends to 1: 0.2500", "2 attends to 2: 0.7500"),
        *("? attends to 1: 0.1000", "? attends to 2: 0.3000", "? attends to ?: 0.6000"),
    ]


def test_the_text_without_scores_ranks_or_known_entries() -> None:
    alone = explanation_of([Contribution("a", None, True, None)], rank=None, item=ScoredItem("x", "An X", 0.5))
    assert next(lines(alone)) == "Why An X (x): not allowed by these rules, with a score of 0.5000."
    assert "  1  a             the only known entry: there is no score without it" in lines(alone)
    flat = explanation_of([Contribution(name, None, True, 0.0) for name in "ab"])
    assert sum("│" in text and "█" not in text for text in lines(flat)) == 2
    popular = explanation_of([Contribution("a", None, False, None)], fallback="popularity", unknown=["a"])
    assert ["by popularity" in text for text in lines(popular)] == [False, True, False]


def test_the_page_shows_hostile_ids_as_text() -> None:
    entries = [Contribution(name, name, True, 0.5) for name in HOSTILE]
    count = len(HOSTILE)
    weights: list[list[float]] = np.tri(count).tolist()
    positions: list[int | None] = [*range(count)]
    layers = [Attention(name, positions, positions, [weights] * 2) for name in HOSTILE[:3]]
    explanation = explanation_of(entries, unknown=HOSTILE, attention=layers)
    text = html(msgspec.structs.replace(explanation, item=ScoredItem(HOSTILE[0], HOSTILE[1], 1.0)))
    page = Page(text)
    assert not {"script", "img", "a", "link", "iframe"} & set(page.tags)
    assert page.tags.count("style") == 1
    both = [name for name in HOSTILE for _ in range(2)]
    captions = [name for name in HOSTILE[:3] for _ in range(2)]
    assert page.written[1:] == HOSTILE + both + captions  # the heading, unknown items, each entry and its title, layers
    assert HOSTILE[0] in page.written[0] and HOSTILE[1] in page.written[0]
    assert page.tags.count("svg") == 6
    assert page.tags.count("rect") == 6 * (1 + count * (count + 1) // 2)
    assert page.titles[1] == "1 attends to 1: 1.0000"
    assert "default-src 'none'" in text and "http://" not in text and "https://" not in text


def test_the_page_has_a_bar_per_entry_and_a_dark_mode() -> None:
    entries = [
        Contribution("a", None, True, 2.0),
        Contribution("b", None, True, -1.0),
        Contribution("c", None, True, None),
    ]
    text = html(explanation_of(entries))
    assert '<span class="up" style="width:50.00%">' in text and '<span class="down" style="width:25.00%">' in text
    assert "older than the model's length" in text
    assert "prefers-color-scheme: dark" in text and "<svg" not in text
    assert "by popularity" in html(
        explanation_of([Contribution("a", None, False, None)], fallback="popularity", unknown=["a"])
    )


# --- the command line ---------------------------------------------------------------------------------------------


def test_the_command_explains(line: CommandLine, learned_run: Path) -> None:
    output = line.does("explain", learned_run, "--history", "i00,ghost,i01,i02").splitlines()
    assert output[0].startswith("Why i03: rank 1, with a score of ")
    assert output[1] == "Unknown items, left out: ghost"
    assert [row.split()[1] for row in output[4:8]] == ["i00", "ghost", "i01", "i02"]
    assert output[-1].startswith("  layer 1, head 1: ") and output[-1].count(" at ") == 3
    seen = ("explain", learned_run, "--history", "i00", "--item", "i00")
    assert line.does(*seen, "--no-keep-seen").startswith("Why i00: not allowed by these rules")
    assert line.does(*seen, "--keep-seen").startswith("Why i00: rank ")


def test_the_command_in_json(line: CommandLine, cycle_run: Path) -> None:
    answer = line.answers("explain", cycle_run, "--history", "i00,ghost,i01,i02", "--item", "i07")
    assert list(answer) == [
        "item",
        "rank",
        "contributions",
        "counts",
        "counts_score",
        "attention",
        "plan",
        "unknown",
        "fallback",
    ]
    assert (answer["plan"], answer["counts"], answer["counts_score"]) == ([], [], 0.0)
    assert answer["item"].keys() == {"id", "title", "score"} and answer["item"]["id"] == "i07"
    assert [(entry["item"], entry["known"], entry["title"]) for entry in answer["contributions"]] == [
        ("i00", True, None),
        ("ghost", False, None),
        ("i01", True, None),
        ("i02", True, None),
    ]
    assert [type(entry["contribution"]) for entry in answer["contributions"]] == [float, type(None), float, float]
    (layer,) = answer["attention"]
    assert (layer["name"], layer["rows"], layer["columns"]) == ("layer 1", [0, 2, 3], [0, 2, 3])
    assert np.array(layer["weights"]).shape == (1, 3, 3)
    assert (answer["unknown"], answer["fallback"]) == (["ghost"], None)
    same = msgspec.to_builtins(Recommender.open(cycle_run).explain(["i00", "ghost", "i01", "i02"], "i07"))
    assert same == answer
    popular = line.answers("explain", cycle_run, "--history", "ghost")
    assert popular["fallback"] == "popularity" and popular["attention"] == [] and popular["rank"] == 1


def test_the_command_writes_a_page(line: CommandLine, cycle_run: Path) -> None:
    history = 'i00,"<script>alert(1)</script>",i01'
    assert line.does("explain", cycle_run, "--history", history, "--html", "why.html").endswith("Wrote why.html.\n")
    page = Page((line.folder / "why.html").read_text(encoding="utf-8"))
    assert "script" not in page.tags and "<script>alert(1)</script>" in page.written
    assert page.tags.count("svg") == 1
    line.answers("explain", cycle_run, "--history", history, "--html", "why.html")  # one object, also with a page


def test_the_command_explains_a_user_of_the_log(line: CommandLine, cycle_run: Path, cycle_data: Path) -> None:
    answer = line.answers("explain", cycle_run, "--user", "u007", "--data", cycle_data, "--keep-seen")
    answers = line.answers("recommend", cycle_run, "--user", "u007", "--keep-seen", "-k", 1)
    assert answer["item"]["id"] == answers["items"][0]["id"]
    assert answer["item"]["score"] == pytest.approx(answers["items"][0]["score"], abs=1e-5)
    assert len(answer["contributions"]) == 14


def test_what_the_command_refuses(line: CommandLine, cycle_run: Path) -> None:
    arguments = ("explain", cycle_run, "--history", "i00,i01")
    line.refuses(*arguments, "--item", "ghost", says=("'ghost' is not one of the 12 items", "no score to explain"))
    line.refuses(*arguments, "--html", "no/where.html", says=("no/where.html could not be written",))
    everything = ",".join(f"i{number:02}" for number in range(12))
    line.refuses("explain", cycle_run, "--history", everything, "--no-keep-seen", says=("no item is left to answer",))
    line.refuses("explain", cycle_run, says=("exactly one of --history and --user",), code=2)
    line.refuses(*arguments, "--user", "u007", says=("exactly one of --history and --user",), code=2)
    line.refuses("explain", cycle_run, "--user", "nobody", says=("The user 'nobody' is not among the 60 users",))
