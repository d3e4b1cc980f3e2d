"""Transformations of a query before it is compared with items."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from segue.kinds import CountOrZero, Kind

EPS = 1e-6


class L2Output(nn.Module):
    """Scales vectors to length one, except for vectors of almost no length."""

    def forward(self, vectors: Tensor) -> Tensor:
        return functional.normalize(vectors, dim=-1, eps=EPS)


class MLPOutput(nn.Module):
    """Two layers over all features of a state."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.width = width
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, out)

    def forward(self, vectors: Tensor) -> Tensor:
        result: Tensor = self.outer(functional.gelu(self.inner(vectors)))
        return result


class NoOutputSettings(Kind, frozen=True, tag="none"):
    """The query stays as it is."""

    def build(self, width: int) -> nn.Module | None:  # noqa: ARG002
        return None


class L2OutputSettings(Kind, frozen=True, tag="l2"):
    """The query is scaled to length one."""

    def build(self, width: int) -> nn.Module | None:  # noqa: ARG002
        return L2Output()


class LayerNormOutputSettings(Kind, frozen=True, tag="layer-norm"):
    """The query's features are centred and scaled."""

    def build(self, width: int) -> nn.Module | None:
        return nn.LayerNorm(width, eps=EPS, elementwise_affine=False)


class MLPOutputSettings(Kind, frozen=True, tag="mlp"):
    """The query goes through a network of two layers."""

    item_width: CountOrZero = 0
    """Features of an item, with model.inputs = 'events'; 0: as many as a token has."""

    def build(self, width: int) -> nn.Module | None:
        return MLPOutput(width, self.item_width or width)


OutputSettings = NoOutputSettings | L2OutputSettings | LayerNormOutputSettings | MLPOutputSettings
