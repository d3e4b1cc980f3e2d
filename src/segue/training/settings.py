"""How a model is trained, in numbers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from segue.kinds import Count, CountOrZero, NonNegative, PositiveNumber, Rate, Share


class TrainSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `train` of the settings."""

    epochs: Count = 100
    """Passes over the data at the most."""
    patience: Count = 8
    """Epochs without a better validation NDCG@10 (or recall@10, see `evaluate.days`) after which training stops; the
    best epoch is what is kept."""
    tokens: Annotated[int, Meta(ge=2)] = 4000
    """Events of a batch, which is what several processes share: each has its part of them. Smaller batches learn faster
    an epoch and run slower."""
    stride: Share = 0.0
    """How far apart the windows begin that a history longer than the model's length is cut into, as a share of that
    length: with 1 windows do not overlap, with 0.5 by half, 0 is the newest window alone."""
    learning_rate: PositiveNumber = 1e-3
    """Step size after the warm-up. Without a decay it does not depend on the number of epochs."""
    warmup: CountOrZero = 100
    """Steps over which the step size rises from nothing."""
    decay: Share = 0.0
    """The share of `epochs`, at their end, over which the step size falls to nothing: 1 falls all the way, 0 not at
    all. It makes a short training better, and resuming with more epochs not the same as having planned them."""
    weight_decay: NonNegative = 0.0
    """AdamW's pull of weights towards zero; with sparse (row-wise) updates, only of the rows that a step used."""
    averaging: Rate = 0.999
    """Decay of the running average of the weights, which is validated and saved; 0 saves the last weights."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 1
    """Seed of all randomness: initial weights, order of users, dropout, negatives."""
    threads: CountOrZero = 0
    """Threads of the processor, for each process; 0 takes them all, or a process's share of them. Results are
    repeatable bit for bit on one thread."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. CUDA is untested."""
