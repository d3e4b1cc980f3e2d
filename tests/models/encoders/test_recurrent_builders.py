"""GRU4Rec and NARM: their layers, and the laws for every kind of NARM's attention."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from settings_tables import model_settings
from torch import nn

from segue.data.batch import Batch
from segue.errors import SettingsError
from segue.layers.attention.scores import Additive, ScoreKind
from segue.layers.attention.weights import Choice
from segue.layers.blocks.recurrent import GRUBlock, NarmBlock
from segue.layers.packed import tensors
from segue.models.attention import SamplingModel
from segue.models.build import build_model
from segue.models.sequence import SequenceModel
from segue.testing import Case, laws
from segue.testing.cases import batch_of
from segue.testing.learning import Learner

TWO_USERS = tensors(
    Batch(
        items=np.array([3, 1, 2, 5, 4]),
        times=np.arange(5),
        lengths=np.array([3, 2]),
        values=np.array([1, 2, 3, 4, 5], dtype=np.float32),
    )
)


def settings_of(**changed: Any) -> Any:
    return model_settings(**{"kind": "gru4rec", "width": 4, "depth": 2, "dropout": 0.0, **changed})


def model_of(**changed: Any) -> SequenceModel:
    return build_model(settings_of(**changed), 5, generator=torch.Generator().manual_seed(0)).double().eval()


def narm_case(**changed: Any) -> Case:
    shape = {"kind": "narm", "width": 8, "depth": 1, "length": 64, **changed}
    return Case(settings=settings_of(**shape))


def torch_gru(model: SequenceModel, layers: int) -> nn.GRU:
    """torch's GRU with the model's weights."""
    gru = nn.GRU(4, 4, num_layers=layers, batch_first=True).double()
    for layer in range(layers):
        block = model.blocks[layer]
        assert isinstance(block, GRUBlock)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(gru, f"{name}_l{layer}").data.copy_(getattr(block.cell, f"{name}_l0").data)
    return gru


def test_gru4rec_is_torchs_gru_over_scaled_items_and_a_linear_map() -> None:
    """E √D through the layers, and W h + b at the queries."""
    model = model_of()
    assert [type(block) for block in model.blocks] == [GRUBlock, GRUBlock]
    gru, tokens = torch_gru(model, 2), model.items.into * math.sqrt(4)
    expected = torch.cat([gru(tokens[users][None])[0][0] for users in ([3, 1, 2], [5, 4])])
    torch.testing.assert_close(model.encode(TWO_USERS), expected, rtol=0, atol=1e-12)
    linear = model.query_transform
    assert isinstance(linear, nn.Linear)
    query = expected[[2, 4]] @ linear.weight.T + linear.bias
    torch.testing.assert_close(model.query(TWO_USERS), query, rtol=0, atol=1e-12)


def test_narms_query_is_of_the_last_state_and_a_mixture_of_all() -> None:
    """B [Σ w h ; h_n], w ∝ exp(v · hard-sigmoid(A2 h_j + A1 h_n)), through one layer of torch's units."""
    model = model_of(kind="narm", depth=1, scores="additive")
    attention = model.blocks[1]
    assert isinstance(attention, NarmBlock) and isinstance(attention.score, Additive)
    a1, a2, v = attention.score.query.weight, attention.score.key.weight, attention.score.vector.weight[0]
    states = torch_gru(model, 1)(model.items.into[[3, 1, 2]][None] * 2)[0][0]
    weights = ((0.2 * (states @ a2.T + states[-1] @ a1.T) + 0.5).clamp(0, 1) @ v).softmax(0)
    expected = attention.joined.weight @ torch.cat((weights @ states, states[-1]))
    torch.testing.assert_close(model.query(TWO_USERS)[0], expected, rtol=0, atol=1e-12)
    maps = model.attention(TWO_USERS)
    assert maps is not None and maps.shape == (1, 2, 1, 3, 3)
    torch.testing.assert_close(maps[0, 0, 0, 2], weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("builder", ["gru4rec", "narm"])
def test_states_may_be_wider_than_tokens(builder: str) -> None:
    """In every layer; queries are as wide as items, and sampled attention is still reported."""
    model = model_of(kind=builder, state_width=7)
    cells = [block.cell for block in model.blocks if isinstance(block, GRUBlock)]
    assert [(cell.input_size, cell.hidden_size) for cell in cells] == [(4, 7), (7, 7)]
    assert model.query(TWO_USERS).shape == (2, 4)
    case = Case(settings=settings_of(kind=builder, state_width=7, length=64))
    laws.later_events_change_nothing_earlier(case)
    laws.batches_change_nothing(case)
    laws.parameters_learn(case)
    laws.queries_are_the_newest_states(case)
    laws.saving_changes_nothing(case)
    if builder == "narm":
        sampler = narm_case(choice="reinforce", state_width=7).new().train()
        assert isinstance(sampler, SamplingModel) and sampler.sampled_attention(sampler.encode(TWO_USERS)) is not None
        assert sampler.sampled_attention(sampler.eval().encode(TWO_USERS)) is None


@pytest.mark.parametrize("scores", get_args(ScoreKind))
@pytest.mark.parametrize("choice", get_args(Choice))
def test_narm_satisfies_the_laws_with_every_attention(scores: ScoreKind, choice: Choice) -> None:
    case = narm_case(scores=scores, choice=choice)
    laws.later_events_change_nothing_earlier(case)
    laws.batches_change_nothing(case)
    laws.queries_are_the_newest_states(case)
    laws.evaluation_is_repeatable(case)
    laws.parameters_learn(case)


@pytest.mark.parametrize("choice", [choice for choice in get_args(Choice) if choice != "soft"])
def test_hard_attention_learns_a_cycle_and_so_do_its_scores(choice: Choice) -> None:
    """The next item is the one after the last."""
    model = narm_case(width=16, scores="bilinear", choice=choice).new()
    assert isinstance(model, SamplingModel)
    attention = model.blocks[1]
    assert isinstance(attention, NarmBlock)
    (scores,) = attention.score.parameters()
    before = scores.detach().clone()
    users = [[(start + position) % 12 + 1 for position in range(6)] for start in range(12)]
    Learner(model, batch_of(*users)).steps(60)
    assert not torch.allclose(scores, before, atol=1e-3)
    answers = model.score_all(model.query(tensors(batch_of(*(user[:-1] for user in users)))))[:, 1:].argmax(1) + 1
    assert answers.tolist() == [user[-1] for user in users]


@pytest.mark.parametrize("builder", ["gru4rec", "narm", "caser", "nextitnet"])
@pytest.mark.parametrize("inputs", ["rated", "combined"])
def test_these_builders_read_values_of_events(builder: str, inputs: str) -> None:
    """Beside an item or after it: later values change no earlier state, and a query is that of the newest state."""
    model = model_of(kind=builder, inputs=inputs, depth=1, length=8)
    assert model.length == 8
    states, query = model.encode(TWO_USERS), model.query(TWO_USERS)
    assert states.shape[0] == 5 and query.shape == (2, 4)
    torch.testing.assert_close(model.head(states[[2, 4]]), query, rtol=0, atol=1e-12)
    assert TWO_USERS.values is not None
    values = TWO_USERS.values.clone()
    values[1] = 5.0
    other = model.encode(with_values(values))
    assert torch.equal(other[0], states[0]) and not torch.equal(other[1], states[1])
    assert torch.equal(other[3:], states[3:])


def with_values(values: torch.Tensor) -> Any:
    """The two users with other values."""
    return tensors(
        Batch(
            items=TWO_USERS.items.numpy(),
            times=TWO_USERS.times.numpy(),
            lengths=TWO_USERS.lengths.numpy(),
            values=values.numpy(),
        )
    )


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"kind": "gru4rec", "heads": 2}, "There is no key 'heads' in model = 'gru4rec'"),
        ({"kind": "gru4rec", "feed_forward": 2}, "There is no key 'feed_forward' in model = 'gru4rec'"),
        ({"kind": "narm", "positions": "oldest"}, "There is no key 'positions' in model = 'narm'"),
        ({"kind": "gru4rec", "scores": "dot"}, "There is no key 'scores' in model = 'gru4rec'"),
        ({"kind": "gru4rec", "choice": "gumbel"}, "There is no key 'choice' in model = 'gru4rec'"),
        ({"kind": "narm", "choice__temperature": 0.5}, "There is no key 'temperature' in model.choice = 'soft'"),
        (
            {"kind": "narm", "choice": "gumbel", "choice__temperature": 0.0},
            "model.choice.temperature: expected a number > 0",
        ),
        (
            {"kind": "narm", "choice": "gumbel", "choice__entropy_bonus": 0.1},
            "There is no key 'entropy_bonus' in model.choice = 'gumbel'",
        ),
        (
            {"kind": "narm", "choice": "reinforce", "choice__entropy_bonus": -1.0},
            "model.choice.entropy_bonus: expected a number >= 0",
        ),
        ({"kind": "caser", "state_width": 5}, "There is no key 'state_width' in model = 'caser'"),
        ({"kind": "narm", "state_width": -1}, "model.state_width: expected a whole number >= 0, got -1"),
        ({"kind": "gru4rec", "kernel": 5}, "There is no key 'kernel' in model = 'gru4rec'"),
        (
            {"kind": "nextitnet", "dilations": []},
            "model.dilations: expected a list of 1 or more whole ",
        ),
        ({"kind": "nextitnet", "dilations": [1, 0]}, "model.dilations[1]: expected a whole number >= 1, got 0."),
        ({"kind": "nextitnet", "kernel": 0}, "model.kernel: expected a whole number >= 1, got 0"),
        ({"kind": "nextitnet", "image_events": 3}, "There is no key 'image_events' in model = 'nextitnet'"),
    ],
    ids=str,
)
def test_settings_without_effect_or_out_of_range_are_refused_by_name(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError) as error:
        model_settings(**changed)
    assert str(error.value).startswith(sentence)
