"""A model and the baselines, measured on a data folder: on the test part, or over the days after the split."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from segue.config.settings import Settings
from segue.counts.counts import Counts
from segue.data.dataset import Data
from segue.errors import InputError
from segue.evaluation.counted import CountedScorer
from segue.evaluation.evaluate import Evaluation, evaluate
from segue.evaluation.evaluator import ModelScorer, Scorer
from segue.evaluation.split_log import SplitLog
from segue.evaluation.window.evaluate import TargetWindow, WindowEvaluation, evaluate_window
from segue.models.sequence import SequenceModel
from segue.objective.tasks.positive import PositiveEvents
from segue.process_group import SINGLE_PROCESS, ProcessGroup
from segue.training.train import validation_cases


def measure(
    model: SequenceModel,
    data: Data,
    settings: Settings,
    *,
    counts: Counts | None = None,
    note: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    group: ProcessGroup = SINGLE_PROCESS,
) -> Evaluation:
    """Measure the model and the baselines on the test part."""
    return evaluate(
        _scorer(model, counts),
        SplitLog.of(data),
        settings=settings.evaluate,
        answerable=model.answerable,
        target_time=model.target_time,
        note=note,
        progress=progress,
        group=group,
    )


def _scorer(model: SequenceModel, counts: Counts | None) -> Scorer:
    return ModelScorer(model) if counts is None else CountedScorer(ModelScorer(model), counts)


def measure_window(
    model: SequenceModel,
    data: Data,
    settings: Settings,
    *,
    counts: Counts | None = None,
    days: float,
    ages: Sequence[float],
    baselines: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> WindowEvaluation:
    """Measure the model and the baselines over the days after the split time."""
    _refuse_windowless(data)
    return evaluate_window(
        _scorer(model, counts),
        SplitLog.of(data),
        TargetWindow(
            days,
            ages,
            PositiveEvents(settings.objective.positive, data.kinds),
            data.vocabulary.categories(settings.evaluate.interest),
        ),
        settings=settings.evaluate,
        target_time=model.target_time,
        answerable=model.answerable,
        baselines=baselines,
        progress=progress,
    )


def refuse_unmeasurable(settings: Settings, data: Data) -> None:
    """Refuse, before training, settings and data that evaluation would refuse after it."""
    if settings.evaluate.days:
        _refuse_windowless(data)
    else:
        validation_cases(data.split, settings.evaluate)
    data.vocabulary.categories(settings.evaluate.interest)  # refuses a column that the catalogue does not have


def _refuse_windowless(data: Data) -> None:
    """Refuse data without one split time for all users, or without dates."""
    if data.manifest["split"]["kind"] == "last":
        raise InputError(
            f"Evaluation by window needs one split time for all users, and {data.folder} was prepared with "
            "--split last: prepare the log with --split time:WHEN and train on that."
        )
    if not data.manifest["has_time"]:
        raise InputError(
            f"Evaluation by window counts days, and the times of {data.folder} are an order, not dates: prepare a log "
            "with dates."
        )
