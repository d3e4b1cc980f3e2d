"""How a model is trained, in numbers."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from segue.errors import SettingsError

LEAST = {"epochs": 1, "patience": 1, "tokens": 2, "warmup": 0, "seed": 0, "threads": 0}
MOST_SEED = 2**63 - 1  # torch takes no larger one


class TrainSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `train` of the settings."""

    epochs: int = 100
    """Passes over the data at the most."""
    patience: int = 8
    """Epochs without a better validation NDCG@10 (or recall@10, see `evaluate.days`) after which training stops; the
    best epoch is what is kept."""
    tokens: int = 4000
    """Events of a batch, which is what several processes share: each has its part of them. Smaller batches learn faster
    an epoch and run slower."""
    stride: float = 0.0
    """How far apart the windows begin that a history longer than the model's length is cut into, as a share of that
    length: 1 is one after the other, 0.5 overlaps by half, 0 is the newest window alone."""
    learning_rate: float = 1e-3
    """Step size after the warm-up. Without a decay it does not depend on the number of epochs."""
    warmup: int = 100
    """Steps over which the step size rises from nothing."""
    decay: float = 0.0
    """The share of `epochs`, at their end, over which the step size falls to nothing: 1 falls all the way, 0 not at
    all. It makes a short training better, and going on with more epochs another training than having planned them."""
    weight_decay: float = 0.0
    """AdamW's pull of weights towards zero; where an item table is learned by rows, of the rows that a step used."""
    averaging: float = 0.999
    """Memory of the running average of the weights, which is what is validated and kept; 0 keeps the last weights."""
    seed: int = 1
    """Where all randomness starts: first weights, order of users, dropout, negatives."""
    threads: int = 0
    """Threads of the processor, for each process; 0 takes them all, or a process's share of them. Results are
    repeatable bit for bit on one thread."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. CUDA is untested."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise SettingsError(f"train.{name} must be at least {least}, got {getattr(self, name)}.")
        if self.seed > MOST_SEED:
            raise SettingsError(f"train.seed must be at most {MOST_SEED}, got {self.seed}.")
        if not 0 < self.learning_rate < math.inf:
            raise SettingsError(f"train.learning_rate must be a number above 0, got {self.learning_rate}.")
        if not 0 <= self.weight_decay < math.inf:
            raise SettingsError(f"train.weight_decay must be a number of at least 0, got {self.weight_decay}.")
        if not 0 <= self.stride <= 1:
            raise SettingsError(
                f"train.stride must lie in [0, 1], or events between two windows would never be learned from; "
                f"got {self.stride}."
            )
        if not 0 <= self.decay <= 1:
            raise SettingsError(f"train.decay must lie in [0, 1], as it is a share of the epochs; got {self.decay}.")
        if not 0 <= self.averaging < 1:
            raise SettingsError(f"train.averaging must lie in [0, 1), got {self.averaging}.")
