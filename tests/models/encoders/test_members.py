"""Encoders side by side: each is a model of its own, with its share of the width and a loss of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from packed_users import assert_close, batch_of
from settings_tables import model_settings, objective_settings

from segue.data.batch import Batch
from segue.errors import SettingsError
from segue.layers.packed import PackedBatch, tensors
from segue.models.build import build_model
from segue.models.encoders.sasrec import SASRecSettings
from segue.models.sequence import SequenceModel
from segue.objective.objective import Objective
from segue.testing import check_encoder

N_ITEMS, WIDTH, MEMBERS = 12, 16, 2
LENGTHS = (5, 1, 4)


def settings_of(*, members: int, width: int) -> SASRecSettings:
    settings = model_settings(kind="sasrec", width=width, heads=2, length=8, dropout=0.0, members=members)
    assert isinstance(settings, SASRecSettings)
    return settings


def ensemble() -> SequenceModel:
    generator = torch.Generator().manual_seed(3)
    return build_model(settings_of(members=MEMBERS, width=WIDTH), N_ITEMS, generator=generator)


def member(model: SequenceModel, number: int) -> SequenceModel:
    """A single model with the weights of one member."""
    width = WIDTH // MEMBERS
    single = build_model(settings_of(members=1, width=width), N_ITEMS, generator=torch.Generator())
    share = slice(number * width, (number + 1) * width)
    weights = {}
    for name, tensor in model.state_dict().items():
        if name in ("items.into", "positions.table"):
            weights[name] = tensor[:, share]
        elif name.startswith(f"norm.norms.{number}."):
            weights[name.replace(f"norms.{number}.", "")] = tensor
        elif name.startswith("blocks.") and name.split(".")[2:4] == ["blocks", str(number)]:
            weights[name.replace(f".blocks.{number}.", ".")] = tensor
    single.load_state_dict(weights)
    return single


def batch() -> PackedBatch:
    return batch_of(*LENGTHS)  # items 1 .. 10


def test_the_scores_are_the_sum_of_the_members() -> None:
    model = ensemble().eval()
    with torch.inference_mode():
        scores = model.score_all(model.query(batch()))
        singles = [member(model, number).eval() for number in range(MEMBERS)]
        parts = [single.score_all(single.query(batch())) for single in singles]
    assert_close(scores[:, 1:], (parts[0] + parts[1])[:, 1:], 1e-5)
    assert (parts[0] - parts[1]).abs().max() > 1e-3, "they have other weights"


def test_each_member_learns_by_a_loss_of_its_own() -> None:
    """The loss is the mean of theirs, and so is the gradient of each member's weights."""
    model = ensemble()
    losses = []
    for number in range(MEMBERS):
        single = member(model, number)
        loss = loss_of(single)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append((loss, single))
    whole = loss_of(model)
    whole.backward()  # type: ignore[no-untyped-call]
    assert_close(whole.detach(), torch.stack([loss for loss, _ in losses]).detach().mean(), 1e-5)
    table = model.items.into.grad
    assert table is not None
    for (_, single), share in zip(losses, table.chunk(MEMBERS, dim=1), strict=True):
        gradient = single.items.into.grad
        assert gradient is not None
        assert_close(share, gradient / MEMBERS, 1e-6)


def loss_of(model: SequenceModel) -> torch.Tensor:
    """The loss of the next item in every position of two histories."""
    objective = Objective(objective_settings(), np.full(N_ITEMS + 1, 3))
    items = np.array([1, 4, 2, 8, 5, 7, 7, 3])
    histories = Batch(items=items, times=np.arange(8), lengths=np.array([5, 3]))
    examples = objective.examples(histories, np.random.default_rng(0))
    return objective.loss(model, model.encode(tensors(examples.inputs)), examples, torch.Generator())


def test_attention_weights_are_those_of_all_heads() -> None:
    model = ensemble().eval()
    with torch.inference_mode():
        weights = model.attention(batch())
        singles = [member(model, number).eval().attention(batch()) for number in range(MEMBERS)]
    assert weights is not None and weights.shape[2] == 2 * MEMBERS
    assert_close(weights, torch.cat([each for each in singles if each is not None], dim=2), 1e-6)


def test_it_passes_the_laws_of_every_encoder() -> None:
    settings = SASRecSettings(width=32, members=2, heads=1, length=64, dropout=0.0)
    check_encoder(lambda own, parts, generator: own.build(parts, generator), settings)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"width": 18, "members": 4}, "must divide model.width"),
        ({"width": 16, "members": 2, "similarity": "cosine"}, "model.members above 1 needs"),
        ({"width": 16, "members": 2, "inputs": "rated"}, "model.members above 1 needs"),
    ],
)
def test_impossible_members_are_refused(changed: dict[str, object], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        model_settings(kind="sasrec", **changed)
