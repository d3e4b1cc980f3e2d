from __future__ import annotations

import csv
import shutil
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
from planted_logs import cycle_log

import segue
import segue.tuning.search as search_room
from segue.config.recipes import read_recipe, recipe_names
from segue.config.settings import Settings, make_settings
from segue.errors import FolderError, SegueError, SettingsError, TrainingError
from segue.kinds import kind_of
from segue.models.encoders.esasrec import ESASRecSettings
from segue.objective.samplers.samplers import UniformSettings
from segue.training import item_codes as codes
from segue.training.loop import TrainingProgress
from segue.tuning import TrialRecord, Tuning, tune, tuning_table
from segue.tuning import study as study_room
from segue.tuning.report import Outcome
from segue.tuning.space import LOSS, SPACE, LogFacts, belonging, changes, laid_over, own_values, rounded, space_for

SMALL = LogFacts(items=12, events=600, longest=12)
LARGE = LogFacts(items=3_416, events=988_000, longest=2_300)
HUGE = LogFacts(items=1_000_000, events=50_000_000, longest=90)


# --- the space ------------------------------------------------------------------------------------------------------


def settings_of(**sections: dict[str, Any]) -> Settings:
    return make_settings(sections)


@pytest.mark.parametrize("recipe", recipe_names())
@pytest.mark.parametrize("log", [SMALL, LARGE, HUGE], ids=["small", "large", "huge"])
def test_every_point_of_the_space_has_valid_settings(recipe: str, log: LogFacts) -> None:
    """Settings refuse invalid combinations, but no point of the space; the recipe itself is one of the points."""
    settings = make_settings(read_recipe(recipe))
    space = space_for(settings, log)
    values = {name: knob.choices or (knob.low, knob.high) for name, knob in space.items()}
    linked = ("objective.", "model.width", "model.heads", "model.body.heads")
    points = 0
    for loss in values.get(LOSS, (kind_of(settings.objective.loss),)):
        names = [name for name in belonging(space, str(loss)) if name.startswith(linked) and name != LOSS]
        for point in product(*(values[name] for name in names)):
            trial_settings = laid_over(settings, {LOSS: loss, **dict(zip(names, point, strict=True))})
            assert kind_of(trial_settings.objective.loss) == loss
            points += 1
    assert points >= (9 if {"model.heads", "model.body.heads"} & space.keys() else 5)
    assert laid_over(settings, own_values(settings, space)) == settings
    for name, value in own_values(settings, space).items():
        assert value in values[name] if space[name].choices else values[name][0] <= value <= values[name][1]


def test_every_loss_of_the_table_is_offered_for_the_usual_recipe() -> None:
    assert space_for(settings_of(), LARGE)[LOSS].choices == SPACE[LOSS].choices
    assert len(SPACE[LOSS].choices) >= 2


@pytest.mark.parametrize(
    ("own", "longest", "choices"),
    [
        (200, 2_300, (20, 50, 100, 200, 400)),
        (200, 60, (20, 50, 200)),  # the recipe's own length covers every history: another one would be equivalent
        (30, 60, (20, 30, 50, 100)),
        (15, 12, None),  # nothing to choose
        (15, 20, (15, 20)),
    ],
)
def test_lengths_go_up_to_the_longest_history(own: int, longest: int, choices: tuple[int, ...] | None) -> None:
    space = space_for(settings_of(model={"length": own}), LogFacts(items=100, events=10_000, longest=longest))
    assert (space["model.length"].choices if choices else space.get("model.length")) == choices


def test_negatives_are_fewer_than_the_items() -> None:
    for items, negatives in ((257, (256,)), (1_000, (256,)), (1_001, (256, 1000)), (3_416, (256, 1000, 3000))):
        space = space_for(settings_of(), LogFacts(items=items, events=100_000, longest=50))
        assert space["objective.sampler.negatives"].choices == negatives
        assert "sampled-softmax" in space[LOSS].choices
    for items in (12, 256):
        space = space_for(settings_of(), LogFacts(items=items, events=100_000, longest=50))
        assert not {LOSS, "objective.sampler.negatives", "objective.sampler"} & set(space)


def test_the_softmax_is_not_offered_for_huge_catalogues() -> None:
    objective = {"loss": "sampled-softmax", "sampler": {"kind": "uniform", "negatives": 500}}
    losses = space_for(settings_of(objective=objective), HUGE).get(LOSS)
    assert losses is None or "softmax" not in losses.choices
    assert "softmax" in space_for(settings_of(), HUGE)[LOSS].choices, "the recipe's own loss is always offered"


def test_heads_divide_every_width() -> None:
    space = space_for(settings_of(model={"width": 50, "heads": 5}), LARGE)
    assert "model.width" not in space, "no width of the table is divisible by five heads"
    assert space["model.heads"].choices == (1, 2, 5)
    space = space_for(settings_of(model={"width": 50, "heads": 2}), LARGE)
    assert space["model.width"].choices == (32, 50, 64, 96, 128, 192)
    assert space["model.heads"].choices == (1, 2)


@pytest.mark.parametrize(
    "model",
    [
        {"inputs": {"kind": "rated", "value_width": 5}, "width": 64, "heads": 1},
        {"items": {"kind": "codes", "parts": 6}, "width": 48, "heads": 2},
    ],
    ids=["rated", "codes"],
)
def test_widths_fit_the_value_width_and_the_code_parts(model: dict[str, Any]) -> None:
    """A trial with invalid settings would stop the search, and again each time it resumes."""
    settings = settings_of(model=model)
    assert isinstance(settings.model, ESASRecSettings)
    space = space_for(settings, LARGE)
    widths = space["model.width"].choices if "model.width" in space else (settings.model.width,)
    heads = space["model.heads"].choices if "model.heads" in space else (settings.model.heads,)
    for width, head in product(widths, heads):
        laid_over(settings, {"model.width": width, "model.heads": head})
    assert settings.model.width in widths and settings.model.heads in heads


def test_no_heads_are_offered_to_recurrent_networks() -> None:
    sections: dict[str, Any] = {"objective": {"task": "continuation"}}
    for body, has_heads in (("gru", False), ("transformer", True)):
        space = space_for(settings_of(model={"kind": "seq2seq", "body": body}, **sections), LARGE)
        assert ("model.body.heads" in space) is has_heads and "model.heads" not in space


def test_another_loss_removes_the_keys_of_the_old_one() -> None:
    sampler = {"kind": "popularity", "negatives": 9, "power": 0.75}
    settings = settings_of(objective={"loss": "sampled-softmax", "sampler": sampler})
    assert laid_over(settings, {LOSS: "softmax"}).objective == settings_of().objective
    uniform = laid_over(
        settings, {LOSS: "sampled-softmax", "objective.sampler": "uniform", "objective.sampler.negatives": 256}
    )
    assert uniform.objective.sampler == UniformSettings(negatives=256)
    same = laid_over(settings, {LOSS: "sampled-softmax", "objective.sampler": "popularity", "model.depth": 1})
    assert same.objective == settings.objective


def test_a_key_that_the_recipe_lacks_changes_from_none() -> None:
    values = {LOSS: "gbce", "objective.sampler": "uniform", "objective.sampler.negatives": 256, "model.depth": 2}
    change = changes(settings_of(), values)
    assert change["objective.sampler.negatives"] == (None, 256) and change["objective.sampler"] == ("none", "uniform")
    assert "model.depth" not in change


def test_another_loss_gets_shared_negatives() -> None:
    recipe = make_settings(read_recipe("sasrec-bce"))
    settings = laid_over(recipe, {LOSS: "gbce", "objective.sampler": "uniform", "objective.sampler.negatives": 256})
    assert settings.objective.sampler == UniformSettings(negatives=256)


def test_numbers_are_rounded_except_those_of_the_recipe() -> None:
    assert rounded({"a": 0.0023456, "b": 3, "c": "x"}, {"a": 0.001}) == {"a": 0.0023, "b": 3, "c": "x"}
    assert rounded({"a": 0.0012345}, {"a": 0.0012345}) == {"a": 0.0012345}


# --- the search -----------------------------------------------------------------------------------------------------

TRIALS = 4


@pytest.fixture(scope="module")
def recipe(quick_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick recipe with a sampled loss, so that both losses and the knobs of one are searched."""
    path = tmp_path_factory.mktemp("recipe") / "sampled.toml"
    path.write_text(
        quick_recipe.read_text()
        + '\n[objective]\nloss = "sampled-softmax"\nsampler = {kind = "uniform", negatives = 5}\n'
    )
    return path


@pytest.fixture(scope="module")
def whole(cycle_data: Path, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    """An uninterrupted search."""
    return tune(cycle_data, out=tmp_path_factory.mktemp("tune") / "whole", recipe=recipe, trials=TRIALS)


def results_of(tuning: Tuning) -> list[tuple[object, ...]]:
    """The parts of a search that are reproducible: all but times and trial numbers."""
    return [(one.outcome, one.score, one.epochs, one.best_epoch, one.values, one.changes) for one in tuning.counted]


def copy_search(tuning: Tuning, to: Path) -> Path:
    shutil.copytree(tuning.folder, to)
    return to


def test_the_first_trial_is_the_recipe(whole: Tuning, cycle_data: Path, recipe: Path) -> None:
    first, best = whole.trials[0], whole.best
    assert first.changes == {} and first.outcome == "finished"
    assert first.score == segue.train(cycle_data, recipe=recipe).manifest["training"]["best_score"]
    assert best is not None and best.score is not None and first.score is not None and best.score >= first.score
    assert len(whole.trials) == len(whole.counted) == TRIALS
    assert {one.values[LOSS] for one in whole.trials} == {"softmax", "sampled-softmax"}
    assert all(("objective.sampler.negatives" in one.values) == (one.values[LOSS] != "softmax") for one in whole.trials)


def test_the_best_is_a_recipe_that_trains_to_its_score(whole: Tuning, cycle_data: Path) -> None:
    assert whole.best is not None
    path = Path(whole.folder) / "best.toml"
    model = segue.train(cycle_data, recipe=path)
    assert model.manifest["training"]["best_score"] == whole.best.score
    tables = tomllib.loads(path.read_text())
    for name, value in whole.best.values.items():
        table: Any = tables
        for key in name.split("."):
            table = table[key]
        assert value in (table, table["kind"] if isinstance(table, dict) else None)


def test_the_folder_can_be_read(whole: Tuning) -> None:
    folder = Path(whole.folder)
    names = ["best.toml", "manifest.json", "recipe.toml", "study.sqlite", "trials.csv"]
    assert sorted(path.name for path in folder.iterdir()) == names
    rows = list(csv.DictReader((folder / "trials.csv").read_text().splitlines()))
    assert [float(row["ndcg@10"]) for row in rows] == [one.score for one in whole.trials]
    with_negatives = [row["objective.sampler.negatives"] != "" for row in rows]
    assert with_negatives == [one.values[LOSS] != "softmax" for one in whole.trials]
    with study_room.open_study(folder) as study:
        assert [trial.value for trial in study.trials] == [one.score for one in whole.trials]


def interrupt(at: tuple[int, int], steps: list[tuple[int, int]]) -> Callable[[int, TrainingProgress], None]:
    """Ctrl-C at the end of an epoch of a trial; `steps` gets the epochs that were trained."""

    def progress(trial: int, step: TrainingProgress) -> None:
        if step.scores is not None:
            steps.append((trial, step.epoch))
            if (trial, step.epoch) == at:
                raise KeyboardInterrupt

    return progress


def test_an_interrupted_search_is_resumed_to_the_same_result(
    whole: Tuning, cycle_data: Path, recipe: Path, tmp_path: Path
) -> None:
    out, steps = tmp_path / "search", list[tuple[int, int]]()
    with pytest.raises(KeyboardInterrupt):
        tune(cycle_data, out=out, recipe=recipe, trials=TRIALS, progress=interrupt((1, 2), steps))
    assert (out / "trials.csv").read_text().splitlines()[1].startswith("1,interrupted,0.")
    assert (out / "best.toml").exists(), "the two finished epochs have a score"
    with pytest.raises(KeyboardInterrupt):
        tune(cycle_data, out=out, resume=True, trials=TRIALS, progress=interrupt((4, 1), steps))
    again = tune(cycle_data, out=out, resume=True, trials=TRIALS, progress=interrupt((0, 0), steps))
    assert results_of(again) == results_of(whole)
    assert [one.outcome for one in again.trials if one not in again.counted] == ["interrupted"] * 2
    assert steps[:3] == [(1, 1), (1, 2), (2, 3)], "the interrupted trial resumes from its last epoch"
    assert not (out / "trial").exists()
    assert (out / "best.toml").read_text().splitlines()[4:] == (
        Path(whole.folder) / "best.toml"
    ).read_text().splitlines()[4:]


def test_codes_are_learned_once_for_all_trials(
    cycle_data: Path, quick_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codes, "LEAST_STEPS", 10)
    section = '[model]\nitems = {kind = "codes", assignment = "learned", parts = 4, values = 8}'
    recipe, out = tmp_path / "coded.toml", tmp_path / "search"
    recipe.write_text(quick_recipe.read_text().replace("[model]", section))

    def steps_until(stop_at: int, *, resume: bool) -> list[tuple[int, str, int]]:
        steps: list[tuple[int, str, int]] = []

        def progress(trial: int, step: TrainingProgress) -> None:
            steps.append((trial, step.of, step.epoch))
            if step.of and step.epoch == stop_at:
                raise KeyboardInterrupt

        with nullcontext() if resume else pytest.raises(KeyboardInterrupt):
            tune(cycle_data, out=out, recipe=None if resume else recipe, resume=resume, trials=2, progress=progress)
        return steps

    assert steps_until(3, resume=False)[0] == (1, "codes", 1)
    steps = steps_until(0, resume=True)
    code_epochs = [(trial, epoch) for trial, of, epoch in steps if of]
    assert {trial for trial, _ in code_epochs} == {2} and min(epoch for _, epoch in code_epochs) == 3
    assert {trial for trial, of, _ in steps if not of} == {2, 3} and not (out / "codes.safetensors").exists()


def test_more_trials_after_a_kill(whole: Tuning, cycle_data: Path, tmp_path: Path) -> None:
    """A kill leaves an unfinished trial: it is recorded but not counted."""
    out = copy_search(whole, tmp_path / "search")
    with study_room.open_study(out) as study:
        study.ask()
    calls: list[tuple[TrialRecord, int]] = []
    tuning = tune(
        cycle_data,
        out=out,
        resume=True,
        trials=TRIALS + 1,
        ended=lambda one, so_far: calls.append((one, len(so_far.counted))),
    )
    assert results_of(tuning)[:TRIALS] == results_of(whole)
    assert [one.outcome for one in tuning.trials[TRIALS:]] == ["interrupted", "finished"]
    assert calls == [(tuning.trials[-1], TRIALS + 1)]


def test_the_search_ends_after_its_minutes(
    cycle_data: Path, quick_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch takes a minute here: three minutes are three epochs, and then the trial stops."""
    endless, out, steps = tmp_path / "endless.toml", tmp_path / "search", list[tuple[int, int]]()
    endless.write_text(quick_recipe.read_text().replace("= 3\n", "= 5\n"))
    monkeypatch.setattr(search_room, "monotonic", lambda: 60.0 * len(steps))
    first = tune(cycle_data, out=out, recipe=endless, minutes=3, progress=interrupt((0, 0), steps))
    assert [(one.outcome, one.epochs) for one in first.trials] == [("out of time", 3)]
    assert first.best == first.trials[0] and first.best.score is not None and first.counted == []
    assert (out / "best.toml").exists()
    second = tune(cycle_data, out=out, resume=True, trials=1, minutes=10, progress=interrupt((0, 0), steps))
    assert steps == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    assert [(one.outcome, one.epochs) for one in second.trials] == [("out of time", 3), ("finished", 5)]


def test_trials_that_fall_behind_are_pruned(
    cycle_data: Path, quick_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_room, "UNPRUNED_TRIALS", 1)
    monkeypatch.setattr(study_room, "UNPRUNED_EPOCHS", 1)
    tuning = tune(cycle_data, out=tmp_path / "search", recipe=quick_recipe, trials=5)
    trials = [one for one in tuning.trials if one.outcome == "pruned"]
    assert trials and len(tuning.counted) == 5
    assert all(one.epochs < 3 and one.score is not None and one != tuning.best for one in trials)


def test_a_loss_that_is_not_finite_is_a_failed_trial(cycle_data: Path, quick_recipe: Path, tmp_path: Path) -> None:
    wild = tmp_path / "wild.toml"
    wild.write_text(quick_recipe.read_text().replace("1e-2", "1e30"))
    with pytest.raises(TrainingError, match="nothing to choose from"):
        tune(cycle_data, out=tmp_path / "search", recipe=wild, trials=1)
    rows = (tmp_path / "search" / "trials.csv").read_text().splitlines()
    assert rows[1].startswith("1,failed,,0,")
    assert not (tmp_path / "search" / "best.toml").exists()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_settings_that_do_not_fit_into_memory_are_a_failed_trial(
    cycle_data: Path, quick_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """As an interruption, every resume would run them again first."""

    def too_large(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("segue.tuning.search.choose_epoch", too_large)
    with pytest.raises(TrainingError, match="nothing to choose from"):
        tune(cycle_data, out=tmp_path / "search", recipe=quick_recipe, trials=1)
    assert (tmp_path / "search" / "trials.csv").read_text().splitlines()[1].startswith("1,failed,,0,")


def test_the_test_part_is_not_used(quick_recipe: Path, tmp_path: Path) -> None:
    """Swapping the last items between users changes no proposal and no score."""
    log = pl.read_csv(cycle_log(users=40).encode()).sort("user", "timestamp")
    last = log["timestamp"] == log.select(pl.col("timestamp").max().over("user")).to_series()
    items = log["item"].to_numpy().copy()
    items[last.to_numpy()] = np.random.default_rng(3).permutation(items[last.to_numpy()])
    tunings = []
    for name, table in (("straight", log), ("permuted", log.with_columns(item=pl.Series(items)))):
        data = segue.prepare(table, out=tmp_path / f"{name}-data")
        tunings.append(tune(data, out=tmp_path / name, recipe=quick_recipe, trials=2))
    assert results_of(tunings[0]) == results_of(tunings[1])
    digests = [msgspec.json.decode((Path(one.folder) / "manifest.json").read_bytes())["data"] for one in tunings]
    assert digests[0] != digests[1]


# --- refusals -------------------------------------------------------------------------------------------------------


def test_refusals(whole: Tuning, cycle_data: Path, quick_recipe: Path, tmp_path: Path) -> None:
    out = copy_search(whole, tmp_path / "search")
    other = segue.prepare(pl.read_csv(cycle_log(seed=6).encode()), out=tmp_path / "other")
    cases: list[tuple[type[SegueError], str, dict[str, Any]]] = [
        (FolderError, "holds a search already; add --resume", {"out": out}),
        (FolderError, "exists already", {"out": tmp_path / "other"}),
        (FolderError, "nothing to resume", {"out": tmp_path / "nowhere", "resume": True}),
        (FolderError, "not a folder of `segue tune`", {"out": tmp_path / "other", "resume": True}),
        (SettingsError, "has 4 trials already; raise --trials", {"out": out, "resume": True, "trials": 4}),
        (SettingsError, "cannot change the recipe", {"out": out, "resume": True, "recipe": quick_recipe}),
        (SettingsError, "There is no recipe 'nosuch'", {"out": tmp_path / "new", "recipe": "nosuch"}),
        (SettingsError, "--trials must be at least 1", {"out": tmp_path / "new", "trials": 0}),
        (SettingsError, "--minutes must be above 0", {"out": tmp_path / "new", "minutes": 0.0}),
    ]
    for kind, sentence, options in cases:
        with pytest.raises(kind, match=sentence):
            tune(cycle_data, **options)
    with pytest.raises(FolderError, match="is not the data that"):
        tune(other, out=out, resume=True)
    manifest = msgspec.json.decode((out / "manifest.json").read_bytes())
    manifest["data"]["folder"] = str(other.folder.absolute())  # other data in the same folder
    (out / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(FolderError, match="is not the data that"):
        tune(other, out=out, resume=True)
    assert not (tmp_path / "new").exists()


def test_a_damaged_study_is_refused(whole: Tuning, cycle_data: Path, tmp_path: Path) -> None:
    out = copy_search(whole, tmp_path / "search")
    (out / "study.sqlite").write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(FolderError, match=r"study\.sqlite cannot be read or written \(.*not a database"):
        tune(cycle_data, out=out, resume=True, trials=9)
    (out / "study.sqlite").unlink()
    with pytest.raises(FolderError, match="is missing"):
        tune(cycle_data, out=out, resume=True, trials=9)


# --- the report -----------------------------------------------------------------------------------------------------


def record(trial: int, score: float | None, outcome: Outcome = "finished", **values: Any) -> TrialRecord:
    return TrialRecord(
        trial=trial,
        outcome=outcome,
        score=score,
        epochs=3,
        best_epoch=2,
        seconds=90.0,
        values={f"model.{name}": value for name, value in values.items()},
        changes={f"model.{name}": (64, value) for name, value in values.items() if value != 64},
    )


def test_the_table_shows_the_best_trials() -> None:
    widths = [64, 32, 128, 128, 128, 128, 128, 32, 32, 32, 32]
    trials = [record(n, n / 100, width=width, depth=n) for n, width in enumerate(widths, start=1)]
    trials[0] = record(1, 0.5, width=64, depth=64)
    trials.append(record(12, 0.9, "failed", width=96, depth=1))  # training with these settings would fail again
    tuning = Tuning(folder="search", recipe="sasrec", trials=trials)
    lines = tuning_table(tuning).splitlines()
    assert lines[0].startswith("12 trials: 11 finished, 1 failed.")
    assert [line.split()[0] for line in lines[3:8]] == ["1", "11", "10", "9", "8"]
    assert lines[3].endswith("0.5000           2      1.5  nothing: the recipe itself")
    assert lines[4].endswith("width 64 → 32, depth 64 → 11")
    assert lines[9] == "No trial was better than the recipe itself."
    better = Tuning(folder="search", recipe="sasrec", trials=[record(1, 0.01, width=64, depth=64), *trials[1:]])
    assert tuning_table(better).splitlines()[9] == "The recipe itself reached 0.0100, the best trial 0.1100."
    assert "All of the best" not in tuning_table(better), "the fifth best has another width"
    others = [record(n, n / 100, width=width, depth=n) for n, width in enumerate([64] * 5 + [32] * 5, start=1)]
    assert tuning_table(Tuning(folder="s", recipe="r", trials=others)).endswith("All of the best 5 have width 32.")
