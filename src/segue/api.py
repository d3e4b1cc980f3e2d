"""The public functions. They take and return ids, never item numbers.

Importing this module is fast: torch is imported by the functions that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import msgspec

from segue.data.dataset import Data as Data
from segue.data.prepare import prepare as prepare
from segue.data.settings import EngineName, on_spark
from segue.errors import InputError, SettingsError

if TYPE_CHECKING:
    from segue.config.describe import KeyDescription
    from segue.config.settings import About
    from segue.evaluation.compare import Comparison
    from segue.evaluation.report import Report as Report
    from segue.evaluation.report import WindowReport
    from segue.export import Export
    from segue.models.build import Builder
    from segue.recommend.jobs.batch import BatchReport
    from segue.recommend.jobs.embed import EmbedReport
    from segue.recommend.jobs.runner import JobRunner
    from segue.recommend.new_items import ItemsAdded
    from segue.recommend.recommender import Recommender as Recommender
    from segue.recommend.rules import Filters
    from segue.training.loop import TrainingProgress

StageProgress = Callable[[str, int, int], None]
"""Called with the name of a scorer or stage, how much is done, and of how much."""

LAZY = {"Recommender": "segue.recommend.recommender", "Report": "segue.evaluation.report"}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module 'segue.api' has no attribute {name!r}")


def train(
    data: Data | Path | str,
    *,
    out: Path | str | None = None,
    recipe: str | Path | None = None,
    overrides: Sequence[str] = (),
    encoder: Builder | None = None,
    from_run: Recommender | Path | str | None = None,
    resume: bool = False,
    all_events: bool = False,
    processes: int = 1,
    progress: Callable[[TrainingProgress], None] | None = None,
) -> Recommender:
    """Train a model, measure it and return a Recommender.

    out: the run folder to write. Without it, the run folder is temporary.
    recipe: a name of `segue recipes` or a TOML file. overrides: `section.key=value` that change the recipe.
    encoder: a builder of your own instead of the recipe's (docs/your-model.md). A run folder holds no code: `load`
        needs the builder again.
    from_run: a run to continue from, on a log that has grown. Its weights are transferred by item id. Its settings are
        used unless a recipe or overrides change how it is trained. To resume this training, it is not needed.
    resume: continue training that was interrupted, or a finished run that is given more epochs.
    all_events: when validation has chosen the number of epochs, train as many on every event, for serving.
    processes: processes of this machine that share every batch. If one dies, all resume from the last epoch. Each
        process imports the calling script, which therefore needs `if __name__ == "__main__":`. Under `torchrun`, where
        every process calls this function, leave it out.
    progress: called with each step of training and of the evaluation after it; with several processes, from another
        thread.
    """
    from segue.runs.make import make_run
    from segue.runs.processes import make_run_on_processes
    from segue.runs.request import TrainingRequest, run_folder

    if processes < 1:
        raise SettingsError(f"processes must be at least 1, got {processes}.")
    request = TrainingRequest(
        data=data.folder if isinstance(data, Data) else Path(data),
        out=None if out is None else Path(out),
        recipe=recipe,
        overrides=tuple(overrides),
        encoder=encoder,
        from_run=None if from_run is None else run_folder(from_run),
        resume=resume,
        all_events=all_events,
    )
    if processes > 1:
        return make_run_on_processes(processes, request, progress=progress)
    return make_run(request, progress=progress)


def can_finish(out: Path | str) -> bool:
    """Whether an interrupted training has an epoch that no run has, so that `finish` can write a run. One whose model
    was trained on every event is never replaced."""
    from segue.folders import MANIFEST, read_manifest
    from segue.runs.plan import finished_epochs

    run = Path(out)
    finished = finished_epochs(run)
    if not (run / MANIFEST).exists():
        return finished > 0
    before = read_manifest(run, "run")
    return not before["all"] and finished > before["training"]["epochs"]


def finish(
    data: Data | Path | str,
    *,
    out: Path | str,
    encoder: Builder | None = None,
    progress: Callable[[TrainingProgress], None] | None = None,
) -> Recommender:
    """Write the run of an interrupted training, of the best of its finished epochs. `train` with resume=True then
    continues it. The model is that of the training part, also if `train` was called with all_events=True.

    encoder: as for `train`.
    """
    from segue.runs.make import make_run
    from segue.runs.request import TrainingRequest

    folder = data.folder if isinstance(data, Data) else Path(data)
    return make_run(TrainingRequest(folder, Path(out), encoder=encoder, resume=True, finish=True), progress=progress)


def load(folder: Path | str, *, encoder: Builder | None = None) -> Recommender | Data:
    """Open what `train` or `prepare` wrote: a run folder as a Recommender, a data folder as Data.

    encoder: the builder that the run was trained with, if it is not one of segue's own.
    """
    from segue.folders import kind_of

    if kind_of(Path(folder)) == "run":
        return _open_run(folder, encoder)
    if encoder is not None:
        raise SettingsError(f"{folder} is a data folder, which has no encoder: leave encoder= out.")
    return Data.open(Path(folder))


@overload
def evaluate(
    run: Recommender | Path | str,
    *,
    data: Data | Path | str | None = None,
    at: Sequence[int] | None = None,
    days: None = None,
    encoder: Builder | None = None,
    progress: StageProgress | None = None,
) -> Report: ...


@overload
def evaluate(
    run: Recommender | Path | str,
    *,
    data: Data | Path | str | None = None,
    at: Sequence[int] | None = None,
    days: float,
    ages: Sequence[float] | None = None,
    interest: str | None = None,
    encoder: Builder | None = None,
    progress: StageProgress | None = None,
) -> WindowReport: ...


def evaluate(
    run: Recommender | Path | str,
    *,
    data: Data | Path | str | None = None,
    at: Sequence[int] | None = None,
    days: float | None = None,
    ages: Sequence[float] | None = None,
    interest: str | None = None,
    encoder: Builder | None = None,
    progress: StageProgress | None = None,
) -> Report | WindowReport:
    """Measure a run and the baselines on the test part of the data it was trained on.

    data: the run's data folder, if it has moved. at: depths of the recommendation list.
    days: measure by window instead, on data prepared with `--split time:WHEN`: the share of each user's items in the
        days after WHEN that the recommendations hold.
    ages: with days, also measure histories that end so many days before WHEN: how fast an embedding ages.
    interest: with days, a column of the catalogue, such as a category, whose variety in each list is measured; by
        default the run's `evaluate.interest`.
    encoder: as for `load`, if `run` is a folder.

    A run trained with `all_events` was trained on the test part: its report is that of the model that chose its epochs.
    """
    from segue.evaluation.settings import EvaluateSettings
    from segue.kinds import decode
    from segue.runs.measure import measure, measure_window
    from segue.runs.read import data_of, read_report, refuse_added, settings_of

    for name, value in (("--ages", ages), ("--interest", interest)):
        if value is not None and days is None:
            raise InputError(f"{name} needs --days, the number of days after the split time to measure.")
    recommender = _open_run(run, encoder)
    refuse_added(recommender.manifest, recommender.folder, "measured", "measure")
    settings, trained_on_all = settings_of(recommender), recommender.manifest["all"]
    changes = {name: value for name, value in (("at", at and tuple(at)), ("interest", interest)) if value is not None}
    evaluate = decode(msgspec.to_builtins(settings.evaluate) | changes, EvaluateSettings, path="evaluate")
    settings = msgspec.structs.replace(settings, evaluate=evaluate)
    if trained_on_all and days is not None:
        raise SettingsError(
            f"{recommender.folder} was trained on every event, including those of the window: evaluate by window a run "
            "trained without --all."
        )
    if trained_on_all:
        report = read_report(recommender)
        if at is not None and sorted(set(at)) != report.depths:
            raise SettingsError(
                f"{recommender.folder} was trained on every event, so it cannot be tested again; its report has the "
                f"depths {', '.join(map(str, report.depths))}. Leave --at out."
            )
        return report
    log = data_of(recommender, data)
    log.verify()
    if days is None:
        return measure(recommender.model, log, settings, counts=recommender.item_counts, progress=progress).report
    counts = recommender.item_counts
    return measure_window(
        recommender.model, log, settings, counts=counts, days=days, ages=ages or (0,), progress=progress
    ).report


def compare(runs: Sequence[Path | str]) -> Comparison:
    """Compare runs, with paired confidence intervals of their differences to the first."""
    from segue.evaluation.compare import compare as compare_measured
    from segue.runs.read import case_users, read_measured

    measured = [read_measured(Path(run)) for run in runs]
    return compare_measured(measured, users=case_users(Path(runs[0]), measured[0].report))


def export(run: Recommender | Path | str, *, onnx: Path | str, progress: StageProgress | None = None) -> Export:
    """Write a run as one ONNX file, from which `segue.slim` recommends without torch. Its scores are compared with
    torch's before the file appears.

    progress: called with the name of each stage, how many are done and of how many.
    """
    from segue.export import export_onnx

    return export_onnx(_open_run(run), Path(onnx), progress=progress)


def add_items(
    run: Recommender | Path | str,
    items: Any,
    *,
    out: Path | str,
    item: str | None = None,
    encoder: Builder | None = None,
) -> ItemsAdded:
    """Write a copy of a run with items that are unseen in training, represented by their content. In Python,
    `Recommender.with_items` does so without a folder.

    items: a catalogue, as `prepare` takes it. An item that was added before gets the new content; one that the run was
        trained with is refused.
    item: the catalogue's id column, if it has none of the usual names.
    encoder: as for `load`, if `run` is a folder.
    """
    from segue.data.read.catalogue import read_items
    from segue.recommend.new_items import ItemsAdded

    before = _open_run(run, encoder)
    table, duplicates = read_items(items, item=item)
    after = before.with_items(table)
    after.save(out)
    added = len(after.vocabulary) - len(before.vocabulary)
    return ItemsAdded(
        run=str(out),
        added=added,
        changed=table.height - added,
        duplicates=duplicates,
        items=len(after.vocabulary),
        ignored=[name for name in table.columns if name not in after.vocabulary.table.columns],
    )


def recipes() -> dict[str, About]:
    """The shipped recipes and the description of each."""
    from segue.config.recipes import read_recipe, recipe_names
    from segue.config.settings import make_settings

    return {name: make_settings(read_recipe(name)).about for name in recipe_names()}


def settings(part: str | None = None) -> list[KeyDescription]:
    """Every key of the settings, of a section or below a key (model.items), with its kinds, type, default, meaning."""
    from segue.config.describe import describe

    return describe(part)


def history_of(recommender: Recommender, user: str, *, data: Data | Path | str | None = None) -> list[Any]:
    """A user's history in the log, as `Recommender.recommend` takes it."""
    from segue.recommend.jobs.batch import user_history

    return list(user_history(_log_of(recommender, data), user))


def recommend_users(
    recommender: Recommender,
    users: Path,
    *,
    out: Path,
    data: Data | Path | str | None = None,
    engine: EngineName = "local",
    spark_remote: str | None = None,
    k: int = 10,
    progress: Callable[[int], None] | None = None,
    **filters: Unpack[Filters],
) -> BatchReport:
    """Write recommendations for a file of users, from their histories in the log, as a Parquet data set.

    engine, spark_remote: as for `embed`. k, filters (exclude, only, keep_seen): as for `Recommender.recommend`.
    """
    from segue.recommend.jobs.batch import recommend_users as recommend_to

    log = _log_of(recommender, data)
    runner = _runner(engine, spark_remote, recommender, log)
    return recommend_to(recommender, log, users, out, k=k, progress=progress, runner=runner, **filters)


def embed(
    run: Recommender | Path | str,
    data: Data | Path | str,
    *,
    out: Path | str,
    since: Path | str | None = None,
    items: bool = False,
    encoder: Builder | None = None,
    engine: EngineName = "local",
    spark_remote: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EmbedReport:
    """Write the embedding of every user of a log as a Parquet data set in `out`. After a kill, the same call resumes.
    Embeddings are of the model alone: item-to-item counts have no part in their inner products.

    since: the folder of an earlier call with the same run: only users with events since then are embedded.
    items: write the item embeddings too.
    encoder: as for `load`, if `run` is a folder.
    engine: `local`, this process on all cores; or `spark`, the executors of a cluster, which must all see the run and
        the data at the same paths and have segue installed. Only this process writes, and the rows are the same.
    spark_remote: the address of a Spark Connect server (sc://host:port). By default the session of this process, else
        the one that SPARK_REMOTE or spark-submit names, else a local session.
    progress: called with the number of users done, and of how many.
    """
    from segue.recommend.jobs.embed import embed_users

    if encoder is not None and engine == "spark":
        raise SettingsError(
            "engine='spark' cannot use encoder=, which Spark's executors do not have; leave engine= out."
        )
    recommender = _open_run(run, encoder)
    log = data if isinstance(data, Data) else Data.open(data)
    runner = _runner(engine, spark_remote, recommender, log)
    return embed_users(recommender, log, out, since=since, items=items, progress=progress, runner=runner)


def _open_run(run: Recommender | Path | str, encoder: Builder | None = None) -> Recommender:
    from segue.recommend.recommender import Recommender

    return run if isinstance(run, Recommender) else Recommender.open(run, encoder=encoder)


def _runner(engine: EngineName, remote: str | None, recommender: Recommender, data: Data) -> JobRunner | None:
    """The Spark executors that share the work, None for this process alone."""
    if not on_spark(engine, remote):
        return None
    from segue.recommend.jobs.spark import SparkRunner

    return SparkRunner(recommender, data, remote=remote)


def _log_of(recommender: Recommender, data: Data | Path | str | None) -> Data:
    """The log of the histories: `data`, which may be newer than the run, or the one that the run was trained on."""
    from segue.runs.read import data_of

    if data is None:
        return data_of(recommender, None)
    return data if isinstance(data, Data) else Data.open(data)
