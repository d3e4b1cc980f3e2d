"""segue.testing: a valid model passes every law, and each broken model here fails its law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from settings_tables import model_settings
from torch import Tensor, nn

from segue import testing
from segue.layers.incremental import TokenStep
from segue.layers.packed import PackedBatch, pack, pad
from segue.models.build import Builder
from segue.models.encoders import ModelSettings
from segue.models.encoders.sasrec import SASRecSettings
from segue.models.sequence import Parts, SequenceModel
from segue.models.weight_init import xavier_init
from segue.testing import Case, check, laws
from segue.testing.learning import memorises_eight_users

SASREC = SASRecSettings(width=32, length=64, dropout=0.0)


class Sums(nn.Module):
    """A valid block: a map of the sum of the tokens so far."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.map = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        mixed = self.mixed(pad(x, batch), batch)
        output: Tensor = self.drop(self.map(torch.tanh(pack(mixed, batch))))
        return x + output

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        newest: Tensor = self(x, batch)[batch.last]
        return newest

    def mixed(self, padded: Tensor, batch: PackedBatch) -> Tensor:  # noqa: ARG002  # subclasses use more
        return padded.cumsum(1)  # [B, N, D]

    def attention_weights(self, x: Tensor, batch: PackedBatch) -> None:
        """None: this block has no attention."""


def builder_of(block: type[Sums], initialise: Callable[..., None] = xavier_init, **options: Any) -> Builder:
    def build(settings: ModelSettings, parts: Parts, generator: torch.Generator) -> SequenceModel:
        model = SequenceModel(
            parts,
            settings.positions.build(settings.length, settings.width),  # type: ignore[union-attr]
            [block(settings.width, settings.dropout) for _ in range(settings.depth)],
            norm=nn.LayerNorm(settings.width),
            scale=1.0,
            dropout=settings.dropout,
            **options,
        )
        initialise(model, generator)
        return model

    return build


class LooksAhead(Sums):
    def mixed(self, padded: Tensor, batch: PackedBatch) -> Tensor:  # noqa: ARG002
        return padded.flip(1).cumsum(1).flip(1)


class MixesUsers(Sums):
    def mixed(self, padded: Tensor, batch: PackedBatch) -> Tensor:  # noqa: ARG002
        return padded.cumsum(1) + padded[:, :1].mean(0)


class DependsOnPadding(Sums):
    def mixed(self, padded: Tensor, batch: PackedBatch) -> Tensor:
        return padded.cumsum(1) / batch.longest


class QueriesTheFirstState(Sums):
    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        newest: Tensor = self(x, batch)[batch.last - batch.lengths + 1]
        return newest


class UnusedParameters(Sums):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(width, dropout)
        self.never = nn.Linear(width, width)


class NeedsTwoEvents(Sums):
    def mixed(self, padded: Tensor, batch: PackedBatch) -> Tensor:
        means = padded.cumsum(1) / torch.arange(1, batch.longest + 1)[:, None]
        counts = torch.arange(batch.longest)[:, None]  # of degrees of freedom: none for one event
        return means + (padded - means).square().cumsum(1) / counts


class UsesTheQueryTime(Sums):
    def mixed(self, padded: Tensor, batch: PackedBatch) -> Tensor:
        times = batch.times[batch.last] if batch.query_times is None else batch.query_times
        last = torch.zeros_like(padded).index_put_((torch.arange(batch.size), batch.lengths - 1), padded.new_ones(()))
        return padded.cumsum(1) + last * times.to(padded.dtype)[:, None, None] / 10**6


class UsesLaterTimes(Sums):
    """Adds the sum of all times, later ones included."""

    def mixed(self, padded: Tensor, batch: PackedBatch) -> Tensor:
        times = pad(batch.times.to(padded.dtype)[:, None], batch)  # [B, N, 1]
        return padded.cumsum(1) + times.sum(1, keepdim=True) / 10**3


class DropsInEvaluation(Sums):
    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.1), batch)


class UnsavedState(Sums):
    shift: Tensor
    count = 0

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(width, dropout)
        UnsavedState.count += 1
        self.register_buffer("shift", torch.full((), float(UnsavedState.count)), persistent=False)

    def mixed(self, padded: Tensor, batch: PackedBatch) -> Tensor:  # noqa: ARG002
        return padded.cumsum(1) + self.shift


class EncodesTheNewestOnly(Sums):
    """Histories with the same newest item and length get the same state."""

    def mixed(self, padded: Tensor, batch: PackedBatch) -> Tensor:  # noqa: ARG002
        return padded


class FalselyCausal(Sums):
    """Declares a KV cache that holds nothing."""

    timed, causal = False, True

    def keys_values(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), 2, 1, 1)

    def token_step(self) -> TokenStep:
        return lambda x, _kept, _buckets: x


def global_random_state(model: SequenceModel, generator: torch.Generator) -> None:
    xavier_init(model, generator)
    nn.init.normal_(cast(Sums, model.blocks[0]).map.weight)


def full_padding(model: SequenceModel, generator: torch.Generator) -> None:
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)


BROKEN: list[tuple[Builder, Callable[[Case], None], str]] = [
    (
        builder_of(LooksAhead),
        laws.later_events_change_nothing_earlier,
        "The item at position 1 changes earlier states",
    ),
    (builder_of(UsesLaterTimes), laws.later_times_change_nothing_earlier, "The time at position 1 changes earlier"),
    (builder_of(MixesUsers), laws.batches_change_nothing, "in a batch are not those of the user alone"),
    (builder_of(DependsOnPadding), laws.padding_changes_nothing, "A user of 13 events changes the states of others"),
    (builder_of(QueriesTheFirstState), laws.queries_are_the_newest_states, "`query` is not `head` of the newest state"),
    (builder_of(UnusedParameters), laws.parameters_learn, r"no part in any query: blocks\.0\.never\.bias, "),
    (builder_of(NeedsTwoEvents), laws.one_event_is_enough, "not finite for a user of one"),
    (builder_of(UsesTheQueryTime), laws.query_time_counts_only_if_declared, "does not set `target_time`"),
    (builder_of(DropsInEvaluation), laws.evaluation_is_repeatable, "Two passes in evaluation mode differ"),
    (builder_of(UnsavedState), laws.saving_changes_nothing, "`encode` changes by saving"),
    (builder_of(EncodesTheNewestOnly), memorises_eight_users, "targets are memorised: the model does not learn"),
    (builder_of(Sums, global_random_state), laws.building_is_repeatable, "is not sampled from the generator"),
    (builder_of(Sums, full_padding), laws.padding_is_zero, r"call `items\.clear_padding\(\)`"),
    (builder_of(Sums), laws.prefixes_are_encoded_as_inside_the_whole, "after 1 events changes if more"),
    (builder_of(FalselyCausal), laws.cached_encoding_changes_nothing, "An event encoded alone does not give"),
]


def test_a_valid_model_passes_every_law() -> None:
    testing.check_encoder(builder_of(Sums))


@pytest.mark.parametrize(("build", "law", "sentence"), BROKEN, ids=[law.__name__ for _, law, _ in BROKEN])
def test_a_broken_model_fails_its_law(build: Builder, law: Callable[[Case], None], sentence: str) -> None:
    counted_from = "oldest" if law is laws.cached_encoding_changes_nothing else "newest"
    with pytest.raises(AssertionError, match=sentence):
        law(Case(build).changed(depth=1, positions=counted_from))


def test_every_law_can_be_broken() -> None:
    every_law = {*check.ALWAYS, *check.CAUSAL, *check.INCREMENTAL}
    assert {law for _, law, _ in BROKEN} == every_law and len(every_law) == 15


def test_laws_depend_on_the_declared_properties() -> None:
    default_laws = testing.laws_of(Case(settings=SASREC))
    causal = {laws.later_events_change_nothing_earlier, laws.later_times_change_nothing_earlier}
    cache_laws = set(testing.laws_of(Case(settings=SASREC).changed(positions="oldest"))) - set(default_laws)
    assert cache_laws == {laws.prefixes_are_encoded_as_inside_the_whole, laws.cached_encoding_changes_nothing}
    bert_laws = testing.laws_of(Case(settings=model_settings(kind="bert4rec", width=32, length=64)))
    assert set(default_laws) - set(bert_laws) == causal and set(bert_laws) < set(default_laws)


def test_checks_do_not_change_the_global_random_state() -> None:
    before, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    laws.evaluation_is_repeatable(Case(settings=SASREC))
    memorises_eight_users(Case(settings=SASREC))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numbers)  # type: ignore[index]
