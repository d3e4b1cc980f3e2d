"""How answers are looked up, in numbers."""

from __future__ import annotations

import importlib.util
from typing import Literal

import msgspec

from segue.errors import SettingsError

Kind = Literal["auto", "exact", "approximate", "two-stage", "codes"]


class IndexSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `index` of the settings."""

    kind: Kind = "auto"
    """Exact: every item is scored. Approximate: only the parts of the catalogue that a question points to, through
    faiss (the extra `ann`). Two-stage: a mixture of logits of what cheap products leave. Codes: the best by sums over
    items' codes, exactly, without their vectors. Auto: codes where the model has them; else exact while the catalogue
    is small enough to be scored as fast, and where faiss is missing."""
    recall: float = 0.99
    """Approximate: the share of the best 100 that must be found on a sample of questions. The less, the faster."""
    chunk: int = 65536
    """Items scored at a time. It bounds memory and changes no answer."""

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise SettingsError(f"index.chunk must be at least 1, got {self.chunk}.")
        if not 0 < self.recall <= 1:
            raise SettingsError(f"index.recall must be a share above 0 and at most 1, got {self.recall}.")
        if self.kind == "approximate" and not faiss_installed():
            raise SettingsError(
                "index.kind = 'approximate' needs faiss, which is not installed; run `pip install 'segue[ann]'`, or "
                "choose 'auto' or 'exact'."
            )


def faiss_installed() -> bool:
    return importlib.util.find_spec("faiss") is not None


def refuse_misfit(kind: Kind, *, similarity: str, items: str) -> None:
    """Inner products (`similarity` "dot" or "cosine") and mixtures of logits ("mol") are looked up differently, and so
    are `items` of "codes"."""
    if kind == "codes" and (items != "codes" or similarity == "mol"):
        raise SettingsError(
            "index.kind = 'codes' looks up sums over items' codes, which need model.items = 'codes' and a single "
            f"product, got model.items = {items!r} and model.similarity = {similarity!r}: choose index.kind = 'auto'."
        )
    if kind == "two-stage" and similarity != "mol":
        raise SettingsError(
            f"index.kind = 'two-stage' looks up mixtures of logits, and model.similarity = {similarity!r} is a single "
            "product: choose index.kind = 'auto', 'exact' or 'approximate'."
        )
    if kind == "approximate" and similarity == "mol":
        raise SettingsError(
            "index.kind = 'approximate' looks up single products, and model.similarity = 'mol' mixes several: choose "
            "index.kind = 'auto', 'exact' or 'two-stage'."
        )
