"""Text encoder without a pretrained model: TF-IDF of hashed words and character n-grams, reduced by SVD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import polars as pl
import torch
from torch import Tensor
from torch.nn import functional

from segue.kinds import Count, Kind
from segue.models.items.svd import right_directions
from segue.models.text.encoder import TextEncoder

NGRAMS = (3, 4, 5)  # characters of an n-gram; the spaces around a word count
MAX_TERMS = 1 << 15  # known terms, those of most texts: 16 MB at 128 features
MAX_FITTED = 100_000  # texts that the encoder is fitted to
AT_A_TIME = 20_000  # texts encoded at a time
SEED = 7
BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so it has an inverse modulo 2^64
LINE, SPACE = ord("\n"), ord(" ")


class HashedTexts(TextEncoder):
    """TF-IDF of hashed words, pairs of words and character n-grams, projected on the directions of largest variance in
    the texts that it was fitted to."""

    terms: Tensor
    weights: Tensor

    def __init__(self, terms: Tensor, weights: Tensor, directions: Tensor) -> None:
        """`terms` [N] int64, ascending: hashes of the known terms; `weights` [N]: their inverse document frequencies;
        `directions` [N, F]."""
        super().__init__()
        self.register_buffer("terms", terms)
        self.register_buffer("weights", weights)
        self.register_buffer("directions", directions)

    @classmethod
    def fitted(cls, texts: Sequence[str], width: int) -> HashedTexts:
        """Fit an encoder to the texts of a catalogue, at most `MAX_FITTED` at even distances."""
        sample = texts[:: -(-len(texts) // MAX_FITTED)] if texts else texts
        counts = _count_terms(sample)
        terms, frequency = np.unique(counts.terms, return_counts=True)
        shared = frequency >= min(2, frequency.max(initial=0))  # a term of one text relates it to no other
        known = np.flatnonzero(shared)[np.argsort(-frequency[shared], kind="stable")[:MAX_TERMS]]
        known.sort()
        terms, frequency = terms[known], frequency[known]
        weights = np.log((1 + len(sample)) / (1 + frequency)) + 1
        blank = torch.zeros(len(terms), 0)
        encoder = cls(torch.from_numpy(terms), torch.from_numpy(weights.astype(np.float32)), blank)
        matrix, generator = encoder._tf_idf(counts, len(sample)), torch.Generator().manual_seed(SEED)
        products = matrix.times, matrix.transposed.times
        encoder.directions, _ = right_directions(*products, matrix.shape, width, generator=generator)
        return encoder

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.zeros((len(texts), self.width), dtype=np.float32)
        directions = self.directions.float()
        for begin in range(0, len(texts), AT_A_TIME):
            some = texts[begin : begin + AT_A_TIME]
            vectors[begin : begin + len(some)] = self._tf_idf(_count_terms(some), len(some)).times(directions)
        return vectors

    def _tf_idf(self, counts: _TermCounts, n_texts: int) -> _Sparse:
        """Texts by known terms [n, N]; each text's row has length 1."""
        known = self.terms.numpy()
        index = np.searchsorted(known, counts.terms).clip(max=max(len(known) - 1, 0))
        is_known = known[index] == counts.terms if len(known) else np.zeros(0, dtype=bool)
        rows, columns = counts.texts[is_known], index[is_known]
        values = (1 + np.log(counts.counts[is_known])) * self.weights.double().numpy()[columns]
        lengths = np.sqrt(np.bincount(rows, values**2, minlength=n_texts))
        values = (values / lengths[rows]).astype(np.float32)
        return _Sparse.of(rows, columns, values, (n_texts, len(known)))


@dataclass(frozen=True, slots=True, eq=False)
class _Sparse:
    """A sparse matrix, by rows. torch's own are slow here, or warn that they are in beta."""

    starts: Tensor  # [rows] int64: first entry of each row
    columns: Tensor  # [P] int64
    values: Tensor  # [P] float32
    shape: tuple[int, int]

    @classmethod
    def of(cls, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, shape: tuple[int, int]) -> _Sparse:
        """From entries with ascending `rows`."""
        starts = np.searchsorted(rows, np.arange(shape[0]))
        return cls(torch.from_numpy(starts), torch.from_numpy(columns), torch.from_numpy(values), shape)

    @property
    def transposed(self) -> _Sparse:
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.starts.numpy(), append=len(self.columns)))
        order = np.argsort(self.columns.numpy(), kind="stable")
        columns, values = self.columns.numpy()[order], self.values.numpy()[order]
        return _Sparse.of(columns, rows[order], values, (self.shape[1], self.shape[0]))

    def times(self, other: Tensor) -> Tensor:
        """The product with a dense matrix [columns, X]."""
        return functional.embedding_bag(
            self.columns, other.contiguous(), self.starts, mode="sum", per_sample_weights=self.values
        )


@dataclass(frozen=True, slots=True, eq=False)
class _TermCounts:
    """Counts of terms in texts, by text and then by term."""

    texts: np.ndarray  # [P] int64
    terms: np.ndarray  # [P] int64
    counts: np.ndarray  # [P] int64: occurrences of the term in the text


def _count_terms(texts: Sequence[str]) -> _TermCounts:
    """Count terms in one array of the characters of all texts: its cumulative sums give the hash of any substring."""
    characters = _characters(texts)
    owner = np.cumsum(characters == LINE)  # the text of each character
    in_word = (characters != SPACE) & (characters != LINE)
    with np.errstate(over="ignore"):  # hashes wrap around at 64 bits
        powers = np.full(len(characters), BASE, dtype=np.uint64).cumprod()
        inverse = np.full(len(characters), pow(int(BASE), -1, 1 << 64), dtype=np.uint64).cumprod()
        sums = np.concatenate((np.zeros(1, dtype=np.uint64), (characters.astype(np.uint64) * powers).cumsum()))
        change = np.flatnonzero(np.diff(in_word)) + 1  # the first and the last character are spaces
        begins, ends = change[::2], change[1::2]
        words = _mix((sums[ends] - sums[begins]) * inverse[begins], 1)
        hashes, owners = [words], [owner[begins]]
        same_text = owners[0][1:] == owners[0][:-1]
        hashes.append(_mix(words[:-1] * BASE + words[1:], 2)[same_text])
        owners.append(owners[0][1:][same_text])
        spaces = np.concatenate(([0], np.cumsum(~in_word)))
        for size in NGRAMS:
            starts = np.arange(max(len(characters) - size + 1, 0))
            inside = starts[spaces[starts + size - 1] == spaces[starts + 1]]  # no spaces but at the ends
            inside = inside[(characters[inside] != LINE) & (characters[inside + size - 1] != LINE)]
            hashes.append(_mix((sums[inside + size] - sums[inside]) * inverse[inside], size))
            owners.append(owner[inside])
    texts_of, terms = np.concatenate(owners), np.concatenate(hashes).view(np.int64)
    order = np.lexsort((terms, texts_of))
    texts_of, terms = texts_of[order], terms[order]
    changes = (texts_of[1:] != texts_of[:-1]) | (terms[1:] != terms[:-1])
    starts = np.flatnonzero(np.concatenate((np.ones(len(order[:1]), dtype=bool), changes)))
    counts = np.diff(starts, append=len(order))
    return _TermCounts(texts=texts_of[starts].astype(np.int64), terms=terms[starts], counts=counts)


def _characters(texts: Sequence[str]) -> np.ndarray:
    """Code points: one line per text, in lower case, with one space around every word."""
    plain = pl.Series(texts, dtype=pl.String).str.normalize("NFKC").str.to_lowercase()
    lines = plain.str.replace_all(r"[^\p{L}\p{N}]+", " ").str.strip_chars()
    joined = " \n ".join(lines.to_list())
    return np.frombuffer(f" {joined} ".encode("utf-32-le"), dtype=np.uint32)


def _mix(hashes: np.ndarray, kind: int) -> np.ndarray:
    """Spread the bits of hashes (the last steps of SplitMix64); kinds of terms get different hashes."""
    mixed = hashes ^ (np.uint64(kind) * np.uint64(0xD6E8FEB86659FD93))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class HashedTextSettings(Kind, frozen=True, tag="hashed"):
    """Hashed words and pieces of words, projected on the directions of largest variance in the catalogue."""

    encoder: ClassVar[type[TextEncoder]] = HashedTexts

    width: Count = 128
    """Features of a text's vector."""
