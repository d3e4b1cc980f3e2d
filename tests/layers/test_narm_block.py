"""NARM's attention to its user's states so far: soft, or to one of them."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from packed_users import assert_close, batch_of, normal
from torch import Tensor
from torch.nn import functional

from segue.layers.attention.scores import Additive, ScoreKind
from segue.layers.attention.weights import Choice, select_weights
from segue.layers.blocks.recurrent import NarmBlock
from segue.layers.dropout import set_generator
from segue.layers.packed import pack, pad

every_score = pytest.mark.parametrize("scores", get_args(ScoreKind))
every_choice = pytest.mark.parametrize("choice", get_args(Choice))


def block_of(
    width: int, scores: ScoreKind = "additive", choice: Choice = "soft", *, temperature: float = 1.0, seed: int = 0
) -> NarmBlock:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        block = NarmBlock(width, width, 0.0, scores=scores, choice=choice, temperature=temperature).double().eval()
    set_generator(block, torch.Generator().manual_seed(seed))
    return block


def hard_sigmoid(x: Tensor) -> Tensor:
    return (0.2 * x + 0.5).clamp(0, 1)


def test_every_event_equals_the_original_after_a_session_that_ends_there() -> None:
    """B [Σ w h ; h_t], w the softmax over the user's states so far of v · hard-sigmoid(A2 h_j + A1 h_t)."""
    block, lengths, x = block_of(4), [6, 1, 3], normal(10, 4)
    assert isinstance(block.score, Additive)
    a1, a2, v = block.score.query.weight, block.score.key.weight, block.score.vector.weight[0]
    outputs = torch.split(block(x, batch_of(*lengths)), lengths)
    for user, own in zip(torch.split(x, lengths), outputs, strict=True):
        for position, last in enumerate(user):
            states = user[: position + 1]
            weights = (hard_sigmoid(states @ a2.T + last @ a1.T) @ v).softmax(0)
            assert_close(own[position], block.joined.weight @ torch.cat((weights @ states, last)), 1e-12)


def test_a_masked_softmax_is_the_softmax_over_what_is_unmasked() -> None:
    """The original multiplies scores and weights by the mask and then divides by the sum, which is the same."""
    scores, mask = torch.tensor([0.3, -0.2, 0.7]), torch.tensor([1.0, 1.0, 0.0])
    theirs = (scores * mask).softmax(0) * mask
    theirs = theirs / theirs.sum()
    assert_close(theirs[:2], torch.tensor([0.622459, 0.377541]), 1e-6)
    ours = select_weights(scores, mask == 1, "soft", temperature=1.0, training=False, generator=None).weights
    assert_close(ours, torch.tensor([0.622459, 0.377541, 0.0]), 1e-6)


@every_score
def test_weights_are_those_of_the_valid_prefix(scores: ScoreKind) -> None:
    """Whatever follows it, and however long other users of the batch are."""
    block, x = block_of(4, scores), normal(9, 4)
    weights = block.attention_weights(x, batch_of(3, 6))
    assert weights.shape == (2, 1, 6, 6)
    for position in range(3):
        logits = block.score(x[position : position + 1], x[: position + 1])[0]
        assert_close(weights[0, 0, position, : position + 1], logits.softmax(0), 1e-12)
        assert (weights[0, 0, position, position + 1 :] == 0).all()


@every_score
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_fused_kernel_uses_the_reported_weights(
    scores: ScoreKind, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For soft attention by products; `repr` reports it."""
    calls = []

    def spy(*tensors: Tensor, **options: Any) -> Tensor:
        calls.append(options)
        return functional.scaled_dot_product_attention(*tensors, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("segue.layers.blocks.recurrent.fused_attention", spy)
    block, batch, x = block_of(4, scores, temperature=temperature), batch_of(3, 1, 6), normal(10, 4)
    weights = block.attention_weights(x, batch)[:, 0]
    mixed = pack(weights @ pad(x, batch), batch)
    assert_close(block(x, batch), torch.cat((mixed, x), dim=1) @ block.joined.weight.T, 1e-12)
    block.newest(x, batch)
    assert len(calls) == (0 if scores == "additive" else 2)
    assert ("fused=always" in repr(block)) == (scores != "additive")
    assert "fused=never" in repr(block_of(4, scores, "gumbel"))


@every_score
@every_choice
def test_newest_equals_the_newest_rows_of_all(scores: ScoreKind, choice: Choice) -> None:
    block, batch, x = block_of(4, scores, choice), batch_of(3, 1, 6), normal(10, 4)
    whole = block(x, batch)
    assert whole.shape == (10, 4)
    assert_close(block.newest(x, batch), whole[[2, 3, 9]], 1e-12)
    assert_close(block(x[:3], batch_of(3)), whole[:3], 1e-12)


@pytest.mark.parametrize("choice", [choice for choice in get_args(Choice) if choice != "soft"])
def test_hard_attention_at_inference_selects_the_best_state(choice: Choice) -> None:
    block, batch, x = block_of(4, "dot", choice), batch_of(5), normal(5, 4)
    weights = block.attention_weights(x, batch)[0, 0]
    soft = block_of(4, "dot").attention_weights(x, batch)[0, 0]
    assert torch.equal(weights, torch.nn.functional.one_hot(soft.argmax(1), 5).double())


@pytest.mark.parametrize("choice", ["gumbel", "reinforce"])
def test_training_samples_by_the_soft_weights_from_its_generator(choice: Choice) -> None:
    """Of three states, and never a later one."""
    block, batch = block_of(3, "dot", choice).train(), batch_of(3)
    x = torch.eye(3, dtype=torch.float64) * 0.8
    expected = block_of(3, "dot").attention_weights(x, batch)[0, 0]
    samples = torch.stack([block.attention_weights(x, batch)[0, 0].detach() for _ in range(600)])
    assert_close(samples.sum(-1), torch.ones(600, 3, dtype=torch.float64), 1e-12)
    assert ((samples - samples.round()).abs() < 1e-12).all() and (samples.triu(1).abs() < 1e-12).all()
    assert_close(samples.mean(0), expected, 0.08)  # four standard deviations
    again = block_of(3, "dot", choice).train()
    assert torch.equal(torch.stack([again.attention_weights(x, batch)[0, 0] for _ in range(9)]), samples[:9])


def test_sampled_states_have_their_log_probabilities() -> None:
    block, batch, x = block_of(3, "dot", "reinforce").train(), batch_of(3, 2), normal(5, 3)
    output = block(x, batch)
    assert output.shape == (5, 5)
    soft = block_of(3, "dot").attention_weights(x, batch)[:, 0]  # [2, 3, 3]
    rows = torch.cat((soft[0], soft[1, :2]))
    entropy = -(rows * rows.clamp(min=1e-300).log()).sum(1)
    assert_close(output[:, 4], entropy, 1e-12)
    probabilities, states = output[:, 3].exp(), output[:, :3]
    for position, (user, first) in enumerate(((0, 0), (0, 0), (0, 0), (1, 3), (1, 3))):
        row, own = rows[position], x[first : first + 3 - user]
        (sample,) = (row[: len(own)] - probabilities[position]).abs().argsort()[:1].tolist()
        assert_close(row[sample], probabilities[position], 1e-12)
        assert_close(states[position], block.joined.weight @ torch.cat((own[sample], x[position])), 1e-12)
    assert block.eval()(x, batch).shape == (5, 3)
