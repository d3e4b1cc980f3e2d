from __future__ import annotations

import math

import pytest
import torch
from packed_users import assert_close, batch_of, normal
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_twins import torch_attention

from segue.layers.attention.multi_head import Attention, Relative
from segue.layers.attention.scores import ScoreKind
from segue.layers.packed import PackedBatch, pack
from segue.layers.positions.relative import RelativeBuckets, Rotary

# G1: queries, keys and values of the eight tokens, one head of width two.
G1_ROWS = [[0, 0], [0, 0.6], [0.1, 0.2], [0, 0.3], [-0.1, 0.4], [0, 0.5], [-0.2, 0.6], [0, 0.7]]
G1_LAST = [0.101322, 0.136358, 0.111865, 0.117541, 0.123506, 0.129773, 0.136358, 0.143277]
G1_MIXED = [
    [0, 0.337979],
    [0.033156, 0.275346],
    [0.024579, 0.285014],
    [-0.001412, 0.311589],
    [-0.001162, 0.346910],
    [-0.033669, 0.390169],
    [-0.028436, 0.435848],
]


causal_or_not = pytest.mark.parametrize("causal", [True, False], ids=["back", "both ways"])


def attention_of(
    width: int,
    heads: int,
    *,
    output: bool = True,
    causal: bool = True,
    seed: int = 0,
    scores: ScoreKind = "scaled-dot",
    relative: Relative | None = None,
) -> Attention:
    attention = Attention(width, heads, output=output, causal=causal, scores=scores, relative=relative).double()
    with torch.no_grad():
        for index, parameter in enumerate(attention.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed + index))
    return attention


def plain_attention(width: int, heads: int = 1) -> Attention:
    """Queries, keys and values are the stream itself."""
    attention = Attention(width, heads, output=False, causal=True).double()
    with torch.no_grad():
        attention.query.weight.copy_(torch.eye(width))
        attention.key_value.weight.copy_(torch.cat((torch.eye(width), torch.eye(width))))
        attention.query.bias.zero_()
        attention.key_value.bias.zero_()
    return attention


def values_of(attention: Attention, keys: Tensor, width: int) -> Tensor:
    return keys @ attention.key_value.weight[width:].T + attention.key_value.bias[width:]


def test_weights_and_output_of_g1() -> None:
    x, batch, attention = torch.tensor(G1_ROWS, dtype=torch.float64), batch_of(8), plain_attention(2)
    weights = attention.weights(x, x, batch)[0, 0]
    assert_close(weights[7], torch.tensor(G1_LAST, dtype=torch.float64), 1e-6)
    assert_close(weights[2, :3], torch.tensor([0.320047, 0.348389, 0.331564], dtype=torch.float64), 1e-6)
    assert_close(attention(x, x, batch)[1:], G1_MIXED, 1e-6)


@pytest.mark.parametrize(("width", "heads"), [(4, 1), (4, 2), (6, 3), (4, 4)])
def test_weights_are_one_in_each_row_and_reproduce_the_output(width: int, heads: int) -> None:
    attention, batch = attention_of(width, heads), batch_of(3, 1, 5)
    queries, keys = normal(9, width, seed=7), normal(9, width, seed=8)
    weights = attention.weights(queries, keys, batch)
    assert weights.shape == (3, heads, 5, 5)
    mixed = torch.empty(9, width, dtype=torch.float64)
    begin = 0
    for user, length in enumerate((3, 1, 5)):
        own = weights[user, :, :length, :length]
        assert_close(own.sum(-1), torch.ones(heads, length, dtype=torch.float64), 1e-12)
        assert (own.triu(1) == 0).all()
        values = values_of(attention, keys[begin : begin + length], width).view(length, heads, -1).transpose(0, 1)
        mixed[begin : begin + length] = (own @ values).transpose(0, 1).reshape(length, width)
        begin += length
    assert_close(attention(queries, keys, batch), attention.output(mixed), 1e-12)


@causal_or_not
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_equal_to_torchs_own_attention(heads: int, causal: bool) -> None:
    """Torch's mask is True where a token may NOT attend: the opposite of ours. It gets each user alone, unpadded."""
    width, lengths = 6, (4, 1, 6)
    ours, batch = attention_of(width, heads, causal=causal), batch_of(*lengths)
    theirs = torch_attention(ours)
    queries, keys = normal(11, width, seed=20), normal(11, width, seed=21)
    output, weights, begin = ours(queries, keys, batch), ours.weights(queries, keys, batch), 0
    for user, length in enumerate(lengths):
        own = slice(begin, begin + length)
        blocked = torch.ones(length, length, dtype=torch.bool).triu(1) if causal else None
        expected, expected_weights = theirs(
            queries[None, own], keys[None, own], keys[None, own], attn_mask=blocked, average_attn_weights=False
        )
        assert_close(output[own], expected[0], 1e-12)
        assert_close(weights[user, :, :length, :length], expected_weights[0], 1e-12)
        assert (weights[user, :, :length, length:] == 0).all(), "no token attends to padding"
        begin += length


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_later_tokens_change_nothing(dtype: torch.dtype) -> None:
    attention, batch = attention_of(4, 2).to(dtype), batch_of(6, 3)
    x = normal(9, 4, seed=3, dtype=dtype)
    before, weights = attention(x, x, batch), attention.weights(x, x, batch)
    for position in range(6):
        changed = x.clone()
        changed[position] += 100
        after = attention(changed, changed, batch)
        assert torch.equal(after[:position], before[:position])
        assert not torch.equal(after[position], before[position])
        assert torch.equal(after[6:], before[6:]), "another user's token"
        assert torch.equal(attention.weights(changed, changed, batch)[0, :, :position], weights[0, :, :position])


def test_without_a_causal_mask_a_token_attends_to_all_of_its_user_only() -> None:
    attention, batch = attention_of(4, 2, causal=False), batch_of(6, 3)
    x = normal(9, 4, seed=3)
    before, weights = attention(x, x, batch), attention.weights(x, x, batch)
    assert (weights[0] > 0).all() and (weights[1, :, :3, :3] > 0).all()
    for position in range(6):
        changed = x.clone()
        changed[position] += 1
        after = attention(changed, changed, batch)
        assert (after[:6] != before[:6]).any(1).all()
        assert torch.equal(after[6:], before[6:]), "another user's token"


def test_without_a_causal_mask_order_does_not_matter() -> None:
    """Without positions, attention is permutation equivariant."""
    attention, batch, x = attention_of(4, 2, causal=False), batch_of(5, 3), normal(8, 4, seed=3)
    order = torch.tensor([3, 0, 4, 2, 1, 7, 6, 5])
    assert_close(attention(x[order], x[order], batch), attention(x, x, batch)[order], 1e-12)


@causal_or_not
@pytest.mark.parametrize("batch", [batch_of(2, 1, 3), batch_of(2, 2)], ids=["ragged", "rectangular"])
def test_the_fused_kernel_runs_forward_and_backward(batch: PackedBatch, causal: bool) -> None:
    """Torch raises if only its slow kernel could run."""
    attention, x = attention_of(4, 2, causal=causal).float(), normal(len(batch.items), 4, dtype=torch.float32)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.autograd.backward(attention(x.requires_grad_(), x, batch).sum())
    assert x.grad is not None and torch.isfinite(x.grad).all()


def test_a_single_key_gives_its_value() -> None:
    """Mask polarity: a user's first token sees itself and nothing else."""
    attention, batch = attention_of(4, 2, output=False), batch_of(5, 1, 3)
    queries, keys = normal(9, 4, seed=4), normal(9, 4, seed=5)
    firsts = [0, 5, 6]
    assert_close(attention(queries, keys, batch)[firsts], values_of(attention, keys[firsts], 4), 1e-12)
    assert (attention.weights(queries, keys, batch)[:, :, 0, 0] == 1).all()


@causal_or_not
@pytest.mark.parametrize("lengths", [(3, 1, 5), (4, 4), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("heads", [1, 2])
def test_newest_equals_the_newest_rows_of_all(lengths: tuple[int, ...], heads: int, causal: bool) -> None:
    attention, batch, tokens = attention_of(4, heads, causal=causal), batch_of(*lengths), sum(lengths)
    queries, keys = normal(tokens, 4, seed=30), normal(tokens, 4, seed=31)
    output = attention.newest(queries[batch.last], keys, batch)
    assert_close(output, attention(queries, keys, batch)[batch.last], 1e-12)


def test_a_large_key_draws_all_attention_only_from_later_tokens() -> None:
    x = torch.tensor([[1.0, 0], [1, 0], [50, 0], [1, 0]], dtype=torch.float64)
    weights = plain_attention(2).weights(x, x, batch_of(4))[0, 0]
    assert weights[1].tolist() == [0.5, 0.5, 0, 0]
    assert weights[3, 2] > 1 - 1e-12


def test_scores_are_divided_by_the_root_of_the_head_width() -> None:
    """Two heads of width two over width four: the root is of two, not of four."""
    attention = plain_attention(4, heads=2)
    x = torch.tensor([[0.0, 0, 0, 0], [1, 1, 3, 0]], dtype=torch.float64)
    weights = attention.weights(x, x, batch_of(2))[0]  # [H, N, N]
    odds = weights[:, 1, 1] / weights[:, 1, 0]
    assert odds.log().tolist() == pytest.approx([2 / math.sqrt(2), 9 / math.sqrt(2)], abs=1e-12)


def test_one_stream_or_two_equal_ones() -> None:
    attention, batch, x = attention_of(4, 2), batch_of(3, 2), normal(5, 4, seed=6)
    assert_close(attention(x, x, batch), attention(x, x.clone(), batch), 1e-12)


def test_without_an_output_projection_there_are_no_weights_for_it() -> None:
    assert len(list(Attention(4, 2, output=False, causal=True).parameters())) == 4
    assert len(list(Attention(4, 2, output=True, causal=True).parameters())) == 6


@causal_or_not
@pytest.mark.parametrize("batch", [batch_of(2, 1, 3), batch_of(2, 2)], ids=["ragged", "rectangular"])
def test_gradients(batch: PackedBatch, causal: bool) -> None:
    attention, tokens = attention_of(4, 2, causal=causal), len(batch.items)
    queries, keys = normal(tokens, 4, seed=9).requires_grad_(), normal(tokens, 4, seed=10).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k: attention(q, k, batch), (queries, keys))
    assert torch.autograd.gradcheck(lambda x: attention(x, x, batch), (queries,))
    weight = attention.key_value.weight
    assert torch.autograd.gradcheck(lambda _: attention(queries.detach(), keys.detach(), batch), (weight,))


def test_width_is_shared_evenly_by_the_heads() -> None:
    with pytest.raises(AssertionError):
        Attention(5, 2, output=True, causal=True)


def test_weights_do_not_depend_on_padding() -> None:
    """A token's row of weights, packed, does not depend on how long the others are."""
    attention, x = attention_of(4, 1), normal(10, 4, seed=11)
    alone, together = batch_of(3), batch_of(3, 7)
    first = attention.weights(x[:3], x[:3], alone)[0, 0]
    both = attention.weights(x, x, together)[:, 0]
    assert_close(pack(both, together)[:3, :3], first, 1e-12)
    assert (pack(both, together)[:3, 3:] == 0).all()


# --- any score, with distances or without, over packed tokens -----------------------------------------------------

SCORES: tuple[ScoreKind, ...] = ("dot", "scaled-dot", "bilinear", "additive")
VARIANTS: dict[str, tuple[ScoreKind, str]] = {kind: (kind, "") for kind in SCORES} | {
    "rotary": ("scaled-dot", "rotary"),
    "dot, rotary": ("dot", "rotary"),
    "buckets": ("scaled-dot", "buckets"),
    "additive, buckets": ("additive", "buckets"),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def variant_of(name: str, *, heads: int = 2, causal: bool = True, output: bool = True) -> Attention:
    """Of width four, for up to eight tokens."""
    scores, distances = VARIANTS[name]
    relative: Relative | None = None
    if distances:
        relative = Rotary(8, 4 // heads) if distances == "rotary" else RelativeBuckets(heads, 8, causal=causal)
    return attention_of(4, heads, causal=causal, output=output, scores=scores, relative=relative)


def split_heads(rows: Tensor, heads: int) -> Tensor:
    """[N, D] → [H, N, d]."""
    return rows.view(len(rows), heads, -1).transpose(0, 1)


@every_variant
@causal_or_not
def test_weights_of_every_kind_reproduce_the_output(variant: str, causal: bool) -> None:
    attention, batch = variant_of(variant, causal=causal), batch_of(3, 1, 5)
    queries, keys = normal(9, 4, seed=7), normal(9, 4, seed=8)
    weights, output, begin = attention.weights(queries, keys, batch), attention(queries, keys, batch), 0
    with torch.no_grad():
        assert_close(attention(queries, keys, batch), output, 1e-12)  # possibly by the other kernel
    for user, length in enumerate((3, 1, 5)):
        own = weights[user, :, :length, :length]
        assert_close(own.sum(-1), torch.ones(2, length, dtype=torch.float64), 1e-12)
        assert (own.triu(1) == 0).all() == (causal or length == 1)
        values = split_heads(values_of(attention, keys[begin : begin + length], 4), 2)
        mixed = (own @ values).transpose(0, 1).reshape(length, 4)
        assert_close(output[begin : begin + length], attention.output(mixed), 1e-12)
        begin += length


@pytest.mark.parametrize("kind", SCORES)
def test_scores_of_a_head_are_those_of_its_kind(kind: ScoreKind) -> None:
    """Weights are the softmax of the score of the head's part of the projections, which all heads share."""
    attention, x = attention_of(4, 2, causal=False, scores=kind), normal(5, 4, seed=3)
    queries = split_heads(x @ attention.query.weight.T + attention.query.bias, 2)
    keys = split_heads(x @ attention.key_value.weight[:4].T + attention.key_value.bias[:4], 2)
    expected = torch.stack([attention.score(q, k).softmax(-1) for q, k in zip(queries, keys, strict=True)])
    assert_close(attention.weights(x, x, batch_of(5))[0], expected, 1e-12)


@every_variant
@causal_or_not
@pytest.mark.parametrize("lengths", [(3, 1, 5), (4, 4)], ids=str)
def test_newest_of_every_kind_equals_the_newest_rows_of_all(
    variant: str, causal: bool, lengths: tuple[int, ...]
) -> None:
    attention, batch, tokens = variant_of(variant, causal=causal), batch_of(*lengths), sum(lengths)
    queries, keys = normal(tokens, 4, seed=30), normal(tokens, 4, seed=31)
    expected = attention(queries, keys, batch)[batch.last]
    assert_close(attention.newest(queries[batch.last], keys, batch), expected, 1e-12)


@every_variant
def test_gradients_of_every_kind(variant: str) -> None:
    attention, batch = variant_of(variant), batch_of(2, 1, 3)
    x = normal(6, 4, seed=9).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: attention(x, x, batch), (x,))
    for name, parameter in attention.named_parameters():
        if name.startswith(("score", "relative")):
            assert torch.autograd.gradcheck(lambda _: attention(x.detach(), x.detach(), batch), (parameter,)), name


# --- padded tokens and other streams ------------------------------------------------------------------------------


def padding(*lengths: int) -> Tensor:
    """True at tokens, [B, 1, 1, N]."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])[:, None, None]


@causal_or_not
@pytest.mark.parametrize("padded", [True, False], ids=["padding", "no padding"])
@pytest.mark.parametrize("heads", [1, 2])
def test_padded_attention_equals_torchs_with_every_mask(heads: int, padded: bool, causal: bool) -> None:
    """Causal, padding, both or none; torch's masks are True where a token may NOT attend."""
    ours = attention_of(4, heads, causal=causal)
    theirs, x, may_attend = torch_attention(ours), normal(3, 5, 4, seed=20), padding(5, 2, 4) if padded else None
    blocked = torch.ones(5, 5, dtype=torch.bool).triu(1) if causal else None
    expected, expected_weights = theirs(
        x,
        x,
        x,
        attn_mask=blocked,
        key_padding_mask=None if may_attend is None else ~may_attend[:, 0, 0],
        average_attn_weights=False,
    )
    assert_close(ours.attend(x, ours.keys_values(x), may_attend), expected, 1e-12)
    output, weights = ours.attend_with_weights(x, ours.keys_values(x), may_attend)
    assert_close(output, expected, 1e-12)
    assert_close(weights, expected_weights, 1e-12)


@pytest.mark.parametrize("heads", [1, 2])
def test_cross_attention_equals_torchs(heads: int) -> None:
    ours = attention_of(4, heads, causal=False)
    theirs, queries, memory, may_attend = (
        torch_attention(ours),
        normal(3, 2, 4),
        normal(3, 5, 4, seed=21),
        padding(5, 2, 4),
    )
    expected, expected_weights = theirs(
        queries, memory, memory, key_padding_mask=~may_attend[:, 0, 0], average_attn_weights=False
    )
    assert_close(ours.attend(queries, ours.keys_values(memory), may_attend), expected, 1e-12)
    assert_close(ours.attend_with_weights(queries, ours.keys_values(memory), may_attend)[1], expected_weights, 1e-12)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_only_unmasked_key_gives_its_value(kind: ScoreKind, rows: int) -> None:
    """Mask polarity: True is where a query may attend."""
    attention, kv = attention_of(4, 2, output=False, causal=False, scores=kind), normal(2, 5, 2, 2, 2, seed=5)
    may_attend = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    may_attend[0, :, :, 3] = may_attend[1, :, :, 1] = True
    output = attention.attend(normal(2, rows, 4, seed=4), kv, may_attend)
    assert_close(output[0], kv[0, 3, 1].reshape(1, 4).expand(rows, 4), 1e-12)
    assert_close(output[1], kv[1, 1, 1].reshape(1, 4).expand(rows, 4), 1e-12)


@every_variant
def test_tokens_in_any_chunks_equal_all_at_once(variant: str) -> None:
    attention, x = variant_of(variant), normal(2, 6, 4, seed=22)
    whole, kv = attention.attend(x, attention.keys_values(x)), attention.keys_values(x)
    for begin, end in ((0, 1), (1, 4), (4, 5), (5, 6)):
        assert_close(attention.attend(x[:, begin:end], kv[:, :end]), whole[:, begin:end], 1e-12)
    packed = attention(x[0], x[0], batch_of(6))
    assert_close(whole[0], packed, 1e-12)


@every_variant
def test_a_token_step_in_numpy_equals_its_row_of_all(variant: str) -> None:
    attention, x = variant_of(variant).float(), normal(6, 4, seed=23, dtype=torch.float32)
    expected, one = attention(x, x, batch_of(6)).detach(), attention.token_step()
    for position in range(6):
        kv = attention.keys_values(x[: position + 1]).detach().permute(1, 2, 0, 3).contiguous().numpy()
        own, kv[:, :, -1] = kv[:, :, -1].copy(), 0
        output = one(x[position].numpy(), x[position].numpy(), kv)
        torch.testing.assert_close(torch.from_numpy(output), expected[position], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.from_numpy(kv[:, :, -1]), torch.from_numpy(own))


# --- distances ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["rotary", "dot, rotary", "buckets"])
def test_distances_matter_and_absolute_positions_do_not(variant: str) -> None:
    """The same tokens two positions later, behind two masked ones; and with a gap of two between them."""
    attention, x = variant_of(variant), normal(1, 5, 4, seed=24)
    kv = attention.keys_values(x)
    later = torch.cat((normal(1, 2, 2, 2, 2, seed=25), kv), dim=1)
    may_attend = torch.tensor([False, False, True, True, True, True, True])[None, None, None]
    output = attention.attend(x[:, -1:], kv)
    assert_close(attention.attend(x[:, -1:], later, may_attend), output, 1e-6)
    apart = torch.cat((kv[:, :2], later[:, :2], kv[:, 2:]), dim=1)
    may_attend = torch.tensor([True, True, False, False, True, True, True])[None, None, None]
    assert (attention.attend(x[:, -1:], apart, may_attend) - output).abs().max() > 1e-3


def test_a_bucket_adds_its_number_to_the_scores_of_its_head() -> None:
    attention, x, batch = variant_of("buckets"), normal(4, 4, seed=26), batch_of(4)
    before = attention.weights(x, x, batch)[0]
    assert isinstance(attention.relative, RelativeBuckets)
    with torch.no_grad():
        attention.relative.table[2, 1] += 3.0  # keys two tokens back, second head
    after = attention.weights(x, x, batch)[0]
    assert torch.equal(after[0], before[0]) and torch.equal(after[:, :2], before[:, :2])
    assert (after[1, 3, 1] / after[1, 3, 0] / (before[1, 3, 1] / before[1, 3, 0])).log().item() == pytest.approx(3.0)


# --- which kernel -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "training", "inference"),
    [
        ("dot", True, True),
        ("scaled-dot", True, True),
        ("bilinear", True, True),
        ("rotary", True, True),
        ("buckets", False, True),
        ("additive", False, False),
        ("additive, buckets", False, False),
    ],
)
def test_the_fused_kernel_is_used_wherever_possible_and_reported(variant: str, training: bool, inference: bool) -> None:
    """Torch raises if only its slow kernel could run; other scores do not call torch's attention."""
    attention, batch = variant_of(variant).float(), batch_of(2, 1, 3)
    x = normal(6, 4, dtype=torch.float32).requires_grad_()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert attention.fused is training
        torch.autograd.backward(attention(x, x, batch).sum())
        with torch.inference_mode():
            assert attention.fused is inference
            attention(x, x, batch)
            attention.newest(x[batch.last], x, batch)
    word = "always" if training else "without gradients" if inference else "never"
    assert f"fused={word}" in repr(attention)


def test_the_fused_kernel_is_called_where_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(*arguments: Tensor, **options: object) -> Tensor:
        calls.append("fused")
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("segue.layers.attention.multi_head.fused_attention", spy)
    x, batch = normal(6, 4), batch_of(2, 1, 3)
    for name in VARIANTS:
        for gradients in (True, False):
            calls.clear()
            attention = variant_of(name)
            with torch.set_grad_enabled(gradients):
                attention(x, x, batch)
                assert len(calls) == attention.fused, name
                attention.newest(x[batch.last], x, batch)
                attention.attend(x[None], attention.keys_values(x[None]))
                assert len(calls) == 3 * attention.fused, name


@pytest.mark.parametrize("kind", ["bilinear", "additive"])
def test_rotary_positions_need_product_scores(kind: ScoreKind) -> None:
    with pytest.raises(AssertionError):
        Attention(4, 2, output=True, causal=True, scores=kind, relative=Rotary(8, 2))
