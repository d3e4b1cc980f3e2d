"""An item table of codes: against vectors written out, by an example on paper, and by the laws of every model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from settings_tables import model_settings, objective_settings

from segue.data.vocabulary import Vocabulary
from segue.errors import InputError, SettingsError
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.checkpoint import load_model, save_model
from segue.models.items.coded import CodeTable
from segue.models.items.tables import NO_FACTS, DataFacts
from segue.models.sequence import SequenceModel
from segue.models.warm_start import transfer_weights
from segue.objective.objective import Objective
from segue.testing.cases import Case, batch_of, packed_of, random_users
from segue.testing.check import laws_of
from segue.testing.laws import building_is_repeatable
from segue.testing.learning import memorises_eight_users

N_ITEMS, PARTS, VALUES = 30, 4, 5


def codes_of(n_items: int = N_ITEMS, seed: int = 0) -> np.ndarray:
    """Every value of every part is some item's."""
    codes = np.random.default_rng(seed).integers(0, VALUES, (n_items + 1, PARTS)).astype(np.uint8)
    codes[1 : VALUES + 1] = np.arange(VALUES)[:, None]
    return codes


def settings_of(**changed: Any) -> Any:
    numbers: dict[str, Any] = {"kind": "sasrec", "width": 8, "depth": 1, "length": 64, "dropout": 0.0}
    return model_settings(**(numbers | {"items": "codes", "items__parts": PARTS, "items__values": VALUES} | changed))


def model_of(*, codes: np.ndarray | None = None, seed: int = 0, **changed: Any) -> SequenceModel:
    """With vectors of about the length one."""
    codes = codes_of() if codes is None else codes
    first = torch.Generator().manual_seed(seed)
    model = build_model(settings_of(**changed), len(codes) - 1, generator=first, facts=DataFacts(codes=codes))
    with torch.no_grad():
        for table in model.items.learned:
            table.normal_(generator=first)
    model.items.clear_padding()
    return model.eval()


def table_of(model: SequenceModel) -> CodeTable:
    assert isinstance(model.items, CodeTable)
    return model.items


def test_the_example_on_paper() -> None:
    """Golden: three items of two parts, each one of three vectors of two features."""
    table = CodeTable(np.array([[0, 0], [0, 0], [1, 2], [2, 1]], dtype=np.uint8), 4, values=3, tied=True)
    centroids = [[[1, 0], [0, 1], [1, 1]], [[0.5, 0.5], [-1, 0], [0, 2]]]
    with torch.no_grad():
        table.into[1:] = torch.tensor(centroids).flatten(0, 1)
    scores = table.score(torch.tensor([[0.2, 0.4, -0.5, 0.1]]), normal=False)
    torch.testing.assert_close(scores[0, 1:], torch.tensor([0, 0.6, 1.1]))
    assert table.output()[1:].tolist() == [[1, 0, 0.5, 0.5], [0, 1, 0, 2], [1, 1, -1, 0]]
    assert not table.output()[0].any() and scores[0, 0] == 0, "padding"


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_scores_are_those_of_vectors_written_out(similarity: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.models.items.coded.AT_A_TIME", 7)
    model = model_of(similarity=similarity, items__tied=tied)
    table, codes = table_of(model), codes_of()
    vectors = torch.zeros(N_ITEMS + 1, 8)
    for number in range(1, N_ITEMS + 1):
        vectors[number] = torch.cat([table.centroids[part, codes[number, part]] for part in range(PARTS)])
    assert torch.equal(table.output(), vectors) and tied == torch.equal(table.input(torch.arange(31)), vectors)
    if similarity == "cosine":
        vectors[1:] /= vectors[1:].norm(dim=1, keepdim=True)
    queries = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(model.score_all(queries), queries @ vectors.T, atol=1e-6, rtol=0)
    some = torch.tensor([4, 0, 30, 4])
    torch.testing.assert_close(model.item_vectors(some), vectors[some], atol=1e-6, rtol=0)


def test_equal_codes_have_equal_scores_to_the_last_bit() -> None:
    codes = codes_of(2_000)
    codes[[1000, 1999]] = codes[7]
    scores = model_of(codes=codes).score_all(torch.randn(3, 8))
    assert torch.equal(scores[:, 7], scores[:, 1000]) and torch.equal(scores[:, 7], scores[:, 1999])


def test_one_part_with_a_value_for_each_item_is_a_table_of_ids() -> None:
    """As many values as items, in any order."""
    order = np.random.default_rng(1).permutation(N_ITEMS)
    codes = np.r_[0, order].astype(np.uint8)[:, None]
    coded = model_of(codes=codes, items__parts=1, items__values=256)
    settings = model_settings(kind="sasrec", width=8, depth=1, length=64, dropout=0.0)
    plain = build_model(settings, N_ITEMS, generator=torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        plain.items.into[1:] = coded.items.into[1:][order]
    batch = packed_of(*random_users([5, 3]))
    rest = {name: weight for name, weight in coded.state_dict().items() if not name.startswith("items.")}
    plain.load_state_dict(rest, strict=False)
    assert table_of(coded).values == N_ITEMS
    torch.testing.assert_close(coded.score_all(coded.query(batch)), plain.score_all(plain.query(batch)))


LOSSES: tuple[dict[str, Any], ...] = (
    {"loss": "softmax"},
    {"loss": "sce", "loss__bucket_items": 9},
    {"loss": "sampled-softmax", "sampler": "uniform", "sampler__negatives": 12},
    {"loss": "bce", "sampler": "uniform", "sampler__negatives": 3, "sampler__shared": False},
)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["loss"])
def test_every_loss_reaches_the_parts_that_are_used_and_no_others(loss: dict[str, Any]) -> None:
    codes = codes_of()
    codes[:, 2] = np.minimum(codes[:, 2], 3)  # no item's third part has the last value
    model = model_of(codes=codes)
    objective = Objective(objective_settings(**loss), np.r_[0, np.ones(N_ITEMS, int)])
    examples = objective.examples(batch_of(list(range(1, 31))), np.random.default_rng(0))
    hidden = model.encode(tensors(examples.inputs))
    torch.autograd.backward(objective.loss(model, hidden, examples, torch.Generator().manual_seed(1)))
    gradient = table_of(model).into.grad
    assert gradient is not None and not gradient.is_sparse
    moved = gradient[1:].view(PARTS, VALUES, -1).abs().sum(2) > 0
    assert not moved[2, 4] and not gradient[0].any()
    moved[2, 4] = True
    assert moved.all()


def test_gradients_are_those_of_finite_differences() -> None:
    table, numbers = table_of(model_of().double()), torch.tensor([3, 0, 17, 3])
    queries = torch.randn(2, 8, dtype=torch.float64)

    def outputs(into: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            assert not into[0].any()
        del table.into
        table.__dict__["into"] = into  # a plain attribute, as in a loaded model
        return table.output(numbers), table.score(queries, normal=True)[:, 1:]

    into = table.into.detach().clone()
    assert torch.autograd.gradcheck(
        lambda rest: outputs(torch.cat((torch.zeros_like(into[:1]), rest))), into[1:].requires_grad_()
    )


@pytest.mark.parametrize(
    ("builder", "changed"),
    [
        ("sasrec", {}),
        ("bert4rec", {"items__tied": False}),
        ("hstu", {"target_time": False, "similarity": "cosine", "similarity__temperature": "learned"}),
    ],
)
def test_the_laws_of_every_model_hold(builder: str, changed: dict[str, Any]) -> None:
    case = Case(settings=settings_of(kind=builder, **changed), facts=DataFacts(codes=codes_of()))
    assert case.new().items.bias is None
    for law in laws_of(case):
        # Codes are no weights: they do not depend on the seed. Memorising is slow, so only one builder is tested.
        if law is not building_is_repeatable and (law is not memorises_eight_users or builder == "sasrec"):
            law(case)


def test_a_mixture_of_logits_takes_codes_too() -> None:
    model = model_of(similarity="mol", similarity__query_parts=2, similarity__item_parts=2, similarity__part_width=4)
    scores = model.score_all(model.query(packed_of([1, 2, 3])))
    assert scores.shape == (1, N_ITEMS + 1) and torch.isfinite(scores).all()


def test_codes_are_saved_with_the_model(tmp_path: Path) -> None:
    model, settings = model_of(items__tied=False), settings_of(items__tied=False)
    save_model(model, settings, tmp_path)
    again, batch = load_model(tmp_path), packed_of([1, 2, 30])
    assert np.array_equal(table_of(again).codes.numpy(), codes_of())
    assert torch.equal(again.item_vectors(), model.item_vectors())
    assert torch.equal(again.score_all(again.query(batch)), model.score_all(model.query(batch)))


def vocabulary_of(ids: str) -> Vocabulary:
    return Vocabulary(pl.DataFrame({"id": list(ids), "count": [1] * len(ids)}))


def test_in_a_warm_start_items_keep_their_codes_by_id() -> None:
    old, new = model_of(codes=codes_of(8, seed=1)), model_of(codes=codes_of(7, seed=2), seed=3)
    transfer_weights(old, new, before=vocabulary_of("abcdefgh"), now=vocabulary_of("hxbagyc"))
    new_vectors, old_vectors = new.items.output(), old.items.output()
    assert torch.equal(new_vectors[[1, 3, 4, 5, 7]], old_vectors[[8, 2, 1, 7, 3]])
    assert torch.equal(new.items.into, old.items.into)


def test_new_items_have_the_old_values_of_the_codes_they_share() -> None:
    """Values are assigned anew for the new catalogue, while the learned vectors belong to the old ones. By hand: of a,
    b and c, which have 3 now, two had 1; no old item has 2 now, so that stays."""
    then, now = [1, 1, 0, 2, 3, 3, 3, 3], [3, 3, 3, 0, 1, 1, 1, 1, 3, 0, 2]
    old, new = (model_of(codes=np.array([0, *each], dtype=np.uint8)[:, None].repeat(4, 1)) for each in (then, now))
    transfer_weights(old, new, before=vocabulary_of("abcdefgh"), now=vocabulary_of("abcdefghxyz"))
    assert table_of(new).codes[1:].T.tolist() == [[*then, 1, 2, 2]] * 4


def test_items_without_old_codes_are_new_and_count_for_nothing() -> None:
    """By hand: d was in the catalogue and had no codes, so its zeros say nothing of what is 3 now, which e had as 2;
    y is in no log yet."""
    then, now = [1, 1, 1, 0, 2], [0, 0, 0, 3, 3, 0]
    old, new = (model_of(codes=np.array([0, *each], dtype=np.uint8)[:, None].repeat(4, 1)) for each in (then, now))
    had, has = np.array([0, 1, 1, 1, 0, 1], dtype=bool), np.array([0, 1, 1, 1, 1, 1, 0], dtype=bool)
    transfer_weights(old, new, before=vocabulary_of("abcde"), now=vocabulary_of("abcdey"), had_codes=had, has_codes=has)
    assert table_of(new).codes[1:].T.tolist() == [[1, 1, 1, 2, 2, 0]] * 4


def test_no_item_can_be_added() -> None:
    with pytest.raises(SettingsError, match="New items need a model with content"):
        model_of().items.extended(NO_FACTS)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"items__parts": 3}, r"model\.items\.parts must divide the features of an item, got 3 parts of 8"),
        ({"items__parts": 0}, r"model\.items\.parts: expected a whole number >= 1, got 0"),
        ({"items__values": 257}, r"model\.items\.values: expected a whole number >= 2 and <= 256, got 257"),
        ({"items__values": 1}, r"model\.items\.values: expected a whole number >= 2 and <= 256, got 1"),
        ({"items__column": "genre"}, r"There is no key 'column' in model\.items = 'codes'. Allowed: parts, values, "),
        ({"items__vectors": "v"}, r"There is no key 'vectors' in model\.items = 'codes'"),
        (
            {"items__assignment": "random"},
            r"model\.items\.assignment has no value 'random'\. Allowed: clusters, learned",
        ),
    ],
)
def test_settings_out_of_range_are_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        settings_of(**changed)


def test_a_catalogue_with_fewer_items_than_values_may_grow_and_not_shrink() -> None:
    """Fewer items than values have fewer values."""
    small, large = (
        model_of(codes=codes_of(items, seed=items), items__values=256, seed=items, items__tied=False)
        for items in (7, 8)
    )
    transfer_weights(small, large, before=vocabulary_of("abcdefg"), now=vocabulary_of("hgfedcba"))
    assert torch.equal(large.items.output()[2:], small.items.output()[1:].flip(0))
    assert torch.equal(large.items.input(torch.arange(2, 9)), small.items.input(torch.arange(1, 8)).flip(0))
    with pytest.raises(InputError, match="codes of the run have 8 values, but the 7 items of the data allow 7"):
        transfer_weights(large, small, before=vocabulary_of("hgfedcba"), now=vocabulary_of("abcdefg"))
