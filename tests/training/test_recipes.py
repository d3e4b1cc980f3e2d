"""The recipes: their settings, refused combinations, causality, and that each learns a planted cycle."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from cycle_logs import Log, sequences_of
from settings_tables import BIDIRECTIONAL, BUILDERS, CONTINUING, UNPLACED

from segue.config.recipes import read_recipe, recipe_names
from segue.config.settings import Settings, make_settings, settings_toml
from segue.data.batch import Batch
from segue.data.vocabulary import Vocabulary
from segue.errors import SettingsError
from segue.evaluation.baselines.popularity import Popularity
from segue.evaluation.evaluator import Evaluator, ModelScorer, Scorer
from segue.evaluation.split_log import SplitLog
from segue.kinds import kind_of, parse_toml
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.sequence import SequenceModel
from segue.objective.objective import Objective
from segue.training.train import TrainingSetup

RECIPES = (
    "bert4rec",
    "caser",
    "default",
    "esasrec",
    "gru4rec",
    "gru4rec-bprmax",
    "gsasrec",
    "hstu",
    "hstu-large",
    "hstu-mol",
    "narm",
    "nextitnet",
    "pinnerformer",
    "pinnerformer-paper",
    "sasrec",
    "sasrec-bce",
    "sasrec-content",
    "sasrec-meta",
    "sasrec-rss",
    "sasrec-sampled",
    "seq2seq",
    "transformer",
)

TASKS = ("next-item", "masked-item", "recency", "continuation")

every_recipe = pytest.mark.parametrize("name", RECIPES)


def recipe_settings(name: str, *overrides: str) -> Settings:
    return make_settings(read_recipe(name), overrides)


# --- settings -----------------------------------------------------------------------------------------------------


def test_the_names_of_all_recipes() -> None:
    assert tuple(recipe_names()) == RECIPES


@every_recipe
def test_a_recipe_names_its_paper_and_its_scores(name: str) -> None:
    about = recipe_settings(name).about
    assert re.search(r"\b(19|20)\d\d\b", about.paper), "authors, title, venue and year"
    assert about.summary.endswith(".") and about.scored


@every_recipe
def test_the_settings_of_a_run_are_read_as_they_were_written(name: str) -> None:
    """Every key is written, also keys of other losses."""
    settings = recipe_settings(name)
    assert make_settings(parse_toml(settings_toml(settings).encode(), name)) == settings


@pytest.mark.parametrize(
    ("name", "builder", "task", "loss", "negatives", "shared"),
    [
        ("sasrec-bce", "sasrec", "next-item", "bce", 1, False),
        ("sasrec-content", "sasrec", "next-item", "softmax", 0, True),
        ("sasrec", "sasrec", "next-item", "softmax", 0, True),
        ("sasrec-sampled", "sasrec", "next-item", "sampled-softmax", 3000, True),
        ("gsasrec", "sasrec", "next-item", "gbce", 1024, True),
        ("esasrec", "esasrec", "next-item", "softmax", 0, True),
        ("bert4rec", "bert4rec", "masked-item", "softmax", 0, True),
        ("sasrec-rss", "sasrec", "recency", "softmax", 0, True),
        ("sasrec-meta", "sasrec-meta", "next-item", "sampled-softmax", 128, False),
        ("transformer", "transformer", "next-item", "softmax", 0, True),
        ("hstu", "hstu", "next-item", "softmax", 0, True),
        ("hstu-large", "hstu", "next-item", "softmax", 0, True),
        ("seq2seq", "seq2seq", "continuation", "softmax", 0, True),
        ("hstu-mol", "hstu", "next-item", "sampled-softmax", 32, True),
        ("gru4rec", "gru4rec", "next-item", "softmax", 0, True),
        ("gru4rec-bprmax", "gru4rec", "next-item", "bpr-max", 2048, True),
        ("narm", "narm", "next-item", "softmax", 0, True),
        ("caser", "caser", "next-item", "softmax", 0, True),
        ("nextitnet", "nextitnet", "next-item", "softmax", 0, True),
        ("pinnerformer", "pinnerformer", "dense-all-action", "sampled-softmax", 1024, True),
        ("pinnerformer-paper", "pinnerformer", "dense-all-action", "sampled-softmax", 13_192, True),
    ],
)
def test_a_recipe_has_the_model_task_and_loss_of_its_paper(
    name: str, builder: str, task: str, loss: str, negatives: int, shared: bool
) -> None:
    model, objective = recipe_settings(name).model, recipe_settings(name).objective
    kinds = (
        *map(kind_of, (model, objective.task, objective.loss)),
        objective.negatives,
        getattr(objective.sampler, "shared", True),
    )
    assert kinds == (builder, task, loss, negatives, shared)


# --- impossible pairs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("builder", "task"), list(product(BUILDERS, TASKS)))
def test_an_encoder_that_does_not_fit_the_task_is_refused(builder: str, task: str) -> None:
    overrides = (f"model={builder}", f"objective.task={task}")
    if (builder in BIDIRECTIONAL, builder in CONTINUING) == (task == "masked-item", task == "continuation"):
        assert kind_of(recipe_settings("sasrec", *overrides).objective.task) == task
        return
    with pytest.raises(SettingsError) as error:
        recipe_settings("sasrec", *overrides)
    words = (f"model = '{builder}'", f"'{task}'", "choose", "objective.task", "or another")
    assert all(word in str(error.value) for word in words), str(error.value)


SAMPLED = ("objective.sampler=uniform", "objective.sampler.negatives=9")
PLANNED = ("model=seq2seq", "objective.task=continuation")
MASKED = ("model=bert4rec", "objective.task=masked-item")
CORRECTED = ("objective.loss=sampled-softmax", "objective.sampler=mixed")


def key_of(override: str) -> str:
    return repr(override.partition("=")[0])


# A recipe, its overrides, words of the error, and overrides that fix it.
IMPOSSIBLE: list[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = [
    *(
        (
            "sasrec",
            (f"objective.loss={loss}",),
            (f"'{loss}' needs", "objective.sampler", "uniform, popularity"),
            SAMPLED,
        )
        for loss in ("sampled-softmax", "bce", "gbce", "bpr", "bpr-max", "top1", "top1-max")
    ),
    ("sasrec-sampled", ("objective.sampler=none",), ("choose objective.sampler", "uniform", "mixed"), SAMPLED),
    ("sasrec-sampled", ("objective.loss=softmax",), ("objective.sampler to 'none'",), ("objective.sampler=none",)),
    ("sasrec", ("objective.sampler=uniform",), ("objective.sampler to 'none'", "bpr"), ("objective.loss=bpr",)),
    *(
        (
            "hstu-mol",
            (f"objective.loss={loss}", "objective.sampler=none"),
            (f"'{loss}'", "'mol'", "choose"),
            ("model.similarity=dot",),
        )
        for loss in ("softmax", "sce")
    ),
    ("sasrec", ("index=two-stage",), ("'two-stage'", "'mol'", "choose"), ("index=auto",)),
    ("sasrec", ("index=codes",), ("'codes'", "model.items", "choose"), ("model.items=codes",)),
    ("hstu-mol", ("index=approximate",), ("'approximate'", "'dot'", "choose"), ("index=two-stage",)),
    ("gsasrec", ("objective.loss=sce",), ("objective.sampler to 'none'",), ("objective.sampler=none",)),
    ("sasrec", ("objective.loss=lambdarank",), ("'lambdarank'", "'recency'"), ("objective.task=recency",)),
    ("bert4rec", ("objective.loss=lambdarank",), ("'recency'", "'masked-item'"), ("objective.loss=softmax",)),
    *(
        (
            "sasrec",
            (f"objective.loss.{key}",),
            (key_of(key), "'softmax'"),
            (f"objective.loss={loss}", *SAMPLED),
        )
        for key, loss in (("calibration=0.5", "gbce"), ("offset=-1", "gbce"), ("regularisation=1", "bpr-max"))
    ),
    (
        "sasrec-bce",
        ("objective.loss.log_q=false",),
        ("'log_q'", "'bce'"),
        ("objective.loss=sampled-softmax", "objective.sampler=mixed"),
    ),
    *(
        (
            "sasrec-sampled",
            ("objective.loss.log_q=false", f"objective.sampler={sampler}"),
            ("objective.loss.log_q", sampler),
            cure,
        )
        for sampler, cure in (
            ("uniform", ("objective.sampler=mixed",)),
            ("in-batch", ("objective.sampler=popularity",)),
        )
    ),
    ("sasrec-sampled", ("objective.sampler.power=0.5",), ("'power'", "'uniform'"), ("objective.sampler=popularity",)),
    ("sasrec-sampled", ("objective.sampler.in_batch=0.2",), ("'in_batch'", "'uniform'"), ("objective.sampler=mixed",)),
    ("sasrec", ("objective.sampler.shared=false",), ("'shared'", "'none'"), ("objective.loss=bce", *SAMPLED)),
    *(
        ("sasrec", (f"objective.task.{key}",), (key_of(key), "'next-item'"), MASKED)
        for key in ("share=0.5", "most=3", "last=1.0")
    ),
    *(
        (
            "sasrec",
            (f"objective.task.{key}",),
            (key_of(key), "'next-item'"),
            ("objective.task=recency",),
        )
        for key in ("importance=linear", "share=0.5", "cuts=4")
    ),
    ("sasrec", ("objective.task.items=3",), ("'items'", "'next-item'"), PLANNED),
    ("sasrec", PLANNED[:1], ("'seq2seq'", "objective.task = 'continuation'"), PLANNED[1:]),
    ("sasrec", PLANNED[1:], ("'continuation'", "model = 'seq2seq'"), PLANNED[:1]),
    ("seq2seq", ("objective.loss=lambdarank",), ("'recency'", "'continuation'"), ("objective.loss=softmax",)),
    ("seq2seq", ("objective.temperature=0.5",), ("objective.temperature at 1", "0.5"), ("objective.temperature=1",)),
    ("seq2seq", ("model.similarity=cosine",), ("'continuation'", "cosine"), ("model.similarity=dot",)),
    ("sasrec", ("model.body=gru",), ("'body'", "'sasrec'"), PLANNED),
    *(
        (
            "seq2seq",
            ("model.body=gru", f"model.body.{key}"),
            (key_of(key), "'gru'"),
            ("model.body=transformer",),
        )
        for key in ("heads=2", "feed_forward=2", "positions=oldest")
    ),
    (
        "sasrec-rss",
        ("objective.task.importance=linear", "objective.task.importance.alpha=0.5"),
        ("'alpha'", "'linear'"),
        ("objective.task.importance=exponential",),
    ),
]


NAMES = [f"{name} with {' '.join(overrides)}" for name, overrides, _, _ in IMPOSSIBLE]


@pytest.mark.parametrize(("name", "overrides", "words", "cure"), IMPOSSIBLE, ids=NAMES)
def test_an_impossible_pair_is_refused_with_the_settings_to_change(
    name: str, overrides: tuple[str, ...], words: tuple[str, ...], cure: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError) as error:
        recipe_settings(name, *overrides)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert str(error.value).endswith(".")
    recipe_settings(name, *overrides, *cure)


@pytest.mark.parametrize(
    ("kind", "key", "values"),
    [
        ("objective.sampler=mixed", "sampler.negatives", ("-1", "0")),
        ("objective.sampler=mixed", "sampler.in_batch", ("0", "1")),
        ("objective.loss=softmax", "temperature", ("0", "-1")),
        ("objective.loss=gbce", "loss.calibration", ("-0.1", "1.1")),
        ("objective.loss=bpr-max", "loss.regularisation", ("-1",)),
        ("objective.task=masked-item", "task.share", ("0", "1")),
        ("objective.task=masked-item", "task.most", ("0", "-3")),
        ("objective.task=masked-item", "task.last", ("-0.1", "1.1")),
        ("objective.task=recency", "task.importance.alpha", ("0", "1.1")),
        ("objective.task=recency", "task.share", ("0", "1")),
        ("objective.task=recency", "task.cuts", ("0",)),
        ("objective.task=continuation", "task.items", ("0", "-1")),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(kind: str, key: str, values: tuple[str, ...]) -> None:
    for value in values:
        with pytest.raises(SettingsError, match=rf"objective\.{key}: expected .*, got {value}"):
            recipe_settings("sasrec", kind, f"objective.{key}={value}")


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_number_that_is_not_finite_is_refused_by_name(value: str) -> None:
    with pytest.raises(SettingsError, match=rf"objective\.temperature: expected .*, got {value}"):
        recipe_settings("sasrec", f"objective.temperature={value}")


@pytest.mark.parametrize("stride", ["-0.1", "1.5"])
def test_windows_with_gaps_between_them_are_refused(stride: str) -> None:
    with pytest.raises(SettingsError, match=rf"train\.stride: expected a number .*, got {stride}"):
        recipe_settings("sasrec", f"train.stride={stride}")


# --- visible items ------------------------------------------------------------------------------------------------

LENGTH, MANY_ITEMS = 16, 48
SMALL = ("model.width=8", "model.depth=2", f"model.length={LENGTH}", "model.dropout=0")


def fewer_negatives(name: str) -> tuple[str, ...]:
    return ("objective.sampler.negatives=8",) if recipe_settings(name).objective.negatives > 8 else ()


def small_feed_forward(name: str) -> tuple[str, ...]:
    kind = kind_of(recipe_settings(name).model)
    if kind == "seq2seq":
        return ("model.body.feed_forward=1",)
    return () if kind in {"hstu"} | UNPLACED else ("model.feed_forward=1",)


def model_and_objective(name: str) -> tuple[SequenceModel, Objective]:
    settings = recipe_settings(name, *SMALL, *small_feed_forward(name), *fewer_negatives(name))
    facts = settings.model.items.facts(catalogue_of(MANY_ITEMS))
    model = build_model(settings.model, MANY_ITEMS, generator=torch.Generator().manual_seed(1), facts=facts).eval()
    return model, Objective(settings.objective, np.r_[0, np.ones(MANY_ITEMS, dtype=np.int64)], length=model.length)


def catalogue_of(n_items: int) -> Vocabulary:
    """A catalogue whose titles share words."""
    titles = [f"number {number % 7} of row {number // 7}" for number in range(n_items)]
    return Vocabulary(pl.DataFrame({"id": [str(number) for number in range(n_items)], "count": 1, "title": titles}))


def long_users(count: int, length: int) -> Batch:
    """Users without repeated items."""
    rng = np.random.default_rng(0)
    items = np.concatenate([rng.permutation(MANY_ITEMS)[:length] + 1 for _ in range(count)])
    return Batch(items=items, times=np.arange(count * length), lengths=np.full(count, length))


def is_bidirectional(name: str) -> bool:
    return kind_of(recipe_settings(name).model) in BIDIRECTIONAL


@every_recipe
def test_no_state_has_a_visible_target(name: str) -> None:
    """A causal state sees its user's tokens up to itself, a bidirectional one all of its user's tokens."""
    (model, objective), bidirectional = model_and_objective(name), is_bidirectional(name)
    examples = objective.examples(long_users(40, model.length + objective.extra), np.random.default_rng(0))
    inputs = examples.inputs
    assert inputs.lengths.max() <= LENGTH and len(examples.targets) >= 40
    ends = np.cumsum(inputs.lengths)
    positions = np.arange(len(inputs.items)) if examples.positions is None else examples.positions
    for position, target in zip(positions.tolist(), examples.targets.tolist(), strict=True):
        user = np.searchsorted(ends, position, side="right")
        visible = inputs.items[ends[user] - inputs.lengths[user] : ends[user] if bidirectional else position + 1]
        assert len(visible) and target not in visible


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "seq2seq"])  # it has one state per history
def test_only_bidirectional_models_see_the_future(name: str) -> None:
    model, _ = model_and_objective(name)
    user = long_users(1, LENGTH)
    other = Batch(items=user.items.copy(), times=user.times, lengths=user.lengths)
    middle = LENGTH // 2
    other.items[middle] = other.items[middle] % MANY_ITEMS + 1
    differs = (model.encode(tensors(user)) != model.encode(tensors(other))).any(1)
    assert differs[middle:].all()
    assert differs[:middle].all() if is_bidirectional(name) else not differs[:middle].any()


@pytest.mark.parametrize("name", [name for name in RECIPES if kind_of(recipe_settings(name).model) not in UNPLACED])
def test_the_last_position_is_trained(name: str) -> None:
    """Otherwise the answer to a long history depends on a position embedding without training."""
    model, objective = model_and_objective(name)
    examples = objective.examples(long_users(200, model.length + objective.extra), np.random.default_rng(0))
    packed, rows = tensors(examples.inputs), slice(None) if examples.positions is None else examples.positions
    from_newest = model.positions.counted_from == "newest"
    positions = (packed.position_from_newest if from_newest else packed.position)[rows]
    assert (0 if from_newest else LENGTH - 1) in positions.tolist()


# --- learning -----------------------------------------------------------------------------------------------------

N_ITEMS = 16
QUICK = (
    "model.width=32",
    "model.depth=1",
    "model.length=8",
    "model.dropout=0",
    "train.patience=100",
    "train.tokens=100",
    "train.learning_rate=1e-2",
    "train.averaging=0.9",
    "train.warmup=5",
    "train.threads=1",
)
A_SECOND = "objective.task.days=1.2e-5"  # events are one second apart: the window has one
NEEDS = {
    "bert4rec": ("train.epochs=25", "objective.task.share=0.4", "objective.task.last=1.0"),
    "gru4rec": ("train.epochs=7", "model.state_width=0"),
    "gru4rec-bprmax": ("train.epochs=7", "model.state_width=0"),
    "gsasrec": ("train.epochs=14",),
    "pinnerformer": ("train.epochs=12", A_SECOND),
    "pinnerformer-paper": ("train.epochs=14", "model.output.item_width=16", "model.heads=2", A_SECOND),
    "sasrec-rss": (
        "train.epochs=14",
        "model.width=16",
        "objective.task.cuts=2",
    ),  # more would remove most of such short histories
}
"""More epochs for fewer targets per epoch or a slower loss."""


@cache
def planted_log() -> Log:
    """Each user starts at a random item and follows the cycle for five to twelve events, without repeats."""
    rng = np.random.default_rng(0)
    walks = zip(rng.integers(0, N_ITEMS, 80), rng.integers(5, 13, 80), strict=True)
    return Log.of(
        sequences_of(
            *([(first_item + position) % N_ITEMS + 1 for position in range(length)] for first_item, length in walks)
        ),
        N_ITEMS,
    )


def hit_at_1(scorer: Scorer) -> float:
    """hit@1 on the test part, among items not seen."""
    log = planted_log()
    ranks = Evaluator(sequences=log.sequences, counts=log.counts, seen="excluded").ranks(
        scorer, log.split.cases("test")
    )
    assert len(ranks) == 80
    return float((ranks == 1).mean())


@every_recipe
def test_a_recipe_learns_the_planted_cycle(name: str, tmp_path: Path) -> None:
    """With histories longer than the window, and the recipe's own validation."""
    settings = recipe_settings(name, *QUICK, *fewer_negatives(name), *NEEDS.get(name, ("train.epochs=7",)))
    recipe = TrainingSetup(
        model=settings.model, objective=settings.objective, train=settings.train, evaluate=settings.evaluate
    )
    facts = settings.model.items.facts(catalogue_of(N_ITEMS))
    model, _ = planted_log().train_until_perfect(recipe, tmp_path, seen="excluded", facts=facts)
    popularity = hit_at_1(Popularity.fit(SplitLog(planted_log().sequences, planted_log().split, N_ITEMS)))
    assert popularity < 0.3
    assert hit_at_1(ModelScorer(model)) > 0.8
