"""A model's graph against the model: one graph for any number of histories of any length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_cases import every_builder, model_of, new_model
from small_exports import assert_same_answers, exported, recommender_of

from segue.data.batch import Batch
from segue.layers.packed import tensors
from segue.models.sequence import SequenceModel

LENGTH = 20


def windows_of(rng: np.random.Generator, lengths: list[int], n_items: int) -> Batch:
    events = sum(lengths)
    return Batch(
        items=rng.integers(1, n_items + 1, events),
        times=np.cumsum(rng.integers(0, 10 ** rng.integers(1, 8, events))),
        lengths=np.array(lengths),
        query_times=np.full(len(lengths), 10**9),
        values=rng.choice([np.nan, 1, 2, 3, 4, 5], events).astype(np.float32),
    )


def assert_the_graph_is_the_model(model: SequenceModel, folder: Path) -> None:
    """Queries, scores and answers: alone and in batches, shorter and longer than the model's length."""
    torch_run = recommender_of(model, counts=[number % 4 for number in range(model.items.n_items)])
    slim, rng = exported(torch_run, folder), np.random.default_rng(1)
    for lengths in ([1], [2, 1, 2], [model.length], rng.integers(1, model.length + 1, 9).tolist()):
        windows = windows_of(rng, lengths, model.items.n_items)
        with torch.inference_mode():
            query = model.query(tensors(windows))
            scores = model.score_all(query).numpy()
        actual, actual_scores = slim.run(windows)
        np.testing.assert_allclose(actual, query.numpy(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(actual_scores[:, 1:], scores[:, 1:], rtol=1e-5, atol=1e-5)
    histories = [random_history(rng, length) for length in [0, 1, 2, *rng.integers(1, 3 * LENGTH, 12).tolist()]]
    for now in (None, 10**9):
        expected = torch_run.recommend_many(histories, 5, now=now)
        assert_same_answers(slim.recommend_many(histories, 5, now=now), expected)
        assert_same_answers([slim.recommend(history, 5, now=now) for history in histories], expected)


def random_history(rng: np.random.Generator, length: int) -> list[dict[str, Any]]:
    times = np.cumsum(rng.integers(0, 100_000, length)).tolist()
    return [
        {"item": f"i{rng.integers(1, 40)}", "time": time, "value": float(rng.integers(1, 6))} for time in times
    ]  # more ids than items: some are unknown


@every_builder
def test_the_graph_of_every_builder(builder: str, tmp_path: Path) -> None:
    assert_the_graph_is_the_model(model_of(builder, length=LENGTH), tmp_path)


@pytest.mark.parametrize(
    ("builder", "changed"),
    [
        ("sasrec", {"positions": "oldest"}),  # windows that move in steps
        ("sasrec", {"inputs": "rated", "similarity": "cosine"}),
        ("sasrec", {"members": 2}),
        ("esasrec", {"items__tied": False, "output": "layer-norm", "heads": 1}),
        ("hstu", {"target_time": True, "inputs": "combined"}),
    ],
    ids=["steps", "rated", "members", "untied", "told"],
)
def test_the_graph_of_other_settings(builder: str, changed: dict[str, Any], tmp_path: Path) -> None:
    assert_the_graph_is_the_model(model_of(builder, length=LENGTH, **changed), tmp_path)


def test_the_graph_of_a_mixture_of_logits(tmp_path: Path) -> None:
    """With initial weights, and not divided by a low temperature: else torch's own rounding is above 1e-5."""
    sizes = {
        "similarity__query_parts": 3,
        "similarity__item_parts": 2,
        "similarity__part_width": 4,
        "similarity__query_hidden": 8,
        "similarity__gate_hidden": 8,
    }
    model = new_model("esasrec", length=LENGTH, similarity="mol", similarity__temperature=1.0, **sizes)
    assert_the_graph_is_the_model(model, tmp_path)
