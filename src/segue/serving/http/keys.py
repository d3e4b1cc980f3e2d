"""A key file or environment variables → the keys of a service and their roles; the addresses that need keys."""

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
KEY = re.compile(rf"[!-~]{{{MIN_KEY},}}")  # what an HTTP header transmits unchanged
VARIABLES: dict[Role, str] = {role: f"SEGUE_{role.upper()}_KEYS" for role in ROLES}
HOW_TO_MAKE = (
    'write a file with lines such as read = ["KEY"], write = ["KEY"], admin = ["KEY"] and name it with --keys FILE, '
    f"or set {', '.join(VARIABLES.values())}; "
    "python -c 'import secrets; print(secrets.token_urlsafe(32))' prints a new key"
)
NO_ADDRESS = "{!r} is not an address of this machine; give one with --host, such as 127.0.0.1."

logger = logging.getLogger(__name__)


class KeyHolder(msgspec.Struct, frozen=True):
    """A client with one of the keys."""

    number: int
    """The number of the key, which does not reveal it."""
    roles: frozenset[Role]


class Keys:
    """The keys of a service, as SHA-256 digests: the keys themselves are not held in memory. Without keys, every client
    may send every request."""

    __slots__ = ("_holders",)

    def __init__(self, keys: Mapping[Role, Sequence[str]]) -> None:
        roles: dict[bytes, set[Role]] = {}
        for role, names in keys.items():
            for key in names:
                roles.setdefault(hashlib.sha256(key.encode()).digest(), set()).add(role)
        self._holders = [
            (digest, KeyHolder(number, frozenset(granted))) for number, (digest, granted) in enumerate(roles.items())
        ]

    def __len__(self) -> int:
        return len(self._holders)

    @classmethod
    def load(cls, file: Path | None, environment: Mapping[str, str]) -> Keys:
        """The keys of the file, or of the environment variables, which separate them by commas; not of both."""
        keys: dict[Role, list[str]] = {}
        for role, variable in VARIABLES.items():
            names = [key.strip() for key in environment.get(variable, "").split(",") if key.strip()]
            _check(names, variable)
            if names:
                keys[role] = names
        if file is None:
            return cls(keys)
        if keys:
            variables = " and ".join(VARIABLES[role] for role in keys)
            raise InputError(f"Give keys in --keys or in the environment, not both; unset {variables} or drop --keys.")
        return cls(from_file(file))

    def holder(self, header: bytes | None) -> KeyHolder | None:
        """The holder of the key in an Authorization header; None if the header is missing or its key is unknown."""
        if header is None or header[:7].lower() != b"bearer ":
            return None
        digest = hashlib.sha256(header[7:].strip()).digest()
        match = None
        for own, holder in self._holders:  # all of them: the time taken must not depend on which one matches
            if hmac.compare_digest(own, digest):
                match = holder
        return match


def from_file(path: Path) -> dict[Role, list[str]]:
    """The keys of each role in a TOML file."""
    try:
        readable_by_others = path.stat().st_mode & stat.S_IROTH
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"The key file {path} cannot be read: {error.strerror or error}.") from None
    except ValueError:  # the parser's message may quote a key
        raise InputError(f'The key file {path} is not TOML; write lines such as read = ["KEY"].') from None
    if readable_by_others:
        logger.warning("The key file %s is readable by every user of this machine; run chmod 600 on it.", path)
    by_role = {role: sections.pop(role) for role in ROLES if role in sections}
    for role, keys in by_role.items():
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise InputError(f'{role} in {path} must be a list of strings, such as {role} = ["KEY"].')
        _check(keys, f"{role} in {path}")
    if sections:  # a long name may be a misplaced key
        names = ", ".join(repr(name) if len(name) < MIN_KEY else "a long one" for name in sections)
        raise InputError(f"The sections of a key file are {', '.join(ROLES)}; {path} has {names}.")
    if not any(by_role.values()):
        raise InputError(f'{path} has no key; add a line such as read = ["KEY"].')
    return by_role


def _check(keys: Sequence[str], where: str) -> None:
    for number, key in enumerate(keys, 1):
        if not KEY.fullmatch(key):
            raise InputError(
                f"A key has at least {MIN_KEY} ASCII characters and no spaces; number {number} of {where} differs."
            )


def is_loopback(name: str) -> bool:
    """Whether a host name or address is a loopback one, without a lookup."""
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_binding(host: str, keys: Keys) -> None:
    """Refuse to bind an address that other machines can reach if there are no keys."""
    if keys:
        return
    try:
        addresses = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise InputError(NO_ADDRESS.format(host)) from None
    if not all(is_loopback(str(address[0])) for *_, address in addresses):
        raise InputError(f"Without keys, --host must be a loopback address, and {host!r} is not: {HOW_TO_MAKE}.")
