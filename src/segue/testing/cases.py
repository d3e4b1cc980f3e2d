"""What a law is tried on: a builder with settings → its models; lists of items → batches, and their states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch
from segue.layers.packed import PackedBatch, tensors
from segue.models.build import Builder, build_model, builder_name
from segue.models.facts import NO_FACTS, Facts
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings

N_ITEMS = 30
SMALL = ModelSettings(width=32, depth=2, heads=2, length=64, dropout=0.0, feed_forward=2)


@dataclass(frozen=True)
class Case:
    """A builder, and settings that it is tried with. A history may have 64 events, so `model.length` is at least that
    much; dropout is left to the laws."""

    build: Builder
    settings: ModelSettings = SMALL
    n_items: int = N_ITEMS
    facts: Facts = NO_FACTS
    """What the settings ask for besides, such as the items' content."""

    def changed(self, **settings: Any) -> Case:
        """The same builder with other settings, by their names in the section `model`."""
        return replace(self, settings=msgspec.structs.replace(self.settings, **settings))

    @property
    def named(self) -> ModelSettings:
        """The settings as a run of this builder has them."""
        return msgspec.structs.replace(self.settings, encoder=builder_name(self.build))

    def new(self, *, seed: int = 0) -> SequenceModel:
        """A model as training gets it."""
        generator = torch.Generator().manual_seed(seed)
        return build_model(self.named, self.n_items, generator=generator, facts=self.facts, encoder=self.build)

    def moved(self, *, seed: int = 0) -> SequenceModel:
        """A model in evaluation mode whose weights are nowhere zero but in the padding rows: biases and norms start
        where they have no effect."""
        model, generator = self.new(seed=seed), torch.Generator().manual_seed(seed + 1)
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
    """The same as tensors."""
    return tensors(batch_of(*users))


def random_users(lengths: Sequence[int], seed: int = 0, n_items: int = N_ITEMS) -> list[list[int]]:
    """Histories of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, n_items + 1, size=length).tolist() for length in lengths]


def states_of(
    model: SequenceModel, users: Sequence[Sequence[int]], histories: Sequence[int] | None = None
) -> list[Tensor]:
    """Each user's states, encoded together; `histories`: how many events of each are read, where a decoder is fed the
    rest."""
    batch = batch_of(*users)
    if histories is not None:
        batch = replace(batch, histories=np.array(histories))
    return list(torch.split(model.encode(tensors(batch)), [len(user) for user in users]))


def questioned(model: SequenceModel, users: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens that an answer to each user is made from: its events, and a mask where the model asks with one."""
    return [[*user, model.items.mask_number] if model.items.mask is not None else [*user] for user in users]


def asked(model: SequenceModel, users: Sequence[Sequence[int]]) -> Tensor:
    """The questions [B, D'] by way of every state."""
    return model.head(torch.stack([state[-1] for state in states_of(model, questioned(model, users))]))


def assert_close(found: Tensor, expected: Tensor, atol: float, sentence: str = "") -> None:
    """Equal up to `atol`, or the sentence and by how much not."""
    torch.testing.assert_close(found, expected, rtol=0, atol=atol, msg=lambda why: f"{sentence}\n{why}".strip())
