"""A mixture of logits over a million items: milliseconds of one query in two stages and by scoring every item, and
the recall of two stages.

    make bench SUBJECT=mixture DATA=folder          MovieLens-1M: events.tsv.gz

The items are those of the row ml-1m/hstu-mol-20 of `make results`, which is trained unless it is in the cache, each
copied with noise; the queries are those of test users.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor

from bench.quality.results import prepared, trained
from bench.quality.results_table import read_rows
from bench.recommend.index import WARM, alternate_searches
from bench.tables import publish
from segue.index.build import sample_queries
from segue.index.mol import Cut, MolIndex
from segue.index.search import recall_of_scores
from segue.models.similarity.mol import MixtureOfLogits
from segue.recommend.recommender import Recommender
from segue.terminal import Display

ROWS = Path(__file__).parents[1] / "quality" / "results.toml"
ROW = "ml-1m/hstu-mol-20"
NOISE = 0.3  # of the standard deviation of the trained items' vectors
K = 100
AT_A_TIME = 1 << 16  # items processed at a time


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench mixture", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with events.tsv.gz")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "segue-results")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = read_rows(ROWS)
    training = rows.named(ROW)[0]
    data = prepared(training, rows.logs[training.row.log], arguments.data, arguments.cache)
    with Display() as display:
        model = Recommender.open(trained(training, data, arguments.cache, display.step)).model
    queries = sample_queries(model, data.sequences, data.split.cases("test", "last"))
    assert queries is not None and len(queries) >= arguments.questions + WARM
    assert isinstance(model.similarity, MixtureOfLogits)
    flat = noisy_copies(model.items.output()[1:].detach(), model.similarity, arguments.items)
    index = MolIndex.build(model.similarity.mixture, flat, cut=Cut())
    every = MolIndex(index.mixture, index.items, index.numbers, n_items=index.n_items)
    del flat
    (slow, exact_scores), (fast, scores) = alternate_searches([every, index], queries[: arguments.questions + WARM], K)
    row = {
        "items": arguments.items,
        "every item ms": statistics.median(slow),
        "two stages ms": statistics.median(fast),
        "share of the time": statistics.median(fast) / statistics.median(slow),
        f"recall@{K}": recall_of_scores(scores, exact_scores),
    }
    notes = (
        f"Medians of the processor time of {arguments.questions} test users of MovieLens-1M, one at a time on one "
        f"thread, alternately; both have the items' components and gates ready. Items: those of the run {ROW}, each "
        f"copied with noise of {NOISE} of its vectors' standard deviation: the catalogue is in heaps, as groups would "
        "have it.",
    )
    publish(
        "mixture", title="A mixture of logits over many items", rows=[row], notes=notes, body={"each": [slow, fast]}
    )


@torch.no_grad()
def noisy_copies(vectors: Tensor, similarity: MixtureOfLogits, items: int) -> Tensor:
    """Item features of a large catalogue, row 0 being padding: trained vectors [V, D] repeated with noise."""
    first = torch.Generator().manual_seed(1)
    deviation, similarity = vectors.std(0), similarity.eval()
    blocks = []
    for numbers in torch.split(torch.arange(items + 1), AT_A_TIME):
        copies = vectors[numbers % len(vectors)]
        blocks.append(similarity.item(copies + NOISE * deviation * torch.randn(copies.shape, generator=first)))
    return torch.cat(blocks)


if __name__ == "__main__":
    main(sys.argv[1:])
