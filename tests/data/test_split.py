from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from event_logs import write_csv
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.data.dataset import Data
from segue.data.prepare import prepare
from segue.data.sequences import Sequences
from segue.data.split import Cases, split_last, split_time, validation_start
from segue.errors import InputError

TOY = [("toy", item, time) for time, item in zip((0, 100, 200, 300, 400), (10, 20, 30, 40, 50), strict=True)]


def sequences(lengths: list[int], times: list[int] | None = None) -> Sequences:
    total = sum(lengths)
    return Sequences(
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        items=np.arange(1, total + 1, dtype=np.int32),
        times=np.arange(total, dtype=np.int64) if times is None else np.array(times, dtype=np.int64),
    )


def histories_and_targets(data: Data, cases: Cases) -> list[tuple[list[str], str]]:
    """Each case as (history, target), by ids."""
    items = data.sequences.items
    return [
        (data.vocabulary.ids(items[start:target]), data.vocabulary.ids(items[target : target + 1])[0])
        for start, target in zip(cases.starts, cases.targets, strict=True)
    ]


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "toy.csv", TOY)


def test_the_toy_user_with_the_last_held_out(toy: Path) -> None:
    data = prepare(toy, min_user=1, min_item=1)
    train = data.sequences.items[data.split.offsets[0] : data.split.train_end[0]]
    assert data.vocabulary.ids(train) == ["10", "20", "30"]  # so [10, 20] has the targets [20, 30]
    assert histories_and_targets(data, data.split.cases("valid")) == [(["10", "20", "30"], "40")]
    assert histories_and_targets(data, data.split.cases("test")) == [(["10", "20", "30", "40"], "50")]


def test_the_toy_user_split_by_time(toy: Path) -> None:
    # two test events, so validation has two as well: 20 and 30 of [10, 20, 30]
    data = prepare(toy, min_user=1, min_item=1, split="time:250")
    assert data.manifest["split"] == {"kind": "time", "valid_from": 100_000_000, "test_from": 250_000_000}
    assert histories_and_targets(data, data.split.cases("test")) == [
        (["10", "20", "30"], "40"),
        (["10", "20", "30", "40"], "50"),
    ]
    assert histories_and_targets(data, data.split.cases("test", "first")) == [(["10", "20", "30"], "40")]
    assert histories_and_targets(data, data.split.cases("test", "last")) == [(["10", "20", "30", "40"], "50")]
    assert histories_and_targets(data, data.split.cases("valid")) == [(["10"], "20"), (["10", "20"], "30")]


def test_short_users_only_train() -> None:
    split = split_last(sequences([1, 2, 3, 4]))
    assert split.train_end.tolist() == [1, 3, 4, 8]
    assert split.cases("valid").users.tolist() == [2, 3]
    assert split.cases("test").targets.tolist() == [5, 9]


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=8), st.integers(-1, 11), st.integers(0, 4)
)
@settings(max_examples=60, deadline=None)
def test_a_split_by_time_equals_a_plain_count(users: list[list[int]], test_from: int, before: int) -> None:
    times = [sorted(user) for user in users]
    log = sequences([len(user) for user in users], [time for user in times for time in user])
    split = split_time(log, valid_from=test_from - before, test_from=test_from)
    starts = log.offsets[:-1]
    assert (split.train_end - starts).tolist() == [sum(time < test_from - before for time in user) for user in times]
    assert (split.valid_end - starts).tolist() == [sum(time < test_from for time in user) for user in times]
    targets = split.cases("test").targets
    assert [int(log.times[row]) for row in targets] == [time for user in times for time in user if time >= test_from]


def test_validation_has_as_many_events_as_the_test() -> None:
    log = sequences([10], list(range(10)))
    assert validation_start(log, test_from=7) == 4
    with pytest.raises(InputError, match="so there is no test"):
        validation_start(log, test_from=10)
    with pytest.raises(InputError, match="choose a later time"):
        validation_start(log, test_from=5)
    with pytest.raises(InputError, match="choose a later time"):
        validation_start(sequences([5], [3, 3, 3, 4, 4]), test_from=4)
    assert validation_start(sequences([4], [1, 3, 3, 4]), test_from=4) == 3


def test_a_date_splits_times_in_any_unit(tmp_path: Path) -> None:
    rows = [("u", f"i{n}", 1_704_067_200_000 + n * 86_400_000) for n in range(10)]  # 2024-01-01 and on, milliseconds
    log = write_csv(tmp_path / "log.csv", rows)
    by_date = prepare(log, min_user=1, min_item=1, split="time:2024-01-08")
    by_number = prepare(log, min_user=1, min_item=1, split="time:1704672000000")
    assert by_date.manifest["split"] == by_number.manifest["split"]
    assert by_date.split.cases("test").targets.tolist() == [7, 8, 9]
    assert by_date.split.cases("valid").targets.tolist() == [4, 5, 6]
    assert Data.open(by_date.folder).split.cases("test").targets.tolist() == [7, 8, 9]
