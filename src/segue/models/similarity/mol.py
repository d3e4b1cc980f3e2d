"""Mixture of logits: Zhai et al., "Revisiting Neural Retrieval on Accelerators", KDD 2023. A score is a mean of the
products of components of query and item, weighted by gates computed from both.

Each side, queries and items, is stored as flat vectors: an index caches the items' side.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.kinds import Count, CountOrZero, Kind, NonNegative, PositiveNumber, Rate
from segue.layers.blocks.feed_forward import SwiGLU
from segue.layers.dropout import Dropout, byte_mask
from segue.layers.padded import tracing
from segue.models.similarity.dot import LEAST_LENGTH, CosineSettings, DotSettings, Similarity

TILE_PAIRS = 4096  # pairs of a query and an item scored at a time, so that their gates stay in the CPU cache
KEPT_PAIRS = 1 << 18  # half a gigabyte; of more pairs, activations are recomputed, which takes a quarter longer
LEAST_GATE = 1e-6  # added to a gate before its logarithm; the least sum that gates are divided by


def gates(gate_inputs: Tensor, mask: Tensor | None = None) -> Tensor:
    """The weight of each pair of components [..., P]: a softmax of w · σ(w), over the gates of the dropout `mask`."""
    shares = functional.silu(gate_inputs).softmax(-1)
    if mask is None:
        return shares
    shares = shares * mask
    return shares / shares.sum(-1, keepdim=True).clamp(min=LEAST_GATE)


def mixed(logits: Tensor, gate_inputs: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean of the logits [..., P], weighted by their `gates` → [...]."""
    shares = functional.silu(gate_inputs).softmax(-1)
    if mask is None:
        return (shares * logits).sum(-1)
    shares = shares * mask
    return (shares * logits).sum(-1) / shares.sum(-1).clamp(min=LEAST_GATE)  # fewer divisions than of the gates


def imbalance(shares: Tensor) -> Tensor:
    """The negative mutual information between pairs and gates [N, P]: low if each pair has few large gates and all
    gates are used equally."""
    usage = shares.mean(0)
    return (usage * (usage + LEAST_GATE).log()).sum() - (shares * (shares + LEAST_GATE).log()).sum(1).mean()


class Side(NamedTuple):
    """Queries or items, split into components and gates."""

    components: Tensor  # [..., parts, part width]; those of queries are divided by the temperature
    gate: Tensor  # [..., P], a factor of the gates' input


class Mixture(nn.Module):
    """Both sides → scores."""

    def __init__(
        self, *, query_parts: int, item_parts: int, part_width: int, gate_hidden: int, gate_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.query_parts = query_parts
        self.item_parts = item_parts
        self.part_width = part_width
        self.gate_hidden = gate_hidden
        self.gate = _gate(self.pairs, gate_hidden, self.pairs, bias=True)
        self.drop = Dropout(gate_dropout)

    @property
    def pairs(self) -> int:
        """Pairs of an item's and a query's component; the item's component is the outer index."""
        return self.query_parts * self.item_parts

    def settled(self) -> Mixture:
        """A copy without gradients, in evaluation mode."""
        return copy.deepcopy(self).eval().requires_grad_(requires_grad=False)

    @staticmethod
    def of_weights(
        query_parts: int, item_parts: int, part_width: int, gate_hidden: int, *, weights: Mapping[str, Tensor]
    ) -> Mixture:
        """A mixture in evaluation mode, without a change of the global random state."""
        with torch.random.fork_rng(devices=[]):
            mixture = Mixture(
                query_parts=query_parts, item_parts=item_parts, part_width=part_width, gate_hidden=gate_hidden
            )
        mixture.load_state_dict(weights)
        return mixture.eval().requires_grad_(requires_grad=False)

    def side(self, flat: Tensor) -> Side:
        """Split flat queries [..., Q] or items [..., I]."""
        components, gate = flat[..., : -self.pairs], flat[..., -self.pairs :]
        parts = components.shape[-1] // self.part_width
        return Side(components.view(*flat.shape[:-1], parts, self.part_width), gate)

    def score(self, queries: Side, items: Side) -> Tensor:
        """Scores of every one of B queries and every one of X items → [B, X]."""
        count, k = len(queries.gate), len(items.gate)
        rows, columns = _tile_shape(k)
        tile = self._tile if count * k <= KEPT_PAIRS else self._recomputed_tile
        blocks = [queries] if tracing() else _split(queries, rows)  # an exported graph takes any batch size
        return torch.cat([torch.cat([tile(some, part) for some in blocks]) for part in _split(items, columns)], dim=1)

    def own(self, queries: Side, items: Side) -> Tensor:
        """Scores of each of M queries and K items of its own → [M, K]."""
        count, k = items.gate.shape[:2]
        rows, columns = _tile_shape(k)
        tile = self._tile if count * k <= KEPT_PAIRS else self._recomputed_tile
        blocks = _split(queries, rows)
        return torch.cat(
            [
                torch.cat([tile(*both) for both in zip(blocks, _split(part, rows), strict=True)])
                for part in _split(items, columns, dim=1)
            ],
            dim=1,
        )

    def gates(self, queries: Side, items: Side) -> Tensor:
        """The weight of each pair of components [M, K, P], for K items of each of M queries."""
        _, gate_inputs = self._logits_and_gate_inputs(*queries, *items, *self.gate.parameters())
        return gates(gate_inputs, self._mask(gate_inputs.shape, gate_inputs.device))

    def _tile(self, queries: Side, items: Side) -> Tensor:
        """The scores of a few pairs."""
        logits, gate_inputs = self._logits_and_gate_inputs(*queries, *items, *self.gate.parameters())
        return mixed(logits, gate_inputs, self._mask(logits.shape, logits.device))

    def _recomputed_tile(self, queries: Side, items: Side) -> Tensor:
        """The scores of a few pairs, with activations recomputed for the gradient."""
        if not torch.is_grad_enabled():
            return self._tile(queries, items)
        shape = torch.Size((len(queries.gate), items.gate.shape[-2], self.pairs))
        mask = self._mask(shape, queries.gate.device)

        def part(*tensors: Tensor) -> Tensor:
            return mixed(*self._logits_and_gate_inputs(*tensors), mask)

        inputs = *queries, *items, *self.gate.parameters()
        scores: Tensor = _Recomputed.apply(part, *inputs)  # type: ignore[no-untyped-call]
        return scores

    def _mask(self, shape: torch.Size, device: torch.device) -> Tensor | None:
        """The dropout mask of the gates; recomputing needs the same again. None without dropout."""
        if not self.training or self.drop.dropped == 0:
            return None
        return byte_mask(shape, self.drop.dropped, device, self.drop.generator)

    def _logits_and_gate_inputs(
        self, queries: Tensor, query_gate: Tensor, items: Tensor, item_gate: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits, the products of all pairs of components, and the inputs of their gates, each [b, k, P]: of b queries
        and k items, or of k items of each query."""
        if items.dim() == 3:  # a single product, faster than one for each query
            products = items.flatten(0, 1) @ queries.flatten(0, 1).T  # [k · item parts, b · query parts]
            products = products.view(*items.shape[:2], *queries.shape[:2]).permute(2, 0, 1, 3)
        else:
            products = items.flatten(1, 2) @ queries.transpose(1, 2)  # [b, k · item parts, query parts]
        logits = products.reshape(queries.shape[0], items.shape[-3], self.pairs)
        hidden = logits if len(weights) == 2 else functional.silu(functional.linear(logits, *weights[:2]))
        return logits, torch.addcmul(functional.linear(hidden, *weights[-2:]), query_gate[:, None], item_gate)


def _tile_shape(k: int) -> tuple[int, int]:
    """Queries and items of a tile, for k items a query. Tiles are of almost equal width: products of a few rows round
    differently, and equal items would not have equal scores."""
    columns = max(1, -(-k // max(1, -(-k // TILE_PAIRS))))
    return TILE_PAIRS // columns, columns


def _split(side: Side, size: int, dim: int = 0) -> list[Side]:
    return [Side(*parts) for parts in zip(*(torch.split(tensor, size, dim) for tensor in side), strict=True)]


class _Recomputed(torch.autograd.Function):
    """A function of tensors whose activations are recomputed for the gradient."""

    @staticmethod
    def forward(ctx: Any, part: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.part = part
        ctx.save_for_backward(*inputs)
        return part(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        inputs = [tensor.detach().requires_grad_(need) for tensor, need in zip(ctx.saved_tensors, needs, strict=True)]
        with torch.enable_grad():
            result = ctx.part(*inputs)
        computed = torch.autograd.grad(result, [tensor for tensor in inputs if tensor.requires_grad], gradients[0])
        remaining = iter(computed)
        return None, *(next(remaining) if need else None for need in needs)


class MixtureOfLogits(nn.Module):
    """A score is the mean of the inner products of a query's and an item's components, weighted by the pair's gates.
    The paper's embedding of the user id is left out: unknown users are served as well."""

    def __init__(
        self,
        width: int,
        mixture: Mixture,
        *,
        query_hidden: int,
        temperature: float,
        item_dropout: float,
        balance: float,
    ) -> None:
        """`query_hidden`: 0 is a linear map. `balance` is the weight of the gates' `imbalance` in the loss."""
        super().__init__()
        self.mixture = mixture
        self.temperature = temperature
        self.balance = balance
        query_width, item_width = (parts * mixture.part_width for parts in (mixture.query_parts, mixture.item_parts))
        self.query_tower = (
            SwiGLU(width, query_hidden, 0.0, out=query_width, bias=True)
            if query_hidden
            else nn.Linear(width, query_width)
        )
        self.item_tower = nn.Linear(width, item_width)
        self.query_gate = _gate(width, mixture.gate_hidden, mixture.pairs, bias=False)
        self.item_gate = _gate(width, mixture.gate_hidden, mixture.pairs, bias=False)
        self.drop_item = Dropout(item_dropout)

    def query(self, states: Tensor) -> Tensor:
        """Components are divided by the temperature, so that their products with an item's are logits."""
        components = self._directions(self.query_tower(states)) / self.temperature
        return torch.cat((components, self.query_gate(states)), dim=1)

    def item(self, vectors: Tensor) -> Tensor:
        components = self._directions(self.item_tower(self.drop_item(vectors)))
        return torch.cat((components, self.item_gate(vectors)), dim=1)

    def score(self, queries: Tensor, items: Tensor) -> Tensor:
        return self.mixture.score(self.mixture.side(queries), self.mixture.side(items))

    def own(self, queries: Tensor, items: Tensor) -> Tensor:
        return self.mixture.own(self.mixture.side(queries), self.mixture.side(items))

    def extra_loss(self, queries: Tensor, targets: Tensor) -> Tensor | None:
        """The weighted `imbalance` of the targets' gates, with dropout."""
        if self.balance == 0:
            return None
        sides = self.mixture.side(queries), self.mixture.side(targets[:, None])
        return self.balance * imbalance(self.mixture.gates(*sides)[:, 0])

    def _directions(self, components: Tensor) -> Tensor:
        """Scale each component [M, parts · part width] to length one."""
        parts = components.view(-1, self.mixture.part_width)
        return functional.normalize(parts, dim=1, eps=LEAST_LENGTH).view(components.shape)


def _gate(width: int, hidden: int, out: int, *, bias: bool) -> nn.Module:
    if not hidden:
        return nn.Linear(width, out, bias=bias)
    return nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, out, bias=bias))


class MoLSettings(Kind, frozen=True, tag="mol"):
    """Score by a mixture of logits: the products of several components of query and item."""

    query_parts: Count = 8
    """Components of a query."""
    item_parts: Count = 4
    """Components of an item."""
    part_width: Count = 64
    """Features of a component."""
    query_hidden: CountOrZero = 512
    """Hidden width of the network that computes a query's components; 0: it is linear."""
    gate_hidden: CountOrZero = 128
    """Hidden width of the gates; 0: they are linear."""
    temperature: PositiveNumber = 0.05
    """Divisor of the components' products; objective.temperature stays 1."""
    item_dropout: Rate = 0.1
    """Share of an item's features dropped in training, before its components are computed."""
    gate_dropout: Rate = 0.2
    """Share of the gates dropped in training."""
    balance: NonNegative = 0.001
    """Weight of the loss term against gates that are all equal or that few components dominate."""

    def build(self, width: int) -> Similarity:
        mixture = Mixture(
            query_parts=self.query_parts,
            item_parts=self.item_parts,
            part_width=self.part_width,
            gate_hidden=self.gate_hidden,
            gate_dropout=self.gate_dropout,
        )
        return MixtureOfLogits(
            width,
            mixture,
            query_hidden=self.query_hidden,
            temperature=self.temperature,
            item_dropout=self.item_dropout,
            balance=self.balance,
        )


SimilaritySettings = DotSettings | CosineSettings | MoLSettings
