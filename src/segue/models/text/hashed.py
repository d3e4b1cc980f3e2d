"""Texts → vectors, offline: words and pieces of words, weighed by how rare they are, brought down to a few features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from torch import Tensor
from torch.nn import functional

from segue.models.items.svd import right_directions
from segue.models.text.encoder import TextEncoder

PIECES = (3, 4, 5)  # letters of a piece of a word; a word's ends count as letters
MOST_TERMS = 1 << 15  # words and pieces that are known, those of most texts: 16 MB at 128 features
MOST_FITTED = 100_000  # texts that say which terms there are, and which go together
AT_A_TIME = 20_000  # texts turned into vectors at a time
SEED = 7
BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse among 64-bit numbers
LINE, SPACE = ord("\n"), ord(" ")


class HashedTexts(TextEncoder):
    """Hashed words, pairs of words and pieces of words, as TF-IDF, in the directions along which the texts that it was
    fitted to differ most. A text of which it knows nothing gets zeros."""

    terms: Tensor
    weights: Tensor
    directions: Tensor

    def __init__(self, terms: Tensor, weights: Tensor, directions: Tensor) -> None:
        """`terms` [N] int64, ascending: hashes that are known; `weights` [N]: how much each counts, the rarer the more;
        `directions` [N, F]."""
        super().__init__()
        self.register_buffer("terms", terms)
        self.register_buffer("weights", weights)
        self.register_buffer("directions", directions)

    @classmethod
    def fitted(cls, texts: Sequence[str], width: int) -> HashedTexts:
        """To the texts of a catalogue; of very many, to some that lie evenly among them."""
        some = texts[:: -(-len(texts) // MOST_FITTED)] if texts else texts
        found = _terms_of(some)
        terms, frequency = np.unique(found.terms, return_counts=True)
        shared = frequency >= min(2, frequency.max(initial=0))  # what one text has alone says nothing about others
        kept = np.flatnonzero(shared)[np.argsort(-frequency[shared], kind="stable")[:MOST_TERMS]]
        kept.sort()
        terms, frequency = terms[kept], frequency[kept]
        weights = np.log((1 + len(some)) / (1 + frequency)) + 1
        blank = torch.zeros(len(terms), 0)
        encoder = cls(torch.from_numpy(terms), torch.from_numpy(weights.astype(np.float32)), blank)
        encoder.directions = _directions(encoder._weighed(found, len(some)), width)
        return encoder

    @classmethod
    def from_buffers(cls, buffers: Mapping[str, Tensor]) -> HashedTexts:
        return cls(buffers["terms"], buffers["weights"], buffers["directions"])

    @property
    def width(self) -> int:
        return int(self.directions.shape[1])

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.zeros((len(texts), self.width), dtype=np.float32)
        directions = self.directions.float()
        for begin in range(0, len(texts), AT_A_TIME):
            some = texts[begin : begin + AT_A_TIME]
            vectors[begin : begin + len(some)] = self._weighed(_terms_of(some), len(some)).times(directions)
        return vectors

    def _weighed(self, found: _Found, n_texts: int) -> _Sparse:
        """Texts by known terms [n, N]; each text's numbers have the length one."""
        known = self.terms.numpy()
        places = np.searchsorted(known, found.terms).clip(max=max(len(known) - 1, 0))
        met = known[places] == found.terms if len(known) else np.zeros(0, dtype=bool)
        rows, columns = found.texts[met], places[met]
        values = (1 + np.log(found.counts[met])) * self.weights.double().numpy()[columns]
        lengths = np.sqrt(np.bincount(rows, values**2, minlength=n_texts))
        values = (values / lengths[rows]).astype(np.float32)
        return _Sparse.of(rows, columns, values, (n_texts, len(known)))


@dataclass(frozen=True, slots=True, eq=False)
class _Sparse:
    """A matrix that is mostly zero, row by row. Torch's own are slow here, or warn that they are not finished."""

    starts: Tensor  # [rows] int64: where a row's entries begin
    columns: Tensor  # [P] int64
    values: Tensor  # [P] float32
    shape: tuple[int, int]

    @classmethod
    def of(cls, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, shape: tuple[int, int]) -> _Sparse:
        """`rows` ascending."""
        starts = np.searchsorted(rows, np.arange(shape[0]))
        return cls(torch.from_numpy(starts), torch.from_numpy(columns), torch.from_numpy(values), shape)

    @property
    def turned(self) -> _Sparse:
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.starts.numpy(), append=len(self.columns)))
        order = np.argsort(self.columns.numpy(), kind="stable")
        columns, values = self.columns.numpy()[order], self.values.numpy()[order]
        return _Sparse.of(columns, rows[order], values, (self.shape[1], self.shape[0]))

    def times(self, other: Tensor) -> Tensor:
        """The product with a full matrix [columns, X]."""
        return functional.embedding_bag(
            self.columns, other.contiguous(), self.starts, mode="sum", per_sample_weights=self.values
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Terms of texts, each once a text, by text and then by term."""

    texts: np.ndarray  # [P] int64
    terms: np.ndarray  # [P] int64
    counts: np.ndarray  # [P] int64: how often the text has the term


def _terms_of(texts: Sequence[str]) -> _Found:
    """All texts in one array of letters: sums over it, from which any stretch's hash is a difference."""
    letters = _letters(texts)
    owner = np.cumsum(letters == LINE)  # the line that a letter stands in
    with np.errstate(over="ignore"):  # 64-bit numbers that wrap around are what makes a hash
        powers = np.full(len(letters), BASE, dtype=np.uint64).cumprod()
        inverse = np.full(len(letters), pow(int(BASE), -1, 1 << 64), dtype=np.uint64).cumprod()
        sums = np.concatenate((np.zeros(1, dtype=np.uint64), (letters.astype(np.uint64) * powers).cumsum()))
        begins, ends = _words(letters)
        words = _mixed((sums[ends] - sums[begins]) * inverse[begins], 1)
        hashes, owners = [words], [owner[begins]]
        together = owners[0][1:] == owners[0][:-1]
        hashes.append(_mixed(words[:-1] * BASE + words[1:], 2)[together])
        owners.append(owners[0][1:][together])
        spaces = np.concatenate(([0], np.cumsum((letters == SPACE) | (letters == LINE))))
        for size in PIECES:
            starts = np.arange(max(len(letters) - size + 1, 0))
            inside = starts[spaces[starts + size - 1] == spaces[starts + 1]]  # spaces only at a piece's ends
            inside = inside[(letters[inside] != LINE) & (letters[inside + size - 1] != LINE)]
            hashes.append(_mixed((sums[inside + size] - sums[inside]) * inverse[inside], size))
            owners.append(owner[inside])
    return _counted(np.concatenate(owners), np.concatenate(hashes).view(np.int64))


def _letters(texts: Sequence[str]) -> np.ndarray:
    """Code points: a line a text, in small letters, with one space around every word."""
    plain = pl.Series(texts, dtype=pl.String).str.normalize("NFKC").str.to_lowercase()
    lines = plain.str.replace_all(r"[^\p{L}\p{N}]+", " ").str.strip_chars()
    joined = " \n ".join(lines.to_list())
    return np.frombuffer(f" {joined} ".encode("utf-32-le"), dtype=np.uint32)


def _words(letters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where words begin, and where they end."""
    inside = (letters != SPACE) & (letters != LINE)
    change = np.flatnonzero(np.diff(inside)) + 1  # the first and the last letter are spaces
    return change[::2], change[1::2]


def _mixed(hashes: np.ndarray, kind: int) -> np.ndarray:
    """Bits well spread, and terms of different kinds apart (the end of SplitMix64)."""
    mixed = hashes ^ (np.uint64(kind) * np.uint64(0xD6E8FEB86659FD93))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _counted(owners: np.ndarray, terms: np.ndarray) -> _Found:
    order = np.lexsort((terms, owners))
    owners, terms = owners[order], terms[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (owners[1:] != owners[:-1]) | (terms[1:] != terms[:-1])
    starts = np.flatnonzero(first)
    counts = np.diff(np.concatenate((starts, [len(order)])))
    return _Found(texts=owners[starts].astype(np.int64), terms=terms[starts], counts=counts)


def _directions(matrix: _Sparse, width: int) -> Tensor:
    """The directions along which texts differ most [N, width]."""
    first = torch.Generator().manual_seed(SEED)
    return right_directions(matrix.times, matrix.turned.times, matrix.shape, width, generator=first)[0]
