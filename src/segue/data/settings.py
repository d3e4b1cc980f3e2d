"""What the user asks of `prepare`, checked when it is said and before any file is opened."""

from __future__ import annotations

import zoneinfo
from typing import Literal, get_args

import msgspec
import polars as pl

from segue.errors import SettingsError

Role = Literal["user", "item", "time", "value", "kind", "order"]
ROLES: tuple[Role, ...] = get_args(Role)

SPLIT_BY_TIME = "time:"

EngineName = Literal["local", "spark"]


class PrepareSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `segue prepare`; a column that is not named is found."""

    user: str | None = None
    item: str | None = None
    time: str | None = None
    value: str | None = None
    kind: str | None = None
    order: str | None = None
    """A column of whole numbers that orders events of the same time; the row order does otherwise."""
    min_user: int = 5
    """Users with fewer events are left out …"""
    min_item: int = 5
    """… and items with fewer events too, again and again until neither is left."""
    split: str = "last"
    time_format: str | None = None
    """strptime-like (`%d/%m/%Y %H:%M`), or the name of a unit: order, s, ms, us, ns."""
    time_zone: str | None = None
    """The zone of times without an offset, such as Europe/Berlin; UTC when not given."""
    drop_duplicates: bool = False
    max_rejected: float = 0.01

    def __post_init__(self) -> None:
        for name, least in (("min_user", self.min_user), ("min_item", self.min_item)):
            if least < 1:
                raise SettingsError(f"{option(name)} is {least}; expected a whole number of at least 1.")
        if not 0 <= self.max_rejected <= 1:
            raise SettingsError(f"--max-rejected is {self.max_rejected}; expected a share from 0 to 1, or 0% to 100%.")
        if self.split != "last" and not self.split.removeprefix(SPLIT_BY_TIME).strip():
            raise SettingsError("--split time: needs a moment, such as time:2024-05-01.")
        if self.split != "last" and not self.split.startswith(SPLIT_BY_TIME):
            raise SettingsError(f"--split is {self.split!r}; expected last, or time:WHEN such as time:2024-05-01.")
        if self.time_zone is not None:
            refuse_unknown_zone(self.time_zone)
        self._refuse_shared_columns()

    def named_columns(self) -> dict[Role, str]:
        """The columns that were named, by role."""
        return {role: name for role in ROLES if (name := getattr(self, role)) is not None}

    def _refuse_shared_columns(self) -> None:
        holder: dict[str, Role] = {}
        for role, name in self.named_columns().items():
            if name in holder:
                raise SettingsError(
                    f"The column {name!r} is named for both --{holder[name]} and --{role}; name another for one."
                )
            holder[name] = role


def option(name: str) -> str:
    """The command line's spelling of a setting."""
    return "--" + name.replace("_", "-")


def refuse_unknown_zone(name: str) -> None:
    """Refuse a time zone that Python or polars does not know."""
    try:
        zoneinfo.ZoneInfo(name)
        pl.Series([0]).cast(pl.Datetime("us", name))
    except (zoneinfo.ZoneInfoNotFoundError, pl.exceptions.PolarsError, ValueError, OSError) as error:
        raise SettingsError(
            f"--time-zone {name!r} is not known; expected an IANA name such as UTC, Europe/Berlin or America/New_York."
        ) from error


def share(text: str | float) -> float:
    """A share said as 0.01 or as 1%."""
    said = str(text).strip()
    try:
        return float(said.removesuffix("%")) / (100 if said.endswith("%") else 1)
    except ValueError as error:
        raise SettingsError(f"--max-rejected is {text!r}; expected a share such as 1% or 0.01.") from error


def on_spark(engine: str, remote: str | None) -> bool:
    """Whether Spark is to work; another engine, and an address that nobody would ask, are refused."""
    if engine not in get_args(EngineName):
        raise SettingsError(f"--engine is {engine!r}; expected local or spark.")
    if engine == "local" and remote is not None:
        raise SettingsError("--spark-remote is for --engine spark; add that, or leave the address out.")
    return engine == "spark"
