"""The scores of a model and of the simple methods on the same cases → whether it is better, in numbers and in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from segue.evaluation.metrics import differences, user_totals

SIMPLEST = "popularity"
LEAST_USERS = 20  # resamples of fewer users give intervals that are much too narrow
LONGER, DATA, RECIPE = "longer (`segue train --minutes`)", "on more data", "with another recipe (`segue recipes`)"


class BestSimple(msgspec.Struct, frozen=True):
    """The simple method with the highest score, and the model's score minus its own."""

    name: str
    score: float
    difference: float
    interval: tuple[float, float] | None
    """95 % interval of the paired difference, users resampled; None if it was not measured."""


class Shortcut(msgspec.Struct, frozen=True):
    """How much of the model's score the last item alone explains.

    It explains the cases whose target is among the first items of the baseline `last-item`, at the depth of the score.
    """

    share: float
    """The share of the model's summed score that falls on explained cases."""
    cases: int
    """The other cases."""
    score: float | None
    """The model's score on the other cases; None if there are none."""
    best: BestSimple | None
    """The best simple method on the other cases."""


class Verdict(msgspec.Struct, frozen=True):
    """Whether the model is better than the simple methods."""

    metric: str
    users: int
    score: float
    best: BestSimple | None
    """None if no simple method was measured."""
    popularity: float | None
    shortcut: Shortcut | None
    """None without `last-item`, and for a model whose score is zero."""
    warning: bool = False
    """Whether the simple methods were measured and the model is not clearly better."""
    sentences: list[str] = []
    """The verdict in words, with what to do after a warning; then the shortcut."""


def judge(
    metric: str,
    model: np.ndarray,
    baselines: Mapping[str, np.ndarray],
    users: np.ndarray,
    *,
    samples: int,
    rng: np.random.Generator,
    explained: np.ndarray | None = None,
    by_time: bool = False,
) -> Verdict:
    """Compare the model's metric on each case [C] with that of each simple method on the same cases.

    `users` [C]: the user of each case; one user's cases are resampled together. `explained` [C] bool: whether the last
    item alone explains the case. `by_time`: whether one split time for all users separates the cases from training.
    """
    verdict = Verdict(
        metric=metric,
        users=len(np.unique(users)),
        score=float(model.mean()),
        best=_best_simple(model, baselines, users, samples=samples, rng=rng),
        popularity=float(baselines[SIMPLEST].mean()) if SIMPLEST in baselines else None,
        shortcut=None if explained is None or not model.any() else _shortcut(model, baselines, users, explained, rng),
    )
    warning = verdict.best is not None and not _is_better(verdict.best, verdict.users)
    verdict = msgspec.structs.replace(verdict, warning=warning)
    return msgspec.structs.replace(verdict, sentences=sentences(verdict, by_time=by_time))


def _best_simple(
    model: np.ndarray,
    baselines: Mapping[str, np.ndarray],
    users: np.ndarray,
    *,
    samples: int,
    rng: np.random.Generator,
) -> BestSimple | None:
    if not baselines:
        return None
    name = max(baselines, key=lambda each: baselines[each].mean())
    theirs, interval = baselines[name], None
    if samples:
        totals = [user_totals({"score": values}, users) for values in (model, theirs)]
        paired = differences(*totals, samples=samples, rng=rng)["score"]
        interval = paired.low, paired.high
    return BestSimple(name, float(theirs.mean()), float((model - theirs).mean()), interval)


def _shortcut(
    model: np.ndarray,
    baselines: Mapping[str, np.ndarray],
    users: np.ndarray,
    explained: np.ndarray,
    rng: np.random.Generator,
) -> Shortcut:
    share, others = float(model[explained].sum() / model.sum()), ~explained
    if not others.any():
        return Shortcut(share, 0, None, None)
    theirs = {name: values[others] for name, values in baselines.items()}
    best = _best_simple(model[others], theirs, users[others], samples=0, rng=rng)
    return Shortcut(share, int(others.sum()), float(model[others].mean()), best)


def _is_better(best: BestSimple, users: int) -> bool:
    least = best.difference if best.interval is None else best.interval[0]
    return least > 0 and users >= LEAST_USERS


def sentences(verdict: Verdict, *, by_time: bool) -> list[str]:
    """The verdict in words, then the shortcut. `by_time` is as in `judge`."""
    best = verdict.best
    if best is None:
        first = (
            f"{verdict.metric} {figure(verdict.score)}. No simple method was measured on the same cases, so this does "
            "not tell whether the model is better than one."
        )
    else:
        first = f"WARNING: {_warning(verdict, best)}" if verdict.warning else _praise(verdict, best)
    if by_time:
        first += " The held-out events are later than all training events, as they will be for your users."
    return [first, *([] if verdict.shortcut is None else [_shortcut_text(verdict.metric, verdict.shortcut)])]


def _praise(verdict: Verdict, best: BestSimple) -> str:
    gain = f"{_percent(best.difference / best.score)} better" if best.score else "better"
    by = f"by {figure(best.difference)}{_interval(best)}"
    return (
        f"{verdict.metric} {figure(verdict.score)}: {gain} than the best simple method, {best.name} "
        f"({figure(best.score)}), {by}."
    )


def _warning(verdict: Verdict, best: BestSimple) -> str:
    """What is wrong, the figures, and what to do."""
    if not verdict.score and not best.score:
        return (
            f"{verdict.metric} is zero for the model and for every simple method: nobody's list holds a target. Use "
            "more data, or prepare it with another --split."
        )
    method = f"the best simple method, {best.name}"
    figures = (
        f"{verdict.metric} {figure(verdict.score)} against {figure(best.score)}, a difference of "
        f"{figure(best.difference)}{_interval(best)}"
    )
    if _too_few(verdict, best):
        users = "1 user is" if verdict.users == 1 else f"{verdict.users:,} users are"
        return (
            f"{users} too few to tell whether the model is better than {method}: {figures}. Use a log of more users, "
            "or hold out more of it with an earlier --split time:WHEN."
        )
    if verdict.popularity is not None and verdict.score < verdict.popularity:
        if best.name != SIMPLEST:
            method = f"{SIMPLEST} ({figure(verdict.popularity)}), and than {method}"
        return (
            f"worse than {method}: {figures}. It is worse than the same list for everybody, so it learned almost "
            f"nothing: train {LONGER} or {RECIPE}, and check that `segue prepare` read the times as you meant them."
        )
    most = best.difference if best.interval is None else best.interval[1]
    if most < 0:
        return f"worse than {method}: {figures}. Train {LONGER}, {RECIPE} or {DATA}."
    if best.difference <= 0:
        return f"not better than {method}: {figures}. Train {LONGER}, {DATA} or {RECIPE}."
    return f"not clearly better than {method}: {figures}. Train {LONGER} or {DATA} to be sure."


def _too_few(verdict: Verdict, best: BestSimple) -> bool:
    """Whether the interval says nothing: of few users, or around zero and wider than the score to beat."""
    if best.interval is None:
        return verdict.users < LEAST_USERS
    low, high = best.interval
    return verdict.users < LEAST_USERS or (low <= 0 <= high and high - low > best.score)


def _shortcut_text(metric: str, shortcut: Shortcut) -> str:
    text = f"Shortcut: the last item alone explains {_percent(shortcut.share)} of this score"
    if shortcut.score is None:
        return f"{text}; there are no cases that it does not explain."
    cases = "1 case" if shortcut.cases == 1 else f"{shortcut.cases:,} cases"
    best = shortcut.best
    beside = "" if best is None else f" (best simple method there: {best.name}, {figure(best.score)})"
    return f"{text}; on the {cases} it does not explain, {metric} is {figure(shortcut.score)}{beside}."


def counts_sentence(manifest: Mapping[str, Any]) -> str:
    """What item-to-item counts were worth on validation, by a run's manifest; empty if it has none."""
    counts = manifest.get("counts")
    if counts is None:
        return ""
    without, with_counts = figure(counts["without"]), figure(counts["with"])
    if "weights" not in counts:
        return (
            f"Counts of what followed what did not help and were left out: ndcg@10 on validation {without} without "
            f"them, {with_counts} with them."
        )
    return (
        f"Counts of what followed what: ndcg@10 on validation {without} without them, {with_counts} with them; "
        f"{counts['pairs']:,} pairs of items in {_memory(counts['bytes'])} of memory."
    )


def _memory(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:,.1f} kB"


def figure(value: float) -> str:
    """A share with four decimals and no zero before the point, as in .0651."""
    return f"{value:z.4f}".replace("0.", ".", 1)


def _percent(share: float) -> str:
    return f"{100 * share:,.1f} %" if 0 < share < 0.1 else f"{100 * share:,.0f} %"


def _interval(best: BestSimple) -> str:
    if best.interval is None:
        return " (no interval: `evaluate.bootstrap` is 0)"
    return f" (95 % {figure(best.interval[0])} to {figure(best.interval[1])})"
