"""The laws that every sequence model must satisfy, the tests of each, and the reason where one does not apply."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from settings_tables import BIDIRECTIONAL, BUILDERS, CONTINUING, UNPLACED

TESTS = Path(__file__).parents[2]
NOT_OF_BUILDERS = "The functions under test know no builder: the law holds for all of them at once."


@dataclass(frozen=True)
class Law:
    """A statement; its tests, for every builder or for all at once; the builders it does not apply to."""

    statement: str
    tests: tuple[str, ...]
    exceptions: dict[str, str] = field(default_factory=dict)
    note: str = ""


HIDDEN = "It is bidirectional: it sees later events by design, and its targets are masked instead."
NO_ATTENTION = "It has no attention: see test_models_without_attention_have_no_attention_maps."

POINTWISE = {"hstu"}
"""Builders whose attention weights are not normalised."""

READ_WHOLE = "Its decoder makes the queries, and its encoder reads the whole history: no event in it has a query."

LAWS = {
    "V1": Law(
        "A later event changes no earlier state.",
        (
            "test_a_later_item_changes_no_earlier_state",
            "test_a_later_time_changes_no_earlier_state",
            "test_a_value_changes_no_state_before_its_event",
            "test_these_builders_read_values_of_events",
        ),
        {
            "bert4rec": f"{HIDDEN} See test_masked_items_never_reach_the_encoder.",
            "seq2seq": f"{READ_WHOLE} See test_events_after_a_cut_never_reach_the_encoder.",
        },
        "All items. Values are read by inputs that builders share, and are tested with some of each kind. Times "
        "with the newest one fixed, from which the time since the newest is measured by design: "
        "see test_times_since_the_newest_make_earlier_states_depend_on_it. With `target_time`, "
        "an HSTU state depends on the time of the next event: see "
        "test_with_target_time_a_state_depends_on_the_next_events_time.",
    ),
    "V2": Law("Padding changes nothing.", ("test_a_longer_user_in_the_batch_changes_nothing",)),
    "V3": Law(
        "A prefix is encoded as inside the whole.",
        ("test_a_prefix_is_encoded_as_in_the_whole_unless_counted_from_the_newest",),
        {"bert4rec": HIDDEN, "seq2seq": READ_WHOLE},
        "Not if positions are counted from the newest, which the same test asserts; without positions always. "
        "Nor if a token depends on the newest event's time: such inputs are not `incremental`.",
    ),
    "V4": Law("Packed is padded.", ("test_states_and_gradients_of_a_batch_are_those_of_its_users",)),
    "V5": Law("Users of a batch are independent.", ("test_users_of_a_batch_are_independent",)),
    "V6": Law(
        "The encoder never sees a target.",
        (
            "test_targets_never_reach_the_encoder",
            "test_masked_items_never_reach_the_encoder",
            "test_events_after_a_cut_never_reach_the_encoder",
            "test_random_targets_stay_at_chance_on_unseen_users",
        ),
    ),
    "V7": Law(
        "Eight users of ten items are memorised in fewer than 300 steps.",
        (
            "test_eight_users_of_ten_items_are_memorised",
            "test_masked_events_of_eight_users_are_memorised",
            "test_continuations_of_eight_users_are_memorised",
        ),
    ),
    "V8": Law(
        "A dependence on the last event is learned, and one on the event before the last.",
        (
            "test_the_planted_cycle_is_learned",
            "test_the_next_item_of_a_cycle_is_learned_from_masked_items",
            "test_a_dependence_on_the_event_before_the_last_is_learned",
        ),
        {
            "bert4rec": "Only the second part: a masked event has both neighbours as context.",
            "seq2seq": f"Only the second part. {READ_WHOLE} A dependence on more than the last event is planned: see "
            "test_five_stops_of_every_route_are_planned_from_held_out_prefixes.",
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
            "test_gradients_of_the_decoder_block",
            "test_the_gradient_equals_finite_differences",
            "test_the_gradients_equal_finite_differences",
            "test_the_attention_and_its_gradients_are_the_plain_formula",
            "test_gradients_are_those_of_finite_differences",
            "test_tiles_of_any_size_equal_the_plain_scores",
            "test_lambdarank_gradients_are_those_of_the_formulas",
        ),
        note=f"{NOT_OF_BUILDERS} LambdaRank's gradient is that of no scalar, and is checked by its formulas.",
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
        "The temperature does not change rankings.",
        ("test_temperature_divides_scores", "test_neither_scale_nor_the_numbering_of_items_matters"),
        note="It belongs to the loss; a model has none, and ranks do not change with a scale.",
    ),
    "V17": Law("Nothing is dropped in evaluation.", ("test_evaluation_is_repeatable_and_training_drops",)),
    "V18": Law(
        "Attention to a single key gives its value.",
        (
            "test_a_single_key_gives_its_value",
            "test_weights_are_those_of_the_valid_prefix",
            "test_the_recurrent_body_by_its_formulas",
        ),
        {
            **dict.fromkeys(("gru4rec", "caser", "nextitnet"), NO_ATTENTION),
            "hstu": "Its weights do not add up to one: the single key's value is multiplied by the SiLU of its score. "
            "Its attention is tested by test_the_attention_and_its_gradients_are_the_plain_formula.",
        },
    ),
    "V19": Law(
        "Short users, extreme ids and extreme times give numbers.",
        (
            "test_users_of_one_event_and_ids_at_the_end_of_the_catalogue",
            "test_users_with_one_input_can_be_trained_on",
            "test_states_depend_on_order_and_not_on_times",
            "test_a_user_without_events_is_never_answered_with_anothers_state",
            "test_users_without_queries",
            "test_an_empty_batch_has_no_ranks",
            "test_k_larger_than_the_catalogue_and_everything_seen",
        ),
        note="A batch without queries, and a user who has seen every item, never reach a model: they are tested where "
        "they are handled.",
    ),
    "V20": Law(
        "Negatives follow the stated distribution.",
        (
            "test_samples_follow_the_stated_probabilities",
            "test_any_part_of_the_samples_has_the_distribution_of_the_whole",
            "test_consecutive_samples_are_independent",
            "test_samples_depend_on_the_generator_alone",
        ),
        note=f"{NOT_OF_BUILDERS} One generator serves all epochs, so that each has other negatives. Processes sample "
        "the same for the whole batch, and each takes its own part: see test_two_processes_train_like_one.",
    ),
}


def test_the_tests_of_every_law_exist() -> None:
    assert list(LAWS) == [f"V{number}" for number in range(1, 21)]
    source = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    names = set(re.findall(r"^def (test_\w+)\(", source, re.MULTILINE))
    assert {name for law in LAWS.values() for name in law.tests} <= names
    assert {
        name
        for law in LAWS.values()
        for reason in (*law.exceptions.values(), law.note)
        for name in re.findall(r"test_\w+", reason)
    } <= names


@pytest.mark.parametrize("number", LAWS)
def test_every_exception_is_a_builder_with_a_reason(number: str) -> None:
    law = LAWS[number]
    assert law.tests and law.statement.endswith(".")
    assert law.exceptions.keys() <= BIDIRECTIONAL | CONTINUING | UNPLACED | POINTWISE <= BUILDERS.keys()
    assert all(reason.endswith(".") for reason in law.exceptions.values())
