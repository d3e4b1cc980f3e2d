"""docs/attention.md is reproducible, and its numbers agree with the exercise and with plain arithmetic."""

from __future__ import annotations

import re

import numpy as np
import pytest

from bench.attention.document import DOCUMENT, NOTE, TEMPLATE, document, number, row
from bench.attention.model import BOUGHT_NEXT, HISTORY, ShopModel, read_model, recommender

NUMBER = re.compile(r"−?\d+(?:\.\d+)?")


def value(text: str) -> float:
    return float(text.replace("−", "-"))


def vectors(line: str) -> list[list[float]]:
    """The numbers in brackets."""
    return [[value(one) for one in NUMBER.findall(part)] for part in re.findall(r"\(([^()]*)\)", line)]


@pytest.fixture(name="text", scope="module")
def committed() -> str:
    return DOCUMENT.read_text(encoding="utf-8")


def below(text: str, words: str) -> list[list[str]]:
    """The cells of the table after these words, without its header."""
    lines = text[text.index(words) :].split("\n")
    first = next(index for index, line in enumerate(lines) if line.startswith("|"))
    rows = lines[first + 2 :]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in rows[: next(index for index, line in enumerate(rows) if not line.startswith("|"))]
    ]


def test_the_document_is_reproducible(text: str) -> None:
    """Words are equal; the last decimal of a number may differ by one, as machines sum in different orders."""
    again = document()
    assert NUMBER.split(again) == NUMBER.split(text), "run `make attention`"
    for committed_number, expected in zip(NUMBER.findall(text), NUMBER.findall(again), strict=True):
        decimals = len(expected.partition(".")[2])
        assert len(committed_number.partition(".")[2]) == decimals
        assert abs(value(committed_number) - value(expected)) < 1.01 * 10**-decimals, (committed_number, expected)
    assert text.startswith(NOTE) and "{" not in text
    assert len(NUMBER.findall(text)) > 250 > len(NUMBER.findall(TEMPLATE.read_text(encoding="utf-8")))


def test_numbers_have_a_real_minus_and_zero_has_none() -> None:
    assert (number(-1.25, 3), number(-0.0001, 3), number(2, 1)) == ("−1.250", "0.000", "2.0")
    assert row([-0.5, 1], 1) == "(−0.5, 1.0)"


# --- the exercise: every decimal of its solution, by hand -----------------------------------------------------------


def test_the_exercise(text: str) -> None:
    scores, weights = below(text, "Its **scores** are")[0], below(text, "The **softmax** of a row")[0]
    assert [value(one) for one in scores] == [
        *(0, 0.296985, 0.098995, 0.148492),
        *(0.197990, 0.247487, 0.296985, 0.346482),
    ]
    assert [value(one) for one in weights] == [
        *(0.101322, 0.136358, 0.111865, 0.117541),
        *(0.123506, 0.129773, 0.136358, 0.143277),
    ]
    assert [round(value(one), 3) for one in weights] == [0.101, 0.136, 0.112, 0.118, 0.124, 0.130, 0.136, 0.143]
    assert "z = (−0.028436, 0.435848)" in text
    assert (
        "That gives good −0.464284, bad 0.464284, and after one more softmax good 0.283216, bad 0.716784: **bad**"
        in text
    )
    tokens, projected = below(text, "Q = K = V here")
    assert vectors(" ".join(tokens)) == [
        *([0, 0, 0], [0, -5, 1], [1, 0, 2], [0, 0, 3]),
        *([-1, 0, 4], [0, 0, 5], [-2, 0, 6], [0, 0, 7]),
    ]
    assert vectors(" ".join(projected)) == [
        *([0, 0], [0, 0.6], [0.1, 0.2], [0, 0.3]),
        *([-0.1, 0.4], [0, 0.5], [-0.2, 0.6], [0, 0.7]),
    ]


def test_the_common_mistakes_of_the_exercise(text: str) -> None:
    scale, mask, itself, same = (
        next(line for line in text.split("\n") if line.startswith(f"- **{begin}"))
        for begin in ("The scale", "The mask", "Itself", "One row")
    )
    unscaled = [0.092572, 0.140891, 0.106483, 0.114204, 0.122485, 0.131366, 0.140891, 0.151107]
    assert vectors(scale) == [unscaled]
    assert vectors(mask) == [[0.320047, 0.348389, 0.331564], [0.3, 1]]
    assert "would be 0.3318; raise the hidden score to 5 and it falls to 0.0090" in mask
    assert vectors(itself) == [[0, 0.337979]]
    assert value(NUMBER.findall(itself)[0]) == pytest.approx(1 / (1 + np.exp(-0.36 / np.sqrt(2))), abs=1e-6)
    assert "(0.101322, 0.136358, 0.111865, …)" in same
    assert vectors(" ".join(below(text, "All words at once")[0])) == [
        *([0, 0], [0, 0.337979], [0.033156, 0.275346], [0.024579, 0.285014]),
        *([-0.001412, 0.311589], [-0.001162, 0.346910], [-0.033669, 0.390169], [-0.028436, 0.435848]),
    ]


# --- the customer: plain arithmetic on the saved weights ------------------------------------------------------------


@pytest.fixture(name="facts", scope="module")
def committed_model() -> ShopModel:
    return read_model()


def normal(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(-1, keepdims=True)) * weight + bias)


def test_the_forward_pass_is_plain_arithmetic(text: str, facts: ShopModel) -> None:
    w = {name.replace("blocks.0.", ""): np.array(values) for name, values in facts.weights.items()}
    numbers = [facts.items.index(item) + 1 for item in HISTORY]
    x = 2 * w["items.into"][numbers] + w["positions.table"][[4, 3, 2, 1, 0]]
    newest = normal(x[-1], w["norm_query.weight"], w["norm_query.bias"])
    q = w["attention.query.weight"] @ newest + w["attention.query.bias"]
    k, v = np.split(x @ w["attention.key_value.weight"].T + w["attention.key_value.bias"], 2, axis=1)
    powers = np.exp(k @ q / 2)
    weights = powers / powers.sum()
    middle = normal(newest + weights @ v, w["norm_forward.weight"], w["norm_forward.bias"])
    hidden = np.maximum(w["feed_forward.inner.weight"] @ middle + w["feed_forward.inner.bias"], 0)
    output = middle + w["feed_forward.outer.weight"] @ hidden + w["feed_forward.outer.bias"]
    state = normal(output, w["norm.weight"], w["norm.bias"])
    scores = w["items.into"] @ state

    def close(computed: object, expected: np.ndarray, decimals: int = 3) -> None:
        assert np.abs(np.array(computed, dtype=float) - expected).max() < 0.6 * 10**-decimals

    tokens = below(text, "**Tokens.**")
    for column, expected in ((1, x), (2, k), (3, v)):
        close([vectors(cells[column])[0] for cells in tokens], expected)
    close(vectors(text[text.index("The query of event 5") :])[0], q)
    table = below(text, "**Scores and softmax.**")
    close([value(cells[1]) for cells in table], k @ q / 2)
    close([value(cells[3]) for cells in table], weights, 4)
    close(vectors(text[text.index("**Mixture.**") : text.index("**Answer.**")])[-1], weights @ v)
    close(vectors(text[text.index("What comes out,") :])[0], state)
    order = [number for number in np.argsort(-scores) if number and number not in numbers][:3]
    answers = below(text, "**Answer.**")
    assert [cells[1] for cells in answers] == [facts.titles[number - 1] for number in order]
    close([value(cells[2]) for cells in answers], scores[order])
    assert facts.items[order[0] - 1] == BOUGHT_NEXT and f"Bought next: **{answers[0][1]}**" in text


def test_each_contribution_is_the_score_difference_without_the_event(text: str, facts: ShopModel) -> None:
    model = recommender(facts)

    def score(history: tuple[str, ...]) -> float:
        return model.recommend(history, only=[BOUGHT_NEXT]).items[0].score

    for position, cells in enumerate(below(text, "**How far to trust a map.**")):
        without = HISTORY[:position] + HISTORY[position + 1 :]
        assert value(cells[3].replace("+", "")) == pytest.approx(score(without) - score(HISTORY), abs=6e-4)
    assert (facts.cases, len(facts.items), len(set(HISTORY))) == (1260, 15, 5)


# --- the variants ---------------------------------------------------------------------------------------------------


def test_the_variants(text: str) -> None:
    """By hand: q = (1, 2), k = (0.5, −1); U k = (−1, 1); silu(−1) = −1 / (1 + e)."""
    scores = {
        cells[0]: value(cells[2]) for cells in below(text, "**Scores**, for the query (1, 2) and the key (0.5, −1)")
    }
    assert scores == {"dot": -1.5, "scaled dot": -1.0607, "bilinear": 1.0, "additive": 1.6667}
    assert round(np.tanh(1.5) + np.tanh(1.0), 4) == scores["additive"]
    assert "gets 0.3321 of the weight instead of 1." in text
    assert "place 1 of width 4 is (0.84147, 0.54030, 0.01000, 0.99995)" in text
    assert f"is a weight of −{1 / (1 + np.e) / 4:.4f}:" in text
    soft = np.exp([0.5, 1.5, 1.0]) / np.exp([0.5, 1.5, 1.0]).sum()
    assert vectors(text[text.index("**Hard attention**") :])[:3] == [[0.5, 1.5, 1], [*soft.round(4)], [0, 1, 0]]
    near, far, other = re.findall(r"2 and 5 it is ([\d.]+), at 12 and 15 again ([\d.]+), at 2 and 6 ([\d.]+)", text)[0]
    rotations = np.exp(1j * 3 * np.array([1.0, 0.01]))  # by three positions; pairs are features 1 and 3, and 2 and 4
    pairs = np.array([1 - 1j, 0.5 + 0.25j]).conj() * np.array([0.5 + 0.75j, 1 - 0.5j]) * rotations
    assert float(near) == float(far) == pytest.approx(pairs.real.sum(), abs=6e-5) and near != other
    buckets = [16 + int(np.log(back / 16) / np.log(128 / 16) * 16) for back in (20, 100)]
    assert f"buckets 1, 5, {buckets[0]} and {buckets[1]} of 32" in text
