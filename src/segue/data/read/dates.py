"""A column of dates as text → microseconds since 1970 UTC, and the reason of each row that cannot be read.

polars reads the commonest forms of a sample. Python reads the remaining rows one by one, with
`segue.data.timestamps.read_iso`, or with `datetime.strptime` for a format.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from datetime import datetime

import polars as pl

from segue.data.timestamps import ISO, UNREADABLE, offset_microseconds, read_iso, utc_microseconds
from segue.errors import SettingsError

FORMS = 4  # more forms than this in one column are read by Python
SAMPLE_ROWS = 32
FRACTIONS = (3, 6, 9)  # digits of a second's fraction for which polars has a directive

# The pattern of each directive; groups are for Python alone.
_PATTERNS = {
    "Y": "[0-9]{4}",
    "y": "[0-9]{2}",
    "m": "[0-9]{1,2}",
    "d": "[0-9]{1,2}",
    "H": "[0-9]{1,2}",
    "I": "[0-9]{1,2}",
    "M": "[0-9]{1,2}",
    "S": "[0-5]?[0-9]",
    "f": "(?P<fraction>[0-9]{1,9})",
    "b": "[A-Za-z]{3}",
    "B": "[A-Za-z]{3,9}",
    "p": "[AaPp][Mm]",
    "z": "(?:Z|[+-][0-9]{2}:?[0-9]{2})",
}
_WIDTHS = {"Y": 4, "y": 2, "m": 2, "d": 2, "H": 2, "I": 2, "M": 2, "S": 2, "f": 6}
_SHORTHANDS = {"%F": "%Y-%m-%d", "%T": "%H:%M:%S", "%R": "%H:%M", "%D": "%m/%d/%y"}


@dataclass(frozen=True, slots=True)
class _Form:
    """A way of writing dates that polars reads."""

    format: str
    offset: int | None = None
    """Microseconds east of UTC, if the format holds the offset as plain text."""

    def read(self, texts: pl.Expr, zone: str | None) -> pl.Expr:
        """Microseconds UTC, null for a text of another form."""
        parsed = texts.str.to_datetime(self.format, time_unit="us", strict=False, cache=False)
        directives = self.format.replace("%%", "")
        if "%y" in directives:  # 69 is 2069 for polars and 1969 for Python
            parsed = pl.when(parsed.dt.year() != 2069).then(parsed)
        if "%z" in directives:
            return parsed.dt.epoch("us")
        local = parsed.dt.epoch("us")
        return local_to_utc(local, zone) if self.offset is None else local - self.offset


@dataclass(frozen=True, slots=True)
class TimeFormat:
    """A checked --time-format. Digits beside digits (%Y%m%d) have their full width; others may lack leading zeros."""

    text: str
    pattern: str
    """The regular expression of its texts, for Python and for polars."""

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
            if letter is not None and letters.count(letter) > 1:
                raise SettingsError(f"--time-format {text!r} has %{letter} twice; leave one out.")
        if not {"Y", "y"} & set(letters) or not {"m", "b", "B"} & set(letters) or "d" not in letters:
            raise SettingsError(
                f"--time-format {text!r} gives no date; expected at least year, month and day, such as %d/%m/%Y %H:%M, "
                "or the name of a unit: order, s, ms, us, ns."
            )
        hour = "%I" if "p" in letters else "%H"
        text = "".join(hour if letter in ("H", "I") else piece for piece, letter in zip(pieces, letters, strict=True))
        parts = []
        for index, (piece, letter) in enumerate(zip(pieces, letters, strict=True)):
            if letter is None:
                # re.escape also escapes what polars must not see escaped
                parts.append(re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", "%" if piece == "%%" else piece))
                continue
            neighbours = [*letters[max(0, index - 1) : index], *letters[index + 1 : index + 2]]
            crowded = letter in _WIDTHS and any(near in _WIDTHS for near in neighbours)
            parts.append(f"[0-9]{{{_WIDTHS[letter]}}}" if crowded else _PATTERNS[letter])
        return cls(text, f"^{''.join(parts)}$")

    def forms(self) -> list[_Form]:
        """This format for polars; empty if polars has no such format, as for hours without minutes."""
        # %f counts nanoseconds there, and its %3f has three digits
        formats = {re.sub(r"(?<!%)((?:%%)*)%f", rf"\g<1>%{digits}f", self.text) for digits in FRACTIONS}
        try:
            pl.Series([""]).str.to_datetime(min(formats), strict=False)
        except pl.exceptions.ComputeError:
            return []
        return [_Form(each) for each in sorted(formats)]

    def read(self, text: str, zone: str | None) -> int:
        """Read one text that matches the pattern; raises ValueError with the reason if it cannot."""
        match = re.match(self.pattern, text)
        if match is not None and "fraction" in match.groupdict():  # strptime reads six digits at most
            begin, end = match.span("fraction")
            text = text[: min(end, begin + 6)] + text[end:]
        try:
            when = datetime.strptime(text, self.text)  # noqa: DTZ007, the zone is given beside it
        except ValueError:
            raise ValueError(UNREADABLE) from None
        return utc_microseconds(when, zone)


def local_to_utc(local: pl.Expr, zone: str | None) -> pl.Expr:
    """Microseconds of a local clock → microseconds UTC; null for an hour that the clocks skipped.

    Of an hour that the clocks showed twice, the first is used.
    """
    if zone is None:
        return local
    clock = local.cast(pl.Datetime("us"))
    return clock.dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null").dt.epoch("us")


def read_dates(texts: pl.Series, zone: str | None, time_format: TimeFormat | None = None) -> pl.DataFrame:
    """Read dates in ISO 8601 or in a --time-format: `microseconds`, or null and its `time_reason`.

    polars reads the texts that match the pattern, form by form; Python reads the rest. Null texts stay null in
    both columns.
    """
    text, rest, microseconds = pl.col("text"), pl.col("rest"), pl.col("microseconds")
    frame = pl.DataFrame({"text": texts}).with_columns(
        pl.when(text.str.contains(ISO if time_format is None else time_format.pattern)).then(text).alias("rest"),
        pl.lit(None, dtype=pl.Int64).alias("microseconds"),
    )
    candidates = frame["rest"].drop_nulls()
    sample = candidates.gather_every(max(1, len(candidates) // SAMPLE_ROWS))
    for form in _iso_forms(sample) if time_format is None else time_format.forms():
        frame = frame.with_columns(pl.coalesce(microseconds, form.read(rest, zone)).alias("microseconds"))
        frame = frame.with_columns(pl.when(microseconds.is_null()).then(rest).alias("rest"))
    values, reasons = {}, {}
    for one in frame["rest"].drop_nulls().unique().to_list():
        try:
            values[one] = read_iso(one, zone) if time_format is None else time_format.read(one, zone)
        except ValueError as error:
            reasons[one] = str(error)
    unread = text.is_not_null() & microseconds.is_null()
    reason = rest.replace_strict(reasons, default=UNREADABLE, return_dtype=pl.String)
    value = rest.replace_strict(values, default=None, return_dtype=pl.Int64)
    frame = frame.with_columns(pl.coalesce(microseconds, value))
    return frame.select("microseconds", pl.when(unread).then(reason).alias("time_reason"))


def _iso_forms(sample: pl.Series) -> list[_Form]:
    """How polars reads the commonest forms of some texts in ISO 8601; it cannot read all of them."""
    forms: Counter[_Form] = Counter()
    for text in sample:
        match = re.match(ISO, text)
        assert match is not None
        _, hour, minute, second, fraction, offset = match.groups()
        if hour is None:
            forms[_Form("%Y-%m-%d")] += 1
        elif minute is not None and (fraction is None or len(fraction) in FRACTIONS):
            format_ = f"%Y-%m-%d{text[10]}%H:%M"
            format_ += "" if second is None else ":%S"
            format_ += "" if fraction is None else f"{text[19]}%{len(fraction)}f"
            zone = "" if offset is None else text[max(match.end(group) for group in (3, 4, 5)) :]
            forms[_Form(format_ + zone, None if offset is None else offset_microseconds(offset))] += 1
    return [form for form, _ in forms.most_common(FORMS)]
