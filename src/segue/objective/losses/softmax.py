"""Softmax losses: over the whole catalogue or over negatives that the batch shares, in tiles; or of computed scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from segue.objective.losses.mean import shares, weighted_mean
from segue.objective.samplers.collisions import Collisions

TILE_SCORES = 1 << 20  # scores of a tile: 4 MB of float32, so that a tile stays in the cache between its passes
LARGEST_LOSS = 80.0  # -log p above which it is computed again from scores: float32 probabilities underflow near 87
LEAST_TILE = 64  # rows below which matrix products are slow
ALIGNED = 16  # scores of a cache line: products with some columns of a tile are faster if its rows are aligned
LEAST_COLUMNS = 4  # queries of a tile of sums over codes


class GradientFunction(torch.autograd.Function):
    """A function whose forward pass also computes its gradients and saves one for each argument, or None."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(None if saved is None else saved * gradients[0] for saved in ctx.saved_tensors)


class _FullSoftmax(GradientFunction):
    """The full softmax; each tile's part of both gradients is computed while its probabilities are in the cache."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        rows = max(LEAST_TILE, TILE_SCORES // len(matrix))
        d_hidden, d_matrix = torch.empty_like(hidden), torch.zeros_like(matrix)
        scores = hidden.new_empty(min(rows, len(hidden)), len(matrix))
        total, losses = hidden.new_zeros(()), torch.empty_like(weights)
        for begin in range(0, len(hidden), rows):
            states, columns = hidden[begin : begin + rows], targets[begin : begin + rows, None]
            weight = weights[begin : begin + rows, None]
            tile = scores[: len(states)]
            torch.mm(states, matrix.T, out=tile)
            tile_losses = losses[begin : begin + rows]
            tile_losses.copy_(_softmax_losses(tile, columns, states, matrix))  # leaves probabilities in the tile
            total += (tile_losses * weight[:, 0]).sum()
            tile.scatter_add_(1, columns, -torch.ones_like(weight))
            # The weights scale the smaller sides of the products: a pass over the tile is expensive.
            torch.mm(tile, matrix, out=d_hidden[begin : begin + rows])
            d_hidden[begin : begin + rows] *= weight
            d_matrix.addmm_(tile.T, states * weight)
        ctx.save_for_backward(d_hidden, d_matrix, None, losses)
        return total


def _softmax_losses(tile: Tensor, columns: Tensor, states: Tensor, matrix: Tensor) -> Tensor:
    """-log p of each row's target; the scores in `tile` are replaced by probabilities."""
    torch.softmax(tile, 1, out=tile)
    losses = -tile.gather(1, columns)[:, 0].log()
    rows = torch.nonzero(losses > LARGEST_LOSS)[:, 0]  # rare
    if len(rows):
        exact = (states[rows] @ matrix.T).log_softmax(1)
        losses[rows] = -exact.gather(1, columns[rows])[:, 0]
    return losses


def full_softmax(hidden: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross-entropy of the softmax over every item: -s_target + log Σ exp s, weighted mean over the rows.

    Needs: scores that are inner products; no sampler.
    Inputs: states [M, D], item vectors [V, D], each state's target [M] in 0..V-1, weights [M]. Only one tile of logits
    is in memory at a time; its gradient is computed in the forward pass.
    When to choose it: up to some ten thousand items.
    Relations: `sampled_softmax` with every item as a negative; `sce` with buckets of all states and items.
    """
    weights = shares(weights, hidden)
    loss: Tensor = _FullSoftmax.apply(hidden, matrix, targets, weights)  # type: ignore[no-untyped-call]
    return loss


class _CodedSoftmax(GradientFunction):
    """As `_FullSoftmax`, but scores are sums over tables, and a query is a column of a tile."""

    @staticmethod
    def forward(
        ctx: Any, tables: Tensor, lengths: Tensor | None, rows: Tensor, targets: Tensor, weights: Tensor
    ) -> Tensor:
        columns = max(LEAST_COLUMNS, TILE_SCORES // len(rows))
        items, begins = _items_by_row(rows, len(tables))
        d_tables, losses = torch.empty_like(tables), torch.empty_like(weights)
        d_lengths = None if lengths is None else torch.zeros_like(lengths)
        for begin in range(0, len(targets), columns):
            some = slice(begin, begin + columns)
            tile = functional.embedding_bag(rows, tables[:, some].contiguous(), mode="sum")  # [V, c]
            if lengths is not None:
                tile /= lengths[:, None]
            scores = tile if d_lengths is None else tile.clone()
            cells = targets[some], torch.arange(tile.shape[1], device=tile.device)
            losses[some] = tile.logsumexp(0) - tile[cells]
            torch.softmax(tile, 0, out=tile)
            tile[cells] -= 1
            tile *= weights[some]
            if lengths is not None and d_lengths is not None:
                tile /= lengths[:, None]
                d_lengths -= (tile * scores).sum(1)
            d_tables[:, some] = functional.embedding_bag(items, tile, begins, mode="sum")
        ctx.save_for_backward(d_tables, d_lengths, None, None, losses)
        return (losses * weights).sum()


def _items_by_row(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The inverse of `rows` [V, parts]: the items of each row of the tables, row by row, and each row's first index
    among them [count]; both int32. The rows of one part come before those of the next."""
    order = [part.sort(stable=True).indices.int() for part in rows.T]
    sizes = torch.bincount(rows.flatten(), minlength=count)
    return torch.cat(order), (sizes.cumsum(0) - sizes).int()


def coded_softmax(
    tables: Tensor, rows: Tensor, targets: Tensor, weights: Tensor | None = None, *, lengths: Tensor | None = None
) -> Tensor:
    """`full_softmax` over items with codes, without computing any item's vector.

    Needs: scores that are sums of products with the items' parts; no sampler.
    Inputs: the products of all code vectors with each query [R, M], the rows of these that each item's score is the sum
    of [V, parts], each query's target [M] in 0..V-1, weights [M]; norms of the items [V], which divide their scores.
    When to choose it: many items. With 50,000 items a step over 512 queries took 160 ms; with vectors of width 64 it
    took 242 ms, of width 128 496 ms. With 3,416 items it took about as long. Memory does not grow with the width.
    Relations: `full_softmax` of the items' vectors.
    """
    weights = shares(weights, tables.T)
    loss: Tensor = _CodedSoftmax.apply(tables, lengths, rows, targets, weights)  # type: ignore[no-untyped-call]
    return loss


class _SharedSoftmax(GradientFunction):
    """As `_FullSoftmax`; a row's target is the column after the negatives."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        targets: Tensor,
        negatives: Tensor,
        weights: Tensor,
        collisions: Collisions,
        log_q: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        rows = max(LEAST_TILE, TILE_SCORES // (len(negatives) + 1))
        d_queries, d_targets = torch.empty_like(queries), torch.empty_like(targets)
        d_negatives = torch.zeros_like(negatives)
        losses = torch.empty_like(weights)
        scores = _TileScores(queries, targets, negatives, collisions, log_q)
        width = -(-(len(negatives) + 1) // ALIGNED) * ALIGNED
        buffer = queries.new_empty(min(rows, len(queries)), width)
        for begin in range(0, len(queries), rows):
            some = slice(begin, min(begin + rows, len(queries)))
            weight, tile = weights[some, None], buffer[: some.stop - begin]
            scores.write(some, tile)
            torch.softmax(tile, 1, out=tile)
            p_negatives, p_target = tile[:, : len(negatives)], tile[:, len(negatives)]
            losses[some] = scores.losses(some, p_target)
            d_scores = (p_target[:, None] - 1) * weight  # of the targets
            torch.mm(p_negatives, negatives, out=d_queries[some])
            d_queries[some] *= weight
            d_queries[some].addcmul_(d_scores, targets[some])
            torch.mul(d_scores, queries[some], out=d_targets[some])
            d_negatives.addmm_(p_negatives.T, queries[some] * weight)
        ctx.save_for_backward(d_queries, d_targets, d_negatives, losses, None, None)
        return (losses * weights).sum()


class _TileScores:
    """Computes the scores of some queries at a time: of the negatives, then of the target."""

    def __init__(
        self,
        queries: Tensor,
        targets: Tensor,
        negatives: Tensor,
        collisions: Collisions,
        log_q: tuple[Tensor, Tensor] | None,
    ) -> None:
        self._collisions = collisions
        self._positive = (queries * targets).sum(1)  # [M]
        self._queries, self._negatives = queries, negatives
        if log_q is not None:  # as one more feature, because a pass over the scores is slower
            self._positive = self._positive - log_q[0]
            self._queries = torch.cat((queries, queries.new_ones(len(queries), 1)), dim=1)
            self._negatives = torch.cat((negatives, -log_q[1].to(negatives.dtype)[:, None]), dim=1)

    def write(self, some: slice, tile: Tensor) -> None:
        """Fill the tile [m, K + 1 or more] with the scores of the queries `some`; columns after K + 1 are -inf."""
        rows, columns = self._collisions.pairs(some)  # before the scores, so that these stay in the CPU cache
        count = len(self._negatives)
        torch.mm(self._queries[some], self._negatives.T, out=tile[:, :count])
        tile.view(-1).index_fill_(0, rows * tile.shape[1] + columns, -torch.inf)
        tile[:, count] = self._positive[some]
        tile[:, count + 1 :] = -torch.inf

    def losses(self, some: slice, probabilities: Tensor) -> Tensor:
        """-log p of the targets of the queries `some`; computed again from scores if p underflows."""
        losses = -probabilities.log()
        for row in torch.nonzero(losses > LARGEST_LOSS)[:, 0].tolist():  # rare
            scores = probabilities.new_empty(1, len(self._negatives) + 1)
            self.write(slice(some.start + row, some.start + row + 1), scores)
            losses[row] = -scores.log_softmax(1)[0, -1]
        return losses


def shared_softmax(
    queries: Tensor,
    targets: Tensor,
    negatives: Tensor,
    collisions: Collisions,
    weights: Tensor | None = None,
    *,
    log_q: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`sampled_softmax` of inner products with negatives that the batch shares, without ever holding all scores.

    Needs: a sampler with shared negatives; scores that are inner products.
    Inputs: queries [M, D], the vectors of their targets [M, D] and of the negatives [K, D], the collisions among [M, K]
    (see `collisions.py`), weights [M], log q of the targets [M] and of the negatives [K].
    When to choose it: if its needs are met; it is several times as fast as `sampled_softmax`.
    Relations: `sampled_softmax` of `SampledQueries.scores`.
    """
    weights = shares(weights, queries)
    scores = queries, targets, negatives, weights, collisions, log_q
    loss: Tensor = _SharedSoftmax.apply(*scores)  # type: ignore[no-untyped-call]
    return loss


def sampled_softmax(positive: Tensor, negatives: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross-entropy of the target among itself and sampled negatives, weighted mean over the rows.

    Needs: a sampler; scores already corrected by log q, collisions already at -inf (see `SampledQueries`).
    Inputs: scores of the targets [M] and of the negatives [M, K], weights [M].
    When to choose it: large catalogues, with hundreds to thousands of negatives that the batch shares.
    Relations: every item as a negative once, with collisions masked, is `full_softmax`; one negative is `bpr`.
    """
    lead = torch.cat((torch.zeros_like(positive)[:, None], negatives - positive[:, None]), dim=1)
    return weighted_mean(lead.logsumexp(1), weights)  # finite even if all negatives collide
