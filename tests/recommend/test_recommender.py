"""Recommendations by id, with a model of known scores and with a real one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import polars as pl
import pytest
import torch
from settings_tables import model_settings
from torch import Tensor, nn

from segue.data.vocabulary import Vocabulary
from segue.errors import FolderError, InputError
from segue.folders import write_manifest
from segue.index.exact import ExactIndex
from segue.layers.packed import PackedBatch
from segue.models.build import build_model
from segue.models.checkpoint import save_model
from segue.models.sequence import SequenceModel
from segue.recommend import query as query_module
from segue.recommend.history import Entry
from segue.recommend.recommender import Recommender, Seen

HOSTILE = ["a,b", 'say "hi"', "x/y/../z", " two  spaces ", "☕🫖", "007", "7", "line\nbreak", "%2F", "'; DROP TABLE"]


def vocabulary(ids: list[str], counts: list[int] | None = None, titles: list[str | None] | None = None) -> Vocabulary:
    columns: dict[str, Any] = {"id": ids, "count": counts or [1] * len(ids)}
    return Vocabulary(pl.DataFrame(columns if titles is None else columns | {"title": titles}))


class Cycle(nn.Module):
    """The next items after number n are n + 1, n + 2, …, cyclically; n itself comes last.

    Scores are exact: item vectors are the rows of a table of -distance, and a query is one-hot on a column of it.
    """

    window_step = 1
    timed, input_kinds = False, ()

    def __init__(self, n_items: int, length: int = 3) -> None:
        super().__init__()
        self.length = length
        self.n_items = n_items
        self.windows: list[list[int]] = []  # the items of each query

    def answerable(self, counts: np.ndarray) -> np.ndarray:
        return counts > 0

    def query(self, batch: PackedBatch) -> Tensor:
        ends = batch.lengths.cumsum(0).tolist()
        items = batch.items.tolist()
        self.windows += [items[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        return torch.nn.functional.one_hot(batch.items[batch.last], self.n_items + 1).float()

    def item_vectors(self) -> Tensor:
        numbers = torch.arange(self.n_items + 1)
        distance = (numbers[:, None] - numbers[None, :] - 1) % self.n_items  # [item, newest item]
        return -distance.float()

    item_features = item_vectors


def cyclic(ids: list[str], *, counts: list[int] | None = None, seen: Seen = "excluded", length: int = 3) -> Recommender:
    model = Cycle(len(ids), length)
    table = vocabulary(ids, counts)
    candidates = np.array([0, *table.table["count"].to_list()]) > 0
    return Recommender(
        cast(SequenceModel, model), ExactIndex.build(model.item_vectors(), candidates=candidates), table, seen=seen
    )


def windows_of(recommender: Recommender) -> list[list[int]]:
    """The windows of items that the model encoded."""
    return cast(Cycle, recommender.model).windows


LETTERS = list("abcdef")


def test_the_next_items_by_hand() -> None:
    answer = cyclic(LETTERS).recommend(["b"], k=3)
    assert answer.ids == ["c", "d", "e"]
    assert [item.score for item in answer.items] == [0.0, -1.0, -2.0]
    assert (answer.unknown, answer.fallback) == ([], None)


def test_json_shape() -> None:
    model = Cycle(2)
    table = vocabulary(["a", "b"], titles=["Ay", None])
    recommender = Recommender(cast(SequenceModel, model), ExactIndex.build(model.item_vectors()), table, seen="kept")
    assert msgspec.json.decode(msgspec.json.encode(recommender.recommend(["a", "zzz"], k=2))) == {
        "items": [{"id": "b", "title": None, "score": 0.0}, {"id": "a", "title": "Ay", "score": -1.0}],
        "unknown": ["zzz"],
        "fallback": None,
    }


def test_unknown_ids_are_named_once_and_skipped() -> None:
    recommender = cyclic(LETTERS)
    answer = recommender.recommend(["zzz", "a", "q", "b", "zzz"], k=2)
    assert answer.unknown == ["zzz", "q"]
    assert answer.ids == ["c", "d"]
    assert windows_of(recommender) == [[1, 2]]


@pytest.mark.parametrize("history", [[], ["zzz"], ["zzz", "zzz", "q"]])
def test_without_a_known_item_the_answer_is_by_popularity(history: list[str]) -> None:
    answer = cyclic(LETTERS, counts=[3, 9, 1, 9, 0, 2]).recommend(history, k=10)
    assert answer.fallback == "popularity"
    assert answer.ids == ["b", "d", "a", "f", "c"]  # e is cold; b and d tie by number
    assert [item.score for item in answer.items] == [9, 9, 3, 2, 1]
    assert answer.unknown == list(dict.fromkeys(history))


def test_popularity_obeys_exclude_and_only() -> None:
    recommender = cyclic(LETTERS, counts=[3, 9, 1, 9, 0, 2])
    assert recommender.recommend([], exclude=["b", "nobody"]).ids == ["d", "a", "f", "c"]
    assert recommender.recommend([], k=2, exclude=["b"]).ids == ["d", "a"], "as many as there are"
    assert recommender.recommend([], only=["c", "a", "e"]).ids == ["a", "c"]
    assert recommender.recommend([], only=["nobody"]).ids == []


def test_cold_items_are_unknown_and_not_recommended() -> None:
    recommender = cyclic(LETTERS, counts=[1, 1, 0, 1, 1, 1], seen="kept")
    answer = recommender.recommend(["b", "c"], k=10)
    assert answer.unknown == ["c"]
    assert answer.ids == ["d", "e", "f", "a", "b"]


def test_seen_items_of_the_whole_history_are_removed_or_kept() -> None:
    long = ["e", "a", "b", "c"]  # the model sees only a, b, c
    assert cyclic(LETTERS).recommend(long, k=6).ids == ["d", "f"]
    assert cyclic(LETTERS).recommend(long, k=6, keep_seen=True).ids == ["d", "e", "f", "a", "b", "c"]
    repeating = cyclic(LETTERS, seen="kept")
    assert repeating.recommend(long, k=2).ids == ["d", "e"]
    assert repeating.recommend(long, k=2, keep_seen=False).ids == ["d", "f"]
    assert windows_of(repeating) == [[1, 2, 3]] * 2


def test_seen_filter_on_repeats_only_data() -> None:
    """A model that scores the history highest: recall 0 with the filter, 1 without."""

    class Repeater(Cycle):
        def item_vectors(self) -> Tensor:
            return torch.eye(self.n_items + 1)  # the newest item itself scores 1, everything else 0

    model = Repeater(4)
    recommender = Recommender(
        cast(SequenceModel, model), ExactIndex.build(model.item_vectors()), vocabulary(list("abcd"))
    )
    histories, targets = [["a", "a"], ["b", "b"], ["c"]], ["a", "b", "c"]
    for keep, recall in ((False, 0.0), (True, 1.0)):
        answers = recommender.recommend_many(histories, k=1, keep_seen=keep)
        assert np.mean([target in answer.ids for target, answer in zip(targets, answers, strict=True)]) == recall


def test_exclude_and_only() -> None:
    recommender = cyclic(LETTERS)
    assert recommender.recommend(["a"], k=2, exclude=["b", "d", "nobody"]).ids == ["c", "e"]
    assert recommender.recommend(["a"], k=9, only=["f", "c", "a", "nobody"]).ids == ["c", "f"]  # a was seen
    assert recommender.recommend(["a"], k=9, only=["f", "c"], exclude=["c"]).ids == ["f"]
    assert recommender.recommend(["a"], k=9, only=["nobody"]).ids == []
    assert recommender.recommend(["a"], k=2, exclude=["b"], keep_seen=True).ids == ["c", "d"]


def test_k_larger_than_the_catalogue_and_everything_seen() -> None:
    assert cyclic(LETTERS).recommend(["a"], k=1000).ids == list("bcdef")
    assert cyclic(LETTERS).recommend(LETTERS, k=3).ids == []


@pytest.mark.parametrize("k", [0, -1, 2.5, True, "10"])
def test_k_must_be_a_number_of_at_least_one(k: Any) -> None:
    with pytest.raises(InputError, match="at least 1"):
        cyclic(LETTERS).recommend(["a"], k=k)
    with pytest.raises(InputError, match="at least 1"):
        cyclic(LETTERS).similar("a", k=k)


def test_hostile_ids_are_returned_unchanged() -> None:
    recommender = cyclic(sorted(HOSTILE, key=str.encode))
    order = sorted(HOSTILE, key=str.encode)
    for position, name in enumerate(order):
        expected = order[position + 1 :] + order[:position]
        assert recommender.recommend([name], k=20).ids == expected
    answer = recommender.recommend(["07", "7 ", "☕", *HOSTILE[:1]])
    assert answer.unknown == ["07", "7 ", "☕"]


def test_whole_numbers_become_text_ids() -> None:
    recommender = cyclic(["007", "42", "7"])
    assert recommender.recommend([7, np.int64(42)], k=1).ids == ["007"]
    assert recommender.recommend([{"item": 42}], exclude=[7]).ids == ["007"]


@pytest.mark.parametrize("bad", [1.5, True, None, b"a", ["a"]])
def test_other_ids_are_refused(bad: Any) -> None:
    with pytest.raises(InputError, match="An item id is a text or a whole number, got"):
        cyclic(LETTERS).recommend([bad])


@pytest.mark.parametrize("bad", ["abc", b"abc", {"item": "a"}, 5, None])
def test_a_single_value_instead_of_a_list_is_refused(bad: Any) -> None:
    recommender = cyclic(LETTERS)
    with pytest.raises(InputError, match="A history must be a list of item ids"):
        recommender.recommend(bad)
    with pytest.raises(InputError, match="The histories must be a list"):
        recommender.recommend_many(bad)
    with pytest.raises(InputError, match="A history must be a list of item ids, got 'a'"):
        recommender.recommend_many(["a", "b"])
    for name in ("exclude", "only") if bad is not None else ():
        with pytest.raises(InputError, match=f"{name} must be a list of item ids"):
            recommender.recommend(["a"], **{name: bad})


def test_a_set_has_no_order() -> None:
    recommender = cyclic(LETTERS)
    with pytest.raises(InputError, match="a set has no order"):
        recommender.recommend({"a", "b"})
    assert recommender.recommend(["a"], k=1, exclude={"b"}).ids == ["c"]


def test_entries_are_sorted_by_time_when_all_have_one() -> None:
    recommender = cyclic(LETTERS)
    entries = [
        {"item": "c", "time": "2026-01-03T00:00:00Z"},
        {"item": "a", "time": datetime(2026, 1, 1, tzinfo=UTC)},
        Entry(item="b", time=1767312000),  # 2026-01-02
    ]
    assert recommender.recommend(entries, k=1).ids == ["d"]
    assert recommender.recommend([*entries[:2], "b"], k=1, keep_seen=True).ids == ["c"]  # one without time
    ties = [{"item": "b", "time": 5}, {"item": "c", "time": 5}, {"item": "a", "time": 1}]
    assert recommender.recommend(ties, k=1).ids == ["d"]
    assert windows_of(recommender) == [[1, 2, 3], [3, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"time": 5}, "of which item is needed"),
        ({"item": "a", "when": 5}, "A history's entry has item, time, kind, value"),
        ({"item": "a", "time": "yesterday"}, "got 'yesterday'"),
        ({"item": "a", "time": 1_700_000_000_000}, "divide milliseconds by 1000"),
        ({"item": "a", "time": float("nan")}, "no date in seconds"),
        ({"item": "a", "time": ["2026"]}, "A time is seconds since 1970 or a date, got"),
        ({"item": "a", "kind": 5}, "kind of an event is a text"),
        ({"item": "a", "value": "much"}, "value of an event is a number"),
    ],
)
def test_bad_entries_are_refused_with_a_sentence(entry: dict[str, Any], sentence: str) -> None:
    for history in ([entry], [entry, "b"]):
        with pytest.raises(InputError, match=sentence):
            cyclic(LETTERS).recommend(history)


def test_recommend_is_recommend_many_for_one(tiny: Recommender) -> None:
    history = ["i3", "nobody", "i7"]
    assert tiny.recommend_many([history], k=4, exclude=["i1"]) == [tiny.recommend(history, k=4, exclude=["i1"])]
    assert tiny.recommend_many([], k=4) == []


@pytest.fixture(name="tiny")
def tiny_real_model() -> Recommender:
    settings = model_settings(width=8, depth=1, length=5)
    model = build_model(settings, 30, generator=torch.Generator().manual_seed(3))
    ids = sorted(f"i{number}" for number in range(30))
    return Recommender(model, ExactIndex.build(model.item_vectors()), vocabulary(ids))


def test_batch_independence(tiny: Recommender, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to a history does not depend on the other histories of a request, nor on the batches."""
    monkeypatch.setattr(query_module, "TOKENS", 12)
    monkeypatch.setattr(query_module, "MOST_ROWS", 3)
    rng = np.random.default_rng(5)
    histories = [[f"i{number}" for number in rng.integers(0, 33, size)] for size in (0, 1, 12, 3, 0, 5, 1, 2, 9, 4)]
    together = tiny.recommend_many(histories, k=8, exclude=["i4"])
    for history, answer in zip(histories, together, strict=True):
        alone = tiny.recommend(history, k=8, exclude=["i4"])
        assert (alone.ids, alone.unknown, alone.fallback) == (answer.ids, answer.unknown, answer.fallback)
        assert [item.score for item in alone.items] == pytest.approx([item.score for item in answer.items], abs=1e-5)
        assert not {"i4", *history} & set(answer.ids)


def test_answers_are_those_of_the_model(tiny: Recommender) -> None:
    """Equal to scoring all items with the model and sorting."""
    numbers = tiny.vocabulary.numbers(["i3", "i7", "i3"], unknown="error")
    batch = PackedBatch(torch.from_numpy(numbers), torch.zeros(3, dtype=torch.int64), torch.tensor([3]))
    scores = tiny.model.score_all(tiny.model.query(batch))[0].detach()
    scores[[0, *numbers]] = -torch.inf
    expected = scores.argsort(descending=True)[:6]
    answer = tiny.recommend(["i3", "i7", "i3"], k=6)
    assert answer.ids == tiny.vocabulary.ids(expected.numpy())
    assert [item.score for item in answer.items] == pytest.approx(scores[expected].tolist(), abs=1e-5)


def test_similar_by_hand() -> None:
    class Plane(nn.Module):
        length = 5
        window_step = 1
        timed, input_kinds = False, ()

        def answerable(self, counts: np.ndarray) -> np.ndarray:
            return counts > 0

        def query(self, batch: PackedBatch) -> Tensor:
            raise AssertionError(f"similar must not query the model, got {batch}")

        def item_vectors(self) -> Tensor:
            raise AssertionError("similarity is of item features, without biases")

        def item_features(self) -> Tensor:  # lengths differ, directions matter
            return torch.tensor([[0.0, 0.0], [2.0, 0.0], [30.0, 30.0], [0.0, 1.0], [5.0, 0.0], [-1.0, 0.0]])

    model = Plane()
    table = vocabulary(list("abcde"), counts=[1, 1, 1, 1, 1])
    recommender = Recommender(cast(SequenceModel, model), ExactIndex.build(model.item_features()), table)
    answer = recommender.similar("a", k=10)
    assert answer.ids == ["d", "b", "c", "e"]
    assert [item.score for item in answer.items] == pytest.approx([1.0, 0.5**0.5, 0.0, -1.0], abs=1e-6)


def test_similar_refuses_unknown_items_by_name() -> None:
    recommender = cyclic(LETTERS, counts=[1, 1, 0, 1, 1, 1])
    with pytest.raises(InputError, match="The item 'nobody' is not one of the 6 items"):
        recommender.similar("nobody")
    with pytest.raises(InputError, match="The item 'c' was never trained on"):
        recommender.similar("c")
    assert "c" not in recommender.similar("b").ids


def run_folder(folder: Path) -> Path:
    """A small run folder in the form that `train` writes."""
    settings = model_settings(width=8, depth=1, length=5)
    model = build_model(settings, len(HOSTILE), generator=torch.Generator().manual_seed(3))
    folder.mkdir()
    save_model(model, settings, folder)
    vocabulary(sorted(HOSTILE, key=str.encode)).table.write_parquet(folder / "items.parquet")
    ExactIndex.build(model.item_vectors()).save(folder / "index.safetensors")
    write_manifest(folder, "run", {"seen": "kept", "n_items": len(HOSTILE)})
    return folder


def test_open_and_save_answer_the_same(tmp_path: Path) -> None:
    original = Recommender.open(run_folder(tmp_path / "run"))
    assert original.seen == "kept"
    original.save(tmp_path / "copy")
    copy = Recommender.open(tmp_path / "copy")
    assert copy.recommend_many([[name] for name in HOSTILE]) == original.recommend_many([[name] for name in HOSTILE])
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    assert names == {path.name for path in (tmp_path / "run").iterdir()}
    with pytest.raises(FolderError, match="exists already"):
        original.save(tmp_path / "copy")


def test_files_of_different_sizes_are_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    vocabulary(["just one"]).table.write_parquet(folder / "items.parquet")
    write_manifest(folder, "run", {"seen": "kept"})
    with pytest.raises(FolderError, match="differ in size"):
        Recommender.open(folder)


@pytest.mark.parametrize("name", ["weights.safetensors", "index.safetensors", "items.parquet", "settings.toml"])
def test_a_damaged_or_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = run_folder(tmp_path / "run")
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(FolderError, match=f"{name} is damaged"):
        Recommender.open(folder)
    (folder / name).unlink()
    with pytest.raises(FolderError, match=f"{name} is missing"):
        Recommender.open(folder)
    write_manifest(folder, "run", {"seen": "kept"})
    with pytest.raises(FolderError, match=f"it has no {name}"):
        Recommender.open(folder)


def test_without_a_folder_there_is_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="nothing to copy"):
        cyclic(LETTERS).save(tmp_path / "copy")
