"""The interface of text encoders: texts → vectors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import numpy as np
from torch import Tensor, nn


class TextEncoder(nn.Module):
    """Encodes texts of items. Its parameters are buffers, saved with the model that was trained on its vectors, so that
    texts of new items are encoded in the same way.

    A text without any known term has the vector 0. A text's vector does not depend on the other texts, but for
    rounding. The buffers of a run, by name, are the arguments of a constructor."""

    directions: Tensor  # [features before the projection, width]

    @classmethod
    @abstractmethod
    def fitted(cls, texts: Sequence[str], width: int) -> Self:
        """Fit an encoder to the texts of a catalogue; `width`: features of its vectors."""

    @classmethod
    def refusal(cls) -> str | None:
        """Why texts cannot be encoded on this machine; None if they can."""
        return None

    @property
    def width(self) -> int:
        """Features of a vector."""
        return int(self.directions.shape[1])

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors [n, width] float32."""
