"""The settings that are derived from a log. The laws hold for any sensible thresholds, which are read where needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.config import derived as module
from segue.config.derived import (
    REPLACED_BY,
    Derived,
    LogSettings,
    LogShape,
    candidates,
    derive,
    is_given,
    settings_for,
)
from segue.config.recipes import DEFAULT_RECIPE, read_recipe, recipe_names
from segue.config.settings import Settings, make_settings
from segue.data.dataset import Data
from segue.data.sequences import Sequences
from segue.data.split import split_last
from segue.errors import SettingsError
from segue.evaluation.split_log import SplitLog
from segue.kinds import Kind, kind_of
from segue.models.encoders.hstu import HSTUSettings
from segue.runs.plan import FIRST_PART, Plan, plan_lines
from segue.training.timing import Speed

MOST_EVENTS = 50_000_000
OF_MEMBERS = ("model.width", "model.members")
"""Derived for `sasrec` alone, which may be an ensemble."""


def shape_of(lengths: np.ndarray, *, users: int, items: int, targets: int) -> LogShape:
    """A log with so many targets of training. Each user's first event is none."""
    return LogShape(
        users=users, items=items, events=targets + users, targets=targets, lengths=lengths, catalogue=items, cases=users
    )


@st.composite
def shapes(draw: st.DrawFn, least_targets: int = 0) -> LogShape:
    """Any log from one user to fifty million events. The histories are those of some users: only their distribution
    counts."""
    lengths = draw(st.lists(st.integers(1, 5_000), min_size=1, max_size=40))
    few, many = (st.integers(least_targets, most) for most in (max(least_targets, 100_000), MOST_EVENTS))
    return shape_of(
        np.array(lengths),
        users=draw(st.integers(1, MOST_EVENTS)),
        items=draw(st.integers(1, 10_000_000)),
        targets=draw(few | many),
    )


def values_of(log: LogShape) -> dict[str, str | int | float]:
    return {each.key: each.value for each in derive(log)}


def value_in(settings: Settings, key: str) -> object:
    """The value of a key; of a choice, its kind."""
    value: object = settings
    for name in key.split("."):
        value = getattr(value, name)
    return kind_of(value) if isinstance(value, Kind) else value


def every_encoder(log: LogShape) -> dict[str, Settings]:
    """The settings of each encoder that is tried, by its name."""
    chosen = make_settings(read_recipe(DEFAULT_RECIPE))
    return candidates(LogSettings(chosen, tuple(derive(log))), [], timed=True)


def events_of_an_epoch(values: dict[str, str | int | float], log: LogShape) -> int:
    """As many as `train.epoch_events` says; 0 is every event once."""
    return int(values["train.epoch_events"]) or log.targets


# --- laws ---------------------------------------------------------------------------------------------------------


@given(shapes())
def test_every_derived_value_is_accepted(log: LogShape) -> None:
    settings = make_settings(read_recipe(DEFAULT_RECIPE), [each.override for each in derive(log)])
    for each in derive(log):
        assert value_in(settings, each.key) == each.value


@given(shapes())
def test_every_encoder_that_is_tried_has_the_derived_values(log: LogShape) -> None:
    tried = every_encoder(log)
    assert tried.keys() >= set(module.ENCODERS)
    for name, settings in list(tried.items())[1:]:  # the first one is the recipe as it is
        assert kind_of(settings.model) == name
        for each in derive(log):
            if each.key not in ("model", *OF_MEMBERS):
                assert value_in(settings, each.key) == each.value, (name, each.key)


@given(shapes())
def test_each_derived_setting_has_a_reason(log: LogShape) -> None:
    rows = derive(log)
    assert len({each.key for each in rows}) == len(rows) >= 5
    for each in rows:
        assert each.reason.strip() and "\n" not in each.reason and "nan" not in each.reason, each
        assert is_given(each.key, [each.override])


@given(shapes(least_targets=40_000))
def test_training_has_enough_updates(log: LogShape) -> None:
    """On a log of fifty thousand events, most of them targets: a thousand steps at the least, each of at most so many
    tokens."""
    values = values_of(log)
    steps = np.ceil(events_of_an_epoch(values, log) / int(values["train.tokens"]))
    assert steps * int(values["train.epochs"]) >= 1_000


@given(shapes(least_targets=1))
def test_the_planned_epochs_read_the_whole_log(log: LogShape) -> None:
    """Or more."""
    values = values_of(log)
    assert events_of_an_epoch(values, log) * int(values["train.epochs"]) >= log.targets


@given(shapes())
def test_the_window_holds_whole_histories(log: LogShape) -> None:
    """Of all but a few users, unless it is as long as it may be."""
    length = int(values_of(log)["model.length"])
    assert length in module.LENGTHS
    assert length >= np.percentile(log.lengths, module.COVERED) or length == max(module.LENGTHS)


@given(shapes(), st.integers(1, 5_000))
def test_longer_histories_never_have_a_shorter_window(log: LogShape, more: int) -> None:
    longer = shape_of(log.lengths + more, users=log.users, items=log.items, targets=log.targets)
    assert int(values_of(longer)["model.length"]) >= int(values_of(log)["model.length"])


@given(shapes(), st.integers(1, MOST_EVENTS))
def test_a_longer_log_never_has_less_time(log: LogShape, more: int) -> None:
    longer = shape_of(log.lengths, users=log.users, items=log.items, targets=log.targets + more)
    assert 0 < log.minutes <= longer.minutes == values_of(longer)["train.minutes"]


@given(shapes())
def test_the_encoder_depends_on_how_dense_the_log_is(log: LogShape) -> None:
    """And dropout: a dense log is overfitted less."""
    dense = shape_of(log.lengths, users=log.users, items=1, targets=MOST_EVENTS)
    sparse = shape_of(log.lengths, users=1, items=MOST_EVENTS, targets=1)
    assert dense.dense and not sparse.dense
    assert values_of(log)["model"] == (dense if log.dense else sparse).encoder
    assert float(values_of(dense)["model.dropout"]) <= float(values_of(sparse)["model.dropout"])
    assert {dense.encoder, sparse.encoder} <= set(module.ENCODERS)


def test_a_log_without_training_events_has_settings() -> None:
    """It is refused later, with a sentence of its own."""
    log = shape_of(np.array([], dtype=np.int64), users=0, items=0, targets=0)
    assert kind_of(make_settings(read_recipe(DEFAULT_RECIPE), [each.override for each in derive(log)]).model)


def test_the_shape_of_a_log_by_hand() -> None:
    """Of the training part alone: under the split of last events, users of three events and more leave two out."""
    items = np.array([1, 2, 3, 4, 5, 6, 1, 1, 1, 1, 7, 8], dtype=np.int32)  # of users with 1, 2, 3 and 6 events
    log = Sequences(offsets=np.array([0, 1, 3, 6, 12]), items=items, times=np.arange(12))
    shape = LogShape.of(SplitLog(log, split_last(log), n_items=9))
    assert (shape.users, shape.items) == (4, 4), "items 1, 2, 3 and 4"
    assert sorted(shape.lengths.tolist()) == [1, 1, 2, 4]
    assert (shape.events, shape.targets) == (1 + 2 + 1 + 4, 0 + 1 + 0 + 3)
    assert shape.per_item == 2


# --- the user's overrides -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(cycle_data: Path) -> Data:
    return Data.open(cycle_data)


OTHER_VALUES: dict[str, str | int | float] = {
    "model.length": 37,
    "model.dropout": 0.123,
    "train.tokens": 777,
    "train.epoch_events": 4321,
    "train.epochs": 3,
    "train.minutes": 7.5,
}


def other_values(data: Data) -> dict[str, str | int | float]:
    """A value for each derived key but the encoder, another one where the table above has it."""
    derived = {each.key: each.value for each in settings_for(None, [], data).derived}
    assert derived.keys() >= {"model", *OTHER_VALUES}
    return {key: OTHER_VALUES.get(key, value) for key, value in derived.items() if key != "model"}


@pytest.mark.parametrize("text", ["{key}={value}", " {key} = {value}"])
def test_an_override_wins_over_the_derived_value(text: str, data: Data) -> None:
    untouched = settings_for(None, [], data)
    for key, value in other_values(data).items():
        chosen = settings_for(None, [text.format(key=key, value=value)], data)
        assert value_in(chosen.settings, key) == value
        left = [each.key for each in untouched.derived if key not in (each.key, *REPLACED_BY.get(each.key, ()))]
        assert [each.key for each in chosen.derived] == left
        for each in chosen.derived:
            assert value_in(chosen.settings, each.key) == each.value == value_in(untouched.settings, each.key)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("text", ["model=gru4rec", "model.kind=sasrec", "model=narm", "model=nextitnet"])
def test_an_encoder_of_the_user_wins(text: str, dense: bool, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the log; the rest is derived, and no other encoder is tried."""
    monkeypatch.setattr(module, "DENSE", 1 if dense else 10**9)
    chosen = settings_for(None, [text], data)
    assert kind_of(chosen.settings.model) == text.partition("=")[2]
    assert {each.key for each in chosen.derived} == other_values(data).keys() - set(OF_MEMBERS)
    for each in chosen.derived:
        assert value_in(chosen.settings, each.key) == each.value
    assert list(candidates(chosen, [text], timed=True)) == [kind_of(chosen.settings.model)]


def test_several_overrides_win_together(data: Data) -> None:
    values = {key: value for key, value in other_values(data).items() if key not in OF_MEMBERS}
    texts = ["model=gru4rec", *(f"{key}={value}" for key, value in values.items())]
    for order in (texts, texts[::-1]):
        chosen = settings_for(None, order, data)
        assert chosen.derived == ()
        assert kind_of(chosen.settings.model) == "gru4rec"
        assert {key: value_in(chosen.settings, key) for key in values} == values


def test_overrides_of_other_keys_leave_the_derived_ones(data: Data) -> None:
    untouched = settings_for(None, [], data)
    chosen = settings_for(None, ["train.learning_rate=0.5", "model.depth=3", "evaluate.seen=keep"], data)
    assert chosen.derived == untouched.derived
    assert chosen.settings.train.learning_rate == 0.5 and chosen.settings.model.depth == 3


def test_the_default_derives_by_any_name(data: Data) -> None:
    assert settings_for(DEFAULT_RECIPE, [], data) == settings_for(None, [], data)


def test_a_given_recipe_derives_nothing(data: Data, tmp_path: Path) -> None:
    names = [name for name in recipe_names() if name != DEFAULT_RECIPE]
    assert len(names) > 10
    for name in names:
        assert settings_for(name, [], data) == LogSettings(make_settings(read_recipe(name)))
    (tmp_path / "own.toml").write_text('[model]\nkind = "gru4rec"\n[train]\nepochs = 5\n')
    chosen = settings_for(tmp_path / "own.toml", ["train.epochs=6"], data)
    assert chosen.derived == () and chosen.settings.train.epochs == 6


def test_a_wrong_override_is_refused(data: Data) -> None:
    with pytest.raises(SettingsError, match=r"There is no key 'widht' in model"):
        settings_for(None, ["model.widht=3"], data)
    with pytest.raises(SettingsError, match=r"train\.epochs: expected"):
        settings_for(None, ["train.epochs=0"], data)


def test_a_dense_log_has_the_recipe_of_its_encoder(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the training of the default."""
    monkeypatch.setattr(module, "DENSE", 1)
    settings = settings_for(None, [], data).settings
    recipe = make_settings(read_recipe("gru4rec"))
    assert kind_of(settings.model) == kind_of(recipe.model) == "gru4rec"
    assert settings.model.width == recipe.model.width and settings.objective == recipe.objective
    assert settings.train.learning_rate == make_settings(read_recipe(DEFAULT_RECIPE)).train.learning_rate


# --- several encoders ---------------------------------------------------------------------------------------------


def tried(data: Data, overrides: Sequence[str] = (), *, timed: bool = True) -> dict[str, Settings]:
    return candidates(settings_for(None, overrides, data), overrides, timed=timed)


@pytest.mark.parametrize("dense", [False, True])
def test_the_encoder_of_the_log_is_tried_first(dense: bool, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DENSE", 1 if dense else 10**9)
    names = list(tried(data))
    assert names[0] == kind_of(settings_for(None, [], data).settings.model) == ("gru4rec" if dense else "sasrec")
    assert sorted(names) == sorted(module.ENCODERS)


def test_hstu_is_tried_if_the_log_has_times_and_is_not_told_the_target_time(data: Data) -> None:
    """No other encoder knows when the request is made."""
    model = tried(data)["hstu"].model
    assert isinstance(model, HSTUSettings) and model.target_time is False
    assert "hstu" not in tried(data, timed=False) and len(tried(data, timed=False)) > 1


def test_all_are_trained_and_measured_alike(data: Data) -> None:
    overrides = ["train.epochs=3", "model.width=24", "evaluate.seen=keep", "counts=none"]
    settings = list(tried(data, overrides).values())
    assert len(settings) == len(module.ENCODERS)
    for other in settings[1:]:
        assert other.train == settings[0].train and other.evaluate == settings[0].evaluate
        assert other.counts == settings[0].counts and other.model.width == 24


def test_an_encoder_without_a_key_of_the_user_is_not_tried(data: Data) -> None:
    assert "gru4rec" not in tried(data, ["model.heads=2"])


# --- the plan in words --------------------------------------------------------------------------------------------

TRAIN = make_settings(read_recipe(DEFAULT_RECIPE), ["train.epochs=20", "train.minutes=10"]).train


def plan_of(epoch: float, *, seconds: float | None = 600.0, names: tuple[str, ...] = ()) -> Plan:
    """The plan of epochs that take so many seconds, and of a report of half a minute."""
    return Plan(names, Speed(training=0.75 * epoch, validation=0.25 * epoch, report=30.0), seconds)


def test_the_plan_names_each_value_and_reason() -> None:
    rows = [Derived("model.length", 50, "histories are short"), Derived("train.epochs", 20, "passes over the log")]
    first, *middle, last = plan_lines(rows, TRAIN, plan_of(6.0))
    assert "--set" in first
    assert [line.split(maxsplit=2) for line in middle] == [[each.key, str(each.value), each.reason] for each in rows]
    assert "2.0 minutes of training (20 epochs of 6.0 s)" in last and "0.5 minutes for the report" in last
    assert "Ctrl-C" in last


def test_the_plan_names_the_encoders_that_are_tried() -> None:
    """Each of the others makes the training longer by a part."""
    (line,) = plan_lines([], TRAIN, plan_of(6.0, names=("sasrec", "gru4rec")))
    assert "encoders: sasrec, gru4rec; the best on validation" in line
    assert f"{2 * (1 + FIRST_PART):.1f} minutes of training" in line
    (line,) = plan_lines([], TRAIN, plan_of(6.0))
    assert "encoders" not in line and "2.0 minutes of training" in line


def test_the_plan_reports_that_the_time_cuts_the_epochs() -> None:
    (line,) = plan_lines([], TRAIN, plan_of(120.0, seconds=540.0))
    assert "9.0 minutes of training" in line and "cut by train.minutes" in line
    (line,) = plan_lines([], TRAIN, plan_of(120.0, seconds=None))
    assert "40.0 minutes of training" in line and "cut" not in line, "there is no limit"


@given(st.integers(0, 5))
def test_the_parts_of_all_encoders_are_the_whole_time(others: int) -> None:
    plan = plan_of(1.0, names=tuple(f"encoder {number}" for number in range(others + 1)))
    assert plan.share + others * FIRST_PART * plan.share == pytest.approx(1)


# --- catalogues that take too long to score whole -------------------------------------------------------------------


def test_the_softmax_is_over_all_items_unless_a_pass_takes_too_long() -> None:
    """A billion scores of a pass take seconds; fifty million events and a million items take days."""
    small = shape_of(np.full(1000, 11), users=1000, items=10_000, targets=10_000)
    large = shape_of(np.full(1000, 51), users=1_000_000, items=1_000_000, targets=50_000_000)
    keys = [{each.key: each.value for each in derive(log)} for log in (small, large)]
    assert not any(key.startswith("objective.") or key == "evaluate.cases" for key in keys[0])
    assert keys[1]["objective.loss"] == "sampled-softmax" and keys[1]["objective.sampler"] == "uniform"
    assert 2000 <= int(keys[1]["evaluate.cases"]) < 1_000_000, "validation scores the whole catalogue, too"


def test_an_ensemble_is_derived_only_where_each_member_can_be_trained(data: Data) -> None:
    """Its softmax is over all items, and its items have a vector each."""
    members = {each.key: each.value for each in settings_for(None, [], data).derived}
    assert (members["model.width"], members["model.members"]) == (256, 2)
    for text in (
        "model.width=64",
        "model.items=codes",
        "model.similarity=cosine",
        "model=esasrec",
    ):
        chosen = settings_for(None, [text], data)
        assert not {each.key for each in chosen.derived} & {"model.members"}, text
        assert getattr(chosen.settings.model, "members", 1) == 1


def test_there_is_one_encoder_if_the_time_is_short() -> None:
    """A pass takes about nine seconds of each encoder: ten passes of two fit into fifteen minutes and not into two."""
    log = shape_of(np.full(1000, 96), users=4000, items=3200, targets=380_000)
    assert "model.members" in {each.key for each in derive(log)}
    assert "model.members" not in {each.key for each in derive(log, minutes=2)}
