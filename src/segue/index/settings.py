"""The section `index`: how the best items of a query are found."""

from __future__ import annotations

import importlib.util
from typing import Annotated

from msgspec import Meta

from segue.errors import SettingsError
from segue.kinds import Count, Kind

CHUNK, RECALL = 65536, 0.99
RecallShare = Annotated[float, Meta(gt=0, le=1)]


class ExactSettings(Kind, frozen=True, tag="exact"):
    """Every item is scored."""

    chunk: Count = CHUNK
    """Items scored at a time. It bounds memory and changes no answer."""


class ApproximateSettings(ExactSettings, frozen=True, tag="approximate"):
    """Only the parts of the catalogue near a query are scored, through faiss (the extra `ann`)."""

    recall: RecallShare = RECALL
    """The share of the best 100 items that must be found on a sample of queries. The less, the faster."""

    def __post_init__(self) -> None:
        if not faiss_installed():
            raise SettingsError(
                "index = 'approximate' needs faiss, which is not installed: run `pip install 'segue[ann]'`, or choose "
                "'auto' or 'exact'."
            )


class AutoSettings(ExactSettings, frozen=True, tag="auto"):
    """Codes if the model has them; approximate for a large catalogue if faiss is installed; two-stage for a mixture of
    logits over a large catalogue; otherwise exact."""

    recall: RecallShare = RECALL
    """The share of the best 100 items that an approximate index must find on a sample of queries."""


class TwoStageSettings(Kind, frozen=True, tag="two-stage"):
    """A mixture of logits scores only the items that a cheap first stage leaves."""


class CodeIndexSettings(Kind, frozen=True, tag="codes"):
    """The best items by sums over their codes, exactly, without their vectors."""


IndexSettings = AutoSettings | ExactSettings | ApproximateSettings | TwoStageSettings | CodeIndexSettings


def faiss_installed() -> bool:
    return importlib.util.find_spec("faiss") is not None


def refuse_misfit(settings: IndexSettings, *, mixture: bool, codes: bool) -> None:
    """Refuse an index that cannot search a model: one with a `mixture` of logits, or with `codes` of items."""
    if isinstance(settings, CodeIndexSettings) and (mixture or not codes):
        raise SettingsError(
            "index = 'codes' needs model.items = 'codes' and model.similarity = 'dot' or 'cosine': choose index = "
            "'auto'."
        )
    if isinstance(settings, TwoStageSettings) and not mixture:
        raise SettingsError(
            "index = 'two-stage' needs model.similarity = 'mol': choose index = 'auto', 'exact' or 'approximate'."
        )
    if isinstance(settings, ApproximateSettings) and mixture:
        raise SettingsError(
            "index = 'approximate' needs model.similarity = 'dot' or 'cosine': choose index = 'auto', 'exact' or "
            "'two-stage'."
        )
