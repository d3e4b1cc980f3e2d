"""BERT4Rec: its tokens, its head at a mask, biases and initialisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from settings_tables import model_settings, objective_settings
from torch import Tensor
from torch.nn import functional

from segue.data.batch import Batch
from segue.errors import SettingsError
from segue.index.exact import ExactIndex
from segue.index.search import Ragged
from segue.layers.blocks.transformer import PostNormBlock
from segue.layers.packed import PackedBatch, tensors
from segue.models.build import build_model
from segue.models.encoders.bert4rec import MaskedHead
from segue.models.sequence import SequenceModel
from segue.objective.losses.softmax import full_softmax
from segue.objective.objective import Objective
from segue.objective.tasks.examples import TaskFacts
from segue.objective.tasks.masked_item import MaskedItem

N_ITEMS = 5
MASK = 6


def batch_of(*users: list[int]) -> Batch:
    lengths = np.array([len(user) for user in users])
    return Batch(items=np.concatenate(users).astype(np.int64), times=np.arange(lengths.sum()), lengths=lengths)


def packed(*users: list[int]) -> PackedBatch:
    return tensors(batch_of(*users))


def first_model(**changed: Any) -> SequenceModel:
    numbers = {"kind": "bert4rec", "width": 4, "length": 7, "heads": 2, "dropout": 0.0, **changed}
    return build_model(model_settings(**numbers), N_ITEMS, generator=torch.Generator().manual_seed(0))


def model_of(**changed: Any) -> SequenceModel:
    """With weights that are nowhere zero or one but in the padding row."""
    model, generator = first_model(**changed).double().eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.5)
    model.items.clear_padding()
    return model


def assert_close(actual: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(("positions", "indices"), [("oldest", [0, 1, 2]), ("newest", [2, 1, 0])])
def test_from_items_to_scores(positions: str, indices: list[int]) -> None:
    """LN(E + P), the blocks, at the query LN(gelu(W x + w)), then E x + b; the mask has its own vector."""
    model, batch = model_of(positions=positions), packed([3, MASK, 2])
    table, mask, bias = model.items.into, model.items.mask, model.items.bias
    assert mask is not None and bias is not None
    tokens = torch.stack((table[3], mask, table[2])) + model.positions.table[indices]
    norm = model.norm_tokens
    states = functional.layer_norm(tokens, (4,), norm.weight, norm.bias, 1e-12)  # type: ignore[arg-type]
    assert [type(block) for block in model.blocks] == [PostNormBlock, PostNormBlock]
    for block in model.blocks:
        states = block(states, batch)
    assert_close(model.encode(batch), states)
    head = model.query_transform
    assert isinstance(head, MaskedHead)
    inner = functional.gelu(states @ head.dense.weight.T + head.dense.bias)
    expected = functional.layer_norm(inner, (4,), head.norm.weight, head.norm.bias, 1e-12) @ table.T + bias
    assert_close(model.score_all(model.head(states)), expected)


def test_the_query_is_a_mask_after_the_history() -> None:
    """Also that of the toy user, cut to the length: of 10, 20, 30, 40 in four positions, 20, 30, 40 and the mask."""
    model = model_of(length=4)
    assert model.length == 3
    users = [[2, 3, 4], [1]]
    states = model.encode(packed(*([*user, MASK] for user in users)))
    assert_close(model.query(packed(*users)), model.head(states[[3, 5]]))


@pytest.mark.parametrize("tied", [True, False])
def test_biases_are_added_to_scores_and_learned_with_either_loss(tied: bool) -> None:
    model = model_of(items__tied=tied)
    query = model.query(packed([1, 2], [3]))
    assert query.shape == (2, 5) and (query[:, -1] == 1).all() and model.items.width == 4
    before = model.score_all(query)
    bias = model.items.bias
    assert bias is not None
    with torch.no_grad():
        bias[3] += 1
    after = model.score_all(query) - before
    assert_close(after, torch.tensor([0.0, 0, 0, 1, 0, 0], dtype=torch.float64).expand(2, 6))
    some = torch.tensor([3, 5, 3])
    assert_close(model.item_vectors(some), model.item_vectors()[some])
    assert torch.equal(model.item_features(), model.items.output()), "biases do not make items alike"
    task, facts = MaskedItem(share=0.3, most=9, last=1.0), TaskFacts(MASK)
    examples = task(batch_of([1, 2, 3], [4, 5]), np.random.default_rng(0), facts)
    sampled = objective_settings(loss="sampled-softmax", sampler="uniform", sampler__negatives=40)
    for loss in (objective_settings(), sampled):
        model.zero_grad()
        objective = Objective(loss, np.r_[0, np.ones(N_ITEMS, dtype=np.int64)])
        hidden = model.float().encode(tensors(examples.inputs))
        torch.autograd.backward(objective.loss(model, hidden, examples, torch.Generator().manual_seed(0)))
        assert bias.grad is not None and bias.grad[0] == 0 and (bias.grad[1:] != 0).all()
        assert all(weight.grad is not None and (weight.grad != 0).any() for weight in model.parameters())


def test_the_loss_of_the_vectors_is_the_loss_of_the_scores() -> None:
    """A constant 1 beside the query and the bias beside the item: the product is the score with its bias."""
    model = model_of()
    states = model.encode(packed([3, MASK, 2, 1, MASK]))[[1, 4]]
    targets = torch.tensor([4, 2])
    assert model.items.bias is not None
    logits = model.query_transform(states) @ model.items.into[1:].T + model.items.bias[1:]
    loss = full_softmax(model.head(states), model.item_vectors()[1:], targets - 1)
    assert_close(loss, functional.cross_entropy(logits, targets - 1))


def test_the_mask_is_never_an_answer() -> None:
    """It has no row among the items, however high it would score; nor can a search ask for it."""
    model = model_of()
    query = model.query(packed([1, 2, 3]))
    assert model.items.mask_number == MASK and len(model.item_vectors()) == N_ITEMS + 1
    assert model.score_all(query).shape == (1, N_ITEMS + 1)
    index = ExactIndex.build(model.item_vectors())
    results, _ = index.search(query, 99)
    assert sorted(results[0].tolist()) == [1, 2, 3, 4, 5]
    results, _ = index.search(query, 99, only=np.array([MASK, 0, 2]), exclude=Ragged.of_lists([[MASK]]))
    assert results.tolist() == [[2]]


def test_with_causal_attention_and_only_the_last_masked_it_predicts_the_next_item() -> None:
    """The masked last event of training is the query of serving. With causal attention the states of the history are
    those without a mask, and the mask is one more token that attends to them."""
    model, users = model_of(positions="oldest"), [[1, 4, 2, 5], [3, 2]]
    task, facts = MaskedItem(share=0.1, most=1, last=1.0), TaskFacts(MASK)
    examples = task(batch_of(*users), np.random.default_rng(0), facts)
    assert examples.inputs.items[6:].tolist() == [1, 4, 2, MASK, 3, MASK] and examples.targets[2:].tolist() == [5, 2]
    histories, inputs = [user[:-1] for user in users], tensors(examples.inputs)
    for causal in (False, True):
        for block in model.blocks:
            assert isinstance(block, PostNormBlock)
            block.attention.causal = causal
        states = model.encode(inputs)[6:]
        assert examples.positions is not None
        queries = model.head(model.encode(inputs)[examples.positions[2:]])
        assert_close(queries, model.query(packed(*histories)))
        differences = (model.encode(packed(*histories)) - states[[0, 1, 2, 4]]).abs().amax(1)
        assert (differences < 1e-12).all() if causal else (differences > 1e-6).all()


def test_initial_weights_are_small_and_biases_zero() -> None:
    model = first_model(width=64, length=200)
    n_random = 0
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight") or ("norm_" in name and name.endswith("weight")):
            assert (weight == 1).all(), name
        elif name.endswith("bias"):
            assert (weight == 0).all(), name
        else:
            rest = weight[1:] if name == "items.into" else weight
            assert rest.abs().max() <= 0.04 and rest.abs().min() > 0, name
            assert rest.std().item() == pytest.approx(0.02 * 0.8796, rel=0.25), name  # truncated at two deviations
            n_random += rest.numel()
    assert n_random > 100_000
    assert (model.items.into[0] == 0).all()


def test_cosine_leaves_the_bias_out() -> None:
    model = model_of(similarity="cosine")
    assert model.items.bias is None and "items.bias" not in model.state_dict()
    query = model.query(packed([1, 2], [3]))
    assert query.shape == (2, 4)
    assert_close(query.norm(dim=1), torch.ones(2, dtype=torch.float64))
    assert model.score_all(query)[:, 1:].abs().max() <= 1


def test_a_length_without_room_for_the_mask_is_refused() -> None:
    assert first_model(length=2).length == 1
    with pytest.raises(SettingsError, match=r"model\.length: expected a whole number >= 2, got 1"):
        model_settings(kind="bert4rec", length=1)
