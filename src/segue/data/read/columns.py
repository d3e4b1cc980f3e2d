"""Column names and first values → the column of each role; an ambiguous one is an error that names the option."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from segue.data.read.blocks import LogInput
from segue.data.read.times import looks_like_date, looks_like_number_or_time
from segue.data.settings import ROLES, PrepareSettings, Role
from segue.errors import InputError

# Names without case and punctuation, best rank first; two names of one rank are ambiguous.
USER_NAMES: tuple[tuple[str, ...], ...] = (
    ("user", "userid", "uid", "username", "userno"),
    (
        *("customer", "customerid", "customerno", "client", "clientid", "visitor", "visitorid", "member", "memberid"),
        *("reviewer", "reviewerid", "account", "accountid", "buyer", "buyerid", "shopper", "shopperid"),
        *("person", "personid", "profile", "profileid", "subscriber", "subscriberid", "player", "playerid"),
        *("listener", "listenerid", "reader", "readerid", "viewer", "viewerid", "fullvisitorid"),
    ),
    ("session", "sessionid", "device", "deviceid", "cookie", "cookieid"),
)
ITEM_NAMES: tuple[tuple[str, ...], ...] = (
    ("item", "itemid", "iid", "itemno", "sequenceitemids"),
    (
        *("product", "productid", "productcode", "stockcode", "sku", "skuid", "asin", "article", "articleid"),
        *("movie", "movieid", "film", "filmid", "show", "showid", "video", "videoid", "track", "trackid"),
        *("song", "songid", "artist", "artistid", "book", "bookid", "isbn", "game", "gameid", "app", "appid"),
        *("news", "newsid", "content", "contentid", "business", "businessid", "listing", "listingid"),
        *("recipe", "recipeid", "course", "courseid", "goods", "goodsid", "offer", "offerid"),
    ),
    ("parentasin", "page", "pageid", "url", "items", "itemids"),
)
TIME_NAMES: tuple[tuple[str, ...], ...] = (
    ("time", "timestamp", "ts", "datetime", "eventtime", "eventtimestamp", "sequencetimestamps"),
    (
        *("date", "createdat", "createdtime", "created", "unixtimestamp", "unixtime", "unixreviewtime", "epoch"),
        *("invoicedate", "orderdate", "purchasedate", "transactiondate", "tdat", "eventdate", "visittime"),
        *("timestampms", "timestamps", "occurredat", "purchasedat", "watchedat", "ratedat", "clickedat", "viewedat"),
    ),
    ("reviewtime", "day", "when"),
)
TITLE_NAMES: tuple[tuple[str, ...], ...] = (
    ("title",),
    ("name", "itemname", "producttitle", "productname", "itemtitle", "movietitle"),
    ("description", "itemdescription", "productdescription"),
)
ID_NAMES = (*ITEM_NAMES[:1], ("id",), *ITEM_NAMES[1:])
EXACT_NAMES: dict[Role, tuple[str, ...]] = {"value": ("value", "sequenceratings"), "kind": ("kind",)}


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a log by role."""

    names: dict[Role, str]
    found: tuple[Role, ...]
    """The roles that the user did not name."""
    lists: bool = False
    """One row a user: every column but the user's holds lists."""

    def only(self, *roles: Role) -> Columns:
        """The columns of these roles alone."""
        return replace(self, names={role: self.names[role] for role in roles})

    def positions(self, log: LogInput) -> dict[str, int]:
        """The positions of the columns in one of the inputs."""
        return {role: named_position(log, role, name) for role, name in self.names.items()}


def find_columns(log: LogInput, settings: PrepareSettings) -> Columns:
    """The columns that the settings name, and others recognised by name and content."""
    named = settings.named_columns()
    positions = {role: named_position(log, role, name) for role, name in named.items()}
    for role, ranks in (("user", USER_NAMES), ("item", ITEM_NAMES)):
        if role not in positions:
            matches = by_rank(log, ranks, free=_free(log, positions.values()))
            positions[role] = _single(log, role, matches)  # type: ignore[index, arg-type]
    if "time" not in positions:
        position = _time_position(log, settings, free=_free(log, positions.values()))
        if position is not None:
            positions["time"] = position
    lists = _holds_lists(log, positions)
    for role, names in EXACT_NAMES.items():
        exact = names[: 2 if lists else 1]
        matches = [position for position in _free(log, positions.values()) if normal(log.names[position]) in exact]
        entries = [] if role == "kind" else [entry for position in matches for entry in _entries(log, position)]
        if role not in positions and len(matches) == 1 and all(map(looks_like_number_or_time, entries)):
            positions[role] = matches[0]
    return Columns(
        names={role: log.names[positions[role]] for role in ROLES if role in positions},
        found=tuple(role for role in ROLES if role in positions and role not in named),
        lists=lists,
    )


def normal(name: str) -> str:
    """A name without case, spaces and punctuation."""
    return "".join(character for character in name.casefold() if character.isalnum())


def named_position(log: LogInput, role: str, name: str) -> int:
    """The position of the column of this name."""
    positions = [position for position, other in enumerate(log.names) if other == name]
    if not positions:
        raise InputError(f"{log.label} has no column {name!r} for --{role}; it has {listed(log.names)}.{log.note}")
    if len(positions) > 1:
        raise InputError(f"{log.label} has {len(positions)} columns named {name!r} (--{role}); rename all but one.")
    return positions[0]


def listed(names: Iterable[str]) -> str:
    """Names for a message, at most thirty."""
    shown = [repr(name) for name in names]
    return ", ".join(shown[:30]) + (f" and {len(shown) - 30} more" if len(shown) > 30 else "")


def by_rank(log: LogInput, ranks: tuple[tuple[str, ...], ...], *, free: list[int]) -> list[int]:
    """The columns whose names have the best rank that occurs."""
    for names in ranks:
        positions = [position for position in free if normal(log.names[position]) in names]
        if positions:
            return positions
    return []


def _free(log: LogInput, positions: Iterable[int]) -> list[int]:
    used = set(positions)
    return [position for position in range(len(log.names)) if position not in used]


def _single(log: LogInput, role: Role, positions: list[int]) -> int:
    if not positions:
        raise InputError(
            f"{log.label} has no column that looks like the {role}; name it with --{role}. "
            f"Its columns are {listed(log.names)}.{log.note}"
        )
    if len(positions) > 1:
        names = " or ".join(repr(log.names[position]) for position in positions)
        raise InputError(
            f"{log.label}: the {role} could be {names}; name it with --{role}. Its columns are {listed(log.names)}."
        )
    return positions[0]


def _time_position(log: LogInput, settings: PrepareSettings, *, free: list[int]) -> int | None:
    """A column named like a time, if its values can be times; else the one column that holds only dates; else none."""
    by_name = by_rank(log, TIME_NAMES, free=free)
    readable = [position for position in free if any(map(looks_like_number_or_time, _entries(log, position, 2)))]
    dates = [position for position in readable if all(map(looks_like_date, _values(log, position)))]
    if by_name and settings.time_format is None:
        # "time" may hold 12:30 beside a "date": a name of a lower rank is better if its values are dates, and not
        # numbers of weekdays
        by_name = [each for each in by_name if each in readable] or by_rank(log, TIME_NAMES, free=dates) or by_name
    return _single(log, "time", by_name or dates) if by_name or dates else None


def _values(log: LogInput, position: int) -> list[str]:
    return [value for value in log.sample(position) if value]


def _entries(log: LogInput, position: int, most: int | None = None) -> list[str]:
    """The entries of comma-separated lists, at most `most` of each."""
    return [part for value in _values(log, position) for part in value.split(",")[:most]]


def _holds_lists(log: LogInput, positions: dict[Role, int]) -> bool:
    """Whether a row holds all events of a user: by type, by Meta's names or by comma-separated times."""
    if log.holds_lists(positions["item"]) or normal(log.names[positions["item"]]) == "sequenceitemids":
        return True
    if "time" not in positions:
        return False
    values = _values(log, positions["time"])
    lists = [value.split(",") for value in values if "," in value]
    return len(lists) * 2 > len(values) and all(looks_like_date(part) for parts in lists for part in parts)
