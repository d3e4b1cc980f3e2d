"""Random initialisation of a model's weights; each function returns its model."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from segue.layers.blocks.hstu import HSTUBlock
from segue.layers.positions.embeddings import LearnedPositions, SinusoidalPositions
from segue.layers.positions.relative import RelativeBuckets
from segue.models.inputs import EventInputs, KindTable, ValueTable
from segue.models.items.tables import ItemTable

POSITION_SPREAD = 0.02  # about that of item vectors in a catalogue of thousands: with Xavier's, positions would
# dominate items in every normalised input, and the first epochs would have to unlearn them
SPREAD = 0.02  # standard deviation in BERT, HSTU and the Transformer

M = TypeVar("M", bound=nn.Module)


def xavier_init(model: M, generator: torch.Generator) -> M:
    """Xavier-normal matrices and tables; small positions and times; biases and padding rows zero."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_normal_(parameter, generator=generator)
    for part in model.modules():
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, LearnedPositions):
            nn.init.normal_(part.table, std=POSITION_SPREAD, generator=generator)
        if isinstance(part, ItemTable):
            part.clear_padding()
        if isinstance(part, KindTable):
            part.clear_unknown()
        if isinstance(part, EventInputs):
            part.quieten_times()
    return model


def recurrent_init(model: M, generator: torch.Generator) -> M:
    """Xavier-normal matrices and tables, orthogonal matrices from state to gates; biases and padding rows zero."""
    xavier_init(model, generator)
    for part in model.modules():
        if isinstance(part, nn.GRU):
            for name, parameter in part.named_parameters():
                if name.startswith("weight_hh"):
                    for gate in parameter.detach().chunk(3):
                        nn.init.orthogonal_(gate, generator=generator)
    zero_recurrent_biases(model)
    return model


def zero_recurrent_biases(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, nn.GRU):
            for name, parameter in part.named_parameters():
                if name.startswith("bias"):
                    nn.init.zeros_(parameter)


def truncated_normal_init(model: M, generator: torch.Generator) -> M:
    """Matrices, tables and the mask from a truncated normal distribution; biases and padding rows zero."""
    parameters = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    for part in model.modules():
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, ItemTable) and part.mask is not None:
            parameters.append(part.mask)
    for parameter in parameters:
        _truncated_normal_(parameter, SPREAD, generator)
    for part in model.modules():
        if isinstance(part, ItemTable):
            part.clear_padding()
    return model


def hstu_init(model: M, generator: torch.Generator) -> M:
    """Small item and value tables, positions with the spread of a scaled item, other matrices Xavier-normal. HSTU
    blocks have small products and biases, so that each is close to the identity at first."""
    xavier_init(model, generator)
    for part in model.modules():
        if isinstance(part, LearnedPositions):
            _truncated_normal_(part.table, part.table.shape[1] ** -0.5, generator)
        if isinstance(part, ValueTable):
            _truncated_normal_(part.table, SPREAD, generator)
        if isinstance(part, ItemTable):
            for table in part.learned:
                _truncated_normal_(table, SPREAD, generator)
            part.clear_padding()
        if isinstance(part, HSTUBlock):
            nn.init.normal_(part.inner.weight, std=SPREAD, generator=generator)
            nn.init.xavier_uniform_(part.outer.weight, generator=generator)
            for bias in (part.bias.positions, part.bias.times):
                nn.init.normal_(bias, std=SPREAD, generator=generator)
    return model


def transformer_init(model: M, generator: torch.Generator) -> M:
    """Xavier-normal matrices; small item vectors and distance biases. With sinusoidal positions, scaled item vectors
    are as large as the sinusoids, which would dominate smaller ones."""
    xavier_init(model, generator)
    parts = list(model.modules())
    sinusoidal = any(isinstance(part, SinusoidalPositions) for part in parts)
    for part in parts:
        if isinstance(part, RelativeBuckets):
            nn.init.normal_(part.table, std=SPREAD, generator=generator)
        if isinstance(part, ItemTable):
            for table in part.learned:
                nn.init.normal_(table, std=SPREAD, generator=generator)
            if sinusoidal and part.learned:
                nn.init.normal_(part.into, std=part.width**-0.5, generator=generator)
            part.clear_padding()
    return model


def _truncated_normal_(parameter: Tensor, spread: float, generator: torch.Generator) -> None:
    nn.init.trunc_normal_(parameter, std=spread, a=-2 * spread, b=2 * spread, generator=generator)
