"""What a model is built from besides its settings: facts of the log and of its catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from segue.data.vocabulary import Vocabulary
from segue.errors import InputError, SettingsError
from segue.models.settings import ModelSettings
from segue.models.text.encoder import TextEncoder
from segue.models.text.hashed import HashedTexts
from segue.models.text.sentences import SentenceTexts

TEXT_ENCODERS: dict[str, type[TextEncoder]] = {"hashed": HashedTexts, "sentences": SentenceTexts}


@dataclass(frozen=True, eq=False)
class Facts:
    """Only what the settings ask for is there."""

    categories: np.ndarray | None = None  # [V + 1] int64: the number 1 … C of each item's category
    content: np.ndarray | None = None  # [V + 1, F] float32: what the catalogue says of each item; row 0 is zero
    codes: np.ndarray | None = None  # [V + 1, parts] uint8: as `train/codes.py` finds them
    kinds: tuple[str, ...] = ()
    """Names of the kinds of events, by number."""
    texts: TextEncoder | None = None
    """What made vectors of the catalogue's words, and will of new items' words."""


NO_FACTS = Facts()
"""For models that are built from their settings alone."""


def facts_of(
    settings: ModelSettings,
    vocabulary: Vocabulary,
    kinds: Sequence[str] = (),
    texts: TextEncoder | None = None,
    codes: np.ndarray | None = None,
) -> Facts:
    """The facts that a model of these settings needs; `kinds` as the data has them. `texts`: what makes vectors of
    words, where a model has been trained on its vectors; else it is fitted to the vocabulary's words. `codes`: the
    items', where the settings ask for them: they are found in the log, not in the catalogue."""
    if not settings.has_content:
        return Facts(categories=vocabulary.categories(settings.category), kinds=tuple(kinds), codes=codes)
    if settings.texts and texts is None:
        encoder = TEXT_ENCODERS[settings.text_encoder]
        texts = encoder.fitted(vocabulary.texts(settings.texts), settings.text_width)
    return Facts(content=content_of(settings, vocabulary, texts), kinds=tuple(kinds), texts=texts)


def content_of(settings: ModelSettings, vocabulary: Vocabulary, texts: TextEncoder | None) -> np.ndarray:
    """What the columns that the settings name say of each item [V + 1, F]; row 0 is zero, and so are those of items of
    which they say nothing."""
    parts = [vocabulary.vectors(settings.vectors)] if settings.vectors else []
    if texts is not None:
        words = texts.encode(vocabulary.texts(settings.texts))
        parts.append(np.concatenate((np.zeros((1, texts.width), dtype=np.float32), words)))
    return np.concatenate(parts, axis=1)


def refuse_silence(settings: ModelSettings, vocabulary: Vocabulary) -> None:
    """Refuse a catalogue that does not say what the settings ask for, or words that cannot be read, before anything is
    begun."""
    vocabulary.categories(settings.category)
    said = bool(settings.vectors) and bool(vocabulary.vectors(settings.vectors).any())
    said |= bool(settings.texts) and any(vocabulary.texts(settings.texts))
    if settings.has_content and not said:
        named = ", ".join(name for name in (*settings.texts, settings.vectors) if name)
        raise InputError(
            f"The catalogue says nothing of any item in {named}: give what model.texts or model.vectors name with "
            "`segue prepare --items`."
        )
    refusal = TEXT_ENCODERS[settings.text_encoder].refusal() if settings.texts else None
    if refusal is not None:
        raise SettingsError(f"model.text_encoder = {settings.text_encoder!r}: {refusal}, or choose 'hashed'.")
