"""The inputs of a law: a builder and settings → models; lists of items → batches and their states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch
from segue.kinds import decode, override
from segue.layers.packed import PackedBatch, tensors
from segue.models.build import Builder, build_model, builder_name
from segue.models.encoders import ModelSettings
from segue.models.encoders.esasrec import ESASRecSettings
from segue.models.items.tables import NO_FACTS, DataFacts
from segue.models.sequence import SequenceModel

N_ITEMS = 30
SMALL = ESASRecSettings(width=32, depth=2, heads=2, length=64, dropout=0.0, feed_forward=2)


@dataclass(frozen=True)
class Case:
    """A builder and its settings. Histories have up to 64 events, so `model.length` must be at least 64; the laws set
    dropout themselves."""

    build: Builder | None = None
    """The builder from outside; None: that of the settings' kind."""
    settings: ModelSettings = SMALL
    n_items: int = N_ITEMS
    facts: DataFacts = NO_FACTS
    """Facts of a log that the settings need, such as the items' content."""

    def changed(self, **settings: Any) -> Case:
        """The same builder with other settings, by their names in the section `model`."""
        table = msgspec.to_builtins(self.settings)
        for name, value in settings.items():
            table = override(table, ModelSettings, [name], value, path="model")
        return replace(self, settings=decode(table, ModelSettings, path="model"))  # type: ignore[arg-type]

    @property
    def run_settings(self) -> ModelSettings:
        """The settings as a run of this builder stores them."""
        if self.build is None:
            return self.settings
        return msgspec.structs.replace(self.settings, encoder=builder_name(self.build))

    def new(self, *, seed: int = 0) -> SequenceModel:
        """A new model, as training starts with it."""
        generator = torch.Generator().manual_seed(seed)
        return build_model(self.run_settings, self.n_items, generator=generator, facts=self.facts, encoder=self.build)

    def perturbed(self, *, seed: int = 0) -> SequenceModel:
        """A model in evaluation mode with noise on all weights but the padding rows, because new biases and norms have
        no effect."""
        model, generator = self.new(seed=seed), torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
        model.items.clear_padding()
        return model.eval()


def batch_of(*users: Sequence[int]) -> Batch:
    """A batch of one list of items a user; events are a minute apart."""
    lengths = [len(user) for user in users]
    return Batch(
        items=np.array([item for user in users for item in user], dtype=np.int64),
        times=np.array([60 * position for length in lengths for position in range(length)], dtype=np.int64),
        lengths=np.array(lengths, dtype=np.int64),
    )


def packed_of(*users: Sequence[int]) -> PackedBatch:
    """`batch_of` as tensors."""
    return tensors(batch_of(*users))


def random_users(lengths: Sequence[int], seed: int = 0, n_items: int = N_ITEMS) -> list[list[int]]:
    """Random histories of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, n_items + 1, size=length).tolist() for length in lengths]


def states_of(
    model: SequenceModel, users: Sequence[Sequence[int]], histories: Sequence[int] | None = None
) -> list[Tensor]:
    """Each user's states, encoded in one batch. `histories`: how many events of each the encoder reads; a decoder gets
    the rest."""
    batch = batch_of(*users)
    if histories is not None:
        batch = replace(batch, histories=np.array(histories))
    return list(torch.split(model.encode(tensors(batch)), [len(user) for user in users]))


def query_tokens(model: SequenceModel, users: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens of each user's query: the events, and a mask token if the model has one."""
    return [[*user, model.items.mask_number] if model.items.mask is not None else [*user] for user in users]


def queries_of(model: SequenceModel, users: Sequence[Sequence[int]]) -> Tensor:
    """The queries [B, D'], computed from all states."""
    return model.head(torch.stack([state[-1] for state in states_of(model, query_tokens(model, users))]))


def assert_close(actual: Tensor, expected: Tensor, atol: float, sentence: str = "") -> None:
    """Raise the sentence and the difference unless both are equal up to `atol`."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, msg=lambda why: f"{sentence}\n{why}".strip())
