"""A text → the numbers of its pieces in the vocabulary of BERT's uncased models.

Devlin et al., BERT, 2019. Words are cut at spaces and punctuation; a word is the longest piece that it begins with, and
so on. What a text writes like a mark of the model's own, such as [SEP], is words here.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import lru_cache

BEGIN, END, UNKNOWN = "[CLS]", "[SEP]", "[UNK]"
UNSEEN = ("Cc", "Cf", "Co")  # control characters, marks of direction and the like
LONGEST = 100  # letters of a word; longer ones are unknown
IDEOGRAPHS = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F)),
    *((0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)  # each a word of its own; as in the library that the models were trained with, its slip at 2B920 included


class WordPieces:
    """`pieces`: the vocabulary, by number."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._numbers = {piece: number for number, piece in enumerate(pieces)}
        self.begin, self.end, self.unknown = (self._numbers[mark] for mark in (BEGIN, END, UNKNOWN))

    def numbers(self, text: str, most: int) -> list[int]:
        """Of a text, between the marks of its begin and its end; `most` together with these."""
        found: list[int] = []
        for word in "".join(map(_spelled, text)).split():
            found += self._word(word)
            if len(found) >= most - 2:
                break
        return [self.begin, *found[: most - 2], self.end]

    def _word(self, word: str) -> list[int]:
        """Unknown as a whole where one of its pieces is."""
        if len(word) > LONGEST:
            return [self.unknown]
        found, begin = list[int](), 0
        while begin < len(word):
            inside = "##" if begin else ""
            ends = range(len(word), begin, -1)
            end = next((end for end in ends if inside + word[begin:end] in self._numbers), None)
            if end is None:
                return [self.unknown]
            found.append(self._numbers[inside + word[begin:end]])
            begin = end
        return found


@lru_cache(maxsize=1 << 16)
def _spelled(letter: str) -> str:
    """A letter small and without accents, one that is a word of its own between spaces, and none of what is unseen."""
    if letter in "\t\n\r":
        return " "
    if letter == "\N{REPLACEMENT CHARACTER}" or unicodedata.category(letter) in UNSEEN:
        return ""
    if letter.isspace():
        return " "
    plain = (part for part in unicodedata.normalize("NFD", letter) if unicodedata.category(part) != "Mn")
    alone = any(begin <= ord(letter) <= end for begin, end in IDEOGRAPHS)
    return "".join(f" {part} " if alone or _is_punctuation(part) else part for part in "".join(plain).lower())


def _is_punctuation(letter: str) -> bool:
    """With all of ASCII's signs, such as $ and +."""
    return unicodedata.category(letter)[0] == "P" or (letter.isascii() and not letter.isalnum())
