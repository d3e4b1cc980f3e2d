"""A key file or the environment → who may read, write and administer; and which address may be bound without keys."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import socket
import stat
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from segue.errors import InputError

Role = Literal["read", "write", "admin"]

ROLES: tuple[Role, ...] = get_args(Role)
MIN_KEY = 16
KEY = re.compile(rf"[!-~]{{{MIN_KEY},}}")  # what an HTTP header carries unchanged
VARIABLES: dict[Role, str] = {role: f"SEGUE_{role.upper()}_KEYS" for role in ROLES}
HOW_TO_MAKE = (
    'write a file with lines such as read = ["KEY"], write = ["KEY"], admin = ["KEY"] and name it with --keys FILE, '
    f"or set {', '.join(VARIABLES.values())}; "
    "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes a key"
)

logger = logging.getLogger(__name__)


class Holder(msgspec.Struct, frozen=True):
    """Whoever has one of the keys."""

    number: int
    """Stands for the key where holders are told apart, so that the key itself is nowhere."""
    roles: frozenset[Role]


class Keys:
    """The keys of a service, as digests: the keys themselves are not kept."""

    __slots__ = ("_known",)

    def __init__(self, keys: Mapping[Role, Sequence[str]]) -> None:
        roles: dict[bytes, set[Role]] = {}
        for role, listed in keys.items():
            for key in listed:
                roles.setdefault(_digest(key.encode()), set()).add(role)
        self._known = [(digest, Holder(number, frozenset(held))) for number, (digest, held) in enumerate(roles.items())]

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"<{len(self)} keys>"

    @classmethod
    def none(cls) -> Keys:
        """No keys: everyone who reaches the service may do everything."""
        return cls({})

    @classmethod
    def load(cls, file: Path | None, environment: Mapping[str, str]) -> Keys:
        """The keys of the file or of the environment, none if neither has any; both at once is a mistake."""
        listed = from_environment(environment)
        if file is None:
            return cls(listed)
        if listed:
            named = " and ".join(VARIABLES[role] for role in listed)
            raise InputError(f"Keys come from --keys or from the environment, not both; unset {named} or drop --keys.")
        return cls(from_file(file))

    def holder(self, header: bytes | None) -> Holder | None:
        """Who sends this Authorization header; None if the header is missing or its key is not known."""
        if header is None or header[:7].lower() != b"bearer ":
            return None
        digest = _digest(header[7:].strip())
        found = None
        for known, holder in self._known:  # all of them, whichever fits: the time taken tells nothing
            if hmac.compare_digest(known, digest):
                found = holder
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def from_environment(environment: Mapping[str, str]) -> dict[Role, list[str]]:
    """The keys in the variables, which list them with commas between."""
    found: dict[Role, list[str]] = {}
    for role, variable in VARIABLES.items():
        keys = [key.strip() for key in environment.get(variable, "").split(",") if key.strip()]
        _check(keys, variable)
        if keys:
            found[role] = keys
    return found


def from_file(path: Path) -> dict[Role, list[str]]:
    """The keys in a TOML file with a list for each role."""
    try:
        readable_by_others = path.stat().st_mode & stat.S_IROTH
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"The key file {path} cannot be read: {error.strerror or error}.") from None
    except ValueError:  # what the parser says may quote a key
        raise InputError(f'{path} is not a key file; it is TOML with lines such as read = ["KEY"].') from None
    if readable_by_others:
        logger.warning("The key file %s is readable by every user of this machine; chmod 600 keeps it private.", path)
    found = {role: _keys_of(sections.pop(role), path, role) for role in ROLES if role in sections}
    if sections:
        raise InputError(f"The sections of a key file are {', '.join(ROLES)}; {path} has {_shown(sections)}.")
    if not any(found.values()):
        raise InputError(f'{path} has no key; add a line such as read = ["KEY"].')
    return found


def _keys_of(listed: object, path: Path, role: Role) -> list[str]:
    if not isinstance(listed, list) or not all(isinstance(key, str) for key in listed):
        raise InputError(f'{role} in {path} must be a list of texts, such as {role} = ["KEY"].')
    _check(listed, f"{role} in {path}")
    return listed


def _check(keys: Sequence[str], where: str) -> None:
    for number, key in enumerate(keys, 1):
        if not KEY.fullmatch(key):
            raise InputError(
                f"A key has at least {MIN_KEY} ASCII characters and no spaces; number {number} of {where} has not."
            )


def _shown(sections: Mapping[str, object]) -> str:
    """Names of unknown sections, but not of one that may be a key in the wrong place."""
    return ", ".join(repr(name) if len(name) < MIN_KEY else "a long one" for name in sections)


def is_loopback(name: str) -> bool:
    """Whether a literal host name or address always means this machine. Nothing is looked up."""
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_binding(host: str, keys: Keys) -> None:
    """Refuse to be reached from other machines while everyone may do everything."""
    if keys:
        return
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise InputError(
            f"{host!r} is not an address of this machine; name one with --host, such as 127.0.0.1."
        ) from None
    if not all(is_loopback(str(address[0])) for *_, address in found):
        raise InputError(f"Without keys only this machine may ask, and {host!r} is open to others: {HOW_TO_MAKE}.")
