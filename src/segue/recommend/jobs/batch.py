"""A file of users → a folder of Parquet files with recommendations for each, from the histories in a data folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import msgspec
import numpy as np
import polars as pl

from segue import folders
from segue.data.dataset import Data
from segue.data.timestamps import iso_text
from segue.errors import FolderError, InputError
from segue.recommend.answer import Ranking
from segue.recommend.history import Entry
from segue.recommend.jobs.runner import Arrays, JobContext, JobRunner, LocalRunner
from segue.recommend.jobs.users_file import UserRows, read_users
from segue.recommend.recommender import Recommender
from segue.recommend.rules import Filters, Rules, read_rules

PART_ROWS = 1_000_000  # of one Parquet file, about


class BatchReport(msgspec.Struct, frozen=True):
    """The counts of a batch job."""

    users: int
    """Rows of the users file."""
    unknown_users: int
    """Rows whose user is not in the data; they are answered by popularity."""
    fallback: int
    """All rows answered by popularity: the user is unknown, or has no known item before the time of the row."""
    rows: int
    files: int


def recommend_users(
    recommender: Recommender,
    data: Data,
    users: Path | str,
    out: Path | str,
    *,
    k: int = 10,
    progress: Callable[[int], None] | None = None,
    runner: JobRunner | None = None,
    **filters: Unpack[Filters],
) -> BatchReport:
    """Write recommendations for every row of a users file; `out` becomes a Parquet data set, complete or not at all.

    A row has a user and optionally a time: then only events before it are used. Columns written: user, time (if rows
    have one), rank (1 is the best), item, title, score, fallback.

    k, filters: as for `Recommender.recommend`.
    progress: called with the number of rows done.
    runner: computes the recommendations, with the same run and data; None is this process.
    """
    rules = read_rules(recommender.known, k=k, **filters)
    data.verify()  # everything is read anyway
    runner = LocalRunner(recommender, data) if runner is None else runner
    rows, unknown, fallback = 0, 0, 0
    with folders.complete_folder(Path(out)) as staging:
        writer = _Parts(staging)
        chunks = (
            (rows, {"users": rows.numbers} | ({} if rows.times is None else {"before": rows.times}))
            for rows in read_users(Path(users), data)
        )
        with closing(runner.map(partial(rank_users, rules=rules), chunks)) as results:
            for chunk, result in results:
                writer.add(_table(recommender, chunk, Ranking(**result)))
                fallback += int(result["fallback"].sum())
                unknown += int((chunk.numbers < 0).sum())
                rows += len(chunk.numbers)
                if progress is not None:
                    progress(rows)
        if writer.waiting or not writer.files:  # a data set without any row still has its columns
            writer.write()
    return BatchReport(users=rows, unknown_users=unknown, fallback=fallback, rows=writer.rows, files=writer.files)


def rank_users(context: JobContext, chunk: Arrays, *, rules: Rules) -> Arrays:
    """The ranking of a chunk's users [n], field by field."""
    rankings = [
        context.recommender.rank(histories, [rules] * len(rows))
        for rows, histories in context.histories(context.data.sequences, chunk["users"], chunk.get("before"))
    ]
    return {name: np.concatenate([getattr(one, name) for one in rankings]) for name in ("items", "scores", "fallback")}


def user_history(data: Data, user: str) -> list[Entry]:
    """All events of one user, oldest first, as `recommend` takes them."""
    number = data.users.number(user)
    if number is None:
        raise InputError(f"The user {user!r} is not among the {len(data.users)} users of {data.folder}.")
    sequences = data.sequences
    rows = range(int(sequences.offsets[number]), int(sequences.offsets[number + 1]))
    numbers = np.asarray(sequences.items[rows.start : rows.stop])
    if numbers.min() < 1 or numbers.max() > len(data.vocabulary):
        raise FolderError(f"{data.folder / 'items.npy'} is damaged; make the folder again with `segue prepare`.")
    ids = data.vocabulary.ids(numbers)
    return [
        Entry(
            item=item,
            time=iso_text(int(sequences.times[row])) if data.manifest["has_time"] else None,
            kind=None if sequences.kinds is None else data.kinds[sequences.kinds[row]] or None,
            value=None if sequences.values is None or np.isnan(sequences.values[row]) else float(sequences.values[row]),
        )
        for item, row in zip(ids, rows, strict=True)
    ]


def _table(recommender: Recommender, users: UserRows, ranking: Ranking) -> pl.DataFrame:
    row, column = np.nonzero(ranking.items)
    numbers = ranking.items[row, column]
    columns: dict[str, Any] = {"user": users.ids.gather(row)}
    if users.times is not None:
        columns["time"] = pl.Series(users.times[row], dtype=pl.Int64).cast(pl.Datetime("us", "UTC"))
    return pl.DataFrame(
        columns
        | {
            "rank": pl.Series(column + 1, dtype=pl.Int32),
            "item": pl.Series(recommender.vocabulary.ids(numbers), dtype=pl.String),
            "title": pl.Series(recommender.vocabulary.titles(numbers), dtype=pl.String),
            "score": pl.Series(ranking.scores[row, column], dtype=pl.Float32),
            "fallback": pl.Series(
                ["popularity" if fallback else None for fallback in ranking.fallback[row]], dtype=pl.String
            ),
        }
    )


class _Parts:
    """Writes rows to files of about `PART_ROWS` rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = self.files = self.waiting = 0
        self._tables: list[pl.DataFrame] = []

    def add(self, table: pl.DataFrame) -> None:
        self._tables.append(table)
        self.waiting += table.height
        if self.waiting >= PART_ROWS:
            self.write()

    def write(self) -> None:
        """Write the rows that wait."""
        pl.concat(self._tables).write_parquet(self.folder / f"part-{self.files:05}.parquet")
        self.rows += self.waiting
        self.files += 1
        self._tables, self.waiting = [], 0
