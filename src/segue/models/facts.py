"""What a model is built from besides its settings: facts of the log and of its catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from segue.data.vocabulary import Vocabulary
from segue.errors import InputError
from segue.models.settings import ModelSettings
from segue.models.texts import HashedTexts


@dataclass(frozen=True, eq=False)
class Facts:
    """Only what the settings ask for is there."""

    categories: np.ndarray | None = None  # [V + 1] int64: the number 1 … C of each item's category
    content: np.ndarray | None = None  # [V + 1, F] float32: what the catalogue says of each item; row 0 is zero
    kinds: tuple[str, ...] = ()
    """Names of the kinds of events, by number."""
    texts: HashedTexts | None = None
    """What made vectors of the catalogue's words, and will of new items' words."""


NO_FACTS = Facts()
"""For models that are built from their settings alone."""


def facts_of(
    settings: ModelSettings, vocabulary: Vocabulary, kinds: Sequence[str] = (), texts: HashedTexts | None = None
) -> Facts:
    """The facts that a model of these settings needs; `kinds` as the data has them. `texts`: what makes vectors of
    words, where a model has been trained on its vectors; else it is fitted to the vocabulary's words."""
    if settings.items == "ids":
        return Facts(categories=vocabulary.categories(settings.category), kinds=tuple(kinds))
    parts = [vocabulary.vectors(settings.vectors)] if settings.vectors else []
    if settings.texts:
        words = vocabulary.texts(settings.texts)
        texts = HashedTexts.fitted(words, settings.text_width) if texts is None else texts
        parts.append(np.concatenate((np.zeros((1, texts.width), dtype=np.float32), texts.encode(words))))
    content = np.concatenate(parts, axis=1)
    if not content.any():
        raise InputError(
            f"The catalogue says nothing of any item in {', '.join((*settings.texts, settings.vectors)).strip(', ')}: "
            "give what model.texts or model.vectors name with `segue prepare --items`."
        )
    return Facts(content=content, kinds=tuple(kinds), texts=texts)
