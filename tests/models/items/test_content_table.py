"""Items made of content: by hand, by the laws of every model, and through every loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from settings_tables import BIDIRECTIONAL, BUILDERS, UNPLACED, model_settings, objective_settings
from torch import Tensor, nn

from segue.data.vocabulary import Vocabulary
from segue.errors import InputError, SettingsError
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.checkpoint import load_model, save_model
from segue.models.items.content import ContentTable
from segue.models.items.tables import CategoryTable, DataFacts, IdTable
from segue.models.sequence import SequenceModel
from segue.objective.objective import Objective
from segue.testing.cases import Case, batch_of, packed_of, random_users
from segue.testing.check import laws_of
from segue.testing.learning import Learner, memorises_eight_users

N_ITEMS, F = 30, 6
BARE = 4
"""An item without content."""


def content_of(n_items: int = N_ITEMS, seed: int = 0) -> np.ndarray:
    """Features of differing scales, one of them always the same."""
    rng = np.random.default_rng(seed)
    content = rng.normal(5, [1, 10, 0.1, 1, 1, 0], (n_items + 1, F)).astype(np.float32)
    content[[0, BARE]] = 0
    return content


def settings_of(**changed: Any) -> Any:
    numbers: dict[str, Any] = {
        "kind": "sasrec",
        "width": 8,
        "depth": 1,
        "length": 64,
        "dropout": 0.0,
        "items": "ids+vectors",
    }
    return model_settings(**(numbers | {"items__vectors": "v", "items__hidden": 7} | changed))


def model_of(**changed: Any) -> SequenceModel:
    facts = DataFacts(content=content_of())
    return build_model(settings_of(**changed), N_ITEMS, generator=torch.Generator().manual_seed(0), facts=facts)


def table_of(model: SequenceModel) -> ContentTable:
    assert isinstance(model.items, ContentTable)
    return model.items


def by_hand(table: ContentTable, content: np.ndarray) -> Tensor:
    """Standardised features, of which items without content have none, through the network."""
    with_content = torch.from_numpy(content).double()[np.flatnonzero(content.any(axis=1))]
    spread = with_content.std(dim=0, correction=0)
    spread[5] = 1
    features = (torch.from_numpy(content).double() - with_content.mean(dim=0)) / spread
    features[[0, BARE]] = 0
    if table.first is not None:
        x = features @ table.first.weight.double().T + table.first.bias.double()
        features = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    vectors = features @ table.last.weight.double().T + table.last.bias.double()
    vectors = vectors + table.into.double() if table.ids else vectors
    vectors[0] = 0
    return vectors


# --- the table ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("items", ["vectors", "ids+vectors"])
@pytest.mark.parametrize("hidden", [0, 7])
def test_vectors_are_content_through_a_small_network(items: str, hidden: int) -> None:
    model = model_of(items=items, items__hidden=hidden)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    model.items.clear_padding()
    expected = by_hand(table_of(model), content_of())
    torch.testing.assert_close(model.items.output().double(), expected, atol=1e-4, rtol=1e-4)
    numbers = torch.tensor([3, 0, 3, BARE, 29])
    for training in (True, False):
        model.train(training)
        torch.testing.assert_close(model.items.output(numbers).double(), expected[numbers], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.items.input(numbers), model.items.output(numbers))


def test_learned_vectors_start_at_zero_and_the_sum_is_as_large_as_ids_alone() -> None:
    model = model_of()
    assert (table_of(model).into == 0).all()
    vectors = model.item_vectors()[1:][np.arange(1, N_ITEMS + 1) != BARE]
    by_id = build_model(model_settings(kind="sasrec", width=8), N_ITEMS, generator=torch.Generator().manual_seed(0))
    assert 0.3 < vectors.std() / by_id.item_vectors()[1:].std() < 1.5


def test_items_without_content_are_answerable_once_trained() -> None:
    counts = np.zeros(N_ITEMS + 1, dtype=np.int64)
    assert np.flatnonzero(~model_of().answerable(counts)).tolist() == [0, BARE]
    counts[BARE] = 2
    assert np.flatnonzero(~model_of().answerable(counts)).tolist() == [0]
    by_id = build_model(model_settings(width=8), N_ITEMS, generator=torch.Generator())
    assert np.flatnonzero(by_id.answerable(counts)).tolist() == [BARE]


def test_id_dropout_drops_the_stated_share_of_ids() -> None:
    model = model_of(items__id_dropout=0.25).train()
    table = table_of(model)
    nn.init.ones_(table.into)
    table.generator = torch.Generator().manual_seed(0)
    shares, numbers = [], torch.arange(1, N_ITEMS + 1)
    with torch.no_grad():
        content = table.eval().output(numbers) - 1
        for _ in range(200):
            table.train()
            own = table.input(numbers) - content
            assert torch.equal(own, table.output(numbers) - content), "the same items as input and as output"
            assert set(own.round().flatten().tolist()) <= {0, 1}
            shares.append((own.round() == 0).all(dim=1).float().mean())
    assert torch.stack(shares).mean() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(table.eval().output(numbers) - content, torch.ones(N_ITEMS, 8))


@pytest.mark.parametrize("items", ["vectors", "ids+vectors"])
def test_new_items_are_added_at_the_end(items: str) -> None:
    model = model_of(items=items).eval().requires_grad_(requires_grad=False)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
    model.items.clear_padding()
    table, more = table_of(model), content_of(4, seed=9)
    longer, before = table.extended(DataFacts(content=more)), table.output()
    assert longer.n_items == N_ITEMS + 4 and table.n_items == N_ITEMS
    torch.testing.assert_close(longer.output()[: N_ITEMS + 1], before, rtol=0, atol=1e-6)
    # New items are content through the same network, without an id.
    same = table.extended(DataFacts(content=content_of()[:4]))
    own = table.into[1:4] if table.ids else 0
    torch.testing.assert_close(same.output()[N_ITEMS + 1 :] + own, before[1:4], rtol=0, atol=1e-5)
    assert not any(weight.requires_grad for weight in longer.parameters())
    assert longer.answerable(np.zeros(N_ITEMS + 5)).sum() == N_ITEMS - 1 + 3


def test_categories_can_be_added_to_and_ids_alone_cannot() -> None:
    table = CategoryTable(np.array([0, 1, 2, 1]), 4, tied=False)
    nn.init.normal_(table.into)
    longer = table.extended(DataFacts(categories=np.array([0, 2])))
    assert torch.equal(longer.input(torch.tensor([4])), table.input(torch.tensor([2])))
    with pytest.raises(SettingsError, match=r"by their ids alone.*model\.items = 'ids\+vectors' or 'vectors'"):
        IdTable(3, 4, tied=True).extended(DataFacts())


# --- the laws of every model --------------------------------------------------------------------------------------


def case_of(builder: str, **changed: Any) -> Case:
    shape = {"heads": 2, "feed_forward": 2} if builder not in UNPLACED else {}
    shape = {name: value for name, value in shape.items() if builder != "hstu" or name != "feed_forward"}
    if builder == "seq2seq":
        shape = {f"body__{name}": value for name, value in shape.items()}
    time_keys = {"target_time": False} if builder == "hstu" else {}
    ids = {} if changed.get("items") == "vectors" else {"items__id_dropout": 0.0}
    settings = settings_of(**({"kind": builder, "items__hidden": 16} | shape | time_keys | ids | changed))
    content = content_of()
    content[BARE] = 1  # the laws are about every item
    return Case(settings=settings, n_items=N_ITEMS, facts=DataFacts(content=content))


@pytest.mark.parametrize("builder", sorted(BUILDERS))
def test_content_satisfies_the_laws_of_every_builder(builder: str) -> None:
    case = case_of(builder)
    for law in laws_of(case):
        if law is not memorises_eight_users:
            law(case)


@pytest.mark.parametrize("builder", ["esasrec", "bert4rec"])
def test_content_alone_satisfies_them_too(builder: str) -> None:
    case = case_of(builder, items="vectors")
    for law in laws_of(case):
        if law is not memorises_eight_users:
            law(case)


def test_content_is_memorised() -> None:
    memorises_eight_users(case_of("sasrec"))


# --- every loss ---------------------------------------------------------------------------------------------------

LOSSES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sce": {"loss__bucket_items": 8},
    "sampled-softmax": {"sampler__negatives": 8, "sampler": "uniform"},
    "bce": {"sampler__negatives": 2, "sampler": "mixed", "sampler__shared": False},
    "gbce": {"sampler__negatives": 8, "sampler": "uniform"},
    "bpr-max": {"sampler__negatives": 8, "sampler": "popularity"},
}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_items_unseen_in_training_have_no_id_and_are_no_negatives(loss: Any, sparse: bool) -> None:
    """Items above 20 occur nowhere: their learned vectors stay zero, and their content has no gradient."""
    objective = Objective(
        objective_settings(loss=loss, **LOSSES[loss]), np.r_[0, np.ones(20, int), np.zeros(10, int)], only_trained=True
    )
    batch = batch_of(*random_users([6, 9, 4], n_items=20))
    gradients = []
    for seed in (0, 1):
        content = content_of()
        content[21:] = content_of(seed=seed)[21:]
        facts = DataFacts(content=content)
        model = build_model(settings_of(), N_ITEMS, generator=torch.Generator().manual_seed(0), facts=facts).train()
        table = table_of(model)
        table.generator = torch.Generator().manual_seed(5)
        table.centre.zero_(), table.spread.fill_(1)  # these depend on all content
        model.items.sparse_gradients = sparse
        examples = objective.examples(batch, np.random.default_rng(0))
        hidden = model.encode(tensors(examples.inputs))
        value = objective.loss(model, hidden, examples, torch.Generator().manual_seed(3))
        torch.autograd.backward(value)
        gradient = table.into.grad
        assert gradient is not None
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        assert (gradient[21:] == 0).all() and (gradient[1:21] != 0).any()
        assert (gradient[0] == 0).all(), "padding"
        gradients.append([value.detach(), *(weight.grad for weight in (table.last.weight, table.last.bias))])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other), "items that never occur changed the gradients"


def test_full_softmax_over_trained_items_by_hand() -> None:
    model, counts = model_of(items__id_dropout=0.0).double(), np.r_[0, np.ones(20, int), np.zeros(10, int)]
    objective = Objective(objective_settings(), counts, only_trained=True)
    batch = batch_of([3, 5, 7], [20, 1])
    examples = objective.examples(batch, np.random.default_rng(0))
    hidden = model.encode(tensors(examples.inputs))
    loss = objective.loss(model, hidden, examples, torch.Generator())
    scores = model.score_all(model.head(hidden))[:, 1:21]
    expected = nn.functional.cross_entropy(scores, torch.tensor([5, 7, 1]) - 1)
    torch.testing.assert_close(loss, expected)


def test_untrained_ids_stay_zero_through_training() -> None:
    learner = Learner(model_of(), batch_of(*random_users([6, 9, 4], n_items=20)))
    learner._objective = Objective(
        objective_settings(), np.r_[0, np.ones(20, int), np.zeros(10, int)], only_trained=True
    )
    learner.steps(5)
    table = table_of(learner.model)
    assert (table.into[21:] == 0).all() and (table.into[1:21] != 0).any()


# --- facts, saving, settings --------------------------------------------------------------------------------------

CATALOGUE = pl.DataFrame(
    {
        "id": ["a", "b", "c"],
        "count": [1, 2, 0],
        "title": ["red shoe", "red shoes", None],
        "v": pl.Series([[1.0, 2.0], None, None], dtype=pl.Array(pl.Float32, 2)),
    }
)


def test_content_is_vectors_and_words_side_by_side() -> None:
    settings = settings_of(items__vectors="v", items__texts=("title",), items__text_encoder__width=3)
    facts = settings.items.facts(Vocabulary(CATALOGUE), DataFacts(kinds=("click",)))
    assert facts.content is not None and facts.texts is not None and facts.kinds == ("click",)
    assert facts.content.shape == (4, 5) and facts.content.dtype == np.float32
    assert facts.content[:, :2].tolist() == [[0, 0], [1, 2], [0, 0], [0, 0]]
    assert facts.content[1:3, 2:].any() and not facts.content[[0, 3], 2:].any()
    # New items use the text encoder fitted to the first ones.
    more = settings.items.facts(Vocabulary(CATALOGUE[[1]]), DataFacts(texts=facts.texts)).content
    assert more is not None
    np.testing.assert_allclose(more[1], facts.content[2], atol=1e-6)


def content_settings(**changed: Any) -> Any:
    return settings_of(**changed).items


def test_a_text_encoder_without_texts_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"model\.items\.texts names, and it names none: name some, as in"):
        content_settings(items__vectors="v", items__text_encoder__width=3)
    with pytest.raises(SettingsError, match=r"or leave model\.items\.text_encoder out"):
        content_settings(items__vectors="v", items__text_encoder="sentences")
    content_settings(items__vectors="v", items__text_encoder="hashed")  # the default, which a run's settings contain


def test_a_catalogue_without_content_is_refused() -> None:
    with pytest.raises(InputError, match="has no content for any item in title: add the columns that model"):
        content_settings(items__vectors="", items__texts=("title",)).refuse_silent_catalogue(Vocabulary(CATALOGUE[[2]]))
    with pytest.raises(InputError, match="no column 'brand' to take texts from"):
        content_settings(items__texts=("brand",)).refuse_silent_catalogue(Vocabulary(CATALOGUE))
    content_settings(items__texts=("title",)).refuse_silent_catalogue(Vocabulary(CATALOGUE))


def test_content_and_its_text_encoder_are_saved_with_the_model(tmp_path: Path) -> None:
    settings = settings_of(items__vectors="v", items__texts=("title",), items__text_encoder__width=3)
    facts = settings.items.facts(Vocabulary(CATALOGUE), DataFacts(kinds=("click", "buy")))
    model = build_model(settings, 3, generator=torch.Generator().manual_seed(0), facts=facts).eval()
    save_model(model, settings, tmp_path)
    again = load_model(tmp_path)
    assert again.kinds == ("click", "buy")
    assert torch.equal(again.item_vectors(), model.item_vectors())
    batch = packed_of([1, 2, 3])
    assert torch.equal(again.query(batch), model.query(batch))
    texts = table_of(again).texts
    assert texts is not None and facts.texts is not None
    assert np.array_equal(texts.encode(["red shoelace"]), facts.texts.encode(["red shoelace"]))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"items__vectors": ""}, r"model\.items = 'ids\+vectors' needs content: name a column"),
        ({"items__tied": False}, r"There is no key 'tied' in model\.items = 'ids\+vectors'"),
        ({"items__hidden": -1}, r"model\.items\.hidden: expected a whole number >= 0, got -1"),
        ({"items__id_dropout": 1.0}, r"model\.items\.id_dropout: expected a number >= 0 and < 1, got 1\.0"),
        ({"items__text_encoder__width": 0}, r"model\.items\.text_encoder\.width: expected a whole number >= 1, got 0"),
        ({"items": "ids"}, r"There is no key 'vectors' in model\.items = 'ids'. Allowed: tied"),
        ({"items": "vectors", "items__id_dropout": 0.3}, r"There is no key 'id_dropout' in model\.items = 'vectors'"),
    ],
)
def test_settings_out_of_range_are_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        settings_of(**changed)


def test_no_builder_with_content_has_a_bias() -> None:
    assert all(model_of(kind=builder).items.bias is None for builder in BIDIRECTIONAL)
