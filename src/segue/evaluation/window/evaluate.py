"""What users meet in the days after a moment → how much of it a list of k holds, and how that falls as histories age.

One case a user with a history before the moment WHEN of `--split time:WHEN` and with something positive in
(WHEN, WHEN + days]; what happens at WHEN itself is neither. The targets are the distinct items of that window.

- recall@k: the share of a user's targets among the first k, on average over users. Everything is ranked that may be
  answered, other targets too, so a user with more than k targets cannot reach 1; ties count against the scorer; a
  target that is no candidate is a miss.
- hit@k: the share of users with at least one target among the first k.
- Both also over the targets that training met and over those that it never did, each time of the users with any.
- p90_coverage@k: the smallest share of the catalogue that makes up 90 % of everything shown. It tells a model that
  gives all the same from one that does not, where recall cannot.
- entropy@k: the entropy in nats of the values of `evaluate.interest` among a user's first k, on average over users.

An embedding of age a is made from the events before WHEN - a. Users, targets and candidates are the same at every age:
users are those with a history at the greatest one, and what the seen filter takes out is always what was seen before
WHEN, since a service knows that whatever the age of its embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from segue.data.batch import MICROSECONDS, Batch, case_batches, gather, ragged_rows
from segue.data.sequences import Sequences
from segue.data.split import Cases, Split, first_at
from segue.errors import InputError, SettingsError
from segue.evaluation.baselines import BASELINES
from segue.evaluation.evaluator import MOST_SCORES, TOKENS, Evaluator, Progress, Scorer, best
from segue.evaluation.metrics import (
    Loss,
    added_up,
    coverage,
    entropies,
    hit,
    intervals,
    p90_coverage,
    relative_losses,
    shown,
)
from segue.evaluation.ranks import MISS, Exclusions, ranks_within
from segue.evaluation.settings import MOST_DAYS, EvaluateSettings, seen_rule
from segue.evaluation.training_counts import training_counts
from segue.evaluation.window.report import Age, TargetPart, WindowReport, moment_text

DAY = 86_400 * MICROSECONDS

Positive = Callable[[Batch], np.ndarray]
"""Which events of a batch are targets, as a mask [T]."""
Intervals = dict[str, tuple[float, float]]
"""Measure → the ends of its interval."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowCases:
    """Users with a history before a moment and with targets after it."""

    moment: int  # microseconds
    users: np.ndarray  # [C] int64
    starts: np.ndarray  # [C] int64, the first row of the user
    ends: np.ndarray  # [C] int64, the user's first row at or after the moment
    owner: np.ndarray  # [N] int64, whose case a target belongs to, in order
    targets: np.ndarray  # [N] int64, items, each once a case

    def __len__(self) -> int:
        return len(self.users)

    @property
    def sizes(self) -> np.ndarray:
        """Targets of each case [C]."""
        return np.bincount(self.owner, minlength=len(self))

    def only(self, which: np.ndarray) -> WindowCases:
        """Some of the targets [N] bool, and the users who have any of them."""
        kept, owner = np.unique(self.owner[which], return_inverse=True)
        starts, ends = self.starts[kept], self.ends[kept]
        return WindowCases(self.moment, self.users[kept], starts, ends, owner, self.targets[which])


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What one scorer did on some cases, with histories of one age."""

    ranks: np.ndarray  # [N] int64, exact up to the greatest depth, one more than that beyond it; MISS for no candidate
    shown: dict[int, np.ndarray]  # k → how often each item was among the first k [V + 1]
    entropy: dict[int, np.ndarray]  # k → of each case [C]; empty where no interests are known


@dataclass(frozen=True, slots=True, eq=False)
class WindowEvaluation:
    """The report, and what is behind the model's figures: age in days → measure → its value for each user."""

    report: WindowReport
    users: np.ndarray  # [C] int64
    values: dict[float, dict[str, np.ndarray]]  # [C] each


def window_cases(
    sequences: Sequences,
    *,
    moment: int,
    until: int,
    oldest: int | None = None,
    positive: Positive | None = None,
) -> WindowCases:
    """Users with an event before `oldest` (the moment itself when not given) and one in (moment, until].

    `positive` says which events are targets; all are when it is not given. Times are microseconds.
    """
    offsets = np.asarray(sequences.offsets, dtype=np.int64)
    begins, beyond = first_at(sequences, moment + 1), first_at(sequences, until + 1)
    with_history = first_at(sequences, moment if oldest is None else oldest) > offsets[:-1]
    counts = np.where(with_history, beyond - begins, 0)
    window, user = gather(sequences, begins, begins + counts), np.repeat(np.arange(len(counts)), counts)
    meant = np.ones(len(user), dtype=bool) if positive is None else positive(window)
    n_numbers = int(window.items.max(initial=0)) + 1
    pairs = np.unique(user[meant] * n_numbers + window.items[meant])
    users, owner = np.unique(pairs // n_numbers, return_inverse=True)
    ends = np.asarray(first_at(sequences, moment), dtype=np.int64)[users]
    targets = pairs % n_numbers
    return WindowCases(moment=moment, users=users, starts=offsets[users], ends=ends, owner=owner, targets=targets)


def find_targets(
    evaluator: Evaluator,
    scorer: Scorer,
    cases: WindowCases,
    ks: Sequence[int],
    *,
    moment: int,
    interest: np.ndarray | None = None,
    progress: Progress | None = None,
) -> Found:
    """Ask a scorer for every case's targets, with what is known of the user before `moment`.

    `interest` [V + 1] is the number of each item's kind of interest, 0 for none.
    """
    depth, sizes = max(ks), cases.sizes
    first = np.cumsum(sizes) - sizes
    found = Found(
        ranks=np.zeros(len(cases.targets), dtype=np.int64),
        shown={k: np.zeros(evaluator.n_items + 1, dtype=np.int64) for k in ks},
        entropy={} if interest is None else {k: np.zeros(len(cases)) for k in ks},
    )
    # A history ends before the user's first event from the moment on; there is one, as there are targets.
    histories = Cases(cases.users, cases.starts, first_at(evaluator.sequences, moment)[cases.users])
    most_rows, done = max(1, MOST_SCORES // (evaluator.n_items + 1)), 0
    batches = case_batches(evaluator.sequences, histories, tokens=TOKENS, most_rows=most_rows)
    for chosen, batch in evaluator.group.shard(batches):
        query_times = np.full(len(chosen), moment // MICROSECONDS)
        left = evaluator.left(scorer, replace(batch, query_times=query_times), _seen(evaluator, cases, chosen))
        rows, line = ragged_rows(first[chosen], sizes[chosen]), np.repeat(np.arange(len(chosen)), sizes[chosen])
        found.ranks[rows] = ranks_within(left, line, cases.targets[rows], depth)
        lists = best(left, depth)
        for k in ks:
            found.shown[k] += shown(lists, k, evaluator.n_items)
            if interest is not None:
                found.entropy[k][chosen] = entropies(interest[lists[:, :k]])
        done = min(len(cases), done + len(chosen) * evaluator.group.size)
        if progress is not None:
            progress(done, len(cases))
    total = evaluator.group.sum
    return Found(
        ranks=total(found.ranks),
        shown={k: total(times) for k, times in found.shown.items()},
        entropy={k: total(values) for k, values in found.entropy.items()},
    )


def _seen(evaluator: Evaluator, cases: WindowCases, chosen: np.ndarray) -> Exclusions | None:
    """What was seen before the moment of the cases, whatever the age of the history."""
    if evaluator.seen == "kept":
        return None
    lengths = cases.ends[chosen] - cases.starts[chosen]
    items = evaluator.sequences.items[ragged_rows(cases.starts[chosen], lengths)]
    return Exclusions(rows=np.repeat(np.arange(len(chosen)), lengths), items=items.astype(np.int64))


def user_values(cases: WindowCases, found: Found, ks: Sequence[int]) -> dict[str, np.ndarray]:
    """Every measure that is a mean over users, at every depth: name@k → [C]."""
    values: dict[str, np.ndarray] = {}
    for k in ks:
        within = np.bincount(cases.owner, weights=hit(found.ranks, k), minlength=len(cases))
        values |= {f"recall@{k}": within / cases.sizes, f"hit@{k}": (within > 0).astype(np.float64)}
        values |= {f"entropy@{k}": found.entropy[k]} if found.entropy else {}
    return values


def by_target(cases: WindowCases, found: Found, counts: np.ndarray, ks: Sequence[int]) -> list[TargetPart]:
    """recall and hit over the targets that training met and over those that it never did; `counts` [V + 1] are its
    events of each item."""
    cold, parts = counts[cases.targets] == 0, list[TargetPart]()
    names: dict[Literal["warm", "cold"], np.ndarray] = {"warm": ~cold, "cold": cold}
    for name, which in names.items():
        if which.any():
            some = cases.only(which)
            values = user_values(some, replace(found, ranks=found.ranks[which], entropy={}), ks)
            means = {measure: float(column.mean()) for measure, column in values.items()}
            parts.append(TargetPart(name=name, users=len(some), targets=len(some.targets), metrics=means))
    return parts


def evaluate_window(
    scorer: Scorer,
    sequences: Sequences,
    split: Split,
    *,
    n_items: int,
    settings: EvaluateSettings,
    days: float,
    ages: Sequence[float] = (0,),
    positive: Positive | None = None,
    interest: np.ndarray | None = None,
    target_time: bool = False,
    answerable: Callable[[np.ndarray], np.ndarray] | None = None,
    baselines: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
    rng: np.random.Generator | None = None,
) -> WindowEvaluation:
    """Measure the scorer on the window after the split's moment, at every age, and the baselines at age 0.

    `positive` is as for `window_cases`, `interest` as for `find_targets`, `answerable` as for `evaluate`; `target_time`
    tells the scorer the moment that its history ends at. `rng` draws the resamples of the intervals; without it they
    are the same every time.
    """
    ages = _ages(ages)
    trained_until, moment, until = _window(split, days)
    cases = _cases(sequences, moment, until, days, ages, positive)
    ks, (rule, repeats) = sorted(set(settings.at)), seen_rule(settings, sequences, split)
    counts = training_counts(sequences, split, n_items)
    known = counts > 0 if answerable is None else answerable(counts)
    evaluator = Evaluator(sequences=sequences, counts=counts, seen=rule, target_time=target_time, answerable=known)
    rng = np.random.default_rng(0) if rng is None else rng
    spread = partial(_spread, users=cases.users, samples=settings.bootstrap, rng=rng)

    def ask(by: Evaluator, name: str, who: Scorer, at: int) -> Found:
        told = None if progress is None else partial(progress, name)
        return find_targets(by, who, cases, ks, moment=at, interest=interest, progress=told)

    reading = replace(evaluator, readable=known)
    aged = {age: ask(reading, "model", scorer, moment - round(age * DAY)) for age in ages}
    values = {age: user_values(cases, found, ks) for age, found in aged.items()}
    others = (
        _baselines(partial(ask, evaluator, at=moment), cases, ks, spread, sequences, split, n_items)
        if baselines
        else []
    )
    unknown = ~known[cases.targets]
    report = WindowReport(
        moment=moment_text(moment),
        days=days,
        trained_before=moment_text(trained_until),
        users=len(cases),
        targets=len(cases.targets),
        items=n_items,
        seen=rule,
        repeats=repeats,
        unreachable=int(((aged[0].ranks == MISS) & ~unknown).sum()),
        unknown=int(unknown.sum()),
        metrics=_metrics(values[0], aged[0], ks),
        intervals=spread(values[0]),
        by_target=by_target(cases, aged[0], counts, ks),
        baselines={one.name: one.metrics for one in others},
        baseline_intervals={one.name: one.intervals for one in others},
        baseline_notes={one.name: one.note for one in others},
        ages=[
            Age(
                days=age,
                history_before=moment_text(moment - round(age * DAY)),
                metrics=_metrics(values[age], aged[age], ks),
                intervals=spread(values[age]),
                fall=_falls(values[age], values[0], users=cases.users, samples=settings.bootstrap, rng=rng),
            )
            for age in ages
        ],
    )
    return WindowEvaluation(report=report, users=cases.users, values=values)


@dataclass(frozen=True, slots=True)
class _Baseline:
    """What the report says of one."""

    name: str
    metrics: dict[str, float]
    intervals: Intervals
    note: str


def _baselines(
    ask: Callable[[str, Scorer], Found],
    cases: WindowCases,
    ks: Sequence[int],
    spread: Callable[[dict[str, np.ndarray]], Intervals],
    sequences: Sequences,
    split: Split,
    n_items: int,
) -> list[_Baseline]:
    """Every baseline, asked as the model is."""
    measured = []
    for name, fit in BASELINES.items():
        baseline = fit(sequences, split, n_items)
        found = ask(name, baseline)
        values = user_values(cases, found, ks)
        measured.append(_Baseline(name, _metrics(values, found, ks), spread(values), baseline.note))
    return measured


def _ages(ages: Sequence[float]) -> list[float]:
    """In order, and 0 among them: what every other age is compared with."""
    for age in ages:
        if not 0 <= age <= MOST_DAYS:
            raise SettingsError(f"--ages takes numbers of days from 0 to {MOST_DAYS}, got {age:g}.")
    return sorted({0, *ages})


def _window(split: Split, days: float) -> tuple[int, int, int]:
    """(before when all training is, the moment, the window's end)."""
    if not 0 < days <= MOST_DAYS:
        raise SettingsError(f"--days takes a number of days above 0 and at most {MOST_DAYS}, got {days:g}.")
    assert split.moments is not None, "the caller refuses --split last, where there is no moment"
    valid_from, test_from = split.moments
    return valid_from, test_from, test_from + round(days * DAY)


def _cases(
    sequences: Sequences, moment: int, until: int, days: float, ages: Sequence[float], positive: Positive | None
) -> WindowCases:
    oldest = moment - round(max(ages) * DAY)
    return _some(window_cases(sequences, moment=moment, until=until, oldest=oldest, positive=positive), oldest, days)


def _some(cases: WindowCases, oldest: int, days: float) -> WindowCases:
    if not len(cases):
        raise InputError(
            f"Nobody with an event before {moment_text(oldest)} has a positive one in the {days:g} days after "
            f"{moment_text(cases.moment)}, so there is nothing to measure: give more days, or smaller --ages."
        )
    return cases


def validation_window(sequences: Sequences, split: Split, days: float, positive: Positive | None = None) -> WindowCases:
    """The cases that choose an epoch: the first days of validation, and never a moment of the test."""
    valid_from, test_from, _ = _window(split, days)
    until = min(valid_from + round(days * DAY), test_from - 1)
    return _some(window_cases(sequences, moment=valid_from, until=until, positive=positive), valid_from, days)


def _metrics(values: dict[str, np.ndarray], found: Found, ks: Sequence[int]) -> dict[str, float]:
    figures = {name: float(column.mean()) for name, column in values.items()}
    figures |= {f"coverage@{k}": coverage(found.shown[k]) for k in ks}
    return figures | {f"p90_coverage@{k}": p90_coverage(found.shown[k]) for k in ks}


def _spread(values: dict[str, np.ndarray], *, users: np.ndarray, samples: int, rng: np.random.Generator) -> Intervals:
    return intervals(added_up(values, users), samples=samples, rng=rng)


def _falls(
    values: dict[str, np.ndarray],
    fresh: dict[str, np.ndarray],
    *,
    users: np.ndarray,
    samples: int,
    rng: np.random.Generator,
) -> dict[str, Loss]:
    """How much of a fresh embedding's recall one of this age lacks."""
    ours, theirs = (
        added_up({name: column for name, column in side.items() if name.startswith("recall@")}, users)
        for side in (values, fresh)
    )
    return relative_losses(ours, theirs, samples=samples, rng=rng)
