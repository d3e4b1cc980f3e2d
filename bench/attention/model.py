"""The small model that docs/attention.md looks into: trained on a real shop's log, its weights saved as decimals.

`python -m bench.attention.model` trains it again and writes bench/attention/model.json. The document is made from that
file and not from a training, so that its numbers are the same on every machine and can be checked by hand.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import torch

from segue import api
from segue.data.vocabulary import Vocabulary
from segue.demo import shop
from segue.index.exact import ExactIndex
from segue.models.build import build_model
from segue.models.encoders.sasrec import SASRecSettings
from segue.recommend.recommender import Recommender
from segue.runs.read import read_report

MODEL_FILE = Path(__file__).with_suffix(".json")
DECIMALS = 3
# Three teacups, six lunch bags, two jam sets, two wicker hearts, two hot water bottles: goods that are bought together.
ITEMS = (
    *("22697", "22698", "22699", "20725", "20727", "20728", "22382", "22383", "22384"),
    *("22960", "22961", "22469", "22470", "22111", "22112"),
)
# A customer's purchases of these. The last one was held out of training.
HISTORY = ("22697", "22699", "22383", "20728", "22382")
BOUGHT_NEXT = "22698"
SHAPE = SASRecSettings(width=4, depth=1, heads=1, length=6, dropout=0.0, feed_forward=1)
RECIPE = """
[model]
kind = "sasrec"
width = 4
depth = 1
heads = 1
length = 6
dropout = 0.0
feed_forward = 1
positions = "newest"

[evaluate]
seen = "exclude"

[train]
epochs = 25
patience = 25
tokens = 500
learning_rate = 1e-2
averaging = 0.0
warmup = 0
threads = 1
seed = 2
"""


class ShopModel(msgspec.Struct, frozen=True):
    """The contents of model.json."""

    items: list[str]
    titles: list[str]
    cases: int
    """Customers measured on, each on its last purchase."""
    hits: dict[str, float]
    """hit@1 on them: the model's, and the baselines'."""
    weights: dict[str, list[Any]]


def read_model() -> ShopModel:
    """The committed file."""
    return msgspec.json.decode(MODEL_FILE.read_bytes(), type=ShopModel)


def recommender(facts: ShopModel) -> Recommender:
    """The model in double precision, so that every decimal that is shown is exact."""
    model = build_model(SHAPE, len(facts.items), generator=torch.Generator()).double().eval()
    model.load_state_dict({name: torch.tensor(weights) for name, weights in facts.weights.items()})
    table = pl.DataFrame({"id": facts.items, "count": [1] * len(facts.items), "title": facts.titles})
    with torch.no_grad():
        index = ExactIndex.build(model.item_vectors(), candidates=np.arange(len(facts.items) + 1) > 0)
    return Recommender(model, index, Vocabulary(table))


def train_model(folder: Path) -> ShopModel:
    """Train the model anew, in `folder`."""
    log = shop.clean(shop.fetch(cache=shop.cache_folder()), out=folder / "shop")
    events = pl.read_csv(log.events, infer_schema=False).filter(pl.col("item").is_in(ITEMS))
    events.write_csv(folder / "events.csv")
    (folder / "recipe.toml").write_text(RECIPE)
    api.prepare(folder / "events.csv", out=folder / "data", items=log.items, min_user=3, min_item=1)
    run = api.train(folder / "data", out=folder / "run", recipe=folder / "recipe.toml")
    report = read_report(run)
    numbers = np.arange(1, len(run.vocabulary) + 1)
    hits = {"model": report.metrics["hit@1"]} | {name: one["hit@1"] for name, one in report.baselines.items()}
    return ShopModel(
        items=run.vocabulary.ids(numbers),
        titles=[title or "" for title in run.vocabulary.titles(numbers)],
        cases=report.cases,
        hits={name: round(hit, DECIMALS) for name, hit in hits.items()},
        weights={
            name: (weights.double().numpy().round(DECIMALS) + 0.0).tolist()  # no minus before a zero
            for name, weights in run.model.state_dict().items()
        },
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="segue-attention-") as work:
        parts = {
            key: msgspec.json.encode(part).decode()
            for key, part in msgspec.to_builtins(train_model(Path(work))).items()
        }
        parts["weights"] = parts["weights"].replace('],"', '],\n  "')  # a line for each
        MODEL_FILE.write_text("{" + ",".join(f'\n "{key}": {part}' for key, part in parts.items()) + "\n}\n")
    print(f"Wrote {MODEL_FILE}.")
