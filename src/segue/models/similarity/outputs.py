"""What is done to a question's vector before it is compared with items."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from segue.models.settings import ModelSettings

EPS = 1e-6


class L2Output(nn.Module):
    """Of length one; a vector of almost no length is not made longer."""

    def forward(self, vectors: Tensor) -> Tensor:
        return functional.normalize(vectors, dim=-1, eps=EPS)


class LayerNormOutput(nn.Module):
    """Features with mean zero and variance one, without weights of its own."""

    def forward(self, vectors: Tensor) -> Tensor:
        return functional.layer_norm(vectors, (int(vectors.shape[-1]),), eps=EPS)


class MLPOutput(nn.Module):
    """Two layers, all of a state's features going into the first of them."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.width = width
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, out)

    def forward(self, vectors: Tensor) -> Tensor:
        result: Tensor = self.outer(functional.gelu(self.inner(vectors)))
        return result


def make_output(settings: ModelSettings) -> nn.Module | None:
    """What `model.output` asks for."""
    match settings.output:
        case "none":
            return None
        case "l2":
            return L2Output()
        case "layer-norm":
            return LayerNormOutput()
        case "mlp":
            return MLPOutput(settings.width, settings.item_features)
