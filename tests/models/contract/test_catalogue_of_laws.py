"""The laws that a model of sequences has to keep, by which tests each is held, and where one does not apply, why."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from settings_tables import BIDIRECTIONAL, BUILDERS, CONTINUING, UNPLACED

TESTS = Path(__file__).parents[2]
NOT_OF_BUILDERS = "It is a law of this room's functions, which know no builder: it holds for all of them at once."


@dataclass(frozen=True)
class Law:
    """What is asked; the tests that ask it of every builder, or of all at once; builders it does not apply to."""

    asked: str
    held_by: tuple[str, ...]
    not_for: dict[str, str] = field(default_factory=dict)
    note: str = ""


HIDDEN = "It looks both ways: later events are in sight by design, and what is asked for is hidden instead."
NO_ATTENTION = "It has none: see test_where_nobody_looks_at_anybody_there_is_no_attention_to_show."

POINTWISE = {"hstu"}
"""Builders whose weights stand each for itself."""

READ_WHOLE = "It is asked by a decoder after the history, which is read whole: no event in it asks anything."

LAWS = {
    "V1": Law(
        "A later event changes no earlier state.",
        (
            "test_a_later_item_changes_no_earlier_state_at_all",
            "test_a_later_time_changes_no_earlier_state",
            "test_a_value_is_known_from_its_event_on_and_not_before",
            "test_values_of_events_are_no_less_for_these",
        ),
        {
            "bert4rec": f"{HIDDEN} See test_hidden_items_never_reach_the_encoder.",
            "seq2seq": f"{READ_WHOLE} See test_what_continues_a_history_never_reaches_its_reader.",
        },
        "Items in full. Values are read by inputs that builders share, and are tried with some of each kind. Times "
        "with the newest one held, which the time since the newest looks back from by design: "
        "see test_the_newest_time_moves_earlier_states_where_it_is_looked_back_from. HSTU that is told the moment of "
        "the next event knows its time one state early: see "
        "test_who_is_told_the_moment_of_the_next_event_knows_it_one_state_early.",
    ),
    "V2": Law("Padding changes nothing.", ("test_a_longer_user_in_the_batch_changes_nothing",)),
    "V3": Law(
        "A prefix is encoded as inside the whole.",
        ("test_unless_counted_from_the_newest_a_prefix_is_encoded_as_inside_the_whole",),
        {"bert4rec": HIDDEN, "seq2seq": READ_WHOLE},
        "Not where places are counted from the newest, which the same test asserts; those without places always do. "
        "Nor where a token looks at the newest event's time: such inputs are not `incremental`.",
    ),
    "V4": Law("Packed is padded.", ("test_states_and_gradients_of_a_batch_are_those_of_its_users",)),
    "V5": Law("Users of a batch do not know each other.", ("test_users_of_a_batch_are_strangers",)),
    "V6": Law(
        "The encoder never sees a target.",
        (
            "test_targets_never_reach_the_encoder",
            "test_hidden_items_never_reach_the_encoder",
            "test_what_continues_a_history_never_reaches_its_reader",
            "test_random_targets_stay_at_chance_on_users_not_trained_on",
        ),
    ),
    "V7": Law(
        "Eight users of ten items are learned by heart in less than 300 steps.",
        (
            "test_eight_users_of_ten_items_are_learned_by_heart",
            "test_what_is_hidden_of_eight_users_is_learned_by_heart",
            "test_what_came_after_each_cut_of_eight_users_is_learned_by_heart",
        ),
    ),
    "V8": Law(
        "A grammar of one step is learned, and one that depends on the event before the last.",
        (
            "test_the_planted_cycle_is_learned",
            "test_what_comes_next_on_a_cycle_is_learned_from_what_is_hidden",
            "test_what_depends_on_the_event_before_the_last_is_learned",
        ),
        {
            "bert4rec": "Only the second part: asked for hidden events, it has both neighbours of each to go by.",
            "seq2seq": f"Only the second part. {READ_WHOLE} What depends on more than the last event is planned: see "
            "test_five_stops_of_every_route_are_planned_from_beginnings_never_met.",
        },
    ),
    "V9": Law("Popularity is beaten.", ("test_a_recipe_learns_the_planted_cycle",), note="Of recipes, not builders."),
    "V10": Law("The loss starts at chance.", ("test_loss_starts_at_chance",)),
    "V11": Law(
        "Gradients written by hand are right.",
        (
            "test_gradient_check",
            "test_gradients",
            "test_gradients_of_blocks",
            "test_gradients_of_every_kind",
            "test_gradients_of_scores",
            "test_gradients_of_the_decoders_block",
            "test_the_gradient_is_that_of_the_number",
            "test_the_gradients_are_those_of_small_changes",
            "test_the_attention_and_its_gradients_are_the_plain_formula",
            "test_gradients_are_those_of_finite_differences",
            "test_tiles_of_any_size_are_the_whole",
            "test_pushes_are_those_of_the_formulas",
        ),
        note=f"{NOT_OF_BUILDERS} LambdaRank's gradient is that of no number, and is held to its formulas instead.",
    ),
    "V12": Law("A seed gives one sequence of losses.", ("test_a_seed_gives_one_sequence_of_losses",)),
    "V13": Law("Saved and loaded is the same.", ("test_saved_and_loaded_is_the_same_model",)),
    "V14": Law(
        "Metrics are invariant where they should be, and ties count against the target.",
        ("test_neither_scale_nor_the_numbering_of_items_matters", "test_ties_count_against_the_target"),
        note=NOT_OF_BUILDERS,
    ),
    "V15": Law("Seen items are filtered.", ("test_the_seen_filter_on_a_log_of_repeats",), note=NOT_OF_BUILDERS),
    "V16": Law(
        "The temperature has no say in rankings.",
        ("test_temperature_divides_scores", "test_neither_scale_nor_the_numbering_of_items_matters"),
        note="It belongs to the loss; a model knows none, and ranks do not change with a scale.",
    ),
    "V17": Law("Nothing is dropped in evaluation.", ("test_evaluation_is_repeatable_and_training_drops",)),
    "V18": Law(
        "One key to look at gives its value.",
        (
            "test_only_one_key_to_look_at_gives_its_value",
            "test_weights_are_those_of_the_valid_prefix",
            "test_the_recurrent_body_by_its_formulas",
        ),
        {
            **dict.fromkeys(("gru4rec", "caser", "nextitnet"), NO_ATTENTION),
            "hstu": "Its weights are no shares: the one key's value comes multiplied by the SiLU of its score. Where "
            "it looks is held by test_the_attention_and_its_gradients_are_the_plain_formula.",
        },
    ),
    "V19": Law(
        "Short users, extreme ids and extreme times give numbers.",
        (
            "test_users_of_one_event_and_ids_at_the_end_of_the_catalogue",
            "test_users_with_one_input_can_be_learned_from",
            "test_states_ask_for_order_only",
            "test_a_user_without_events_is_never_answered_with_anothers_state",
            "test_nobody_can_be_asked",
            "test_an_empty_batch_has_no_ranks",
            "test_k_larger_than_the_catalogue_and_everything_seen",
        ),
        note="A batch in which nothing is left to ask, and a user who has seen everything, never reach a model: they "
        "are held where they end.",
    ),
    "V20": Law(
        "Negatives are drawn as said.",
        (
            "test_draws_are_as_frequent_as_said",
            "test_any_part_of_the_draws_is_like_the_whole",
            "test_consecutive_draws_are_independent",
            "test_draws_come_from_the_generator_and_from_nowhere_else",
        ),
        note=f"{NOT_OF_BUILDERS} One generator goes through all epochs, so that each has other draws. Processes draw "
        "the same for the whole batch, and each takes its own part: see test_two_learn_what_one_does.",
    ),
}


def test_every_law_is_held_by_tests_that_are_there() -> None:
    assert list(LAWS) == [f"V{number}" for number in range(1, 21)]
    source = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    there = set(re.findall(r"^def (test_\w+)\(", source, re.MULTILINE))
    assert {name for law in LAWS.values() for name in law.held_by} <= there
    assert {
        name
        for law in LAWS.values()
        for why in (*law.not_for.values(), law.note)
        for name in re.findall(r"test_\w+", why)
    } <= there


@pytest.mark.parametrize("number", LAWS)
def test_who_is_excused_is_a_builder_with_a_reason(number: str) -> None:
    law = LAWS[number]
    assert law.held_by and law.asked.endswith(".")
    assert law.not_for.keys() <= BIDIRECTIONAL | CONTINUING | UNPLACED | POINTWISE <= BUILDERS.keys()
    assert all(why.endswith(".") for why in law.not_for.values())
