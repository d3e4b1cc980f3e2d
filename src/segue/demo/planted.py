"""A synthetic shop with known habits → a raw log in the layout of the real shop's.

Products belong to collections, and each collection is bought in a fixed order. A customer alternates at random between
two collections, so the last purchase alone does not predict the next one. Some products are bought again, or at random.
Some rows are cancelled, anonymous or postage, to be removed by cleaning.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import polars as pl

CUSTOMERS = 1200
STYLES = (
    "BLUE ENAMEL", "RED RETROSPOT", "IVORY LACE", "COPPER", "WICKER", "MINT STRIPE",
    "OAK", "SLATE", "GINGHAM", "SILVER STAR", "WOODLAND", "SEASIDE",
)  # fmt: skip
KINDS = (
    "TEAPOT", "MUG", "MILK JUG", "SUGAR BOWL", "CAKE STAND", "BISCUIT TIN", "TEA TOWEL", "APRON",
    "OVEN GLOVE", "BREAD BIN", "EGG CUP", "TOAST RACK", "LANTERN", "PHOTO FRAME", "CUSHION", "DOORMAT",
    "COAT HOOK", "WALL CLOCK", "LUNCH BOX", "NOTEBOOK", "GIFT BAG", "BUNTING", "BIRD HOUSE", "WATERING CAN",
)  # fmt: skip
START = datetime.datetime(2024, 1, 1, 9, 0)  # noqa: DTZ001 -- local time without a zone, like the real shop's

REPEATED, RANDOM = 0.15, 0.10  # shares of purchases that repeat an earlier one, and that are random
ANONYMOUS, CANCELLED, POSTAGE = 0.06, 0.02, 0.01  # shares of rows to be removed


def write_planted_shop(path: Path, *, seed: int = 7) -> None:
    """Write the synthetic shop's invoices, in order of time."""
    rng = np.random.default_rng(seed)
    purchases = [_purchases(rng) for _ in range(CUSTOMERS)]
    customers = np.repeat(np.arange(CUSTOMERS), [len(p) for p in purchases])
    starts = np.repeat(rng.integers(0, 200 * 24 * 60, CUSTOMERS), [len(p) for p in purchases])
    gaps = rng.integers(1, 3 * 24 * 60, len(customers))
    waited = np.concatenate([np.cumsum(part) for part in _by_customer(gaps, customers)])
    _log(np.concatenate(purchases), customers, starts + waited, rng).write_csv(path)


def _purchases(rng: np.random.Generator) -> np.ndarray:
    """One customer's products, oldest first: two collections, interleaved at random."""
    collections = rng.choice(len(STYLES), size=2, replace=False)
    steps = rng.integers(0, len(KINDS), size=2)
    products: list[int] = []
    for number in rng.random(int(rng.integers(12, 60))):
        if products and number < REPEATED:
            products.append(products[int(rng.integers(len(products)))])
        elif number < REPEATED + RANDOM:
            products.append(int(rng.integers(len(STYLES) * len(KINDS))))
        else:
            side = int(rng.integers(2))
            products.append(int(collections[side] * len(KINDS) + steps[side] % len(KINDS)))
            steps[side] += 1
    return np.array(products)


def _by_customer(values: np.ndarray, customers: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.flatnonzero(np.diff(customers)) + 1)


def _log(products: np.ndarray, customers: np.ndarray, minutes: np.ndarray, rng: np.random.Generator) -> pl.DataFrame:
    """The purchases as invoice lines, with rows to be removed by cleaning among them."""
    n = len(products)
    uniform = rng.random(n)
    cancelled, anonymous = uniform < CANCELLED, (uniform >= CANCELLED) & (uniform < CANCELLED + ANONYMOUS)
    postage = uniform > 1 - POSTAGE
    names = np.array([f"{style} {kind}" for style in STYLES for kind in KINDS])
    codes = np.array([f"{20001 + number}" for number in range(len(names))])
    quantity = rng.integers(1, 13, n)
    table = pl.DataFrame(
        {
            "InvoiceNo": np.where(cancelled, "C", "").astype(object) + (500_000 + np.arange(n)).astype(str),
            "StockCode": np.where(postage, "POST", codes[products]),
            "Description": np.where(postage, "POSTAGE", names[products]),
            "Quantity": np.where(cancelled, -quantity, quantity),
            "InvoiceDate": np.datetime64(START) + minutes.astype("timedelta64[m]"),
            "UnitPrice": np.round(rng.uniform(0.5, 12.0, n), 2),
            "CustomerID": [None if a else f"{12000 + c}" for a, c in zip(anonymous, customers, strict=True)],
            "Country": ["United Kingdom"] * n,
        }
    )
    return table.sort("InvoiceDate", maintain_order=True).with_columns(
        pl.col("InvoiceDate").dt.strftime("%m/%d/%Y %H:%M")
    )
