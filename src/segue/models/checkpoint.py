"""A model ↔ two files: `model.json` says what to build, `weights.safetensors` fills it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from segue.errors import FolderError
from segue.folders import write_json
from segue.models.build import Builder, build_model, refuse_other_builder
from segue.models.facts import Facts
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.models.texts import HashedTexts

DESCRIPTION, WEIGHTS = "model.json", "weights.safetensors"


class ModelDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that is needed to build the model again."""

    n_items: int
    settings: ModelSettings
    kinds: tuple[str, ...] = ()


def save_model(model: SequenceModel, settings: ModelSettings, folder: Path) -> None:
    """Write both files into `folder`."""
    description = ModelDescription(n_items=model.items.n_items, settings=settings, kinds=model.kinds)
    write_json(folder / DESCRIPTION, description)
    save_file({name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}, folder / WEIGHTS)


def load_model(folder: Path, encoder: Builder | None = None) -> SequenceModel:
    """The model of a run folder, on the CPU, ready to answer. `encoder`: its builder, where that is from outside."""
    try:
        description = msgspec.json.decode((folder / DESCRIPTION).read_bytes(), type=ModelDescription)
        refuse_other_builder(description.settings, encoder, whose=str(folder))
        weights = load_file(folder / WEIGHTS)
        model = build_model(
            description.settings,
            description.n_items,
            generator=torch.Generator(),
            facts=_facts(description, weights),
            encoder=encoder,
        )
        model.load_state_dict(weights)
    except (OSError, KeyError, msgspec.MsgspecError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(":.")
        otherwise = "train it again" if encoder is None else "give its builder as it was, or train it again"
        raise FolderError(f"The model in {folder} cannot be read ({reason}); {otherwise}.") from error
    return _settled(model.eval().requires_grad_(requires_grad=False))


def _facts(description: ModelDescription, weights: dict[str, Tensor]) -> Facts:
    """What the model was built from, of its files."""
    settings = description.settings
    texts = ("items.texts.terms", "items.texts.weights", "items.texts.directions")
    return Facts(
        categories=weights["items.categories"].numpy() if settings.category else None,
        content=weights["items.content"].numpy() if settings.items != "ids" else None,
        kinds=description.kinds,
        texts=HashedTexts(*(weights[name] for name in texts)) if settings.texts else None,
    )


def _settled(model: SequenceModel) -> SequenceModel:
    """Its parts and weights as plain attributes: looking them up torch's way takes a tenth of a short answer's time."""
    for part in model.modules():
        part.__dict__.update(part._modules)
        part.__dict__.update(part._parameters)
    return model
