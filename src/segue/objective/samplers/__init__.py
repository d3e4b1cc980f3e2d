"""Samplers of negatives. `AnySamplerSettings` is the choice among them."""

from __future__ import annotations

from segue.objective.samplers.samplers import (
    InBatchSettings,
    MixedSettings,
    NoSamplerSettings,
    PopularitySettings,
    TargetsSettings,
    TargetsUniformSettings,
    UniformSettings,
)

AnySamplerSettings = (
    NoSamplerSettings
    | UniformSettings
    | PopularitySettings
    | InBatchSettings
    | MixedSettings
    | TargetsSettings
    | TargetsUniformSettings
)
