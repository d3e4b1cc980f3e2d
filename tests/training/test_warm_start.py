"""Yesterday's model on today's log: what was learned of an item stays that item's, wherever its number went."""

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


def built(known: Vocabulary, seed: int, kinds: tuple[str, ...] = (), **model: Any) -> SequenceModel:
    """A model with every weight drawn, biases too."""
    shape = model_settings(**{**SMALL, **model})
    made = build_model(
        shape,
        len(known),
        generator=torch.Generator().manual_seed(seed),
        facts=shape.items.facts(known, DataFacts(kinds=kinds)),
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator))
    made.items.clear_padding()
    return made


def scores(model: SequenceModel, known: Vocabulary, history: list[str], kinds: list[int] | None = None) -> Any:
    """item id → its score after a history of ids."""
    numbers = known.numbers(history, unknown="error")
    batch = Batch(
        items=numbers,
        times=np.arange(len(numbers)) + 1,
        lengths=np.array([len(numbers)]),
        kinds=None if kinds is None else np.array(kinds),
    )
    with torch.no_grad():
        row = model.score_all(model.query(tensors(batch)))[0, 1:]
    return dict(zip(known.table["id"], row.tolist(), strict=True))


@pytest.mark.parametrize(
    "model",
    [{"kind": "sasrec"}, {"kind": "esasrec", "items__tied": False}, {"kind": "bert4rec"}, {"kind": "gru4rec"}],
    ids=lambda model: "-".join(map(str, model.values())),
)
@given(names=st.permutations(list("abcdefg")), kept=st.integers(1, 7), more=st.integers(0, 3))
@settings(max_examples=10)
def test_rows_are_carried_over_by_id(model: dict[str, Any], names: list[str], kept: int, more: int) -> None:
    before, now = vocabulary(list("abcdefg")), vocabulary(["new1", *names[:kept], "new2", "new3"][: kept + more])
    old, new, fresh = built(before, 1, **model), built(now, 2, **model), built(now, 2, **model)
    transfer_weights(old, new, before=before, now=now)
    for name, weight in new.state_dict().items():
        was, start = old.state_dict()[name], fresh.state_dict()[name]
        if name not in ("items.into", "items.out", "items.bias"):
            assert torch.equal(weight, was), name
            continue
        for number, identifier in enumerate(now.table["id"], start=1):
            row = before.numbers([identifier], unknown="zero")[0]
            assert torch.equal(weight[number], was[row] if row else start[number])
        assert not weight[0].any()
    history = [name for name in "gacab" if name in now.table["id"]]
    if history:
        own, theirs = scores(new, now, history), scores(old, before, history)
        for name in set(own) & set(theirs):
            assert own[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-4)


def test_categories_are_carried_over_by_name() -> None:
    before = vocabulary(["a", "b", "c"], colour=["red", "blue", None])
    now = vocabulary(["x", "c", "a", "y"], colour=["green", None, "blue", "red"])  # a has another colour now
    old, new, fresh = (
        built(known, seed, kind="sasrec", items="categories", items__column="colour")
        for known, seed in ((before, 1), (now, 2), (now, 2))
    )
    transfer_weights(old, new, before=before, now=now, category="colour")
    vectors, were, start = (each.items.output()[1:] for each in (new, old, fresh))
    assert torch.equal(vectors[1:], were[[2, 1, 0]])
    assert torch.equal(vectors[0], start[0])


def test_kinds_are_carried_over_by_name() -> None:
    before, now = vocabulary(["a", "b"]), vocabulary(["b", "a"])
    model: dict[str, Any] = {"kind": "pinnerformer", "inputs": "events"}
    old = built(before, 1, ("buy", "view"), **model)
    new = built(now, 2, ("", "view", "save", "buy"), **model)
    transfer_weights(old, new, before=before, now=now)
    for was, is_now in (([0, 1, 2], [3, 1, 4]), ([2, 2, 0], [4, 4, 3])):  # the number after the last is an unknown kind
        own, theirs = scores(new, now, ["a", "b", "a"], is_now), scores(old, before, ["a", "b", "a"], was)
        assert own == {name: pytest.approx(score, abs=1e-5) for name, score in theirs.items()}
    without = built(now, 2, **model)
    with pytest.raises(InputError, match="kinds of events"):
        transfer_weights(old, without, before=before, now=now)


@pytest.mark.parametrize("items", ["vectors", "ids+vectors"])
def test_content_is_read_as_it_was(items: str) -> None:
    """Words become the vectors that the old model knows; what was learned of ids goes by id."""
    titles = ["red tea", "green tea", "red cup", "blue cup", "tea pot"]
    before = vocabulary(list("abcde"), title=titles)
    now = vocabulary(list("xeca"), title=["green tea pot", titles[4], titles[2], titles[0]])
    model: dict[str, Any] = {
        "kind": "sasrec",
        "items": items,
        "items__texts": ["title"],
        "items__text_encoder__width": 3,
    }
    old = built(before, 1, **model)
    assert isinstance(old.items, ContentTable)
    shape = model_settings(**{**SMALL, **model})
    facts = shape.items.facts(now, DataFacts(texts=old.items.texts))
    new = build_model(shape, len(now), generator=torch.Generator().manual_seed(2), facts=facts).eval()
    transfer_weights(old, new, before=before, now=now)
    assert torch.allclose(new.item_vectors()[2:], old.item_vectors()[[5, 3, 1]], atol=1e-6)
    own, theirs = scores(new, now, ["a", "e"]), scores(old, before, ["a", "e"])
    assert {name: own[name] for name in "eca"} == {name: pytest.approx(theirs[name], abs=1e-4) for name in "eca"}
    assert new.item_vectors()[1].any(), "the new item is known by its words"
    more = model_settings(**{**SMALL, **model, "items__text_encoder__width": 4})
    wider = build_model(more, len(now), generator=torch.Generator(), facts=more.items.facts(now))
    with pytest.raises(InputError, match="features of each item"):
        transfer_weights(old, wider, before=before, now=now)


LOG = Log.of(cycle())
RECIPE = recipe_of(epochs=6, patience=6, averaging=0.0)


@pytest.fixture(name="yesterday", scope="module")
def trained_yesterday(tmp_path_factory: pytest.TempPathFactory) -> tuple[SequenceModel, float, Path]:
    folder = tmp_path_factory.mktemp("yesterday")
    model, progress = LOG.chosen(RECIPE, folder)
    return model, progress.best_score, folder


def renumbered() -> tuple[Log, Vocabulary, Vocabulary]:
    """The same log with other numbers: item n is called n before and after."""
    places = np.concatenate(([0], 1 + np.random.default_rng(3).permutation(N_ITEMS)))  # old number → new number
    numbers = LOG.sequences
    moved = Sequences(offsets=numbers.offsets, items=places[numbers.items].astype(np.int32), times=numbers.times)
    before = vocabulary([str(number) for number in range(1, N_ITEMS + 1)])
    names = {int(place): str(number) for number, place in enumerate(places)}
    return Log.of(moved), before, vocabulary([names[number] for number in range(1, N_ITEMS + 1)])


def started(model: SequenceModel, folder: Path, out: Path, *, all_events: bool = False) -> Log:
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


def gone_on(recipe: TrainingSetup, log: Log, folder: Path) -> tuple[SequenceModel, TrainingRecord]:
    """Training that begins with the weights in a folder."""
    return choose_epoch(recipe, log.whole, seen="kept", folder=folder, warm_start=folder / WARM_START)


def test_the_first_validation_is_that_of_the_old_model(
    yesterday: tuple[SequenceModel, float, Path], tmp_path: Path
) -> None:
    model, score, folder = yesterday
    log = started(model, folder, tmp_path)
    _, progress = gone_on(RECIPE, log, tmp_path)
    assert progress.history[0] == {"epoch": 0, "ndcg@10": pytest.approx(score), "hit@10": progress.history[0]["hit@10"]}
    assert [line["epoch"] for line in progress.history] == list(range(7))
    anew, _ = LOG.chosen(RECIPE, tmp_path / "anew")
    assert same_weights(weights_of(anew), weights_of(model)), "a new training is as it was"


def test_the_old_model_is_validated_by_days_if_epochs_are(
    yesterday: tuple[SequenceModel, float, Path], tmp_path: Path
) -> None:
    model, _, folder = yesterday
    log = started(model, folder, tmp_path)
    times = np.asarray(log.sequences.times)
    moments = int(np.quantile(times, 0.6)), int(np.quantile(times, 0.8))
    cut = split_time(log.sequences, valid_from=moments[0], test_from=moments[1])
    by_days = msgspec.structs.replace(RECIPE.evaluate, days=36_500)
    recipe = replace(RECIPE, evaluate=by_days, train=msgspec.structs.replace(RECIPE.train, epochs=1))
    _, progress = gone_on(recipe, replace(log, whole=replace(log.whole, split=cut)), tmp_path)
    assert progress.history[0]["epoch"] == 0
    assert progress.best_score == max(line["recall@10"] for line in progress.history)


def test_fewer_epochs_reach_the_score(yesterday: tuple[SequenceModel, float, Path], tmp_path: Path) -> None:
    model, score, folder = yesterday
    log = started(model, folder, tmp_path)
    short = recipe_of(epochs=2, averaging=0.0)
    _, gone = gone_on(short, log, tmp_path)
    _, anew = log.chosen(short, tmp_path / "anew")
    assert gone.best_score >= score > anew.best_score


def test_what_no_epoch_makes_better_is_kept(yesterday: tuple[SequenceModel, float, Path], tmp_path: Path) -> None:
    model, score, folder = yesterday
    log = started(model, folder, tmp_path)
    hopeless = recipe_of(epochs=2, learning_rate=3.0, averaging=0.0)
    kept, progress = gone_on(hopeless, log, tmp_path)
    assert progress.best_epoch == 0
    assert progress.best_score == pytest.approx(score)
    start = weights_of(kept)
    fill_model(kept, tmp_path / WARM_START)
    assert same_weights(start, weights_of(kept))


def test_a_run_of_every_event_is_validated_on_events_it_has_not_seen(
    yesterday: tuple[SequenceModel, float, Path], tmp_path: Path
) -> None:
    """Choosing goes on from the weights that chose, training on every event from those served."""
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
    log = started(served, folder, tmp_path, all_events=True)
    _, progress = gone_on(recipe_of(epochs=1), log, tmp_path)
    assert progress.history[0]["ndcg@10"] == pytest.approx(score)
    _, before, now = renumbered()
    carried = build_model(RECIPE.model, N_ITEMS, generator=torch.Generator())
    fill_model(carried, tmp_path / WARM_START_ALL)
    rows = before.numbers(now.table["id"].to_list(), unknown="error")
    assert torch.equal(carried.items.output()[1:], served.items.output()[rows])


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
