"""Transfer of weights between models over different catalogues: learned rows of items follow their ids."""

from __future__ import annotations

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


def transfer_weights(
    old: SequenceModel,
    new: SequenceModel,
    *,
    before: Vocabulary,
    now: Vocabulary,
    had_codes: np.ndarray | None = None,
    has_codes: np.ndarray | None = None,
    category: str = "",
) -> None:
    """Copy the weights of `old` into `new`, a freshly built model of the same settings.

    Rows of items, or their codes, are matched by id, rows of categories and kinds by name; rows without a match keep
    their initial weights. Categories and content are those of the new catalogue. `before` and `now` are the two
    vocabularies; `category` is the column of categories that share vectors, if there is one.

    Items without events in the log that codes were computed from have no codes: `had_codes` and `has_codes` [V + 1]
    mark the items of `old` and `new` that have some; None: all.
    """
    _refuse_misfit(old, new)
    rows, weights = _matching_rows(old, new, before=before, now=now, category=category), old.state_dict()
    others = [name for name, tensor in new.state_dict().items() if name not in (*FACTS, *rows)]
    unknown = [name for name in others if name not in weights or weights[name].shape != new.state_dict()[name].shape]
    if unknown:
        raise InputError(
            f"A warm start needs weights that do not depend on the log, and the model's {unknown[0]} does; train "
            "without --from."
        )
    with torch.no_grad():
        if isinstance(new.items, CodeTable):
            matches = rows[ITEM_CODES]
            known = (matches != NEW) & (had_codes[matches] if had_codes is not None else True)
            coded = has_codes if has_codes is not None else np.ones_like(known)
            new.items.codes.copy_(merge_codes(weights[ITEM_CODES][matches], known, new=new.items.codes, coded=coded))
        for name, tensor in new.state_dict().items():
            if name in FACTS or name == ITEM_CODES:
                continue
            if name not in rows:
                tensor.copy_(weights[name])
                continue
            has_match = rows[name] != NEW
            tensor[torch.from_numpy(has_match)] = weights[name][torch.from_numpy(rows[name][has_match])]


def _refuse_misfit(old: SequenceModel, new: SequenceModel) -> None:
    """Refuse models whose shapes differ because of their logs or catalogues."""
    if bool(old.kinds) != bool(new.kinds) and (old.inputs.kinded or new.inputs.kinded):
        raise InputError(
            "This model uses kinds of events, and only one of the two logs has them; prepare both with --kind, or both "
            "without."
        )
    if isinstance(new.items, CodeTable):
        assert isinstance(old.items, CodeTable)
        if new.items.values < old.items.values:
            raise InputError(
                f"The codes of the run have {old.items.values} values, but the {new.items.n_items} items of the data "
                f"allow {new.items.values} only; give data with all items, or train without --from."
            )
    if isinstance(new.items, ContentTable):
        assert isinstance(old.items, ContentTable)
        widths = [int(table.content.shape[1]) for table in (old.items, new.items)]
        if widths[0] != widths[1]:
            raise InputError(
                f"The run was trained on {widths[0]} features of each item, but the catalogue has {widths[1]}; give "
                "vectors of the same kind, or train without --from."
            )


def _matching_rows(
    old: SequenceModel, new: SequenceModel, *, before: Vocabulary, now: Vocabulary, category: str
) -> dict[str, np.ndarray]:
    """For each table, by name, the old row of each new row, or NEW."""
    items = _match(before.table["id"], now.table["id"])
    own = items
    if isinstance(new.items, CategoryTable):
        assert isinstance(old.items, CategoryTable)
        own = _match(_names(old.items.categories, before, category), _names(new.items.categories, now, category))
    if isinstance(new.items, CodeTable):  # centroids belong to codes, which new items share with others
        assert isinstance(old.items, CodeTable)
        old_values, values = old.items.values, np.arange(new.items.values)  # a larger catalogue may have more
        firsts = 1 + np.arange(new.items.parts)[:, None] * old_values
        own = np.concatenate(([PADDING], np.where(values < old_values, firsts + values, NEW).ravel()))
        tables = {id(new.items.codes): items, **{id(table): own for table in new.items.learned}}
    else:
        tables = {id(table): own for table in new.items.learned}
    if new.items.bias is not None:
        tables[id(new.items.bias)] = items
    for part in new.modules():
        if isinstance(part, KindTable):
            kinds = {name: row for row, name in enumerate(old.kinds)}  # after them, the unknown kind
            tables[id(part.table)] = np.array([*(kinds.get(name, NEW) for name in new.kinds), len(old.kinds)])
    named = (*new.named_parameters(), *new.named_buffers())
    return {name: tables[id(tensor)] for name, tensor in named if id(tensor) in tables}


def merge_codes(old: Tensor, known: np.ndarray, *, new: Tensor, coded: np.ndarray) -> Tensor:
    """Codes of all items [V + 1, parts]: `known` [V + 1] items keep their `old` codes, with which the weights were
    trained; other items for which `new` codes were computed (`coded` [V + 1]) get those, translated.

    In each part, a new code is translated to the old code that most of its known items have. Items with neither have
    zeros.
    """
    codes, values = torch.zeros_like(old), 1 + int(max(new.max(), old.max()))
    codes[known] = old[known]
    both, unseen = known & coded, ~known & coded
    both[PADDING] = unseen[PADDING] = False
    for part, (new_codes, old_codes) in enumerate(zip(new.long().T, old.long().T, strict=True)):
        votes = torch.bincount(new_codes[both] * values + old_codes[both], minlength=values * values).view(values, -1)
        translation = torch.where(votes.any(1), votes.argmax(1), torch.arange(values))
        codes[unseen, part] = translation[new_codes[unseen]].to(codes.dtype)
    return codes


def _match(old: pl.Series, new: pl.Series) -> np.ndarray:
    """The old row of each row of a table [n + 1], matched by name; row 0 is padding."""
    rows = pl.DataFrame({"name": old, "row": np.arange(1, len(old) + 1)})
    matches = pl.DataFrame({"name": new}).join(rows, on="name", how="left", maintain_order="left")
    return np.concatenate(([PADDING], matches["row"].fill_null(NEW).to_numpy()))


def _names(categories: Tensor, vocabulary: Vocabulary, column: str) -> pl.Series:
    """The names of categories 1 … C, by number; the category of items without one has the empty name."""
    table = pl.DataFrame(
        {"number": categories[1:].numpy(), "name": vocabulary.table[column].cast(pl.String).fill_null("")}
    )
    return table.unique("number").sort("number")["name"]
