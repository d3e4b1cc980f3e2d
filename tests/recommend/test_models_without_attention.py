"""Attention maps of encoders without attention, and of NARM."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from settings_tables import model_settings

from segue.data.batch import Batch
from segue.layers.packed import tensors
from segue.models.attention import attention_maps
from segue.models.build import build_model

HISTORY = tensors(Batch(items=np.array([3, 1, 2]), times=np.arange(3), lengths=np.array([3])))


@pytest.mark.parametrize("builder", ["gru4rec", "caser", "nextitnet"])
def test_a_model_without_attention_shows_none(builder: str) -> None:
    settings = model_settings(kind=builder, width=4, depth=1)
    model = build_model(settings, 5, generator=torch.Generator().manual_seed(0)).eval()
    assert attention_maps(model, HISTORY) == []


def test_narm_has_causal_attention() -> None:
    settings = model_settings(kind="narm", width=4, depth=2, scores="additive")
    model = build_model(settings, 5, generator=torch.Generator().manual_seed(0)).eval()
    (layer,) = attention_maps(model, HISTORY)
    weights = layer.weights[0].detach().numpy()
    assert (layer.name, layer.rows, weights.shape) == ("layer 1", "tokens", (1, 3, 3))
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert (np.triu(weights[0], 1) == 0).all() and weights[0, 0, 0] == 1
