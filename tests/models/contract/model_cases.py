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
    "bidirectional",
    "case_of",
    "causal",
    "causal_at_every_position",
    "eight_users",
    "every_builder",
    "every_builder_and_position",
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
"""Builders with other choices, tested by the same laws; together they cover each choice once."""

PLANNING = (*sorted(CONTINUING), RECURRENT)
NOT_CAUSAL = BIDIRECTIONAL.union(PLANNING)

every_builder = pytest.mark.parametrize("builder", sorted(BUILDERS.keys() | CHOICES.keys()))
causal = pytest.mark.parametrize("builder", sorted((BUILDERS.keys() | CHOICES.keys()) - NOT_CAUSAL))
planning = pytest.mark.parametrize("builder", PLANNING)
POSITIONS = [
    *((builder, positions) for builder in sorted(BUILDERS.keys() - UNPLACED) for positions in ("newest", "oldest")),
    *((builder, choices.get("positions", "none")) for builder, (_, choices) in CHOICES.items()),
    *((builder, "none") for builder in sorted(UNPLACED)),
]
every_builder_and_position = pytest.mark.parametrize(("builder", "positions"), POSITIONS)
causal_at_every_position = pytest.mark.parametrize(
    ("builder", "positions"), [case for case in POSITIONS if case[0] not in NOT_CAUSAL]
)
bidirectional = pytest.mark.parametrize("builder", sorted(BIDIRECTIONAL))
tied_or_not = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def settings_of(builder: str, **changed: Any) -> Any:
    """HSTU uses only the times of the history unless `target_time` is set, so that all laws of the others hold.

    Recurrent and convolutional builders have no positions, heads or feed-forward parts: laws about these are tested
    without them.
    """
    builder, choices = CHOICES.get(builder, (builder, {}))
    numbers = {"kind": builder, "width": 8, "depth": 2, "heads": 2, "length": 64, "dropout": 0.0}
    numbers |= {"target_time": False} if builder == "hstu" else {"feed_forward": 2}
    unplaced = builder in UNPLACED or choices.get("body") == "gru"
    absent = {"heads", "feed_forward", "positions"} if unplaced else set()
    keys = {key: value for key, value in {**numbers, **choices, **changed}.items() if key not in absent}
    if builder == "seq2seq":
        keys = {f"body__{key}" if key in ("heads", "feed_forward", "positions") else key: keys[key] for key in keys}
    return model_settings(**keys)


def case_of(builder: str, **changed: Any) -> Case:
    """The settings as a case of the laws."""
    return Case(settings=settings_of(builder, **changed))


def new_model(builder: str, *, seed: int = 0, n_items: int = N_ITEMS, **changed: Any) -> SequenceModel:
    """A newly initialised model."""
    return replace(case_of(builder, **changed), n_items=n_items).new(seed=seed)


def model_of(builder: str, *, seed: int = 0, **changed: Any) -> SequenceModel:
    """In evaluation mode, with biases and norms away from their initial values."""
    return case_of(builder, **changed).perturbed(seed=seed)
