"""A file of users → a folder of Parquet files with an answer for each, from the histories in a data folder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from segue import folders
from segue.data.batch import MICROSECONDS, Batch, cut_by_budget, ragged_rows
from segue.data.dataset import Data
from segue.data.sequences import Sequences
from segue.errors import FolderError, InputError
from segue.recommend.answers import Ranking
from segue.recommend.history import Entry
from segue.recommend.recommender import Recommender
from segue.recommend.users_file import Asked, read_users

MOST_EVENTS = 2_000_000  # of histories in memory at a time
PART_ROWS = 1_000_000  # a file's rows
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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
) -> BatchReport:
    """Answer every row of a users file; `out` becomes a Parquet data set, complete or not at all.

    A row has a user and perhaps a time: only events before it are used then, else all of them. Columns written:
    user, time (where asked), rank (1 is the best), item, title, score, fallback. `progress` is told the rows done.
    """
    rules = recommender.rules(k=k, exclude=exclude, only=only, keep_seen=keep_seen)
    data.verify()  # everything is read anyway
    source = LogHistories(data, recommender)
    asked, unknown, fallback = 0, 0, 0
    with folders.complete_folder(Path(out)) as staging:
        writer = _Parts(staging)
        for chunk in read_users(Path(users), data):
            for rows, histories in source.of(chunk):
                ranking = recommender.rank(histories, [rules] * len(rows))
                writer.add(_answers(recommender, chunk, rows, ranking))
                fallback += int(ranking.fallback.sum())
                asked += len(rows)
                if progress is not None:
                    progress(asked)
            unknown += int((chunk.numbers < 0).sum())
        writer.finish()
    return BatchReport(users=asked, unknown_users=unknown, fallback=fallback, rows=writer.rows, files=writer.files)


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
            time=EPOCH + timedelta(microseconds=int(sequences.times[row])) if data.manifest["has_time"] else None,
            kind=None if sequences.kinds is None else data.kinds[sequences.kinds[row]] or None,
            value=None if sequences.values is None or np.isnan(sequences.values[row]) else float(sequences.values[row]),
        )
        for item, row in zip(ids, rows, strict=True)
    ]


class LogHistories:
    """Users' events in a data folder, in the numbers of a run, which may have been trained on other data."""

    def __init__(self, data: Data, recommender: Recommender) -> None:
        self.sequences = data.sequences
        numbers = recommender.vocabulary.numbers(data.vocabulary.table["id"].to_list(), unknown="zero")
        known = np.where(recommender.answerable[numbers], numbers, 0)
        self.translated = np.concatenate(([0], known))  # [data's items + 1]; 0 is unknown to the run
        self.kinds = recommender.known.kinds.numbers(data.kinds) if recommender.known.kinds else None  # [data's kinds]
        self.has_times = data.manifest["has_time"]

    def within(self, sequences: Sequences) -> LogHistories:
        """The same over some of the users, numbered as they are there."""
        some = copy.copy(self)
        some.sequences = sequences
        return some

    def of(self, asked: Asked) -> Iterator[tuple[np.ndarray, Batch]]:
        """(rows of the chunk, their histories of known items), a bounded number of events at a time."""
        offsets = self.sequences.offsets
        known = asked.numbers >= 0
        starts, lengths = np.zeros((2, len(known)), dtype=np.int64)
        starts[known] = offsets[asked.numbers[known]]
        lengths[known] = offsets[asked.numbers[known] + 1] - starts[known]
        for rows in cut_by_budget(lengths, MOST_EVENTS):
            moments = None if asked.moments is None else asked.moments[rows]
            yield rows, self._gathered(starts[rows], lengths[rows], moments)

    def _gathered(self, starts: np.ndarray, lengths: np.ndarray, moments: np.ndarray | None) -> Batch:
        rows = ragged_rows(starts, lengths)
        owners = np.repeat(np.arange(len(starts)), lengths)
        items = self.translated[self.sequences.items[rows]]
        kept = items > 0
        if moments is not None:
            kept &= self.sequences.times[rows] < moments[owners]
        rows, values = rows[kept], self.sequences.values
        times = self.sequences.times[rows] // MICROSECONDS
        return Batch(
            items=items[kept],
            times=times if self.has_times else np.zeros_like(times),  # an order is no time
            lengths=np.bincount(owners[kept], minlength=len(starts)),
            asked=None if moments is None else moments // MICROSECONDS,
            kinds=self._kinds(rows),
            values=None if values is None else values[rows],
        )

    def _kinds(self, rows: np.ndarray) -> np.ndarray | None:
        """In the numbers of the run; None where it, or the log, tells none apart."""
        if self.kinds is None or self.sequences.kinds is None:
            return None
        kinds: np.ndarray = self.kinds[self.sequences.kinds[rows]]
        return kinds


def _answers(recommender: Recommender, asked: Asked, rows: np.ndarray, ranking: Ranking) -> pl.DataFrame:
    """A ranking as rows of the data set."""
    row, place = np.nonzero(ranking.items)
    numbers = ranking.items[row, place]
    columns: dict[str, Any] = {"user": asked.users.gather(rows[row])}
    if asked.moments is not None:
        columns["time"] = pl.Series(asked.moments[rows[row]], dtype=pl.Int64).cast(pl.Datetime("us", "UTC"))
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
