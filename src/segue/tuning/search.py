"""The search: settings are proposed, trained and scored, one trial at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState

from segue.config.settings import Settings, settings_toml
from segue.data.dataset import Data
from segue.errors import FolderError, SettingsError, TrainingError
from segue.evaluation.settings import SeenRule, seen_rule
from segue.evaluation.split_log import SplitLog
from segue.folders import explained_writing
from segue.kinds import kind_of
from segue.models.items.tables import DataFacts
from segue.training.item_codes import CODES, ensure_item_codes
from segue.training.loop import SCORE, TrainingProgress
from segue.training.state import read_training_record
from segue.training.train import STATE, TrainingSetup, choose_epoch
from segue.tuning.report import FINAL, UNFINISHED, TrialRecord, Tuning
from segue.tuning.space import LOSS, Values, laid_over, own_values, rounded
from segue.tuning.study import OUTCOME, TRIAL, Search, begin, open_study, outcome_of, resume_search

DEFAULT_TRIALS = 20
RANDOM_TRIALS = 8  # trials before proposals depend on earlier scores
SETTINGS = "settings.toml"


class _OutOfTime(Exception):  # noqa: N818  # not an error: the user set the limit
    """The minutes are over."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """When the search ends."""

    trials: int | None
    deadline: float | None

    @staticmethod
    def of(trials: int | None, minutes: float | None) -> Bounds:
        deadline = None if minutes is None else monotonic() + 60 * minutes
        return Bounds(DEFAULT_TRIALS if trials is None and minutes is None else trials, deadline)

    def out_of_time(self) -> bool:
        return self.deadline is not None and monotonic() >= self.deadline

    def allow_another(self, counted: int) -> bool:
        return (self.trials is None or counted < self.trials) and not self.out_of_time()


def search(
    data: Data,
    *,
    out: Path,
    recipe: str | Path | None,
    trials: int | None,
    minutes: float | None,
    resume: bool,
    progress: Callable[[int, TrainingProgress], None] | None,
    ended: Callable[[TrialRecord, Tuning], None] | None,
) -> Tuning:
    """See `segue.tuning.tune`."""
    bounds = Bounds.of(trials, minutes)
    data.verify()
    job = resume_search(out, data, recipe) if resume else begin(out, data, recipe)
    with open_study(out) as study:
        tuning = job.tuning(study)
        if bounds.trials is not None and len(tuning.counted) >= bounds.trials:
            raise SettingsError(
                f"{out} has {len(tuning.counted)} trials already; raise --trials to continue, or give --minutes alone."
            )
        for killed in study.get_trials(states=(TrialState.RUNNING,)):
            study.tell(killed.number, state=TrialState.FAIL)
        seen, _ = seen_rule(job.settings.evaluate, data.sequences, data.split)
        trainer = _Trainer(job, data, bounds, seen, progress)
        while bounds.allow_another(len(tuning.counted)):
            try:
                trainer.run(study)
            finally:
                tuning = job.tuning(study)
                job.write(tuning)
            if ended:
                ended(tuning.trials[-1], tuning)
    if tuning.best is None:
        raise TrainingError(
            f"No trial in {out} finished an epoch, so there is nothing to choose from; continue with --resume and more "
            "--minutes or --trials, or begin with another --recipe."
        )
    return tuning


@dataclass(frozen=True, slots=True, eq=False)
class _Trainer:
    """Trains the proposed settings like `segue train`."""

    job: Search
    data: Data
    bounds: Bounds
    seen: SeenRule
    progress: Callable[[int, TrainingProgress], None] | None

    def run(self, study: optuna.Study) -> None:
        """Run one trial and record it. An unfinished trial keeps its training state for the next call."""
        trial = _next_trial(study, self.job)
        try:
            score = self._train(trial, _proposed(trial, self.job))
        except optuna.TrialPruned:
            study.tell(trial, state=TrialState.PRUNED)
        except TrainingError:  # the loss is not finite, or the model does not fit into memory: a result, too
            trial.set_user_attr(OUTCOME, "failed")
            study.tell(trial, state=TrialState.FAIL)
        except _OutOfTime:
            trial.set_user_attr(OUTCOME, "out of time")
            study.tell(trial, state=TrialState.FAIL)
            return
        except BaseException:
            study.tell(trial, state=TrialState.FAIL)
            raise
        else:
            study.tell(trial, score)
        shutil.rmtree(self.job.folder / TRIAL)

    def _train(self, trial: optuna.Trial, settings: Settings) -> float:
        folder = self.job.folder / TRIAL
        for line in _epochs_before(folder, settings):
            trial.report(line[SCORE], int(line["epoch"]))

        def watch(step: TrainingProgress) -> None:
            if step.scores is not None:
                trial.report(step.scores[SCORE], step.epoch)
            if self.progress:
                self.progress(trial.number + 1, step)
            if _is_last(step, settings):
                return
            if step.scores is not None and trial.should_prune():
                raise optuna.TrialPruned
            if self.bounds.out_of_time():
                raise _OutOfTime

        try:
            codes, data = self._codes(settings, watch), self.data
            setup = TrainingSetup(
                model=settings.model,
                objective=settings.objective,
                train=settings.train,
                evaluate=settings.evaluate,
                facts=settings.model.items.facts(data.vocabulary, DataFacts(kinds=tuple(data.kinds), codes=codes)),
                progress=watch,
            )
            _, chosen = choose_epoch(setup, SplitLog.of(data), seen=self.seen, folder=folder)
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            raise TrainingError("There was not enough memory for these settings.") from error
        return chosen.best_score

    def _codes(self, settings: Settings, watch: Callable[[TrainingProgress], None]) -> np.ndarray | None:
        """The item codes, which are the same in every trial; None if the settings have none."""
        data, path = self.data, self.job.folder / CODES
        ends, n_items = data.split.train_end, len(data.vocabulary)
        items = settings.model.items
        return ensure_item_codes(path, items, settings.train, data.sequences, ends, n_items, progress=watch)


def _next_trial(study: optuna.Study, job: Search) -> optuna.Trial:
    """The next trial: the recipe itself, then unfinished trials, then those that Optuna proposes.

    The sampler is seeded by the number of finished trials, so an interruption does not change what it proposes.
    """
    trials = study.get_trials(deepcopy=False)
    finished = [trial.params for trial in trials if outcome_of(trial) in FINAL]
    pending = [own_values(job.settings, job.space)]
    pending += [trial.params for trial in trials if outcome_of(trial) in UNFINISHED]
    seed = (job.settings.train.seed + len(finished)) % 2**32
    study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=RANDOM_TRIALS)
    first = next((values for values in pending if not any(values.items() <= other.items() for other in finished)), None)
    if first is not None and not any(trial.state == TrialState.WAITING for trial in trials):
        study.enqueue_trial(first)
    return study.ask()


def _proposed(trial: optuna.Trial, job: Search) -> Settings:
    """The settings of a trial: a value for each setting that its loss has."""
    values: Values = {}
    for name, knob in job.space.items():
        if knob.losses and values.get(LOSS, kind_of(job.settings.objective.loss)) not in knob.losses:
            continue
        if knob.choices:
            values[name] = trial.suggest_categorical(name, knob.choices)
        else:
            values[name] = trial.suggest_float(name, knob.low, knob.high, log=knob.log)
    return laid_over(job.settings, rounded(values, own_values(job.settings, job.space)))


def _epochs_before(folder: Path, settings: Settings) -> list[dict[str, Any]]:
    """The epochs of an interrupted trial with the same settings; otherwise the folder is emptied."""
    text = settings_toml(settings)
    try:
        if (folder / SETTINGS).read_text(encoding="utf-8") == text:
            return list(read_training_record(folder / STATE).history)
    except (OSError, FolderError):
        pass
    with explained_writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / SETTINGS).write_text(text, encoding="utf-8")
    return []


def _out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; on a CPU torch has no exception type for it."""
    return isinstance(error, MemoryError) or "not enough memory" in str(error) or "can't allocate memory" in str(error)


def _is_last(step: TrainingProgress, settings: Settings) -> bool:
    """Whether training ends with this step, so that there is nothing to prune."""
    waited = step.epoch - step.best_epoch
    return step.scores is not None and (step.epoch == step.epochs or waited >= settings.train.patience)
