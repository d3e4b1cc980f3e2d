"""A history → the next items as one plan: beam search over the catalogue, by a model that continues histories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch, take
from segue.errors import FolderError, InputError
from segue.index.exact import best_columns
from segue.layers.packed import PackedBatch, tensors
from segue.recommend.answer import BEAM, Plan, PlannedItem
from segue.recommend.history import History, pack_histories
from segue.recommend.rules import Rules, excluded_items

if TYPE_CHECKING:
    from segue.recommend.recommender import Recommender

MOST_CHANCES = 8_000_000  # chances in memory at a time: of every item, for every plan under way
MOST_WEIGHED = 64_000_000  # the same for one history, where a wider beam than usual is asked for


@runtime_checkable
class Planner(Protocol):
    """What a model can do that continues a history item by item."""

    def begin_plan(self, batch: PackedBatch) -> tuple[Tensor, Any]:
        """What asks for the first item after each history [B, Q], and what the next steps need."""
        ...

    def extend_plan(self, decoding: Any, rows: Tensor, items: Tensor) -> tuple[Tensor, Any]:
        """What asks for the next item of some plans [P, Q], when `items` [P] are their newest; `rows` [P]: which of the
        plans before each goes on from."""
        ...

    def score_all(self, queries: Tensor) -> Tensor:
        """Scores of every item [P, V + 1]; column 0 means nothing."""
        ...


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """How plans are sought."""

    n: int = 5
    """Items of a plan; fewer only where fewer remain."""
    beam: int = BEAM
    """Plans that are followed side by side. With one, each item is the likeliest after those before it."""
    repeats: bool = False
    """Whether an item may come twice."""

    def __post_init__(self) -> None:
        for name, what in (("n", "the number of items in a plan"), ("beam", "the plans followed side by side")):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise InputError(f"{name}, {what}, must be a whole number of at least 1, got {value!r}.")


def plan_histories(
    recommender: Recommender,
    histories: Sequence[History],
    rules: Rules,
    search: BeamSearch,
    *,
    query_times: np.ndarray | None = None,
) -> list[Plan]:
    """A plan for each history that was read, all under the same `rules`, whose `k` is not looked at.

    `query_times` [B]: the questions' seconds. See `Recommender.plan_many`.
    """
    model = recommender.model
    if not isinstance(model, Planner):
        raise InputError(
            "The model of this run answers with items that stand each for itself and cannot plan: train one that "
            "can, such as segue train DATA --recipe seq2seq."
        )
    _refuse_too_wide(search, len(recommender.vocabulary))
    packed = pack_histories(histories, recommender.known, query_times=query_times)
    rows = np.flatnonzero(packed.batch.lengths)
    plans = [Plan(items=[], score=0.0)] * len(histories)
    if len(rows) < len(histories):
        plans = [_popular(recommender, rules, search)] * len(histories)
    step = max(1, MOST_CHANCES // (search.beam * len(recommender.answerable)))
    for begin in range(0, len(rows), step):
        chosen = rows[begin : begin + step]
        batch = take(packed.batch, chosen)
        windows = tensors(take(packed.batch, chosen, recommender.model.length, recommender.model.window_step))
        with torch.inference_mode():
            found = beam_search(
                model, windows, _allowed(recommender, batch, rules), torch.from_numpy(recommender.answerable), search
            )
        for row, plan in zip(chosen.tolist(), _told(recommender, *found), strict=True):
            plans[row] = plan
    return [
        Plan(items=plan.items, score=plan.score, unknown=unknown, fallback=plan.fallback)
        for plan, unknown in zip(plans, packed.unknown, strict=True)
    ]


def _refuse_too_wide(search: BeamSearch, items: int) -> None:
    if search.beam > BEAM and search.beam * items > MOST_WEIGHED:
        raise InputError(
            f"A beam of {search.beam:,} over {items:,} items weighs more chances at a step than memory may hold: "
            f"choose a beam of at most {max(BEAM, MOST_WEIGHED // items):,}."
        )


def beam_search(
    model: Planner, histories: PackedBatch, allowed: Tensor, trained: Tensor, search: BeamSearch
) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest plan found for each history: its items [B, m] and the log of each one's chance [B, m], where m is
    n, or as many as remain for the plan that has most.

    `allowed` [B, V + 1] bool: the items that a history's plan may hold. `trained` [V + 1] bool: those that share the
    chances. The chance of a plan is the product of its items', each among all of `trained` and given those before it.
    Of equally likely ones, the one with the lower numbers first is kept. After the last item of a plan for which no
    more remain stand item 0 and 0.
    """
    users, columns = allowed.shape
    remaining = allowed[:, 1:].sum(1)
    lengths = torch.where(remaining > 0, search.n, 0) if search.repeats else remaining.clamp(max=search.n)
    total = torch.zeros(users, 1, dtype=torch.float64)  # [B, K]: the log of each plan's chance
    items = torch.zeros(users, 1, 0, dtype=torch.int64)  # [B, K, t]
    logs = torch.zeros(users, 1, 0, dtype=torch.float64)
    questions, decoding = model.begin_plan(histories)
    steps = int(lengths.max())
    for step in range(steps):
        chances = model.score_all(questions).double().masked_fill_(~trained, -torch.inf).log_softmax(1)
        chances = chances.view(users, -1, columns).masked_fill(~allowed[:, None], -torch.inf)
        if not search.repeats:
            chances.scatter_(2, items, -torch.inf)
        chances[:, :, 0] = torch.where(step >= lengths, 0.0, -torch.inf)[:, None]  # item 0: the plan is over
        best, total = best_columns((total[:, :, None] + chances).view(users, -1), search.beam)
        parents, newest = best // columns, best % columns  # [B, K]
        logs = torch.cat((_of(logs, parents), chances.view(users, -1).gather(1, best)[:, :, None]), dim=2)
        items = torch.cat((_of(items, parents), newest[:, :, None]), dim=2)
        if step + 1 < steps:
            width = questions.shape[0] // users
            rows = (torch.arange(users)[:, None] * width + parents).flatten()
            questions, decoding = model.extend_plan(decoding, rows, newest.flatten())
    if not bool(torch.isfinite(logs[:, 0]).all()):
        raise FolderError("The model's answer is not a finite number: the model is damaged; train it again.")
    return items[:, 0].numpy(), logs[:, 0].numpy()


def _of(plans: Tensor, parents: Tensor) -> Tensor:
    """The plans [B, K, t] that others [B, K'] go on from."""
    return plans.gather(1, parents[:, :, None].expand(-1, -1, plans.shape[2]))


def _allowed(recommender: Recommender, histories: Batch, rules: Rules) -> Tensor:
    """What a plan for each history may hold [B, V + 1]."""
    allowed = np.tile(recommender.answerable, (len(histories.lengths), 1))
    if rules.only is not None:
        allowed &= np.isin(np.arange(allowed.shape[1]), rules.only)
    forbidden = excluded_items(histories, [rules] * len(allowed), keep_seen=recommender.seen == "kept")
    if forbidden is not None:
        allowed[forbidden.owners, forbidden.numbers] = False
    return torch.from_numpy(allowed)


def _told(recommender: Recommender, items: np.ndarray, logs: np.ndarray) -> list[Plan]:
    """Numbers → plans, without what stands after their ends."""
    told = []
    for numbers, chances in zip(items, logs, strict=True):
        kept = numbers > 0
        ids, titles = recommender.vocabulary.ids(numbers[kept]), recommender.vocabulary.titles(numbers[kept])
        steps = list(map(PlannedItem, ids, titles, chances[kept].tolist()))
        told.append(Plan(items=steps, score=sum(step.log_probability for step in steps)))
    return told


def _popular(recommender: Recommender, rules: Rules, search: BeamSearch) -> Plan:
    """For a history of which nothing is known: the items trained on most, each as likely as its share of training."""
    ranking = recommender.rank(
        Batch(items=np.zeros(0, np.int64), times=np.zeros(0, np.int64), lengths=np.zeros(1, np.int64)),
        [Rules(k=search.n, exclude=rules.exclude, only=rules.only)],
    )
    shares = np.log(np.maximum(ranking.scores, 1) / recommender.counts.sum())
    (plan,) = _told(recommender, ranking.items, shares)
    return Plan(items=plan.items, score=plan.score, fallback="popularity")
