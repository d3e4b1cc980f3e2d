"""The overlap of a customer's next basket with a plan of five items, and with the five best items of `esasrec`.

The demo's shop. The last basket of each customer, all that was bought in one minute, is held out. Both models are
trained on the events before it and recommend what comes next.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from bench.tables import markdown, publish, shown, write_section
from segue import api
from segue.demo import shop
from segue.recommend.recommender import Recommender
from segue.terminal import Display

DOCUMENT = Path(__file__).parents[2] / "docs" / "results.md"
LEAST_EVENTS = 5  # before the basket, as `prepare` wants them
RESAMPLES = 2000
# Half of the customers have at most 45 purchases: as in the demo.
RANKER = ("model.length=100", "train.patience=3")
PLANNER = ("train.patience=3",)
NOTES = (
    "Overlap: items of the next basket among the five, on average over customers; some: customers with at least one. "
    "Intervals are 95 %, customers resampled.",
    "Validation decides for each whether bought items are kept; the order inside a basket is that of the log.",
)


@dataclass(frozen=True, slots=True, eq=False)
class Baskets:
    """Each customer's last basket and the history before it."""

    histories: list[list[dict[str, Any]]]
    baskets: list[set[str]]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench plan", description=__doc__)
    parser.add_argument("--epochs", type=int, default=16, help="of each model, at most")
    parser.add_argument("--beam", type=int, default=8)
    parser.add_argument("-n", type=int, default=5, help="items of a plan and of an answer")
    parser.add_argument("--set", action="append", default=[], help="section.key=value for seq2seq; may be repeated")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as name:
        folder = Path(name)
        log = shop.clean(shop.fetch(cache=shop.cache_folder()), out=folder)
        queries = split_baskets(log.events, folder / "before.csv")
        data = api.prepare(folder / "before.csv", out=folder / "data", user="customer", items=log.items)
        epochs = f"train.epochs={options.epochs}"
        with Display() as display:
            ranker = api.train(data, recipe="esasrec", overrides=[*RANKER, epochs], progress=display.step)
        with Display() as display:
            planner = api.train(
                data, recipe="seq2seq", overrides=[*PLANNER, epochs, *options.set], progress=display.step
            )
    rows, body = measure(ranker, planner, queries, n=options.n, beam=options.beam)
    title = f"The next basket of {len(queries.baskets):,} customers, {options.n} items"
    publish("plan", title=title, rows=rows, notes=NOTES, body={**body, **vars(options)})
    write_document(title, rows)


def write_document(title: str, rows: Sequence[dict[str, Any]], document: Path = DOCUMENT) -> None:
    """Write the table and its conclusion into the document."""
    table = markdown([{name: shown(value) for name, value in row.items()} for row in rows])
    low, high = (float(bound) for bound in rows[-1]["interval"].split(" – "))
    verdict = (
        "holds more of it than" if low > 0 else "holds less of it than" if high < 0 else "cannot be told apart from"
    )
    conclusion = f"So the plan {verdict} the best answers of `esasrec`."
    write_section(document, "plan", [f"{title}. {' '.join(NOTES)}", "", *table, "", conclusion])


def split_baskets(events: Path, before: Path) -> Baskets:
    """Hold out each customer's last basket, and write the rest of the log to `before`."""
    log = pl.read_csv(events, infer_schema=False).with_columns(last=pl.col("time").max().over("customer"))
    earlier = log.filter(pl.col("time") < pl.col("last"))
    earlier = earlier.filter(pl.len().over("customer") >= LEAST_EVENTS)
    earlier.drop("last").write_csv(before)
    baskets = log.filter(pl.col("time") == pl.col("last")).group_by("customer").agg("item")
    histories = earlier.group_by("customer", maintain_order=True).agg(pl.struct("item", "time").alias("history"))
    joined = histories.join(baskets, on="customer", maintain_order="left")
    return Baskets(histories=joined["history"].to_list(), baskets=[set(items) for items in joined["item"].to_list()])


def measure(
    ranker: Recommender, planner: Recommender, queries: Baskets, *, n: int, beam: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each method, and the paired difference between plan and `esasrec`."""
    methods: dict[str, list[list[str]]] = {
        "esasrec, best answers": [answer.ids for answer in ranker.recommend_many(queries.histories, k=n)],
        "seq2seq, best answers": [answer.ids for answer in planner.recommend_many(queries.histories, k=n)],
        f"seq2seq, plan, beam {beam}": [plan.ids for plan in planner.plan_many(queries.histories, n, beam=beam)],
        "seq2seq, plan, greedy": [plan.ids for plan in planner.plan_many(queries.histories, n, beam=1)],
    }
    overlaps = {
        method: np.array([len(basket & set(items)) for basket, items in zip(queries.baskets, answers, strict=True)])
        for method, answers in methods.items()
    }
    rows = [
        {
            "way": method,
            "overlap": float(hits.mean()),
            "interval": _interval(hits),
            "some": float((hits > 0).mean()),
            "different items": len({item for items in methods[method] for item in items}),
        }
        for method, hits in overlaps.items()
    ]
    best, _, plan, _ = overlaps.values()
    difference = {"plan less esasrec": float((plan - best).mean()), "interval": _interval(plan - best)}
    rows.append({"way": "plan less esasrec, paired", "overlap": difference["plan less esasrec"]})
    rows[-1] |= {"interval": difference["interval"], "some": "–", "different items": "–"}
    return rows, difference


def _interval(hits: Sequence[int] | np.ndarray) -> str:
    """Of the mean, customers resampled."""
    values, rng = np.asarray(hits, dtype=float), np.random.default_rng(0)
    means = [values[rng.integers(0, len(values), len(values))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{low:.3f} – {high:.3f}"


if __name__ == "__main__":
    main(sys.argv[1:])
