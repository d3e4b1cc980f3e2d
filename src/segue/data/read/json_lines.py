"""JSON lines → blocks of columns; a line that is not a JSON object is a malformed row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from segue.data.read.blocks import ROW, SAMPLE_ROWS, Block, Malformed
from segue.data.read.streams import NOT_UTF8, LogBytes, read_sample
from segue.errors import InputError

BLOCK_BYTES = 8 << 20


class JsonLinesFile:
    """A file with one JSON object a line; its columns are the keys of the first lines."""

    note = ""

    def __init__(self, path: Path) -> None:
        self.label = str(path)
        self.path = path
        self.size = path.stat().st_size
        sample, whole = read_sample(path)
        lines = [line for line in sample.splitlines() if line.strip()]
        self._sample: list[dict[str, Any]] = []
        for line in lines[: len(lines) if whole else -1][:SAMPLE_ROWS]:
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                self._sample.append(msgspec.json.decode(line, type=dict[str, Any]))
        if not self._sample:
            start = "a JSON array" if sample.lstrip().startswith(b"[") else "no JSON object"
            raise InputError(f"{path} begins with {start}; expected JSON lines, one object a line.")
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
        fields = {name: f"field_{index}" for index, name in enumerate(positions)}  # a key need not be an identifier
        keys = {fields[name]: self.names[position] for name, position in positions.items()}
        try:
            row_type = msgspec.defstruct("Row", [(field, Any, None) for field in keys], rename=keys)
            decoder = msgspec.json.Decoder[Any](row_type)
        except ValueError as error:  # msgspec refuses such keys
            raise InputError(
                f"{self.label}: a key holds a quotation mark, a backslash or a control character; give it another name."
            ) from error
        line = 1
        with closing(LogBytes(self.path)) as stream:
            for piece in _pieces(stream):
                rows, numbers, malformed = _decode(piece, decoder, line)
                line += piece.count(b"\n")
                frame = {ROW: pl.Series(numbers, dtype=pl.Int64)}
                for name, position in positions.items():
                    values = [getattr(row, fields[name]) for row in rows]
                    if self.holds_lists(position):
                        lists = [list(map(_text, value)) if isinstance(value, list) else None for value in values]
                        frame[name] = pl.Series(lists, dtype=pl.List(pl.String))
                    else:
                        texts = [value if type(value) is str else _text(value) for value in values]
                        frame[name] = pl.Series(texts, dtype=pl.String)
                yield Block(frame=pl.DataFrame(frame), malformed=malformed, done=stream.consumed())


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
    """Decode all lines at once, or one by one if some line is blank or invalid: rows, their numbers, invalid lines."""
    count = piece.count(b"\n")
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        rows = decoder.decode_lines(piece)
        if len(rows) == count and NOT_UTF8.encode() not in piece:
            return rows, range(first, first + count), []
    rows, numbers, malformed = [], [], []
    for number, line in enumerate(piece.split(b"\n")[:-1], start=first):
        reason = "not UTF-8" if NOT_UTF8.encode() in line else "not a JSON object"
        try:
            if reason == "not UTF-8":
                raise msgspec.DecodeError
            if line.strip():
                rows.append(decoder.decode(line))
                numbers.append(number)
        except (msgspec.DecodeError, UnicodeDecodeError):
            malformed.append(Malformed(number, reason, line.decode().replace(NOT_UTF8, "\ufffd")))
    return rows, numbers, malformed


def _text(value: Any) -> str | None:
    """Text as it is, numbers as their digits, anything else as JSON."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return msgspec.json.encode(value).decode()
