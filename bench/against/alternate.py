"""Two versions and a measurement → rows with the median of each and their ratio.

The speed of a shared host changes by half within an hour, so both are measured in one run, alternately. The order is
reversed in every second round: a host that slows down steadily slows both equally.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from bench.against.version import Version
from bench.tables import shown

ROUNDS = 5

Numbers = dict[str, float]
"""What one measurement gives: a number by its name and unit, such as "s an epoch"."""


def alternate(
    versions: Sequence[Version], measure: Callable[[Version], Numbers], *, rounds: int = ROUNDS
) -> dict[str, list[Numbers]]:
    """The numbers of each version, by its name, round by round."""
    results: dict[str, list[Numbers]] = {version.name: [] for version in versions}
    for number in range(rounds):
        for version in versions if number % 2 == 0 else reversed(versions):
            numbers = measure(version)
            results[version.name].append(numbers)
            text = ", ".join(f"{name} {shown(value)}" for name, value in numbers.items())
            print(f"round {number + 1} of {rounds}  {version.name:12}  {text}", file=sys.stderr, flush=True)
    return results


def rows(results: dict[str, list[Numbers]]) -> list[dict[str, Any]]:
    """One row a number: the medians of this and the other version, their ratio, and the extremes of each."""
    this, other = results
    table: list[dict[str, Any]] = []
    for name in results[this][0]:
        values = {version: [numbers[name] for numbers in results[version]] for version in results}
        medians = {version: statistics.median(each) for version, each in values.items()}
        spread = {f"{version}, range": f"{shown(min(each))} – {shown(max(each))}" for version, each in values.items()}
        table.append({"number": name, **medians, "ratio": medians[this] / medians[other], **spread})
    return table
