"""What a model is built from besides its settings: facts of the log and of its catalogue.

Content and the text encoder become buffers of the item table, so a run encodes new texts without the catalogue.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from segue.models.text.encoder import TextEncoder


@dataclass(frozen=True, eq=False)
class DataFacts:
    """Only what the settings need is present."""

    categories: np.ndarray | None = None  # [V + 1] int64: the category 1 … C of each item
    content: np.ndarray | None = None  # [V + 1, F] float32: content features of each item; row 0 is zero
    codes: np.ndarray | None = None  # [V + 1, parts] uint8: see `training/item_codes.py`
    kinds: tuple[str, ...] = ()
    """Names of the event kinds, by number."""
    texts: TextEncoder | None = None
    """The text encoder fitted to the catalogue; it also encodes the texts of new items."""


NO_FACTS = DataFacts()
"""For models that need only their settings."""
