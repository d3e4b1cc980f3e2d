"""Softmax losses: full over the catalogue, or over drawn items that the batch shares, in tiles; sampled, of scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from segue.objective.losses.mean import shares, weighted_mean
from segue.objective.samplers.collisions import Collisions

TILE_SCORES = 1 << 20  # scores of a tile: 4 MB of float32, so that a tile stays in the cache between its passes
LEAST_SURE = 80.0  # -log p beyond which a probability is read no longer: float32 ends near 87
LEAST_TILE = 64  # below this many rows matrix products lose their speed
ALIGNED = 16  # scores of a cache line: products with part of a tile's columns are faster where its rows begin with one
LEAST_COLUMNS = 4  # questions of a tile of sums over codes, which has no such loss


class _FullSoftmax(torch.autograd.Function):
    """Each tile's share of both gradients is computed while its probabilities are in the cache."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        rows = max(LEAST_TILE, TILE_SCORES // len(matrix))
        with_gradient = any(ctx.needs_input_grad)
        d_hidden = torch.empty_like(hidden) if with_gradient else None
        d_matrix = torch.zeros_like(matrix) if with_gradient else None
        scores = hidden.new_empty(min(rows, len(hidden)), len(matrix))
        total = hidden.new_zeros(())
        losses = torch.empty_like(weights)
        for begin in range(0, len(hidden), rows):
            states, answers = hidden[begin : begin + rows], targets[begin : begin + rows, None]
            weight = weights[begin : begin + rows, None]
            tile = scores[: len(states)]
            torch.mm(states, matrix.T, out=tile)
            lost = losses[begin : begin + rows]
            lost.copy_(_surprise(tile, answers, states, matrix))  # leaves probabilities in the tile
            total += (lost * weight[:, 0]).sum()
            if d_hidden is not None and d_matrix is not None:
                tile.scatter_add_(1, answers, -torch.ones_like(weight))
                # The weights scale the narrow sides of the products: a pass over the tile is what costs.
                torch.mm(tile, matrix, out=d_hidden[begin : begin + rows])
                d_hidden[begin : begin + rows] *= weight
                d_matrix.addmm_(tile.T, states * weight)
        ctx.save_for_backward(d_hidden, d_matrix, losses)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        d_hidden, d_matrix, losses = ctx.saved_tensors
        return d_hidden * gradients[0], d_matrix * gradients[0], None, losses * gradients[0]


def _surprise(tile: Tensor, answers: Tensor, states: Tensor, matrix: Tensor) -> Tensor:
    """-log p of each row's answer; the scores in `tile` are replaced by probabilities."""
    torch.softmax(tile, 1, out=tile)
    surprise = -tile.gather(1, answers)[:, 0].log()
    lost = torch.nonzero(surprise > LEAST_SURE)[:, 0]  # so unlikely that float32 has no digits left: rare, so exactly
    if len(lost):
        exact = (states[lost] @ matrix.T).log_softmax(1)
        surprise[lost] = -exact.gather(1, answers[lost])[:, 0]
    return surprise


def full_softmax(hidden: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross-entropy of the softmax over every item: -s_target + log Σ exp s, weighted mean over the rows.

    Needs: scores that are inner products; no sampler.
    Inputs: states [M, D], item vectors [V, D], each state's item [M] in 0..V-1, weights [M]. The logits exist one tile
    at a time, forward and backward together.
    When to choose it: up to some ten thousand items.
    Relations: `sampled_softmax` with every item as a negative; `sce` with buckets that hold everything.
    """
    weights = shares(weights, hidden)
    loss: Tensor = _FullSoftmax.apply(hidden, matrix, targets, weights)  # type: ignore[no-untyped-call]
    return loss


class _CodedSoftmax(torch.autograd.Function):
    """As `_FullSoftmax`, but that scores are sums over tables: a question is a column of a tile."""

    @staticmethod
    def forward(
        ctx: Any, tables: Tensor, lengths: Tensor | None, places: Tensor, targets: Tensor, weights: Tensor
    ) -> Tensor:
        columns = max(LEAST_COLUMNS, TILE_SCORES // len(places))
        holders, begins = _holders(places, len(tables))
        d_tables, losses = torch.empty_like(tables), torch.empty_like(weights)
        d_lengths = None if lengths is None else torch.zeros_like(lengths)
        for begin in range(0, len(targets), columns):
            some = slice(begin, begin + columns)
            tile = functional.embedding_bag(places, tables[:, some].contiguous(), mode="sum")  # [V, c]
            if lengths is not None:
                tile /= lengths[:, None]
            scores = tile if d_lengths is None else tile.clone()
            answers, asked = targets[some], torch.arange(tile.shape[1], device=tile.device)
            losses[some] = tile.logsumexp(0) - tile[answers, asked]
            torch.softmax(tile, 0, out=tile)
            tile[answers, asked] -= 1
            tile *= weights[some]
            if lengths is not None and d_lengths is not None:
                tile /= lengths[:, None]
                d_lengths -= (tile * scores).sum(1)
            d_tables[:, some] = functional.embedding_bag(holders, tile, begins, mode="sum")
        ctx.save_for_backward(d_tables, d_lengths, losses)
        return (losses * weights).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, Tensor]:
        d_tables, d_lengths, losses = ctx.saved_tensors
        d_lengths = None if d_lengths is None else d_lengths * gradients[0]
        return d_tables * gradients[0], d_lengths, None, None, losses * gradients[0]


def _holders(places: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The items that have each row of the tables among their places [V, parts], row after row, and where each row's
    begin [rows]; both int32. The rows of one part come before those of the next."""
    order = [part.sort(stable=True).indices.int() for part in places.T]
    sizes = torch.bincount(places.flatten(), minlength=rows)
    return torch.cat(order), (sizes.cumsum(0) - sizes).int()


def coded_softmax(
    tables: Tensor,
    places: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
) -> Tensor:
    """`full_softmax` over items that are known by codes, without a vector of any item.

    Needs: scores that are sums of products with the items' parts; no sampler.
    Inputs: the products of all that parts may be with each question [R, M], the rows in there that each item's score
    is the sum of [V, parts], each question's item [M] in 0..V-1, weights [M]; lengths [V] that scores are divided by.
    When to choose it: of 50,000 items a step over 512 questions took 160 ms where vectors of width 64 took 242 and of
    128 496; of 3,416 it took about as long. What it needs in memory does not grow with the width.
    Relations: `full_softmax` of the vectors written out.
    """
    shares_of_all = shares(weights, tables.T)
    loss: Tensor = _CodedSoftmax.apply(  # type: ignore[no-untyped-call]
        tables, lengths, places, targets, shares_of_all
    )
    return loss


class _SharedSoftmax(torch.autograd.Function):
    """As `_FullSoftmax`; the answer of a row comes after what was drawn."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        answers: Tensor,
        drawn: Tensor,
        weights: Tensor,
        collisions: Collisions,
        log_q: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        rows = max(LEAST_TILE, TILE_SCORES // (len(drawn) + 1))
        d_queries, d_answers, d_drawn = torch.empty_like(queries), torch.empty_like(answers), torch.zeros_like(drawn)
        losses = torch.empty_like(weights)
        lines = _Lines(queries, answers, drawn, collisions, log_q)
        width = -(-(len(drawn) + 1) // ALIGNED) * ALIGNED
        room = queries.new_empty(min(rows, len(queries)), width)
        for begin in range(0, len(queries), rows):
            some = slice(begin, min(begin + rows, len(queries)))
            asked, weight, tile = queries[some], weights[some, None], room[: some.stop - begin]
            lines.write(some, tile)
            torch.softmax(tile, 1, out=tile)
            chances, own = tile[:, : len(drawn)], tile[:, len(drawn)]
            losses[some] = lines.surprise(some, own)
            missing = (own[:, None] - 1) * weight  # of the answers' chances
            torch.mm(chances, drawn, out=d_queries[some])
            d_queries[some] *= weight
            d_queries[some].addcmul_(missing, answers[some])
            torch.mul(missing, asked, out=d_answers[some])
            d_drawn.addmm_(chances.T, asked * weight)
        ctx.save_for_backward(d_queries, d_answers, d_drawn, losses)
        return (losses * weights).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None]:
        d_queries, d_answers, d_drawn, losses = (saved * gradients[0] for saved in ctx.saved_tensors)
        return d_queries, d_answers, d_drawn, losses, None, None


class _Lines:
    """The scores of questions, some at a time: of what was drawn, and of the answer after that."""

    def __init__(
        self,
        queries: Tensor,
        answers: Tensor,
        drawn: Tensor,
        collisions: Collisions,
        log_q: tuple[Tensor, Tensor] | None,
    ) -> None:
        self._collisions = collisions
        self._positive = (queries * answers).sum(1)  # [M]
        self._queries, self._drawn = queries, drawn
        if log_q is not None:  # as one feature more, for a pass over the scores would cost more
            self._positive = self._positive - log_q[0]
            self._queries = torch.cat((queries, queries.new_ones(len(queries), 1)), dim=1)
            self._drawn = torch.cat((drawn, -log_q[1].to(drawn.dtype)[:, None]), dim=1)

    def write(self, some: slice, tile: Tensor) -> None:
        """Into the tile [m, K + 1 or more], those of consecutive rows; -inf where there is room left."""
        rows, columns = self._collisions.pairs(some)  # before the scores, which are to stay in the cache
        drawn = len(self._drawn)
        torch.mm(self._queries[some], self._drawn.T, out=tile[:, :drawn])
        tile.view(-1).index_fill_(0, rows * tile.shape[1] + columns, -torch.inf)
        tile[:, drawn] = self._positive[some]
        tile[:, drawn + 1 :] = -torch.inf

    def surprise(self, some: slice, chances: Tensor) -> Tensor:
        """-log p of the answers of consecutive rows, whose chances are known, if float32 has digits for them."""
        surprise = -chances.log()
        for row in torch.nonzero(surprise > LEAST_SURE)[:, 0].tolist():  # rare, so exactly
            line = chances.new_empty(1, len(self._drawn) + 1)
            self.write(slice(some.start + row, some.start + row + 1), line)
            surprise[row] = -line.log_softmax(1)[0, -1]
        return surprise


def shared_softmax(
    queries: Tensor,
    answers: Tensor,
    drawn: Tensor,
    collisions: Collisions,
    weights: Tensor | None = None,
    *,
    log_q: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`sampled_softmax` of inner products with negatives that the batch shares, without ever holding all scores.

    Needs: a sampler whose draws are shared; scores that are inner products.
    Inputs: questions [M, D], the vectors of their answers [M, D] and of what was drawn [K, D], what of [M, K] is no
    negative (see `collisions.py`), weights [M], log q of the answers and of the drawn.
    When to choose it: wherever it can be; it is `sampled_softmax` several times as fast.
    Relations: `sampled_softmax` of `shared_scores`.
    """
    shares_of_all = shares(weights, queries)
    loss: Tensor = _SharedSoftmax.apply(  # type: ignore[no-untyped-call]
        queries, answers, drawn, shares_of_all, collisions, log_q
    )
    return loss


def sampled_softmax(positive: Tensor, negatives: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross-entropy of the positive among itself and drawn negatives, weighted mean over the rows.

    Needs: a sampler; scores already corrected by log q, collisions already at -inf (see `scores.py`).
    Inputs: the answers' scores [M], the negatives' [M, K], weights [M].
    When to choose it: large catalogues, with hundreds to thousands of negatives that the batch shares.
    Relations: with every item drawn once and the collision masked it is `full_softmax`; with one negative, `bpr`.
    """
    lead = torch.cat((torch.zeros_like(positive)[:, None], negatives - positive[:, None]), dim=1)
    return weighted_mean(lead.logsumexp(1), weights)  # finite even if all negatives collide
