"""Runs with counts: what training may see, what a run folder holds, and the same numbers in evaluation and answers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from counted_logs import OF_TWO_USERS, assert_best, chain_log

from segue.api import evaluate, prepare, train
from segue.counts.counts import Counts
from segue.counts.features import ItemCounts
from segue.data.dataset import Data
from segue.errors import FolderError
from segue.evaluation.counted import CountedScorer
from segue.evaluation.evaluator import Evaluator, ModelScorer
from segue.evaluation.metrics import ndcg
from segue.evaluation.split_log import SplitLog
from segue.recommend.recommender import Recommender

N_ITEMS = 12
QUICK = [
    "counts=fitted",
    "model.width=8",
    "model.depth=1",
    "model.heads=1",
    "model.length=8",
    "train.epochs=2",
    "train.threads=1",
    "evaluate.bootstrap=0",
]


def text(items: np.ndarray) -> str:
    """A CSV of the items [users, events]."""
    rows = [
        f"u{user:02},i{item:02},{1_600_000_000 + 3600 * event}"
        for user, row in enumerate(items.tolist())
        for event, item in enumerate(row)
    ]
    return "user,item,timestamp\n" + "\n".join(rows) + "\n"


@dataclass(frozen=True)
class Runs:
    """The runs of a log and of the same log with the test items of other users."""

    folder: Path

    @property
    def data(self) -> Data:
        return Data.open(self.folder / "data")

    @property
    def run(self) -> Recommender:
        return Recommender.open(self.folder / "run")

    @property
    def counts(self) -> Counts:
        counts = self.run.item_counts
        assert counts is not None
        return counts


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("counted")
    items = chain_log(3, users=60, events=8, n_items=N_ITEMS).sequences.items.reshape(60, 8)
    other = items.copy()
    other[:, -1] = np.random.default_rng(3).permutation(other[:, -1])
    assert (other != items).sum() > 40
    for log, data, run in ((items, "data", "run"), (other, "other-data", "other-run")):
        (folder / "log.csv").write_text(text(log))
        train(prepare(folder / "log.csv", out=folder / data), out=folder / run, recipe="sasrec", overrides=QUICK)
    return Runs(folder)


def test_nothing_that_is_learned_depends_on_the_test_items(runs: Runs) -> None:
    """Weights of the network, counts and their weights are equal to the last bit; test metrics are not."""

    def contents(run: str, name: str) -> bytes:
        return (runs.folder / run / name).read_bytes()

    for name in ("weights.safetensors", "counts.safetensors", "index.safetensors", "items.parquet"):
        assert contents("run", name) == contents("other-run", name)
    assert runs.run.manifest["counts"] == Recommender.open(runs.folder / "other-run").manifest["counts"]
    assert contents("run", "metrics.json") != contents("other-run", "metrics.json")


def test_a_run_has_the_counts_of_the_training_part(runs: Runs) -> None:
    log = SplitLog.of(runs.data)
    expected = ItemCounts.of(log.sequences, log.split.train_end, N_ITEMS, OF_TWO_USERS)
    assert Counts(expected, runs.counts.weights).to_bytes() == runs.counts.to_bytes()


def test_with_all_events_the_weights_stay_and_every_event_counts(runs: Runs) -> None:
    out = runs.folder / "all"
    trained = train(runs.data, out=out, recipe="sasrec", overrides=QUICK, all_events=True)
    log = SplitLog.of(runs.data)
    expected = ItemCounts.of(log.sequences, np.asarray(log.sequences.offsets)[1:], N_ITEMS, OF_TWO_USERS)
    assert trained.item_counts is not None
    assert trained.item_counts.to_bytes() == Counts(expected, runs.counts.weights).to_bytes()


def test_evaluation_counts_what_recommendation_adds(runs: Runs) -> None:
    """The report of the run, its model as a scorer and its answers to the same histories."""
    run, log = runs.run, SplitLog.of(runs.data)
    scorer, cases = CountedScorer(ModelScorer(run.model), runs.counts), log.split.cases("test")
    evaluator = Evaluator.of_model(run.model, log, seen="kept")
    assert run.seen == "kept"
    ranks = evaluator.ranks(scorer, cases)
    report = evaluate(run, data=runs.data)
    assert report.metrics["ndcg@10"] == pytest.approx(float(ndcg(ranks, 10).mean()), abs=1e-12)
    assert (ranks != evaluator.ranks(ModelScorer(run.model), cases)).sum() > 20
    for chosen, batch in evaluator.batches(cases):
        assert len(chosen) == 60
        vocabulary, scores = runs.data.vocabulary, evaluator.scores(scorer, batch, None).numpy()
        histories = [vocabulary.ids(one) for one in np.split(batch.items, np.cumsum(batch.lengths)[:-1])]
        for row, answer in enumerate(run.recommend_many(histories, k=5)):
            assert_best(answer, vocabulary.numbers(answer.ids, unknown="error").tolist(), scores[row], 5)


def test_counts_that_are_damaged_are_refused(runs: Runs, tmp_path: Path) -> None:
    """One byte is another one."""
    shutil.copytree(runs.folder / "run", tmp_path / "run")
    path = tmp_path / "run" / "counts.safetensors"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    with pytest.raises(FolderError, match=r"counts\.safetensors") as error:
        Recommender.open(tmp_path / "run")
    assert "\n" not in str(error.value)
    path.unlink()
    with pytest.raises(FolderError, match=r"counts\.safetensors"):
        Recommender.open(tmp_path / "run")


def test_a_copied_run_keeps_its_counts(runs: Runs, tmp_path: Path) -> None:
    runs.run.save(tmp_path / "copy")
    copy = Recommender.open(tmp_path / "copy").item_counts
    assert copy is not None and copy.to_bytes() == runs.counts.to_bytes()
