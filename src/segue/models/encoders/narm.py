"""NARM: Li et al., "Neural Attentive Session-based Recommendation", CIKM 2017."""

from __future__ import annotations

import torch
from torch import Tensor

from segue.kinds import CountOrZero, Kind, NonNegative, PositiveNumber, kind_of
from segue.layers.blocks.recurrent import NarmBlock, gru_blocks
from segue.layers.positions.embeddings import NoPositions
from segue.models.attention import SampledAttention
from segue.models.encoders.transformer import Scores
from segue.models.sequence import Parts, SequenceModel
from segue.models.settings import EncoderSettings
from segue.models.weight_init import recurrent_init


class SoftChoiceSettings(Kind, frozen=True, tag="soft"):
    """The weighted mean of all states."""


class _HardChoiceSettings(Kind, frozen=True):
    temperature: PositiveNumber = 1.0
    """Divisor of the scores: a low one makes samples almost certain and gradients steep. It is constant: annealing, as
    is usual for 'gumbel', would make the model depend on the number of epochs planned."""


class StraightThroughChoiceSettings(_HardChoiceSettings, frozen=True, tag="straight-through"):
    """The state with the highest score, with the gradient of the mean."""


class GumbelChoiceSettings(_HardChoiceSettings, frozen=True, tag="gumbel"):
    """A sampled state, with the gradient of the mean (Gumbel-softmax)."""


class ReinforceChoiceSettings(_HardChoiceSettings, frozen=True, tag="reinforce"):
    """A sampled state, learned from its loss (REINFORCE)."""

    entropy_bonus: NonNegative = 0.0
    """Weight of the samples' entropy, which is subtracted from the loss, so that the model keeps exploring."""


ChoiceSettings = SoftChoiceSettings | StraightThroughChoiceSettings | GumbelChoiceSettings | ReinforceChoiceSettings


class NarmModel(SequenceModel):
    """A `SequenceModel` whose last block may sample a state. Its states then end with log-probability and entropy."""

    entropy_bonus = 0.0

    def sampled_attention(self, states: Tensor) -> SampledAttention | None:
        """See `SamplingModel`."""
        if states.shape[1] == self.inputs.width:
            return None
        return SampledAttention(log_probability=states[:, -2], entropy=states[:, -1], bonus=self.entropy_bonus)


class NARMSettings(EncoderSettings, frozen=True, tag="narm"):
    """NARM: gated recurrent units, then attention from the newest state to all states.

    Attention is computed at every event; its result is joined to the state and mapped to a query. As in its authors'
    code and unlike the paper, one recurrent network serves both parts, and weights add up to one. With `scores`
    'additive' and `choice` 'soft' it is the original, except that there gates are hard sigmoids and sessions are cut to
    their oldest 19 events.
    """

    state_width: CountOrZero = 0
    """Features of a recurrent state; 0: as many as a token has."""
    scores: Scores = "scaled-dot"
    """The attention score of two states; 'additive' is the original's."""
    choice: ChoiceSettings = SoftChoiceSettings()
    """Whether attention returns the weighted mean of all states, or a single state."""

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        width, states, choice = parts.width, self.state_width or parts.width, self.choice
        attention = NarmBlock(
            states,
            width,
            self.dropout,
            scores=self.scores,
            choice=kind_of(choice),  # type: ignore[arg-type]  # the kinds are the block's choices
            temperature=choice.temperature if isinstance(choice, _HardChoiceSettings) else 1.0,
        )
        model = NarmModel(
            parts,
            NoPositions(parts.tokens(self.length)),
            [*gru_blocks(width, states, self.depth, self.dropout), attention],
            scale=width**0.5,
            dropout=self.dropout,
        )
        model.entropy_bonus = choice.entropy_bonus if isinstance(choice, ReinforceChoiceSettings) else 0.0
        return recurrent_init(model, generator)
