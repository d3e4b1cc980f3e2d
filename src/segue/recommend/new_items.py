"""Items that a model was not trained on → a Recommender that answers them by their content, beside the one before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl
import torch

from segue.data.new_items import fitted
from segue.data.vocabulary import Vocabulary
from segue.errors import InputError
from segue.index.search import ItemIndex
from segue.models.facts import Facts
from segue.models.items import CategoryTable
from segue.models.sequence import SequenceModel

if TYPE_CHECKING:
    from segue.recommend.recommender import Recommender

NAMED = 5  # ids in a sentence
NEEDED = (
    "train a run whose items are known by their content: --set model.items=vectors or ids+vectors, with model.vectors "
    "or model.texts naming columns of the catalogue"
)


class ItemsAdded(msgspec.Struct, frozen=True):
    """A run folder with items that it was not trained on."""

    run: str
    added: int
    changed: int
    """Items added before, which have new content."""
    duplicates: int
    """Rows left out because their id came before."""
    items: int
    """All that it has now."""
    ignored: list[str]
    """Columns that the run's catalogue does not have."""


@dataclass(frozen=True, slots=True, eq=False)
class NewItems:
    """What of a table a run can take."""

    rows: pl.DataFrame
    """The items that it can, with the columns of the run's vocabulary."""
    misfits: dict[str, str]
    """The ids of the others, and why."""
    changed: bool
    """Whether some of the rows are of items that were added before."""

    def refuse_misfits(self) -> None:
        """One sentence about the first kind of trouble, with the ids that have it."""
        if not self.misfits:
            return
        reason = next(iter(self.misfits.values()))
        named = _named(name for name, why in self.misfits.items() if why == reason)
        raise InputError(f"New items that cannot be taken: {named}: {reason}.")


def refusal(recommender: Recommender) -> str | None:
    """Why a run can take no new item at all; None where it can take some."""
    if recommender.settings is None:
        return "this model is not of a run folder, so nothing says which columns its items are known by"
    if recommender.settings.category:
        return None
    return f"this run knows items by their ids alone; {NEEDED}"


def new_items(recommender: Recommender, table: pl.DataFrame) -> NewItems:
    """Which items of a table a run can take."""
    rows, reasons = fitted(table, recommender.vocabulary.table)
    known = recommender.vocabulary.numbers(rows["id"].to_list(), unknown="zero")
    own = (known > 0) & (known <= len(recommender.vocabulary) - recommender.added)
    unable = refusal(recommender)
    if unable is not None:
        reasons = pl.Series([unable] * rows.height, dtype=pl.String)
    else:
        trained = pl.select(pl.when(pl.Series(own)).then(pl.lit("it is an item of the run already"))).to_series()
        unknown = _without_content(recommender, rows)
        reasons = pl.select(pl.coalesce(trained, reasons, unknown)).to_series()
    fits = reasons.is_null()
    misfits = dict(zip(rows["id"].filter(~fits), reasons.filter(~fits), strict=True))
    return NewItems(rows=rows.filter(fits), misfits=misfits, changed=bool(known[fits.to_numpy()].any()))


def extended(recommender: Recommender, rows: pl.DataFrame) -> tuple[SequenceModel, ItemIndex, Vocabulary]:
    """A run's parts with items that it can take: `NewItems.rows`. Its own stay as they are."""
    vocabulary = recommender.vocabulary.with_rows(rows)
    numbers = np.sort(vocabulary.numbers(rows["id"].to_list(), unknown="error"))
    model = recommender.model.with_items(recommender.model.items.extended(_facts(recommender, vocabulary)))
    with torch.inference_mode():
        vectors = model.item_vectors(torch.from_numpy(numbers))
    return model, recommender.index.with_items(vectors, numbers, n_items=len(vocabulary)), vocabulary


def _without_content(recommender: Recommender, rows: pl.DataFrame) -> pl.Series:
    """Why nothing is known of an item [n], null where something is."""
    categories = recommender.model.items
    assert recommender.settings is not None and isinstance(categories, CategoryTable)
    column = recommender.settings.category
    named = rows[column].cast(pl.String).fill_null("")
    known = recommender.vocabulary.table[column].cast(pl.String).fill_null("").unique()
    said = pl.format("its {} is '{}', which no item of the run has", pl.lit(column), named)
    return pl.select(pl.when(~named.is_in(known.implode())).then(said)).to_series()


def _facts(recommender: Recommender, vocabulary: Vocabulary) -> Facts:
    """What is known of every item of the longer vocabulary."""
    categories = recommender.model.items
    assert recommender.settings is not None and isinstance(categories, CategoryTable)
    return Facts(categories=vocabulary.categories(recommender.settings.category), kinds=recommender.model.kinds)


def _named(ids: Iterable[str]) -> str:
    """Some ids, and how many more there are."""
    listed = list(ids)
    more = f" and {len(listed) - NAMED:,} more" if len(listed) > NAMED else ""
    return ", ".join(map(repr, listed[:NAMED])) + more
