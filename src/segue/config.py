"""Recipes and `--set` → settings: every room's section, checked when read."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from segue.errors import SettingsError
from segue.evaluation.settings import EvaluateSettings
from segue.index.settings import IndexSettings, refuse_misfit
from segue.models.settings import BIDIRECTIONAL, CONTINUING, ModelSettings
from segue.objective.settings import SAMPLED, ObjectiveSettings
from segue.training.settings import TrainSettings

DEFAULT_RECIPE = "default"
CHANGEABLE = ("train.epochs", "train.patience", "train.learning_rate", "train.threads", "train.device")
"""What may differ when training is taken up again."""


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a recipe says of itself."""

    summary: str = ""
    """What it is for, in a sentence."""
    paper: str = ""
    scored: str = ""
    """What it reached here, on which log."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All sections."""

    about: About = About()
    model: ModelSettings = ModelSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    index: IndexSettings = IndexSettings()

    def __post_init__(self) -> None:
        """Refuse what does not fit together: an encoder and its task, an index or a loss and the similarity."""
        both_ways, masked = self.model.builder in BIDIRECTIONAL, self.objective.task == "masked-item"
        if both_ways and not masked:
            raise SettingsError(
                f"model.builder = {self.model.builder!r} looks both ways and would see the answers of objective.task = "
                f"{self.objective.task!r}: choose objective.task = 'masked-item', or another builder."
            )
        if masked and not both_ways:
            raise SettingsError(
                f"objective.task = 'masked-item' hides events between others, and model.builder = "
                f"{self.model.builder!r} looks back only: choose model.builder = 'bert4rec', or another task."
            )
        self._check_continuation()
        if self.model.similarity == "mol" and self.objective.loss in ("softmax", "sce"):
            raise SettingsError(
                f"objective.loss = {self.objective.loss!r} needs scores that are inner products, and model.similarity "
                f"= 'mol' mixes several: choose one of the losses {', '.join(SAMPLED)}, or model.similarity = 'dot'."
            )
        if self.model.choice == "reinforce" and self.objective.loss in ("sce", "lambdarank"):
            raise SettingsError(
                f"model.choice = 'reinforce' learns from what each question lost, and objective.loss = "
                f"{self.objective.loss!r} does not say it: choose objective.loss = 'softmax' or one of "
                f"{', '.join(SAMPLED)}, or another model.choice."
            )
        if self.model.temperature == "learned" and self.objective.temperature != 1:
            raise SettingsError(
                "model.temperature = 'learned' takes the place of objective.temperature, got "
                f"{self.objective.temperature}: leave that at 1, or model.temperature at 'fixed'."
            )
        refuse_misfit(self.index.kind, similarity=self.model.similarity, items=self.model.items)

    def _check_continuation(self) -> None:
        builder, task = self.model.builder, self.objective.task
        if builder in CONTINUING and task != "continuation":
            raise SettingsError(
                f"model.builder = {builder!r} reads a history whole and then continues it, and objective.task = "
                f"{task!r} asks for something else: choose objective.task = 'continuation', or another builder."
            )
        if task == "continuation" and builder not in CONTINUING:
            raise SettingsError(
                "objective.task = 'continuation' asks a decoder for item after item, and model.builder = "
                f"{builder!r} has none: choose model.builder = 'seq2seq', or another task."
            )
        if task == "continuation" and self.objective.temperature != 1:
            raise SettingsError(
                "objective.task = 'continuation' takes the chances of a plan's items from the scores as they are: "
                f"leave objective.temperature at 1, got {self.objective.temperature}."
            )
        if task == "continuation" and self.model.similarity == "cosine":
            raise SettingsError(
                "objective.task = 'continuation' needs scores that make chances, and a cosine lies between -1 and 1: "
                "choose model.similarity = 'dot'."
            )


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "about": About,
    "model": ModelSettings,
    "objective": ObjectiveSettings,
    "train": TrainSettings,
    "evaluate": EvaluateSettings,
    "index": IndexSettings,
}


def recipe_names() -> list[str]:
    """The recipes shipped with the package."""
    return sorted(path.name.removesuffix(".toml") for path in _recipes().iterdir() if path.name.endswith(".toml"))


def _recipes() -> Any:
    return resources.files("segue") / "recipes"


def read_recipe(recipe: str | Path) -> dict[str, Any]:
    """A shipped recipe by name, or a TOML file, as tables."""
    name = str(recipe)
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise SettingsError(f"The recipe file {name} does not exist.")
        return parse_toml(path.read_bytes(), name)
    if name not in recipe_names():
        raise SettingsError(
            f"There is no recipe {name!r}{_near(name, recipe_names())}; "
            f"there are {', '.join(recipe_names())}, or name a FILE.toml."
        )
    return parse_toml((_recipes() / f"{name}.toml").read_bytes(), name)


def parse_toml(content: bytes, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{name} is not TOML: {error}.") from error


def make_settings(tables: dict[str, Any], overrides: Sequence[str] = ()) -> Settings:
    """Tables with `section.key=value` laid over them, every name and value checked."""
    merged = {section: dict(table) if isinstance(table, dict) else table for section, table in tables.items()}
    for section, table in merged.items():
        _known("section", section, list(SECTIONS))
        if not isinstance(table, dict):
            raise SettingsError(f"[{section}] must be a table of keys, got {table!r}.")
        for key in table:
            _known(f"key of [{section}]", key, list(SECTIONS[section].__struct_fields__))
    for override in overrides:
        section, key, value = _parse_override(override)
        merged.setdefault(section, {})[key] = value
    return Settings(**{name: _section(name, merged.get(name, {})) for name in SECTIONS})


def _section(name: str, table: dict[str, Any]) -> Any:
    try:
        return msgspec.convert(table, SECTIONS[name])
    except msgspec.ValidationError as error:
        text = str(error)
        if isinstance(error.__cause__, SettingsError):
            raise error.__cause__ from None
        what, _, path = text.partition(" - at `$.")
        key = path.rstrip("`")
        given = f", got {table[key]!r}" if key in table and repr(table[key]) not in what else ""
        raise SettingsError(
            f"{name}.{key}: {what[0].lower()}{what[1:]}{given}. {_choices(name, key)}".strip()
        ) from error


def _choices(section: str, key: str) -> str:
    for field in msgspec.structs.fields(SECTIONS[section]):
        values = getattr(field.type, "__args__", ())
        if field.name == key and values and all(isinstance(value, str) for value in values):
            return f"Allowed: {', '.join(values)}."
    return ""


def _parse_override(override: str) -> tuple[str, str, Any]:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot):
        raise SettingsError(f"--set takes section.key=value (such as model.width=128), got {override!r}.")
    choosable = [name for name in SECTIONS if name != "about"]
    _known("section", section, choosable)
    _known(f"key of [{section}]", key, list(SECTIONS[section].__struct_fields__))
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    return section, key, value


def _known(kind: str, name: str, allowed: list[str]) -> None:
    if name not in allowed:
        raise SettingsError(
            f"There is no {kind} {name!r} in the settings{_near(name, allowed)}. Allowed: {', '.join(allowed)}."
        )


def _near(name: str, allowed: list[str]) -> str:
    near = difflib.get_close_matches(name, allowed, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def settings_toml(settings: Settings) -> str:
    """The settings as TOML, every key written out, so that a run says all it was made with."""
    lines: list[str] = []
    for section, table in msgspec.to_builtins(settings).items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in table.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    """JSON writes strings, numbers, booleans and lists as TOML does, but not tables."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple) and any(isinstance(inner, dict) for inner in value):
        return "[" + ", ".join(_toml_value(inner) for inner in value) + "]"
    return msgspec.json.encode(value).decode()


def refuse_changes(saved: Settings, wanted: Settings) -> None:
    """Training can only be taken up with the settings it began with, but for those in CHANGEABLE."""
    before, after = msgspec.to_builtins(saved), msgspec.to_builtins(wanted)
    measured = ("days", "seen", "target")  # by these the best epoch is chosen, so all must be measured alike
    changed = [
        f"{section}.{key}"
        for section, table in before.items()
        for key in table
        if (section not in ("about", "evaluate", "index") or key in measured)
        and after[section][key] != table[key]
        and f"{section}.{key}" not in CHANGEABLE
    ]
    if changed:
        raise SettingsError(
            f"--resume cannot change {', '.join(changed)}: the run began with other values. "
            f"It can change {', '.join(CHANGEABLE)}; otherwise train anew into another folder."
        )


def refuse_another_model(saved: Settings, wanted: Settings, *, whose: str) -> None:
    """Weights can only be carried over to a model of the same settings; `whose` names the run that has them."""
    before, after = msgspec.to_builtins(saved.model), msgspec.to_builtins(wanted.model)
    changed = [f"model.{key}" for key in before if after[key] != before[key]]
    if changed:
        raise SettingsError(
            f"--from cannot change {', '.join(changed)}: the weights of {whose} fit no other model. Leave it as it is "
            "there, or train anew without --from."
        )
