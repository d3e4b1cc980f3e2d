"""Every model the package can build, small, with weights that are nowhere zero but in the padding rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from segue.data.batch import Batch
from segue.layers.packed import PackedBatch, tensors
from segue.models.build import BUILDERS, build_model
from segue.models.sequence import SequenceModel
from segue.models.settings import BIDIRECTIONAL, CONTINUING, ModelSettings
from segue.objective.task import Continuation, MaskedItem, Task, next_item

N_ITEMS = 30
MASK = N_ITEMS + 1

RECURRENT = "seq2seq, gru"  # a builder with two bodies is two models
PLANNING = (*sorted(CONTINUING), RECURRENT)

every_builder = pytest.mark.parametrize("builder", sorted({*BUILDERS, *PLANNING}))
asking_once = pytest.mark.parametrize("builder", sorted(BUILDERS.keys() - CONTINUING))
looking_back = pytest.mark.parametrize("builder", sorted(BUILDERS.keys() - BIDIRECTIONAL - CONTINUING))
planning = pytest.mark.parametrize("builder", PLANNING)
looking_both_ways = pytest.mark.parametrize("builder", sorted(BIDIRECTIONAL))
tied_or_not = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def settings_of(builder: str, **changed: Any) -> ModelSettings:
    """HSTU knows the times of the history only, unless it is told otherwise: then all laws of the others hold."""
    numbers = {"builder": builder, "width": 8, "depth": 2, "heads": 2, "length": 64, "dropout": 0.0}
    numbers |= {"target_time": False} if builder == "hstu" else {"feed_forward": 2}
    numbers |= changed
    if builder == RECURRENT:  # it has one head, no feed-forward part, and no places
        numbers = {name: number for name, number in numbers.items() if name not in LEFT_OUT}
        numbers |= {"builder": "seq2seq", "body": "gru"}
    return msgspec.convert(numbers, ModelSettings)


LEFT_OUT = ("heads", "feed_forward", "positions")


def new_model(builder: str, *, seed: int = 0, n_items: int = N_ITEMS, **changed: Any) -> SequenceModel:
    """As training gets it."""
    return build_model(settings_of(builder, **changed), n_items, generator=torch.Generator().manual_seed(seed))


def model_of(builder: str, *, seed: int = 0, **changed: Any) -> SequenceModel:
    """In evaluation mode, with biases and norms moved away from where they start."""
    model, generator = new_model(builder, seed=seed, **changed), torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    model.items.clear_padding()
    return model.eval()


def batch_of(*users: Sequence[int]) -> Batch:
    """One list of items a user; events a minute apart."""
    lengths = [len(user) for user in users]
    return Batch(
        items=np.array([item for user in users for item in user], dtype=np.int64),
        times=np.array([60 * place for length in lengths for place in range(length)], dtype=np.int64),
        lengths=np.array(lengths, dtype=np.int64),
    )


def packed_of(*users: Sequence[int]) -> PackedBatch:
    return tensors(batch_of(*users))


def random_users(lengths: Sequence[int], seed: int = 0, n_items: int = N_ITEMS) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, n_items + 1, size=length).tolist() for length in lengths]


def states_of(
    model: SequenceModel, users: Sequence[Sequence[int]], histories: Sequence[int] | None = None
) -> list[Tensor]:
    """Each user's states, encoded together; `histories`: how many of their events a decoder does not continue with."""
    batch = batch_of(*users)
    if histories is not None:
        batch = replace(batch, histories=np.array(histories))
    return list(torch.split(model.encode(tensors(batch)), [len(user) for user in users]))


def questioned(model: SequenceModel, users: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens that an answer to each user is made from: its events, and a mask where the model asks with one."""
    return [[*user, MASK] if model.items.mask is not None else [*user] for user in users]


def asked(model: SequenceModel, users: Sequence[Sequence[int]]) -> Tensor:
    """The questions [B, D'] by way of every state."""
    return model.head(torch.stack([state[-1] for state in states_of(model, questioned(model, users))]))


def task_of(builder: str) -> Task:
    """A task that the builder's encoder can learn."""
    if builder in PLANNING:
        return Continuation(items=4, cuts=2)
    return MaskedItem(mask=MASK, share=0.3, most=20, last=1.0) if builder in BIDIRECTIONAL else next_item


def assert_close(found: Tensor, expected: Tensor, atol: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
