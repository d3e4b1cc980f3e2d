"""The work of an executor on its part of a log: the local engine's parsers and rules, over Arrow tables.

A partition holds paths of text files, or rows of Parquet files and tables. `TextFiles` opens the former as inputs of
the local engine; a `BlockTask` turns the blocks of either into Arrow batches for Spark.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa

from segue.data.read.arrow import ParquetInput
from segue.data.read.blocks import ROW, Block, LogInput
from segue.data.read.columns import Columns
from segue.data.read.log import by_role, open_file, read_blocks
from segue.data.read.times import TimeRule, votes
from segue.data.rules.rows import check_rows, stored_values
from segue.data.settings import Role
from segue.errors import InputError

# A checked row: its file, row and index in the block; its columns, `value` as the bits of its float32; and, of a bad
# one, the reason with the texts of its columns or, if it cannot be parsed, its line.
SPARK_CHECKED = (
    "file int, row long, part int, user string, item string, time long, order_number long, kind string, value int, "
    "reason string, texts array<string>, line string"
)
_ARROW = {"int": pa.int32(), "long": pa.int64(), "string": pa.string(), "array<string>": pa.list_(pa.string())}
CHECKED_ROWS = pa.schema((name, _ARROW[dtype]) for name, dtype in map(str.split, SPARK_CHECKED.split(", ")))

Files = dict[str, tuple[int | None, str]]
"""The plain path of each file of the log → its number and its label. A table has neither path nor number."""
Batches = Iterator[pa.RecordBatch]
BlockTask = Callable[[int | None, Block], Batches]
"""Called with a file's number, None for a table, and one of its blocks."""


@dataclass(slots=True)
class SurveyedFile:
    """The driver's description of a text file, whose rows are read on the executors."""

    number: int
    label: str
    names: list[str]
    size: int
    note: str
    samples: list[list[str]]
    lists: list[bool]

    def sample(self, position: int) -> list[str]:
        return self.samples[position]

    def holds_lists(self, position: int) -> bool:
        return self.lists[position]

    def blocks(self, positions: Mapping[str, int]) -> Iterator[Block]:  # noqa: ARG002
        raise AssertionError("a text file's rows are read on the executors")


def plain_path(path: str) -> str:
    """A path in the form that files are compared by: Spark writes local paths in several forms."""
    return re.sub("^file:/*", "/", path)


def survey(batches: Batches, *, opener: TextFiles) -> Batches:
    """Describe every text file as a `SurveyedFile` in JSON, in the column `survey`."""

    def describe(number: int | None, log: LogInput) -> Batches:
        positions = range(len(log.names))
        first = number == 0  # its values help to find the columns; of the others only the names matter
        samples = [log.sample(position) if first else [] for position in positions]
        lists = [log.holds_lists(position) for position in positions]
        file = SurveyedFile(number or 0, log.label, log.names, log.size, log.note, samples, lists)
        yield pa.RecordBatch.from_pydict({"survey": pa.array([msgspec.json.encode(file)], pa.binary())})

    for batch in batches:
        yield from opener(batch, describe)


def run_on_files(batches: Batches, *, opener: TextFiles, columns: Columns, task: BlockTask) -> Batches:
    """Run a task over every block of text files."""

    def read(number: int | None, log: LogInput) -> Batches:
        for _, block in read_blocks([log], columns):
            yield from task(number, block)

    for batch in batches:
        yield from opener(batch, read)


def run_on_rows(batches: Batches, *, files: Files, columns: Columns, task: BlockTask) -> Batches:
    """Run a task over rows of Parquet files or of a table, which Spark has read with each column under its role."""
    for batch in batches:
        frame = pl.DataFrame(pl.from_arrow(batch))
        for (path,), rows in frame.group_by("file", maintain_order=True):
            number, label = files[plain_path(unquote(str(path)))]
            yield from task(number, by_role(Block(rows.drop("file")), label, columns))


def count_votes(_number: int | None, block: Block) -> Batches:
    """The votes of a block, one row per form."""
    counts = votes(block.frame["time"])
    yield pa.RecordBatch.from_pydict({"name": list(counts), "count": pa.array(counts.values(), pa.int64())})


def check_block(number: int | None, block: Block, *, roles: list[Role], rule: TimeRule | None) -> Batches:
    """The rows of a block as `CHECKED_ROWS` describes them."""
    checked = check_rows(block.frame, roles, rule)
    texts = pl.concat_list([pl.col(role).cast(pl.String) for role in roles])
    columns: dict[str, Any] = {
        ROW: checked[ROW],
        "user": checked["user"],
        "item": checked["item"],
        "reason": checked["reason"],
        "texts": checked.select(pl.when(pl.col("reason").is_not_null()).then(texts)).to_series(),
    }
    if number is not None:
        columns["part"] = np.arange(checked.height)
    if rule is not None:
        columns["time"] = checked["microseconds"]
    if "order" in roles:
        columns["order_number"] = checked["order_number"]
    if "kind" in roles:
        columns["kind"] = checked["kind"].fill_null("")
    if "value" in roles:
        columns["value"] = stored_values(checked["amount"]).view(np.int32)
    malformed: dict[str, Any] = {
        ROW: [row.row for row in block.malformed],
        "reason": [row.reason for row in block.malformed],
        "line": [row.text for row in block.malformed],
    }
    for values in (columns, malformed):
        height = len(values[ROW])
        values["file"] = [number] * height
        arrays = []
        for field in CHECKED_ROWS:
            column = values.get(field.name)
            if isinstance(column, pl.Series):
                column = column.to_arrow(compat_level=pl.CompatLevel.oldest())
            arrays.append(pa.nulls(height, field.type) if column is None else pa.array(column).cast(field.type))
        yield from pa.Table.from_arrays(arrays, schema=CHECKED_ROWS).to_batches() if height else []


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Opens text files by their paths, or from their content if the executor cannot see the path.

    Calls `read` with the number and the input of each file of a batch.
    """

    files: Files
    named: set[str]

    def __call__(self, batch: pa.RecordBatch, read: Callable[[int | None, LogInput], Batches]) -> Batches:
        contents = batch.column("content") if "content" in batch.schema.names else None
        for index, path in enumerate(batch.column("path").to_pylist()):
            number, label = self.files[plain_path(path)]
            with _local_file(label, path, None if contents is None else contents[index].as_buffer()) as file:
                log = open_file(file, named=self.named)
                if isinstance(log, ParquetInput):
                    raise InputError(f"{label} is Parquet; give it a name that ends in .parquet.")
                log.label = label
                yield from read(number, log)


@contextmanager
def _local_file(label: str, path: str, content: Any) -> Iterator[Path]:
    """The file itself, or a copy of its content; errors name it by its label."""
    with tempfile.TemporaryDirectory(prefix="segue-") as folder:
        file = Path(plain_path(path))
        if content is not None:
            file = Path(folder) / file.name
            file.write_bytes(content)
        try:
            yield file
        except InputError as error:
            either = "|".join(map(re.escape, (label, str(file))))  # a label may hold the path, or the path a label
            raise InputError(re.sub(either, lambda _: label, str(error))) from error
