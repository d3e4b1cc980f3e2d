"""Warm start from yesterday's model on today's log: weights transfer by item id, whatever the item numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
import torch
from cycle_logs import N_ITEMS, Log, cycle, recipe_of, same_weights, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st
from settings_tables import model_settings

from segue.data.batch import Batch
from segue.data.sequences import Sequences
from segue.data.split import split_time
from segue.data.vocabulary import Vocabulary
from segue.errors import InputError
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.checkpoint import fill_model
from segue.models.items.content import ContentTable
from segue.models.items.tables import DataFacts
from segue.models.sequence import SequenceModel
from segue.models.warm_start import transfer_weights
from segue.training.state import TrainingRecord
from segue.training.train import STATE, STATE_ALL, TrainingSetup, choose_epoch, train_for
from segue.training.warm_start import WARM_START, WARM_START_ALL, write_warm_start

SMALL = {"width": 8, "depth": 1, "length": 6, "dropout": 0.0}


def vocabulary(ids: list[str], **columns: list[Any]) -> Vocabulary:
    return Vocabulary(pl.DataFrame({"id": ids, "count": [1] * len(ids), **columns}))


def random_model(catalogue: Vocabulary, seed: int, kinds: tuple[str, ...] = (), **model: Any) -> SequenceModel:
    """A model with random weights, biases included."""
    shape = model_settings(**{**SMALL, **model})
    network = build_model(
        shape,
        len(catalogue),
        generator=torch.Generator().manual_seed(seed),
        facts=shape.items.facts(catalogue, DataFacts(kinds=kinds)),
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator))
    network.items.clear_padding()
    return network


def scores(model: SequenceModel, catalogue: Vocabulary, history: list[str], kinds: list[int] | None = None) -> Any:
    """Scores by item id after a history of ids."""
    numbers = catalogue.numbers(history, unknown="error")
    batch = Batch(
        items=numbers,
        times=np.arange(len(numbers)) + 1,
        lengths=np.array([len(numbers)]),
        kinds=None if kinds is None else np.array(kinds),
    )
    with torch.no_grad():
        row = model.score_all(model.query(tensors(batch)))[0, 1:]
    return dict(zip(catalogue.table["id"], row.tolist(), strict=True))


@pytest.mark.parametrize(
    "model",
    [{"kind": "sasrec"}, {"kind": "esasrec", "items__tied": False}, {"kind": "bert4rec"}, {"kind": "gru4rec"}],
    ids=lambda model: "-".join(map(str, model.values())),
)
@given(names=st.permutations(list("abcdefg")), n_known=st.integers(1, 7), n_new=st.integers(0, 3))
@settings(max_examples=10)
def test_rows_are_transferred_by_id(model: dict[str, Any], names: list[str], n_known: int, n_new: int) -> None:
    before, now = vocabulary(list("abcdefg")), vocabulary(["new1", *names[:n_known], "new2", "new3"][: n_known + n_new])
    old, new, fresh = random_model(before, 1, **model), random_model(now, 2, **model), random_model(now, 2, **model)
    transfer_weights(old, new, before=before, now=now)
    for name, weight in new.state_dict().items():
        old_weight, initial = old.state_dict()[name], fresh.state_dict()[name]
        if name not in ("items.into", "items.out", "items.bias"):
            assert torch.equal(weight, old_weight), name
            continue
        for number, identifier in enumerate(now.table["id"], start=1):
            row = before.numbers([identifier], unknown="zero")[0]
            assert torch.equal(weight[number], old_weight[row] if row else initial[number])
        assert not weight[0].any()
    history = [name for name in "gacab" if name in now.table["id"]]
    if history:
        new_scores, old_scores = scores(new, now, history), scores(old, before, history)
        for name in set(new_scores) & set(old_scores):
            assert new_scores[name] == pytest.approx(old_scores[name], rel=1e-4, abs=1e-4)


def test_categories_are_transferred_by_name() -> None:
    before = vocabulary(["a", "b", "c"], colour=["red", "blue", None])
    now = vocabulary(["x", "c", "a", "y"], colour=["green", None, "blue", "red"])  # a has another colour now
    old, new, fresh = (
        random_model(catalogue, seed, kind="sasrec", items="categories", items__column="colour")
        for catalogue, seed in ((before, 1), (now, 2), (now, 2))
    )
    transfer_weights(old, new, before=before, now=now, category="colour")
    vectors, old_vectors, initial = (each.items.output()[1:] for each in (new, old, fresh))
    assert torch.equal(vectors[1:], old_vectors[[2, 1, 0]])
    assert torch.equal(vectors[0], initial[0])


def test_kinds_are_transferred_by_name() -> None:
    before, now = vocabulary(["a", "b"]), vocabulary(["b", "a"])
    model: dict[str, Any] = {"kind": "pinnerformer", "inputs": "events"}
    old = random_model(before, 1, ("buy", "view"), **model)
    new = random_model(now, 2, ("", "view", "save", "buy"), **model)
    transfer_weights(old, new, before=before, now=now)
    for old_kinds, new_kinds in (
        ([0, 1, 2], [3, 1, 4]),
        ([2, 2, 0], [4, 4, 3]),
    ):  # the number after the last is an unknown kind
        new_scores, old_scores = (
            scores(new, now, ["a", "b", "a"], new_kinds),
            scores(old, before, ["a", "b", "a"], old_kinds),
        )
        assert new_scores == {name: pytest.approx(score, abs=1e-5) for name, score in old_scores.items()}
    without = random_model(now, 2, **model)
    with pytest.raises(InputError, match="kinds of events"):
        transfer_weights(old, without, before=before, now=now)


@pytest.mark.parametrize("items", ["vectors", "ids+vectors"])
def test_content_is_encoded_as_before(items: str) -> None:
    """Words have the vectors of the old model; weights of ids transfer by id."""
    titles = ["red tea", "green tea", "red cup", "blue cup", "tea pot"]
    before = vocabulary(list("abcde"), title=titles)
    now = vocabulary(list("xeca"), title=["green tea pot", titles[4], titles[2], titles[0]])
    model: dict[str, Any] = {
        "kind": "sasrec",
        "items": items,
        "items__texts": ["title"],
        "items__text_encoder__width": 3,
    }
    old = random_model(before, 1, **model)
    assert isinstance(old.items, ContentTable)
    shape = model_settings(**{**SMALL, **model})
    facts = shape.items.facts(now, DataFacts(texts=old.items.texts))
    new = build_model(shape, len(now), generator=torch.Generator().manual_seed(2), facts=facts).eval()
    transfer_weights(old, new, before=before, now=now)
    assert torch.allclose(new.item_vectors()[2:], old.item_vectors()[[5, 3, 1]], atol=1e-6)
    new_scores, old_scores = scores(new, now, ["a", "e"]), scores(old, before, ["a", "e"])
    assert {name: new_scores[name] for name in "eca"} == {
        name: pytest.approx(old_scores[name], abs=1e-4) for name in "eca"
    }
    assert new.item_vectors()[1].any(), "the new item is known by its words"
    other_shape = model_settings(**{**SMALL, **model, "items__text_encoder__width": 4})
    wider = build_model(other_shape, len(now), generator=torch.Generator(), facts=other_shape.items.facts(now))
    with pytest.raises(InputError, match="features of each item"):
        transfer_weights(old, wider, before=before, now=now)


LOG = Log.of(cycle())
RECIPE = recipe_of(epochs=6, patience=6, averaging=0.0)


@pytest.fixture(name="yesterday", scope="module")
def trained_yesterday(tmp_path_factory: pytest.TempPathFactory) -> tuple[SequenceModel, float, Path]:
    folder = tmp_path_factory.mktemp("yesterday")
    model, progress = LOG.train(RECIPE, folder)
    return model, progress.best_score, folder


def renumbered() -> tuple[Log, Vocabulary, Vocabulary]:
    """The same log with other item numbers: vocabularies before and after, with the same ids."""
    new_numbers = np.concatenate(([0], 1 + np.random.default_rng(3).permutation(N_ITEMS)))  # old number → new number
    numbers = LOG.sequences
    renumbered_log = Sequences(
        offsets=numbers.offsets, items=new_numbers[numbers.items].astype(np.int32), times=numbers.times
    )
    before = vocabulary([str(number) for number in range(1, N_ITEMS + 1)])
    names = {int(new_number): str(number) for number, new_number in enumerate(new_numbers)}
    return Log.of(renumbered_log), before, vocabulary([names[number] for number in range(1, N_ITEMS + 1)])


def warm_start_in(model: SequenceModel, folder: Path, out: Path, *, all_events: bool = False) -> Log:
    log, before, now = renumbered()
    write_warm_start(
        model,
        folder,
        all_events=all_events,
        setup=RECIPE,
        facts=DataFacts(),
        before=before,
        now=now,
        trained=log.counts > 0,
        out=out,
    )
    return log


def train_from(recipe: TrainingSetup, log: Log, folder: Path) -> tuple[SequenceModel, TrainingRecord]:
    """Train from the initial weights in a folder."""
    return choose_epoch(recipe, log.whole, seen="kept", folder=folder, warm_start=folder / WARM_START)


def test_the_first_validation_is_that_of_the_old_model(
    yesterday: tuple[SequenceModel, float, Path], tmp_path: Path
) -> None:
    model, score, folder = yesterday
    log = warm_start_in(model, folder, tmp_path)
    _, progress = train_from(RECIPE, log, tmp_path)
    assert progress.history[0] == {"epoch": 0, "ndcg@10": pytest.approx(score), "hit@10": progress.history[0]["hit@10"]}
    assert [line["epoch"] for line in progress.history] == list(range(7))
    scratch, _ = LOG.train(RECIPE, tmp_path / "scratch")
    assert same_weights(weights_of(scratch), weights_of(model)), "training without a warm start is unchanged"


def test_the_old_model_is_validated_by_days_if_epochs_are(
    yesterday: tuple[SequenceModel, float, Path], tmp_path: Path
) -> None:
    model, _, folder = yesterday
    log = warm_start_in(model, folder, tmp_path)
    times = np.asarray(log.sequences.times)
    boundaries = int(np.quantile(times, 0.6)), int(np.quantile(times, 0.8))
    time_split = split_time(log.sequences, valid_from=boundaries[0], test_from=boundaries[1])
    by_days = msgspec.structs.replace(RECIPE.evaluate, days=36_500)
    recipe = replace(RECIPE, evaluate=by_days, train=msgspec.structs.replace(RECIPE.train, epochs=1))
    _, progress = train_from(recipe, replace(log, whole=replace(log.whole, split=time_split)), tmp_path)
    assert progress.history[0]["epoch"] == 0
    assert progress.best_score == max(line["recall@10"] for line in progress.history)


def test_fewer_epochs_reach_the_score(yesterday: tuple[SequenceModel, float, Path], tmp_path: Path) -> None:
    model, score, folder = yesterday
    log = warm_start_in(model, folder, tmp_path)
    short = recipe_of(epochs=2, averaging=0.0)
    _, warm = train_from(short, log, tmp_path)
    _, scratch = log.train(short, tmp_path / "scratch")
    assert warm.best_score >= score > scratch.best_score


def test_what_no_epoch_improves_is_the_result(yesterday: tuple[SequenceModel, float, Path], tmp_path: Path) -> None:
    model, score, folder = yesterday
    log = warm_start_in(model, folder, tmp_path)
    recipe = recipe_of(epochs=2, learning_rate=3.0, averaging=0.0)
    result, progress = train_from(recipe, log, tmp_path)
    assert progress.best_epoch == 0
    assert progress.best_score == pytest.approx(score)
    weights = weights_of(result)
    fill_model(result, tmp_path / WARM_START)
    assert same_weights(weights, weights_of(result))


def test_a_warm_start_of_a_run_on_every_event_is_validated_on_unseen_events(
    yesterday: tuple[SequenceModel, float, Path], tmp_path: Path
) -> None:
    """Training with validation starts from the validated weights, training on every event from the served ones."""
    _, score, folder = yesterday
    (tmp_path / "all").mkdir()
    served, _ = train_for(
        RECIPE,
        LOG.sequences,
        LOG.sequences.offsets[1:],
        N_ITEMS,
        epochs=1,
        state_file=tmp_path / "all" / STATE_ALL,
    )
    assert (folder / STATE).exists()
    log = warm_start_in(served, folder, tmp_path, all_events=True)
    _, progress = train_from(recipe_of(epochs=1), log, tmp_path)
    assert progress.history[0]["ndcg@10"] == pytest.approx(score)
    _, before, now = renumbered()
    filled = build_model(RECIPE.model, N_ITEMS, generator=torch.Generator())
    fill_model(filled, tmp_path / WARM_START_ALL)
    rows = before.numbers(now.table["id"].to_list(), unknown="error")
    assert torch.equal(filled.items.output()[1:], served.items.output()[rows])


def test_another_catalogue_is_refused(yesterday: tuple[SequenceModel, float, Path], tmp_path: Path) -> None:
    model, _, folder = yesterday
    _, before, _ = renumbered()
    with pytest.raises(InputError, match="no weights can be transferred"):
        write_warm_start(
            model,
            folder,
            all_events=False,
            setup=RECIPE,
            facts=DataFacts(),
            before=before,
            now=vocabulary(["x", "y"]),
            trained=np.ones(3, dtype=bool),
            out=tmp_path,
        )
