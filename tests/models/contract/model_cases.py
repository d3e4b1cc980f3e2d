"""Every model the package can build, small, with weights that are nowhere zero but in the padding rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from settings_tables import BIDIRECTIONAL, BUILDERS, CONTINUING, UNPLACED, model_settings

from segue.models.sequence import SequenceModel
from segue.testing.cases import (
    N_ITEMS,
    Case,
    assert_close,
    batch_of,
    packed_of,
    queries_of,
    query_tokens,
    random_users,
    states_of,
)
from segue.testing.learning import eight_users, task_of

__all__ = [
    "EVENTS",
    "MASK",
    "NOT_CAUSAL",
    "N_ITEMS",
    "PLANNING",
    "RECURRENT",
    "assert_close",
    "batch_of",
    "case_of",
    "eight_users",
    "every_builder",
    "every_builder_and_place",
    "looking_back",
    "looking_back_from_every_place",
    "looking_both_ways",
    "model_of",
    "new_model",
    "packed_of",
    "planning",
    "queries_of",
    "query_tokens",
    "random_users",
    "settings_of",
    "states_of",
    "task_of",
    "tied_or_not",
]

MASK = N_ITEMS + 1

RECURRENT = "seq2seq, gru"
EVENTS = "pinnerformer, events"
CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    RECURRENT: ("seq2seq", {"body": "gru"}),
    "transformer, dot, rotary": ("transformer", {"scores": "dot", "positions": "rotary"}),
    "transformer, post, bilinear, sinusoidal": (
        "transformer",
        {"norm": "post", "scores": "bilinear", "positions": "sinusoidal"},
    ),
    "transformer, post, additive, buckets": (
        "transformer",
        {"norm": "post", "scores": "additive", "positions": "buckets"},
    ),
    "narm, additive, gumbel": ("narm", {"scores": "additive", "choice": "gumbel"}),
    "narm, bilinear, reinforce": ("narm", {"scores": "bilinear", "choice": "reinforce"}),
    EVENTS: ("pinnerformer", {"inputs": "events", "output": "mlp", "positions": "newest"}),
}
"""Builders with choices that are held to the laws as well: between them, each choice once."""

PLANNING = (*sorted(CONTINUING), RECURRENT)
NOT_CAUSAL = BIDIRECTIONAL.union(PLANNING)

every_builder = pytest.mark.parametrize("builder", sorted(BUILDERS.keys() | CHOICES.keys()))
looking_back = pytest.mark.parametrize("builder", sorted((BUILDERS.keys() | CHOICES.keys()) - NOT_CAUSAL))
planning = pytest.mark.parametrize("builder", PLANNING)
PLACES = [
    *((builder, positions) for builder in sorted(BUILDERS.keys() - UNPLACED) for positions in ("newest", "oldest")),
    *((builder, chosen.get("positions", "none")) for builder, (_, chosen) in CHOICES.items()),
    *((builder, "none") for builder in sorted(UNPLACED)),
]
every_builder_and_place = pytest.mark.parametrize(("builder", "positions"), PLACES)
looking_back_from_every_place = pytest.mark.parametrize(
    ("builder", "positions"), [case for case in PLACES if case[0] not in NOT_CAUSAL]
)
looking_both_ways = pytest.mark.parametrize("builder", sorted(BIDIRECTIONAL))
tied_or_not = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def settings_of(builder: str, **changed: Any) -> Any:
    """HSTU knows the times of the history only, unless it is told otherwise: then all laws of the others hold.

    Recurrent and convolutional builders have no places, heads or feed-forward parts: where a law speaks of them, it
    holds for these without.
    """
    builder, chosen = CHOICES.get(builder, (builder, {}))
    numbers = {"kind": builder, "width": 8, "depth": 2, "heads": 2, "length": 64, "dropout": 0.0}
    numbers |= {"target_time": False} if builder == "hstu" else {"feed_forward": 2}
    unplaced = builder in UNPLACED or chosen.get("body") == "gru"
    left_out = {"heads", "feed_forward", "positions"} if unplaced else set()
    keys = {key: value for key, value in {**numbers, **chosen, **changed}.items() if key not in left_out}
    if builder == "seq2seq":
        keys = {f"body__{key}" if key in ("heads", "feed_forward", "positions") else key: keys[key] for key in keys}
    return model_settings(**keys)


def case_of(builder: str, **changed: Any) -> Case:
    """As the laws take it."""
    return Case(settings=settings_of(builder, **changed))


def new_model(builder: str, *, seed: int = 0, n_items: int = N_ITEMS, **changed: Any) -> SequenceModel:
    """As training gets it."""
    return replace(case_of(builder, **changed), n_items=n_items).new(seed=seed)


def model_of(builder: str, *, seed: int = 0, **changed: Any) -> SequenceModel:
    """In evaluation mode, with biases and norms moved away from where they start."""
    return case_of(builder, **changed).perturbed(seed=seed)
