"""A path → its bytes, decompressed and valid UTF-8, with an error message for every way in which that can fail."""

from __future__ import annotations

import codecs
import re
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from segue.errors import InputError

SAMPLE_BYTES = 1 << 20
NOT_UTF8 = "\x1a"  # ASCII's "substitute", one byte too: replaces a byte that is not UTF-8

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_UNREADABLE = {
    b"PK\x03\x04": "a zip archive or a spreadsheet; decompress it, or save it as CSV",
    b"BZh": "compressed with bzip2; decompress it, or use gzip or zstd",
    b"\xfd7zXZ\x00": "compressed with xz; decompress it, or use gzip or zstd",
}
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_SURROGATES = re.compile("[\udc80-\udcff]")


def check_file(path: Path) -> bytes:
    """The first bytes of a file, which identify its format; a path that is no readable file is refused."""
    try:
        if not path.exists():
            raise InputError(f"{path} does not exist; check its name and the folder you are in.")
        if path.is_dir():
            raise InputError(f"{path} is a folder; give the files in it, such as {path}/*.")
        if not path.is_file():
            raise InputError(f"{path} is not a regular file; it is read twice, so save it to a file first.")
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not head:
        raise InputError(f"{path} is empty; expected a log with a header row and events.")
    for magic, what in _UNREADABLE.items():
        if head.startswith(magic):
            raise InputError(f"{path} is {what}.")
    return head


class LogBytes:
    """The decompressed bytes of a text file; bytes that are not UTF-8 are replaced, and `dirty` is set."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dirty = False
        self._file: IO[bytes] = path.open("rb")
        head = self._file.read(8)
        self._file.seek(0)
        self._bytes: Any = self._file
        for magic, codec in _COMPRESSED.items():
            if head.startswith(magic):
                self._bytes = pa.CompressedInputStream(pa.PythonFile(self._file, mode="r"), codec)
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._started = False
        self._pending = False  # the decoder holds the first bytes of a character

    def read(self, size: int) -> bytes:
        while True:
            piece = self._next(size)
            if piece.isascii() and not self._pending:
                return piece
            text = self._decoder.decode(piece, final=not piece)
            self._pending = bool(self._decoder.getstate()[0])
            try:
                clean = text.encode()
            except UnicodeEncodeError:
                self.dirty = True
                clean = _SURROGATES.sub(NOT_UTF8, text).encode()
            if clean or not piece:
                return clean

    def consumed(self) -> int:
        """The bytes read so far, of the file as it is stored."""
        return 0 if self._file.closed else self._file.tell()

    def close(self) -> None:
        self._file.close()

    def _next(self, size: int) -> bytes:
        """The next bytes, without the byte order mark of UTF-8."""
        try:
            piece = bytes(self._bytes.read(size))
        except OSError as error:
            if "runcated" in str(error):
                raise InputError(
                    f"{self.path} is cut short: its compressed data is incomplete. Copy or download it again."
                ) from error
            raise InputError(f"{self.path} cannot be read: {error}.") from error
        if self._started:
            return piece
        self._started = True
        if piece.startswith(_UTF16_MARKS) or piece[:200].count(0) > 20:
            raise InputError(
                f"{self.path} is not UTF-8 but UTF-16; convert it with "
                f"`iconv -f UTF-16 -t UTF-8 {self.path} > utf8.csv` and give utf8.csv."
            )
        return piece.removeprefix(codecs.BOM_UTF8)


def read_sample(path: Path, size: int = SAMPLE_BYTES) -> tuple[bytes, bool]:
    """The first `size` bytes of the decompressed text or a little more, and whether that is all."""
    with closing(LogBytes(path)) as stream:
        sample = b""
        while len(sample) < size:
            piece = stream.read(size)
            if not piece:
                return sample, True
            sample += piece
        return sample, not stream.read(1)
