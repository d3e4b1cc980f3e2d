"""A builder → all laws that apply to what it builds."""

from __future__ import annotations

from collections.abc import Callable

from segue.models.build import Builder
from segue.models.settings import ModelSettings
from segue.testing import laws
from segue.testing.cases import SMALL, Case
from segue.testing.learning import learns_by_heart

Law = Callable[[Case], None]

ALWAYS: tuple[Law, ...] = (
    laws.building_is_repeatable,
    laws.padding_is_zero,
    laws.padding_changes_nothing,
    laws.batches_change_nothing,
    laws.parameters_learn,
    laws.questions_are_the_newest_states,
    laws.one_event_is_enough,
    laws.the_moment_counts_only_where_it_says_so,
    laws.evaluation_is_repeatable,
    laws.saving_changes_nothing,
    learns_by_heart,
)
LOOKING_BACK: tuple[Law, ...] = (laws.later_events_change_nothing_earlier, laws.later_times_change_nothing_earlier)
CONTINUABLE: tuple[Law, ...] = (laws.prefixes_are_encoded_as_inside_the_whole, laws.remembering_changes_nothing)


def laws_of(case: Case) -> tuple[Law, ...]:
    """The laws that apply: states of a model that looks both ways, which has a mask, or a decoder that is asked after
    the history, know what comes later; and only models that say `incremental` claim that a prefix is encoded as it is
    inside the whole."""
    model = case.new()
    looking_back = () if model.has_decoder or model.items.mask is not None else LOOKING_BACK
    return (*ALWAYS, *looking_back, *(CONTINUABLE if model.incremental else ()))


def check_encoder(build: Builder, settings: ModelSettings = SMALL) -> None:
    """Hold a builder to every law that applies to it; an `AssertionError` says which one is broken.

    build: as `segue.train(…, encoder=build)` takes it. settings: what it is built with; `model.length` at least 64.
    """
    case = Case(build, settings)
    for law in laws_of(case):
        law(case)
