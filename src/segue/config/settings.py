"""All sections of the settings, and the choices that do not fit together."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

import msgspec

from segue.counts.settings import CountsSettings, NoCountsSettings
from segue.errors import SettingsError
from segue.evaluation.settings import EvaluateSettings
from segue.index.settings import AutoSettings, IndexSettings, refuse_misfit
from segue.kinds import KIND, Table, decode, kind_of, near, override, to_toml
from segue.models.encoders import ModelSettings
from segue.models.encoders.esasrec import ESASRecSettings
from segue.models.encoders.narm import NARMSettings, ReinforceChoiceSettings
from segue.models.encoders.sasrec import SASRecSettings
from segue.models.items.coded import CodeSettings
from segue.models.items.tables import IdSettings
from segue.models.similarity.dot import CosineSettings
from segue.models.similarity.mol import MoLSettings
from segue.objective.losses.catalogue import LambdaRankSettings, SCESettings, SoftmaxSettings
from segue.objective.settings import SAMPLED, ObjectiveSettings
from segue.objective.tasks.continuation import Continuation
from segue.objective.tasks.masked_item import MaskedItem
from segue.training.settings import TrainSettings


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The description of a recipe."""

    summary: str = ""
    """Its purpose, in a sentence."""
    paper: str = ""
    """The paper that it follows."""
    scored: str = ""
    """The metrics that it reached, and on which log."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of a run, by section."""

    about: About = About()
    """The description of a recipe."""
    model: ModelSettings = ESASRecSettings()
    """The encoder and its parts."""
    objective: ObjectiveSettings = ObjectiveSettings()
    """What the model is trained for."""
    train: TrainSettings = TrainSettings()
    """How the model is trained."""
    counts: CountsSettings = NoCountsSettings()
    """Whether item-to-item counts are added to the model's scores."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """How the model is measured."""
    index: IndexSettings = AutoSettings()
    """How the best items of a query are found."""

    def __post_init__(self) -> None:
        self._check_task()
        if self.train.items != "random" and not isinstance(self.model.items, IdSettings):
            raise SettingsError(
                f"train.items = {self.train.items!r} needs a vector for each id, which model.items = "
                f"{kind_of(self.model.items)!r} does not have: choose train.items = 'random', or model.items = 'ids'."
            )
        model, loss = self.model, self.objective.loss
        if isinstance(model, SASRecSettings) and model.members > 1 and not isinstance(loss, SoftmaxSettings):
            raise SettingsError(
                f"model.members = {model.members} needs objective.loss = 'softmax', got {kind_of(loss)!r}: choose it, "
                "or model.members = 1."
            )
        mixture = isinstance(model.similarity, MoLSettings)
        if mixture and isinstance(loss, SoftmaxSettings | SCESettings):
            raise SettingsError(
                f"objective.loss = {kind_of(loss)!r} needs scores that are inner products, and model.similarity = "
                f"'mol' mixes several: choose one of the losses {SAMPLED}, or model.similarity = 'dot'."
            )
        sampled_attention = isinstance(model, NARMSettings) and isinstance(model.choice, ReinforceChoiceSettings)
        if sampled_attention and isinstance(loss, SCESettings | LambdaRankSettings):
            raise SettingsError(
                "model.choice = 'reinforce' needs the loss of each query, which objective.loss = "
                f"{kind_of(loss)!r} does not give: choose objective.loss = 'softmax' or one of {SAMPLED}, or another "
                "model.choice."
            )
        learned = isinstance(model.similarity, CosineSettings) and model.similarity.temperature == "learned"
        if learned and self.objective.temperature != 1:
            raise SettingsError(
                "model.similarity.temperature = 'learned' replaces objective.temperature, got "
                f"{self.objective.temperature}: leave that at 1, or model.similarity.temperature at 'fixed'."
            )
        refuse_misfit(self.index, mixture=mixture, codes=isinstance(model.items, CodeSettings))

    def _check_task(self) -> None:
        """Refuse an encoder that cannot learn the task."""
        builder, task = kind_of(self.model), kind_of(self.objective.task)
        masked = isinstance(self.objective.task, MaskedItem)
        continued = isinstance(self.objective.task, Continuation)
        if self.model.bidirectional and not masked:
            raise SettingsError(
                f"model = {builder!r} is bidirectional and would see the targets of objective.task = {task!r}: choose "
                "objective.task = 'masked-item', or another model."
            )
        if masked and not self.model.bidirectional:
            raise SettingsError(
                "objective.task = 'masked-item' masks events between others, and model = "
                f"{builder!r} is causal: choose model = 'bert4rec', or another task."
            )
        if self.model.decodes and not continued:
            raise SettingsError(
                f"model = {builder!r} has a decoder, which objective.task = {task!r} does not train: choose "
                "objective.task = 'continuation', or another model."
            )
        if continued and not self.model.decodes:
            raise SettingsError(
                f"objective.task = 'continuation' trains a decoder, and model = {builder!r} has none: choose model = "
                "'seq2seq', or another task."
            )
        if continued and self.objective.temperature != 1:
            raise SettingsError(
                "objective.task = 'continuation' takes the probabilities of a plan's items from the scores as they "
                f"are: leave objective.temperature at 1, got {self.objective.temperature}."
            )
        if continued and isinstance(self.model.similarity, CosineSettings):
            raise SettingsError(
                "objective.task = 'continuation' needs scores that make probabilities, and a cosine lies between -1 "
                "and 1: choose model.similarity = 'dot'."
            )


SECTIONS = tuple(name for name in Settings.__struct_fields__ if name != "about")


def make_settings(tables: Table, overrides: Sequence[str] = ()) -> Settings:
    """Tables with `section.key=value` on top, every name and value checked. Of several overrides, those of a choice
    come before those of its keys."""
    pairs = sorted((_parse_override(text) for text in overrides), key=lambda pair: len(pair[0]))
    for keys, value in pairs:
        tables = override(tables, Settings, keys, value)
    return decode(tables, Settings)


def _parse_override(text: str) -> tuple[list[str], Any]:
    """`objective.loss.calibration=0.5` as the keys and the value."""
    name, equals, value_text = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise SettingsError(f"--set takes section.key=value (such as model.width=128), got {text!r}.")
    if keys[0] == "about":
        raise SettingsError("--set takes no key of [about], which only describes a recipe.")
    refuse_unknown_section(keys[0])
    if len(keys) > 1 and keys[-1] == KIND:
        keys = keys[:-1]  # model.items.kind=codes is model.items=codes
    try:
        value = tomllib.loads(f"value = {value_text}")["value"]
    except ValueError:  # no TOML, or a number of more digits than Python reads
        value = value_text.strip()
    if len(keys) == 1 and isinstance(value, dict):
        raise SettingsError(f"--set takes one key of {name} at a time, got the table {value!r}: set {name}.KEY=value.")
    return keys, value


def refuse_unknown_section(name: str) -> None:
    """Refuse a section that the settings do not have. `about` is not offered: only a recipe has it."""
    if name not in SECTIONS:
        raise SettingsError(
            f"There is no section {name!r} in the settings{near(name, SECTIONS)}. Allowed: {', '.join(SECTIONS)}."
        )


def settings_toml(settings: Settings) -> str:
    """The settings as TOML, every key written out."""
    return to_toml(msgspec.to_builtins(settings))
