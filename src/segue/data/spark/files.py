"""Paths, folders and patterns → the files that Spark reads, and which of them have the same columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow.parquet as pq

from segue.data.spark.executor import plain_path
from segue.errors import InputError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

SCHEMAS_AT_A_TIME = 16  # footers of Parquet files that Spark reads in parallel
PARQUET = (".parquet", ".parq")


@dataclass(frozen=True, slots=True)
class SparkFile:
    """A file of the log: its name in messages and its paths in Spark."""

    label: str
    path: str
    url: str
    """The same path as Spark names it for Parquet, with escapes such as %20."""
    size: int


def spark_path(name: str) -> str:
    """A path as Spark takes it; the characters of an existing path are not a pattern.

    Spark removes `..` from the text of a path, which after a symbolic link names another folder.
    """
    path = Path(name)
    if not path.exists():
        return name
    return quoted(f"file:{path.resolve() if '..' in path.parts else path.absolute()}")


def quoted(path: str) -> str:
    """A path with its pattern characters escaped."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


def list_files(spark: SparkSession, paths: Mapping[str, str]) -> dict[str, list[SparkFile]]:
    """The files under each name, in the given order; those of a folder by path. paths: names → `spark_path`."""
    from pyspark.errors import AnalysisException

    try:
        below = spark.read.format("binaryFile").option("recursiveFileLookup", value=True).load([*paths.values()])
        sizes = below.select("path", "length").collect()
        urls_by_name = {name: spark.read.format("binaryFile").load(path).inputFiles() for name, path in paths.items()}
    except AnalysisException as error:
        first_line = str(error).split("\n")[0]
        raise InputError(
            f"Spark finds no file, folder or table of the name {' or '.join(paths)} ({first_line}); check the name."
        ) from error
    present = {plain_path(path): (path, size) for path, size in sizes}
    ignored = set(present)
    files: dict[str, list[SparkFile]] = {name: [] for name in urls_by_name}
    for name, urls in urls_by_name.items():
        for url in urls:
            label = plain_path(unquote(url))
            ignored.discard(label)
            path, size = present[label]
            if Path(name).exists():
                label = str(Path(name)) + label.removeprefix(re.sub(r"\\(.)", r"\1", plain_path(paths[name])))
            files[name].append(SparkFile(label, path, url, size))
        files[name].sort(key=lambda file: file.path.encode())
        if not urls:  # Spark ignores some files without an error
            raise InputError(
                f"Spark finds no file of a log in {name}; it ignores names that begin with _ or a dot, so rename "
                "such a file, and leave out an empty folder."
            )
    if ignored:
        raise InputError(
            f"{min(ignored)} is in a folder inside the given one and would not be read; give every folder that holds "
            "files of the log."
        )
    return files


def rows_by_schema(spark: SparkSession, path: str, files: list[SparkFile]) -> Iterator[tuple[SparkFile, DataFrame]]:
    """For each set of files with the same columns, its first file and the rows of all. Spark itself would use one
    file's columns for all."""
    from pyspark.sql import functions as F

    with ThreadPoolExecutor(SCHEMAS_AT_A_TIME) as pool:
        schemas = list(pool.map(partial(_schema, spark), files))
    groups: dict[str, tuple[StructType, list[SparkFile]]] = {}
    for file, schema in zip(files, schemas, strict=True):
        groups.setdefault(schema.json(), (schema, []))[1].append(file)
    for schema, group in groups.values():
        # Read by the given name, so that folders such as `day=1` are a column too.
        rows = spark.read.schema(schema).parquet(path)
        if len(group) < len(files):
            plain = F.regexp_replace(F.col("_metadata.file_path"), "^file:/*", "/")
            rows = rows.where(plain.isin([plain_path(file.url) for file in group]))
        yield group[0], rows


def _schema(spark: SparkSession, file: SparkFile) -> StructType:
    from pyspark.errors import AnalysisException

    try:
        return spark.read.parquet(quoted(file.path)).schema
    except AnalysisException as error:
        if "TIMESTAMP(NANOS" not in str(error):
            raise
        columns, path = "a column", Path(plain_path(file.path))
        if path.exists():  # Spark does not name the columns
            leaves = list(pq.read_metadata(path).schema)
            named = [repr(leaf.path) for leaf in leaves if "nanoseconds" in str(leaf.logical_type)]
            columns = f"the column {', '.join(named)}"
        raise InputError(
            f"{file.label}: {columns} holds times in nanoseconds, which Spark does not read; write them in "
            "microseconds, or leave --engine spark out."
        ) from error
