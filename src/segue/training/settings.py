"""The settings of training: epochs, batches, learning rate, threads and device."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from segue.kinds import Count, CountOrZero, NonNegative, PositiveNumber, Rate, Share


class TrainSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `train` of the settings."""

    epochs: Count = 100
    """Epochs at the most. An epoch is a pass over the data unless `epoch_events` is set."""
    patience: Count = 8
    """Epochs without a better validation NDCG@10 (or recall@10, see `evaluate.days`) after which training stops; the
    best epoch is kept."""
    epoch_events: CountOrZero = 0
    """Events that an epoch reads, about; 0: every event once. With fewer than the log has, an epoch is a random part of
    its windows, so that a long log is validated often enough; with more, it is several passes."""
    minutes: NonNegative = 0.0
    """If above 0, the minutes for training and for the report after it: training ends in time, even if epochs remain,
    and the step size falls to 0 by then if `decay` is set. A training that keeps ahead of its time does not depend on
    the speed of the machine. The recipe `default` tries several encoders if it is given more than twice the time that
    one needs."""
    items: Literal["random", "companions"] = "random"
    """Item vectors before training: random, or `companions`, which are near each other if they are in the same
    histories. Training then begins with what counts know, and needs fewer epochs. Only for a vector for each id."""
    tokens: Annotated[int, Meta(ge=2)] = 4000
    """Events of a batch, which several processes share. Smaller batches learn faster an epoch and run slower."""
    stride: Share = 0.0
    """The distance between the starts of the windows of a longer history, as a share of the model's length: with 1
    windows do not overlap, with 0.5 they overlap by half, 0 is the newest window alone."""
    learning_rate: PositiveNumber = 1e-3
    """Step size after the warm-up. Without a decay it does not depend on the number of epochs."""
    warmup: CountOrZero = 100
    """Steps over which the step size rises from 0."""
    decay: Share = 0.0
    """The share of the training, at its end, over which the step size falls to 0: with 1 it falls from the first epoch
    on, with 0 never. The training is `epochs`, or `minutes` if they end sooner. Decay makes a short training better;
    adding epochs later then gives other results."""
    weight_decay: NonNegative = 0.0
    """AdamW's pull of weights towards zero; with sparse (row-wise) updates, only of the rows that a step used."""
    averaging: Rate = 0.999
    """Decay of the running average of the weights, which is validated and saved; 0 saves the last weights."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 1
    """Seed of all randomness: initial weights, order of users, dropout, negatives."""
    threads: CountOrZero = 0
    """CPU threads of each process; 0 takes all of them, or the process's share. Results are repeatable bit for
    bit on one thread."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. CUDA is untested."""

    @property
    def seconds(self) -> float | None:
        """The seconds of `minutes`; None is no limit."""
        return 60 * self.minutes or None
