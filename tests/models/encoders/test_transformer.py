"""The Transformer: what each choice builds, and which choices are refused."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from settings_tables import BUILDERS, CONTINUING, UNPLACED, model_settings
from torch import Tensor, nn

from segue.data.batch import Batch
from segue.errors import SettingsError
from segue.kinds import kind_of
from segue.layers.attention.scores import Additive, Bilinear, Product
from segue.layers.blocks.transformer import PostNormBlock, PreNormBlock
from segue.layers.packed import PackedBatch, tensors
from segue.layers.positions.embeddings import NoPositions, sinusoids
from segue.layers.positions.relative import RelativeBuckets, Rotary
from segue.models.build import build_model
from segue.models.sequence import SequenceModel

BATCH: PackedBatch = tensors(Batch(items=np.array([3, 1, 2]), times=np.arange(3), lengths=np.array([3])))


def settings_of(**changed: Any) -> Any:
    return model_settings(**{"kind": "transformer", "width": 8, "depth": 2, "heads": 2, "length": 7, **changed})


def model_of(**changed: Any) -> SequenceModel:
    return build_model(settings_of(**changed), 5, generator=torch.Generator().manual_seed(0)).double().eval()


def tokens_of(model: SequenceModel) -> Tensor:
    """The input of the first block."""
    tokens: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0]))
    model.encode(BATCH)
    return tokens[0]


def attention_parts(model: SequenceModel) -> list[tuple[type, type | None]]:
    parts = []
    for block in model.blocks:
        assert isinstance(block, PreNormBlock | PostNormBlock) and block.causal
        relative = block.attention.relative
        parts.append((type(block.attention.score), None if relative is None else type(relative)))
    return parts


@pytest.mark.parametrize(
    ("norm", "kind", "last"), [("pre", PreNormBlock, nn.LayerNorm), ("post", PostNormBlock, nn.Identity)]
)
def test_pre_norm_blocks_need_a_norm_at_the_end(norm: str, kind: type, last: type) -> None:
    model = model_of(norm=norm, depth=3)
    assert [type(block) for block in model.blocks] == [kind] * 3 and type(model.norm) is last
    states = model.encode(BATCH)
    assert states.mean(1).abs().max() < 1e-6 and (states.var(1, correction=0) - 1).abs().max() < 1e-2, "either way"


def test_items_are_scaled_and_positions_added() -> None:
    for positions, indices in (("newest", [2, 1, 0]), ("oldest", [0, 1, 2])):
        model = model_of(positions=positions)
        expected = model.items.into[[3, 1, 2]] * math.sqrt(8) + model.positions.table[indices]
        torch.testing.assert_close(tokens_of(model), expected)
    model = model_of(positions="sinusoidal")
    scaled = model.items.into[[3, 1, 2]] * math.sqrt(8)
    torch.testing.assert_close(tokens_of(model), scaled + sinusoids(3, 8))


@pytest.mark.parametrize(("positions", "relative"), [("rotary", Rotary), ("buckets", RelativeBuckets)])
def test_relative_positions_add_nothing_to_tokens(positions: str, relative: type) -> None:
    model = model_of(positions=positions)
    assert isinstance(model.positions, NoPositions) and model.length == 7
    torch.testing.assert_close(tokens_of(model), model.items.into[[3, 1, 2]] * math.sqrt(8))
    assert attention_parts(model) == [(Product, relative)] * 2


@pytest.mark.parametrize(
    ("scores", "kind", "scale"),
    [("dot", Product, 1.0), ("scaled-dot", Product, 0.5), ("bilinear", Bilinear, 1.0), ("additive", Additive, None)],
)
def test_scores_are_those_of_the_settings(scores: str, kind: type, scale: float | None) -> None:
    """Of heads of width four."""
    model = model_of(scores=scores)
    assert attention_parts(model) == [(kind, None)] * 2
    block = model.blocks[1]
    assert isinstance(block, PreNormBlock)
    assert getattr(block.attention.score, "scale", None) == scale
    assert block.attention.fused is (scale is not None)


def test_the_repr_of_a_model_names_its_attention_kernel() -> None:
    for changed, word in (
        ({}, "always"),
        ({"scores": "additive"}, "never"),
        ({"positions": "buckets"}, "without gradients"),
    ):
        assert f"fused={word}" in repr(model_of(**changed))


ALL = list(
    product(
        ("pre", "post"),
        ("newest", "oldest", "sinusoidal", "rotary", "buckets"),
        ("dot", "scaled-dot", "bilinear", "additive"),
    )
)


def test_every_choice_can_be_combined_but_rotary_positions_with_other_scores() -> None:
    """Forty, less the four of rotary positions with scores that are not inner products."""
    states, n_refused = [], 0
    for norm, positions, scores in ALL:
        if positions == "rotary" and scores in ("bilinear", "additive"):
            with pytest.raises(SettingsError, match=r"'rotary' needs scores that are products, .* choose 'dot'"):
                settings_of(norm=norm, positions=positions, scores=scores)
            n_refused += 1
            continue
        model = model_of(norm=norm, positions=positions, scores=scores)
        assert model.incremental is (positions != "newest")
        query = model.query(BATCH)
        torch.testing.assert_close(query, model.head(model.encode(BATCH)[-1:]))
        states.append(query.detach())
    assert (len(states), n_refused) == (36, 4)
    distances = torch.cdist(torch.cat(states), torch.cat(states)) + torch.eye(36)
    assert distances.min() > 1e-9, "each choice has an effect"


@pytest.mark.parametrize("builder", sorted(BUILDERS.keys() - {"transformer"}))
@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"norm": "post"}, "There is no key 'norm' in model = "),
        ({"scores": "additive"}, "There is no key 'scores' in model = "),
        ({"positions": "rotary"}, "model.positions has no kind 'rotary' with model = "),
        ({"positions": "sinusoidal"}, "model.positions has no kind 'sinusoidal' with model = "),
    ],
    ids=str,
)
def test_choices_without_effect_are_refused_by_name(builder: str, changed: dict[str, str], sentence: str) -> None:
    if builder == "narm" and "scores" in changed:  # which has the choice of scores as well
        assert model_settings(kind="narm", scores="additive").scores == "additive"
        return
    if "positions" in changed and builder in UNPLACED | CONTINUING:
        sentence = "There is no key 'positions' in model = "
    with pytest.raises(SettingsError) as error:
        model_settings(kind=builder, **changed)
    assert str(error.value).startswith(sentence)


def test_rotary_positions_need_heads_of_even_width() -> None:
    with pytest.raises(SettingsError, match="'rotary' rotates pairs of features, and each of 2 heads has 5"):
        settings_of(positions="rotary", width=10)
    with pytest.raises(SettingsError, match="each of 2 heads has 7"):
        settings_of(positions="rotary", inputs="rated", inputs__value_width=6)
    assert kind_of(settings_of(positions="rotary", inputs="rated").positions) == "rotary"
    assert settings_of(positions="buckets", width=10).width == 10


def test_items_are_initialised_as_large_as_sinusoids_and_small_without_them() -> None:
    settings = {"width": 64, "length": 50}
    for positions, size in (("sinusoidal", 1.0), ("oldest", 0.02 * 8), ("rotary", 0.02 * 8)):
        model = build_model(
            settings_of(positions=positions, **settings), 500, generator=torch.Generator().manual_seed(1)
        )
        assert (model.items.into[1:] * model.scale).std().item() == pytest.approx(size, rel=0.05)
        assert (model.items.into[0] == 0).all()


# --- files of earlier versions ----------------------------------------------------------------------------------------

LINEARS = ("attention.query", "attention.key_value", "feed_forward.inner", "feed_forward.outer")
NAMES: dict[str, tuple[str, ...]] = {
    "sasrec": (*LINEARS, "norm_query", "norm_forward"),
    "esasrec": (*LINEARS, "attention.output", "gate_attention", "gate_forward", "norm_attention", "norm_forward"),
    "bert4rec": (*LINEARS, "attention.output", "norm_attention", "norm_forward"),
    "sasrec-meta": (*LINEARS, "attention.output"),
}


@pytest.mark.parametrize("builder", NAMES)
def test_weights_have_the_names_of_earlier_files(builder: str) -> None:
    model = build_model(settings_of(kind=builder), 5, generator=torch.Generator())
    names = {name for name in model.state_dict() if name.startswith("blocks.1.")}
    parts = {name.rpartition(".")[0] for name in names}
    assert parts == {f"blocks.1.{part}" for part in NAMES[builder]}
    unbiased = {"blocks.1.feed_forward.inner", "blocks.1.feed_forward.outer"} if builder == "esasrec" else set()
    assert names == {f"{part}.weight" for part in parts} | {f"{part}.bias" for part in parts - unbiased}
    assert "positions.table" in model.state_dict()
