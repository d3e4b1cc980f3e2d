"""A generated log for the `prepare` and `scale` benchmarks: plain CSV in random order.

    python -m bench.data.make_log 1000000 log.csv --times ISO

500 thousand users (--users) whose activity is log-normal, 100 thousand items (--items) by Zipf's law, ids of 12 to 16
characters, times of two years as epoch seconds (or see --times), and 0.1 % of rows that cannot be used (no user, no
item, no time, a word instead of a time, too many fields).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import polars as pl

USERS = 500_000
ITEMS = 100_000
BAD_SHARE = 0.001
ROWS_AT_A_TIME = 1_000_000
FIRST_SECOND, LAST_SECOND = 1_640_995_200, 1_704_067_200  # 2022 and 2023
TIME_FORMATS = {"seconds": None, "ISO": "%Y-%m-%dT%H:%M:%S", "format": "%d.%m.%Y %H:%M:%S"}
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789", dtype=np.uint8)


def ids(count: int, prefix: bytes, rng: np.random.Generator) -> pl.Series:
    """Distinct ids of 12 to 16 characters: a number and random letters, cut to a random length."""
    width = 16 - len(prefix)
    letters = LETTERS[rng.integers(0, len(LETTERS), (count, width))]
    numbers = np.arange(count)
    for column in range(5):  # 36 ** 5 numbers make them distinct
        letters[:, column] = LETTERS[numbers // len(LETTERS) ** column % len(LETTERS)]
    heads = np.broadcast_to(np.frombuffer(prefix, dtype=np.uint8), (count, len(prefix)))
    whole = np.ascontiguousarray(np.hstack([heads, letters])).view("S16").ravel().astype(str)
    return pl.DataFrame({"id": whole, "length": rng.integers(12, 17, count)}).select(
        pl.col("id").str.head(pl.col("length"))
    )["id"]


def make_log(
    path: Path, *, events: int, users: int = USERS, items: int = ITEMS, seed: int = 1, times: str = "seconds"
) -> None:
    """Write `events` rows under a header. times: a key of TIME_FORMATS; all of them give the same events."""
    rng = np.random.default_rng(seed)
    user_ids, item_ids = ids(users, b"u", rng), ids(items, b"item-", rng)
    user_weights = np.cumsum(rng.lognormal(sigma=1.0, size=users))
    item_weights = np.cumsum(1.0 / np.arange(1, items + 1))
    with path.open("wb") as file:
        file.write(b"user_id,item_id,timestamp\n")
        for begin in range(0, events, ROWS_AT_A_TIME):
            rows = min(ROWS_AT_A_TIME, events - begin)
            frame = pl.DataFrame(
                {
                    "user_id": user_ids.gather(_sampled(user_weights, rows, rng)),
                    "item_id": item_ids.gather(_sampled(item_weights, rows, rng)),
                    "timestamp": _times(rng.integers(FIRST_SECOND, LAST_SECOND, rows), TIME_FORMATS[times]),
                }
            )
            _with_bad_rows(frame, rng).write_csv(file, include_header=False, quote_style="never")


def _sampled(weights: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random indices, given the running sum of their weights."""
    return np.asarray(np.searchsorted(weights, rng.random(count) * weights[-1], side="right"))


def _times(seconds: np.ndarray, time_format: str | None) -> pl.Series:
    if time_format is None:
        return pl.Series(seconds).cast(pl.String)
    return pl.from_epoch(pl.Series(seconds), time_unit="s").dt.strftime(time_format)


def _with_bad_rows(frame: pl.DataFrame, rng: np.random.Generator) -> pl.DataFrame:
    """Make 0.1 % of the rows bad, each in one of five ways."""
    fault = pl.Series(np.where(rng.random(frame.height) < BAD_SHARE, rng.integers(1, 6, frame.height), 0))
    time = pl.col("timestamp")
    return frame.with_columns(
        pl.when(fault == 1).then(pl.lit("")).otherwise(pl.col("user_id")).alias("user_id"),
        pl.when(fault == 2).then(pl.lit("")).otherwise(pl.col("item_id")).alias("item_id"),
        pl.when(fault == 3)
        .then(pl.lit(""))
        .when(fault == 4)
        .then(pl.lit("yesterday"))
        .when(fault == 5)
        .then(time + ",too,many")
        .otherwise(time)
        .alias("timestamp"),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("events", type=int)
    parser.add_argument("path", type=Path)
    parser.add_argument("--users", type=int, default=USERS)
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", choices=list(TIME_FORMATS), default="seconds")
    arguments = parser.parse_args()
    make_log(**vars(arguments))
