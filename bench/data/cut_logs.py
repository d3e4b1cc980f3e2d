"""Logs split at a time, for the benches that look days ahead: their sources and data folders."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from segue import api
from segue.demo import shop
from segue.errors import InputError
from segue.folders import digest
from segue.terminal import Display

EVENTS, ITEMS = "events.tsv.gz", "items.tsv.gz"


@dataclass(frozen=True, slots=True)
class CutLog:
    """A log, the time of its split, and its counts, which identify it."""

    name: str
    title: str
    cut: str
    users: int
    items: int
    events: int
    url: str = ""
    """Where it is published; empty for the demo's shop, which is downloaded."""


SHOP = CutLog("shop", "The demo's shop", "2011-11-01", 4105, 3186, 394_778)
BEAUTY = CutLog(
    "beauty",
    "Amazon Beauty with times and titles",
    "2014-03-01",
    22_332,
    12_086,
    198_215,
    "https://cseweb.ucsd.edu/~jmcauley/datasets/amazon/links.html",
)
ML_1M = CutLog(
    "ml-1m",
    "MovieLens-1M",
    "2000-12-01",
    6040,
    3416,
    999_611,
    "https://grouplens.org/datasets/movielens/1m/",
)


def prepared(log: CutLog, folder: Path | None, cache: Path) -> api.Data:
    """The log's data folder, made once; a folder with another log is refused."""
    if log.url and (folder is None or not (folder / EVENTS).is_file() or not (folder / ITEMS).is_file()):
        raise InputError(f"{log.name} needs DATA=folder with {EVENTS} and {ITEMS}, the log of {log.url}")
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as name:
        data = _shop(log, Path(name), cache) if folder is None or not log.url else _folder(log, folder, cache)
    counts = tuple(data.manifest["counts"][name] for name in ("users", "items", "events"))
    if counts != (log.users, log.items, log.events):
        raise InputError(
            f"{folder or 'The shop'} is not the log of {log.name}: after preparing it has {counts} users, items and "
            f"events, expected {(log.users, log.items, log.events)}."
        )
    return data


def _folder(log: CutLog, folder: Path, cache: Path) -> api.Data:
    data_folder = cache / "data" / f"{log.name}-{log.cut}-{digest(folder / EVENTS)[:12]}"
    if data_folder.exists():
        return api.Data.open(data_folder)
    with Display() as display:
        split = f"time:{log.cut}"
        return api.prepare(folder / EVENTS, out=data_folder, items=folder / ITEMS, split=split, progress=display.stage)


def _shop(log: CutLog, work: Path, cache: Path) -> api.Data:
    raw = shop.fetch(cache=shop.cache_folder())
    data_folder = cache / "data" / f"{log.name}-{log.cut}-{digest(raw)[:12]}"
    if data_folder.exists():
        return api.Data.open(data_folder)
    log_files = shop.clean(raw, out=work)
    with Display() as display:
        return api.prepare(
            log_files.events,
            out=data_folder,
            user="customer",
            item="item",
            time="time",
            value="quantity",
            items=log_files.items,
            split=f"time:{log.cut}",
            progress=display.stage,
        )
