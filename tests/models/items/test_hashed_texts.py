"""Texts → vectors: against the definition, written out in Python, and numpy's own decomposition."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from segue.models.text.hashed import HashedTexts, _count_terms

TITLES = [
    "Red Shoe, size 40",
    "red shoes for women",
    "",
    "Blue SHOE",
    "steel hammer 500 g",
    "hammer, steel (large)",
    "Größe Größe 40",
    "size 40",
]


def terms_by_hand(text: str) -> Counter[tuple[str, str]]:
    """Words, pairs of words, and pieces of three to five letters of each word between two spaces."""
    words = re.findall(r"[^\W_]+", text.lower())
    terms = Counter(("word", word) for word in words)
    terms.update(("pair", f"{one} {other}") for one, other in itertools.pairwise(words))
    for word in words:
        padded = f" {word} "
        for size in (3, 4, 5):
            terms.update(("piece", padded[at : at + size]) for at in range(len(padded) - size + 1))
    return terms


def counts_of(texts: list[str]) -> list[list[int]]:
    """Each text's numbers of its terms, ascending."""
    result = _count_terms(texts)
    return [sorted(result.counts[result.texts == row].tolist()) for row in range(len(texts))]


letters = st.text(st.sampled_from("ab c-é1"), max_size=12)


@given(st.lists(letters, max_size=5))
def test_terms_are_words_pairs_and_pieces(texts: list[str]) -> None:
    by_hand = [terms_by_hand(text) for text in texts]
    assert counts_of(texts) == [sorted(counts.values()) for counts in by_hand]
    counts = _count_terms(texts)
    assert len(np.unique(counts.terms)) == len(set().union(*by_hand)), "equal if and only if the terms are"


def tf_idf_by_hand(texts: list[str]) -> np.ndarray:
    """[n, N], of terms that more than one text has; each row of length one."""
    by_hand = [terms_by_hand(text) for text in texts]
    frequency = Counter(term for counts in by_hand for term in counts)
    terms = [term for term, count in frequency.items() if count > 1]
    idf = [math.log((1 + len(texts)) / (1 + frequency[term])) + 1 for term in terms]
    weights = np.array(
        [
            [(1 + math.log(counts[t])) * w if counts[t] else 0 for t, w in zip(terms, idf, strict=True)]
            for counts in by_hand
        ]
    )
    return np.asarray(weights / np.linalg.norm(weights, axis=1, keepdims=True).clip(1e-12))


def test_vectors_are_the_truncated_decomposition_of_tf_idf() -> None:
    """Products of vectors are those of the best approximation of a rank, whatever signs the directions have."""
    weights = tf_idf_by_hand(TITLES)
    for width in (2, 3):
        left, sizes, _ = np.linalg.svd(weights, full_matrices=False)
        expected = (left[:, :width] * sizes[:width]) @ (left[:, :width] * sizes[:width]).T
        vectors = HashedTexts.fitted(TITLES, width).encode(TITLES)
        assert vectors.dtype == np.float32 and vectors.shape == (8, width)
        np.testing.assert_allclose(vectors @ vectors.T, expected, atol=1e-5)


def test_features_beyond_the_rank_of_the_texts_are_zero() -> None:
    encoder = HashedTexts.fitted(TITLES, 12)
    vectors = encoder.encode(TITLES)
    rank = np.linalg.matrix_rank(tf_idf_by_hand(TITLES))
    assert vectors.shape == (8, 12) and (vectors[:, rank:] == 0).all() and (vectors[:, :rank] != 0).any(axis=0).all()
    np.testing.assert_allclose(vectors @ vectors.T, tf_idf_by_hand(TITLES) @ tf_idf_by_hand(TITLES).T, atol=1e-5)


def test_new_texts_are_near_what_they_share_words_with() -> None:
    encoder = HashedTexts.fitted(TITLES, 4)
    (new,) = encoder.encode(["Hammers of STEEL"])
    nearness = encoder.encode(TITLES) @ new
    assert set(np.argsort(-nearness)[:2]) == {4, 5} and nearness[[0, 1, 3]].max() < 0.2 * nearness.max()


def test_texts_without_known_terms_are_zero() -> None:
    encoder = HashedTexts.fitted(TITLES, 4)
    assert (encoder.encode(["", "?!", "qqqqq"]) == 0).all()
    assert encoder.encode([]).shape == (0, 4)
    for nothing in ([], [""], ["-"]):
        assert HashedTexts.fitted(nothing, 4).encode(["red shoe"]).tolist() == [[0, 0, 0, 0]]


def test_fitting_and_encoding_do_not_depend_on_other_calls() -> None:
    one, other = HashedTexts.fitted(TITLES, 4), HashedTexts.fitted(TITLES, 4)
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))
    together = one.encode(TITLES)
    alone = np.concatenate([other.encode([title]) for title in TITLES])
    np.testing.assert_allclose(together, alone, atol=1e-7)
