"""The laws of every model, whatever its weights. A law is a function that raises an AssertionError if it is broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from segue.data.batch import Batch
from segue.layers.packed import tensors
from segue.models.attention import SamplingModel
from segue.models.checkpoint import load_model, save_model
from segue.models.kv_cache import IncrementalEncoder
from segue.models.sequence import SequenceModel
from segue.testing.cases import (
    Case,
    assert_close,
    batch_of,
    packed_of,
    queries_of,
    query_tokens,
    random_users,
    states_of,
)

EXACT = 1e-10  # in float64: only the order of sums may differ
DTYPES = ((torch.float32, 1e-6), (torch.float64, EXACT))
ONLY_OUT = {"items.out", "items.bias", "similarity.heat"}
"""Parameters of scores and losses that no query is computed from."""


def later_events_change_nothing_earlier(case: Case) -> None:
    """Causality: a state predicts the next item, so it must not depend on it. Exact in float32 and float64.

    For causal models; bidirectional ones have masks instead.
    """
    for dtype, _ in DTYPES:
        model, users = case.perturbed().to(dtype), random_users([9, 4, 1], n_items=case.n_items)
        before = states_of(model, users)
        for position in range(9):
            changed = [[*users[0]], users[1], users[2]]
            changed[0][position] = users[0][position] % case.n_items + 1
            after = states_of(model, changed)
            assert torch.equal(after[0][:position], before[0][:position]), (
                f"The item at position {position} changes earlier states: training would see the target."
            )
            assert not torch.equal(after[0][position], before[0][position]), (
                f"The state at position {position} does not depend on the item there, its newest."
            )
            assert torch.equal(after[1], before[1]) and torch.equal(after[2], before[2]), (
                "A user's item changes another user's states."
            )


def later_times_change_nothing_earlier(case: Case) -> None:
    """Causality of times: an event's time changes no earlier state, except the one before it if the model gets the
    target's time.

    The newest event's time is fixed: a model may use times relative to it, which reveal no target.
    """
    model, users = case.perturbed(), random_users([9, 4], n_items=case.n_items)
    batch = batch_of(*users)
    before = model.encode(tensors(batch))
    for position in range(1, 8):
        times = batch.times.copy()
        times[position] += 17
        after = model.encode(tensors(replace(batch, times=times)))
        earlier = position - 1 if model.target_time else position
        assert torch.equal(after[:earlier], before[:earlier]), (
            f"The time at position {position} changes earlier states."
        )
        assert torch.equal(after[9:], before[9:]), "A user's time changes another user's states."


def padding_changes_nothing(case: Case) -> None:
    """A longer history in the batch, to which all others are padded, changes no state and no query.

    Checked with new weights, whose states have size one, so that the bound is meaningful.
    """
    for dtype, atol in DTYPES:
        model, users = case.new().eval().to(dtype), random_users([5, 12, 1], n_items=case.n_items)
        alone, queries = states_of(model, users), torch.cat([queries_of(model, [user]) for user in users])
        for events in (13, 19, 62):
            long, sentence = random_users([events], seed=1, n_items=case.n_items), f"A user of {events} events changes"
            together = states_of(model, [users[0], *long, *users[1:]])
            for state, expected in zip([together[0], *together[2:]], alone, strict=True):
                assert_close(state, expected, atol, f"{sentence} the states of others in the batch.")
            batch_queries = model.query(packed_of(*users, *long))[:3]
            assert_close(batch_queries, queries, atol, f"{sentence} the queries of others in the batch.")


def batches_change_nothing(case: Case, lengths: tuple[int, ...] = (6, 1, 9, 3), seed: int = 0) -> None:
    """The states, queries and gradients of a batch are those of its users encoded alone."""
    model = case.perturbed().double()
    users = query_tokens(model, random_users(lengths, seed, n_items=case.n_items))
    generator, width = torch.Generator().manual_seed(1), model.item_vectors().shape[1]
    weights = [torch.randn(len(user), width, dtype=torch.float64, generator=generator) for user in users]
    read = _read(model, users)
    together, reversed_states = states_of(model, users, read), states_of(model, users[::-1], read and read[::-1])[::-1]
    torch.autograd.backward([(model.head(one) * weight).sum() for one, weight in zip(together, weights, strict=True)])
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    for row, (user, weight, inside, reordered) in enumerate(
        zip(users, weights, together, reversed_states, strict=True)
    ):
        (alone,) = states_of(model, [user], read and read[row : row + 1])
        assert_close(inside, alone, EXACT, "A user's states in a batch are not those of the user alone.")
        assert_close(reordered, alone, EXACT, "The order of users in a batch changes their states.")
        torch.autograd.backward((model.head(alone) * weight).sum())
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        assert (gradient is None) == (parameter.grad is None), f"Whether {name} has a gradient depends on the batch."
        if gradient is not None and parameter.grad is not None:
            sentence = f"The gradient of {name} in a batch is not the sum of its users'."
            assert_close(gradient, parameter.grad, EXACT, sentence)


def _read(model: SequenceModel, users: Sequence[Sequence[int]]) -> list[int] | None:
    """How many events of each user the encoder reads, None without a decoder. The decoder gets several, because its
    attention has no part in its first step."""
    return [(len(user) + 1) // 2 for user in users] if model.has_decoder else None


def parameters_learn(case: Case) -> None:
    """Every parameter has a gradient from the queries, except those of the output items.

    A parameter without a gradient has no state in the optimiser, so training could not be resumed. Checked in training
    mode: in evaluation mode hard attention takes the highest score, which has no gradient.
    """
    model, generator = case.changed(dropout=0.0).perturbed().double().train(), torch.Generator().manual_seed(1)
    users = query_tokens(model, random_users([6, 1, 9, 3], n_items=case.n_items))
    with torch.random.fork_rng(devices=[]):
        states = torch.cat(states_of(model, users, _read(model, users)))
    outputs = [model.head(states)]
    samples = model.sampled_attention(states) if isinstance(model, SamplingModel) else None
    if samples is not None:  # sampled attention learns through its log-probability
        outputs.append(samples.log_probability)
    noise = [torch.randn(part.shape, dtype=torch.float64, generator=generator) for part in outputs]
    torch.autograd.backward([(part * weight).sum() for part, weight in zip(outputs, noise, strict=True)])
    idle = {
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (parameter.grad is None or not parameter.grad.abs().max() > 0)
    }
    assert idle == ONLY_OUT & dict(model.named_parameters()).keys(), (
        f"These parameters have no part in any query: {', '.join(sorted(idle - ONLY_OUT))}."
    )


def prefixes_are_encoded_as_inside_the_whole(case: Case) -> None:
    """The state after a history's first events is that of these events alone, for `incremental` models."""
    model, (user,) = case.perturbed().double(), random_users([10], n_items=case.n_items)
    (whole,) = states_of(model, [user])
    for length in range(1, 10):
        prefix = replace(batch_of(user[:length]), query_times=np.array([60 * length]))  # the time of its next event
        sentence = f"The state after {length} events changes if more events follow."
        assert_close(model.encode(tensors(prefix))[-1], whole[length - 1], EXACT, sentence)


def queries_are_the_newest_states(case: Case) -> None:
    """`query` is `encode` and `head` at each user's newest token, alone and in a batch."""
    model, users = case.perturbed().double(), random_users([3, 1, 6, 40], n_items=case.n_items)
    query = model.query(packed_of(*users))
    assert_close(query, queries_of(model, users), EXACT, "`query` is not `head` of the newest state of `encode`.")
    alone = torch.cat([model.query(packed_of(user)) for user in users])
    assert_close(query, alone, EXACT, "A user's query in a batch is not that of the user alone.")
    scores = model.score_all(query)
    assert scores.shape == (4, case.n_items + 1), f"`score_all` gives {tuple(scores.shape)}, not [B, items + 1]."


def one_event_is_enough(case: Case) -> None:
    """Scores are finite for users of one event, at both ends of the catalogue, and whatever the times are."""
    model, year = case.perturbed(), 365 * 86_400
    batch = batch_of([1], [case.n_items], [case.n_items, case.n_items], [2, 3, 2])
    for times in ([0] * 7, [0, 0, 0, 0, 0, 0, 10 * year]):
        for query_times in (None, np.array([0, 0, 0, 10 * year])):
            timed = replace(batch, times=np.array(times), query_times=query_times)
            scores = model.score_all(model.query(tensors(timed)))
            assert torch.isfinite(scores).all(), "A score is not finite for a user of one, two or three events."


def query_time_counts_only_if_declared(case: Case) -> None:
    """The query time changes a query only if the model has `target_time`, and never an earlier state."""
    model, batch = case.perturbed(), batch_of(*random_users([5, 3], n_items=case.n_items))
    soon, late = (tensors(replace(batch, query_times=np.array([time, 10_000]))) for time in (1_000, 10**6))
    queries, others = model.query(soon), model.query(late)
    assert torch.equal(queries[1], others[1]), "The time of one user's query changes another's query."
    assert model.target_time or torch.equal(queries[0], others[0]), (
        "The query time changes the query, but the model does not set `target_time`, which its report shows."
    )
    assert torch.equal(model.encode(soon)[:4], model.encode(late)[:4]), (
        "The query time changes states of earlier events."
    )


def evaluation_is_repeatable(case: Case) -> None:
    """There is no dropout in evaluation mode, also after training mode."""
    model, batch = case.changed(dropout=0.5).perturbed(), packed_of(*random_users([5, 3], n_items=case.n_items))
    whole = model.encode(batch)
    assert torch.equal(model.encode(batch), whole), "Two passes in evaluation mode differ."
    with torch.random.fork_rng(devices=[]):
        model.train().encode(batch)
    assert torch.equal(model.eval().encode(batch), whole), "A pass in training mode changes those in evaluation mode."


def building_is_repeatable(case: Case) -> None:
    """Weights are sampled from the builder's generator alone, and all of them are finite."""
    first = case.new(seed=5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12_345)
        same, before = case.new(seed=5).state_dict(), torch.get_rng_state()
        other = case.new(seed=6).state_dict()
        assert torch.equal(torch.get_rng_state(), before), "Building a model changes the global random state."
    assert first.items.n_items == case.n_items, "The model is not built over the item table that the builder got."
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, same[name]), f"{name} is not sampled from the generator: it differs with one seed."
        assert torch.isfinite(weight).all(), f"{name} does not start with finite numbers."
    sampled = [name for name, weight in first.named_parameters() if weight.dim() > 1 and weight.any()]
    tables = [name for name in sampled if name.startswith("items.")]
    for name in tables:
        assert not torch.equal(first.state_dict()[name], other[name]), f"{name} is the same whatever the seed is."


def padding_is_zero(case: Case) -> None:
    """Row 0 of a new item table is padding and zero, and no other row is; `clear_padding` sets it."""
    model = case.new()
    for table in (model.items.input(torch.arange(case.n_items + 1)), model.item_vectors()):
        assert (table[0] == 0).all(), "The padding row is not zero: call `items.clear_padding()` at the builder's end."
        assert (table[1:].abs().sum(1) > 0).all(), "A new item vector is zero."


def saving_changes_nothing(case: Case) -> None:
    """A saved and loaded model is the same, bit for bit, and in evaluation mode."""
    model, batch = case.changed(dropout=0.3).perturbed(), packed_of(*random_users([4, 1, 7], n_items=case.n_items))
    with TemporaryDirectory(prefix="segue-testing-") as folder:
        save_model(model, case.changed(dropout=0.3).run_settings, Path(folder))
        again = load_model(Path(folder), case.build)
    assert not any(part.training for part in again.modules()), "A loaded model is not in evaluation mode."
    weights = again.state_dict()
    assert weights.keys() == model.state_dict().keys(), "A loaded model has other weights."
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name]), f"{name} changes by saving and loading."
    model.requires_grad_(requires_grad=False)  # like a loaded model: with gradients, torch sums in another order
    for what in ("encode", "query"):
        actual, expected = getattr(again, what)(batch), getattr(model, what)(batch)
        assert torch.equal(actual, expected), f"`{what}` changes by saving and loading."
    assert torch.equal(again.item_vectors(), model.item_vectors()), "Item vectors change by saving and loading."
    for name in ("length", "target_time", "window_step"):
        assert getattr(again, name) == getattr(model, name), f"`{name}` changes by saving and loading."


def cached_encoding_changes_nothing(case: Case) -> None:
    """With the KV cache, encoding a new event alone gives the whole history's query, for `incremental` models."""
    model, (items,) = case.perturbed(), random_users([12], n_items=case.n_items)
    assert model.incremental, "The model is not `incremental`, so new events cannot be encoded alone."
    encoder, times = IncrementalEncoder(model), 60 * np.arange(12)

    def window(events: int) -> Batch:
        return Batch(items=np.array(items[:events]), times=times[:events], lengths=np.array([events]))

    _, (cache,) = encoder.encode(window(6), [0])
    for events in range(7, 13):
        query = encoder.extend(cache, window(events))
        assert query is not None, "The cache of a history cannot be extended by one event."
        with torch.inference_mode():
            whole = model.query(tensors(window(events)))[0]
        torch.testing.assert_close(
            torch.from_numpy(query),
            whole,
            rtol=1e-5,
            atol=1e-5,
            msg=lambda why: f"An event encoded alone does not give the query of the whole history.\n{why}",
        )
