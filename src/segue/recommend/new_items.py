"""Items that a model was not trained on → a Recommender that answers them by their content, beside the one before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl
import torch

from segue.data.read.new_items import fitted
from segue.data.vocabulary import PADDING, Vocabulary
from segue.errors import InputError
from segue.index.search import ItemIndex
from segue.models.facts import Facts, content_of
from segue.models.items.coded import CodeTable
from segue.models.items.content import ContentTable
from segue.models.items.tables import CategoryTable, ItemTable
from segue.models.sequence import SequenceModel
from segue.recommend.search import whole_groups

if TYPE_CHECKING:
    from segue.recommend.recommender import Recommender

NAMED = 5  # ids in a sentence
FARTHEST = 1e6  # deviations of a feature
UNKNOWN = -1  # a category that no item has
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
    items = recommender.model.items
    if isinstance(items, ContentTable) and items.texts is not None:
        unread = items.texts.refusal()
        return None if unread is None else f"the run's {unread}"
    if isinstance(items, CategoryTable | ContentTable):
        return None
    by = "codes, which come from the log" if isinstance(items, CodeTable) else "their ids alone"
    return f"this run knows items by {by}; {NEEDED}"


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


def extended(recommender: Recommender, rows: pl.DataFrame) -> tuple[SequenceModel, ItemIndex, Vocabulary, np.ndarray]:
    """A run's parts with items that it can take, `NewItems.rows`, and their numbers, ascending. Its own stay as they
    are."""
    vocabulary = recommender.vocabulary.with_rows(rows)
    numbers = vocabulary.numbers(rows["id"].to_list(), unknown="error")
    model = recommender.model.with_items(_item_table(recommender, rows, numbers))
    numbers = np.sort(numbers)
    with torch.inference_mode():
        vectors = model.item_vectors(whole_groups(numbers))[: len(numbers)]
    return model, recommender.index.with_items(vectors, numbers, n_items=len(vocabulary)), vocabulary, numbers


def _item_table(recommender: Recommender, rows: pl.DataFrame, numbers: np.ndarray) -> ItemTable:
    """The model's items with those of the rows, which have these `numbers` [n]: new ones, and some added before."""
    items, facts = recommender.model.items, _facts(recommender, rows)
    new = np.flatnonzero(numbers > items.n_items)
    old = np.flatnonzero(numbers <= items.n_items)
    longer = items.extended(_of(facts, new[np.argsort(numbers[new])]))
    changed, places = _of(facts, old), torch.from_numpy(numbers[old])
    if isinstance(longer, ContentTable) and changed.content is not None:
        longer.content[places] = torch.from_numpy(changed.content[1:])
    elif isinstance(longer, CategoryTable) and changed.categories is not None:
        longer.categories[places] = torch.from_numpy(changed.categories[1:])
    return longer


def _of(facts: Facts, rows: np.ndarray) -> Facts:
    """What is known of some rows, counted from 0; padding stays the first."""
    kept = np.concatenate(([PADDING], rows + 1))
    return Facts(
        categories=None if facts.categories is None else facts.categories[kept],
        content=None if facts.content is None else facts.content[kept],
    )


def _facts(recommender: Recommender, rows: pl.DataFrame) -> Facts:
    """What the model can know of new items, as of a catalogue of their own. A category that is none of its own is -1;
    content that says nothing is zero."""
    items, settings = recommender.model.items, recommender.settings
    assert settings is not None
    if isinstance(items, ContentTable):
        return Facts(content=content_of(settings, Vocabulary(rows), items.texts))
    assert isinstance(items, CategoryTable)
    names = recommender.vocabulary.table[settings.category].cast(pl.String).fill_null("").to_list()
    known = dict(zip(names, items.categories[1:].tolist(), strict=True))
    told = rows[settings.category].cast(pl.String).fill_null("").to_list()
    return Facts(categories=np.array([PADDING, *(known.get(name, UNKNOWN) for name in told)], dtype=np.int64))


def _without_content(recommender: Recommender, rows: pl.DataFrame) -> pl.Series:
    """Why nothing is known of an item [n], null where something is."""
    facts, settings = _facts(recommender, rows), recommender.settings
    assert settings is not None
    if facts.categories is not None:
        unknown = facts.categories[1:] == UNKNOWN
        told = rows[settings.category].cast(pl.String).fill_null("")
        why = pl.format("its {} is '{}', which no item of the run has", pl.lit(settings.category), told)
    else:
        assert facts.content is not None
        unknown = ~facts.content[1:].any(axis=1)
        columns = " or ".join(repr(name) for name in (settings.vectors, *settings.texts) if name)
        why = pl.lit(f"the run knows items by {columns}, where it has nothing that says anything")
        far = _far(recommender.model.items, facts.content[1:])
        said = (
            f"its {settings.vectors!r} is more than {FARTHEST:,.0f} deviations from those that the run was trained with"
        )
        why, unknown = pl.when(pl.Series(far)).then(pl.lit(said)).otherwise(why), unknown | far
    return pl.select(pl.when(pl.Series(unknown, dtype=pl.Boolean)).then(why)).to_series()


def _far(items: ItemTable, content: np.ndarray) -> np.ndarray:
    """Which contents [n, F] are so large that scores would be no numbers, or all others beside them nothing."""
    assert isinstance(items, ContentTable)
    with np.errstate(over="ignore"):
        deviations = np.abs(content - items.centre.numpy()) / items.spread.numpy()
    far: np.ndarray = (deviations > FARTHEST).any(axis=1)
    return far


def _named(ids: Iterable[str]) -> str:
    """Some ids, and how many more there are."""
    listed = list(ids)
    more = f" and {len(listed) - NAMED:,} more" if len(listed) > NAMED else ""
    return ", ".join(map(repr, listed[:NAMED])) + more
