from __future__ import annotations

import datetime
from typing import Any
from zoneinfo import ZoneInfo

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.data.read.dates import TimeFormat
from segue.data.read.times import TimeRule, decide, forced_rule, mixture, read_time, read_times, votes
from segue.data.settings import PrepareSettings
from segue.data.timestamps import SKIPPED, read_iso
from segue.errors import SettingsError

MICRO = 1_000_000


def vote_counts(values: list[Any]) -> dict[str, int]:
    return votes(pl.Series(values))


def read(values: list[Any], rule: TimeRule | None = None) -> list[Any]:
    """Microseconds, or the reason, of each value; by the rule that the column decides if there is no other."""
    rule = rule or decide(vote_counts(values), zone=None)
    frame = read_times(pl.Series(values), rule)
    pairs = list(zip(frame["microseconds"].to_list(), frame["time_reason"].to_list(), strict=True))
    assert all((micro is None) == (reason is not None) for micro, reason in pairs)
    return [reason if micro is None else micro for micro, reason in pairs]


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
def test_iso_times(text: str | None, micro: int | str) -> None:
    assert read([text, "2024-01-01"], TimeRule(form="iso"))[0] == micro


def local_time(year: int) -> datetime.datetime:
    return datetime.datetime(year, 1, 2)  # noqa: DTZ001, a log's times without an offset have no zone


LOCAL_TIMES = [datetime.datetime(2021, 10, 31, 2, 30), datetime.datetime(2021, 3, 28, 2, 30)]  # noqa: DTZ001
SPAN = st.datetimes(local_time(1970), local_time(2049))


def since_1970(when: datetime.datetime) -> int:
    return (when - datetime.datetime.fromisoformat("1970-01-01")) // datetime.timedelta(microseconds=1)


@given(
    st.lists(st.datetimes(local_time(1900), local_time(2200)), min_size=1),
    st.sampled_from("T "),
)
@settings(max_examples=30, deadline=None)
def test_iso_agrees_with_python(times: list[datetime.datetime], between: str) -> None:
    assert read([when.isoformat(sep=between) for when in times]) == [since_1970(when) for when in times]


@given(st.lists(SPAN, min_size=1), st.sampled_from(["Europe/Berlin", "Africa/Casablanca"]))
@settings(max_examples=20, deadline=None)
def test_zones_agree_with_python(times: list[datetime.datetime], zone: str) -> None:
    times = [when.replace(microsecond=0) for when in times]
    expected = [int(when.replace(tzinfo=ZoneInfo(zone)).timestamp()) * MICRO for when in times]
    assert read([when.isoformat() for when in times], TimeRule(form="iso", zone=zone)) == expected


def test_an_ambiguous_hour_is_its_first_and_a_skipped_hour_is_rejected() -> None:
    rule = TimeRule(form="iso", zone="Europe/Berlin")
    twice, never, absolute = read(["2021-10-31 02:30", "2021-03-28 02:30", "2021-07-01T12:00Z"], rule)
    assert twice == 1_635_640_200 * MICRO  # 00:30 UTC
    assert never == SKIPPED == "no such local time: the clocks skipped that hour"
    assert absolute == 1_625_140_800 * MICRO  # an offset overrides the zone
    formatted = TimeRule(form="format", format="%d.%m.%Y %H:%M", zone="Europe/Berlin")
    assert read(["31.10.2021 02:30", "28.03.2021 02:30"], formatted) == [twice, SKIPPED]
    clock = [when - datetime.datetime(1970, 1, 1) for when in LOCAL_TIMES]  # noqa: DTZ001
    values = [since // datetime.timedelta(microseconds=1) for since in clock]
    assert read(values, TimeRule(form="instant", zone="Europe/Berlin")) == [twice, SKIPPED]


ODD = [
    *("2024-05-01T24:00", "2024-05-01T12", "2024-05-01T12+02", "20240501T120000Z", "2024-W18-3", "2024-05-01t12:00z"),
    *("2024-05-01 12:30:59 UTC", "2024-05-01T12:30:59,5", "2024-05-01x12:30", "2024-05-01T12:30:60", "2024-5-1"),
    *("2024-05-01T12:30:59.1234567891Z", "2024-05-01T12:30:59+24:00", "2024-05-01T12:30:59+0230", "0000-01-01", "now"),
    *("0001-01-01", "9999-12-31T23:59:59-12:00", " 2024-05-01 ", "2024-05-01T12:30.5", "2024- 5-01", "2024-02-30", ""),
    *(
        "2024-05-01T12:30:59+02:00:30",
        "2024-05-01T12:30:59 +02:00",
        "2021-03-28T02:30",
        "2021-10-31T02:30",
        "+024-05-01",
    ),
    *("٢٠٢٤-05-01", "2024-05-01T12:30:59.123", "2024-05-01T12:30:59.123456-00:30", "2024-05-01T12:30:59.123456789+14"),
]


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_the_column_reader_and_the_single_reader_agree(zone: str | None) -> None:
    singles: list[int | str] = []
    for text in ODD:
        try:
            singles.append(read_iso(text, zone))
        except ValueError as error:
            singles.append("no time" if not text else str(error))
    rule = TimeRule(form="iso", zone=zone)
    assert read(ODD, rule) == singles
    alone = [read([text] * 2, rule) for text in ODD]  # each is then the format that polars parses
    assert alone == [[single] * 2 for single in singles]
    assert sum(isinstance(single, int) for single in singles) == (16 if zone is None else 15)


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
def test_the_unit_follows_from_the_size(values: list[Any], form: str, micro: int) -> None:
    assert decide(vote_counts(values), zone=None).form == form
    assert read(values) == [micro]


def test_one_unit_for_the_column_and_the_rest_is_refused() -> None:
    values = ["1600000000", "1600000001", "1600000002000", "0", "soon", "", "99999999999999999999"]
    s, other = 1_600_000_000 * MICRO, "time is not in seconds"
    assert read(values) == [s, s + MICRO, other, other, "unreadable time", "no time", "unreadable time"]


def test_an_explicit_unit_accepts_every_number() -> None:
    rule = forced_rule(PrepareSettings(time_format="ms"))
    assert rule is not None
    assert read(["5", "1600000000", "x"], rule) == [5000, 1_600_000_000_000, "unreadable time"]


def test_mixed_units_are_reported_with_their_shares() -> None:
    counts = vote_counts(["1600000000"] * 7 + ["1600000000000"] * 3)
    assert mixture(counts) == (
        "The time column mixes seconds (70.0%) and milliseconds (30.0%); it must hold one of them: "
        "convert the others first."
    )
    assert mixture(vote_counts(["1600000000", ""])) == ""


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
        ("2010-12-01 08h", "%F %Hh", "2010-12-01T08:00:00"),
        ("2010-12-01 08:26", "%F %I:%M", "2010-12-01T08:26:00"),
        ("01:26 PM 2010-12-01", "%H:%M %p %F", "2010-12-01T13:26:00"),
        ("01.12.69", "%d.%m.%y", "1969-12-01T00:00:00"),
        ("01.12.68", "%d.%m.%y", "2068-12-01T00:00:00"),
        ("2010-12-01 08:26:01,2", "%F %T,%f", "2010-12-01T08:26:01.200000"),
        ("2010-12-01 08:26:01.1234567", "%F %T.%f", "2010-12-01T08:26:01.123456"),
        ("2010-12-01 08:26:01 Z", "%F %T %z", "2010-12-01T08:26:01"),
    ],
)
def test_formats(text: str, how: str, expected: str) -> None:
    rule = forced_rule(PrepareSettings(time_format=how))
    micro = since_1970(datetime.datetime.fromisoformat(expected))
    assert read([text, "no", ""], rule) == [micro, "unreadable time", "no time"]


@given(
    st.lists(SPAN, min_size=1),
    st.sampled_from(["%d/%m/%y %H:%M:%S.%f", "%Y%m%d %I:%M:%S %p %f", "%b %d %Y %T,%f", "%B-%d-%Y-%H-%M-%S-%f"]),
)
@settings(max_examples=20, deadline=None)
def test_formats_agree_with_python(times: list[datetime.datetime], how: str) -> None:
    rule = forced_rule(PrepareSettings(time_format=how))
    assert read([when.strftime(how) for when in times], rule) == [since_1970(when) for when in times]


def test_digits_beside_digits_have_their_full_width() -> None:
    rule = forced_rule(PrepareSettings(time_format="%Y%m%d"))
    assert read(["2010111", "2010-1-1", "20101101"], rule) == [*["unreadable time"] * 2, 1_288_569_600 * MICRO]


@pytest.mark.parametrize("how", ["%Q", "%H:%M", "%Y", "days", "%", "%F %d"])
def test_a_format_that_cannot_be_used_is_refused(how: str) -> None:
    with pytest.raises(SettingsError, match="--time-format"):
        TimeFormat.parse(how)


@pytest.mark.parametrize(
    ("text", "rule", "expected"),
    [
        ("250", TimeRule(form="order"), 250 * MICRO),
        ("1600000000", TimeRule(form="s"), 1_600_000_000 * MICRO),
        ("2020-09-13T12:26:40", TimeRule(form="ms"), 1_600_000_000 * MICRO),
        ("2020-09-13T12:26:40+00:00", TimeRule(form="iso", zone="Asia/Tokyo"), 1_600_000_000 * MICRO),
        ("2020-09-13", TimeRule(form="instant"), 1_599_955_200 * MICRO),
        ("1600000000", TimeRule(form="iso"), None),
    ],
)
def test_one_time_in_the_unit_of_the_column(text: str, rule: TimeRule, expected: int | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="unreadable time"):
            read_time(text, rule)
    else:
        assert read_time(text, rule) == expected
