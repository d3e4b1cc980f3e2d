"""Files, folders or a table that Spark sees → judged rows, read and judged on the executors.

The reader of the Spark engine. Spark hands over the work, and each executor does with its share what the local engine
does with all: the same parsers, the same rules, over Arrow tables.

What is divided: Parquet and tables are, as Spark divides them. A text file (CSV, TSV, JSON lines, packed or not) is
one executor's from beginning to end, because a quoted field may hold the end of a line, so that no place inside
is surely the beginning of a row; many files are read side by side. Text on a file system that every executor mounts
(`file:`) is read from there; from any other place (`s3a://`, `hdfs://`) Spark brings it as a whole, which ends at 2 GB
a file. A folder stands for the files in it; its own folders have to be given too, unless they are named as a column's
values are (`day=1`). Rows are numbered as the local engine does, within their file; tables and DataFrames have neither
files nor numbers of rows.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from segue.data.read.arrow import TableInput, is_table
from segue.data.read.blocks import ROW, Block, LogInput
from segue.data.read.columns import Columns
from segue.data.read.gather import stored_values
from segue.data.read.log import LogBlock, open_file, read_blocks
from segue.data.read.times import TimeRule, votes
from segue.data.rules.judge import judge
from segue.data.settings import Role
from segue.errors import InputError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

SAMPLE_ROWS = 200
SCHEMAS_AT_A_TIME = 16  # footers of Parquet files read by Spark side by side
PARQUET = (".parquet", ".parq")

# A judged row: where it stands; its columns, `value` by the bits of its float32; and, of a bad one, the reason, the
# texts of its columns or that of the whole row.
JUDGED = pa.schema(
    {
        "file": pa.int32(),
        ROW: pa.int64(),
        "part": pa.int32(),
        "user": pa.string(),
        "item": pa.string(),
        "time": pa.int64(),
        "place": pa.int64(),
        "kind": pa.string(),
        "value": pa.int32(),
        "reason": pa.string(),
        "told": pa.list_(pa.string()),
        "text": pa.string(),
    }
)
_JUDGED = (
    "file int, row long, part int, user string, item string, time long, place long, kind string, value int, "
    "reason string, told array<string>, text string"
)

_Look = Callable[[int | None, LogInput], Iterator[pa.RecordBatch]]
Inputs = Callable[[pa.RecordBatch, _Look], Iterator[pa.RecordBatch]]
"""What Spark hands to an executor → what a look at each of its files makes of them.

A look is given a file's number, and the file (or rows of one) as the local engine's input.
"""


@dataclass(frozen=True, slots=True)
class SparkFile:
    """A file of the log, as messages name it and as Spark does."""

    label: str
    path: str
    url: str
    """The same path as Spark says it of Parquet, with signs such as %20."""
    size: int


@dataclass(frozen=True, slots=True)
class _Part:
    """Some of the log, all read in one way."""

    frame: Callable[[Columns, list[Role]], DataFrame]
    """What Spark hands to the executors, for these columns."""
    inputs: Callable[[Columns, list[Role]], Inputs]


@dataclass(frozen=True, slots=True)
class SparkSource:
    """A log that Spark sees, opened: its inputs know their columns, but their rows are read elsewhere."""

    inputs: list[LogInput]
    files: list[SparkFile]
    """Empty: a table, whose rows have no order."""
    parts: list[_Part]

    def votes(self, columns: Columns) -> dict[str, int]:
        """How many times of the whole column look like each form."""
        counted = self._mapped(columns, ["time"], _votes, "name string, count long")
        table = counted.groupBy("name").sum("count").toArrow()
        return dict(zip(*(column.to_pylist() for column in table.columns), strict=True))

    def judged(self, columns: Columns, rule: TimeRule | None) -> DataFrame:
        """Every row as `JUDGED` says."""
        roles = list(columns.names)
        return self._mapped(columns, roles, partial(_judged, roles=roles, rule=rule), _JUDGED)

    def _mapped(self, columns: Columns, roles: list[Role], work: _Work, schema: str) -> DataFrame:
        columns = replace(columns, names={role: columns.names[role] for role in roles})
        frames = [
            part.frame(columns, roles).mapInArrow(
                partial(_worked, inputs=part.inputs(columns, roles), columns=columns, roles=roles, work=work), schema
            )
            for part in self.parts
        ]
        return reduce(lambda one, other: one.unionAll(other), frames)


_Work = Callable[[int | None, LogBlock], Iterator[pa.RecordBatch]]


def open_source(spark: SparkSession, source: Any, *, named: set[str]) -> SparkSource:
    """A path, several paths, the name of a table or a Spark DataFrame. named: columns that the user named."""
    if type(source).__module__.startswith("pyspark.sql"):
        return _table(source, "the table")
    if is_table(source):
        raise InputError(
            "The Spark engine takes files, folders, the name of a table or a Spark DataFrame, and not a table in "
            "memory; leave --engine spark out for it."
        )
    given = [source] if isinstance(source, str | Path) else list(source)
    names = [str(name) for name in given]
    if len(names) == 1 and _is_table_name(spark, names[0]):
        return _table(spark.table(names[0]), names[0])
    return _opened_files(spark, names, named)


def _is_table_name(spark: SparkSession, name: str) -> bool:
    from pyspark.errors import PySparkException

    if "/" in name or Path(name).exists():
        return False
    try:
        return bool(spark.catalog.tableExists(name))
    except PySparkException:  # no name that a table could have
        return False


def _table(frame: DataFrame, label: str) -> SparkSource:
    read = _Part(
        frame=lambda columns, roles: frame.select(*_chosen(columns, roles)),
        inputs=lambda columns, roles: _Rows(label, _names(columns, roles), None),
    )
    return SparkSource([TableInput(frame.limit(SAMPLE_ROWS).toArrow(), label=label)], [], [read])


def _names(columns: Columns, roles: list[Role]) -> list[str]:
    return [columns.names[role] for role in roles]


def _chosen(columns: Columns, roles: list[Role]) -> list[Any]:
    from pyspark.sql import functions as F

    quoted = {role: columns.names[role].replace("`", "``") for role in roles}
    return [F.col(f"`{name}`").alias(role) for role, name in quoted.items()]


# Files


def _opened_files(spark: SparkSession, names: list[str], named: set[str]) -> SparkSource:
    asked = {name: _asked(name) for name in names}
    listed = _listed(spark, asked)
    files = [file for found in listed.values() for file in found]
    numbers = {_plain(file.path): (number, file.label) for number, file in enumerate(files)}
    if len(asked) < len(names) or len(numbers) < len(files):
        raise InputError("A file of the log is given twice, or is in a folder that is given too; give each once.")
    parquet = [name for name, found in listed.items() if _is_parquet(name, found)]
    texts = [file for name, found in listed.items() if name not in parquet for file in found]
    parts: list[_Part] = []
    inputs: list[tuple[int, LogInput]] = []
    for name in parquet:
        for first, rows in _by_schema(spark, asked[name], listed[name]):
            parts.append(_parquet(rows, numbers))
            number, label = numbers[_plain(first.path)]
            inputs.append((number, TableInput(rows.limit(SAMPLE_ROWS).toArrow(), label=label)))
    if texts:
        local = all(file.path.startswith("file:") for file in files)
        parts.append(_text(spark, [_quoted(file.path) for file in texts], numbers, named, local=local))
        inputs += [(told.number, told) for told in _surveyed(parts[-1])]
    inputs.sort(key=lambda each: each[0])
    return SparkSource([log for _, log in inputs], files, parts)


def _is_parquet(name: str, files: list[SparkFile]) -> bool:
    kinds = {file.path.endswith(PARQUET) for file in files}
    if len(kinds) > 1:
        raise InputError(f"{name} holds Parquet and other files; give them apart, such as {name}/*.parquet.")
    return kinds == {True}


def _asked(name: str) -> str:
    """A path as Spark takes it: what is there is not a pattern.

    Spark takes `..` away by the letters; after a link, that is another place.
    """
    path = Path(name)
    if not path.exists():
        return name
    return _quoted(f"file:{path.resolve() if '..' in path.parts else path.absolute()}")


def _quoted(path: str) -> str:
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


def _listed(spark: SparkSession, asked: Mapping[str, str]) -> dict[str, list[SparkFile]]:
    """The files under each name, in the order in which they were given; those of a folder by path."""
    from pyspark.errors import AnalysisException

    try:
        below = spark.read.format("binaryFile").option("recursiveFileLookup", value=True).load([*asked.values()])
        there = below.select("path", "length").collect()
        read = {name: spark.read.format("binaryFile").load(path).inputFiles() for name, path in asked.items()}
    except AnalysisException as error:
        said = str(error).split("\n")[0]
        raise InputError(
            f"Spark finds no file, folder or table of the name {' or '.join(asked)} ({said}); check the name."
        ) from error
    found = {_plain(path): (path, size) for path, size in there}
    _refuse_left_out(found, read)
    return {
        name: sorted((_spark_file(name, asked[name], url, *found[_plain(unquote(url))]) for url in urls), key=_order)
        for name, urls in read.items()
    }


def _refuse_left_out(found: Collection[str], read: Mapping[str, list[str]]) -> None:
    """Stop where Spark would pass over files without a word."""
    for name, urls in read.items():
        if not urls:
            raise InputError(
                f"Spark finds no file of a log in {name}; it passes over names that begin with _ or a dot, so rename "
                "such a file, and leave out a folder that holds nothing."
            )
    if left := sorted(set(found) - {_plain(unquote(url)) for urls in read.values() for url in urls}):
        raise InputError(
            f"{left[0]} is in a folder inside of one that was given, and would not be read; give every folder that "
            "holds files of the log by itself."
        )


def _spark_file(name: str, asked: str, url: str, path: str, size: int) -> SparkFile:
    label = _plain(path)
    if Path(name).exists():
        label = str(Path(name)) + label.removeprefix(re.sub(r"\\(.)", r"\1", _plain(asked)))
    return SparkFile(label, path, url, size)


def _order(file: SparkFile) -> bytes:
    return file.path.encode()


def _plain(path: str) -> str:
    """A path by which files are told apart: Spark writes those of its own machine in several ways."""
    return re.sub("^file:/*", "/", path)


# Parquet


def _by_schema(spark: SparkSession, path: str, files: list[SparkFile]) -> Iterator[tuple[SparkFile, DataFrame]]:
    """The rows of all files that have the same columns, with the first of them: Spark would take one's for all."""
    from pyspark.sql import functions as F

    with ThreadPoolExecutor(SCHEMAS_AT_A_TIME) as pool:
        schemas = list(pool.map(partial(_schema, spark), files))
    groups: dict[str, tuple[StructType, list[SparkFile]]] = {}
    for file, schema in zip(files, schemas, strict=True):
        groups.setdefault(schema.json(), (schema, []))[1].append(file)
    for schema, group in groups.values():
        # Found by the name that was given, so that folders such as `day=1` are a column too.
        rows = spark.read.schema(schema).parquet(path)
        if len(group) < len(files):
            plain = F.regexp_replace(F.col("_metadata.file_path"), "^file:/*", "/")
            rows = rows.where(plain.isin([_plain(file.url) for file in group]))
        yield group[0], rows


def _schema(spark: SparkSession, file: SparkFile) -> StructType:
    from pyspark.errors import AnalysisException

    try:
        return spark.read.parquet(_quoted(file.path)).schema
    except AnalysisException as error:
        if "TIMESTAMP(NANOS" not in str(error):
            raise
        raise InputError(
            f"{file.label}: {_nanoseconds(Path(_plain(file.path)))} holds times in nanoseconds, which Spark does not "
            "read; write them in microseconds, or leave --engine spark out."
        ) from error


def _nanoseconds(path: Path) -> str:
    """The column of such times, where the file is seen from here; Spark does not say."""
    if not path.exists():
        return "a column"
    schema = pq.read_metadata(path).schema
    leaves = [schema.column(place) for place in range(len(schema))]
    return f"the column {', '.join(repr(leaf.path) for leaf in leaves if 'nanoseconds' in str(leaf.logical_type))}"


def _parquet(rows: DataFrame, numbers: dict[str, tuple[int, str]]) -> _Part:
    from pyspark.sql import functions as F

    def frame(columns: Columns, roles: list[Role]) -> DataFrame:
        where = [F.expr("_metadata.file_path AS file"), F.expr("_metadata.row_index + 1 AS row")]
        return rows.select(*where, *_chosen(columns, roles))

    return _Part(frame=frame, inputs=lambda columns, roles: _Rows("", _names(columns, roles), numbers))


# Text


def _text(
    spark: SparkSession, paths: list[str], numbers: dict[str, tuple[int, str]], named: set[str], *, local: bool
) -> _Part:
    wanted = ["path"] if local else ["path", "content"]
    return _Part(
        frame=lambda _columns, _roles: spark.read.format("binaryFile").load(paths).select(*wanted),
        inputs=lambda _columns, _roles: _TextFiles(numbers, named),
    )


@dataclass(slots=True)
class SurveyedFile:
    """What the driver knows of a text file."""

    number: int
    label: str
    names: list[str]
    size: int
    note: str
    samples: list[list[str]] = field(default_factory=list)
    lists: list[bool] = field(default_factory=list)
    typed: bool = False

    def sample(self, position: int) -> list[str]:
        return self.samples[position]

    def holds_lists(self, position: int) -> bool:
        return self.lists[position]

    def blocks(self, positions: Mapping[str, int]) -> Iterator[Block]:  # noqa: ARG002
        raise AssertionError("a text file's rows are read on the executors")


def _surveyed(part: _Part) -> list[SurveyedFile]:
    nothing = Columns({}, ())
    frame = part.frame(nothing, []).mapInArrow(partial(_survey, inputs=part.inputs(nothing, [])), "told binary")
    told = [msgspec.json.decode(line, type=SurveyedFile) for line in frame.toArrow().column(0).to_pylist()]
    return sorted(told, key=lambda file: file.number)


# On the executors


def _survey(batches: Iterator[pa.RecordBatch], *, inputs: Inputs) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield from inputs(batch, _told)


def _told(number: int | None, log: LogInput) -> Iterator[pa.RecordBatch]:
    places = range(len(log.names))
    first = number == 0  # its values help to find the columns; of the others only the names matter
    found = SurveyedFile(
        number=number or 0,
        label=log.label,
        names=log.names,
        size=log.size,
        note=log.note,
        samples=[log.sample(place) for place in places] if first else [[] for _ in places],
        lists=[log.holds_lists(place) for place in places],
    )
    yield pa.RecordBatch.from_pydict({"told": pa.array([msgspec.json.encode(found)], pa.binary())})


def _worked(
    batches: Iterator[pa.RecordBatch], *, inputs: Inputs, columns: Columns, roles: list[Role], work: _Work
) -> Iterator[pa.RecordBatch]:
    def read(number: int | None, log: LogInput) -> Iterator[pa.RecordBatch]:
        for block in read_blocks([log], columns, roles=roles):
            yield from work(number, block)

    for batch in batches:
        yield from inputs(batch, read)


def _votes(_number: int | None, block: LogBlock) -> Iterator[pa.RecordBatch]:
    counts = votes(block.frame["time"])
    yield pa.RecordBatch.from_pydict({"name": list(counts), "count": pa.array(counts.values(), pa.int64())})


def _judged(
    number: int | None, block: LogBlock, *, roles: list[Role], rule: TimeRule | None
) -> Iterator[pa.RecordBatch]:
    judged = judge(block.frame, roles, rule)
    bad = pl.col("reason").is_not_null()
    told = pl.concat_list([pl.col(role).cast(pl.String) for role in roles])
    columns: dict[str, Any] = {
        ROW: judged[ROW],
        "user": judged["user"],
        "item": judged["item"],
        "reason": judged["reason"],
        "told": judged.select(pl.when(bad).then(told)).to_series(),
    }
    if number is not None:
        columns["part"] = np.arange(judged.height)
    if rule is not None:
        columns["time"] = judged["microseconds"]
    if "place" in judged.columns:
        columns["place"] = judged["place"]
    if "kind" in judged.columns:
        columns["kind"] = judged["kind"].fill_null("")
    if "amount" in judged.columns:
        columns["value"] = stored_values(judged["amount"]).view(np.int32)
    yield from _batches(number, columns, judged.height)
    if block.malformed:
        broken = {name: [getattr(row, name) for row in block.malformed] for name in (ROW, "reason", "text")}
        yield from _batches(number, broken, len(block.malformed))


def _batches(number: int | None, columns: dict[str, Any], height: int) -> list[pa.RecordBatch]:
    """Arrow batches of the schema JUDGED; columns that are not given are empty."""
    columns = columns | {"file": [number] * height}
    arrays = []
    for wanted in JUDGED:
        found = columns.get(wanted.name)
        if isinstance(found, pl.Series):
            found = found.to_arrow(compat_level=pl.CompatLevel.oldest())
        arrays.append(pa.nulls(height, wanted.type) if found is None else pa.array(found).cast(wanted.type))
    return pa.Table.from_arrays(arrays, schema=JUDGED).to_batches() if height else []


@dataclass(frozen=True, slots=True)
class _TextFiles:
    """Paths, with what stands there where the executor cannot open them → a look at each file, opened."""

    numbers: dict[str, tuple[int, str]]
    named: set[str]

    def __call__(self, batch: pa.RecordBatch, look: _Look) -> Iterator[pa.RecordBatch]:
        contents = batch.column("content") if "content" in batch.schema.names else None
        for place, path in enumerate(batch.column("path").to_pylist()):
            number, label = self.numbers[_plain(path)]
            with _named_after(label, path, None if contents is None else contents[place].as_buffer()) as opened:
                log = open_file(opened, named=self.named)
                if log.typed:
                    raise InputError(f"{label} is Parquet; give it a name that ends in .parquet.")
                log.label = label
                yield from look(number, log)


@contextmanager
def _named_after(label: str, path: str, content: Any) -> Iterator[Path]:
    """The file itself, or a copy of what Spark brought; messages name neither, but the file as the user did."""
    with tempfile.TemporaryDirectory(prefix="segue-") as place:
        opened = Path(_plain(path))
        if content is not None:
            opened = Path(place) / opened.name
            opened.write_bytes(content)
        try:
            yield opened
        except InputError as error:
            either = "|".join(map(re.escape, (label, str(opened))))  # a label may hold the path, or the path a label
            raise InputError(re.sub(either, lambda _: label, str(error))) from error


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of Parquet files or of a table, each column under its role → a look at those of each file met."""

    label: str
    names: list[str]
    numbers: dict[str, tuple[int, str]] | None

    def __call__(self, batch: pa.RecordBatch, look: _Look) -> Iterator[pa.RecordBatch]:
        frame = pl.DataFrame(pl.from_arrow(batch))
        if self.numbers is None:
            rows = pl.lit(None, dtype=pl.Int64).alias(ROW)
            yield from look(None, _RowsOfFile(self.label, self.names, frame.select(rows, *frame.columns), frame.height))
            return
        for (path,), rows_of_file in frame.group_by("file", maintain_order=True):
            number, label = self.numbers[_plain(unquote(str(path)))]
            yield from look(number, _RowsOfFile(label, self.names, rows_of_file.drop("file"), rows_of_file.height))


@dataclass(slots=True)
class _RowsOfFile:
    """Rows that Spark has read, as an input of one block."""

    label: str
    names: list[str]
    frame: pl.DataFrame  # the row's number, then the columns
    size: int
    typed: bool = True
    note: str = ""

    def sample(self, position: int) -> list[str]:  # noqa: ARG002
        raise AssertionError("the columns are known before rows are read")

    def holds_lists(self, position: int) -> bool:  # noqa: ARG002
        raise AssertionError("the columns are known before rows are read")

    def blocks(self, positions: Mapping[str, int]) -> Iterator[Block]:
        columns = {name: self.frame.to_series(position + 1) for name, position in positions.items()}
        yield Block(frame=pl.DataFrame({ROW: self.frame[ROW], **columns}), done=self.frame.height)
