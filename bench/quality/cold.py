"""Cold items: how often the first 50 contain them, and what content costs the warm ones.

    make bench SUBJECT=cold DATA=folder     Amazon Beauty with titles: events.tsv.gz and items.tsv.gz
    … ARGS="--only sasrec-content-1"        one training; `--only none` trains nothing

Histories end at the split; every later event is a target, ranked among all items that the model may recommend: for
`sasrec` the items it was trained on, for `sasrec-content` every item with a title. An item is cold if training has no
event of it. Every training is a run of its own in a cache folder and is made once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.data.cut_logs import BEAUTY, prepared
from bench.quality.paired import SAMPLES, averaged, mean_interval
from bench.quality.results import resumable, run_folder, select_trainings, trained
from bench.quality.results_table import Row, Training, figure
from bench.quality.window import DOCUMENT, SEEDS
from bench.tables import markdown, plain, write_section, written
from segue import api
from segue.config.settings import Settings
from segue.errors import SegueError
from segue.evaluation.evaluator import Evaluator, ModelScorer
from segue.evaluation.metrics import RelativeLoss, coverage, hit, ndcg, p90_coverage, relative_losses, user_totals
from segue.evaluation.settings import seen_rule
from segue.evaluation.split_log import SplitLog
from segue.evaluation.window.cases import WindowCases, window_cases
from segue.evaluation.window.evaluate import rank_targets
from segue.folders import read_manifest
from segue.models.sequence import SequenceModel
from segue.recommend.recommender import Recommender
from segue.runs.read import settings_of
from segue.terminal import Display, print_error, print_line

LOG = replace(BEAUTY, cut="2014-03-07")
PLAIN, CONTENT = "sasrec", "sasrec-content"
COLD_DEPTH, WARM_DEPTH = 50, 10
# Both have the settings with which SASRec was best on Beauty (docs/results.md): only content differs.
# One validation query a user: all 40,000 later events would take longer than the epoch.
SET = (
    *("model.length=50", "model.dropout=0.5", "train.learning_rate=2e-3", "train.decay=1.0"),
    *("train.epochs=12", "train.patience=4", "evaluate.target=first", "evaluate.bootstrap=100"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Ranks of the targets and counts of shown items by seed; the users and kinds of the targets."""

    ranks: list[np.ndarray]  # a seed each: [N]
    shown: list[np.ndarray]  # a seed each: how often each item was among the first 10 [V + 1]
    users: np.ndarray  # [N]
    cold: np.ndarray  # [N] bool

    def hits(self) -> np.ndarray:
        """1 where a target is among the first 50, averaged over the seeds [N]."""
        return averaged([hit(ranks, COLD_DEPTH) for ranks in self.ranks])

    def gains(self) -> np.ndarray:
        """ndcg@10 of each target, averaged over the seeds [N]."""
        return averaged([ndcg(ranks, WARM_DEPTH) for ranks in self.ranks])


@resumable()
def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench cold", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder of Amazon Beauty with titles")
    parser.add_argument("--only", help="a recipe, or RECIPE-SEED, to train; the table is made of what is there")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "segue-results")
    options = parser.parse_args(argv)
    trainings_of = {recipe: trainings(recipe, options.seeds) for recipe in (PLAIN, CONTENT)}
    selected = select_trainings(
        [one for pair in zip(*trainings_of.values(), strict=True) for one in pair], options.only
    )
    data = prepared(LOG, options.data, options.cache)
    for one in selected:
        with Display() as display:
            trained(one, data, options.cache, display.step)
    runs = {recipe: [run_folder(one, data, options.cache) for one in each] for recipe, each in trainings_of.items()}
    if not all(run.exists() for each in runs.values() for run in each):
        print_error("Nothing to show yet: expected runs of every seed of both recipes. Train them without --only.")
        return
    cases = later_events(data)
    plain, content = (rank([Recommender.open(run) for run in each], data, cases) for each in runs.values())
    table = rows(plain, content, n_items=len(data.vocabulary))
    show(table, warm_loss(plain, content), cases, options.seeds, epochs=epochs_note(runs))


def trainings(recipe: str, seeds: Sequence[int]) -> list[Training]:
    row = Row(name=f"cold-{LOG.name}/{recipe}", log=LOG.name, recipe=recipe, set=SET, seeds=SEEDS)
    return [Training(row, seed) for seed in seeds]


def later_events(data: api.Data) -> WindowCases:
    """Every event from the cut on, of users with a history before it."""
    cut = data.manifest["split"]["test_from"]
    return window_cases(data.sequences, time=cut - 1, until=int(np.max(data.sequences.times)))


def evaluator_of(model: SequenceModel, data: api.Data, settings: Settings) -> Evaluator:
    """The evaluator that ranks a model's targets on its data."""
    seen, _ = seen_rule(settings.evaluate, data.sequences, data.split)
    counts = SplitLog.of(data).training_counts
    candidates = model.answerable(counts)
    return Evaluator(
        sequences=data.sequences,
        counts=counts,
        seen=seen,
        target_time=model.target_time,
        answerable=candidates,
        readable=candidates,
    )


def rank(recommenders: Sequence[Recommender], data: api.Data, cases: WindowCases) -> Ranking:
    """Rank the same targets by the models of several seeds."""
    rankings, counts, depths = [], np.zeros(0), (WARM_DEPTH, COLD_DEPTH)
    for recommender in recommenders:
        evaluator = evaluator_of(recommender.model, data, settings_of(recommender))
        counts = evaluator.counts
        rankings.append(rank_targets(evaluator, ModelScorer(recommender.model), cases, depths, time=cases.time))
    return Ranking(
        ranks=[ranking.ranks for ranking in rankings],
        shown=[ranking.shown[WARM_DEPTH] for ranking in rankings],
        users=cases.users[cases.owner],
        cold=counts[cases.targets] == 0,
    )


def epochs_note(runs: Mapping[str, Sequence[Path]]) -> str:
    """The best epoch on validation, and the number of epochs."""
    notes = []
    for recipe, each in runs.items():
        manifests = [read_manifest(run, "run")["training"] for run in each]
        notes.append(f"{recipe} " + ", ".join(f"{one['best_epoch']} of {one['epochs']}" for one in manifests))
    return f"Best epoch of each seed: {'; '.join(notes)}."


def rows(plain: Ranking, content: Ranking, *, n_items: int) -> list[dict[str, str]]:
    """Cold and warm targets apart, for both recipes and for chance."""
    chance = COLD_DEPTH / n_items
    table = []
    for name, side in ((PLAIN, plain), (CONTENT, content)):
        hits, gains = side.hits(), side.gains()
        low, high = mean_interval(hits[side.cold], side.users[side.cold])
        cold = float(hits[side.cold].mean())
        table.append(
            {
                "": name,
                f"cold hit@{COLD_DEPTH}": figure(cold),
                "95 %": f"{figure(low)} – {figure(high)}",
                "times chance": f"{cold / chance:.1f}",
                f"warm hit@{COLD_DEPTH}": figure(float(hits[~side.cold].mean())),
                f"warm ndcg@{WARM_DEPTH}": figure(float(gains[~side.cold].mean())),
                f"p90_coverage@{WARM_DEPTH}": figure(float(np.mean([p90_coverage(one) for one in side.shown]))),
                f"coverage@{WARM_DEPTH}": figure(float(np.mean([coverage(one) for one in side.shown]))),
            }
        )
    chance_row = {"": f"chance, {COLD_DEPTH} of {n_items:,}", "times chance": "1.0"}
    chance_row |= {f"{kind} hit@{COLD_DEPTH}": figure(chance) for kind in ("cold", "warm")}
    return [*table, {column: chance_row.get(column, "–") for column in table[0]}]


def warm_loss(plain: Ranking, content: Ranking) -> RelativeLoss:
    """The share of sasrec's ndcg@10 on warm targets that content costs, users resampled."""
    warm = ~plain.cold
    sides = [user_totals({"ndcg": side.gains()[warm]}, plain.users[warm]) for side in (content, plain)]
    return relative_losses(*sides, samples=SAMPLES, rng=np.random.default_rng(0))["ndcg"]


def show(
    table: list[dict[str, str]], loss: RelativeLoss, cases: WindowCases, seeds: Sequence[int], *, epochs: str
) -> None:
    """Print the table and write it into the document."""
    assert loss.value is not None and loss.low is not None and loss.high is not None
    notes = [
        f"{LOG.title}, cut {LOG.cut}: {len(cases):,} users with a history, {len(cases.targets):,} later events. Means "
        f"of the seeds {', '.join(map(str, seeds))}; 95 %: seeds averaged, users resampled.",
        f"Warm targets: {CONTENT} loses {loss.value:.1%} of the ndcg@{WARM_DEPTH} of {PLAIN}, 95 % {loss.low:.1%} to "
        f"{loss.high:.1%} (below 0 is a gain). It ranks the cold items too, which {PLAIN} never recommends.",
        epochs,
    ]
    print_line("\n".join([notes[0], "", *plain(table), "", *notes[1:]]))
    written("cold", rows=table, notes=notes, body=loss)
    write_section(DOCUMENT, "cold", [notes[0], "", *markdown(table), "", " ".join(notes[1:])])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SegueError as error:
        sys.exit(f"bench: {error}")
