"""First weights: how a builder's matrices, tables and biases begin, drawn from a generator."""

from __future__ import annotations

import torch
from torch import nn

from segue.layers.positions import LearnedPositions
from segue.models.items import IdTable

POSITION_SPREAD = 0.02  # about that of the item vectors of a catalogue of thousands: at Xavier's own, the places
# drown the items in every normalised input, and the first epochs go into unlearning them
BERT_SPREAD = 0.02


def xavier_start(model: nn.Module, generator: torch.Generator) -> None:
    """Xavier-normal matrices and tables; small positions; biases and padding rows zero."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_normal_(parameter, generator=generator)
    for part in model.modules():
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, LearnedPositions):
            nn.init.normal_(part.table, std=POSITION_SPREAD, generator=generator)
        if isinstance(part, IdTable):
            part.clear_padding()


def truncated_normal_start(model: nn.Module, generator: torch.Generator) -> None:
    """Matrices, tables and the mask small and never beyond two deviations; biases and padding rows zero."""
    drawn = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    for part in model.modules():
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, IdTable) and part.mask is not None:
            drawn.append(part.mask)
    for parameter in drawn:
        nn.init.trunc_normal_(parameter, std=BERT_SPREAD, a=-2 * BERT_SPREAD, b=2 * BERT_SPREAD, generator=generator)
    for part in model.modules():
        if isinstance(part, IdTable):
            part.clear_padding()
