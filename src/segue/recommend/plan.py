"""A history → the next items as one plan: beam search over the catalogue with a model that has a decoder.

Its probabilities are the model's alone: item-to-item counts have no part in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch, take
from segue.errors import FolderError, InputError
from segue.index.exact import best_columns
from segue.layers.packed import PackedBatch, tensors
from segue.recommend.answer import BEAM, Plan, PlannedItem, begin_ranking, named_items
from segue.recommend.history import History, pack_histories
from segue.recommend.rules import Rules, excluded_items

if TYPE_CHECKING:
    from segue.recommend.recommender import Recommender

MOST_PROBABILITIES = 8_000_000  # in memory at a time: one for every item and every plan of a step
MOST_OF_ONE_HISTORY = 64_000_000  # the same for one history, with a wider beam than the default


@runtime_checkable
class Planner(Protocol):
    """A model that continues a history item by item."""

    def begin_plan(self, batch: PackedBatch) -> tuple[Tensor, Any]:
        """The query of the first item after each history [B, Q], and the state that the next steps need."""

    def extend_plan(self, decoding: Any, rows: Tensor, items: Tensor) -> tuple[Tensor, Any]:
        """The query of the next item of each plan [P, Q], whose newest item is in `items` [P], and the next state.

        rows [P]: the previous plan that each plan extends.
        """

    def score_all(self, queries: Tensor) -> Tensor:
        """Scores of every item [P, V + 1]; column 0 is padding."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Options of the beam search."""

    n: int = 5
    """Items of a plan; fewer only if fewer remain."""
    beam: int = BEAM
    """Plans that each step keeps. With 1, each item is the likeliest after those before it."""
    repeats: bool = False
    """Whether an item may occur twice in a plan."""

    def __post_init__(self) -> None:
        for name, meaning in (("n", "the number of items in a plan"), ("beam", "the width of the beam search")):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise InputError(f"{name}, {meaning}, must be a whole number of at least 1, got {value!r}.")


def plan_histories(
    recommender: Recommender,
    histories: Sequence[History],
    rules: Rules,
    search: BeamSearch,
    query_times: np.ndarray | None,
) -> list[Plan]:
    """See `Recommender.plan_many`. The `k` of the rules is not used. `query_times` [B]: seconds."""
    model, n_items = recommender.model, len(recommender.vocabulary)
    if not isinstance(model, Planner):
        raise InputError(
            "The model of this run scores each item alone and cannot plan: train one with a decoder, such as "
            "segue train DATA --recipe seq2seq."
        )
    if search.beam > BEAM and search.beam * n_items > MOST_OF_ONE_HISTORY:
        raise InputError(
            f"A beam of {search.beam:,} over {n_items:,} items needs more memory for its probabilities than allowed: "
            f"choose a beam of at most {max(BEAM, MOST_OF_ONE_HISTORY // n_items):,}."
        )
    batch, unknown = pack_histories(histories, recommender.known, query_times=query_times)
    rows = np.flatnonzero(batch.lengths)
    no_plan = Plan(items=[], score=0.0)
    plans = [_popular_plan(recommender, rules, search) if len(rows) < len(histories) else no_plan] * len(histories)
    step = max(1, MOST_PROBABILITIES // (search.beam * len(recommender.answerable)))
    for begin in range(0, len(rows), step):
        chosen = rows[begin : begin + step]
        windows = tensors(take(batch, chosen, recommender.model.length, recommender.model.window_step))
        allowed = _allowed(recommender, take(batch, chosen), rules)
        with torch.inference_mode():
            best = beam_search(model, windows, allowed, torch.from_numpy(recommender.answerable), search)
        for row, plan in zip(chosen.tolist(), _plans(recommender, *best), strict=True):
            plans[row] = plan
    return [msgspec.structs.replace(plan, unknown=ids) for plan, ids in zip(plans, unknown, strict=True)]


def beam_search(
    model: Planner, histories: PackedBatch, allowed: Tensor, candidates: Tensor, search: BeamSearch
) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest plan found for each history: its items [B, m] and the log probability of each [B, m].

    The probability of an item is a softmax over all `candidates` [V + 1] bool, given the items before it; that of a
    plan is their product. Of equally likely plans, the one with the lower item numbers is kept.

    allowed [B, V + 1] bool: the items that the plan of a history may contain. m is n, or less if fewer items remain for
    every history; a plan that ends earlier is padded with item 0 and log probability 0.
    """
    users, columns = allowed.shape
    remaining = allowed[:, 1:].sum(1)
    lengths = torch.where(remaining > 0, search.n, 0) if search.repeats else remaining.clamp(max=search.n)
    total = torch.zeros(users, 1, dtype=torch.float64)  # [B, K]: log probability of each plan
    items = torch.zeros(users, 1, 0, dtype=torch.int64)  # [B, K, t]
    logs = torch.zeros(users, 1, 0, dtype=torch.float64)  # [B, K, t]: log probability of each item
    queries, decoding = model.begin_plan(histories)
    steps = int(lengths.max())
    for step in range(steps):
        next_logs = model.score_all(queries).double().masked_fill_(~candidates, -torch.inf).log_softmax(1)
        next_logs = next_logs.view(users, -1, columns).masked_fill(~allowed[:, None], -torch.inf)
        if not search.repeats:
            next_logs.scatter_(2, items, -torch.inf)
        next_logs[:, :, 0] = torch.where(step >= lengths, 0.0, -torch.inf)[:, None]  # item 0: the plan has ended
        best, total = best_columns((total[:, :, None] + next_logs).view(users, -1), search.beam)
        parents, newest = best // columns, best % columns  # [B, K]
        logs = torch.cat((_of(logs, parents), next_logs.view(users, -1).gather(1, best)[:, :, None]), dim=2)
        items = torch.cat((_of(items, parents), newest[:, :, None]), dim=2)
        if step + 1 < steps:
            width = queries.shape[0] // users
            rows = (torch.arange(users)[:, None] * width + parents).flatten()
            queries, decoding = model.extend_plan(decoding, rows, newest.flatten())
    if not bool(torch.isfinite(logs[:, 0]).all()):
        raise FolderError("The model's answer is not a finite number: the model is damaged; train it again.")
    return items[:, 0].numpy(), logs[:, 0].numpy()


def _of(plans: Tensor, parents: Tensor) -> Tensor:
    """The rows `parents` [B, K'] of plans [B, K, t]."""
    return plans.gather(1, parents[:, :, None].expand(-1, -1, plans.shape[2]))


def _allowed(recommender: Recommender, histories: Batch, rules: Rules) -> Tensor:
    """Whether the plan of a history may contain an item [B, V + 1]."""
    allowed = np.tile(recommender.answerable, (len(histories.lengths), 1))
    if rules.only is not None:
        allowed &= np.isin(np.arange(allowed.shape[1]), rules.only)
    exclude = excluded_items(histories, [rules] * len(allowed), keep_seen=recommender.seen == "kept")
    if exclude is not None:
        allowed[exclude.owners, exclude.numbers] = False
    return torch.from_numpy(allowed)


def _plans(recommender: Recommender, items: np.ndarray, logs: np.ndarray) -> list[Plan]:
    """Item numbers and log probabilities [B, m] → plans."""
    plans = named_items(PlannedItem, recommender.known, items, logs)
    return [Plan(items=steps, score=sum(step.log_probability for step in steps)) for steps in plans]


def _popular_plan(recommender: Recommender, rules: Rules, search: BeamSearch) -> Plan:
    """The plan for a history without known items: the most frequent items in training, each with its share of it."""
    ranking = begin_ranking(recommender.known, np.zeros(1), [replace(rules, k=search.n)])
    shares = np.log(np.maximum(ranking.scores, 1) / recommender.counts.sum())
    (plan,) = _plans(recommender, ranking.items, shares)
    return msgspec.structs.replace(plan, fallback="popularity")
