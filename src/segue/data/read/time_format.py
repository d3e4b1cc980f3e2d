"""A strptime-like format → expressions that cut a text into its fields.

narwhals has no capturing groups, so a field is what is left of the text when all before and all behind it is cut off.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import narwhals as nw

from segue.data.read.civil import digits, with_microseconds
from segue.errors import SettingsError

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_SHORTHANDS = {"%F": "%Y-%m-%d", "%T": "%H:%M:%S", "%R": "%H:%M", "%D": "%m/%d/%y"}
_PATTERNS = {
    "Y": "[0-9]{4}",
    "y": "[0-9]{2}",
    "m": "[0-9]{1,2}",
    "d": "[0-9]{1,2}",
    "H": "[0-9]{1,2}",
    "I": "[0-9]{1,2}",
    "M": "[0-9]{1,2}",
    "S": "[0-9]{1,2}",
    "f": "[0-9]{1,9}",
    "b": "[A-Za-z]{3}",
    "B": "[A-Za-z]{3,9}",
    "p": "[AaPp][Mm]",
    "z": "(?:Z|[+-][0-9]{2}:?[0-9]{2})",
}
_FIXED = {"Y": 4, "y": 2, "m": 2, "d": 2, "H": 2, "I": 2, "M": 2, "S": 2, "f": 6}
_FIELD_OF = {"Y": "year", "m": "month", "d": "day", "H": "hour", "M": "minute", "S": "second"}


@dataclass(frozen=True, slots=True)
class _Part:
    letter: str | None  # None for text that stands as it is
    pattern: str


@dataclass(frozen=True, slots=True)
class TimeFormat:
    """A format taken apart; digits next to digits (%Y%m%d) have their full width, others may lack leading zeros."""

    parts: tuple[_Part, ...]

    @classmethod
    def parse(cls, text: str) -> TimeFormat:
        for short, long in _SHORTHANDS.items():
            text = text.replace(short, long)
        pieces = re.findall(r"%.|[^%]+|%$", text, flags=re.DOTALL)
        letters = [piece[1:] if piece.startswith("%") and piece != "%%" else None for piece in pieces]
        for letter in letters:
            if letter is not None and letter not in _PATTERNS:
                known = " ".join(f"%{name}" for name in _PATTERNS)
                raise SettingsError(f"--time-format {text!r} has %{letter}, which is not known; known are {known}.")
        if not {"Y", "y"} & set(letters) or not {"m", "b", "B"} & set(letters) or "d" not in letters:
            raise SettingsError(
                f"--time-format {text!r} gives no date; expected at least year, month and day, such as %d/%m/%Y %H:%M, "
                "or the name of a unit: order, s, ms, us, ns."
            )
        return cls(tuple(_parts(pieces, letters)))

    def microseconds(self, frame: nw.LazyFrame[Any], *, zone: str | None) -> nw.LazyFrame[Any]:
        """Add `microseconds`, read from the column `_text`."""
        whole = "^" + "".join(part.pattern for part in self.parts) + "$"
        frame = frame.with_columns(nw.col("_text").str.contains(whole).fill_null(value=False).alias("_fits"))
        fields: dict[str, nw.Expr] = {}
        for index, part in enumerate(self.parts):
            if part.letter is not None:
                fields |= _field(part.letter, self._cut_out(index))
        if "half" in fields:
            fields["hour"] = fields.pop("hour") % 12 + fields.pop("half")
        return with_microseconds(frame, fields, zone=zone)

    def _cut_out(self, index: int) -> nw.Expr:
        """The text of one part, null where the whole text does not fit the format."""
        text = nw.when(nw.col("_fits")).then(nw.col("_text"))
        before = "".join(part.pattern for part in self.parts[:index])
        behind = "".join(part.pattern for part in self.parts[index + 1 :])
        if before:
            text = text.str.replace_all(f"^{before}", "")
        return text.str.replace_all(f"{behind}$", "") if behind else text


def _parts(pieces: list[str], letters: list[str | None]) -> list[_Part]:
    parts = []
    for index, (piece, letter) in enumerate(zip(pieces, letters, strict=True)):
        if letter is None:
            parts.append(_Part(None, _literal("%" if piece == "%%" else piece)))
            continue
        neighbours = letters[max(0, index - 1) : index] + letters[index + 1 : index + 2]
        crowded = letter in _FIXED and any(near in _FIXED for near in neighbours)
        parts.append(_Part(letter, f"[0-9]{{{_FIXED[letter]}}}" if crowded else _PATTERNS[letter]))
    return parts


def _literal(text: str) -> str:
    """Escaped for every engine's regular expressions: re.escape also escapes what some of them do not know."""
    return re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text)


def _field(letter: str, text: nw.Expr) -> dict[str, nw.Expr]:
    """The field or fields that one letter gives."""
    if letter in _FIELD_OF:
        return {_FIELD_OF[letter]: digits(text)}
    if letter == "y":
        year = digits(text)
        return {"year": year + 1900 + (year < 69).cast(nw.Int64) * 100}
    if letter in "bB":
        name, month = text.str.slice(0, 3).str.to_lowercase(), nw.lit(0, dtype=nw.Int64)
        for number, short in enumerate(_MONTHS, start=1):
            month = month + (name == short).cast(nw.Int64) * number
        return {"month": month}
    if letter == "f":
        return {"microsecond": microseconds_of_fraction(text)}
    if letter == "I":
        return {"hour": digits(text)}
    if letter == "p":
        return {"half": (text.str.to_lowercase() == "pm").cast(nw.Int64) * 12}
    return {"offset": offset_minutes(text)}


def microseconds_of_fraction(text: nw.Expr) -> nw.Expr:
    """The digits behind a decimal point, as microseconds."""
    return digits(nw.concat_str([text, nw.lit("000000")]).str.slice(0, 6))


def offset_minutes(text: nw.Expr) -> nw.Expr:
    """Minutes east of UTC from Z, UTC, +02, +0200 or -02:30; null from no text."""
    numbers = text.str.replace_all("[^0-9]", "")
    hours = digits(numbers.str.slice(0, 2), where=numbers.str.len_chars() >= 2).fill_null(0)
    minutes = digits(numbers.str.slice(2, 2), where=numbers.str.len_chars() >= 4).fill_null(0)
    sign = 1 - (text.str.slice(0, 1) == "-").cast(nw.Int64) * 2
    return (hours * 60 + minutes) * sign
