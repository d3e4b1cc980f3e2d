"""Training from a data folder to a run folder: taken up where it stopped, complete or not there at all.

Unfinished training lives in RUN.partial: the settings, what data it belongs to, and the state after each epoch.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import torch

from segue import folders
from segue.config import (
    DEFAULT_RECIPE,
    Settings,
    make_settings,
    parse_toml,
    read_recipe,
    refuse_another_model,
    refuse_changes,
    settings_toml,
)
from segue.data.dataset import Data
from segue.errors import FolderError, InputError, SettingsError
from segue.evaluation.evaluate import Evaluation, evaluate
from segue.evaluation.evaluator import Evaluator, ModelScorer
from segue.evaluation.settings import SeenRule, seen_rule
from segue.evaluation.training_counts import counts_before, training_counts
from segue.evaluation.window.evaluate import WindowEvaluation, evaluate_window
from segue.index.build import build_index, index_facts, sample_questions
from segue.models.build import Builder, builder_name, refuse_other_builder
from segue.models.checkpoint import save_model, saved_texts
from segue.models.facts import facts_of, refuse_silence
from segue.models.items.code_assignment import shared_codes
from segue.models.items.coded import CodeTable
from segue.models.items.content import ContentTable
from segue.models.sequence import SequenceModel
from segue.models.text.encoder import TextEncoder
from segue.objective.tasks.positive import PositiveEvents
from segue.process_group import SINGLE_PROCESS, ProcessGroup
from segue.recommend.jobs.embed import run_digest
from segue.recommend.recommender import Recommender
from segue.training.distributed.processes import DeathsError, joined, launchers, on_processes
from segue.training.item_codes import CODES, CODES_ALL, kept_codes
from segue.training.loop import TrainingProgress
from segue.training.run import CHOOSING, EVERYTHING, TrainingSetup, choose_epoch, finished, train_for
from segue.training.state import TrainingRecord, read_record
from segue.training.warm_start import START, START_ALL, TRAINED, fill_codes, write_start

SETTINGS, BELONGING = "settings.toml", "data.json"
SHARED_WITHIN = 30.0  # seconds in which a file that one machine has written is seen by the others
KEPT = (CHOOSING, START, START_ALL, CODES, CODES_ALL)
"""Of RUN.partial, what the run keeps, so that it can be taken up again."""
ALL_NOTE = (
    "The model served was trained on every event; this report is that of the run that chose its {epochs} epochs, "
    "which never saw the test part."
)


def make_run(
    data: Data,
    *,
    out: Path | None,
    recipe: str | Path | None,
    overrides: Sequence[str],
    encoder: Builder | None,
    from_run: Recommender | None,
    resume: bool,
    all_events: bool,
    progress: Callable[[TrainingProgress], None] | None,
    measured: Callable[[str, int, int], None] | None,
) -> Recommender:
    """See `segue.api.train`. Where torch's launcher started this process as one of several, the others have to call it
    too: they share the work, and the first of them writes and tells how it is getting on."""
    with joined() as group:
        if group.rank > 0:
            progress = measured = None
        group.on_first(data.verify)
        run = group.on_first(lambda: out if out is not None else _temporary_run())
        launched_by = launchers(group)
        job = group.on_first(
            lambda: _job(run, data, recipe, overrides, encoder, from_run, resume, launched_by, everything=all_events)
        )
        if job is not None:
            _refuse_separate_folders(job.partial, group)
            _do(replace(job, encoder=encoder), run, data, group, progress=progress, measured=measured)
        made = Recommender.open(run, encoder=encoder)
        group.all_gather_objects(
            None
        )  # a temporary run is gone with the first process: nobody leaves before all have opened it
    return made


def _job(
    run: Path,
    data: Data,
    recipe: str | Path | None,
    overrides: Sequence[str],
    encoder: Builder | None,
    from_run: Recommender | None,
    resume: bool,  # noqa: FBT001
    launched_by: frozenset[str],
    *,
    everything: bool,
) -> _Job | None:
    """What is to be done, without the encoder, which others may have to be told without. None: a process died when all
    was done."""
    if resume and from_run is not None:
        raise SettingsError("--resume goes on with what is begun, and knows where it came from: leave --from out.")
    partial = folders.partial_of(run)
    if launched_by and partial.exists():
        resume = resume or not launched_by.isdisjoint(_belonging(partial, finished_run=False).launchers)
    elif launched_by and (run / folders.MANIFEST).exists():
        made_by = folders.read_manifest(run, "run")["training"].get("launchers", ())
        if not launched_by.isdisjoint(made_by):
            return None
    job = (
        _taken_up(run, data, recipe, overrides, encoder, launched_by, everything=everything)
        if resume
        else _begun(run, data, recipe, overrides, encoder, from_run, launched_by, everything=everything)
    )
    return replace(job, encoder=None)


def _refuse_separate_folders(partial: Path, group: ProcessGroup) -> None:
    """Machines that train one model have to see its files."""
    terms, limit = group.on_first((partial / BELONGING).read_bytes), time.monotonic() + SHARED_WITHIN
    while not (seen := _holds(partial / BELONGING, terms)) and time.monotonic() < limit:
        time.sleep(0.1)
    blind = group.all_gather_objects(seen).count(False)
    if blind:
        raise FolderError(
            f"{blind} of the {group.size} processes do not see {partial}: machines that train together must share the "
            f"folder of --out, under the same path. Remove {partial} before you try again."
        )


def _do(
    job: _Job,
    run: Path,
    data: Data,
    group: ProcessGroup,
    *,
    progress: Callable[[TrainingProgress], None] | None,
    measured: Callable[[str, int, int], None] | None,
) -> None:
    """Train, measure, write."""
    sequences, split, n_items = data.sequences, data.split, len(data.vocabulary)
    counts = training_counts(sequences, split, n_items)
    seen, _ = seen_rule(job.settings.evaluate, sequences, split)
    start = group.on_first(lambda: job.start(START))
    texts = saved_texts(start, job.settings.model) if start is not None and job.settings.model.texts else None
    codes = group.on_first(lambda: job.codes(CODES, data, split.train_end, progress))
    facts = facts_of(job.settings.model, data.vocabulary, data.kinds, texts, codes)
    model, chosen = choose_epoch(
        job.recipe,
        sequences,
        split,
        counts,
        seen=seen,
        folder=job.partial,
        progress=progress,
        facts=facts,
        start=start,
        group=group,
    )
    note = ALL_NOTE.format(epochs=chosen.best_epoch) if job.everything else None
    evaluation = measure(model, data, job.settings, note=note, progress=measured, group=group)
    if job.everything:
        ends = np.asarray(sequences.offsets)[1:]
        if codes is not None:
            facts = replace(facts, codes=group.on_first(lambda: job.all_codes(data, counts, progress)))
        model, counts = train_for(
            job.recipe,
            sequences,
            ends,
            n_items,
            epochs=chosen.best_epoch,
            state_file=job.partial / EVERYTHING,
            progress=progress,
            facts=facts,
            start=group.on_first(lambda: job.start(START_ALL)) or start,
            group=group,
        )

    def write() -> None:
        _write_run(run, job, data, model, counts, evaluation, chosen, seen=seen, group=group)
        shutil.rmtree(job.partial)

    group.on_first(write)


def _holds(path: Path, content: bytes) -> bool:
    return path.exists() and path.read_bytes() == content


@dataclass(frozen=True, slots=True)
class Call:
    """What `make_run` is called with in each of several processes, which open the folders for themselves."""

    data: Path
    out: Path | None
    recipe: str | Path | None
    overrides: tuple[str, ...]
    encoder: Builder | None
    from_run: Path | None
    resume: bool
    all_events: bool


def make_run_on(
    processes: int,
    call: Call,
    *,
    progress: Callable[[TrainingProgress], None] | None,
    measured: Callable[[str, int, int], None] | None,
) -> Recommender:
    """`make_run` on several processes of this machine."""
    if call.encoder is not None and "<" in builder_name(call.encoder):
        raise SettingsError(
            f"encoder is {builder_name(call.encoder)}, which other processes cannot import: with processes above 1 "
            "give a function that stands in a module by itself."
        )
    run = call.out if call.out is not None else _temporary_run()

    def heard(word: bytes) -> None:
        step, measuring = msgspec.msgpack.decode(word, type=_Word)
        if step is not None and progress is not None:
            progress(step)
        if measuring is not None and measured is not None:
            measured(*measuring)

    try:
        on_processes(processes, _as_one_of_several, replace(call, out=run), heard=heard)
    except DeathsError as error:
        if not folders.partial_of(run).exists():
            raise
        raise DeathsError(f"{error} What was learned before is kept: go on with --resume.") from error
    return Recommender.open(run, encoder=call.encoder)


_Word = tuple[TrainingProgress | None, tuple[str, int, int] | None]
"""How training, or measuring, is getting on."""


def _as_one_of_several(call: Call, tell: Callable[[bytes], None]) -> None:
    def say(step: TrainingProgress | None, measuring: tuple[str, int, int] | None) -> None:
        tell(msgspec.msgpack.encode((step, measuring)))

    make_run(
        Data.open(call.data),
        out=call.out,
        recipe=call.recipe,
        overrides=call.overrides,
        encoder=call.encoder,
        from_run=None if call.from_run is None else Recommender.open(call.from_run, encoder=call.encoder),
        resume=call.resume,
        all_events=call.all_events,
        progress=lambda step: say(step, None),
        measured=lambda name, done, total: say(None, (name, done, total)),
    )


def measure(
    model: SequenceModel,
    data: Data,
    settings: Settings,
    *,
    note: str | None,
    progress: Callable[[str, int, int], None] | None,
    group: ProcessGroup = SINGLE_PROCESS,
) -> Evaluation:
    """The model and the baselines on the test part."""
    return evaluate(
        ModelScorer(model),
        data.sequences,
        data.split,
        n_items=len(data.vocabulary),
        settings=settings.evaluate,
        answerable=model.answerable,
        split_kind=data.manifest["split"]["kind"],
        target_time=model.target_time,
        note=note,
        progress=progress,
        group=group,
    )


def measure_window(
    model: SequenceModel,
    data: Data,
    settings: Settings,
    *,
    days: float,
    ages: Sequence[float],
    baselines: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> WindowEvaluation:
    """The model and the baselines over the days after the moment of the split."""
    _refuse_windowless(data)
    return evaluate_window(
        ModelScorer(model),
        data.sequences,
        data.split,
        n_items=len(data.vocabulary),
        settings=settings.evaluate,
        days=days,
        ages=ages,
        positive=PositiveEvents(settings.objective.positive, data.kinds),
        interest=data.vocabulary.categories(settings.evaluate.interest),
        target_time=model.target_time,
        answerable=model.answerable,
        baselines=baselines,
        progress=progress,
    )


def evaluator_of(model: SequenceModel, data: Data, settings: Settings) -> Evaluator:
    """The rules that a model is measured by on its data."""
    seen, _ = seen_rule(settings.evaluate, data.sequences, data.split)
    counts = training_counts(data.sequences, data.split, len(data.vocabulary))
    known = model.answerable(counts)
    return Evaluator(
        sequences=data.sequences,
        counts=counts,
        seen=seen,
        target_time=model.target_time,
        answerable=known,
        readable=known,
    )


def _refuse_unmeasurable(settings: Settings, data: Data) -> None:
    """What evaluation by window would refuse, before anything is trained."""
    if settings.evaluate.days:
        _refuse_windowless(data)
    data.vocabulary.categories(settings.evaluate.interest)  # refuses a column that the catalogue has not


def _refuse_windowless(data: Data) -> None:
    """Days after a moment need a moment that is the same for everybody, and days."""
    if data.manifest["split"]["kind"] == "last":
        raise InputError(
            f"Evaluation by window needs a moment that everybody is cut at, and {data.folder} was prepared with "
            "--split last: prepare the log with --split time:WHEN and train on that."
        )
    if not data.manifest["has_time"]:
        raise InputError(
            f"Evaluation by window counts days, and the times of {data.folder} are an order, not dates: prepare a log "
            "with dates."
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """What is trained, and where its state lives."""

    settings: Settings
    recipe_name: str
    partial: Path
    encoder: Builder | None
    origin: Origin | None = None
    everything: bool = False
    """Once the epochs are chosen, it is trained on every event."""
    launched_by: frozenset[str] = frozenset()
    """Names of the launchers, where several processes do it: what they began goes on when one of these dies."""
    replaces: bool = False
    """A finished run is there and gives way to the new one."""

    @property
    def recipe(self) -> TrainingSetup:
        one = self.settings
        return TrainingSetup(
            model=one.model, objective=one.objective, train=one.train, evaluate=one.evaluate, encoder=self.encoder
        )

    def start(self, name: str) -> Path | None:
        """The file of weights to begin with, where there is one."""
        path = self.partial / name
        return path if path.exists() else None

    def codes(
        self, name: str, data: Data, ends: np.ndarray, progress: Callable[[TrainingProgress], None] | None
    ) -> np.ndarray | None:
        """The items', of the file with this name in RUN.partial."""
        model, train = self.settings.model, self.settings.train
        if self.origin is not None and model.codes == "learned":
            # What is known keeps its codes; for new items it is enough to be told which others are near them.
            model = msgspec.structs.replace(model, codes="clusters")
        path, n_items = self.partial / name, len(data.vocabulary)
        return kept_codes(path, model, train, data.sequences, ends, n_items, progress=progress)

    def all_codes(
        self, data: Data, counts: np.ndarray, progress: Callable[[TrainingProgress], None] | None
    ) -> np.ndarray | None:
        """Those by every event; `counts` [V + 1] are of the training part. What begins with the weights of another run
        begins with its codes."""
        ends, n_items = np.asarray(data.sequences.offsets)[1:], len(data.vocabulary)
        codes = self.codes(CODES_ALL, data, ends, progress)
        if codes is not None and self.start(START) is not None:
            everything = counts_before(data.sequences, ends, n_items)
            fill_codes(self.partial, codes, trained=counts > 0, told=everything > 0)
        return codes


def _begun(
    run: Path,
    data: Data,
    recipe: str | Path | None,
    overrides: Sequence[str],
    encoder: Builder | None,
    from_run: Recommender | None,
    launched_by: frozenset[str],
    *,
    everything: bool,
) -> _Job:
    """A new training in an empty RUN.partial, or one that goes on from the weights of another run."""
    tables = read_recipe(recipe or DEFAULT_RECIPE) if from_run is None else _continued(from_run, recipe)
    named = [] if encoder is None else [_setting(builder_name(encoder))]
    settings = make_settings(tables, [*overrides, *named])
    refuse_other_builder(settings.model, encoder, whose="The recipe" if from_run is None else str(from_run.folder))
    PositiveEvents(settings.objective.positive, data.kinds).refuse_without_values(data.sequences.values)
    _refuse_missing_times(settings, data)
    _refuse_unmeasurable(settings, data)
    partial, name = folders.partial_of(run), str(recipe or DEFAULT_RECIPE)
    if run.exists():
        raise FolderError(
            f"{run} exists already; name another folder with --out, or go on with it: --resume --set train.epochs=…"
        )
    if partial.exists():
        raise FolderError(
            f"{partial} holds unfinished training; add --resume to go on with it, or remove it to begin anew."
        )
    refuse_silence(settings.model, data.vocabulary)
    origin = None
    with folders.complete_folder(partial) as staging:
        if from_run is not None:
            name = str(recipe or from_run.manifest["recipe"])
            origin = _origin(from_run)
            _write_start(from_run, data, _Job(settings, name, staging, encoder, origin))
        _write_terms(staging, settings, _Belonging(name, data.digest, origin, everything, launched_by))
    return _Job(settings, name, partial, encoder, origin, everything, launched_by)


def _continued(origin: Recommender, recipe: str | Path | None) -> dict[str, Any]:
    """The settings of the run that training goes on from, with the sections of a recipe in the place of its own."""
    if origin.folder is None:
        raise FolderError("from_run was not opened from a run folder, so its settings are not known; load one.")
    refuse_added(origin.manifest, origin.folder, "gone on from", "go on from")
    return {**_tables(origin), **(read_recipe(recipe) if recipe else {})}


def _origin(run: Recommender) -> Origin:
    assert run.folder is not None
    return Origin(folder=str(run.folder.absolute()), digest=run_digest(run))


def _write_start(origin: Recommender, data: Data, job: _Job) -> None:
    """The weights of a run, carried over to the items of `data`, into RUN.partial."""
    assert origin.folder is not None
    settings = job.settings
    refuse_another_model(settings_of(origin), settings, whose=str(origin.folder))
    _refuse_leak(origin, data)
    everything = bool(origin.manifest["all"])
    codes = job.codes(CODES, data, data.split.train_end, None)
    if everything:
        codes_of_it = [name for name in (START, CODES, TRAINED) if (origin.folder / name).exists()]
        folders.verify_contents(origin.folder, origin.manifest, "run", names=(CHOOSING, *codes_of_it))
    write_start(
        origin.model,
        origin.folder,
        everything=everything,
        recipe=job.recipe,
        facts=facts_of(settings.model, data.vocabulary, data.kinds, _texts_of(origin.model), codes),
        before=origin.vocabulary,
        now=data.vocabulary,
        trained=training_counts(data.sequences, data.split, len(data.vocabulary)) > 0,
        out=job.partial,
    )


def _texts_of(model: SequenceModel) -> TextEncoder | None:
    """What a model's vectors of words were made by: it cannot read those of another."""
    return model.items.texts if isinstance(model.items, ContentTable) else None


def _refuse_leak(origin: Recommender, data: Data) -> None:
    """What a run was trained on must not be what the next one is judged by."""
    before, now = origin.manifest["data"].get("split"), data.manifest["split"]
    if before is None:  # the run is older than this question
        return
    if before["kind"] != now["kind"] or before.get("valid_from", 0) > now.get("valid_from", 0):
        raise SettingsError(
            f"{origin.folder} was trained on events that {data.folder} keeps for validation and test, so its scores "
            "would mean nothing: prepare the log with the same kind of --split as before, and a later moment where it "
            "is split at one (validation has as many events as the test, so it begins earlier when the log grows)."
        )


def _refuse_missing_times(settings: Settings, data: Data) -> None:
    """Times say nothing in a log that has an order and no times."""
    if data.manifest["has_time"]:
        return
    if settings.model.builder == "hstu":
        raise SettingsError(
            f"model.builder = 'hstu' looks at the time between events, and {data.folder} has none, only an order: "
            "prepare the log with --time, or choose another recipe, such as default."
        )
    if settings.model.inputs == "events" and settings.model.times:
        raise SettingsError(
            f"model.times = {msgspec.json.encode(settings.model.times).decode()} looks at times, and {data.folder} has "
            "none, only an order: prepare the log with --time, or leave them out with --set model.times=[]."
        )


def _setting(name: str) -> str:
    """A builder from outside as `--set` would take it."""
    return f"model.encoder={msgspec.json.encode(name).decode()}"


def _taken_up(
    run: Path,
    data: Data,
    recipe: str | Path | None,
    overrides: Sequence[str],
    encoder: Builder | None,
    launched_by: frozenset[str],
    *,
    everything: bool,
) -> _Job:
    """Unfinished training, or a finished run's training with more to do. What is refused leaves nothing behind."""
    partial, replaces = folders.partial_of(run), run.exists()
    source = partial if partial.exists() else run
    if not source.exists():
        raise FolderError(f"There is nothing to resume: neither {run} nor {partial} exists. Train without --resume.")
    belonging = _belonging(source, finished_run=source == run)
    if belonging.digest != data.digest:
        raise FolderError(
            f"{data.folder} is not the data that {run} was begun on; give that one, or train into another folder."
        )
    tables = parse_toml((source / SETTINGS).read_bytes(), str(source / SETTINGS))
    before = make_settings(tables)
    refuse_other_builder(before.model, encoder, whose=str(run))
    named = [] if encoder is None else [_setting(before.model.encoder)]
    settings = make_settings(read_recipe(recipe) if recipe else tables, [*overrides, *named])
    refuse_changes(before, settings)
    _refuse_unmeasurable(settings, data)
    everything = everything or belonging.everything
    terms = msgspec.structs.replace(belonging, everything=everything, launchers=launched_by)
    if source == partial:
        _write_terms(partial, settings, terms)
    else:
        done = finished(read_record(run / CHOOSING), settings.train)
        if done and everything == belonging.everything:
            raise SettingsError(f"{run} is complete: {done} (with --set).")
        with folders.complete_folder(partial) as staging:
            for name in KEPT:
                if (run / name).exists():
                    shutil.copyfile(run / name, staging / name)
            _write_terms(staging, settings, terms)
    return _Job(settings, terms.recipe, partial, encoder, terms.origin, everything, launched_by, replaces=replaces)


def _write_terms(partial: Path, settings: Settings, belonging: _Belonging) -> None:
    """What unfinished training goes on with when it is taken up, whatever is then said again."""
    folders.write_whole(partial / SETTINGS, settings_toml(settings).encode())
    folders.write_json(partial / BELONGING, belonging)


class Origin(msgspec.Struct, frozen=True):
    """The run that training went on from."""

    folder: str
    digest: str


class _Belonging(msgspec.Struct, frozen=True):
    """What unfinished training belongs to."""

    recipe: str
    digest: str
    origin: Origin | None = None
    everything: bool = False
    launchers: frozenset[str] = frozenset()


def _belonging(source: Path, *, finished_run: bool) -> _Belonging:
    if finished_run:
        manifest = folders.read_manifest(source, "run")
        refuse_added(manifest, source, "trained on", "resume")
        origin = msgspec.convert(manifest.get("from"), Origin | None)
        return _Belonging(manifest["recipe"], manifest["data"]["digest"], origin, everything=bool(manifest["all"]))
    try:
        return msgspec.json.decode((source / BELONGING).read_bytes(), type=_Belonging)
    except (OSError, msgspec.MsgspecError) as error:
        raise FolderError(f"{source} is damaged ({error}); remove it and train again without --resume.") from error


def _write_run(
    run: Path,
    job: _Job,
    data: Data,
    model: SequenceModel,
    counts: np.ndarray,
    evaluation: Evaluation,
    chosen: TrainingRecord,
    *,
    seen: SeenRule,
    group: ProcessGroup,
) -> None:
    """Everything needed to answer any history; no user ids, no histories."""
    with folders.complete_folder(run, overwrite="run" if job.replaces else None) as staging:
        (staging / SETTINGS).write_text(settings_toml(job.settings))
        save_model(model, job.settings.model, staging)
        table = data.vocabulary.table.with_columns(pl.Series("count", counts[1:].astype(np.int64)))
        table.write_parquet(staging / "items.parquet")
        questions = partial(sample_questions, model, data.sequences, data.split.cases("valid", "last"))
        index = build_index(model, model.answerable(counts), job.settings.index, questions=questions)
        index.save(staging / "index.safetensors")
        folders.write_json(staging / "metrics.json", evaluation.report)
        np.save(staging / "ranks.npy", evaluation.ranks)
        lines = [msgspec.json.encode(line) for line in chosen.history]
        (staging / "history.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        for name in KEPT:
            if (job.partial / name).exists():
                shutil.copyfile(job.partial / name, staging / name)
        if job.everything and isinstance(model.items, CodeTable):
            np.save(staging / TRAINED, training_counts(data.sequences, data.split, len(data.vocabulary)) > 0)
        facts = _facts(job, data, chosen, seen=seen, processes=group.size)
        facts |= {"index": index_facts(index, questions), **_code_facts(model, counts)}
        folders.write_manifest(staging, "run", facts)


def _code_facts(model: SequenceModel, counts: np.ndarray) -> dict[str, Any]:
    """How many items cannot be told apart, where they are known by their codes."""
    if not isinstance(model.items, CodeTable):
        return {}
    return {"codes": {"shared": shared_codes(model.items.codes.numpy(), np.flatnonzero(counts[1:]) + 1)}}


def _facts(job: _Job, data: Data, chosen: TrainingRecord, *, seen: SeenRule, processes: int) -> dict[str, Any]:
    return {
        "segue": version("segue"),
        "torch": str(torch.__version__),
        "recipe": job.recipe_name,
        "data": {
            "folder": str(data.folder.absolute()),
            "digest": data.digest,
            "counts": {name: data.manifest["counts"][name] for name in ("users", "items", "events")},
            "split": data.manifest["split"],
        },
        "from": job.origin,
        "items": len(data.vocabulary),
        "seen": seen,
        "all": job.everything,
        "training": {
            "epochs": chosen.epoch,
            "best_epoch": chosen.best_epoch,
            "best_score": chosen.best_score,
            "processes": processes,
            **({"launchers": sorted(job.launched_by)} if job.launched_by else {}),
            "threads": job.settings.train.threads or torch.get_num_threads(),
            "seconds": [round(seconds, 3) for seconds in chosen.seconds],
        },
    }


def _temporary_run() -> Path:
    """A place that is removed at exit."""
    holder = Path(tempfile.mkdtemp(prefix="segue-run-"))
    atexit.register(shutil.rmtree, holder, ignore_errors=True)
    return holder / "run"


def refuse_added(manifest: dict[str, Any], run: Path | None, done: str, doing: str) -> None:
    """A run to which items were added has others than its data; `done` and `doing` say what is refused."""
    if "added" in manifest:
        added = manifest["added"]
        raise FolderError(
            f"{run} has {added['items']} items that were added to it and that no training knows, so it cannot be "
            f"{done}: {doing} the run that they were added to, {added['run']}."
        )


def settings_of(recommender: Recommender) -> Settings:
    """The settings that a run was made with."""
    return make_settings(_tables(recommender))


def _tables(recommender: Recommender) -> dict[str, Any]:
    assert recommender.folder is not None
    path = recommender.folder / SETTINGS
    return parse_toml(path.read_bytes(), str(path))


def data_of(recommender: Recommender, data: Data | Path | str | None) -> Data:
    """The data that a run was trained on: the folder it remembers, or the one given, if it is the same data."""
    remembered = recommender.manifest["data"]
    if data is None and not Path(remembered["folder"]).exists():
        raise FolderError(
            f"The data folder {remembered['folder']}, which {recommender.folder} was trained on, is gone; "
            "say where it is with --data."
        )
    known = data if isinstance(data, Data) else Data.open(Path(data if data is not None else remembered["folder"]))
    if known.digest != remembered["digest"]:
        raise FolderError(
            f"{recommender.folder} was not trained on {known.folder}: items and test cases differ, so answers from it "
            "would mean nothing. Give the data folder of that run with --data, or train a run on this one."
        )
    return known
