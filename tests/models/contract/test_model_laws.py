"""What holds for the states of every model, whatever its weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import (
    EVENTS,
    MASK,
    N_ITEMS,
    PLANNING,
    RECURRENT,
    assert_close,
    batch_of,
    case_of,
    every_builder,
    looking_back,
    looking_back_from_every_place,
    looking_both_ways,
    model_of,
    new_model,
    packed_of,
    planning,
    queries_of,
    query_tokens,
    random_users,
    states_of,
    task_of,
    tied_or_not,
)
from settings_tables import BIDIRECTIONAL, BUILDERS

from segue.errors import SegueError
from segue.layers.packed import tensors
from segue.models.attention import attention_maps
from segue.objective.tasks.examples import TaskFacts
from segue.objective.tasks.masked_item import MaskedItem
from segue.objective.tasks.next_item import NextItem
from segue.testing import laws

WITHOUT_ATTENTION = frozenset({"gru4rec", "caser", "nextitnet"})


def test_every_builder_is_held_to_this_contract() -> None:
    assert len(BUILDERS) == 12 and len(BIDIRECTIONAL) == 1 and len(PLANNING) == 2 and BUILDERS.keys() >= BIDIRECTIONAL


@looking_back_from_every_place
def test_a_later_item_changes_no_earlier_state_at_all(builder: str, positions: str) -> None:
    laws.later_events_change_nothing_earlier(case_of(builder, positions=positions))


@looking_back
def test_a_later_time_changes_no_earlier_state(builder: str) -> None:
    """Where the newest time is held: the time since the newest is known to all, and so is none of the rest."""
    laws.later_times_change_nothing_earlier(case_of(builder))


def test_who_is_told_the_moment_of_the_next_event_knows_it_one_state_early() -> None:
    laws.later_times_change_nothing_earlier(case_of("hstu", target_time=True))


def test_the_newest_time_moves_earlier_states_where_it_is_looked_back_from() -> None:
    """As PinnerFormer has it; so such a model claims neither prefixes nor memories."""
    for times, moved in ((["since-newest"], True), (["absolute", "since-previous"], False)):
        model, batch = model_of(EVENTS, inputs__times=times), batch_of(*random_users([5, 3]))
        later = batch.times.copy()
        later[4] += 17
        before, after = (model.encode(tensors(replace(batch, times=told))) for told in (batch.times, later))
        assert torch.equal(after[:4], before[:4]) is not moved and torch.equal(after[5:], before[5:])
        assert not model.incremental


@looking_both_ways
@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_hidden_is_sought_before_and_behind(builder: str, depth: int) -> None:
    """A changed item changes what is said of a hidden one, wherever it stands; never that of another user."""
    model, users = model_of(builder, depth=depth), random_users([9, 4, 1])
    users[0][4] = MASK
    before = states_of(model, users)
    for place in (*range(4), *range(5, 9)):
        changed = [[*users[0]], users[1], users[2]]
        changed[0][place] = users[0][place] % N_ITEMS + 1
        after = states_of(model, changed)
        assert (model.head(after[0])[4] - model.head(before[0])[4]).abs().max() > 1e-4
        assert torch.equal(after[1], before[1]) and torch.equal(after[2], before[2])


@pytest.mark.parametrize("builder", sorted(BUILDERS.keys() - {"hstu"}))
def test_states_ask_for_order_only(builder: str) -> None:
    """A model that says it does not use the target's time may use no time, nor the moment of the question."""
    model, batch = model_of(builder), batch_of(*random_users([5, 3]))
    assert not model.target_time
    before = model.encode(tensors(batch))
    later = replace(batch, times=batch.times * 1000 + 7, query_times=np.array([10**9, 10**9]))
    assert torch.equal(model.encode(tensors(later)), before)


@every_builder
def test_the_moment_of_the_question_counts_only_where_it_says_so(builder: str) -> None:
    laws.query_time_counts_only_if_declared(case_of(builder))


def test_hstu_knows_the_moment_of_the_question_where_it_says_so() -> None:
    case = case_of("hstu", target_time=True)
    laws.query_time_counts_only_if_declared(case)
    model, batch = case.perturbed(), batch_of(*random_users([5]))
    soon, late = (tensors(replace(batch, query_times=np.array([moment]))) for moment in (1_000, 10**6))
    assert model.target_time and not torch.equal(model.query(soon), model.query(late))


@every_builder
def test_a_longer_user_in_the_batch_changes_nothing(builder: str) -> None:
    laws.padding_changes_nothing(case_of(builder))


@every_builder
@tied_or_not
def test_states_and_gradients_of_a_batch_are_those_of_its_users(builder: str, tied: bool) -> None:
    """Packed equals padded: a user alone needs no padding, a batch pads all but the longest."""
    case = case_of(builder, items__tied=tied)
    laws.batches_change_nothing(case)
    laws.parameters_learn(case)


@every_builder
@settings(max_examples=8)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_users_of_a_batch_are_strangers(builder: str, lengths: list[int], seed: int) -> None:
    model = model_of(builder).double()
    users = random_users(lengths, seed)
    together = states_of(model, users)
    for user, found in zip(users, together, strict=True):
        assert_close(found, states_of(model, [user])[0], 1e-10)
    assert_close(model.query(packed_of(*users)), queries_of(model, users), 1e-10)


@looking_back_from_every_place
def test_unless_counted_from_the_newest_a_prefix_is_encoded_as_inside_the_whole(builder: str, positions: str) -> None:
    """From the oldest on, between each other, or without places: what comes later moves none."""
    case = case_of(builder, positions=positions)
    if positions != "newest":
        laws.prefixes_are_encoded_as_inside_the_whole(case)
        return
    with pytest.raises(AssertionError, match="if more events follow"):
        laws.prefixes_are_encoded_as_inside_the_whole(case)


@pytest.mark.parametrize(
    ("positions", "counts"), [("oldest", True), ("sinusoidal", True), ("rotary", False), ("buckets", False)]
)
def test_who_knows_distances_alone_cannot_count(positions: str, counts: bool) -> None:
    """Of items that are all the same the mean is the same, however many they are and whatever their weights."""
    model = model_of("transformer", positions=positions).double()
    once, thrice = model.query(packed_of([5], [5, 5, 5]))
    assert torch.allclose(once, thrice, rtol=0, atol=1e-10) is not counts
    there, back = model.query(packed_of([5, 6, 7], [6, 5, 7]))
    assert not torch.allclose(there, back, rtol=0, atol=1e-3), "and yet order counts"


@every_builder
@tied_or_not
def test_a_query_is_the_head_of_the_newest_state_and_scores_are_its_products(builder: str, tied: bool) -> None:
    """The query of one block and of many, alone and in company."""
    for depth in (1, 3):
        laws.queries_are_the_newest_states(case_of(builder, items__tied=tied, depth=depth))
    model = model_of(builder, items__tied=tied).double()
    query = model.query(packed_of(*random_users([3, 1, 6])))
    expected = np.einsum("bd,vd->bv", query.detach().numpy(), model.item_vectors().detach().numpy())
    assert_close(model.score_all(query), torch.from_numpy(expected), 1e-10)


@every_builder
def test_tied_means_one_vector_an_item(builder: str) -> None:
    tied, untied = model_of(builder, items__tied=True), model_of(builder, items__tied=False)
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1
    batch = packed_of([3, 4])
    for model, moved in ((tied, True), (untied, False)):
        before = model.query(batch)
        with torch.no_grad():
            model.items.output()[4] += 1
        assert torch.equal(model.query(batch), before) != moved


@every_builder
def test_evaluation_is_repeatable_and_training_drops(builder: str) -> None:
    laws.evaluation_is_repeatable(case_of(builder))
    model, batch = model_of(builder, dropout=0.5).train(), packed_of(*random_users([5, 3]))
    with torch.random.fork_rng(devices=[]):
        assert not torch.equal(model.encode(batch), model.encode(batch))


@every_builder
def test_users_of_one_event_and_ids_at_the_end_of_the_catalogue(builder: str) -> None:
    laws.one_event_is_enough(case_of(builder))
    model = model_of(builder)
    with pytest.raises(IndexError):
        model.encode(packed_of([N_ITEMS + 1 if model.items.mask is None else MASK + 1]))


@every_builder
def test_a_history_beyond_the_length_is_refused(builder: str) -> None:
    """A mask takes a place of its own."""
    model = model_of(builder, length=4)
    assert model.length == (3 if builder in BIDIRECTIONAL else 4)
    model.query(packed_of([1, 2, 3, 4][: model.length]))
    model.encode(packed_of([1, 2, 3, 4]))
    with pytest.raises(AssertionError):
        model.query(packed_of([1, 2, 3, 4, 5][: model.length + 1]))
    with pytest.raises(AssertionError):
        model.encode(packed_of([1, 2, 3, 4, 5]))


@every_builder
def test_a_user_without_events_is_never_answered_with_anothers_state(builder: str) -> None:
    model = model_of(builder)
    with pytest.raises((AssertionError, ValueError, SegueError)):
        model.query(packed_of([1, 2], [], [3]))


@pytest.mark.parametrize("builder", sorted(WITHOUT_ATTENTION))
def test_where_nobody_looks_at_anybody_there_is_no_attention_to_show(builder: str) -> None:
    model = model_of(builder)
    assert model.attention(packed_of([1, 2], [3])) is None


@pytest.mark.parametrize("builder", sorted(BUILDERS.keys() - WITHOUT_ATTENTION - {*PLANNING}))
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_says_who_looked_at_whom(builder: str, heads: int) -> None:
    """Of the history's tokens and, where the model asks with a mask, of that one after them."""
    model, users = model_of(builder, heads=heads, depth=3).double(), random_users([5, 2])
    layers, heads = (1, 1) if builder == "narm" else (3, heads)  # one look back, after its recurrent layers
    found, tokens = model.attention(packed_of(*users)), [len(user) for user in query_tokens(model, users)]
    assert found is not None and found.shape == (layers, 2, heads, tokens[0], tokens[0])
    for user, length in enumerate(tokens):
        own = found[:, user, :, :length, :length]
        if builder != "hstu":  # its weights stand each for itself
            assert_close(own.sum(-1), torch.ones(layers, heads, length, dtype=torch.float64), 1e-12)
            assert (own >= 0).all()
        assert (own.triu(1) != 0).any() == (builder in BIDIRECTIONAL)
        alone = model.attention(packed_of(users[user]))
        assert alone is not None
        assert_close(alone[:, 0], own, 1e-10)
    assert layers == 1 or not torch.equal(found[0], found[1]), "each layer has its own"


@planning
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_says_where_a_decoder_looks(builder: str, heads: int) -> None:
    """After the layers of the encoder, whose events look both ways, or, where they are read one by one, at nobody."""
    model, users = model_of(builder, heads=heads, depth=3).double(), random_users([5, 2])
    found, recurrent = attention_maps(model, packed_of(*users)), builder == RECURRENT
    layers, heads = (1, 1) if recurrent else (3, heads)
    encoder = [] if recurrent else [f"encoder, layer {layer}" for layer in (1, 2, 3)]
    assert [each.name for each in found if each.rows == "tokens"] == encoder
    looked_at = ["at the history"] if recurrent else ["at its steps", "at the history"]
    decoder = [f"decoder, layer {layer}, {what}" for layer in range(1, layers + 1) for what in looked_at]
    assert [each.name for each in found] == [*encoder, *decoder]
    for user, length in enumerate((5, 2)):
        for each, alone in zip(found, attention_maps(model, packed_of(users[user])), strict=True):
            shape = [5 if side == "tokens" else 1 for side in (each.rows, each.columns)]
            assert each.weights.shape == (2, heads, *shape)
            own = each.weights[user, :, :length, :length]
            assert_close(own.sum(-1), torch.ones_like(own[..., 0]), 1e-12)
            assert (own > 0).all(), "everyone looks at everything"
            assert_close(alone.weights[0], own, 1e-10)
    assert recurrent or not torch.equal(found[0].weights, found[1].weights), "each layer has its own"


@every_builder
def test_building_leaves_the_global_random_state_alone_and_draws_from_its_generator(builder: str) -> None:
    laws.building_is_repeatable(case_of(builder))
    first, other = new_model(builder, seed=5).state_dict(), new_model(builder, seed=6).state_dict()
    drawn = [name for name, weight in first.items() if weight.dim() > 1]
    assert not any(torch.equal(first[name], other[name]) for name in drawn), "every matrix is drawn"


@every_builder
@tied_or_not
def test_the_padding_row_starts_at_zero(builder: str, tied: bool) -> None:
    laws.padding_is_zero(case_of(builder, items__tied=tied))


@looking_back
def test_targets_never_reach_the_encoder(builder: str) -> None:
    """Other answers, at other times: the states that are questioned stay as they were."""
    model, users = model_of(builder), random_users([6, 2, 4])
    batch, rng = batch_of(*users), np.random.default_rng(0)
    ends = np.cumsum(batch.lengths)
    items, times = batch.items.copy(), batch.times.copy()
    items[ends - 1] = items[ends - 1] % N_ITEMS + 1
    times[ends - 1] += 10**6
    true, shuffled = NextItem()(batch, rng), NextItem()(replace(batch, items=items, times=times), rng)
    assert (true.targets != shuffled.targets).sum() == 3
    assert torch.equal(model.encode(tensors(true.inputs)), model.encode(tensors(shuffled.inputs)))


@looking_both_ways
def test_hidden_items_never_reach_the_encoder(builder: str) -> None:
    """Other items at the places that are hidden: every state stays as it was."""
    model, batch = model_of(builder), batch_of(*random_users([6, 2, 9]))
    task, facts = MaskedItem(share=0.4, most=9, last=0.0), TaskFacts(MASK)
    true = task(batch, np.random.default_rng(5), facts)
    items = batch.items.copy()
    assert true.positions is not None and len(true.positions) == 2 + 1 + 4
    items[true.positions] = items[true.positions] % N_ITEMS + 1
    other = task(replace(batch, items=items), np.random.default_rng(5), facts)
    assert (true.targets != other.targets).all()
    assert torch.equal(model.encode(tensors(true.inputs)), model.encode(tensors(other.inputs)))


@planning
def test_what_continues_a_history_never_reaches_its_reader(builder: str) -> None:
    """Other items after a cut: the states up to the first that is fed one of them stay as they were."""
    model, users = model_of(builder), random_users([9, 4, 2])
    read = [4, 2, 1]
    before = states_of(model, users, read)
    for step in range(4, 9):
        changed = [[*users[0]], users[1], users[2]]
        changed[0][step] = users[0][step] % N_ITEMS + 1
        after = states_of(model, changed, read)
        assert torch.equal(after[0][:step], before[0][:step])
        assert not torch.equal(after[0][step:], before[0][step:])
        assert torch.equal(after[1], before[1]) and torch.equal(after[2], before[2])


@planning
def test_what_is_asked_of_a_decoder_in_training_is_what_is_asked_in_service(builder: str) -> None:
    """The state at a cut is the question of the history before it; the events before that ask nothing."""
    model, users = model_of(builder).double(), random_users([6, 2, 9])
    inputs = task_of(model)(batch_of(*users), np.random.default_rng(0)).inputs
    assert inputs.histories is not None and len(inputs.histories) == 5 + 1 + 8
    states = torch.split(model.encode(tensors(inputs)), inputs.lengths.tolist())
    items = np.split(inputs.items, np.cumsum(inputs.lengths)[:-1])
    for state, user, read in zip(states, items, inputs.histories.tolist(), strict=True):
        assert_close(model.head(state[read - 1 : read]), model.query(packed_of(user[:read].tolist())), 1e-10)
        assert (state[: read - 1] == 0).all()


@pytest.mark.parametrize("builder", sorted(BUILDERS.keys() - {*PLANNING}))
def test_what_is_asked_in_training_is_what_is_asked_in_service(builder: str) -> None:
    """The question about a user's last event, which training asks, is that of the history before it."""
    model, users = model_of(builder).double(), random_users([6, 2, 9])
    examples = task_of(model)(batch_of(*users), np.random.default_rng(0))
    states = model.encode(tensors(examples.inputs))
    last = torch.from_numpy(np.cumsum(examples.inputs.lengths) - 1)[-3:]
    expected = model.query(packed_of(*(user[:-1] for user in users)))
    assert_close(model.head(states[last]), expected, 1e-10)


@every_builder
@tied_or_not
def test_cosine_scores_are_products_of_directions(builder: str, tied: bool) -> None:
    model, users = model_of(builder, items__tied=tied, similarity="cosine").double(), random_users([3, 1, 6])
    query, items = model.query(packed_of(*users)), model.item_vectors()
    ones = torch.ones(N_ITEMS, dtype=torch.float64)
    assert_close(query.norm(dim=1), ones[:3], 1e-12)
    assert_close(items[1:].norm(dim=1), ones, 1e-12)
    assert (items[0] == 0).all()
    some = torch.tensor([7, 1, 7])
    assert_close(model.item_vectors(some), items[some], 1e-12)
    plain, same = model.items.output(), queries_of(model, users)
    assert_close(query, same, 1e-10)
    assert_close(model.score_all(query), torch.cosine_similarity(same[:, None], plain[None], dim=2), 1e-10)
    with torch.no_grad():
        (model.items.into if model.items.out is None else model.items.out)[4] *= 100
    assert_close(model.item_vectors(), items, 1e-12)
