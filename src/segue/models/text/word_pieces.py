"""The WordPiece tokenizer of BERT's uncased models (Devlin et al., BERT, 2019).

Texts are split at spaces and punctuation; words are split greedily into the longest known pieces. Special tokens such
as [SEP] in a text are ordinary words.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import lru_cache

BEGIN, END, UNKNOWN = "[CLS]", "[SEP]", "[UNK]"
INVISIBLE = ("Cc", "Cf", "Co")  # control and format characters, private use
LONGEST = 100  # characters of a word; longer ones are unknown
IDEOGRAPHS = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F)),
    *((0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)  # each is a word; the ranges are those of the original code, with its error at 2B920


class WordPieces:
    """A tokenizer with the vocabulary `pieces`, by number."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._numbers = {piece: number for number, piece in enumerate(pieces)}
        self.begin, self.end, self.unknown = (self._numbers[mark] for mark in (BEGIN, END, UNKNOWN))

    def numbers(self, text: str, most: int) -> list[int]:
        """The pieces of a text between [CLS] and [SEP], at most `most` with these."""
        pieces: list[int] = []
        for word in "".join(map(_normalise, text)).split():
            pieces += self._word(word)
            if len(pieces) >= most - 2:
                break
        return [self.begin, *pieces[: most - 2], self.end]

    def _word(self, word: str) -> list[int]:
        """The pieces of a word; [UNK] if a part of it is unknown."""
        if len(word) > LONGEST:
            return [self.unknown]
        pieces, begin = list[int](), 0
        while begin < len(word):
            inside = "##" if begin else ""
            ends = range(len(word), begin, -1)
            end = next((end for end in ends if inside + word[begin:end] in self._numbers), None)
            if end is None:
                return [self.unknown]
            pieces.append(self._numbers[inside + word[begin:end]])
            begin = end
        return pieces


@lru_cache(maxsize=1 << 16)
def _normalise(character: str) -> str:
    """Lower-case a character, strip accents, put spaces around one that is a word, and drop invisible ones."""
    if character in "\t\n\r":
        return " "
    if character == "\N{REPLACEMENT CHARACTER}" or unicodedata.category(character) in INVISIBLE:
        return ""
    if character.isspace():
        return " "
    plain = (part for part in unicodedata.normalize("NFD", character) if unicodedata.category(part) != "Mn")
    ideograph = any(begin <= ord(character) <= end for begin, end in IDEOGRAPHS)

    def alone(part: str) -> bool:
        """Ideographs, Unicode punctuation, and all ASCII symbols, such as $ and +."""
        return ideograph or unicodedata.category(part)[0] == "P" or (part.isascii() and not part.isalnum())

    return "".join(f" {part} " if alone(part) else part for part in "".join(plain).lower())
