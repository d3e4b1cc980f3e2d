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
    bidirectional,
    case_of,
    causal,
    causal_at_every_position,
    every_builder,
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


def test_this_contract_covers_every_builder() -> None:
    assert len(BUILDERS) == 12 and len(BIDIRECTIONAL) == 1 and len(PLANNING) == 2 and BUILDERS.keys() >= BIDIRECTIONAL


@causal_at_every_position
def test_a_later_item_changes_no_earlier_state(builder: str, positions: str) -> None:
    laws.later_events_change_nothing_earlier(case_of(builder, positions=positions))


@causal
def test_a_later_time_changes_no_earlier_state(builder: str) -> None:
    """With the newest time fixed: only the time since the newest may reach earlier states."""
    laws.later_times_change_nothing_earlier(case_of(builder))


def test_with_target_time_a_state_depends_on_the_next_events_time() -> None:
    laws.later_times_change_nothing_earlier(case_of("hstu", target_time=True))


def test_times_since_the_newest_make_earlier_states_depend_on_it() -> None:
    """As in PinnerFormer; such a model is not incremental and has no KV cache."""
    for times, dependent in ((["since-newest"], True), (["absolute", "since-previous"], False)):
        model, batch = model_of(EVENTS, inputs__times=times), batch_of(*random_users([5, 3]))
        later = batch.times.copy()
        later[4] += 17
        before, after = (model.encode(tensors(replace(batch, times=moved))) for moved in (batch.times, later))
        assert torch.equal(after[:4], before[:4]) is not dependent and torch.equal(after[5:], before[5:])
        assert not model.incremental


@bidirectional
@pytest.mark.parametrize("depth", [1, 2])
def test_a_mask_attends_in_both_directions(builder: str, depth: int) -> None:
    """A changed item changes the output at the mask from any position, and no state of another user."""
    model, users = model_of(builder, depth=depth), random_users([9, 4, 1])
    users[0][4] = MASK
    before = states_of(model, users)
    for position in (*range(4), *range(5, 9)):
        changed = [[*users[0]], users[1], users[2]]
        changed[0][position] = users[0][position] % N_ITEMS + 1
        after = states_of(model, changed)
        assert (model.head(after[0])[4] - model.head(before[0])[4]).abs().max() > 1e-4
        assert torch.equal(after[1], before[1]) and torch.equal(after[2], before[2])


@pytest.mark.parametrize("builder", sorted(BUILDERS.keys() - {"hstu"}))
def test_states_depend_on_order_and_not_on_times(builder: str) -> None:
    """A model without `target_time` uses neither event times nor the query time."""
    model, batch = model_of(builder), batch_of(*random_users([5, 3]))
    assert not model.target_time
    before = model.encode(tensors(batch))
    later = replace(batch, times=batch.times * 1000 + 7, query_times=np.array([10**9, 10**9]))
    assert torch.equal(model.encode(tensors(later)), before)


@every_builder
def test_the_query_time_matters_only_if_declared(builder: str) -> None:
    laws.query_time_counts_only_if_declared(case_of(builder))


def test_hstu_uses_the_query_time_if_declared() -> None:
    case = case_of("hstu", target_time=True)
    laws.query_time_counts_only_if_declared(case)
    model, batch = case.perturbed(), batch_of(*random_users([5]))
    soon, late = (tensors(replace(batch, query_times=np.array([time]))) for time in (1_000, 10**6))
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
def test_users_of_a_batch_are_independent(builder: str, lengths: list[int], seed: int) -> None:
    model = model_of(builder).double()
    users = random_users(lengths, seed)
    together = states_of(model, users)
    for user, states in zip(users, together, strict=True):
        assert_close(states, states_of(model, [user])[0], 1e-10)
    assert_close(model.query(packed_of(*users)), queries_of(model, users), 1e-10)


@causal_at_every_position
def test_a_prefix_is_encoded_as_in_the_whole_unless_counted_from_the_newest(builder: str, positions: str) -> None:
    """With positions from the oldest, relative positions or none: later events change no state."""
    case = case_of(builder, positions=positions)
    if positions != "newest":
        laws.prefixes_are_encoded_as_inside_the_whole(case)
        return
    with pytest.raises(AssertionError, match="if more events follow"):
        laws.prefixes_are_encoded_as_inside_the_whole(case)


@pytest.mark.parametrize(
    ("positions", "counting"), [("oldest", True), ("sinusoidal", True), ("rotary", False), ("buckets", False)]
)
def test_relative_positions_alone_cannot_count_events(positions: str, counting: bool) -> None:
    """The mean of equal items is the same, however many there are and whatever their weights."""
    model = model_of("transformer", positions=positions).double()
    once, thrice = model.query(packed_of([5], [5, 5, 5]))
    assert torch.allclose(once, thrice, rtol=0, atol=1e-10) is not counting
    first, other = model.query(packed_of([5, 6, 7], [6, 5, 7]))
    assert not torch.allclose(first, other, rtol=0, atol=1e-3), "order matters all the same"


@every_builder
@tied_or_not
def test_a_query_is_the_head_of_the_newest_state_and_scores_are_its_products(builder: str, tied: bool) -> None:
    """With one block and with several, alone and in a batch."""
    for depth in (1, 3):
        laws.queries_are_the_newest_states(case_of(builder, items__tied=tied, depth=depth))
    model = model_of(builder, items__tied=tied).double()
    query = model.query(packed_of(*random_users([3, 1, 6])))
    expected = np.einsum("bd,vd->bv", query.detach().numpy(), model.item_vectors().detach().numpy())
    assert_close(model.score_all(query), torch.from_numpy(expected), 1e-10)


@every_builder
def test_tied_models_have_one_vector_per_item(builder: str) -> None:
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
    """A mask takes one position."""
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
def test_models_without_attention_have_no_attention_maps(builder: str) -> None:
    model = model_of(builder)
    assert model.attention(packed_of([1, 2], [3])) is None


@pytest.mark.parametrize("builder", sorted(BUILDERS.keys() - WITHOUT_ATTENTION - {*PLANNING}))
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_weights_between_tokens(builder: str, heads: int) -> None:
    """Of the history's tokens and, if the model queries with a mask, of that mask after them."""
    model, users = model_of(builder, heads=heads, depth=3).double(), random_users([5, 2])
    layers, heads = (1, 1) if builder == "narm" else (3, heads)  # one attention layer, after its recurrent layers
    weights, n_tokens = model.attention(packed_of(*users)), [len(user) for user in query_tokens(model, users)]
    assert weights is not None and weights.shape == (layers, 2, heads, n_tokens[0], n_tokens[0])
    for user, length in enumerate(n_tokens):
        own = weights[:, user, :, :length, :length]
        if builder != "hstu":  # its weights are not normalised
            assert_close(own.sum(-1), torch.ones(layers, heads, length, dtype=torch.float64), 1e-12)
            assert (own >= 0).all()
        assert (own.triu(1) != 0).any() == (builder in BIDIRECTIONAL)
        alone = model.attention(packed_of(users[user]))
        assert alone is not None
        assert_close(alone[:, 0], own, 1e-10)
    assert layers == 1 or not torch.equal(weights[0], weights[1]), "each layer has its own weights"


@planning
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_maps_of_a_decoder(builder: str, heads: int) -> None:
    """After the maps of a bidirectional encoder, or, if the encoder is recurrent, without any of its own."""
    model, users = model_of(builder, heads=heads, depth=3).double(), random_users([5, 2])
    maps, recurrent = attention_maps(model, packed_of(*users)), builder == RECURRENT
    layers, heads = (1, 1) if recurrent else (3, heads)
    encoder = [] if recurrent else [f"encoder, layer {layer}" for layer in (1, 2, 3)]
    assert [each.name for each in maps if each.rows == "tokens"] == encoder
    sources = ["at the history"] if recurrent else ["at its steps", "at the history"]
    decoder = [f"decoder, layer {layer}, {source}" for layer in range(1, layers + 1) for source in sources]
    assert [each.name for each in maps] == [*encoder, *decoder]
    for user, length in enumerate((5, 2)):
        for each, alone in zip(maps, attention_maps(model, packed_of(users[user])), strict=True):
            shape = [5 if side == "tokens" else 1 for side in (each.rows, each.columns)]
            assert each.weights.shape == (2, heads, *shape)
            own = each.weights[user, :, :length, :length]
            assert_close(own.sum(-1), torch.ones_like(own[..., 0]), 1e-12)
            assert (own > 0).all(), "every token attends to every other"
            assert_close(alone.weights[0], own, 1e-10)
    assert recurrent or not torch.equal(maps[0].weights, maps[1].weights), "each layer has its own weights"


@every_builder
def test_building_uses_its_generator_and_not_the_global_random_state(builder: str) -> None:
    laws.building_is_repeatable(case_of(builder))
    first, other = new_model(builder, seed=5).state_dict(), new_model(builder, seed=6).state_dict()
    matrices = [name for name, weight in first.items() if weight.dim() > 1]
    assert not any(torch.equal(first[name], other[name]) for name in matrices), "every matrix is random"


@every_builder
@tied_or_not
def test_the_padding_row_starts_at_zero(builder: str, tied: bool) -> None:
    laws.padding_is_zero(case_of(builder, items__tied=tied))


@causal
def test_targets_never_reach_the_encoder(builder: str) -> None:
    """Other targets, at other times: the states of the inputs do not change."""
    model, users = model_of(builder), random_users([6, 2, 4])
    batch, rng = batch_of(*users), np.random.default_rng(0)
    ends = np.cumsum(batch.lengths)
    items, times = batch.items.copy(), batch.times.copy()
    items[ends - 1] = items[ends - 1] % N_ITEMS + 1
    times[ends - 1] += 10**6
    true, shuffled = NextItem()(batch, rng), NextItem()(replace(batch, items=items, times=times), rng)
    assert (true.targets != shuffled.targets).sum() == 3
    assert torch.equal(model.encode(tensors(true.inputs)), model.encode(tensors(shuffled.inputs)))


@bidirectional
def test_masked_items_never_reach_the_encoder(builder: str) -> None:
    """Other items at the masked positions: no state changes."""
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
def test_events_after_a_cut_never_reach_the_encoder(builder: str) -> None:
    """Other items after a cut: the states before the first that is fed one of them do not change."""
    model, users = model_of(builder), random_users([9, 4, 2])
    cuts = [4, 2, 1]
    before = states_of(model, users, cuts)
    for step in range(4, 9):
        changed = [[*users[0]], users[1], users[2]]
        changed[0][step] = users[0][step] % N_ITEMS + 1
        after = states_of(model, changed, cuts)
        assert torch.equal(after[0][:step], before[0][:step])
        assert not torch.equal(after[0][step:], before[0][step:])
        assert torch.equal(after[1], before[1]) and torch.equal(after[2], before[2])


@planning
def test_decoder_queries_of_training_are_those_of_serving(builder: str) -> None:
    """The state at a cut is the query of the history before it; the events before that have no query."""
    model, users = model_of(builder).double(), random_users([6, 2, 9])
    inputs = task_of(model)(batch_of(*users), np.random.default_rng(0)).inputs
    assert inputs.histories is not None and len(inputs.histories) == 5 + 1 + 8
    states = torch.split(model.encode(tensors(inputs)), inputs.lengths.tolist())
    items = np.split(inputs.items, np.cumsum(inputs.lengths)[:-1])
    for state, user, cut in zip(states, items, inputs.histories.tolist(), strict=True):
        assert_close(model.head(state[cut - 1 : cut]), model.query(packed_of(user[:cut].tolist())), 1e-10)
        assert (state[: cut - 1] == 0).all()


@pytest.mark.parametrize("builder", sorted(BUILDERS.keys() - {*PLANNING}))
def test_queries_of_training_are_those_of_serving(builder: str) -> None:
    """The training query for a user's last event is the query of the history before it."""
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
