"""What holds for every model, whatever its weights. Each law is a function of a case, and fails with a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from segue.data.batch import Batch
from segue.layers.packed import tensors
from segue.models.checkpoint import load_model, save_model
from segue.models.kv_cache import IncrementalEncoder
from segue.models.sampled_attention import SamplingModel
from segue.models.sequence import SequenceModel
from segue.testing.cases import Case, asked, assert_close, batch_of, packed_of, questioned, random_users, states_of

EXACT = 1e-10  # in float64: sums of other lengths are taken in another order, and nothing more
DTYPES = ((torch.float32, 1e-6), (torch.float64, EXACT))
ONLY_OUT = {"items.out", "items.bias", "similarity.heat"}
"""What questions are compared with, or divided by in a loss, and not made of."""


def later_events_change_nothing_earlier(case: Case) -> None:
    """Causality: a state asks for the item that comes next, so it must not know it. Exactly, in float32 and 64.

    For models that look back only; those that look both ways have masks instead.
    """
    for dtype, _ in DTYPES:
        model, users = case.moved().to(dtype), random_users([9, 4, 1], n_items=case.n_items)
        before = states_of(model, users)
        for place in range(9):
            changed = [[*users[0]], users[1], users[2]]
            changed[0][place] = users[0][place] % case.n_items + 1
            after = states_of(model, changed)
            assert torch.equal(after[0][:place], before[0][:place]), (
                f"The item at place {place} changes states before it: the answer would be in sight while training."
            )
            assert not torch.equal(after[0][place], before[0][place]), (
                f"The state at place {place} does not depend on the item there, which is the newest it knows."
            )
            assert torch.equal(after[1], before[1]) and torch.equal(after[2], before[2]), (
                "A user's item changes another user's states."
            )


def later_times_change_nothing_earlier(case: Case) -> None:
    """Causality of times: when an event was moves no state before it, but where a state is told the moment of the next.

    The newest event's time is held. What looks back from there, as the time since the newest does, knows how much time
    passed in all and nothing else of what came later: no answer is in sight.
    """
    model, users = case.moved(), random_users([9, 4], n_items=case.n_items)
    batch = batch_of(*users)
    before = model.encode(tensors(batch))
    for place in range(1, 8):
        times = batch.times.copy()
        times[place] += 17
        after = model.encode(tensors(replace(batch, times=times)))
        earlier = place - 1 if model.target_time else place
        assert torch.equal(after[:earlier], before[:earlier]), f"The time at place {place} changes states before it."
        assert torch.equal(after[9:], before[9:]), "A user's time changes another user's states."


def padding_changes_nothing(case: Case) -> None:
    """A longer user in the batch, which all others are padded to, leaves states and questions as they are.

    With weights as they start out, so that states are of size one and the bound means something.
    """
    for dtype, atol in DTYPES:
        model, users = case.new().eval().to(dtype), random_users([5, 12, 1], n_items=case.n_items)
        alone, questions = states_of(model, users), torch.cat([asked(model, [user]) for user in users])
        for events in (13, 19, 62):
            long, sentence = random_users([events], seed=1, n_items=case.n_items), f"A user of {events} events changes"
            together = states_of(model, [users[0], *long, *users[1:]])
            for found, expected in zip([together[0], *together[2:]], alone, strict=True):
                assert_close(found, expected, atol, f"{sentence} the states of others in the batch.")
            found = model.query(packed_of(*users, *long))[:3]
            assert_close(found, questions, atol, f"{sentence} the questions of others in the batch.")


def batches_change_nothing(case: Case, lengths: tuple[int, ...] = (6, 1, 9, 3), seed: int = 0) -> None:
    """Packed equals alone: the states, the questions and the gradients of a batch are those of its users."""
    model = case.moved().double()
    users = questioned(model, random_users(lengths, seed, n_items=case.n_items))
    generator, width = torch.Generator().manual_seed(1), model.item_vectors().shape[1]
    wanted = [torch.randn(len(user), width, dtype=torch.float64, generator=generator) for user in users]
    read = _read(model, users)
    together, backwards = states_of(model, users, read), states_of(model, users[::-1], read and read[::-1])[::-1]
    torch.autograd.backward([(model.head(one) * weight).sum() for one, weight in zip(together, wanted, strict=True)])
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    for place, (user, weight, inside, turned) in enumerate(zip(users, wanted, together, backwards, strict=True)):
        (alone,) = states_of(model, [user], read and read[place : place + 1])
        assert_close(inside, alone, EXACT, "A user's states in a batch are not those of the user alone.")
        assert_close(turned, alone, EXACT, "The order of users in a batch changes their states.")
        torch.autograd.backward((model.head(alone) * weight).sum())
    for name, parameter in model.named_parameters():
        gradient = found[name]
        assert (gradient is None) == (parameter.grad is None), f"Whether {name} is learned depends on the batch."
        if gradient is not None and parameter.grad is not None:
            sentence = f"The gradient of {name} in a batch is not the sum of its users'."
            assert_close(gradient, parameter.grad, EXACT, sentence)


def _read(model: SequenceModel, users: Sequence[Sequence[int]]) -> list[int] | None:
    """Where a model has a decoder, how many events of each user are read and not fed to it. Its first step has nobody
    to look back at: what it looks back with has a part only in later ones."""
    return [(len(user) + 1) // 2 for user in users] if model.has_decoder else None


def parameters_learn(case: Case) -> None:
    """Every parameter has a part in the questions, but what items alone have on the way out.

    One without a gradient has no state in the optimiser, and training could not be taken up again. It is asked of a
    model that trains: in an answer, hard attention looks where scores are highest, and they have no gradient.
    """
    model, generator = case.changed(dropout=0.0).moved().double().train(), torch.Generator().manual_seed(1)
    users = questioned(model, random_users([6, 1, 9, 3], n_items=case.n_items))
    with torch.random.fork_rng(devices=[]):
        states = torch.cat(states_of(model, users, _read(model, users)))
    asking = [model.head(states)]
    draws = model.sampled_attention(states) if isinstance(model, SamplingModel) else None
    if draws is not None:  # what was drawn is learned from by its chance
        asking.append(draws.log_probability)
    noise = [torch.randn(part.shape, dtype=torch.float64, generator=generator) for part in asking]
    torch.autograd.backward([(part * weight).sum() for part, weight in zip(asking, noise, strict=True)])
    idle = {
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (parameter.grad is None or not parameter.grad.abs().max() > 0)
    }
    assert idle == ONLY_OUT & dict(model.named_parameters()).keys(), (
        f"These parameters have no part in any question: {', '.join(sorted(idle - ONLY_OUT))}."
    )


def prefixes_are_encoded_as_inside_the_whole(case: Case) -> None:
    """The state after a history's first events is that of these events alone, for models that claim it."""
    model, (user,) = case.moved().double(), random_users([10], n_items=case.n_items)
    (whole,) = states_of(model, [user])
    for length in range(1, 10):
        prefix = replace(batch_of(user[:length]), query_times=np.array([60 * length]))  # when its next event was
        sentence = f"The state after {length} events is another where more events follow."
        assert_close(model.encode(tensors(prefix))[-1], whole[length - 1], EXACT, sentence)


def questions_are_the_newest_states(case: Case) -> None:
    """`query` is `encode` and `head` at each user's newest token, alone and in company."""
    model, users = case.moved().double(), random_users([3, 1, 6, 40], n_items=case.n_items)
    query = model.query(packed_of(*users))
    assert_close(query, asked(model, users), EXACT, "`query` is not `head` of the newest state of `encode`.")
    alone = torch.cat([model.query(packed_of(user)) for user in users])
    assert_close(query, alone, EXACT, "A user's question in a batch is not that of the user alone.")
    scores = model.score_all(query)
    assert scores.shape == (4, case.n_items + 1), f"`score_all` gives {tuple(scores.shape)}, not [B, items + 1]."


def one_event_is_enough(case: Case) -> None:
    """Scores are finite for users of one event, at both ends of the catalogue, and whatever the times are."""
    model, year = case.moved(), 365 * 86_400
    batch = batch_of([1], [case.n_items], [case.n_items, case.n_items], [2, 3, 2])
    for times in ([0] * 7, [0, 0, 0, 0, 0, 0, 10 * year]):
        for asked_at in (None, np.array([0, 0, 0, 10 * year])):
            told = replace(batch, times=np.array(times), query_times=asked_at)
            scores = model.score_all(model.query(tensors(told)))
            assert torch.isfinite(scores).all(), "A score is not finite for a user of one, two or three events."


def the_moment_counts_only_where_it_says_so(case: Case) -> None:
    """When a question is asked changes nothing, unless the model says `target_time`; earlier states it never does."""
    model, batch = case.moved(), batch_of(*random_users([5, 3], n_items=case.n_items))
    soon, late = (tensors(replace(batch, query_times=np.array([moment, 10_000]))) for moment in (1_000, 10**6))
    questions, others = model.query(soon), model.query(late)
    assert torch.equal(questions[1], others[1]), "The moment of one user's question changes another's."
    assert model.target_time or torch.equal(questions[0], others[0]), (
        "The moment of the question changes it, and the model does not say `target_time`: its report would not either."
    )
    assert torch.equal(model.encode(soon)[:4], model.encode(late)[:4]), (
        "The moment of the question changes states of earlier events."
    )


def evaluation_is_repeatable(case: Case) -> None:
    """Nothing is dropped in evaluation mode, also after training mode."""
    model, batch = case.changed(dropout=0.5).moved(), packed_of(*random_users([5, 3], n_items=case.n_items))
    whole = model.encode(batch)
    assert torch.equal(model.encode(batch), whole), "Two passes in evaluation mode differ."
    with torch.random.fork_rng(devices=[]):
        model.train().encode(batch)
    assert torch.equal(model.eval().encode(batch), whole), "A pass in training mode changes those in evaluation mode."


def building_is_repeatable(case: Case) -> None:
    """Weights are drawn from the generator that the builder gets, and from nothing else; all of them are finite."""
    first = case.new(seed=5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12_345)
        same, before = case.new(seed=5).state_dict(), torch.get_rng_state()
        other = case.new(seed=6).state_dict()
        assert torch.equal(torch.get_rng_state(), before), "Building a model changes the global random state."
    assert first.items.n_items == case.n_items, "The model is not built over the item table that the builder got."
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, same[name]), f"{name} is not drawn from the generator: it differs with one seed."
        assert torch.isfinite(weight).all(), f"{name} does not start with finite numbers."
    drawn = [name for name, weight in first.named_parameters() if weight.dim() > 1 and weight.any()]
    tables = [name for name in drawn if name.startswith("items.")]
    for name in tables:
        assert not torch.equal(first.state_dict()[name], other[name]), f"{name} is the same whatever the seed is."


def padding_is_zero(case: Case) -> None:
    """Row 0 of the item table is padding: zero at first, while no item's row is. `clear_padding` does it."""
    model = case.new()
    for table in (model.items.input(torch.arange(case.n_items + 1)), model.item_vectors()):
        assert (table[0] == 0).all(), "The padding row is not zero: call `items.clear_padding()` at the builder's end."
        assert (table[1:].abs().sum(1) > 0).all(), "An item's vector starts at zero."


def saving_changes_nothing(case: Case) -> None:
    """A model comes back from its two files bit for bit, ready to answer."""
    model, batch = case.changed(dropout=0.3).moved(), packed_of(*random_users([4, 1, 7], n_items=case.n_items))
    with TemporaryDirectory(prefix="segue-testing-") as folder:
        save_model(model, case.changed(dropout=0.3).named, Path(folder))
        again = load_model(Path(folder), case.build)
    assert not any(part.training for part in again.modules()), "A loaded model is not in evaluation mode."
    weights = again.state_dict()
    assert weights.keys() == model.state_dict().keys(), "A loaded model has other weights."
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name]), f"{name} is another after saving and loading."
    model.requires_grad_(requires_grad=False)  # as it is loaded: for a gradient, torch adds in another order
    for what in ("encode", "query"):
        found, expected = getattr(again, what)(batch), getattr(model, what)(batch)
        assert torch.equal(found, expected), f"`{what}` gives other numbers after saving and loading."
    assert torch.equal(again.item_vectors(), model.item_vectors()), "Item vectors are others after loading."
    for name in ("length", "width", "target_time", "window_step"):
        assert getattr(again, name) == getattr(model, name), f"`{name}` is another after saving and loading."


def remembering_changes_nothing(case: Case) -> None:
    """A new event that is encoded alone asks as the whole history does, for models that claim it (`incremental`)."""
    model, (items,) = case.moved(), random_users([12], n_items=case.n_items)
    assert model.incremental, "The model does not claim that new events can be encoded alone."
    continuation, times = IncrementalEncoder(model), 60 * np.arange(12)

    def window(events: int) -> Batch:
        return Batch(items=np.array(items[:events]), times=times[:events], lengths=np.array([events]))

    _, (memory,) = continuation.encode(window(6), [0])
    for events in range(7, 13):
        question = continuation.extend(memory, window(events))
        assert question is not None, "A history with one event more is not continued."
        with torch.inference_mode():
            whole = model.query(tensors(window(events)))[0]
        torch.testing.assert_close(
            torch.from_numpy(question),
            whole,
            rtol=1e-5,
            atol=1e-5,
            msg=lambda why: f"An event encoded alone does not ask as the whole history does.\n{why}",
        )
