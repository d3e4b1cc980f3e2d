"""Settings by kind: tables and `--set` to structs and back, refusals, and the generated manual."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

import msgspec
import pytest
from command_line import CommandLine
from hypothesis import given
from hypothesis import strategies as st

from segue.cli.prepare import prepare
from segue.config.describe import describe, field_texts
from segue.config.recipes import read_recipe, recipe_names
from segue.config.settings import Settings, make_settings, settings_toml
from segue.data.settings import PrepareSettings
from segue.errors import SettingsError
from segue.kinds import parse_toml


def structs_of(annotation: Any) -> list[type[msgspec.Struct]]:
    """The structs in a type, found without the code that is tested."""
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return [member for member in members if isinstance(member, type) and issubclass(member, msgspec.Struct)]


def paths_of(struct: type[msgspec.Struct], path: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(struct):
        yield f"{path}{field.name}"
        for inner in structs_of(field.type):
            yield from paths_of(inner, f"{path}{field.name}.")


def all_structs(struct: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    yield struct
    for field in msgspec.structs.fields(struct):
        for inner in structs_of(field.type):
            yield from all_structs(inner)


STRUCTS = set(all_structs(Settings))


def test_the_manual_has_every_key_of_the_structs() -> None:
    keys = {path for path in paths_of(Settings) if not path.startswith("about")}
    sections = {"objective", "train", "evaluate"}  # plain tables, which have no value of their own
    assert {key.name for key in describe()} == keys - sections and len(keys) > 90


def test_every_key_and_every_kind_is_explained() -> None:
    assert len(STRUCTS) > 70
    for struct in STRUCTS:
        assert field_texts(struct).keys() >= set(struct.__struct_fields__), struct
        assert (inspect.getdoc(struct) or "").strip(), struct
    for key in describe():
        assert key.text.endswith((".", "]")) and all(text.endswith(".") for text in key.kinds.values()), key.name


def test_no_struct_has_more_keys_than_a_reader_can_hold() -> None:
    assert max(len(struct.__struct_fields__) for struct in STRUCTS) <= 15


def test_the_command_prints_the_manual(line: CommandLine) -> None:
    keys_of_manual = line.answers("settings", "objective")["settings"]
    assert [key["name"] for key in keys_of_manual] == [key.name for key in describe("objective")]
    calibration = next(key for key in keys_of_manual if key["name"] == "objective.loss.calibration")
    assert calibration["default"] == 0.75 and calibration["of"] == ["objective.loss=gbce"]
    line.refuses("settings", "objectiv", says=("no section 'objectiv'", "did you mean 'objective'", "model, objective"))
    line.refuses(
        "settings", "model.itms", says=("no key 'model.itms'", "did you mean 'model.items'", "segue settings model")
    )


def test_the_manual_of_one_key() -> None:
    assert [key.name for key in describe("model.similarity")] == [
        key.name for key in describe("model") if key.name.startswith("model.similarity")
    ]
    assert [key.name for key in describe("train.seed")] == ["train.seed"]


def test_the_manual_lists_a_key_once() -> None:
    names = [key.name for key in describe()]
    assert len(names) == len(set(names))
    length, inputs = (next(iter(describe(name))) for name in ("model.length", "model.inputs"))
    assert length.of == ("model!=bert4rec",) and [other.of for other in length.others] == [("model=bert4rec",)]
    assert length.lines().splitlines() == [
        "model.length = 200   (whole number >= 1)   with model!=bert4rec",
        "    Newest events of a history that the model reads, at most.",
        "             = 200   (whole number >= 2)   with model=bert4rec",
        "    Newest events of a history that the model reads, at most, with the mask that makes the query.",
    ]
    assert "(items | rated | combined)   with model=bert4rec" in inputs.lines()


def test_the_manual_shows_bounds_and_what_is_required() -> None:
    types = {name: describe(name)[0].type for name in ("train.seed", "evaluate.at", "model.items.column")}
    assert types == {
        "train.seed": "whole number >= 0 and <= 9223372036854775807",
        "evaluate.at": "list of 1 or more whole numbers >= 1",
        "model.items.column": "text of at least 1 character",
    }
    column = msgspec.to_builtins(describe("model.items.column")[0])
    assert column["required"] is True and "default" not in column
    assert "model.items.column = required   (" in describe("model.items.column")[0].lines()


def test_the_command_has_every_option_of_prepare() -> None:
    assert set(PrepareSettings.__struct_fields__) <= inspect.signature(prepare).parameters.keys()


# --- kinds over a recipe --------------------------------------------------------------------------------------------


def test_a_string_names_a_kind_with_its_defaults() -> None:
    short, long = ({"objective": {"loss": loss, "sampler": "uniform"}} for loss in ("gbce", {"kind": "gbce"}))
    assert make_settings(short) == make_settings(long)


def test_another_kind_starts_from_its_own_defaults() -> None:
    """The recipe sets heads, which a recurrent body lacks."""
    settings = make_settings(read_recipe("seq2seq"), ["model.body=gru"])
    assert msgspec.to_builtins(settings.model)["body"] == {"kind": "gru"}
    assert settings.model.width == make_settings(read_recipe("seq2seq")).model.width


def test_the_same_kind_keeps_the_keys_of_the_recipe() -> None:
    before = make_settings(read_recipe("gsasrec"))
    assert make_settings(read_recipe("gsasrec"), ["objective.loss=gbce"]) == before
    settings = make_settings(read_recipe("gsasrec"), ["objective.loss.calibration=0.5"])
    assert settings.objective.sampler == before.objective.sampler
    assert msgspec.to_builtins(settings.objective.loss) == {"kind": "gbce", "offset": -7.7, "calibration": 0.5}


def test_a_kind_that_an_encoder_cannot_have_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"has no kind 'rated' with model = 'seq2seq'\. Allowed: items\."):
        make_settings(read_recipe("seq2seq"), ["model.inputs=rated"])


@given(st.permutations(["objective.loss=gbce", "objective.loss.calibration=0.5", "objective.sampler=uniform"]))
def test_the_order_of_overrides_does_not_matter(overrides: list[str]) -> None:
    assert msgspec.to_builtins(make_settings({}, overrides).objective.loss)["calibration"] == 0.5


@given(st.permutations(["model.items.kind=codes", "model.items.parts=4"]))
def test_a_kind_may_be_spelt_out(overrides: list[str]) -> None:
    assert make_settings({}, overrides) == make_settings({}, ["model.items=codes", "model.items.parts=4"])


def test_a_table_keeps_the_kind_in_force() -> None:
    settings = make_settings(read_recipe("sasrec-sampled"), ["objective.sampler={negatives = 4}"])
    assert msgspec.to_builtins(settings.objective.sampler) == {"kind": "uniform", "negatives": 4, "shared": True}


def test_distance_buckets_need_a_minimum() -> None:
    wide = ["model=transformer", "model.positions=buckets", "model.positions.count=32"]
    make_settings({}, [*wide, "model.positions.furthest=17"])
    with pytest.raises(SettingsError, match="must be above half of"):
        make_settings({}, [*wide, "model.positions.furthest=16"])


@pytest.mark.parametrize("name", recipe_names())
def test_written_settings_are_read_back(name: str) -> None:
    settings = make_settings(read_recipe(name))
    assert make_settings(parse_toml(settings_toml(settings).encode(), name)) == settings


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("objective.loss=hinge", "objective.loss has no kind 'hinge'. Allowed: softmax, sampled-softmax, bce, gbce, "),
        ("objective.loss.offset=1", "There is no key 'offset' in objective.loss = 'softmax'. It has no keys."),
        ("model.kernel=8", "There is no key 'kernel' in model = 'esasrec'. Allowed: width, depth, length, "),
        ("model.width.more=1", "model.width is a single value and has no key 'more': set model.width itself."),
        ("model.width=0", "model.width: expected a whole number >= 1, got 0."),
        ("model.width=wide", "model.width: expected a whole number >= 1, got 'wide'."),
        ("model.items=categories", "model.items needs the key 'column'."),
        ("train.learning_rate=inf", "train.learning_rate: expected a finite number, got inf."),
        ("model=3", "model must be a kind (sasrec, esasrec, "),
        ("objective=bce", "objective must be a table of keys, got 'bce'."),
        ("width=8", "There is no section 'width' in the settings. Allowed: model, objective, "),
        ("about.summary=x", "--set takes no key of [about]"),
        ("model={width = 32}", "--set takes one key of model at a time, got the table {'width': 32}"),
        ("objective.loss={kind = [1]}", "objective.loss has no kind [1]. Allowed: softmax, "),
        (
            "model.positions=rotary",
            "model.positions has no kind 'rotary' with model = 'esasrec'. Allowed: newest, oldest.",
        ),
        ("evaluate.at=[5, 0]", "evaluate.at[1]: expected a whole number >= 1, got 0."),
        ("evaluate.at=5", "evaluate.at: expected a list of 1 or more whole numbers >= 1, got 5."),
        ("train.equal=true", "There is no key 'equal' in [train]. Allowed: epochs, patience, "),
        ("objective.equal_users=3", "objective.equal_users: expected true | false, got 3."),
        ("train.seed=" + "9" * 5000, "train.seed: expected a whole number >= 0 and <= 9223372036854775807, got '999"),
        ("train.seed=" + "9" * 4000, "train.seed: expected a whole number >= 0 and <= 9223372036854775807, got 999"),
        ("train.device=tpu", "train.device has no value 'tpu'. Allowed: auto, cpu, cuda."),
        (
            "model.items={kind = 'categories', column = ''}",
            "model.items.column: expected a text of at least 1 ",
        ),
    ],
)
def test_a_refusal_says_what_is_allowed(override: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as error:
        make_settings({}, [override])
    assert str(error.value).startswith(sentence), str(error.value)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize(
    ("positive", "sentence"),
    [
        ("['buy']", "objective.task.positive[0] must be a table of keys, got 'buy'."),
        (
            "[{kind = 'buy'}, {kin = 'buy'}]",
            "There is no key 'kin' in [objective.task.positive[1]] (did you ",
        ),
        ("[{kind = 3}]", "objective.task.positive[0].kind: expected a text, got 3."),
        ("'buy'", "objective.task.positive: expected a list of tables of kind, min_value, got 'buy'."),
    ],
)
def test_a_refusal_inside_a_list_names_the_entry(positive: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as error:
        make_settings({}, ["objective.task=next-action", f"objective.task.positive={positive}"])
    assert str(error.value).startswith(sentence), str(error.value)


def test_a_refusal_of_an_entry_lists_the_values() -> None:
    with pytest.raises(SettingsError, match=r"inputs\.times\[1\] has no value 'never'\. Allowed: absolute, "):
        make_settings({}, ["model.inputs=events", "model.inputs.times=['absolute', 'never']"])


def test_a_number_of_too_many_digits_is_not_toml() -> None:
    with pytest.raises(SettingsError, match=r"mine\.toml is not TOML: Exceeds the limit \(4300 digits\)[^;]*\.$"):
        parse_toml(b"[train]\nseed = " + b"9" * 5000, "mine.toml")
