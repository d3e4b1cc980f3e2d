from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any
from zoneinfo import ZoneInfo

import narwhals as nw
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.data.read.time_format import TimeFormat
from segue.data.read.times import TimeRule, decide, forced_rule, mixture, moment, read_times, votes
from segue.data.settings import PrepareSettings
from segue.errors import SettingsError

MICRO = 1_000_000
ENGINES: dict[str, Callable[..., Any]] = {"polars": pl.DataFrame, "arrow": pa.table}


def counted(values: list[Any], engine: str = "polars") -> dict[str, int]:
    row = votes(nw.from_native(ENGINES[engine]({"time": values})).lazy()).collect()
    return {name: int(row[name][0]) for name in row.columns}


def read(values: list[Any], rule: TimeRule | None = None, *, engine: str = "polars") -> list[Any]:
    """Microseconds, or the reason, of each value; by the rule the column itself decides when none is given."""
    rule = rule or decide(counted(values, engine), zone=None)
    frame = read_times(nw.from_native(ENGINES[engine]({"time": values})).lazy(), rule).collect()
    pairs = list(zip(frame["microseconds"].to_list(), frame["time_reason"].to_list(), strict=True))
    assert all((micro is None) == (reason is not None) for micro, reason in pairs)
    return [reason if micro is None else micro for micro, reason in pairs]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("text", "micro"),
    [
        ("1970-01-01", 0),
        ("2000-03-01", 951_868_800 * MICRO),
        ("2000-02-29 23:59", 951_868_740 * MICRO),
        ("2024-05-01T12:30:59", 1_714_566_659 * MICRO),
        ("2024-05-01 12:30:59Z", 1_714_566_659 * MICRO),
        ("2024-05-01 12:30:59 UTC", 1_714_566_659 * MICRO),
        ("2024-05-01T14:30:59+02:00", 1_714_566_659 * MICRO),
        ("2024-05-01T10:00:59-0230", 1_714_566_659 * MICRO),
        ("2024-05-01T14:30+02", 1_714_566_600 * MICRO),
        ("2024-05-01T12:30:59.5", 1_714_566_659 * MICRO + 500_000),
        ("2024-05-01T12:30:59,123456789Z", 1_714_566_659 * MICRO + 123_456),
        (" 2024-05-01 ", 1_714_521_600 * MICRO),
        ("1969-12-31T23:59:59", -MICRO),
        ("2023-02-29", "unreadable time"),
        ("1900-02-29", "unreadable time"),
        ("2024-13-01", "unreadable time"),
        ("2024-04-31", "unreadable time"),
        ("2024-04-00", "unreadable time"),
        ("2024-05-01 24:00", "unreadable time"),
        ("2024-05-01 12:60", "unreadable time"),
        ("yesterday", "unreadable time"),
        ("", "no time"),
        (None, "no time"),
    ],
)
def test_iso_times(text: str | None, micro: int | str, engine: str) -> None:
    iso = TimeRule(form="iso", tails=True)
    assert read([text, "2024-01-01"], iso, engine=engine)[0] == micro


def wall_clock(year: int) -> datetime.datetime:
    return datetime.datetime(year, 1, 2)  # noqa: DTZ001, a log's times without an offset have no zone


SPAN = st.datetimes(wall_clock(1970), wall_clock(2049))


def since_1970(when: datetime.datetime) -> int:
    return (when - datetime.datetime.fromisoformat("1970-01-01")) // datetime.timedelta(microseconds=1)


@given(
    st.lists(st.datetimes(wall_clock(1900), wall_clock(2200)), min_size=1),
    st.sampled_from("T "),
)
@settings(max_examples=30, deadline=None)
def test_iso_agrees_with_python(moments: list[datetime.datetime], between: str) -> None:
    assert read([when.isoformat(sep=between) for when in moments]) == [since_1970(when) for when in moments]


@given(st.lists(SPAN, min_size=1), st.sampled_from(["Europe/Berlin", "Africa/Casablanca"]))
@settings(max_examples=20, deadline=None)
def test_zones_agree_with_python(moments: list[datetime.datetime], zone: str) -> None:
    moments = [when.replace(microsecond=0) for when in moments]
    expected = [int(when.replace(tzinfo=ZoneInfo(zone)).timestamp()) * MICRO for when in moments]
    assert read([when.isoformat() for when in moments], TimeRule(form="iso", zone=zone)) == expected


def test_an_hour_that_comes_twice_is_its_first_and_one_that_never_comes_is_read_by_winter_time() -> None:
    rule = TimeRule(form="iso", tails=True, zone="Europe/Berlin")
    twice, never, absolute = read(["2021-10-31 02:30", "2021-03-28 02:30", "2021-07-01T12:00Z"], rule)
    assert twice == 1_635_640_200 * MICRO  # 00:30 UTC
    assert never == 1_616_895_000 * MICRO  # 01:30 UTC
    assert absolute == 1_625_140_800 * MICRO  # an offset is stronger than the zone


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("values", "form", "micro"),
    [
        (["1600000000"], "s", 1_600_000_000 * MICRO),
        (["1600000000.25"], "s", 1_600_000_000 * MICRO + 250_000),
        (["1.6e9"], "s", 1_600_000_000 * MICRO),
        (["1600000000123"], "ms", 1_600_000_000 * MICRO + 123_000),
        (["1600000000123456"], "us", 1_600_000_000 * MICRO + 123_456),
        (["1600000000123456789"], "ns", 1_600_000_000 * MICRO + 123_456),
        (["7"], "order", 7 * MICRO),
        (["-3"], "order", -3 * MICRO),
        ([1_600_000_000], "s", 1_600_000_000 * MICRO),
        ([1_600_000_000_123], "ms", 1_600_000_000 * MICRO + 123_000),
        ([1_600_000_000.5], "s", 1_600_000_000 * MICRO + 500_000),
        ([0], "order", 0),
    ],
)
def test_the_unit_follows_from_the_size(values: list[Any], form: str, micro: int, engine: str) -> None:
    assert decide(counted(values, engine), zone=None).form == form
    assert read(values, engine=engine) == [micro]


def test_one_unit_for_the_column_and_the_rest_is_refused() -> None:
    values = ["1600000000", "1600000001", "1600000002000", "0", "soon", "", "99999999999999999999"]
    s, other = 1_600_000_000 * MICRO, "time is not in seconds"
    assert read(values) == [s, s + MICRO, other, other, "unreadable time", "no time", "unreadable time"]


def test_a_named_unit_takes_every_number() -> None:
    rule = forced_rule(PrepareSettings(time_format="ms"))
    assert rule is not None
    assert read(["5", "1600000000", "x"], rule) == [5000, 1_600_000_000_000, "unreadable time"]


def test_a_mixture_is_named_with_its_shares() -> None:
    counts = counted(["1600000000"] * 7 + ["1600000000000"] * 3)
    assert mixture(counts) == (
        "The time column mixes seconds (70.0%) and milliseconds (30.0%); it must hold one of them: "
        "convert the others first."
    )
    assert mixture(counted(["1600000000", ""])) == ""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("text", "how", "expected"),
    [
        ("12/1/2010 8:26", "%m/%d/%Y %H:%M", "2010-12-01T08:26:00"),
        ("01.12.10", "%d.%m.%y", "2010-12-01T00:00:00"),
        ("01.12.70", "%d.%m.%y", "1970-12-01T00:00:00"),
        ("20101201082601", "%Y%m%d%H%M%S", "2010-12-01T08:26:01"),
        ("Wednesday? 5 dec 2010 12:05:07 AM", "Wednesday? %d %b %Y %I:%M:%S %p", "2010-12-05T00:05:07"),
        ("December 5, 2010 1pm", "%B %d, %Y %I%p", "2010-12-05T13:00:00"),
        ("2010-12-01 08:26:01.25 +0130", "%F %T.%f %z", "2010-12-01T06:56:01.250000"),
        ("100% 2010-12-01", "100%% %F", "2010-12-01T00:00:00"),
    ],
)
def test_formats(text: str, how: str, expected: str, engine: str) -> None:
    rule = forced_rule(PrepareSettings(time_format=how))
    micro = since_1970(datetime.datetime.fromisoformat(expected))
    assert read([text, "no", ""], rule, engine=engine) == [micro, "unreadable time", "no time"]


@given(
    st.lists(SPAN, min_size=1),
    st.sampled_from(["%d/%m/%y %H:%M:%S.%f", "%Y%m%d %I:%M:%S %p %f", "%b %d %Y %T,%f", "%B-%d-%Y-%H-%M-%S-%f"]),
)
@settings(max_examples=20, deadline=None)
def test_formats_agree_with_python(moments: list[datetime.datetime], how: str) -> None:
    rule = forced_rule(PrepareSettings(time_format=how))
    assert read([when.strftime(how) for when in moments], rule) == [since_1970(when) for when in moments]


@pytest.mark.parametrize("how", ["%Q", "%H:%M", "%Y", "days", "%"])
def test_a_format_that_cannot_be_used_is_refused(how: str) -> None:
    with pytest.raises(SettingsError, match="--time-format"):
        TimeFormat.parse(how)


@pytest.mark.parametrize(
    ("said", "rule", "expected"),
    [
        ("250", TimeRule(form="order"), 250 * MICRO),
        ("1600000000", TimeRule(form="s"), 1_600_000_000 * MICRO),
        ("2020-09-13T12:26:40", TimeRule(form="ms"), 1_600_000_000 * MICRO),
        ("2020-09-13T12:26:40+00:00", TimeRule(form="iso", zone="Asia/Tokyo"), 1_600_000_000 * MICRO),
        ("2020-09-13", TimeRule(form="instant"), 1_599_955_200 * MICRO),
        ("1600000000", TimeRule(form="iso"), None),
    ],
)
def test_a_moment_in_the_words_of_the_column(said: str, rule: TimeRule, expected: int | None) -> None:
    assert moment(said, rule) == expected
