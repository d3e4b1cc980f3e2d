"""A custom builder: runs train, resume, load and serve with it, and are refused without it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from command_line import CommandLine
from small_service import ids, in_process_client, post_events

import segue
from segue.errors import FolderError, InputError, SegueError, SettingsError
from segue.models.build import builder_name
from segue.models.encoders import ModelSettings
from segue.models.encoders.esasrec import ESASRecSettings
from segue.models.encoders.sasrec import SASRecSettings
from segue.models.sequence import Parts, SequenceModel
from segue.serving.embedded import application
from segue.serving.engine.engine import ServingEngine
from segue.serving.settings import ServiceSettings
from segue.training.loop import TrainingProgress

NAME = f"{__name__}:mine"
RUN_FILES = ("weights.safetensors", "history.jsonl", "ranks.npy", "metrics.json", "items.parquet", "index.safetensors")


def mine(settings: ModelSettings, parts: Parts, generator: torch.Generator) -> SequenceModel:
    """The SASRec of the quick recipe, from a custom builder."""
    assert isinstance(settings, SASRecSettings)
    return settings.build(parts, generator)


def other(settings: ModelSettings, parts: Parts, generator: torch.Generator) -> SequenceModel:
    return ESASRecSettings(width=settings.width, depth=settings.depth).build(parts, generator)


def as_if_in_a_script(build: Callable[..., SequenceModel]) -> Any:
    """The same function as if defined in a script that is run, not imported."""
    assert isinstance(build, FunctionType)
    copy = FunctionType(build.__code__, build.__globals__, build.__name__)
    copy.__module__, copy.__qualname__ = "__main__", build.__qualname__
    return copy


@pytest.fixture(scope="module")
def outside_run(cycle_data: Path, quick_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("outside") / "mine"
    segue.train(cycle_data, out=run, recipe=quick_recipe, encoder=mine)
    return run


def load_recommender(run: Path, encoder: Any = None) -> segue.Recommender:
    model = segue.load(run, encoder=encoder)
    assert isinstance(model, segue.Recommender)
    return model


def assert_same_run(one: Path, another: Path) -> None:
    assert all((one / name).read_bytes() == (another / name).read_bytes() for name in RUN_FILES)


def test_a_run_with_a_custom_builder_equals_segues_own(outside_run: Path, cycle_run: Path) -> None:
    assert_same_run(outside_run, cycle_run)
    saved_settings = tomllib.loads((outside_run / "settings.toml").read_text())["model"]
    assert saved_settings["encoder"] == NAME and saved_settings["width"] == 16
    assert tomllib.loads((cycle_run / "settings.toml").read_text())["model"]["encoder"] == ""


def test_a_run_is_loaded_and_evaluated_with_its_builder(outside_run: Path, cycle_run: Path) -> None:
    model, own_model = load_recommender(outside_run, mine), load_recommender(cycle_run)
    assert model.recommend(["i03", "i04"], k=3).ids == own_model.recommend(["i03", "i04"], k=3).ids
    report = segue.evaluate(outside_run, encoder=mine)
    assert report.metrics == segue.evaluate(model).metrics == segue.evaluate(cycle_run).metrics


def test_a_builder_of_a_script_matches_by_name(outside_run: Path) -> None:
    script = as_if_in_a_script(mine)
    assert builder_name(script) == "__main__:mine" != NAME
    assert load_recommender(outside_run, script).recommend(["i03"], k=1).items


@pytest.mark.parametrize(
    ("encoder", "words"),
    [(None, [NAME, "segue.load(folder, encoder=build)"]), (other, [NAME, f"{__name__}:other", "give that one"])],
    ids=["without", "another"],
)
def test_a_run_without_its_builder_is_refused(outside_run: Path, encoder: Any, words: list[str]) -> None:
    for verb in (segue.load, segue.evaluate, segue.Recommender.open):
        with pytest.raises(SettingsError) as error:
            verb(outside_run, encoder=encoder)
        assert all(word in str(error.value) for word in [str(outside_run), *words])


def test_a_builder_is_refused_for_a_run_of_segues_own(cycle_run: Path, cycle_data: Path) -> None:
    with pytest.raises(SettingsError, match=r"segue's own, sasrec, and not .*: leave encoder= out"):
        segue.load(cycle_run, encoder=mine)
    with pytest.raises(SettingsError, match="data folder, which has no encoder"):
        segue.load(cycle_data, encoder=mine)


def test_a_changed_builder_is_refused(outside_run: Path) -> None:
    def build(settings: ModelSettings, parts: Parts, generator: torch.Generator) -> SequenceModel:
        return other(settings, parts, generator)

    build.__qualname__ = "mine"
    with pytest.raises(FolderError, match="give its builder as it was, or train it again"):
        segue.load(outside_run, encoder=build)


def test_the_command_line_refuses_a_custom_builder(outside_run: Path, line: CommandLine) -> None:
    says = (str(outside_run), NAME, "give its builder in Python")
    for command in (
        ["recommend", outside_run, "--history", "i03"],
        ["explain", outside_run, "--history", "i03"],
        ["similar", outside_run, "i03"],
        ["evaluate", outside_run],
    ):
        line.refuses(*command, says=says)


def test_the_engine_of_the_service_refuses_a_custom_builder(outside_run: Path, tmp_path: Path) -> None:
    """The error is that of `segue serve`."""
    with pytest.raises(SettingsError, match=f"{NAME}.*give its builder in Python"):
        ServingEngine.open(ServiceSettings(runs=(outside_run,), store=str(tmp_path / "store.sqlite")))


def test_a_recipe_cannot_name_a_builder_alone(
    cycle_data: Path, quick_recipe: Path, outside_run: Path, line: CommandLine
) -> None:
    line.refuses(
        *("train", cycle_data, "--out", "run", "--recipe", quick_recipe, "--set", "model.encoder=shop:mine"),
        says=("shop:mine", "segue.train(data, encoder=build)"),
    )
    line.refuses(
        *("tune", cycle_data, "--out", "tuned", "--recipe", outside_run / "settings.toml", "--trials", 1),
        says=(NAME, "segue.train(data, encoder=build)"),
    )


class Stopped(KeyboardInterrupt):
    """Ctrl-C, raised by these tests alone."""


def test_interrupted_training_is_resumed_with_its_builder(
    outside_run: Path, cycle_data: Path, quick_recipe: Path, tmp_path: Path
) -> None:
    def stop(step: TrainingProgress) -> None:
        if step.epoch == 2:
            raise Stopped

    run = tmp_path / "run"
    with pytest.raises(Stopped):
        segue.train(cycle_data, out=run, recipe=quick_recipe, encoder=as_if_in_a_script(mine), progress=stop)
    for encoder, words in ((None, "__main__:mine"), (other, "give that one")):
        with pytest.raises(SettingsError, match=words):
            segue.train(cycle_data, out=run, resume=True, encoder=encoder)
    model = segue.train(cycle_data, out=run, resume=True, encoder=mine)
    assert model.folder == run
    assert_same_run(run, outside_run)
    segue.train(cycle_data, out=run, resume=True, encoder=mine, overrides=["train.epochs=4", "train.patience=9"])
    assert len((run / "history.jsonl").read_text().splitlines()) == 4
    assert tomllib.loads((run / "settings.toml").read_text())["model"]["encoder"] == "__main__:mine"


def test_a_builder_that_gives_no_model_is_refused(cycle_data: Path, quick_recipe: Path) -> None:
    def nothing(*_: Any) -> Any:
        return 7

    with pytest.raises(SettingsError, match=r"builds a SequenceModel, and .*nothing returned int"):
        segue.train(cycle_data, recipe=quick_recipe, encoder=nothing)


def test_an_encoder_that_is_no_function_is_refused(cycle_data: Path, quick_recipe: Path, outside_run: Path) -> None:
    name: Any = "sasrec"
    sentence = r"encoder= must be a function that builds a model, and 'sasrec' is none; .* model\.kind"
    with pytest.raises(SettingsError, match=sentence):
        segue.train(cycle_data, recipe=quick_recipe, encoder=name)
    with pytest.raises(SettingsError, match=sentence):
        segue.load(outside_run, encoder=name)


def test_a_custom_builder_is_served_from_its_process(outside_run: Path, cycle_run: Path, tmp_path: Path) -> None:
    """Together with a run of segue's own, which has the same answers."""
    model, own_model = load_recommender(outside_run, mine), load_recommender(cycle_run)
    with in_process_client(application(model, own_model, store=str(tmp_path / "store.sqlite"))) as client:
        post_events(client, {"user": "ann", "item": "i03"}, {"user": "ann", "item": "i04"})
        answer = client.get("/users/ann/recommendations", params={"k": 3})
        assert ids(answer) == own_model.recommend(["i03", "i04"], k=3).ids
        assert client.get("/model").json()["active"] == "mine"
        other_answer = client.get("/users/ann/recommendations", params={"k": 3, "model": cycle_run.name})
        assert ids(other_answer) == ids(answer)
        assert client.post("/explanations", json={"user": "ann"}).status_code == 200


def test_a_public_application_needs_keys(cycle_run: Path, tmp_path: Path) -> None:
    model = load_recommender(cycle_run)
    with pytest.raises(InputError, match="Without keys, --host must be"):
        application(model, store=str(tmp_path / "store.sqlite"), host="0.0.0.0")
    with pytest.raises(SegueError, match="both called"):
        application(model, model, store=str(tmp_path / "store.sqlite"))
