"""What holds for the states of every model, whatever its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import (
    MASK,
    N_ITEMS,
    PLANNING,
    RECURRENT,
    asked,
    asking_once,
    assert_close,
    batch_of,
    every_builder,
    looking_back,
    looking_both_ways,
    model_of,
    new_model,
    packed_of,
    planning,
    questioned,
    random_users,
    states_of,
    task_of,
    tied_or_not,
)

from segue.errors import SegueError
from segue.layers.packed import tensors
from segue.models.build import BUILDERS
from segue.models.settings import BIDIRECTIONAL, ModelSettings
from segue.objective.task import MaskedItem, next_item


def test_every_builder_is_held_to_this_contract() -> None:
    assert len(BUILDERS) == 6 and len(BIDIRECTIONAL) == 1 and len(PLANNING) == 2 and BUILDERS.keys() >= BIDIRECTIONAL
    assert set(BUILDERS) == set(get_args(get_type_hints(ModelSettings)["builder"]))


@looking_back
@pytest.mark.parametrize("positions", ["newest", "oldest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_later_item_changes_no_earlier_state_at_all(builder: str, positions: str, dtype: torch.dtype) -> None:
    model = model_of(builder, positions=positions).to(dtype)
    users = random_users([9, 4, 1])
    before = states_of(model, users)
    for place in range(9):
        changed = [[*users[0]], users[1], users[2]]
        changed[0][place] = users[0][place] % N_ITEMS + 1
        after = states_of(model, changed)
        assert torch.equal(after[0][:place], before[0][:place])
        assert not torch.equal(after[0][place], before[0][place])
        assert torch.equal(after[1], before[1]) and torch.equal(after[2], before[2])


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
    later = replace(batch, times=batch.times * 1000 + 7, asked=np.array([10**9, 10**9]))
    assert torch.equal(model.encode(tensors(later)), before)


@pytest.mark.parametrize("target_time", [True, False])
def test_hstu_knows_the_moment_of_the_question_only_where_it_says_so(target_time: bool) -> None:
    model, batch = model_of("hstu", target_time=target_time), batch_of(*random_users([5, 3]))
    assert model.target_time is target_time
    soon, late = (replace(batch, asked=np.array([moment, 10_000])) for moment in (1_000, 10**6))
    queries, others = (model.query(tensors(one)) for one in (soon, late))
    assert torch.equal(queries[1], others[1])
    assert torch.equal(queries[0], others[0]) is not target_time
    assert torch.equal(model.encode(tensors(soon))[:4], model.encode(tensors(late))[:4])


@every_builder
@pytest.mark.parametrize("more", [1, 7, 50])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.float64, 1e-10)], ids=["float32", "float64"])
def test_a_longer_user_in_the_batch_changes_nothing(builder: str, more: int, dtype: torch.dtype, atol: float) -> None:
    """As trained models start out, so that states are of size one and the bound means something."""
    model = new_model(builder).eval().to(dtype)
    users, long = random_users([5, 12, 1]), random_users([12 + more], seed=1)
    alone, together = states_of(model, users), states_of(model, [users[0], *long, *users[1:]])
    for found, expected in zip([together[0], *together[2:]], alone, strict=True):
        assert_close(found, expected, atol)
    queries = model.query(packed_of(*users, *long))[:3]
    assert_close(queries, torch.cat([asked(model, [user]) for user in users]), atol)


@every_builder
@tied_or_not
def test_states_and_gradients_of_a_batch_are_those_of_its_users(builder: str, tied: bool) -> None:
    """Packed equals padded: a user alone needs no padding, a batch pads all but the longest."""
    model = model_of(builder, tied=tied).double()
    users = questioned(model, random_users([6, 1, 9, 3]))
    generator, width = torch.Generator().manual_seed(1), model.item_vectors().shape[1]
    wanted = [torch.randn(len(user), width, dtype=torch.float64, generator=generator) for user in users]
    # A decoder's first step has nobody to look back at: what it looks back with has a part only in later ones.
    read = [(len(user) + 1) // 2 for user in users] if builder in PLANNING else None
    together = states_of(model, users, read)
    torch.autograd.backward(
        [(model.head(state) * weight).sum() for state, weight in zip(together, wanted, strict=True)]
    )
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    for place, (user, weight, inside) in enumerate(zip(users, wanted, together, strict=True)):
        (alone,) = states_of(model, [user], None if read is None else read[place : place + 1])
        assert_close(inside, alone, 1e-10)
        torch.autograd.backward((model.head(alone) * weight).sum())
    reached, only_out = 0, {"items.out", "items.bias"} & found.keys()
    for name, parameter in model.named_parameters():
        gradient = found[name]
        if gradient is None or parameter.grad is None:
            assert name in only_out and gradient is None and parameter.grad is None
            continue
        assert_close(gradient, parameter.grad, 1e-10)
        reached += bool(gradient.abs().max() > 0)
    assert reached == len(found) - len(only_out), "every parameter but the items' own has a part in the questions"


@every_builder
@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_users_of_a_batch_are_strangers(builder: str, lengths: list[int], seed: int) -> None:
    model = model_of(builder).double()
    users = random_users(lengths, seed)
    together = states_of(model, users)
    for user, found in zip(users, together, strict=True):
        assert_close(found, states_of(model, [user])[0], 1e-10)
    assert_close(model.query(packed_of(*users)), asked(model, users), 1e-10)


@every_builder
def test_the_order_of_users_is_only_an_order(builder: str) -> None:
    model = model_of(builder).double()
    users = random_users([4, 7, 1, 5])
    there, back = states_of(model, users), states_of(model, users[::-1])
    for one, other in zip(there, back[::-1], strict=True):
        assert_close(one, other, 1e-10)


@looking_back
def test_counted_from_the_oldest_a_prefix_is_encoded_as_inside_the_whole(builder: str) -> None:
    (user,) = random_users([10])
    for positions, consistent in (("oldest", True), ("newest", False)):
        model = model_of(builder, positions=positions).double()
        (whole,) = states_of(model, [user])
        ends = torch.stack([states_of(model, [user[:length]])[0][-1] for length in range(1, 10)])
        assert ((ends - whole[:9]).abs().max().item() < 1e-10) == consistent, positions


@every_builder
@tied_or_not
def test_a_query_is_the_head_of_the_newest_state_and_scores_are_its_products(builder: str, tied: bool) -> None:
    """The query of one block and of many, alone and in company."""
    for depth in (1, 3):
        model, users = model_of(builder, tied=tied, depth=depth).double(), random_users([3, 1, 6])
        query = model.query(packed_of(*users))
        assert_close(query, asked(model, users), 1e-10)
        assert_close(query, torch.cat([model.query(packed_of(user)) for user in users]), 1e-10)
    scores = model.score_all(query)
    assert scores.shape == (3, N_ITEMS + 1)
    expected = np.einsum("bd,vd->bv", query.detach().numpy(), model.item_vectors().detach().numpy())
    assert_close(scores, torch.from_numpy(expected), 1e-10)


@every_builder
def test_tied_means_one_vector_an_item(builder: str) -> None:
    tied, untied = model_of(builder, tied=True), model_of(builder, tied=False)
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1
    batch = packed_of([3, 4])
    for model, moved in ((tied, True), (untied, False)):
        before = model.query(batch)
        with torch.no_grad():
            model.items.output()[4] += 1
        assert torch.equal(model.query(batch), before) != moved


@every_builder
def test_evaluation_is_repeatable_and_training_drops(builder: str) -> None:
    model, batch = model_of(builder, dropout=0.5), packed_of(*random_users([5, 3]))
    assert torch.equal(model.encode(batch), model.encode(batch))
    whole = model.encode(batch)
    with torch.random.fork_rng(devices=[]):
        model.train()
        assert not torch.equal(model.encode(batch), model.encode(batch))
        assert torch.equal(model.eval().encode(batch), whole)


@every_builder
def test_users_of_one_event_and_ids_at_the_end_of_the_catalogue(builder: str) -> None:
    model = model_of(builder)
    found = model.score_all(model.query(packed_of([1], [N_ITEMS], [N_ITEMS, N_ITEMS])))
    assert torch.isfinite(found).all()
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


@asking_once
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_says_who_looked_at_whom(builder: str, heads: int) -> None:
    """Of the history's tokens and, where the model asks with a mask, of that one after them."""
    model, users = model_of(builder, heads=heads, depth=3).double(), random_users([5, 2])
    found, tokens = model.attention(packed_of(*users)), [len(user) for user in questioned(model, users)]
    assert found.shape == (3, 2, heads, tokens[0], tokens[0])
    for user, length in enumerate(tokens):
        own = found[:, user, :, :length, :length]
        if builder != "hstu":  # its weights stand each for itself
            assert_close(own.sum(-1), torch.ones(3, heads, length, dtype=torch.float64), 1e-12)
            assert (own >= 0).all()
        assert (own.triu(1) != 0).any() == (builder in BIDIRECTIONAL)
        assert_close(model.attention(packed_of(users[user]))[:, 0], own, 1e-10)
    assert not torch.equal(found[0], found[1]), "each layer has its own"


@planning
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_says_where_a_decoder_looks_when_it_begins(builder: str, heads: int) -> None:
    """Its row comes after the events; they look both ways, or, where they are read one by one, at nobody."""
    model, users = model_of(builder, heads=heads, depth=3).double(), random_users([5, 2])
    found, recurrent = model.attention(packed_of(*users)), builder == RECURRENT
    assert found.shape == ((1, 2, 1, 6, 6) if recurrent else (3, 2, heads, 6, 6))
    for user, length in enumerate((5, 2)):
        own = found[:, user, :, : length + 1, : length + 1]
        assert_close(own[:, :, -1].sum(-1), torch.ones_like(own[:, :, -1, 0]), 1e-12)
        assert_close(own[:, :, :-1].sum(-1), torch.full_like(own[:, :, :-1, 0], 0 if recurrent else 1), 1e-12)
        assert (own >= 0).all() and (own[..., -1] == 0).all() and (own[:, :, -1, :-1] > 0).all()
        assert ((own[:, :, :-1].triu(1) != 0).any()) != recurrent
        assert_close(model.attention(packed_of(users[user]))[:, 0], own, 1e-10)


@every_builder
def test_building_leaves_the_global_random_state_alone_and_draws_from_its_generator(builder: str) -> None:
    before = torch.get_rng_state()
    first, same, other = new_model(builder, seed=5), new_model(builder, seed=5), new_model(builder, seed=6)
    assert torch.equal(torch.get_rng_state(), before)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, same.state_dict()[name]), name
        assert torch.isfinite(weight).all(), name
        if weight.dim() > 1:
            assert not torch.equal(weight, other.state_dict()[name]), name


@every_builder
@tied_or_not
def test_the_padding_row_starts_at_zero(builder: str, tied: bool) -> None:
    model = new_model(builder, tied=tied)
    for table in (model.items.into, model.item_vectors()):
        assert (table[0] == 0).all()
        assert (table[1:].abs().sum(1) > 0).all()


@looking_back
def test_targets_never_reach_the_encoder(builder: str) -> None:
    """Other answers, at other times: the states that are questioned stay as they were."""
    model, users = model_of(builder), random_users([6, 2, 4])
    batch, rng = batch_of(*users), np.random.default_rng(0)
    ends = np.cumsum(batch.lengths)
    items, times = batch.items.copy(), batch.times.copy()
    items[ends - 1] = items[ends - 1] % N_ITEMS + 1
    times[ends - 1] += 10**6
    true, shuffled = next_item(batch, rng), next_item(replace(batch, items=items, times=times), rng)
    assert (true.targets != shuffled.targets).sum() == 3
    assert torch.equal(model.encode(tensors(true.inputs)), model.encode(tensors(shuffled.inputs)))


@looking_both_ways
def test_hidden_items_never_reach_the_encoder(builder: str) -> None:
    """Other items at the places that are hidden: every state stays as it was."""
    model, batch = model_of(builder), batch_of(*random_users([6, 2, 9]))
    task = MaskedItem(mask=MASK, share=0.4, most=9, last=0.0)
    true = task(batch, np.random.default_rng(5))
    items = batch.items.copy()
    assert true.positions is not None and len(true.positions) == 2 + 1 + 4
    items[true.positions] = items[true.positions] % N_ITEMS + 1
    other = task(replace(batch, items=items), np.random.default_rng(5))
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
    examples = task_of(builder)(batch_of(*users), np.random.default_rng(0))
    inputs = examples.inputs
    assert inputs.histories is not None and len(inputs.histories) == 2 + 1 + 2
    states = torch.split(model.encode(tensors(inputs)), inputs.lengths.tolist())
    items = np.split(inputs.items, np.cumsum(inputs.lengths)[:-1])
    for state, user, read in zip(states, items, inputs.histories.tolist(), strict=True):
        assert_close(model.head(state[read - 1 : read]), model.query(packed_of(user[:read].tolist())), 1e-10)
        assert (state[: read - 1] == 0).all()


@asking_once
def test_what_is_asked_in_training_is_what_is_asked_in_service(builder: str) -> None:
    """The question about a user's last event, which training asks, is that of the history before it."""
    model, users = model_of(builder).double(), random_users([6, 2, 9])
    examples = task_of(builder)(batch_of(*users), np.random.default_rng(0))
    states = model.encode(tensors(examples.inputs))
    last = torch.from_numpy(np.cumsum(examples.inputs.lengths) - 1)[-3:]
    expected = model.query(packed_of(*(user[:-1] for user in users)))
    assert_close(model.head(states[last]), expected, 1e-10)


@every_builder
@tied_or_not
def test_cosine_scores_are_products_of_directions(builder: str, tied: bool) -> None:
    model, users = model_of(builder, tied=tied, similarity="cosine").double(), random_users([3, 1, 6])
    query, items = model.query(packed_of(*users)), model.item_vectors()
    ones = torch.ones(N_ITEMS, dtype=torch.float64)
    assert_close(query.norm(dim=1), ones[:3], 1e-12)
    assert_close(items[1:].norm(dim=1), ones, 1e-12)
    assert (items[0] == 0).all()
    some = torch.tensor([7, 1, 7])
    assert_close(model.item_vectors(some), items[some], 1e-12)
    plain, same = model.items.output(), asked(model, users)
    assert_close(query, same, 1e-10)
    assert_close(model.score_all(query), torch.cosine_similarity(same[:, None], plain[None], dim=2), 1e-10)
    with torch.no_grad():
        (model.items.into if model.items.out is None else model.items.out)[4] *= 100
    assert_close(model.item_vectors(), items, 1e-12)
