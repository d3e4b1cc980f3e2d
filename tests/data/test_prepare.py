from __future__ import annotations

import inspect
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from event_logs import digests, histories, seconds, write_csv
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.data.dataset import Data
from segue.data.prepare import prepare
from segue.data.read import delimited
from segue.data.settings import PrepareOptions, PrepareSettings
from segue.data.write import events
from segue.data.write.summary import summary_lines

EVERYONE: dict[str, Any] = {"min_user": 1, "min_item": 1}
Event = tuple[str, str, int]


def naive_core(rows: list[Event], min_user: int, min_item: int) -> list[Event]:
    """The k-core by a plain loop: count, remove, count again."""
    while True:
        users, items = Counter(user for user, _, _ in rows), Counter(item for _, item, _ in rows)
        core = [row for row in rows if users[row[0]] >= min_user and items[row[1]] >= min_item]
        if len(core) == len(rows):
            return core
        rows = core


def by_hand(rows: list[Event]) -> dict[str, list[str]]:
    """Every user's items by time; ties in row order."""
    expected: dict[str, list[str]] = {}
    for user, item, _ in sorted(rows, key=lambda row: row[2]):
        expected.setdefault(user, []).append(item)
    return dict(sorted(expected.items(), key=lambda pair: pair[0].encode()))


def test_the_options_of_prepare_are_its_settings(tmp_path: Path) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(PrepareSettings)}
    assert get_type_hints(PrepareOptions) == fields | {"max_rejected": float | str}
    assert all(re.search(rf"\b{name}\b", inspect.getdoc(prepare) or "") for name in fields)
    with pytest.raises(TypeError, match="'min_users'"):
        prepare(tmp_path / "log.csv", min_users=3)  # type: ignore[call-arg]
    log = write_csv(tmp_path / "log.csv", [("ann", "tea", 1), ("ann", "rye", 2)])
    settings = PrepareSettings(user="user", max_rejected=0.03, **EVERYONE)
    stored = prepare(log, user="user", max_rejected="3%", **EVERYONE).manifest["settings"]
    assert msgspec.convert(stored, PrepareSettings) == settings


def test_a_log_becomes_histories_in_order_of_time(tmp_path: Path) -> None:
    rows = [("bob", "rye", 30), ("ann", "tea", 20), ("bob", "tea", 10), ("ann", "rye", 5), ("bob", "jam", 20)]
    data = prepare(write_csv(tmp_path / "log.csv", rows), out=tmp_path / "data", **EVERYONE)
    assert histories(data) == {"ann": ["rye", "tea"], "bob": ["tea", "jam", "rye"]}
    assert seconds(data) == [5, 20, 10, 20, 30]
    assert data.vocabulary.table.to_dict(as_series=False) == {"id": ["jam", "rye", "tea"], "count": [1, 2, 2]}
    assert data.manifest["counts"] == {
        "rows": 5,
        "good": 5,
        "rejected": {},
        "duplicates": 0,
        "users": 2,
        "items": 3,
        "events": 5,
    }
    assert data.manifest["source"][0]["bytes"] == (tmp_path / "log.csv").stat().st_size
    data.verify()


def test_ids_are_ordered_by_their_bytes(tmp_path: Path) -> None:
    names = ["é", "z", "Z", "10", "9", "🙂", "�", " a", "a"]
    data = prepare(write_csv(tmp_path / "log.csv", [(name, name, 1) for name in names]), **EVERYONE)
    expected = sorted(names, key=str.encode)
    assert data.vocabulary.ids(np.arange(1, 10)) == expected
    assert data.users.ids(np.arange(9)) == expected
    assert [data.users.number(name) for name in expected] == list(range(9))
    assert data.users.number("nobody") is None and data.users.number("zz") is None


def test_ids_round_trip_unchanged(tmp_path: Path) -> None:
    odd = [
        "007",
        "a,b",
        'say "hi"',
        "a/b",
        " two  spaces ",
        "🙂☕",
        "NA",
        "null",
        "None",
        "nan",
        "1e5",
        "\ttab",
        "'",
        "-",
    ]
    rows = [(user, item, 1) for user in odd for item in odd]
    data = prepare(write_csv(tmp_path / "log.csv", rows))
    assert set(histories(data)) == set(odd)
    assert set(data.vocabulary.table["id"]) == set(odd)


ids = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x1e"), min_size=1, max_size=8)


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=20), st.sampled_from([",", "\t"]))
@settings(max_examples=25, deadline=None)
def test_any_text_is_an_id(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], delimiter: str
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.csv"
    rows = [*pairs, ("more", "than one"), ("more", "item")]
    quoted = [delimiter.join('"' + cell.replace('"', '""') + '"' for cell in row) for row in [("user", "item"), *rows]]
    path.write_bytes("\n".join(quoted).encode())
    result = histories(prepare(path, **EVERYONE))
    assert result == by_hand([(user, item, position) for position, (user, item) in enumerate(rows)])


logs = st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("uvwxyz"), st.integers(0, 9)), max_size=60)


@given(logs, st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_the_core_is_that_of_a_plain_loop(rows: list[Event], min_user: int, min_item: int) -> None:
    rows = [*rows, *[(user, item, 1) for user in "!?+#" for item in "1234"]]  # a core that always remains
    table = pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")
    data = prepare(table, min_user=min_user, min_item=min_item)
    core = naive_core(rows, min_user, min_item)
    assert histories(data) == by_hand(core)
    counts = Counter(item for _, item, _ in core)
    assert dict(data.vocabulary.table.iter_rows()) == counts


def test_removing_an_item_can_remove_its_users_and_so_on() -> None:
    # c has two events, but one is on "rare"; without c "p" has one event, and without it b has one
    rows = [("a", "x", 1), ("a", "y", 2), ("d", "x", 1), ("d", "y", 2)]
    rows += [("b", "x", 1), ("b", "p", 2), ("c", "p", 1), ("c", "rare", 2)]
    table = pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")
    data = prepare(table, min_user=2, min_item=2)
    assert histories(data) == {"a": ["x", "y"], "d": ["x", "y"]}


@given(st.integers(0, 2**32))
@settings(max_examples=8, deadline=None)
def test_the_order_of_rows_changes_no_file(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = random.Random(seed)
    times = rng.sample(range(10**9, 10**9 + 5000), 300)
    rows = [(f"u{rng.randrange(12)}", f"i{rng.randrange(9)}", time, rng.choice(["view", "buy"]), 1) for time in times]
    header = ("user", "item", "time", "kind", "value")
    folder = tmp_path_factory.mktemp("logs")
    first = prepare(write_csv(folder / "a.csv", rows, header=header))
    rng.shuffle(rows)
    parts = {"b.csv": rows[:99], "c.csv": rows[99:]}
    second = prepare([write_csv(folder / name, part, header=header) for name, part in parts.items()])
    assert digests(first) == digests(second)
    assert set(digests(first)) == {
        *("items.parquet", "users.parquet", "offsets.npy", "items.npy", "times.npy", "kinds.npy", "values.npy"),
        "rejected.parquet",
    }


def test_ties_keep_the_order_of_files_and_rows(tmp_path: Path) -> None:
    first = write_csv(tmp_path / "z.csv", [("u", f"a{n}", 7) for n in (3, 1, 2)])
    second = write_csv(tmp_path / "a.csv", [("u", f"b{n}", 7) for n in (2, 1)] + [("u", "first", 6)])
    data = prepare([first, second], **EVERYONE)
    assert histories(data) == {"u": ["first", "a3", "a1", "a2", "b2", "b1"]}


def test_ties_keep_their_order_for_any_chunk_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    rows = [(f"u{rng.randrange(40)}", f"i{n}", rng.randrange(3)) for n in range(2000)]
    log = write_csv(tmp_path / "log.csv", rows)
    whole = prepare(log, **EVERYONE)
    assert histories(whole) == by_hand(rows)
    monkeypatch.setattr(delimited, "READ_BYTES", 500)
    monkeypatch.setattr(delimited, "BLOCK_ROWS", 60)
    monkeypatch.setattr(events, "CHUNK_EVENTS", 130)
    monkeypatch.setattr(events, "GROUP_EVENTS", 70)
    assert digests(prepare(log, **EVERYONE)) == digests(whole)


def test_times_too_wide_for_the_fast_sort_are_still_sorted() -> None:
    times = [9_000_000_000_000_000_001, 100_000_000_000_000_003, 100_000_000_000_000_002_000]
    rng = random.Random(1)
    micro = [rng.randrange(10**16) for _ in range(3000)] + [1, 10**16 + 1]
    order = events.stable_order(np.array(micro, dtype=np.int64))
    assert order.tolist() == sorted(range(len(micro)), key=micro.__getitem__)
    wide = np.array([times[0], -times[0], 5, 5, -1], dtype=np.int64)
    assert events.stable_order(wide).tolist() == [1, 4, 2, 3, 0]


@pytest.mark.parametrize("weak", [False, True])
def test_numbering_distinguishes_texts_with_equal_hashes(monkeypatch: pytest.MonkeyPatch, weak: bool) -> None:
    if weak:
        monkeypatch.setattr(
            events, "text_hashes", lambda texts: (texts.str.len_bytes() % 3).to_numpy().astype(np.uint64)
        )
    rng, numbering, numbers = random.Random(1), events.Numbering(), dict[str, int]()
    for _ in range(10):
        texts = ["x" * rng.randrange(5) + str(rng.randrange(30)) for _ in range(60)]
        for text, number in zip(texts, numbering.numbers(pl.Series(texts)).tolist(), strict=True):
            assert numbers.setdefault(text, number) == number
    assert sorted(numbers.values()) == list(range(len(numbering)))
    assert all(numbering.texts()[number] == text for text, number in numbers.items())


def test_a_column_can_order_events_of_the_same_time(tmp_path: Path) -> None:
    rows = [("u", "c", 7, 30), ("u", "a", 7, -1), ("u", "b", 7, 4), ("u", "z", 6, 99), ("u", "d", 7, 30)]
    log = write_csv(tmp_path / "log.csv", rows, header=("user", "item", "time", "position"))
    assert histories(prepare(log, order="position", **EVERYONE)) == {"u": ["z", "a", "b", "c", "d"]}


def test_an_order_is_a_whole_number() -> None:
    positions = [1.0, 2.5, 1e300, 3.0, float("nan")]
    table = pl.DataFrame({"user": ["u"] * 5, "item": list("abcde"), "time": [7] * 5, "position": positions})
    data = prepare(table, order="position", max_rejected=0.6, **EVERYONE)
    assert histories(data) == {"u": ["a", "d"]}
    assert data.manifest["counts"]["rejected"] == {"unreadable order": 3}


def test_an_order_without_times_is_the_order(tmp_path: Path) -> None:
    rows = [("u", "c", 30), ("u", "a", 1), ("u", "b", 4)]
    log = write_csv(tmp_path / "log.csv", rows, header=("user", "item", "position"))
    data = prepare(log, order="position", **EVERYONE)
    assert histories(data) == {"u": ["a", "b", "c"]}
    assert seconds(data) == [1, 4, 30]
    assert data.manifest["log"]["columns"]["order"] == "position"
    assert not data.manifest["has_time"]


def test_without_a_time_the_rows_are_the_order(tmp_path: Path) -> None:
    rows = [("u", "c"), ("v", "a"), ("u", "b"), ("u", "a")]
    data = prepare(write_csv(tmp_path / "log.csv", rows, header=("user", "item")), **EVERYONE)
    assert histories(data) == {"u": ["c", "b", "a"], "v": ["a"]}
    assert seconds(data) == [0, 2, 3, 1]
    assert data.manifest["has_time"] is False
    assert any("no time column: the row order is the order" in line for line in summary_lines(data.manifest))


def test_small_numbers_are_an_order(tmp_path: Path) -> None:
    data = prepare(write_csv(tmp_path / "log.csv", [("u", "a", 2), ("u", "b", 0), ("u", "c", 1)]), **EVERYONE)
    assert histories(data) == {"u": ["b", "c", "a"]}
    assert seconds(data) == [0, 1, 2]
    assert data.manifest["has_time"] is False
    assert data.manifest["log"]["time"]["form"] == "order"


def test_shares_of_ties_and_repeats(tmp_path: Path) -> None:
    rows = [("a", "x", 1), ("a", "y", 2), ("a", "x", 2)]  # tied, and the last is a repeat
    rows += [("b", "x", 1), ("b", "y", 1), ("b", "z", 2)]  # neither
    rows += [("c", "x", 1), ("c", "y", 2), ("c", "y", 3)]  # repeated
    rows += [("d", "x", 4), ("d", "x", 4)]  # tied; two events are no test case
    rows += [("e", "x", 4)]
    data = prepare(write_csv(tmp_path / "log.csv", rows), **EVERYONE)
    assert data.manifest["tie_share"] == pytest.approx(2 / 5)
    assert data.manifest["repeat_share"] == pytest.approx(2 / 3)
    timed = prepare(tmp_path / "log.csv", split="time:3", **EVERYONE)
    assert timed.manifest["repeat_share"] == pytest.approx(2 / 4)  # c's last, d's second of two; d's first and e's not


def test_duplicates_are_counted_and_dropped_on_request(tmp_path: Path) -> None:
    rows: list[tuple[Any, ...]] = [("a", "x", 1, "v", 1), ("a", "x", 1, "v", 1), ("a", "x", 1, "w", 1)]
    rows += [("a", "x", 1, "v", 2)]
    rows += [("a", "x", 2, "v", 1), ("b", "x", 1, "v", 1), ("a", "y", 1, "v", ""), ("a", "y", 1, "v", ""), rows[0]]
    log = write_csv(tmp_path / "log.csv", rows, header=("user", "item", "time", "kind", "value"))
    original = prepare(log, **EVERYONE)
    assert original.manifest["counts"]["duplicates"] == 3
    assert original.manifest["counts"]["events"] == 9
    distinct = prepare(log, drop_duplicates=True, **EVERYONE)
    assert distinct.manifest["counts"]["duplicates"] == 3
    assert distinct.manifest["counts"]["events"] == 6
    assert histories(distinct)["a"] == ["x", "x", "x", "y", "x"]
    # x: six events without the repeats of one row; nobody but a has two
    assert prepare(log, drop_duplicates=True, min_user=2, min_item=1).manifest["counts"]["events"] == 5


def test_duplicates_are_dropped_before_anything_is_counted(tmp_path: Path) -> None:
    rows = [("a", "x", 1)] * 5 + [("b", item, time) for time, item in enumerate("xyxyxy")]
    data = prepare(write_csv(tmp_path / "log.csv", rows), drop_duplicates=True, min_user=2, min_item=1)
    assert set(histories(data)) == {"b"}


def test_without_times_repeated_pairs_are_duplicates(tmp_path: Path) -> None:
    rows = [("a", "x"), ("a", "y"), ("a", "x"), ("b", "x")]
    log = write_csv(tmp_path / "log.csv", rows, header=("user", "item"))
    assert prepare(log, **EVERYONE).manifest["counts"]["duplicates"] == 1
    assert histories(prepare(log, drop_duplicates=True, **EVERYONE)) == {"a": ["x", "y"], "b": ["x"]}


@given(logs)
@settings(max_examples=25, deadline=None)
def test_duplicates_agree_with_a_set(rows: list[Event]) -> None:
    rows = [*rows, ("a", "u", 1), ("a", "v", 1)]
    table = pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")
    data = prepare(table, drop_duplicates=True, **EVERYONE)
    assert data.manifest["counts"]["duplicates"] == len(rows) - len(set(rows))
    assert prepare(table, **EVERYONE).manifest["counts"]["duplicates"] == len(rows) - len(set(rows))
    assert histories(data) == by_hand(list(dict.fromkeys(rows)))


def test_kinds_and_values_are_stored(tmp_path: Path) -> None:
    rows = [
        ("a", "x", 3, "view", "0.5"),
        ("a", "y", 1, "buy", ""),
        ("b", "x", 1, "", "-2e1"),
        ("a", "x", 2, "buy", "7"),
    ]
    log = write_csv(tmp_path / "log.csv", rows, header=("user", "item", "time", "event_type", "rating"))
    data = prepare(log, kind="event_type", value="rating", **EVERYONE)
    assert data.kinds == ["", "buy", "view"]
    assert data.sequences.kinds is not None and data.sequences.values is not None
    assert [data.kinds[number] for number in data.sequences.kinds] == ["buy", "buy", "view", ""]
    np.testing.assert_array_equal(data.sequences.values, np.array([np.nan, 7, 0.5, -20], dtype=np.float32))


META = "index,user_id,sequence_item_ids,sequence_ratings,sequence_timestamps\n"


def test_one_row_a_user(tmp_path: Path) -> None:
    log = tmp_path / "sasrec_format.csv"
    log.write_text(META + '0,7,"30,10,20","3,4,5","978300300,978300100,978300200"\n1,9,"10","5","978300000"\n')
    data = prepare(log, **EVERYONE)
    assert histories(data) == {"7": ["10", "20", "30"], "9": ["10"]}
    assert data.sequences.values is not None and data.sequences.values.tolist() == [4, 5, 3, 5]
    assert seconds(data) == [978300100, 978300200, 978300300, 978300000]
    assert data.manifest["log"]["layout"] == "one row a user"
    assert "one row a user" in summary_lines(data.manifest)[0]


def test_one_row_a_user_with_lists_that_do_not_match(tmp_path: Path) -> None:
    log = tmp_path / "sasrec_format.csv"
    good = '0,7,"30,10,20","3,4,5","978300300,978300100,978300200"\n'
    log.write_text(META + good + '1,9,"10,20","5","978300000,978300001"\n')
    data = prepare(log, max_rejected="50%", **EVERYONE)
    assert data.manifest["counts"]["rejected"] == {"lists of unequal length": 1}
    assert set(histories(data)) == {"7"}


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_one_row_a_user_with_real_lists(tmp_path: Path, kind: str) -> None:
    table = pl.DataFrame(
        {"user": ["a", "b"], "item": [["x,1", "y"], ["y"]], "time": [[1600000002, 1600000001], [1600000000]]}
    )
    log = tmp_path / "log"
    table.write_parquet(log) if kind == "parquet" else table.write_ndjson(log)
    assert histories(prepare(log, **EVERYONE)) == {"a": ["y", "x,1"], "b": ["y"]}


def test_every_kind_of_table_gives_the_same_data(tmp_path: Path) -> None:
    rows = [(1, "x", 1600000003), (2, "y", 1600000001), (1, "y", 1600000002), (2, "x", 1600000000)]
    frame = pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")
    log = write_csv(tmp_path / "log.csv", rows)
    frame.write_parquet(tmp_path / "log.parquet")
    frame.write_ndjson(tmp_path / "log.jsonl")
    frame.write_csv(tmp_path / "log.tsv", separator="\t")
    sources: list[Any] = [frame, frame.lazy(), frame.to_arrow(), pd.DataFrame(rows, columns=frame.columns)]
    sources += [str(log), tmp_path / "log.parquet", tmp_path / "log.jsonl", [tmp_path / "log.tsv"]]
    expected = digests(prepare(log, **EVERYONE))
    for source in sources:
        assert digests(prepare(source, **EVERYONE)) == expected
    assert histories(prepare(frame, **EVERYONE)) == {"1": ["y", "x"], "2": ["x", "y"]}


def test_a_table_with_gaps_and_its_own_types() -> None:
    table = pd.DataFrame(
        {
            "user": [1.0, 2.0, None, 1.0],
            "item": pd.Categorical(["x", "y", "x", "y"]),
            "time": pd.to_datetime(["2024-01-01 10:00", "2024-01-02 00:00", "2024-01-03 00:00", None]),
        }
    )
    data = prepare(table, max_rejected=0.5, **EVERYONE)
    assert histories(data) == {"1": ["x"], "2": ["y"]}
    assert data.manifest["counts"]["rejected"] == {"no time": 1, "no user": 1}
    assert seconds(data) == [1704103200, 1704153600]


@pytest.mark.parametrize(
    ("column", "zone", "expected"),
    [
        (pl.Series(["2024-07-01 12:00"]).str.to_datetime(), None, 1719835200),
        (pl.Series(["2024-07-01 12:00"]).str.to_datetime(), "Europe/Berlin", 1719828000),
        (pl.Series(["2024-07-01 12:00+00:00"]).str.to_datetime("%F %R%z"), "Europe/Berlin", 1719835200),
        (pl.Series(["2024-07-01"]).str.to_date(), None, 1719792000),
        (pl.Series(["2024-07-01 12:00"]), "Europe/Berlin", 1719828000),
    ],
)
def test_dates_of_a_table_are_timestamps(column: pl.Series, zone: str | None, expected: int) -> None:
    table = pl.DataFrame({"user": ["a", "a"], "item": ["x", "y"], "time": pl.concat([column, column])})
    data = prepare(table, time_zone=zone, **EVERYONE)
    assert seconds(data) == [expected, expected]
    assert data.manifest["has_time"] is True


@pytest.mark.parametrize("typed", [True, False])
def test_the_time_zone_applies_to_the_split_as_well(typed: bool) -> None:
    """Noon in Berlin is ten o'clock in UTC, though the log's times have their own offset."""
    times = pl.Series([f"2024-07-01 {hour:02}:00+00:00" for hour in (7, 8, 9, 10)])
    column = times.str.to_datetime("%F %R%z") if typed else times
    table = pl.DataFrame({"user": ["a"] * 4, "item": ["x", "y", "z", "x"], "time": column})
    data = prepare(table, time_zone="Europe/Berlin", split="time:2024-07-01T12:00", **EVERYONE)
    assert data.manifest["split"]["test_from"] == 1719828000_000_000


def test_rejected_rows_are_kept_with_their_reason(tmp_path: Path) -> None:
    good = [("a", "x", "2024-01-01"), ("a", "y", "2024-01-02")] * 10
    bad = [("", "x", "2024-01-01"), ("a", "", "2024-01-01"), ("a", "x", "soon"), ("a", "x", ""), ("a", "x")]
    log = write_csv(tmp_path / "log.csv", [*good, *bad])
    data = prepare(log, max_rejected=0.2, **EVERYONE)
    reasons = ["expected 3 fields, got 2", "no item", "no time", "no user", "unreadable time"]
    assert data.manifest["counts"]["rejected"] == dict.fromkeys(reasons, 1)
    table = pl.read_parquet(data.folder / "rejected.parquet")
    assert table.columns == ["file", "row", "reason", "user", "item", "time", "text"]
    assert table.select("row", "reason", "time", "text").rows() == [
        (22, "no user", "2024-01-01", None),
        (23, "no item", "2024-01-01", None),
        (24, "unreadable time", "soon", None),
        (25, "no time", "", None),
        (26, "expected 3 fields, got 2", None, "a,x"),
    ]
    assert table["file"].unique().to_list() == [str(log)]
    lines = "\n".join(summary_lines(data.manifest))
    assert "25 read, 20 good, 5 rejected" in lines
    assert "rejected.parquet holds the rejected rows; it may contain personal data" in lines


def test_the_summary_reports_assumptions(tmp_path: Path) -> None:
    rows = [(f"u{n % 7}", f"i{n % 6}", 1600000000 + n) for n in range(84)]
    log = write_csv(tmp_path / "log.csv", rows, header=("customer", "sku", "when"))
    lines = summary_lines(prepare(log, user="customer").manifest)
    assert lines[0] == "columns    user = 'customer', item = 'sku' (found), time = 'when' (found)"
    assert "epoch seconds" in lines[1]


def test_without_out_the_folder_is_deleted_with_the_process(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [("a", "x", 1), ("a", "y", 2)])
    code = (
        "import sys; from segue.data.prepare import prepare; data = prepare(sys.argv[1], min_user=1, min_item=1);"
        "assert (data.folder / 'items.npy').exists(); print(data.folder); assert 'torch' not in sys.modules"
    )
    process = subprocess.run([sys.executable, "-c", code, str(log)], capture_output=True, text=True, check=True)
    folder = Path(process.stdout.strip())
    assert folder.is_absolute() and not folder.exists() and not folder.parent.exists()


def test_progress_is_reported(tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    log = write_csv(tmp_path / "log.csv", [("a", "x", 1), ("a", "y", 2)])
    prepare(log, progress=lambda *facts: reports.append(facts), **EVERYONE)
    finished = [stage for stage, done, total in reports if done == total]
    assert list(dict.fromkeys(finished)) == ["reading the times", "reading", "sorting and writing"]


def test_several_files_may_differ_in_format_and_in_the_order_of_columns(tmp_path: Path) -> None:
    first = write_csv(tmp_path / "a.csv", [("a", "x", 3), ("a", "y", 1)])
    second = tmp_path / "b.tsv"
    second.write_text("time\tmore\titem\tuser\n2\t-\tz\ta\n")
    third = tmp_path / "c.jsonl"
    third.write_text('{"user": "b", "time": 9, "item": "x"}\n')
    assert histories(prepare([first, second, third], **EVERYONE)) == {"a": ["y", "z", "x"], "b": ["x"]}


def test_arrow_dictionaries_are_text() -> None:
    table = pa.table(
        {
            "user": pa.array(["a", "b", "a"]).dictionary_encode(),
            "item": pa.array(["x", "y", "y"]),
            "time": pa.array([1, 2, 3], pa.int16()),
        }
    )
    data: Data = prepare(table, **EVERYONE)
    assert histories(data) == {"a": ["x", "y"], "b": ["y"]}
