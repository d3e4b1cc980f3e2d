"""The laws that every encoder keeps, for tests of your own: plain functions, and what breaks one is told in a sentence.

    def test_my_model() -> None:
        segue.testing.check_encoder(build)

or one test a law, where a test framework can say which of them failed:

    @pytest.mark.parametrize("law", segue.testing.laws_of(segue.testing.Case(build)))
    def test_my_model(law) -> None:
        law(segue.testing.Case(build))

segue's own encoders are held to the same functions. They need neither data nor a test framework, and take seconds.
"""

from segue.testing.cases import Case
from segue.testing.check import check_encoder, laws_of
from segue.testing.laws import (
    batches_change_nothing,
    building_is_repeatable,
    evaluation_is_repeatable,
    later_events_change_nothing_earlier,
    later_times_change_nothing_earlier,
    one_event_is_enough,
    padding_changes_nothing,
    padding_is_zero,
    parameters_learn,
    prefixes_are_encoded_as_inside_the_whole,
    questions_are_the_newest_states,
    remembering_changes_nothing,
    saving_changes_nothing,
    the_moment_counts_only_where_it_says_so,
)
from segue.testing.learning import learns_by_heart

__all__ = [
    "Case",
    "batches_change_nothing",
    "building_is_repeatable",
    "check_encoder",
    "evaluation_is_repeatable",
    "later_events_change_nothing_earlier",
    "later_times_change_nothing_earlier",
    "laws_of",
    "learns_by_heart",
    "one_event_is_enough",
    "padding_changes_nothing",
    "padding_is_zero",
    "parameters_learn",
    "prefixes_are_encoded_as_inside_the_whole",
    "questions_are_the_newest_states",
    "remembering_changes_nothing",
    "saving_changes_nothing",
    "the_moment_counts_only_where_it_says_so",
]
