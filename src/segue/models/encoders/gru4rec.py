"""GRU4Rec: Hidasi et al., "Session-based Recommendations with Recurrent Neural Networks", ICLR 2016, and Hidasi and
Karatzoglou, "Recurrent Neural Networks with Top-k Gains for Session-based Recommendations", CIKM 2018."""

from __future__ import annotations

import torch
from torch import nn

from segue.kinds import CountOrZero
from segue.layers.blocks.recurrent import gru_blocks
from segue.layers.positions.embeddings import NoPositions
from segue.models.sequence import Parts, SequenceModel
from segue.models.settings import EncoderSettings
from segue.models.weight_init import recurrent_init


class GRU4RecSettings(EncoderSettings, frozen=True, tag="gru4rec"):
    """GRU4Rec: gated recurrent units.

    The original trains on parallel sessions, one event a step, and truncates gradients after one event; here gradients
    go through whole histories. Its cell is the older form of the GRU: see `GRUBlock`. Its losses are `top1` and `bpr`
    in the first paper, `top1-max` and `bpr-max` in the second."""

    state_width: CountOrZero = 0
    """Features of a recurrent state; 0: as many as a token has."""

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        """The layers, and a linear map from a state to a query."""
        states = self.state_width or parts.width
        model = SequenceModel(
            parts,
            NoPositions(parts.tokens(self.length)),
            gru_blocks(parts.width, states, self.depth, self.dropout),
            scale=parts.width**0.5,
            dropout=self.dropout,
            query_transform=nn.Linear(states, self.width),
        )
        return recurrent_init(model, generator)
