"""Fixed samples and vectors, and a record of the largest tensor created."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from settings_tables import model_settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from segue.models.build import build_model
from segue.models.sequence import SequenceModel
from segue.models.similarity.dot import Similarity
from segue.objective.losses.sampled import SampledQueries
from segue.objective.samplers.collisions import Groups
from segue.objective.samplers.samplers import Sampler


class Fixed(Sampler):
    """A sampler that returns the given items, so many times over. `log_q` [V + 1] is by item number."""

    def __init__(self, items: Sequence[int], log_q: Sequence[float], *, times: int = 1) -> None:
        self._items = torch.tensor(items).repeat(times)
        self._log_q = torch.tensor(log_q, dtype=torch.float32)

    def sample(self, count: int, generator: torch.Generator, present: Tensor) -> Tensor:  # noqa: ARG002
        return self._items

    def log_q(self, items: Tensor, present: Tensor) -> Tensor:  # noqa: ARG002
        return self._log_q[items]


def scores_of(
    similarity: Similarity,
    hidden: Tensor,
    answers: Tensor,
    vectors: Tensor,
    targets: Tensor,
    items: Tensor,
    groups: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """The scores of sampled items, [K] or [M, K]."""
    grouped = of_targets(groups, targets)
    return SampledQueries(similarity, hidden, answers, vectors, targets, items, groups=grouped, **more).scores()


def of_targets(groups: Tensor | None, targets: Tensor) -> Groups | None:
    """Groups whose positives are their rows' targets."""
    return None if groups is None else Groups(groups, groups, targets)


def model_of(vectors: Sequence[Sequence[float]], similarity: Literal["dot", "cosine"] = "dot") -> SequenceModel:
    """A model that compares its states directly with these item vectors, numbered from 1."""
    shape = model_settings(kind="sasrec", width=len(vectors[0]), depth=1, similarity=similarity)
    model = build_model(shape, len(vectors), generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        model.items.into[1:] = torch.tensor(vectors, dtype=torch.float64)
    return model


class LargestMade(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the size of the largest integer or boolean tensor created within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_floating_point():
            self.numbers = max(self.numbers, result.numel())
        return result
