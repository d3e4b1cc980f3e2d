"""Tokens of whole events: their features, missing values, and the effect of later events."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from settings_tables import model_settings
from torch.nn import functional

from segue.config.recipes import read_recipe
from segue.config.settings import make_settings
from segue.data.batch import Batch
from segue.errors import SettingsError
from segue.layers.packed import PackedBatch, tensors
from segue.models.build import build_model
from segue.models.checkpoint import load_model, save_model
from segue.models.inputs import EventInputs
from segue.models.items.tables import DataFacts
from segue.models.sequence import SequenceModel

KINDS = ("buy", "look", "save@home")
UNKNOWN = len(KINDS)
N_ITEMS = 9
NOON = 1_767_268_800  # of the first day of 2026
ABSOLUTE, RELATIVE = 2 * 11 + 1, 2 * 32 + 1  # features of a signal


def settings_of(**changed: Any) -> Any:
    numbers = {"kind": "pinnerformer", "inputs": "events", "width": 6, "length": 9, "dropout": 0.0}
    numbers |= {} if changed.get("kind") == "gru4rec" else {"heads": 2}
    events = {"inputs__kind_width": 4} if changed.get("inputs", "events") == "events" else {}
    return model_settings(**{**numbers, **events, **changed})


def model_of(kinds: tuple[str, ...] = KINDS, **changed: Any) -> SequenceModel:
    """In double precision, with weights that are nowhere zero."""
    generator = torch.Generator().manual_seed(0)
    model = (
        build_model(settings_of(**changed), N_ITEMS, generator=generator, facts=DataFacts(kinds=kinds)).double().eval()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.3)
    model.items.clear_padding()
    return model


WHOLE: dict[str, Any] = {
    "items": [3, 1, 2, 5, 5],
    "times": [NOON, NOON + 60, NOON + 3600, NOON, NOON + 7],
    "kinds": [0, 1, 2, UNKNOWN, 1],
    "values": [1.0, None, 250.0, -3.0, 0.0],
}


def events(**changed: Any) -> PackedBatch:
    """A user of three events and one of two."""
    whole = {**WHOLE, **changed}
    return tensors(
        Batch(
            items=np.array(whole["items"]),
            times=np.array(whole["times"]),
            lengths=np.array([3, 2]),
            kinds=None if whole["kinds"] is None else np.array(whole["kinds"]),
            values=None if whole["values"] is None else np.array(whole["values"], dtype=np.float32),
        )
    )


def features_of(model: SequenceModel, batch: PackedBatch) -> torch.Tensor:
    """The input of the linear map [T, features]."""
    assert isinstance(model.inputs, EventInputs)
    features: list[torch.Tensor] = []
    handle = model.inputs.joined.register_forward_hook(lambda _, args, __: features.append(args[0]))
    tokens = model.inputs(model.items, batch)
    handle.remove()
    torch.testing.assert_close(tokens, model.inputs.joined(features[0]))
    return features[0]


def test_an_event_is_its_item_kind_value_and_times_side_by_side() -> None:
    model, batch = model_of(), events()
    assert isinstance(model.inputs, EventInputs) and model.inputs.kinds is not None
    widths = [6, 4, 2, ABSOLUTE, RELATIVE, RELATIVE]
    item, kind, value, absolute, newest, previous = torch.split(features_of(model, batch), widths, dim=1)
    directions = functional.normalize(model.items.into[batch.items], dim=1)
    torch.testing.assert_close(item, directions * math.sqrt(6))
    assert torch.equal(kind, model.inputs.kinds.table[[0, 1, 2, UNKNOWN, 1]])
    sizes = [math.log(2), 0, math.log(251), -math.log(4), 0]
    torch.testing.assert_close(value[:, 0], torch.tensor(sizes, dtype=torch.float64))
    assert value[:, 1].tolist() == [1, 0, 1, 1, 1]
    for part, seconds, periods in (
        (absolute, [NOON, NOON + 60, NOON + 3600, NOON, NOON + 7], model.inputs.periods[0]),
        (newest, [3600, 3540, 0, 7, 0], model.inputs.periods[1]),
        (previous, [0, 60, 3540, 0, 7], model.inputs.periods[2]),
    ):
        torch.testing.assert_close(part[:, :-1], periods(torch.tensor(seconds)))
        logs = [math.log(max(1, second)) / 14.7 for second in seconds]
        torch.testing.assert_close(part[:, -1], torch.tensor(logs, dtype=torch.float64))


def test_only_the_chosen_signals_are_features() -> None:
    assert features_of(model_of(inputs__times=[]), events()).shape[1] == 6 + 4 + 2
    assert features_of(model_of(inputs__times=["since-previous"]), events()).shape[1] == 6 + 4 + 2 + RELATIVE
    assert features_of(model_of(kinds=(), inputs__times=[]), events()).shape[1] == 6 + 2, (
        "a log without kinds has no kind features"
    )
    assert model_of().timed and not model_of(inputs__times=[]).timed


def test_without_times_the_signals_are_left_out_for_that_user_alone() -> None:
    model = model_of()
    features = features_of(model, events(times=[0, 0, 0, NOON, NOON + 7]))
    assert (features[:3, 12:] == 0).all()
    torch.testing.assert_close(features[3:], features_of(model, events())[3:])


def test_missing_kinds_and_values_are_those_of_events_without_them() -> None:
    model = model_of()
    none = [None] * 5
    assert torch.equal(model.encode(events(kinds=None)), model.encode(events(kinds=[UNKNOWN] * 5)))
    assert torch.equal(model.encode(events(values=None)), model.encode(events(values=none)))
    assert torch.isfinite(model.encode(events(values=[math.inf, -math.inf, 3e38, 0, None]))).all()


def test_the_unknown_kind_starts_at_zero() -> None:
    model = build_model(settings_of(), N_ITEMS, generator=torch.Generator(), facts=DataFacts(kinds=KINDS))
    assert isinstance(model.inputs, EventInputs) and model.inputs.kinds is not None
    assert (model.inputs.kinds.table[UNKNOWN] == 0).all() and (model.inputs.kinds.table[:UNKNOWN] != 0).all()


@given(position=st.integers(0, 2), what=st.sampled_from(["items", "kinds", "values"]))
def test_the_features_of_an_event_change_no_earlier_state(position: int, what: str) -> None:
    model = model_of()
    event: dict[str, Any] = {"items": 7, "kinds": 1 - (position == 1), "values": 12.0}
    changed = list(WHOLE[what])
    changed[position] = event[what]
    before, after = model.encode(events()), model.encode(events(**{what: changed}))
    assert torch.equal(after[:position], before[:position]) and torch.equal(after[3:], before[3:])
    assert not torch.equal(after[position], before[position])


def test_earlier_states_depend_on_the_newest_time_and_on_nothing_else_of_later_events() -> None:
    """And only through the time since the newest: without that signal they depend on nothing later."""
    later = [NOON, NOON + 60, NOON + 7200, NOON, NOON + 7]
    for times, dependent in ((["absolute", "since-newest"], True), (["absolute", "since-previous"], False)):
        model = model_of(inputs__times=times)
        before, after = model.encode(events()), model.encode(events(times=later))
        assert torch.equal(after[:2], before[:2]) is not dependent
        assert torch.equal(after[3:], before[3:])


def test_such_a_model_is_not_incremental() -> None:
    assert not model_of(positions="oldest").incremental and model_of(positions="oldest").window_step == 1
    assert model_of(positions="oldest", inputs="items").incremental


def test_queries_are_the_newest_states_in_every_layout_of_a_batch() -> None:
    model, batch = model_of(output="mlp", similarity="cosine", output__item_width=4), events()
    expected = model.head(model.encode(batch)[[2, 4]])
    torch.testing.assert_close(model.query(batch), expected)
    assert batch.with_padding().padded and expected.shape == (2, 4)
    alone = events()
    first = PackedBatch(
        items=alone.items[:3],
        times=alone.times[:3],
        lengths=torch.tensor([3]),
        kinds=None if alone.kinds is None else alone.kinds[:3],
        values=None if alone.values is None else alone.values[:3],
    )
    torch.testing.assert_close(model.query(first)[0], expected[0])


def test_kinds_are_saved_with_the_model(tmp_path: Path) -> None:
    model = model_of(output="mlp", similarity="cosine", similarity__temperature="learned").float()
    save_model(model, settings_of(output="mlp", similarity="cosine", similarity__temperature="learned"), tmp_path)
    again, batch = load_model(tmp_path), events()
    assert again.kinds == again.input_kinds == KINDS and model_of(inputs="items").input_kinds == ()
    model.requires_grad_(requires_grad=False)
    assert torch.equal(again.query(batch), model.query(batch))


def test_the_head_is_two_layers_over_all_of_a_state() -> None:
    model, states = model_of(output="mlp", output__item_width=4), torch.randn(3, 6, dtype=torch.float64)
    weights = dict(model.output.named_parameters())
    hidden = states @ weights["inner.weight"].T + weights["inner.bias"]
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    torch.testing.assert_close(model.head(states), hidden @ weights["outer.weight"].T + weights["outer.bias"])
    assert model.item_vectors().shape == (N_ITEMS + 1, 4)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"inputs": "items", "inputs__kind_width": 4}, "There is no key 'kind_width' in model.inputs = 'items'"),
        ({"output__item_width": 4}, "There is no key 'item_width' in model.output = 'none'"),
        ({"output": "mlp", "output__item_width": -1}, "model.output.item_width: expected a whole number >= 0, got -1"),
        ({"inputs__kind_width": 0}, "model.inputs.kind_width: expected a whole number >= 1, got 0"),
        ({"similarity__temperature": "learned"}, "There is no key 'temperature' in model.similarity = 'dot'"),
        ({"inputs__times": ["absolute", "absolute"]}, "must name each signal once"),
        (
            {"kind": "bert4rec"},
            "model.inputs has no kind 'events' with model = 'bert4rec'. Allowed: items, rated, ",
        ),
        ({"inputs__value_edges": [1.0]}, "There is no key 'value_edges' in model.inputs = 'events'"),
    ],
)
def test_impossible_settings_are_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        settings_of(**changed)


def test_one_temperature_is_enough() -> None:
    tables = read_recipe("pinnerformer")
    assert msgspec.to_builtins(make_settings(tables).model.similarity)["temperature"] == "learned"
    with pytest.raises(SettingsError, match=r"replaces objective\.temperature, got 0\.1: leave that at 1"):
        make_settings(tables, ["objective.temperature=0.1"])


def test_every_causal_builder_takes_events() -> None:
    """The blocks do not depend on the contents of tokens."""
    shapes: dict[str, dict[str, Any]] = {"sasrec": {}, "esasrec": {}, "gru4rec": {}, "hstu": {}}
    for builder, shape in shapes.items():
        model, batch = model_of(kind=builder, **shape), events()
        assert torch.isfinite(model.score_all(model.query(batch))).all()
        other = replace(batch, kinds=torch.zeros(5, dtype=torch.int64))
        assert not torch.equal(model.query(other)[0], model.query(batch)[0])


def test_at_initialisation_items_vary_more_than_times() -> None:
    model = build_model(settings_of(width=32), 2000, generator=torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        items = np.arange(1, 501)
        times = NOON + np.random.default_rng(0).integers(0, 10**7, 500).cumsum()
        of_items = Batch(items=items, times=np.full(500, NOON), lengths=np.ones(500, dtype=np.int64))
        of_times = Batch(items=np.full(500, 7), times=times, lengths=np.full(100, 5))
        by_item, by_time = (model.inputs(model.items, tensors(one)).var(dim=0).mean() for one in (of_items, of_times))
        assert by_item > 2 * by_time
