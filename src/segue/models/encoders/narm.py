"""NARM: Li et al., "Neural Attentive Session-based Recommendation", CIKM 2017."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from segue.layers.blocks.narm import NarmBlock
from segue.layers.blocks.recurrent import GRUBlock
from segue.layers.positions.embeddings import NoPositions
from segue.models.inputs import make_inputs
from segue.models.items.tables import ItemTable
from segue.models.sampled_attention import SampledAttention
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.models.similarity.mol import make_similarity
from segue.models.similarity.outputs import make_output
from segue.models.weight_init import recurrent_init


class NarmModel(SequenceModel):
    """A `SequenceModel` whose last block may have drawn what it looked at: then its states carry the chances."""

    entropy_bonus = 0.0

    def sampled_attention(self, states: Tensor) -> SampledAttention | None:
        """See `SamplingModel`."""
        if states.shape[1] == self.inputs.width:
            return None
        return SampledAttention(log_probability=states[:, -2], entropy=states[:, -1], bonus=self.entropy_bonus)


def narm(settings: ModelSettings, items: ItemTable, generator: torch.Generator) -> SequenceModel:
    """Layers of gated recurrent units; then each state looks back at its user's states, and what it finds is joined to
    it and mapped to what is compared with items.

    As its authors' program has it and not as the paper says, one recurrent network serves both parts, and weights add
    up to one. With `scores` 'additive' and `choice` 'soft' it is the original, but for its units, whose gates are hard
    sigmoids there, and for its sessions, of which it keeps the oldest 19 events.
    """
    inputs = make_inputs(settings, items)
    states = settings.state_width or inputs.width
    model = NarmModel(
        items,
        inputs,
        NoPositions(settings.length * inputs.tokens_an_event),
        [
            *(GRUBlock(states if layer else inputs.width, states, settings.dropout) for layer in range(settings.depth)),
            NarmBlock(
                states,
                inputs.width,
                settings.dropout,
                scores=settings.scores,
                choice=settings.choice,
                temperature=settings.choice_temperature,
            ),
        ],
        norm=nn.Identity(),
        scale=inputs.width**0.5,
        dropout=settings.dropout,
        similarity=make_similarity(settings),
        output=make_output(settings),
    )
    model.entropy_bonus = settings.entropy_bonus
    recurrent_init(model, generator)
    return model
