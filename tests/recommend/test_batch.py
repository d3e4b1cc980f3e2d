"""Recommendations of a file of users as Parquet, and the history of one user."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn

from segue.counts.counts import Counts
from segue.counts.features import ItemCounts
from segue.counts.neighbours import Neighbours
from segue.data.dataset import Data
from segue.data.vocabulary import Vocabulary
from segue.errors import FolderError, InputError
from segue.folders import write_manifest
from segue.index.exact import ExactIndex
from segue.layers.packed import PackedBatch
from segue.models.sequence import SequenceModel
from segue.recommend.jobs import batch as batch_module
from segue.recommend.jobs import runner, users_file
from segue.recommend.jobs.batch import recommend_users, user_history
from segue.recommend.recommender import Recommender

DAY = 86_400_000_000
NEW_YEAR = 1_767_225_600_000_000  # 2026-01-01 in microseconds
ITEMS = list("abcdef")
LOG = {"007": "abc", "7": "d", 'who "is", she': "ef", "☕": "cb"}  # users in byte order; one item per day
KNOWN_TIME: dict[str, Any] = {"form": "iso", "description": "ISO 8601"}


def data_folder(folder: Path, *, time: dict[str, Any] | None = None, items: list[str] = ITEMS) -> Data:
    """A data folder with LOG, as `prepare` writes it."""
    folder.mkdir()
    events = [
        (items.index(item) + 1, NEW_YEAR + day * DAY) for history in LOG.values() for day, item in enumerate(history)
    ]
    time = KNOWN_TIME if time is None else time
    np.save(folder / "offsets.npy", np.cumsum([0, *map(len, LOG.values())]))
    np.save(folder / "items.npy", np.array([item for item, _ in events], dtype=np.int32))
    np.save(folder / "times.npy", np.array([time_of_event for _, time_of_event in events]))
    np.save(folder / "values.npy", np.array([np.nan, 2.5] * (len(events) // 2), dtype=np.float32))
    pl.DataFrame({"id": items, "count": 1}).write_parquet(folder / "items.parquet")
    pl.DataFrame({"id": list(LOG)}).write_parquet(folder / "users.parquet")
    body = {"split": {"kind": "last"}, "kinds": [], "has_time": time["form"] not in ("row order", "order")}
    settings = {"columns": {"user": "Customer No.", "item": "what", "time": "at"}, "time": time}
    write_manifest(folder, "data", {**body, "log": settings, "counts": {}})
    return Data.open(folder)


class Next(nn.Module):
    """After item n come n + 1, n + 2, …, cyclically."""

    length = 2
    window_step = 1
    timed, input_kinds = False, ()

    def answerable(self, counts: np.ndarray) -> np.ndarray:
        return counts > 0

    def query(self, batch: PackedBatch) -> Tensor:
        return nn.functional.one_hot(batch.items[batch.last], len(ITEMS) + 1).float()

    def item_vectors(self) -> Tensor:
        numbers = torch.arange(len(ITEMS) + 1)
        return -((numbers[:, None] - numbers[None, :] - 1) % len(ITEMS)).float()


@pytest.fixture(name="recommender")
def cyclic_recommender() -> Recommender:
    model = Next()
    table = pl.DataFrame({"id": ITEMS, "count": [1, 2, 3, 4, 5, 6], "title": [*map(str.upper, ITEMS[:5]), None]})
    return Recommender(cast(SequenceModel, model), ExactIndex.build(model.item_vectors()), Vocabulary(table))


@pytest.fixture(name="data")
def dated_data(tmp_path: Path) -> Data:
    return data_folder(tmp_path / "data")


def answers_in(folder: Path) -> dict[str, list[str]]:
    """Items of each user, by rank."""
    table = pl.read_parquet(folder / "*.parquet").sort("rank")
    return {str(user): rows["item"].to_list() for (user,), rows in table.group_by("user", maintain_order=True)}


def file_with(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_item_to_item_counts_are_added(data: Data, tmp_path: Path, recommender: Recommender) -> None:
    """f came after c nine times: -2 of the model, which expects it third, and 10 · ln 10."""
    none = Neighbours(np.zeros(8, np.int64), *np.zeros((2, 0), np.int32))
    after = Neighbours(np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.array([6], np.int32), np.array([9], np.int32))
    counts = Counts(ItemCounts((after, none, none), none, np.ones(7, np.int64)), (10.0, 0, 0, 0, 0, 0, 0))
    counted = Recommender(recommender.model, recommender.index, recommender.vocabulary, item_counts=counts)
    recommend_users(counted, data, file_with(tmp_path / "users.csv", "user\n007\n"), tmp_path / "out", k=3)
    answer = pl.read_parquet(tmp_path / "out" / "*.parquet")
    assert answer["item"].to_list() == ["f", "d", "e"]
    assert answer["score"].to_list() == pytest.approx([21.02585, 0.0, -1.0])


def test_every_user_is_answered_from_their_history(recommender: Recommender, data: Data, tmp_path: Path) -> None:
    users = file_with(tmp_path / "users.csv", 'user\n☕\n007\nnobody\n"who ""is"", she"\n7\n')
    report = recommend_users(recommender, data, users, tmp_path / "out", k=3)
    assert answers_in(tmp_path / "out") == {
        "☕": ["d", "e", "f"],  # after b, without b and c
        "007": ["d", "e", "f"],
        "nobody": ["f", "e", "d"],  # the most frequent
        'who "is", she': ["a", "b", "c"],
        "7": ["e", "f", "a"],
    }
    table = pl.read_parquet(tmp_path / "out" / "part-00000.parquet")
    assert table.columns == ["user", "rank", "item", "title", "score", "fallback"]
    assert table.filter(pl.col("user") == "7").rows() == [
        ("7", 1, "e", "E", 0.0, None),
        ("7", 2, "f", None, -1.0, None),
        ("7", 3, "a", "A", -2.0, None),
    ]
    assert table.filter(pl.col("user") == "nobody")["fallback"].to_list() == ["popularity"] * 3
    assert (report.users, report.unknown_users, report.fallback, report.rows, report.files) == (5, 1, 1, 15, 1)


def test_a_list_of_numbers_needs_no_header(recommender: Recommender, data: Data, tmp_path: Path) -> None:
    users = file_with(tmp_path / "users.txt", "7\n007\n8\n")
    report = recommend_users(recommender, data, users, tmp_path / "out", k=1)
    assert answers_in(tmp_path / "out") == {"7": ["e"], "007": ["d"], "8": ["f"]}
    assert report.unknown_users == 1


@pytest.mark.parametrize("time", ["2026-01-02", "2026-01-02T00:00:00Z", "1767312000", "2026-01-02T01:00+01:00"])
def test_only_events_before_the_request_time_are_used(
    recommender: Recommender, data: Data, tmp_path: Path, time: str
) -> None:
    rows = "".join(f"{user},{time}\n" for user in ("007", "7", "☕", "nobody"))
    users = file_with(tmp_path / "users.csv", "Customer No.,at\n" + rows)
    report = recommend_users(recommender, data, users, tmp_path / "out", k=2)
    assert answers_in(tmp_path / "out") == {"007": ["b", "c"], "7": ["e", "f"], "☕": ["d", "e"], "nobody": ["f", "e"]}
    assert (report.unknown_users, report.fallback) == (1, 1)
    times = pl.read_parquet(tmp_path / "out" / "part-00000.parquet")["time"]
    assert times.unique().to_list() == [datetime(2026, 1, 2, tzinfo=UTC)]


def test_one_user_at_many_request_times(recommender: Recommender, data: Data, tmp_path: Path) -> None:
    users = tmp_path / "users.parquet"
    days = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 3, 4)]
    pl.DataFrame({"user_id": ["007"] * 4, "time": days}).write_parquet(users)
    report = recommend_users(recommender, data, users, tmp_path / "out", k=1)
    table = pl.read_parquet(tmp_path / "out" / "*.parquet").sort("time")
    assert table["item"].to_list() == ["f", "b", "c", "d"]  # no event before the first day
    assert table["fallback"].to_list() == ["popularity", None, None, None]
    assert (report.users, report.unknown_users, report.fallback) == (4, 0, 1)


def test_options_reach_the_answers(recommender: Recommender, data: Data, tmp_path: Path) -> None:
    users = file_with(tmp_path / "users.csv", "user\n7\nnobody\n")
    recommend_users(
        recommender, data, users, tmp_path / "out", k=9, keep_seen=True, exclude=["e"], only=["d", "e", "f", "zzz"]
    )
    assert answers_in(tmp_path / "out") == {"7": ["f", "d"], "nobody": ["f", "d"]}


def test_answers_do_not_depend_on_the_chunks(
    recommender: Recommender, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*LOG, "nobody", *reversed(LOG)] * 7
    users = tmp_path / "users.parquet"
    pl.DataFrame({"user": names}).write_parquet(users)
    whole = recommend_users(recommender, data, users, tmp_path / "whole", k=2)
    monkeypatch.setattr(users_file, "CHUNK_ROWS", 5)
    monkeypatch.setattr(runner, "MOST_EVENTS", 4)
    monkeypatch.setattr(batch_module, "PART_ROWS", 11)
    counts: list[int] = []
    parts = recommend_users(recommender, data, users, tmp_path / "parts", k=2, progress=counts.append)
    assert parts.files > whole.files == 1
    assert (parts.users, parts.rows, parts.fallback) == (whole.users, whole.rows, whole.fallback) == (63, 126, 7)
    one, other = (pl.read_parquet(tmp_path / name / "*.parquet") for name in ("whole", "parts"))
    assert one.equals(other)
    assert one["user"].to_list() == [name for name in names for _ in range(2)]
    assert counts == sorted(counts)
    assert counts[-1] == 63


def test_a_run_trained_on_other_items(recommender: Recommender, tmp_path: Path) -> None:
    """Item numbers differ between the data and the run: items are joined by id, and unknown ones are skipped."""
    data = data_folder(tmp_path / "data", items=["new", "f", "e", "d", "c", "b", "a"])
    users = file_with(tmp_path / "users.csv", "user\n007\n7\n")
    recommend_users(recommender, data, users, tmp_path / "out", k=2)
    assert answers_in(tmp_path / "out") == {"007": ["d", "e"], "7": ["e", "f"]}


def test_empty_answers_still_have_columns(recommender: Recommender, data: Data, tmp_path: Path) -> None:
    users = file_with(tmp_path / "users.csv", "user\n7\n")
    report = recommend_users(recommender, data, users, tmp_path / "out", only=["zzz"])
    assert (report.users, report.rows, report.files) == (1, 0, 1)
    assert pl.read_parquet(tmp_path / "out" / "*.parquet").schema["rank"] == pl.Int32


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ("user,time\n7,2026-01-01\n8,yesterday\n", "row 3: unreadable time"),
        ("user,time\n7,2026-01-01\n,2026-01-01\n", "row 3: no user"),
        ("user,time\n7,2026-01-01\n8\n", "row 3: expected 2 fields, got 1"),
        ("colour,size\nred,5\nblue,6\n", "no column that looks like the user; call it 'user' in the header line"),
        ("☕\n7\n", "no column that looks like the user"),  # no header: the first user would be lost
        ("user,user_id\n7,8\n", "could all be the user"),
        ("user,time\n7,3\n8,4\n", "but the times of .* are dates"),
    ],
)
def test_bad_files_are_refused_and_no_file_remains(
    recommender: Recommender, data: Data, tmp_path: Path, text: str, sentence: str
) -> None:
    users = file_with(tmp_path / "users.csv", text)
    with pytest.raises(InputError, match=sentence):
        recommend_users(recommender, data, users, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "users.csv"]


def test_request_times_need_a_log_with_times(recommender: Recommender, tmp_path: Path) -> None:
    data = data_folder(tmp_path / "data", time={"form": "row order", "description": "the row order"})
    users = file_with(tmp_path / "users.csv", "user,time\n7,2026-01-01\n")
    with pytest.raises(InputError, match="has none; leave the column out"):
        recommend_users(recommender, data, users, tmp_path / "out")


def test_request_times_in_the_format_of_the_log(recommender: Recommender, tmp_path: Path) -> None:
    time = {"form": "format", "format": "%d.%m.%Y %H:%M", "zone": "Europe/Berlin", "description": "…"}
    data = data_folder(tmp_path / "data", time=time)
    users = file_with(tmp_path / "users.csv", "user,time\n007,02.01.2026 01:30\n7,01.01.2026 01:00\n")
    report = recommend_users(recommender, data, users, tmp_path / "out", k=1)
    # 01:30 in Berlin is 00:30 UTC, after the second event; 01:00 is midnight UTC, not after the first
    assert answers_in(tmp_path / "out") == {"007": ["c"], "7": ["f"]}
    assert report.fallback == 1


def test_a_folder_in_the_way(recommender: Recommender, data: Data, tmp_path: Path) -> None:
    users = file_with(tmp_path / "users.csv", "user\n7\n")
    with pytest.raises(FolderError, match="exists already"):
        recommend_users(recommender, data, users, data.folder)
    with pytest.raises(InputError, match="does not exist"):
        recommend_users(recommender, data, tmp_path / "missing.csv", tmp_path / "out")


def test_history_of_one_user(data: Data, recommender: Recommender) -> None:
    history = user_history(data, "007")
    assert [entry.item for entry in history] == ["a", "b", "c"]
    assert history[0].time == "2026-01-01T00:00:00+00:00"
    assert [entry.value for entry in history] == [None, 2.5, None]
    assert recommender.recommend(history, k=1).ids == ["d"]
    with pytest.raises(InputError, match="The user '0007' is not among the 4 users"):
        user_history(data, "0007")
