"""A model is loaded from its files bit for bit, or refused with a message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_cases import (
    case_of,
    every_builder,
    every_builder_and_position,
    model_of,
    packed_of,
    random_users,
    settings_of,
    tied_or_not,
)

from segue.errors import FolderError
from segue.models.attention import attention_maps
from segue.models.checkpoint import SETTINGS, WEIGHTS, load_model, save_model
from segue.testing import laws


@every_builder_and_position
@tied_or_not
def test_saved_and_loaded_is_the_same_model(builder: str, tied: bool, positions: str) -> None:
    laws.saving_changes_nothing(case_of(builder, items__tied=tied, positions=positions))


@every_builder
def test_a_saved_model_is_loaded_from_two_files(builder: str, tmp_path: Path) -> None:
    """Without naming its builder, and with the same attention."""
    model, batch = model_of(builder), packed_of(*random_users([4, 1, 7]))
    save_model(model, settings_of(builder), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([SETTINGS, WEIGHTS])
    before = torch.get_rng_state()
    again = load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    model.requires_grad_(requires_grad=False)  # as it is loaded: for a gradient, torch adds in another order
    assert torch.equal(again.score_all(again.query(batch)), model.score_all(model.query(batch)))
    for same, own in zip(attention_maps(again, batch), attention_maps(model, batch), strict=True):
        assert same.name == own.name and torch.equal(same.weights, own.weights)
    assert again.items.n_items == model.items.n_items


@every_builder
def test_a_loaded_model_is_ready_to_answer(builder: str, tmp_path: Path) -> None:
    save_model(model_of(builder, dropout=0.5).train(), settings_of(builder, dropout=0.5), tmp_path)
    model = load_model(tmp_path)
    assert not any(part.training for part in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())


@every_builder
@pytest.mark.parametrize("name", [SETTINGS, WEIGHTS])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "other"])
def test_damaged_files_are_refused_with_a_message(builder: str, name: str, damage: str, tmp_path: Path) -> None:
    save_model(model_of(builder), settings_of(builder), tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "other": b'{"hello": 1}' * 9}[damage])
    with pytest.raises(FolderError, match="cannot be read") as error:
        load_model(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@every_builder
def test_weights_of_another_shape_are_refused_with_a_message(builder: str, tmp_path: Path) -> None:
    """The description says depth 3, the weights have two blocks."""
    save_model(model_of(builder), settings_of(builder, depth=3), tmp_path)
    with pytest.raises(FolderError, match="cannot be read") as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value), "one or two plain sentences"
