"""A model ↔ two files: the section `model` of `settings.toml`, and `weights.safetensors`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from segue.errors import FolderError, SettingsError
from segue.kinds import decode, parse_toml, to_toml
from segue.models.build import Builder, build_model, refuse_other_builder
from segue.models.encoders import ModelSettings
from segue.models.items.content import VectorSettings
from segue.models.items.tables import DataFacts
from segue.models.sequence import SequenceModel
from segue.models.text.encoder import TextEncoder

SETTINGS, WEIGHTS = "settings.toml", "weights.safetensors"
FACTS = ("categories", "content", "codes")  # buffers of item tables that a model is built from
TEXTS = "items.texts."
METADATA = "segue"


class _Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The sizes that a model is built with, besides its settings; stored in the header of the weights."""

    n_items: int
    kinds: tuple[str, ...]


def save_model(model: SequenceModel, settings: ModelSettings, folder: Path) -> None:
    """Write both files into `folder`."""
    (folder / SETTINGS).write_text(to_toml({"model": msgspec.to_builtins(settings)}), encoding="utf-8")
    save_weights(model, folder / WEIGHTS)


def save_weights(model: SequenceModel, path: Path) -> None:
    """Write the weights and buffers of a model, and as metadata the number of items and the kinds of events."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    shape = _Shape(n_items=model.items.n_items, kinds=model.kinds)
    save_file(tensors, path, metadata={METADATA: msgspec.json.encode(shape).decode()})  # one key: several have no order


def fill_model(model: SequenceModel, path: Path) -> None:
    """Load the weights that `save_weights` wrote into a model of the same shape."""
    model.load_state_dict(_read(path))


def read_model_settings(folder: Path) -> ModelSettings:
    """The section `model` of a run folder's settings."""
    try:
        table = parse_toml((folder / SETTINGS).read_bytes(), str(folder / SETTINGS))["model"]
        return decode(table, ModelSettings, path="model")  # type: ignore[arg-type]  # a union is a type to msgspec
    except (OSError, KeyError, SettingsError) as error:
        raise FolderError(f"The model in {folder} cannot be read ({error}); train it again.") from error


def load_model(folder: Path, encoder: Builder | None = None, *, settings: ModelSettings | None = None) -> SequenceModel:
    """The model of a run folder, on the CPU, in evaluation mode. `encoder`: its builder, if that is not segue's;
    `settings`: what `read_model_settings` returned, if it was read already."""
    try:
        settings = settings or read_model_settings(folder)
        refuse_other_builder(settings, encoder, whose=str(folder))
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            shape = msgspec.json.decode((file.metadata() or {})[METADATA], type=_Shape)
        weights = load_file(folder / WEIGHTS)
        stored = {name: weights[f"items.{name}"].numpy() for name in FACTS if f"items.{name}" in weights}
        facts = DataFacts(**stored, kinds=shape.kinds, texts=_texts(settings, weights))
        model = build_model(settings, shape.n_items, generator=torch.Generator(), facts=facts, encoder=encoder)
        model.load_state_dict(weights)
    except (OSError, KeyError, ValueError, msgspec.MsgspecError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(":.")
        advice = "train it again" if encoder is None else "give its builder as it was, or train it again"
        raise FolderError(f"The model in {folder} cannot be read ({reason}); {advice}.") from error
    return _with_plain_attributes(model.eval().requires_grad_(requires_grad=False))


def _texts(settings: ModelSettings, weights: dict[str, Tensor]) -> TextEncoder | None:
    if not (isinstance(settings.items, VectorSettings) and settings.items.texts):
        return None
    buffers = {name.removeprefix(TEXTS): tensor for name, tensor in weights.items() if name.startswith(TEXTS)}
    return settings.items.text_encoder.encoder(**buffers)


def saved_texts(path: Path, settings: ModelSettings) -> TextEncoder | None:
    """The text encoder that `save_weights` wrote with a model of these settings; None if it has none."""
    return _texts(settings, _read(path))


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise FolderError(f"{path} cannot be read ({error}); remove its folder and train again.") from error


def _with_plain_attributes(model: SequenceModel) -> SequenceModel:
    """The same model with its parts and weights also as plain attributes, to skip torch's lookup.

    Without it, one `recommend` takes 10 % more CPU for SASRec (width 64, 5 or 50 events), 7 % for HSTU, and 3 % for
    HSTU with a KV cache: medians of 1,500 calls, alternated in one process, on one thread.
    """
    for part in model.modules():
        part.__dict__.update(part._modules)
        part.__dict__.update(part._parameters)
    return model
