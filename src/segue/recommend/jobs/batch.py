"""A file of users → a folder of Parquet files with an answer for each, from the histories in a data folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

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
from segue.recommend.jobs.users_file import Asked, read_users
from segue.recommend.recommender import Recommender
from segue.recommend.rules import Rules

PART_ROWS = 1_000_000  # a file's rows


class BatchReport(msgspec.Struct, frozen=True):
    """What was written."""

    users: int
    """Rows of the users file."""
    unknown_users: int
    """Those whose user the data does not have; they were answered by popularity."""
    fallback: int
    """All that were answered by popularity: unknown, or without a known item before the moment asked about."""
    rows: int
    files: int


def recommend_users(
    recommender: Recommender,
    data: Data,
    users: Path | str,
    out: Path | str,
    *,
    k: int = 10,
    exclude: Iterable[Any] | None = None,
    only: Iterable[Any] | None = None,
    keep_seen: bool | None = None,
    progress: Callable[[int], None] | None = None,
    runner: JobRunner | None = None,
) -> BatchReport:
    """Answer every row of a users file; `out` becomes a Parquet data set, complete or not at all.

    A row has a user and perhaps a time: only events before it are used then, else all of them. Columns written:
    user, time (where asked), rank (1 is the best), item, title, score, fallback. `progress` is told the rows done.
    `runner`: who answers, with the same run and data; without them, this process.
    """
    rules = recommender.rules(k=k, exclude=exclude, only=only, keep_seen=keep_seen)
    data.verify()  # everything is read anyway
    runner = LocalRunner(recommender, data) if runner is None else runner
    asked, unknown, fallback = 0, 0, 0
    with folders.complete_folder(Path(out)) as staging:
        writer = _Parts(staging)
        questions = ((chunk, _question(chunk)) for chunk in read_users(Path(users), data))
        with closing(runner.answers(partial(rank_users, rules=rules), questions)) as answers:
            for chunk, answer in answers:
                writer.add(_answers(recommender, chunk, Ranking(**answer)))
                fallback += int(answer["fallback"].sum())
                unknown += int((chunk.numbers < 0).sum())
                asked += len(chunk.numbers)
                if progress is not None:
                    progress(asked)
        writer.finish()
    return BatchReport(users=asked, unknown_users=unknown, fallback=fallback, rows=writer.rows, files=writer.files)


def _question(asked: Asked) -> Arrays:
    """What of some rows of a users file decides their answers."""
    return {"users": asked.numbers} | ({} if asked.moments is None else {"moments": asked.moments})


def rank_users(worker: JobContext, asked: Arrays, *, rules: Rules) -> Arrays:
    """A question → the ranking of its users [n], field by field."""
    rankings = [
        worker.recommender.rank(histories, [rules] * len(rows))
        for rows, histories in worker.histories.of(asked["users"], asked.get("moments"))
    ]
    return {
        "items": np.concatenate([ranking.items for ranking in rankings]),
        "scores": np.concatenate([ranking.scores for ranking in rankings]),
        "fallback": np.concatenate([ranking.fallback for ranking in rankings]),
    }


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


def _answers(recommender: Recommender, asked: Asked, ranking: Ranking) -> pl.DataFrame:
    """A ranking as rows of the data set."""
    row, place = np.nonzero(ranking.items)
    numbers = ranking.items[row, place]
    columns: dict[str, Any] = {"user": asked.users.gather(row)}
    if asked.moments is not None:
        columns["time"] = pl.Series(asked.moments[row], dtype=pl.Int64).cast(pl.Datetime("us", "UTC"))
    return pl.DataFrame(
        columns
        | {
            "rank": pl.Series(place + 1, dtype=pl.Int32),
            "item": pl.Series(recommender.vocabulary.ids(numbers), dtype=pl.String),
            "title": pl.Series(recommender.vocabulary.titles(numbers), dtype=pl.String),
            "score": pl.Series(ranking.scores[row, place], dtype=pl.Float32),
            "fallback": pl.Series(
                ["popularity" if popular else None for popular in ranking.fallback[row]], dtype=pl.String
            ),
        }
    )


class _Parts:
    """Collects rows and writes them to files of about `PART_ROWS` rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = 0
        self.files = 0
        self._waiting: list[pl.DataFrame] = []
        self._waiting_rows = 0

    def add(self, rows: pl.DataFrame) -> None:
        self._waiting.append(rows)
        self._waiting_rows += rows.height
        if self._waiting_rows >= PART_ROWS:
            self._write()

    def finish(self) -> None:
        """Write what waits; a data set without any row still has its columns."""
        if self._waiting_rows or not self.files:
            self._write()

    def _write(self) -> None:
        table = pl.concat(self._waiting)
        table.write_parquet(self.folder / f"part-{self.files:05}.parquet")
        self.rows += table.height
        self.files += 1
        self._waiting, self._waiting_rows = [], 0
