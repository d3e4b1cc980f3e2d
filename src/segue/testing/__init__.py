"""The laws that every encoder keeps, as plain functions for your own tests. A broken law raises an AssertionError.

    def test_my_model() -> None:
        segue.testing.check_encoder(build)

or one test a law:

    @pytest.mark.parametrize("law", segue.testing.laws_of(segue.testing.Case(build)))
    def test_my_model(law) -> None:
        law(segue.testing.Case(build))

segue's own encoders pass the same functions. They need neither data nor a test framework, and take seconds.
"""

from segue.testing.cases import Case
from segue.testing.check import check_encoder, laws_of
from segue.testing.laws import (
    batches_change_nothing,
    building_is_repeatable,
    cached_encoding_changes_nothing,
    evaluation_is_repeatable,
    later_events_change_nothing_earlier,
    later_times_change_nothing_earlier,
    one_event_is_enough,
    padding_changes_nothing,
    padding_is_zero,
    parameters_learn,
    prefixes_are_encoded_as_inside_the_whole,
    queries_are_the_newest_states,
    query_time_counts_only_if_declared,
    saving_changes_nothing,
)
from segue.testing.learning import memorises_eight_users

__all__ = [
    "Case",
    "batches_change_nothing",
    "building_is_repeatable",
    "cached_encoding_changes_nothing",
    "check_encoder",
    "evaluation_is_repeatable",
    "later_events_change_nothing_earlier",
    "later_times_change_nothing_earlier",
    "laws_of",
    "memorises_eight_users",
    "one_event_is_enough",
    "padding_changes_nothing",
    "padding_is_zero",
    "parameters_learn",
    "prefixes_are_encoded_as_inside_the_whole",
    "queries_are_the_newest_states",
    "query_time_counts_only_if_declared",
    "saving_changes_nothing",
]
