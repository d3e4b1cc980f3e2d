"""Losses: functions of tensors, and their settings. `AnyLossSettings` is the choice among them."""

from __future__ import annotations

from segue.objective.losses.catalogue import LambdaRankSettings, SCESettings, SoftmaxSettings
from segue.objective.losses.sampled import (
    BCESettings,
    BPRMaxSettings,
    BPRSettings,
    GBCESettings,
    SampledSoftmaxSettings,
    TOP1MaxSettings,
    TOP1Settings,
)

AnyLossSettings = (
    SoftmaxSettings
    | SampledSoftmaxSettings
    | BCESettings
    | GBCESettings
    | BPRSettings
    | BPRMaxSettings
    | TOP1Settings
    | TOP1MaxSettings
    | LambdaRankSettings
    | SCESettings
)
