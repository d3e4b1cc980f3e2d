"""The options of `prepare`, checked when they are given and before any file is opened."""

from __future__ import annotations

import zoneinfo
from typing import Any, Literal, TypedDict, get_args

import msgspec
import polars as pl

from segue.errors import SettingsError

Role = Literal["user", "item", "time", "value", "kind", "order"]
ROLES: tuple[Role, ...] = get_args(Role)

SPLIT_BY_TIME = "time:"

EngineName = Literal["local", "spark"]


class PrepareOptions(TypedDict, total=False):
    """The fields of PrepareSettings as the keywords of `segue.prepare`, for editors and type checkers."""

    user: str | None
    item: str | None
    time: str | None
    value: str | None
    kind: str | None
    order: str | None
    min_user: int
    min_item: int
    split: str
    time_format: str | None
    time_zone: str | None
    drop_duplicates: bool
    max_rejected: float | str
    engine: EngineName
    spark_remote: str | None


class PrepareSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a log is prepared. The command line, `segue.prepare` and the manifest of a data folder share these names."""

    user: str | None = None
    """The column of the user; by default it is found by its name."""
    item: str | None = None
    """The column of the item; by default it is found by its name."""
    time: str | None = None
    """The column of the time; by default it is found by its name and content."""
    value: str | None = None
    """The column of a number, such as a rating."""
    kind: str | None = None
    """The column of the kind of event, such as click or buy."""
    order: str | None = None
    """A column of whole numbers that orders events of equal time; by default their rows do."""
    min_user: int = 5
    """Users with fewer events are left out, and items too, until every one left has enough."""
    min_item: int = 5
    """Items with fewer events are left out."""
    split: str = "last"
    """`last`, or `time:WHEN` with a date or a number in the unit of the time column."""
    time_format: str | None = None
    """The format of times (`%d/%m/%Y %H:%M`) or their unit (order, s, ms, us, ns); by default it is found."""
    time_zone: str | None = None
    """The zone of times without an offset, such as Europe/Berlin; UTC by default."""
    drop_duplicates: bool = False
    """Keep one of several equal rows."""
    max_rejected: float = 0.01
    """The largest share of unusable rows, as 0.01 or "1%"; above it nothing is written."""
    engine: EngineName = "local"
    """`local`, or `spark`, which makes the same folder and also takes folders, addresses such as s3a://…, the name of
    a table and a Spark DataFrame."""
    spark_remote: str | None = None
    """The address of a Spark Connect server (sc://host:port); see `spark.session.open_session` for the default."""

    def __post_init__(self) -> None:
        share = str(self.max_rejected).strip()
        try:
            number = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
        except ValueError as error:
            raise SettingsError(
                f"--max-rejected is {self.max_rejected!r}; expected a share such as 1% or 0.01."
            ) from error
        msgspec.structs.force_setattr(self, "max_rejected", number)
        for name, least in (("min-user", self.min_user), ("min-item", self.min_item)):
            if least < 1:
                raise SettingsError(f"--{name} is {least}; expected a whole number of at least 1.")
        if not 0 <= self.max_rejected <= 1:
            raise SettingsError(f"--max-rejected is {self.max_rejected}; expected a share from 0 to 1, or 0% to 100%.")
        if self.split != "last" and not self.split.removeprefix(SPLIT_BY_TIME).strip():
            raise SettingsError("--split time: needs a date or number, such as time:2024-05-01.")
        if self.split != "last" and not self.split.startswith(SPLIT_BY_TIME):
            raise SettingsError(f"--split is {self.split!r}; expected last, or time:WHEN such as time:2024-05-01.")
        if self.time_zone is not None:
            _refuse_unknown_zone(self.time_zone)
        on_spark(self.engine, self.spark_remote)
        holder: dict[str, Role] = {}
        for role, name in self.named_columns().items():
            if holder.setdefault(name, role) != role:
                raise SettingsError(
                    f"The column {name!r} is named for both --{holder[name]} and --{role}; name another for one."
                )

    def named_columns(self) -> dict[Role, str]:
        """The columns that the options name, by role."""
        return {role: name for role in ROLES if (name := getattr(self, role)) is not None}

    def stored(self) -> dict[str, Any]:
        """The settings in the manifest of a data folder: without the engine, as both engines make the same folder."""
        engine = ("engine", "spark_remote")
        return {name: value for name, value in msgspec.to_builtins(self).items() if name not in engine}


def on_spark(engine: str, remote: str | None) -> bool:
    """Whether the engine is Spark. An unknown engine and an address without --engine spark are refused."""
    if engine not in get_args(EngineName):
        raise SettingsError(f"--engine is {engine!r}; expected local or spark.")
    if engine == "local" and remote is not None:
        raise SettingsError("--spark-remote is for --engine spark; add that, or leave the address out.")
    return engine == "spark"


def _refuse_unknown_zone(name: str) -> None:
    """Refuse a time zone that Python or polars does not know."""
    try:
        zoneinfo.ZoneInfo(name)
        pl.Series([0]).cast(pl.Datetime("us", name))
    except (zoneinfo.ZoneInfoNotFoundError, pl.exceptions.PolarsError, ValueError, OSError) as error:
        raise SettingsError(
            f"--time-zone {name!r} is not known; expected an IANA name such as UTC, Europe/Berlin or America/New_York."
        ) from error
