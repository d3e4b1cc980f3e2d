"""Answers without torch: the rules of an exported file against those of the run it was made from."""

from __future__ import annotations

import base64
import io
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from settings_tables import model_settings
from small_exports import assert_same_answers, exported, recommender_of

from segue.counts.counts import Counts
from segue.counts.features import ItemCounts
from segue.counts.neighbours import Neighbours, PairLimits
from segue.data.batch import newest
from segue.data.sequences import Sequences
from segue.errors import FolderError, InputError, SettingsError
from segue.models.build import build_model
from segue.models.items.tables import DataFacts as ContentFacts
from segue.models.sequence import SequenceModel
from segue.recommend.recommender import Recommender
from segue.slim import ITEM_COUNTS, METADATA, SlimRecommender
from segue.testing.cases import batch_of

IDS = ["a,b", "007", "7", "☕🫖", "x/y", " two  spaces ", "line\nbreak", *(f"i{number}" for number in range(8, 31))]
TITLES = [None if number % 5 == 0 else f"Title {number}" for number in range(30)]
COUNTS = [(number * 7) % 5 for number in range(30)]  # every fifth item is unseen in training, and many counts tie


def small_model(*, categories: np.ndarray | None = None) -> SequenceModel:
    shape = model_settings(
        kind="sasrec",
        width=8,
        depth=1,
        heads=2,
        length=12,
        dropout=0.0,
        feed_forward=2,
        positions="oldest",
        **({} if categories is None else {"items": "categories", "items__column": "genre"}),
    )
    return build_model(shape, 30, generator=torch.Generator().manual_seed(3), facts=ContentFacts(categories=categories))


Pair = tuple[Recommender, SlimRecommender]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the exported file."""
    return tmp_path_factory.mktemp("slim")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    """A run and its exported file."""
    run = recommender_of(small_model(), counts=COUNTS, ids=IDS, titles=TITLES)
    return run, exported(run, folder)


@pytest.fixture
def graph(pair: Pair, folder: Path) -> onnx.ModelProto:  # noqa: ARG001  # it made the file
    """The graph in the exported file."""
    return onnx.load_model(folder / "model.onnx")


COUNTED = 25
"""Items that the counts have; the last five were added after them."""
WEIGHTS = {
    "after-1": 1.5,
    "after-2": 0.7,
    "after-3": 0.3,
    "together": 4.0,
    "repeated": 0.4,
    "gap": -0.3,
    "newest": 0.25,
}


def random_counts() -> Counts:
    """The counts of forty random histories, with pairs that one user alone has."""
    rng = np.random.default_rng(5)
    log = Sequences(np.arange(0, 401, 10), rng.integers(1, COUNTED + 1, 400).astype(np.int32), np.zeros(400, np.int64))
    pairs = ItemCounts.of(log, log.offsets[1:], COUNTED, PairLimits(least_users=1, most=200))
    return Counts(pairs, tuple(WEIGHTS.values()))


class Counted(NamedTuple):
    """A run with item-to-item counts, what was exported of it, and the file."""

    run: Recommender
    slim: SlimRecommender
    file: Path


@pytest.fixture(scope="module", params=["excluded", "kept"])
def counted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """Runs that exclude seen items and that keep them."""
    folder, item_counts = tmp_path_factory.mktemp("counted"), random_counts()
    run = recommender_of(
        small_model(), counts=COUNTS, ids=IDS, titles=TITLES, item_counts=item_counts, seen=request.param
    )
    return Counted(run, exported(run, folder), folder / "model.onnx")


some_ids = st.lists(st.sampled_from([*IDS, "nobody", "never"]), max_size=30)
maybe_ids = st.none() | some_ids


rules = given(some_ids, st.integers(1, 40), maybe_ids, maybe_ids, st.sampled_from([None, True, False]))
Ids = list[str]


@settings(max_examples=60)
@rules
def test_the_rules_are_those_of_the_run(
    pair: Pair, history: Ids, k: int, exclude: Ids | None, only: Ids | None, keep_seen: bool | None
) -> None:
    run, slim = pair
    limits: dict[str, Any] = {"exclude": exclude, "only": only, "keep_seen": keep_seen}
    assert_same_answers([slim.recommend(history, k, **limits)], [run.recommend(history, k, **limits)])


@rules
def test_the_rules_are_those_of_a_run_with_counts(
    counted: Counted, history: Ids, k: int, exclude: Ids | None, only: Ids | None, keep_seen: bool | None
) -> None:
    run, slim, _ = counted
    limits: dict[str, Any] = {"exclude": exclude, "only": only, "keep_seen": keep_seen}
    assert_same_answers([slim.recommend(history, k, **limits)], [run.recommend(history, k, **limits)])


def random_histories() -> list[list[str]]:
    """Histories of length 0 to 59, of items of which some are unknown."""
    rng = np.random.default_rng(0)
    return [rng.choice([*IDS, "nobody"], length).tolist() for length in rng.integers(0, 60, 150)]


def test_many_histories_of_any_length_together(pair: Pair) -> None:
    run, slim = pair
    assert_same_answers(slim.recommend_many(random_histories()), run.recommend_many(random_histories()))


def test_many_histories_of_any_length_together_with_counts(counted: Counted, pair: Pair) -> None:
    run, slim, _ = counted
    answers = slim.recommend_many(random_histories())
    assert_same_answers(answers, run.recommend_many(random_histories()))
    alone = pair[1].recommend_many(random_histories(), keep_seen=run.seen == "kept")
    assert sum(answer.ids != other.ids for answer, other in zip(answers, alone, strict=True)) > 100


def metadata(file: Path) -> dict[str, str]:
    """The metadata of an exported file."""
    return {one.key: one.value for one in onnx.load_model(file).metadata_props}


def documented_sum(entry: Mapping[str, Any], history: Sequence[int], item: int) -> float:
    """What docs/onnx.md says is added to the score of an item after a history."""
    arrays, back, recent = np.load(io.BytesIO(base64.b64decode(entry["arrays"]))), history[::-1], history[:-51:-1]

    def count(matrix: str, of: int) -> int:
        offsets = arrays[f"{matrix}.offsets"]
        if of + 1 >= len(offsets):
            return 0
        own = slice(offsets[of], offsets[of + 1])
        pairs = dict(zip(arrays[f"{matrix}.items"][own], arrays[f"{matrix}.counts"][own], strict=True))
        return int(pairs.get(item, 0))

    values = {f"after-{lag}": math.log(1 + count(f"after-{lag}", one)) for lag, one in enumerate(back[:3], start=1)}
    values["together"] = sum(
        0.8**age * both / math.sqrt(arrays["users"][one] * arrays["users"][item])
        for age, one in enumerate(back[:10])
        if (both := count("together", one))
    )
    if item in recent:
        values["repeated"] = math.log(1 + recent.count(item))
        values["gap"] = math.log(51 / (1 + recent.index(item)))
        values["newest"] = float(history[-1] == item)
    return math.fsum(entry["weights"][name] * value for name, value in values.items())


@pytest.mark.parametrize("length", [1, 2, 9, 40, 70])
def test_the_scores_are_those_of_the_graph_and_the_documented_sum(counted: Counted, length: int) -> None:
    """As another reader would compute them, from the file alone."""
    entry, slim = json.loads(metadata(counted.file)[ITEM_COUNTS]), counted.slim
    known = [item for item, count in enumerate(COUNTS, start=1) if count]
    history = np.random.default_rng(length).choice(known, length).tolist()
    _, scores = slim.run(newest(batch_of(history), slim.facts.length, slim.facts.window_step))
    added = {IDS[item - 1]: documented_sum(entry, history, item) for item in known}
    expected = {IDS[item - 1]: float(scores[0, item]) + added[IDS[item - 1]] for item in known}
    answer = slim.recommend([IDS[item - 1] for item in history], k=30, keep_seen=True)
    assert {item.id: item.score for item in answer.items} == pytest.approx(expected, abs=1e-4)
    assert np.count_nonzero([*added.values()]) > 5 and entry["weights"] == WEIGHTS


def test_a_weight_times_a_logarithm_is_added(pair: Pair, tmp_path: Path) -> None:
    """i9 came after i8 twice, i10 before it five times: 2 · ln 3 for i9, and nothing for i10."""
    offsets, none = np.zeros(32, dtype=np.int64), Neighbours(np.zeros(32, np.int64), *np.zeros((2, 0), np.int32))
    offsets[9:11], offsets[11:] = 1, 2  # of item 8, of item 10
    after = Neighbours(offsets, np.array([9, 8], np.int32), np.array([2, 5], np.int32))
    counts = Counts(ItemCounts((after, none, none), none, np.ones(31, np.int64)), (2.0, 0, 0, 0, 0, 0, 0))
    slim = exported(recommender_of(small_model(), counts=COUNTS, ids=IDS, item_counts=counts), tmp_path)
    scores, alone = ({item.id: item.score for item in one.recommend(["i8"], k=30).items} for one in (slim, pair[1]))
    differences = {name: score - alone[name] for name, score in scores.items()}
    assert differences == pytest.approx({name: 2.197225 if name == "i9" else 0 for name in alone}, abs=1e-5)


@pytest.mark.parametrize("history", [[], ["nobody"], [IDS[0]]], ids=["empty", "unknown", "never trained on"])
def test_unknown_histories_are_answered_by_popularity(pair: Pair, history: list[str]) -> None:
    answer = pair[1].recommend(history, k=7)
    assert (answer.fallback, answer.unknown) == ("popularity", history)
    assert [item.score for item in answer.items] == [4.0] * 6 + [3.0]
    assert answer.ids == [IDS[number] for number in (2, 7, 12, 17, 22, 27, 4)]  # counts tie by number


def test_an_answer_has_the_json_fields_of_the_run(pair: Pair) -> None:
    answer = json.loads(msgspec.json.encode(pair[1].recommend([IDS[1], "nobody"], k=1)))
    assert answer.keys() == {"items", "unknown", "fallback"} and answer["unknown"] == ["nobody"]
    assert answer["items"][0].keys() == {"id", "title", "score"}


def test_items_that_share_a_vector_tie_by_number(tmp_path: Path) -> None:
    categories = np.array([0, *(number % 4 + 1 for number in range(30))])
    run = recommender_of(small_model(categories=categories), counts=COUNTS)
    slim = exported(run, tmp_path)
    for history in (["i2"], ["i2", "i3", "i9"], ["i13"] * 40):
        answer = slim.recommend(history, k=25)
        assert len({item.score for item in answer.items}) <= 4
        assert_same_answers([answer], [run.recommend(history, k=25)])


def test_items_with_equal_vectors_and_equal_counts_tie_by_number(tmp_path: Path) -> None:
    """The items 5, 9, 13, 17 and 25 share a vector; three of them came after item 2 three times."""
    offsets, none = np.zeros(32, dtype=np.int64), Neighbours(np.zeros(32, np.int64), *np.zeros((2, 0), np.int32))
    offsets[3:] = 3
    after = Neighbours(offsets, np.array([9, 13, 17], np.int32), np.array([3, 3, 3], np.int32))
    item_counts = Counts(ItemCounts((after, none, none), none, np.ones(31, np.int64)), (9.0, 0, 0, 0, 0, 0, 0))
    categories = np.array([0, *(number % 4 + 1 for number in range(30))])
    run = recommender_of(small_model(categories=categories), counts=COUNTS, item_counts=item_counts)
    answer = exported(run, tmp_path).recommend(["i2"], k=25)
    assert_same_answers([answer], [run.recommend(["i2"], k=25)])
    scores = {item.id: item.score for item in answer.items}
    assert answer.ids[:3] == ["i9", "i13", "i17"] and len({scores[name] for name in answer.ids[:3]}) == 1
    assert scores["i9"] - scores["i5"] == pytest.approx(12.476649, abs=1e-4) and scores["i5"] == scores["i25"]


def test_without_a_request_time_it_is_the_time_of_the_newest_event(tmp_path: Path) -> None:
    settings = model_settings(kind="hstu", width=8, depth=1, length=12, dropout=0.0, target_time=True)
    model = build_model(settings, 30, generator=torch.Generator().manual_seed(3))
    for weight in model.parameters():
        torch.nn.init.normal_(weight.data, generator=torch.Generator().manual_seed(4))  # biases by time begin at zero
    run = recommender_of(model)
    slim = exported(run, tmp_path)
    times = [1e9 + 1000.0**number for number in (1, 2, 3)]
    history = [{"item": f"i{number}", "time": time} for number, time in enumerate(times, start=1)]
    assert_same_answers([slim.recommend(history)], [run.recommend(history)])
    assert_same_answers([slim.recommend(history)], [run.recommend(history, now=times[-1])])


@pytest.mark.parametrize("items", ["vectors", "ids+vectors"])
def test_items_known_by_content_alone_are_recommended_and_encoded(tmp_path: Path, items: str) -> None:
    """Of thirty items the last ten are unseen in training; i30 has no content either."""
    content = np.random.default_rng(0).normal(size=(31, 5)).astype(np.float32)
    content[[0, 30]] = 0
    settings = model_settings(kind="sasrec", width=8, depth=1, length=8, items=items, items__vectors="v")
    facts = ContentFacts(content=content)
    model = build_model(settings, 30, generator=torch.Generator().manual_seed(3), facts=facts)
    run = recommender_of(model, counts=[2] * 20 + [0] * 10)
    slim = exported(run, tmp_path)
    for history in (["i2"], ["i25", "i2", "i30"], ["i29"] * 9, ["i30"]):
        answer = slim.recommend(history, k=30)
        assert_same_answers([answer], [run.recommend(history, k=30)])
        assert "i30" not in answer.ids and answer.unknown == [one for one in history if one == "i30"]
        assert {"i21", "i26"} <= {*answer.ids} or answer.fallback == "popularity"
    assert run.recommend(["i29"]).fallback is None
    assert "i25" in run.similar("i22", k=28).ids and run.knows("i22") and not run.knows("i30")


@pytest.mark.parametrize(
    ("history", "k", "sentence"),
    [("i8", 10, "must be a list of item ids"), (["i8"], 0, "at least 1"), ([1.5], 10, "a text or a whole number")],
)
def test_both_refuse_the_same_queries(pair: Pair, history: Any, k: int, sentence: str) -> None:
    for model in pair:
        with pytest.raises(InputError, match=sentence):
            model.recommend(history, k)


BLOCKED = """
import sys
for name in ("torch", "polars", "pyarrow", "pandas", "narwhals", "onnx", "safetensors", "litestar", "rich", "typer"):
    sys.modules[name] = None  # importing it is an error
import msgspec
from segue.slim import SlimRecommender
answer = SlimRecommender.open(sys.argv[1], threads=1).recommend(["i8", "7", "nobody"], k=5)
print(msgspec.json.encode(answer).decode())
"""


def test_only_numpy_msgspec_and_onnxruntime_are_imported(counted: Counted) -> None:
    process = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(counted.file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    expected = counted.run.recommend(["i8", "7", "nobody"], k=5)
    assert [item["id"] for item in json.loads(process.stdout)["items"]] == expected.ids


def test_a_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="is no file"):
        SlimRecommender.open(tmp_path / "missing.onnx")
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(FolderError, match="cannot be read as a model"):
        SlimRecommender.open(tmp_path / "text.onnx")


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (None, "not of `segue export`"),
        ('{"format": 99}', "has export format 99, this segue reads format 3"),
        ('{"format": 3}', "is damaged"),
        ('{"format": 2}', "has export format 2, this segue reads format 3"),
        ("[", "is damaged"),
    ],
)
def test_a_model_with_other_metadata_is_refused(
    graph: onnx.ModelProto, tmp_path: Path, facts: str | None, sentence: str
) -> None:
    onnx.helper.set_model_props(graph, {} if facts is None else {METADATA: facts})
    onnx.save_model(graph, tmp_path / "other.onnx")
    with pytest.raises(FolderError, match=sentence):
        SlimRecommender.open(tmp_path / "other.onnx")


def altered(entry: str, **changed: Any) -> str:
    """An entry of counts with other arrays, None to leave one out."""
    fields = json.loads(entry)
    arrays = dict(np.load(io.BytesIO(base64.b64decode(fields["arrays"])))) | changed
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{name: array for name, array in arrays.items() if array is not None})
    return json.dumps(fields | {"arrays": base64.b64encode(file.getvalue()).decode()})


DAMAGES: dict[str, Callable[[str], str]] = {
    "no JSON": lambda entry: entry[:-1],
    "no base64": lambda entry: entry.replace('"arrays":"', '"arrays":"?'),
    "an empty archive": lambda entry: json.dumps(json.loads(entry) | {"arrays": ""}),
    "a truncated archive": lambda entry: json.dumps(json.loads(entry) | {"arrays": json.loads(entry)["arrays"][:4000]}),
    "another weight": lambda entry: entry.replace('"gap"', '"gaps"'),
    "a missing array": lambda entry: altered(entry, users=None),
    "other lengths": lambda entry: altered(entry, users=np.ones(7, np.int64)),
    "an item beyond the others": lambda entry: altered(entry, **{"together.items": np.array([99], np.int32)}),
    "pickled objects": lambda entry: json.dumps(
        json.loads(entry) | {"arrays": base64.b64encode(b"\x80\x04N.").decode()}
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_counts_are_refused_in_one_sentence(
    counted: Counted, tmp_path: Path, damage: Callable[[str], str]
) -> None:
    entries, graph = metadata(counted.file), onnx.load_model(counted.file)
    onnx.helper.set_model_props(graph, entries | {ITEM_COUNTS: damage(entries[ITEM_COUNTS])})
    onnx.save_model(graph, tmp_path / "damaged.onnx")
    with pytest.raises(FolderError) as error:
        SlimRecommender.open(tmp_path / "damaged.onnx")
    assert "is damaged: its item-to-item counts cannot be read (" in str(error.value)
    assert str(error.value).endswith("; export it again.") and "\n" not in str(error.value)


def test_counts_of_more_items_than_the_catalogue_are_refused(counted: Counted, tmp_path: Path) -> None:
    entries, graph = metadata(counted.file), onnx.load_model(counted.file)
    facts = json.loads(entries[METADATA])
    fewer = {name: facts[name][:20] for name in ("ids", "titles", "counts")}
    onnx.helper.set_model_props(graph, entries | {METADATA: json.dumps(facts | fewer)})
    onnx.save_model(graph, tmp_path / "smaller.onnx")
    with pytest.raises(FolderError, match="more items than the catalogue"):
        SlimRecommender.open(tmp_path / "smaller.onnx")


def test_a_score_that_is_not_finite_is_an_error(graph: onnx.ModelProto, tmp_path: Path) -> None:
    for tensor in graph.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.full(tensor.dims, np.nan, dtype=np.float32), tensor.name))
    onnx.save_model(graph, tmp_path / "damaged.onnx")
    with pytest.raises(FolderError, match="not a finite number"):
        SlimRecommender.open(tmp_path / "damaged.onnx").recommend(["i8"])


def test_a_missing_onnxruntime_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(SettingsError, match=r"segue\[onnx\]"):
        SlimRecommender.open(tmp_path / "model.onnx")
