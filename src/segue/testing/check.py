"""A builder → all laws that apply to its models."""

from __future__ import annotations

from collections.abc import Callable

from segue.models.build import Builder
from segue.models.encoders import ModelSettings
from segue.testing import laws
from segue.testing.cases import SMALL, Case
from segue.testing.learning import memorises_eight_users

Law = Callable[[Case], None]

ALWAYS: tuple[Law, ...] = (
    laws.building_is_repeatable,
    laws.padding_is_zero,
    laws.padding_changes_nothing,
    laws.batches_change_nothing,
    laws.parameters_learn,
    laws.queries_are_the_newest_states,
    laws.one_event_is_enough,
    laws.query_time_counts_only_if_declared,
    laws.evaluation_is_repeatable,
    laws.saving_changes_nothing,
    memorises_eight_users,
)
CAUSAL: tuple[Law, ...] = (laws.later_events_change_nothing_earlier, laws.later_times_change_nothing_earlier)
INCREMENTAL: tuple[Law, ...] = (laws.prefixes_are_encoded_as_inside_the_whole, laws.cached_encoding_changes_nothing)


def laws_of(case: Case) -> tuple[Law, ...]:
    """The laws that apply. Bidirectional models, which have a mask, and decoders are not causal; only `incremental`
    models encode a prefix as it is inside the whole history."""
    model = case.new()
    causal = () if model.has_decoder or model.items.mask is not None else CAUSAL
    return (*ALWAYS, *causal, *(INCREMENTAL if model.incremental else ()))


def check_encoder(build: Builder, settings: ModelSettings = SMALL) -> None:
    """Check every law that applies to a builder; an `AssertionError` names the broken one.

    build: as `segue.train(…, encoder=build)` takes it. settings: the model's; `model.length` must be at least 64.
    """
    case = Case(build, settings)
    for law in laws_of(case):
        law(case)
