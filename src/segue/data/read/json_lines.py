"""JSON lines → blocks of columns; a line that is not a JSON object is a malformed row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from segue.data.read.blocks import ROW, Block, Malformed
from segue.data.read.streams import NOT_UTF8, LogBytes, read_sample
from segue.errors import InputError

BLOCK_BYTES = 8 << 20
SAMPLE_BYTES = 1 << 20
SAMPLE_ROWS = 200


class JsonLinesFile:
    """A file with one JSON object a line; its columns are the keys of the first lines."""

    note = ""
    typed = False

    def __init__(self, path: Path) -> None:
        self.label = str(path)
        self.path = path
        self.size = path.stat().st_size
        self._sample = _read_sample(path)
        self.names = list(dict.fromkeys(key for row in self._sample for key in row))

    def sample(self, position: int) -> list[str]:
        return [_text(row.get(self.names[position])) or "" for row in self._sample]

    def holds_lists(self, position: int) -> bool:
        return any(isinstance(row.get(self.names[position]), list) for row in self._sample)

    def holds_numbers(self, position: int) -> bool:
        """Whether the column holds lists of numbers only."""
        lists = [row[name] for row in self._sample if isinstance(row.get(name := self.names[position]), list)]
        numbers = [type(entry) in (int, float) for entries in lists for entry in entries]
        return bool(numbers) and all(numbers)

    def blocks(self, positions: Mapping[str, int]) -> Iterator[Block]:
        decoder = _decoder([self.names[position] for position in positions.values()], self.label)
        lists = {name for name, position in positions.items() if self.holds_lists(position)}
        stream = LogBytes(self.path)
        line = 1
        try:
            for piece in _pieces(stream):
                rows, numbers, malformed = _decode(piece, decoder, line)
                line += piece.count(b"\n")
                frame = {ROW: pl.Series(numbers, dtype=pl.Int64)}
                for index, name in enumerate(positions):
                    values = [getattr(row, _field(index)) for row in rows]
                    frame[name] = _column(values, is_list=name in lists)
                yield Block(frame=pl.DataFrame(frame), malformed=malformed, done=stream.consumed())
        finally:
            stream.close()


def _read_sample(path: Path) -> list[dict[str, Any]]:
    sample, whole = read_sample(path, SAMPLE_BYTES)
    lines = [line for line in sample.splitlines() if line.strip()]
    if not whole:
        lines = lines[:-1]
    rows = []
    for line in lines[:SAMPLE_ROWS]:
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, Any]))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    if not rows:
        start = "a JSON array" if sample.lstrip().startswith(b"[") else "no JSON object"
        raise InputError(f"{path} begins with {start}; expected JSON lines, one object a line.")
    return rows


def _decoder(keys: list[str], label: str) -> msgspec.json.Decoder[Any]:
    """A decoder of rows with these keys, each in a field of its own."""
    names = {_field(index): key for index, key in enumerate(keys)}
    fields: list[Any] = [(name, Any, None) for name in names]
    try:
        return msgspec.json.Decoder(msgspec.defstruct("Row", fields, rename=names))
    except ValueError as error:  # msgspec refuses such keys
        raise InputError(
            f"{label}: a key holds a quotation mark, a backslash or a control character; give it another name."
        ) from error


def _field(index: int) -> str:
    return f"field_{index}"  # a key need not be an identifier


def _pieces(stream: LogBytes) -> Iterator[bytes]:
    """Whole lines, about a block at a time."""
    pending = b""
    while piece := stream.read(BLOCK_BYTES):
        end = piece.rfind(b"\n") + 1
        if not end:
            pending += piece
            continue
        yield pending + piece[:end]
        pending = piece[end:]
    if pending:
        yield pending + b"\n"


def _decode(
    piece: bytes, decoder: msgspec.json.Decoder[Any], first: int
) -> tuple[list[Any], list[int] | range, list[Malformed]]:
    """Decode all lines at once, or one by one if some line is blank or invalid."""
    count = piece.count(b"\n")
    try:
        rows = decoder.decode_lines(piece)
        if len(rows) == count and NOT_UTF8.encode() not in piece:
            return rows, range(first, first + count), []
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    return _decode_lines(piece, decoder.decode, first)


def _decode_lines(
    piece: bytes, decode: Callable[[bytes], Any], first: int
) -> tuple[list[Any], list[int], list[Malformed]]:
    rows: list[Any] = []
    numbers: list[int] = []
    malformed: list[Malformed] = []
    for number, line in enumerate(piece.split(b"\n")[:-1], start=first):
        reason = "not UTF-8" if NOT_UTF8.encode() in line else "not a JSON object"
        try:
            if reason == "not UTF-8":
                raise msgspec.DecodeError
            if line.strip():
                rows.append(decode(line))
                numbers.append(number)
        except (msgspec.DecodeError, UnicodeDecodeError):
            malformed.append(Malformed(number, reason, line.decode().replace(NOT_UTF8, "\ufffd")))
    return rows, numbers, malformed


def _column(values: list[Any], *, is_list: bool) -> pl.Series:
    """Text as it is, numbers as their digits, lists entry by entry."""
    if is_list:
        lists = [[_text(entry) for entry in value] if isinstance(value, list) else None for value in values]
        return pl.Series(lists, dtype=pl.List(pl.String))
    return pl.Series([value if type(value) is str else _text(value) for value in values], dtype=pl.String)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return msgspec.json.encode(value).decode()
