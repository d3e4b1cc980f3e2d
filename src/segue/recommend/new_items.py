"""Items that a run was not trained on → its model, index and vocabulary with these items, known by their content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl
import torch

from segue.data.read.catalogue import fitted
from segue.data.vocabulary import PADDING, Vocabulary
from segue.errors import InputError
from segue.index.search import ItemIndex
from segue.models.items.coded import CodeTable
from segue.models.items.content import ContentTable, VectorSettings
from segue.models.items.tables import CategorySettings, CategoryTable, DataFacts
from segue.models.sequence import SequenceModel
from segue.recommend.search import whole_groups

if TYPE_CHECKING:
    from segue.recommend.recommender import Recommender

MOST_NAMED = 5  # ids in a message
MOST_DEVIATIONS = 1e6  # of a feature of new content
UNKNOWN = -1  # a category that no item has
NEEDED = (
    "train a run whose items are known by their content: --set model.items=vectors or ids+vectors, with "
    "model.items.vectors or model.items.texts naming columns of the catalogue"
)


class ItemsAdded(msgspec.Struct, frozen=True):
    """The result of adding items to a run."""

    run: str
    added: int
    changed: int
    """Items that had been added before and now have new content."""
    duplicates: int
    """Rows left out because their id occurred in an earlier row."""
    items: int
    """All items of the run now."""
    ignored: list[str]
    """Columns of the file that the run's catalogue does not have."""


@dataclass(frozen=True, slots=True, eq=False)
class NewItems:
    """A table of new items, divided into those that a run can add and those that it cannot."""

    rows: pl.DataFrame
    """The items that can be added, with the columns of the run's vocabulary."""
    misfits: dict[str, str]
    """The ids of the others, each with the reason."""
    changed: bool
    """Whether some rows are items that were added before."""

    def refuse_misfits(self) -> None:
        """Raise an InputError with the first reason and the ids that it applies to."""
        if not self.misfits:
            return
        reason = next(iter(self.misfits.values()))
        ids = [name for name, why in self.misfits.items() if why == reason]
        more = f" and {len(ids) - MOST_NAMED:,} more" if len(ids) > MOST_NAMED else ""
        raise InputError(f"New items that cannot be added: {', '.join(map(repr, ids[:MOST_NAMED]))}{more}: {reason}.")


def refusal(recommender: Recommender) -> str | None:
    """Why a run cannot add any item; None if it can add some."""
    if recommender.settings is None:
        return "this model was not opened from a run folder, so the columns of its items' content are unknown"
    items = recommender.model.items
    if isinstance(items, ContentTable) and items.texts is not None:
        unread = items.texts.refusal()
        return None if unread is None else f"the run's {unread}"
    if isinstance(items, CategoryTable | ContentTable):
        return None
    by = "codes, which come from the log" if isinstance(items, CodeTable) else "their ids alone"
    return f"this run knows items by {by}; {NEEDED}"


def new_items(recommender: Recommender, table: pl.DataFrame) -> NewItems:
    """Divide a table into items that a run can add and items that it cannot."""
    rows, reasons = fitted(table, recommender.vocabulary.table)
    numbers = recommender.vocabulary.numbers(rows["id"].to_list(), unknown="zero")
    of_training = (numbers > 0) & (numbers <= len(recommender.vocabulary) - recommender.added)
    general = refusal(recommender)
    if general is not None:
        reasons = pl.Series([general] * rows.height, dtype=pl.String)
    else:
        trained = pl.when(pl.Series(of_training)).then(pl.lit("it is an item of the run already"))
        reasons = pl.select(pl.coalesce(trained, reasons, _without_content(recommender, rows))).to_series()
    fits = reasons.is_null()
    misfits = dict(zip(rows["id"].filter(~fits), reasons.filter(~fits), strict=True))
    return NewItems(rows=rows.filter(fits), misfits=misfits, changed=bool(numbers[fits.to_numpy()].any()))


def extended(recommender: Recommender, rows: pl.DataFrame) -> tuple[SequenceModel, ItemIndex, Vocabulary, np.ndarray]:
    """New model, index and vocabulary with the items of `NewItems.rows`, and the numbers of these items, ascending."""
    vocabulary, items = recommender.vocabulary.with_rows(rows), recommender.model.items
    numbers = vocabulary.numbers(rows["id"].to_list(), unknown="error")
    order, content = np.argsort(numbers), _content(recommender, rows)
    old, new = np.split(order, [np.count_nonzero(numbers <= items.n_items)])  # old: added before, with new content
    added = content[np.concatenate(([PADDING], 1 + new))]
    facts = DataFacts(content=added) if isinstance(items, ContentTable) else DataFacts(categories=added)
    table = items.extended(facts)
    assert isinstance(table, ContentTable | CategoryTable)
    contents = table.content if isinstance(table, ContentTable) else table.categories
    contents[torch.from_numpy(numbers[old])] = torch.from_numpy(content[1 + old])
    model, numbers = recommender.model.with_items(table), numbers[order]
    with torch.inference_mode():
        vectors = model.item_vectors(whole_groups(numbers))[: len(numbers)]
    return model, recommender.index.with_items(vectors, numbers, n_items=len(vocabulary)), vocabulary, numbers


def _content(recommender: Recommender, rows: pl.DataFrame) -> np.ndarray:
    """The content [n + 1, F] or the categories [n + 1] of new items; row 0 is padding. A category that the run does not
    have is -1; empty content is zero."""
    items = recommender.model.items
    assert recommender.settings is not None
    settings = recommender.settings.items
    if isinstance(items, ContentTable):
        assert isinstance(settings, VectorSettings)
        return settings.content(Vocabulary(rows), items.texts)
    assert isinstance(items, CategoryTable) and isinstance(settings, CategorySettings)
    names = recommender.vocabulary.table[settings.column].cast(pl.String).fill_null("").to_list()
    numbers = dict(zip(names, items.categories[1:].tolist(), strict=True))
    new = rows[settings.column].cast(pl.String).fill_null("").to_list()
    return np.array([PADDING, *(numbers.get(name, UNKNOWN) for name in new)], dtype=np.int64)


def _without_content(recommender: Recommender, rows: pl.DataFrame) -> pl.Series:
    """The reason why the content of an item cannot be used [n]; null if it can."""
    assert recommender.settings is not None
    items, settings, content = recommender.model.items, recommender.settings.items, _content(recommender, rows)[1:]
    if isinstance(settings, CategorySettings):
        unknown = content == UNKNOWN
        names = rows[settings.column].cast(pl.String).fill_null("")
        why = pl.format("its {} is '{}', which no item of the run has", pl.lit(settings.column), names)
    else:
        assert isinstance(settings, VectorSettings) and isinstance(items, ContentTable)
        columns = " or ".join(repr(name) for name in (settings.vectors, *settings.texts) if name)
        with np.errstate(over="ignore"):
            deviations = np.abs(content - items.centre.numpy()) / items.spread.numpy()
        # Scores would overflow, or all other features would not count.
        too_far = (deviations > MOST_DEVIATIONS).any(axis=1)
        far = f"its {settings.vectors!r} is more than {MOST_DEVIATIONS:,.0f} deviations from the mean of the training"
        empty = pl.lit(f"the run knows items by {columns}, which is empty for it")
        unknown = ~content.any(axis=1) | too_far
        why = pl.when(pl.Series(too_far)).then(pl.lit(far)).otherwise(empty)
    return pl.select(pl.when(pl.Series(unknown, dtype=pl.Boolean)).then(why)).to_series()
