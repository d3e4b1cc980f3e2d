"""The features of tokens, the transforms of a query, and items that share a vector."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from settings_tables import model_settings
from torch.nn import functional

from segue.data.batch import Batch
from segue.data.vocabulary import Vocabulary
from segue.errors import InputError, SettingsError
from segue.layers.packed import PackedBatch, tensors
from segue.models.build import build_model
from segue.models.checkpoint import load_model, save_model
from segue.models.inputs import CombinedInputs, RatedInputs
from segue.models.items.tables import CategoryTable, DataFacts
from segue.models.sequence import SequenceModel

EDGES = (1.5, 2.5)
NO_VALUE, LOW, MIDDLE, HIGH = range(4)  # rows of the value table


def settings_of(**changed: Any) -> Any:
    numbers = {
        "kind": "sasrec",
        "width": 6,
        "length": 9,
        "dropout": 0.0,
    }
    numbers |= {"inputs__value_edges": EDGES} if changed.get("inputs") in ("rated", "combined") else {}
    numbers |= {} if changed.get("kind") == "hstu" else {"feed_forward": 1}
    return model_settings(**{**numbers, "positions": "oldest", **changed})


def model_of(**changed: Any) -> SequenceModel:
    model = build_model(settings_of(**changed), 7, generator=torch.Generator().manual_seed(0)).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.3)
    model.items.clear_padding()
    return model


def batch_of(values: list[list[float | None]] | None, items: list[list[int]]) -> PackedBatch:
    flat = None if values is None else np.array([value for user in values for value in user], dtype=np.float32)
    return tensors(
        Batch(
            items=np.array([item for user in items for item in user]),
            times=np.array([60 * position for user in items for position in range(len(user))]),
            lengths=np.array([len(user) for user in items]),
            values=flat,
        )
    )


ITEMS = [[3, 1, 2], [5, 5]]
VALUES: list[list[float | None]] = [[1.0, None, 3.0], [2.5, 2.0]]
ROWS = [LOW, NO_VALUE, HIGH, HIGH, MIDDLE]


def test_rated_tokens_are_an_item_and_its_value_side_by_side() -> None:
    model = model_of(inputs="rated", inputs__value_width=4, heads=2)
    assert isinstance(model.inputs, RatedInputs)
    batch = batch_of(VALUES, ITEMS)
    pairs = torch.cat((model.items.into[batch.items], model.inputs.values.table[ROWS]), dim=1)
    expected = pairs * math.sqrt(10) + model.positions.table[[0, 1, 2, 0, 1]]
    for block in model.blocks:
        expected = block(expected, batch)
    torch.testing.assert_close(model.encode(batch), model.norm(expected))


def test_a_rated_query_has_the_features_of_an_item() -> None:
    model, batch = model_of(inputs="rated", inputs__value_width=4, heads=2), batch_of(VALUES, ITEMS)
    states = model.encode(batch)
    assert states.shape == (5, 10)
    torch.testing.assert_close(model.head(states), states[:, :6])
    torch.testing.assert_close(model.query(batch), states[[2, 4], :6])
    assert model.score_all(model.query(batch)).shape == (2, 8)


def test_combined_tokens_are_the_item_and_then_its_value() -> None:
    model = model_of(inputs="combined")
    assert isinstance(model.inputs, CombinedInputs)
    assert model.length == 9 and len(model.positions.table) == 18
    batch = batch_of(VALUES, ITEMS)
    twice = model.inputs.expanded(batch)
    assert twice.lengths.tolist() == [6, 4] and twice.times.tolist() == [0, 0, 60, 60, 120, 120, 0, 0, 60, 60]
    tokens = torch.stack((model.items.into[batch.items], model.inputs.values.table[ROWS]), dim=1).flatten(0, 1)
    expected = tokens * math.sqrt(6) + model.positions.table[[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]]
    for block in model.blocks:
        expected = block(expected, twice)
    states = model.encode(batch)
    torch.testing.assert_close(states, model.norm(expected)[[1, 3, 5, 7, 9]])
    torch.testing.assert_close(model.query(batch), states[[2, 4]])


@pytest.mark.parametrize("builder", ["sasrec", "hstu"])
@pytest.mark.parametrize("inputs", ["rated", "combined"])
def test_a_value_changes_no_state_before_its_event(builder: str, inputs: str) -> None:
    shape: dict[str, Any] = {"target_time": False} if builder == "hstu" else {}
    model = model_of(kind=builder, inputs=inputs, **shape)
    before = model.encode(batch_of(VALUES, ITEMS))
    after = model.encode(batch_of([[1.0, 1.0, 3.0], VALUES[1]], ITEMS))
    assert torch.equal(after[0], before[0]) and torch.equal(after[3:], before[3:])
    assert not torch.equal(after[1], before[1]) and not torch.equal(after[2], before[2])


@pytest.mark.parametrize("inputs", ["rated", "combined"])
def test_a_log_without_values_is_one_of_events_without_a_value(inputs: str) -> None:
    model = model_of(inputs=inputs)
    nothing: list[list[float | None]] = [[None for _ in user] for user in ITEMS]
    assert torch.equal(model.encode(batch_of(None, ITEMS)), model.encode(batch_of(nothing, ITEMS)))


@pytest.mark.parametrize("inputs", ["rated", "combined"])
def test_values_of_one_range_are_alike(inputs: str) -> None:
    model = model_of(inputs=inputs)
    one, same, other = (model.encode(batch_of([[value, 1.0]], [[4, 2]])) for value in (1.5, 2.49, 2.5))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_attention_between_events_is_the_sum_over_their_tokens() -> None:
    """A row is the token that attends; a column is both tokens of an event."""
    model, batch = model_of(inputs="combined"), batch_of(VALUES, ITEMS)
    weights = model.attention(batch)
    assert weights is not None and weights.shape == (2, 2, 1, 3, 3)
    torch.testing.assert_close(weights[:, 0].sum(-1), torch.ones(2, 1, 3, dtype=torch.float64))


def test_a_query_is_normalised_or_centred() -> None:
    batch = batch_of(None, ITEMS)
    plain, normalised, centred = (
        model_of(output=output, inputs="rated").query(batch) for output in ("none", "l2", "layer-norm")
    )
    torch.testing.assert_close(normalised, functional.normalize(plain, dim=1))
    torch.testing.assert_close(centred, functional.layer_norm(plain, (6,), eps=1e-6))
    zero = model_of(output="l2", inputs="rated").head(torch.zeros(1, 14, dtype=torch.float64))
    assert (zero == 0).all()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"inputs": "rated", "inputs__value_edges": ()}, "ascending numbers"),
        ({"inputs": "rated", "inputs__value_edges": (2, 1)}, r"ascending numbers, at least one, got \[2.0, 1.0\]"),
        (
            {"inputs": "rated", "inputs__value_width": 3, "heads": 2},
            "model.heads must divide the features of a token, got 2 heads of 9 features",
        ),
        ({"inputs": "items", "inputs__value_width": 3}, "There is no key 'value_width' in model.inputs = 'items'"),
        ({"inputs": "rated", "target_time": False}, "There is no key 'target_time' in model = 'sasrec'"),
        ({"kind": "hstu", "inputs": "rated", "feed_forward": 1}, "There is no key 'feed_forward' in model = 'hstu'"),
        ({"inputs": "rated", "similarity": "cosine", "output": "l2"}, "model.output = 'l2' has no effect"),
    ],
)
def test_impossible_settings_are_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        settings_of(**changed)


CATALOGUE = pl.DataFrame(
    {"id": ["a", "b", "c", "d", "e"], "count": [1] * 5, "genre": ["war", None, "art", "war", None], "price": [1] * 5}
)


def category_model(**changed: Any) -> SequenceModel:
    categories = Vocabulary(CATALOGUE).categories("genre")
    settings = settings_of(items="categories", items__column="genre", inputs="rated", **changed)
    return build_model(
        settings, 5, generator=torch.Generator().manual_seed(0), facts=DataFacts(categories=categories)
    ).eval()


def test_the_catalogue_numbers_its_categories() -> None:
    categories = Vocabulary(CATALOGUE).categories("genre")
    assert categories is not None and categories.tolist() == [0, 3, 1, 2, 3, 1]
    assert Vocabulary(CATALOGUE).categories("") is None
    with pytest.raises(InputError, match="no column 'colour' to take categories from; it has genre, price"):
        Vocabulary(CATALOGUE).categories("colour")
    with pytest.raises(InputError, match="it has none: give one with"):
        Vocabulary(CATALOGUE[["id", "count"]]).categories("genre")


@pytest.mark.parametrize("tied", [True, False])
def test_items_of_a_category_share_their_vector(tied: bool) -> None:
    model = category_model(items__tied=tied)
    assert isinstance(model.items, CategoryTable) and model.items.into.shape == (4, 6) and model.items.n_items == 5
    vectors = model.item_vectors()
    assert vectors.shape == (6, 6) and (vectors[0] == 0).all()
    assert torch.equal(vectors[1], vectors[4]) and torch.equal(vectors[2], vectors[5])
    assert not torch.equal(vectors[1], vectors[2]) and not torch.equal(vectors[1], vectors[3])
    assert torch.equal(model.item_vectors(torch.tensor([4, 0, 3])), vectors[[4, 0, 3]])
    one, same, other = (model.encode(batch_of([[1.0, 1.0]], [[item, 2]])) for item in (1, 4, 3))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_an_item_is_answerable_if_its_category_was_trained() -> None:
    """Items 1 and 4 are of one category, 2 and 5 of another; 3 is alone."""
    model = category_model()
    for trained, answerable in ([4], [1, 4]), ([2, 3], [2, 3, 5]), ([], []), ([1, 2, 3], [1, 2, 3, 4, 5]):
        counts = np.bincount(trained, minlength=6)
        assert np.flatnonzero(model.answerable(counts)).tolist() == answerable


def test_categories_are_saved_with_the_model(tmp_path: Path) -> None:
    model = category_model()
    save_model(model, settings_of(items="categories", items__column="genre", inputs="rated"), tmp_path)
    assert torch.equal(load_model(tmp_path).item_vectors(), model.item_vectors())
