from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

import segue
from bench.__main__ import MAY_HAVE_DATA, MODULES, NEED_DATA
from bench.data.cut_logs import EVENTS, ITEMS, ML_1M, SHOP, prepared
from bench.quality import cold, window
from bench.quality.paired import averaged, difference, difference_of_losses, mean_interval, verdict
from bench.quality.results import select_trainings
from bench.quality.results_table import figure
from bench.tables import markdown, plain, write_section
from segue.config.recipes import read_recipe, recipe_names
from segue.config.settings import make_settings
from segue.data.batch import Batch
from segue.data.sequences import Sequences
from segue.data.split import split_time
from segue.errors import InputError
from segue.evaluation.metrics import Difference
from segue.evaluation.ranks import MISS
from segue.evaluation.settings import EvaluateSettings
from segue.evaluation.split_log import SplitLog
from segue.evaluation.window.evaluate import TargetWindow, WindowEvaluation, evaluate_window
from segue.folders import read_manifest
from segue.kinds import kind_of

USERS = np.arange(40)

# --- the arithmetic -------------------------------------------------------------------------------------------------


def test_seeds_are_averaged_before_users_are_resampled() -> None:
    """Seeds that disagree about every user but agree on the mean: the variance is zero."""
    odd = (USERS % 2).astype(float)
    mean = averaged([odd, 1 - odd])
    assert mean.tolist() == [0.5] * 40
    assert mean_interval(mean, USERS) == (0.5, 0.5)
    low, high = mean_interval(odd, USERS)
    assert low < 0.5 < high


def test_a_difference_is_paired() -> None:
    """Users differ by far more than the arms do, and every user has the same difference."""
    theirs = USERS / 10
    change = difference(theirs + 0.25, theirs, USERS)
    assert (change.value, change.low, change.high) == pytest.approx((0.25, 0.25, 0.25))
    assert change.p < 0.01


def test_a_difference_of_losses_by_hand() -> None:
    """One falls from 0.8 to 0.6, a quarter; the other from 0.5 to 0.25, a half: the loss is a quarter less."""
    many = np.ones(40)
    change = difference_of_losses((0.8 * many, 0.6 * many), (0.5 * many, 0.25 * many), USERS)
    assert (change.value, change.low, change.high) == pytest.approx((-0.25, -0.25, -0.25))
    rng = np.random.default_rng(1)
    first, second = rng.random(40), rng.random(40)
    same = difference_of_losses((first, second), (first, second), USERS)
    assert (same.value, same.low, same.high) == (0, 0, 0), "all four means use the same resampled users"
    opposite = difference_of_losses((first, second), (second, first), USERS)
    expected = (1 - second.mean() / first.mean()) - (1 - first.mean() / second.mean())
    assert opposite.value == pytest.approx(expected) and opposite.low < opposite.value < opposite.high


@pytest.mark.parametrize(
    ("low", "high", "more", "less"),
    [
        (0.01, 0.03, "as in the paper", "against the paper"),
        (-0.03, -0.01, "against the paper", "as in the paper"),
        (-0.01, 0.03, "undecided", "undecided"),
    ],
)
def test_verdicts(low: float, high: float, more: str, less: str) -> None:
    change = Difference((low + high) / 2, low, high, 0.5)
    assert verdict(change, paper="more") == more
    assert verdict(change, paper="less") == less


# --- trainings ------------------------------------------------------------------------------------------------------


def test_every_training_is_valid_and_has_its_own_name() -> None:
    known = {"sasrec", "pinnerformer"}
    trainings = [one for log in window.LOGS for one in window.trainings(log, window.ARMS, window.SEEDS)]
    trainings += [one for recipe in (cold.PLAIN, cold.CONTENT) for one in cold.trainings(recipe, window.SEEDS)]
    assert len(trainings) == 3 * 6 * 3 + 2 * 3 and len({one.name for one in trainings}) == len(trainings)
    for one in trainings:
        if one.row.recipe in recipe_names():
            settings = make_settings(read_recipe(one.row.recipe), one.overrides)
            assert settings.train.seed == one.seed
            assert settings.evaluate.days == (window.DAYS if one.row.recipe in known and "window" in one.name else 0)
    assert known <= set(recipe_names())


def test_arms_differ_only_in_the_tested_setting() -> None:
    arms = {one.row.name: make_settings(read_recipe(one.row.recipe), one.overrides) for one in _shop()}
    dense = arms["window-shop/dense"]
    assert tuple(map(kind_of, (dense.objective.task, dense.objective.sampler))) == (
        "dense-all-action",
        "targets+uniform",
    )
    for name, task, sampler in (
        ("all", "all-action", "targets+uniform"),
        ("next", "next-action", "targets+uniform"),
        ("answers", "dense-all-action", "targets"),
        ("uniform", "dense-all-action", "uniform"),
    ):
        arm = arms[f"window-shop/{name}"]
        assert tuple(map(kind_of, (arm.objective.task, arm.objective.sampler))) == (task, sampler)
        assert arm.objective.loss == dense.objective.loss and arm.objective.negatives == dense.objective.negatives
        assert (arm.model, arm.train, arm.evaluate) == (dense.model, dense.train, dense.evaluate)


def _shop() -> list[Any]:
    return window.trainings("shop", window.ARMS, [1])


def test_seen_items_stay_answers_in_the_shop() -> None:
    rules = [make_settings(read_recipe(one.row.recipe), one.overrides).evaluate.seen for one in _shop()]
    assert rules == ["keep"] * len(window.ARMS)


def test_one_training_can_be_selected_and_a_misspelt_one_is_refused(tmp_path: Path) -> None:
    trainings = window.trainings("shop", window.ARMS, [1, 2])
    assert select_trainings(trainings, None) == trainings and select_trainings(trainings, "none") == []
    assert [one.name for one in select_trainings(trainings, "dense")] == ["window-shop/dense-1", "window-shop/dense-2"]
    assert [one.name for one in select_trainings(trainings, "dense-2")] == ["window-shop/dense-2"]
    for main in (window.main, cold.main):
        with pytest.raises(InputError, match=r"There is no training 'dens'; there are .*-3, and none trains nothing"):
            main(["--data", str(tmp_path), "--cache", str(tmp_path), "--only", "dens"])


@pytest.mark.parametrize("subject", [window, cold])
def test_an_interrupted_bench_says_how_to_resume(
    subject: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subject, "prepared", interrupted)
    with pytest.raises(SystemExit) as ended:
        subject.main(["--data", str(tmp_path), "--cache", str(tmp_path)])
    assert ended.value.code == 130 and "the same command goes on" in capsys.readouterr().err


def test_every_claim_names_existing_arms() -> None:
    names = {arm.name for arm in window.ARMS}
    assert all({claim.ours, claim.theirs} <= names for claim in window.CLAIMS) and len(window.CLAIMS) == 6
    assert "window" in MAY_HAVE_DATA and "cold" in NEED_DATA and {"window", "cold"} <= set(MODULES)


def test_another_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ml-1m needs DATA=folder with events\.tsv\.gz and items\.tsv\.gz"):
        prepared(ML_1M, None, tmp_path)
    days = pl.datetime_range(pl.datetime(2000, 11, 1), pl.datetime(2001, 2, 28), "1d", eager=True).dt.epoch("s")
    log = pl.DataFrame({"user": ["u", "v"] * 60, "item": list("abcd") * 30, "ts": days})
    log.write_csv(tmp_path / EVENTS, separator="\t", compression="gzip")
    titles = pl.DataFrame({"item": list("abcd"), "title": list("ABCD")})
    titles.write_csv(tmp_path / ITEMS, separator="\t", compression="gzip")
    with pytest.raises(InputError, match="is not the log of ml-1m"):
        prepared(replace(ML_1M, cut="2001-01-20"), tmp_path, tmp_path / "cache")


# --- from runs to tables --------------------------------------------------------------------------------------------


class RandomScores:
    """Random scores by each history's last item, plus `weight` for the item that follows it."""

    def __init__(self, seed: int, weight: float) -> None:
        rng = np.random.default_rng(seed)
        self.table = torch.from_numpy(rng.random((16, 16)) + weight * np.roll(np.eye(16), 1, axis=1)).float()

    def scores(self, histories: Batch) -> Tensor:
        return self.table[torch.from_numpy(histories.items[np.cumsum(histories.lengths) - 1])]


def evaluated(seed: int, weight: float, ages: Sequence[float], *, baselines: bool = False) -> WindowEvaluation:
    """An evaluation on a log in which every user has an event every other day."""
    day, items = 86_400_000_000, (np.arange(30)[:, None] * 3 + np.arange(25)[None, :]) % 15 + 1
    log = Sequences(
        offsets=np.arange(31) * 25,
        items=items.ravel().astype(np.int32),
        times=np.tile(np.arange(25) * 2 * day, 30),
    )
    split, how = split_time(log, valid_from=24 * day, test_from=36 * day), EvaluateSettings(seen="keep", at=(10,))
    return evaluate_window(
        RandomScores(seed, weight), SplitLog(log, split, 15), TargetWindow(5, ages), settings=how, baselines=baselines
    )


@pytest.fixture(scope="module")
def evaluations() -> tuple[dict[str, window.Measurement], WindowEvaluation]:
    """Two arms of two seeds each, and the baselines."""
    arms = {
        name: window.Measurement(
            plain=[evaluated(seed, weight, (0,)) for seed in (1, 2)],
            aged=[evaluated(seed, weight, window.AGES) for seed in (1, 2)],
            minutes=1.25,
        )
        for name, weight in (("dense", 2.0), ("sasrec", 0.5))
    }
    return arms, evaluated(1, 1.0, (0,), baselines=True)


def test_an_arm_without_all_of_its_seeds_is_not_shown(tmp_path: Path, cycle_data: Path) -> None:
    assert window.read_arm("shop", window.ARMS[0], (1, 2), segue.load(cycle_data), tmp_path) is None  # type: ignore[arg-type]


def test_rows_of_arms_ages_and_claims(
    evaluations: tuple[dict[str, window.Measurement], WindowEvaluation],
) -> None:
    arms, baselines = evaluations
    dense = arms["dense"]
    rows = window.arm_rows(arms, baselines)
    assert [row[""].split(":")[0] for row in rows] == ["dense", "sasrec", *baselines.report.baselines]
    by_hand = np.mean([one.report.metrics["recall@10"] for one in dense.plain])
    assert rows[0]["recall@10"] == f"{by_hand:.4f}".removeprefix("0")
    assert len({tuple(row) for row in rows}) == 1, "every row has the same columns"
    ages = window.age_rows(arms)
    assert [row["recall@10 at age"] for row in ages] == ["dense", "sasrec"]
    fresh, stale = (np.mean([one.values[age]["recall@10"].mean() for one in dense.aged]) for age in (0, 14))
    assert ages[0]["lost by 14 d"] == f"{1 - stale / fresh:.1%}"
    fresh, stale = (
        np.mean([next(at for at in one.report.ages if at.days == age).metrics["p90_coverage@10"] for one in dense.aged])
        for age in (0, 14)
    )
    assert ages[0]["p90_coverage@10 at 0 d"] == figure(float(fresh))
    assert ages[0]["p90_coverage@10 at 14 d"] == figure(float(stale))
    (claim,) = window.claim_rows(arms)
    assert claim["claim"].startswith("lost in 14 days"), "the only claim about these two"


def test_claims_with_known_verdicts(
    evaluations: tuple[dict[str, window.Measurement], WindowEvaluation],
) -> None:
    """Dense is better than all-action, which is worse than next action; dense and next agree in the mean alone. With
    age dense loses a half, SASRec a quarter."""
    odd = np.arange(len(evaluations[1].users)) % 2
    arms = {
        "dense": _known_arm(evaluations[1], fresh=0.4 + 0.2 * odd, stale=0.2 + 0.1 * odd),
        "all": _known_arm(evaluations[1], fresh=0.3 + 0.2 * odd, stale=0.3 + 0.2 * odd),
        "next": _known_arm(evaluations[1], fresh=0.6 - 0.2 * odd, stale=0.3 - 0.1 * odd),
        "sasrec": _known_arm(evaluations[1], fresh=0.4 + 0.2 * odd, stale=0.3 + 0.15 * odd),
    }
    rows = [(row["claim"], row["difference here"], row["so"]) for row in window.claim_rows(arms)]
    assert rows == [
        ("dense all-action over all-action", "+0.1000", "as in the paper"),
        ("all-action over next action", "-0.1000", "against the paper"),
        ("dense all-action over next action", "+0.0000", "undecided"),
        ("lost in 14 days: dense less than SASRec", "+25.0%", "against the paper"),
    ]
    swapped = {"dense": arms["sasrec"], "sasrec": arms["dense"]}
    assert [row["so"] for row in window.claim_rows(swapped)] == ["as in the paper"]


def _known_arm(like: WindowEvaluation, *, fresh: np.ndarray, stale: np.ndarray) -> window.Measurement:
    """An arm with these values for its users, fresh and at the greatest age."""
    evaluation = replace(like, values={0: {window.RECALL: fresh}, window.AGES[-1]: {window.RECALL: stale}})
    return window.Measurement(plain=[evaluation], aged=[evaluation], minutes=1.0)


def test_the_tables_go_into_the_document(
    evaluations: tuple[dict[str, window.Measurement], WindowEvaluation],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = tmp_path / "window.md"
    theirs = window.DOCUMENT.read_text(encoding="utf-8")
    document.write_text(theirs, encoding="utf-8")
    monkeypatch.setattr(window, "DOCUMENT", document)
    monkeypatch.setattr("bench.tables.FOLDER", tmp_path)
    window.show(SHOP, *evaluations, seeds=(1, 2))
    text = document.read_text(encoding="utf-8")
    assert "| dense: dense all-action" in text and "session-knn" in text and "lost by 14 d" in text
    ends = "<!-- window shop ends. -->"
    assert "seeds 1, 2;" in text.partition(ends)[0], "the section of the shop is this one"
    assert text.partition(ends)[2] == theirs.partition(ends)[2], "the other sections stay"
    assert (tmp_path / "window-shop.json").exists()


# --- cold items -----------------------------------------------------------------------------------------------------


_LISTS = ((np.arange(1, 11), np.arange(1, 11)), (np.arange(1, 11), np.arange(11, 21)))
"""The answers of two users: the same ten items, or different ones."""


def test_both_recipes_are_trained_alike() -> None:
    plain, content = (
        make_settings(read_recipe(one.row.recipe), one.overrides)
        for recipe in (cold.PLAIN, cold.CONTENT)
        for one in cold.trainings(recipe, [1])
    )
    assert plain.train == content.train and plain.evaluate == content.evaluate
    assert (plain.model.dropout, plain.model.width) == (content.model.dropout, content.model.width) == (0.5, 128)


def test_the_epochs_note_has_the_best_epochs(cycle_run: Path) -> None:
    training = read_manifest(cycle_run, "run")["training"]
    text = f"{training['best_epoch']} of {training['epochs']}"
    assert cold.epochs_note({"sasrec": [cycle_run] * 2}) == f"Best epoch of each seed: sasrec {text}, {text}."


def test_cold_and_warm_targets_are_separate() -> None:
    """Four targets, two of them cold. Plain misses those; with content one of them is a hit, and a warm target falls
    from rank 1 to rank 3, which is half of its ndcg@10: a third of the mean of 1 and 1/2 is lost. Plain shows 10 items
    to both users; with contents one has 10 others."""
    users, is_cold = np.array([1, 1, 2, 2]), np.array([False, True, False, True])
    same, different = (np.bincount(np.concatenate(lists), minlength=1001) for lists in _LISTS)
    plain = cold.Ranking([np.array([1, MISS, 3, MISS])], [same], users, is_cold)
    content = cold.Ranking([np.array([3, 50, 3, 51])], [different], users, is_cold)
    table = cold.rows(plain, content, n_items=1000)
    assert [row["coverage@10"] for row in table] == [".0100", ".0200", "–"]
    assert [row["p90_coverage@10"] for row in table] == [".0090", ".0180", "–"]
    assert len({tuple(row) for row in table}) == 1, "every row has the same columns"
    assert [row["cold hit@50"] for row in table] == [".0000", ".5000", ".0500"]
    assert [row["times chance"] for row in table] == ["0.0", "10.0", "1.0"]
    assert table[0]["warm ndcg@10"] == ".7500" and table[1]["warm ndcg@10"] == ".5000"
    loss = cold.warm_loss(plain, content)
    assert loss.value == pytest.approx(1 / 3)
    assert loss.low is not None and loss.high is not None and loss.low == 0 and loss.high == pytest.approx(0.5)


# --- the document ---------------------------------------------------------------------------------------------------


def test_a_section_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    document = tmp_path / "some.md"
    document.write_text("Before.\n<!-- a: made by `make bench`. -->\nold\n<!-- a ends. -->\nAfter.\n")
    for line in ("first", "second"):
        write_section(document, "a", [line])
    assert document.read_text() == "Before.\n<!-- a: made by `make bench`. -->\n\nsecond\n\n<!-- a ends. -->\nAfter.\n"
    with pytest.raises(InputError, match="lacks the two lines between which b goes"):
        write_section(document, "b", [])


def test_tables_of_text() -> None:
    rows = [{"": "x", "n": ".1", "so": "yes"}, {"": "longer", "n": "–", "so": "no"}]
    assert markdown(rows) == ["|  | n | so |", "| --- | --: | --- |", "| x | .1 | yes |", "| longer | – | no |"]
    assert plain(rows) == ["         n   so", "x       .1  yes", "longer   –   no"]


def test_the_document_has_a_section_for_every_table() -> None:
    text = window.DOCUMENT.read_text(encoding="utf-8")
    for name in (*(f"window {log}" for log in window.LOGS), "cold"):
        assert text.count(f"<!-- {name}: made by `make bench`. -->") == text.count(f"<!-- {name} ends. -->") == 1
