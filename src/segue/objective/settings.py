"""The section `objective` of the settings: task, loss and sampler. Invalid combinations raise here."""

from __future__ import annotations

import msgspec

from segue.errors import SettingsError
from segue.kinds import PositiveNumber, kind_of, variants_of
from segue.objective.losses import AnyLossSettings
from segue.objective.losses.catalogue import LambdaRankSettings, SCESettings, SoftmaxSettings
from segue.objective.losses.sampled import SampledLossSettings, SampledSoftmaxSettings
from segue.objective.samplers import AnySamplerSettings
from segue.objective.samplers.samplers import InBatchSettings, NoSamplerSettings, SamplerSettings, UniformSettings
from segue.objective.tasks import AnyTaskSettings
from segue.objective.tasks.actions import ActionTask
from segue.objective.tasks.continuation import Continuation
from segue.objective.tasks.masked_item import MaskedItem
from segue.objective.tasks.next_item import NextItem
from segue.objective.tasks.positive import Positive
from segue.objective.tasks.recency import Recency

SAMPLED = ", ".join(
    kind for kind, loss in variants_of(AnyLossSettings).items() if issubclass(loss, SampledLossSettings)
)
SAMPLERS = ", ".join(kind for kind in variants_of(AnySamplerSettings) if kind != kind_of(NoSamplerSettings))


class ObjectiveSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `objective` of the settings."""

    task: AnyTaskSettings = NextItem()
    """What the states of the encoder predict."""
    loss: AnyLossSettings = SoftmaxSettings()
    """How predictions are compared with targets: over the whole catalogue, its hardest items, or sampled negatives."""
    sampler: AnySamplerSettings = NoSamplerSettings()
    """Where the negatives of a sampled loss come from."""
    temperature: PositiveNumber = 1.0
    """Divisor of scores; small (0.05) if model.similarity is `cosine`."""
    equal_users: bool = False
    """Whether every user has the same weight in an epoch, however many states and windows it has: the mean of the
    users' means."""

    @property
    def positive(self) -> tuple[Positive, ...]:
        """The events that are targets; without any, all events."""
        return self.task.positive if isinstance(self.task, ActionTask) else ()

    @property
    def negatives(self) -> int:
        """Negatives of a target; 0 if none are sampled."""
        return self.sampler.negatives if isinstance(self.sampler, SamplerSettings) else 0

    def __post_init__(self) -> None:
        task, loss = kind_of(self.task), kind_of(self.loss)
        samples = isinstance(self.sampler, SamplerSettings)
        if isinstance(self.loss, SampledLossSettings) and not samples:
            raise SettingsError(
                f"objective.loss = {loss!r} needs negatives: choose objective.sampler, one of {SAMPLERS}."
            )
        if samples and not isinstance(self.loss, SampledLossSettings):
            raise SettingsError(
                f"objective.loss = {loss!r} samples no negatives, got objective.sampler = {kind_of(self.sampler)!r}: "
                f"set objective.sampler to 'none', or choose one of the losses {SAMPLED}."
            )
        if isinstance(self.loss, SCESettings) and isinstance(self.task, ActionTask):
            raise SettingsError(
                f"objective.loss = 'sce' would use the user's other positives, which score high, as its hardest "
                f"negatives: with objective.task = {task!r} choose 'softmax' or one of {SAMPLED}."
            )
        if isinstance(self.loss, LambdaRankSettings) and not isinstance(self.task, Recency):
            raise SettingsError(
                "objective.loss = 'lambdarank' sorts the whole catalogue for every state, which is for "
                f"objective.task = 'recency' and its few states: choose that, or another loss for {task!r}."
            )
        if self.equal_users and (
            isinstance(self.task, MaskedItem | Continuation) or isinstance(self.loss, LambdaRankSettings)
        ):
            raise SettingsError(
                "objective.equal_users needs a task that uses each user once and a loss that weights targets, got "
                f"objective.task = {task!r} and objective.loss = {loss!r}: leave it out."
            )
        if (
            isinstance(self.loss, SampledSoftmaxSettings)
            and not self.loss.log_q
            and isinstance(self.sampler, UniformSettings | InBatchSettings)
        ):
            raise SettingsError(
                f"objective.loss.log_q = false has no effect with objective.sampler = {kind_of(self.sampler)!r}, which "
                "samples all items with the same probability: leave it out."
            )
