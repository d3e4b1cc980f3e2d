"""Texts → vectors: what every encoder of words can do, whatever it makes of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
from torch import Tensor, nn


class TextEncoder(nn.Module):
    """What it found in the texts that it was fitted to are buffers, so that it is saved with the model that was trained
    on its vectors, and reads the words of new items as it read those. A text that says nothing to it gets zeros, and a
    text's vector does not depend on its company, but for rounding."""

    @classmethod
    @abstractmethod
    def fitted(cls, texts: Sequence[str], width: int) -> Self:
        """To the texts of a catalogue; vectors will have so many features."""

    @classmethod
    @abstractmethod
    def from_buffers(cls, buffers: Mapping[str, Tensor]) -> Self:
        """As it was, of the buffers that a run keeps, by name."""

    @classmethod
    def refusal(cls) -> str | None:
        """Why it can read no words here; None where it can. What was read before does not need it."""
        return None

    @property
    @abstractmethod
    def width(self) -> int: ...

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors [n, width] float32."""
