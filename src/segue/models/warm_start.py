"""A model over one catalogue → a model over another: what was learned of an item stays that item's, by its id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import torch
from torch import Tensor

from segue.data.vocabulary import PADDING, Vocabulary
from segue.errors import InputError
from segue.models.inputs import KindTable
from segue.models.items.coded import CodeTable
from segue.models.items.content import ContentTable
from segue.models.items.tables import CategoryTable
from segue.models.sequence import SequenceModel

NEW = -1
FACTS = ("items.categories", "items.content")
ITEM_CODES = "items.codes"


def carry_over(
    old: SequenceModel,
    new: SequenceModel,
    *,
    before: Vocabulary,
    now: Vocabulary,
    had_codes: np.ndarray | None = None,
    has_codes: np.ndarray | None = None,
    category: str = "",
) -> None:
    """Give `new`, a model just built of the same settings, all that `old` has learned.

    Rows of items, or their codes, go by id, of categories and kinds by name; those that `old` has not stay as a new
    model's are. What the catalogue says of items, `new` has from its own. `before` and `now` are the vocabularies of
    the two, `category` the column that items share their vectors by, where they do.

    An item that nobody had when codes were found has none, though its row is there: `had_codes` and `has_codes` [V + 1]
    say which items of `old` and of `new` have some, where not all do.
    """
    _refuse_misfit(old, new)
    rows, learned = _rows(old, new, before=before, now=now, category=category), old.state_dict()
    others = [name for name, tensor in new.state_dict().items() if name not in (*FACTS, *rows)]
    strange = [name for name in others if name not in learned or learned[name].shape != new.state_dict()[name].shape]
    if strange:
        raise InputError(
            f"The model's {strange[0]} depends on the log in a way that is not known here, so it cannot go on with "
            "another: train anew without --from."
        )
    with torch.no_grad():
        if isinstance(new.items, CodeTable):
            places = rows[ITEM_CODES]
            known = (places != NEW) & (had_codes[places] if had_codes is not None else True)
            told = has_codes if has_codes is not None else np.ones_like(known)
            new.items.codes.copy_(filled_codes(learned[ITEM_CODES][places], known, found=new.items.codes, told=told))
        for name, tensor in new.state_dict().items():
            if name in FACTS or name == ITEM_CODES:
                continue
            if name not in rows:
                tensor.copy_(learned[name])
                continue
            kept = rows[name] != NEW
            tensor[torch.from_numpy(kept)] = learned[name][torch.from_numpy(rows[name][kept])]


def _refuse_misfit(old: SequenceModel, new: SequenceModel) -> None:
    """Models of the same settings are of other shapes where the logs or the catalogues are."""
    if bool(old.kinds) != bool(new.kinds) and (old.inputs.kinded or new.inputs.kinded):
        raise InputError(
            "One of the two logs has kinds of events and the other has not, so a model that looks at them cannot go on "
            "from one to the other: prepare both with --kind, or both without."
        )
    if isinstance(new.items, CodeTable):
        assert isinstance(old.items, CodeTable)
        if new.items.values < old.items.values:
            raise InputError(
                f"The codes of the run have {old.items.values} values, and the {new.items.n_items} items of the data "
                f"allow {new.items.values}, so it cannot go on: give data of all items, or train anew without --from."
            )
    if isinstance(new.items, ContentTable):
        assert isinstance(old.items, ContentTable)
        widths = [int(table.content.shape[1]) for table in (old.items, new.items)]
        if widths[0] != widths[1]:
            raise InputError(
                f"The catalogue has {widths[1]} features of each item where the run was trained on {widths[0]}, so it "
                "cannot go on: give vectors of the same kind, or train anew without --from."
            )


def _rows(
    old: SequenceModel, new: SequenceModel, *, before: Vocabulary, now: Vocabulary, category: str
) -> dict[str, np.ndarray]:
    """The names of tables, and of each of their rows the one that it was, or NEW."""
    items = _places(before.table["id"], now.table["id"])
    own = items
    if isinstance(new.items, CategoryTable):
        assert isinstance(old.items, CategoryTable)
        own = _places(_names(old.items.categories, before, category), _names(new.items.categories, now, category))
    if isinstance(new.items, CodeTable):  # what is learned is the codes', which new items share with others
        assert isinstance(old.items, CodeTable)
        own = _value_places(new.items.parts, old.items.values, new.items.values)
        tables = {id(new.items.codes): items, **{id(table): own for table in new.items.learned}}
    else:
        tables = {id(table): own for table in new.items.learned}
    if new.items.bias is not None:
        tables[id(new.items.bias)] = items
    for part in new.modules():
        if isinstance(part, KindTable):
            tables[id(part.table)] = _kind_places(old.kinds, new.kinds)
    named = (*new.named_parameters(), *new.named_buffers())
    return {name: tables[id(tensor)] for name, tensor in named if id(tensor) in tables}


def filled_codes(kept: Tensor, known: np.ndarray, *, found: Tensor, told: np.ndarray) -> Tensor:
    """Codes [V + 1, parts]: the `kept` ones of items that are `known` [V + 1], which much was learned by; for others,
    of which `found` tells something (`told` [V + 1]), those found anew, in the numbers of the kept ones: a number
    becomes what most of the known items have that it was found for. Who is left has none, all zeros."""
    codes, names = torch.zeros_like(kept), 1 + int(max(found.max(), kept.max()))
    codes[known] = kept[known]
    both, new = known & told, ~known & told
    both[PADDING] = new[PADDING] = False
    for part, (now, then) in enumerate(zip(found.long().T, kept.long().T, strict=True)):
        votes = torch.bincount(now[both] * names + then[both], minlength=names * names).view(names, names)
        meaning = torch.where(votes.any(1), votes.argmax(1), torch.arange(names))
        codes[new, part] = meaning[now[new]].to(codes.dtype)
    return codes


def _places(old: pl.Series, new: pl.Series) -> np.ndarray:
    """Of each row of a table [n + 1] that has `new` from its row 1 on, the row that it was in a table of `old`."""
    rows = pl.DataFrame({"name": old, "row": np.arange(1, len(old) + 1)})
    found = pl.DataFrame({"name": new}).join(rows, on="name", how="left", maintain_order="left")
    return np.concatenate(([PADDING], found["row"].fill_null(NEW).to_numpy()))


def _value_places(parts: int, old: int, new: int) -> np.ndarray:
    """Of each row of what codes stand for, padding's first, the row that it was: a catalogue that has grown may have
    more values a part."""
    values = np.arange(new)
    places = np.where(values < old, 1 + np.arange(parts)[:, None] * old + values, NEW)
    return np.concatenate(([PADDING], places.ravel()))


def _names(categories: Tensor, vocabulary: Vocabulary, column: str) -> pl.Series:
    """The names of categories 1 … C, by number; of items without one the empty text."""
    table = pl.DataFrame(
        {"number": categories[1:].numpy(), "name": vocabulary.table[column].cast(pl.String).fill_null("")}
    )
    return table.unique("number").sort("number")["name"]


def _kind_places(old: Sequence[str], new: Sequence[str]) -> np.ndarray:
    """Of each kind, and of the unknown one after them, the row that it was."""
    places = {name: place for place, name in enumerate(old)}
    return np.array([*(places.get(name, NEW) for name in new), len(old)])
