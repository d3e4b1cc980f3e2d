"""The evaluator's ranks equal those of the index, user by user. Items share vectors, so every score is tied with
another one, and a tie lost to rounding in either would fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from settings_tables import index_settings, model_settings
from tiny_logs import ranks

from segue.data.batch import Batch
from segue.evaluation.evaluator import ModelScorer
from segue.evaluation.ranks import Exclusions
from segue.index import approximate, build
from segue.index.build import build_index
from segue.index.mol import Cut
from segue.index.search import Ragged
from segue.index.settings import IndexSettings
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.sequence import SequenceModel

SHARED = {"similarity": "mol", "output": "layer-norm", "target_time": False}
CASES: dict[str, tuple[dict[str, Any], IndexSettings]] = {
    "exact": ({"kind": "sasrec"}, index_settings(kind="exact")),
    "exact, in chunks": ({"kind": "esasrec"}, index_settings(kind="exact", chunk=32)),
    "exact, with biases": ({"kind": "bert4rec"}, index_settings(kind="exact")),
    "exact, cosine": ({"kind": "hstu", "similarity": "cosine", "target_time": False}, index_settings(kind="exact")),
    "approximate, all probed": ({"kind": "sasrec"}, index_settings(kind="approximate", recall=1.0)),
    "mol": ({"kind": "hstu", **SHARED}, index_settings(kind="exact")),
    "mol, two-stage with all kept": ({"kind": "hstu", **SHARED}, index_settings(kind="two-stage")),
}


@pytest.fixture(autouse=True, scope="module")
def no_approximation() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(approximate, "LEAST_ITEMS", 0)
        patch.setattr(build, "Cut", lambda: Cut(averaged=10_000))
        yield


def doubled_model(n_items: int, **overrides: Any) -> SequenceModel:
    """Each item of the second half has the vector (and the bias) of one of the first."""
    half = n_items // 2
    settings = model_settings(**{"width": 50, "depth": 1, "heads": 1, "length": 9, **overrides})
    model = build_model(settings, n_items, generator=torch.Generator().manual_seed(1)).eval()
    with torch.no_grad():
        for name, table in model.items.named_parameters():
            if name != "mask":
                table.normal_(generator=torch.Generator().manual_seed(2))
                table[half + 1 : 2 * half + 1] = table[1 : half + 1]
    model.items.clear_padding()
    return model


def histories_of(users: int, n_items: int, rng: np.random.Generator) -> Batch:
    lengths = rng.integers(1, 9, size=users)
    return Batch(
        items=rng.integers(1, n_items + 1, size=lengths.sum()),
        times=np.arange(lengths.sum()) * 60,
        lengths=lengths,
    )


@pytest.mark.parametrize("users", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("n_items", [37, 1003])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_user_has_the_rank_that_the_index_gives(
    case: tuple[dict[str, Any], IndexSettings], n_items: int, users: int
) -> None:
    model, rng = doubled_model(n_items, **case[0]), np.random.default_rng(users)
    known = rng.random(n_items + 1) < 0.9
    known[[0, 1, 2]] = False, True, True
    histories, targets = histories_of(users, n_items, rng), rng.integers(1, n_items + 1, size=users)
    seen = Exclusions.of_histories(histories)
    expected = ranks(ModelScorer(model).scores(histories), targets, seen, known=known)

    index = build_index(model, known, case[1])
    with torch.inference_mode():
        queries = model.query(tensors(histories))
    items, scores = index.search(queries, n_items, exclude=Ragged.of_lengths(histories.lengths, histories.items))
    matches = items.numpy() == targets[:, None]
    own = np.where(matches, scores.numpy(), -np.inf).max(axis=1, keepdims=True)
    index_ranks = ((scores.numpy() >= own) & (items.numpy() > 0)).sum(axis=1)
    reachable = matches.any(axis=1)
    assert reachable.tolist() == (expected <= n_items).tolist()
    assert index_ranks[reachable].tolist() == expected[reachable].tolist()
