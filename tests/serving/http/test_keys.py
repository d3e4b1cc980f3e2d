"""Keys: sources, roles, secrecy, and the addresses that may be bound without keys."""

from __future__ import annotations

import copy
import hmac
import logging
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest

from segue.errors import InputError
from segue.serving.http.keys import Keys, check_binding, is_loopback

READER, WRITER, BOTH = "reader-0123456789", "writer-0123456789", "both-0123456789ab"


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def roles(keys: Keys, header: bytes | None) -> set[str] | None:
    holder = keys.holder(header)
    return None if holder is None else {*holder.roles}


def key_file(folder: Path, text: str, *, mode: int = 0o600) -> Path:
    path = folder / "keys.toml"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


@pytest.fixture(name="keys")
def three_keys() -> Keys:
    return Keys({"read": [READER, BOTH], "write": [WRITER, BOTH], "admin": []})


def test_a_key_has_the_roles_of_its_lists(keys: Keys) -> None:
    assert roles(keys, bearer(READER)) == {"read"}
    assert roles(keys, bearer(WRITER)) == {"write"}
    assert roles(keys, bearer(BOTH)) == {"read", "write"}
    assert roles(keys, b"bearer  " + READER.encode() + b" ") == {"read"}
    numbers = {holder.number for key in (READER, WRITER, BOTH) if (holder := keys.holder(bearer(key)))}
    assert len(keys) == len(numbers) == 3


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        READER.encode(),
        b"Basic " + READER.encode(),
        bearer(READER[:-1]),
        bearer(READER + "x"),
        bearer(READER.upper()),
        b"Bearer \xff\x00" + READER.encode(),
        bearer(f"{READER},{WRITER}"),
    ],
)
def test_any_other_header_has_no_role(keys: Keys, header: bytes | None) -> None:
    assert keys.holder(header) is None


@pytest.mark.parametrize("key", [READER, WRITER, BOTH, "nobody-0123456789"])
def test_every_digest_is_compared_even_after_a_match(keys: Keys, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons: list[Any] = []
    real = hmac.compare_digest

    def compare(*pair: Any) -> bool:
        comparisons.append(pair)
        return real(*pair)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys.holder(bearer(key))
    assert len({known for known, _ in comparisons}) == len(comparisons) == 3
    assert {len(digest) for pair in comparisons for digest in pair} == {32}


def test_no_keys() -> None:
    assert not Keys({}) and Keys({}).holder(bearer(READER)) is None
    assert not Keys.load(None, {}) and not Keys.load(None, {"SEGUE_READ_KEYS": " , "})


def test_plain_keys_are_not_kept_in_memory(keys: Keys) -> None:
    known = vars(Keys)["_holders"].__get__(keys)
    for text in (repr(keys), str(keys), repr(known), f"{keys!r}", repr(pickle.dumps(keys)), repr(copy.copy(keys))):
        assert not any(key in text for key in (READER, WRITER, BOTH))
    assert roles(pickle.loads(pickle.dumps(keys)), bearer(BOTH)) == {"read", "write"}  # for a worker process


def test_a_key_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = key_file(tmp_path, f'read = ["{READER}", "{BOTH}"]\nadmin = ["{BOTH}"]\n')
    keys = Keys.load(path, {"SEGUE_READ_KEYS": ""})
    assert (roles(keys, bearer(READER)), roles(keys, bearer(BOTH))) == ({"read"}, {"read", "admin"})
    assert not caplog.records


def test_a_key_file_readable_by_everyone_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    Keys.load(key_file(tmp_path, f'read = ["{READER}"]', mode=0o644), {})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "chmod 600" in caplog.text and READER not in caplog.text


def test_the_environment() -> None:
    keys = Keys.load(None, {"SEGUE_WRITE_KEYS": f" {WRITER},{BOTH},", "SEGUE_ADMIN_KEYS": BOTH, "SEGUE_KEYS": READER})
    assert roles(keys, bearer(WRITER)) == {"write"}
    assert roles(keys, bearer(BOTH)) == {"write", "admin"}
    assert roles(keys, bearer(READER)) is None


def test_a_key_file_and_the_environment_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unset SEGUE_READ_KEYS or drop --keys"):
        Keys.load(key_file(tmp_path, f'read = ["{READER}"]'), {"SEGUE_READ_KEYS": READER})


SECRET = "a-secret-in-the-wrong-place"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no key"),
        ("read = []", "has no key"),
        ('reed = ["0123456789abcdef"]', "sections of a key file are read, write, admin; .* has 'reed'"),
        (f'{SECRET} = "read"', "has a long one"),
        (f'read = "{SECRET}"', "must be a list of strings"),
        (f'read = ["{SECRET}", 7]', "must be a list of strings"),
        (f"[read]\n{SECRET} = 1", "must be a list of strings"),
        ('read = ["0123456789abcde"]', "at least 16 ASCII characters.* number 1 of read"),
        (f'write = ["{SECRET}", "two words 0123456"]', "number 2 of write"),
        ('admin = ["schlüssel-0123456789"]', "number 1 of admin"),
        (f'read = ["{SECRET}"', "is not TOML"),
        (f"{SECRET} {SECRET}", "is not TOML"),
    ],
)
def test_an_invalid_key_file_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as error:
        Keys.load(key_file(tmp_path, text), {})
    assert SECRET not in str(error.value) and "0123456789" not in str(error.value)
    assert error.value.__cause__ is None and error.value.__suppress_context__ == ("is not" in str(error.value))


def test_a_missing_or_binary_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        Keys.load(tmp_path / "none.toml", {})
    (tmp_path / "keys.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not TOML"):
        Keys.load(tmp_path / "keys.toml", {})


def test_a_short_key_in_the_environment_is_refused() -> None:
    with pytest.raises(InputError, match="number 2 of SEGUE_ADMIN_KEYS") as error:
        Keys.load(None, {"SEGUE_ADMIN_KEYS": f"{BOTH},short"})
    assert "short" not in str(error.value) and BOTH not in str(error.value)


def resolve_names_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: infos)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    check_binding(host, Keys({}))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "2001:db8::1"])
def test_other_addresses_need_keys(host: str, keys: Keys) -> None:
    with pytest.raises(InputError, match=r"Without keys, --host must be.*--keys FILE.*SEGUE_READ_KEYS.*secrets"):
        check_binding(host, Keys({}))
    check_binding(host, keys)


def test_names_are_resolve_names_to(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_names_to(monkeypatch, "127.0.1.1", "::1")
    check_binding("box", Keys({}))
    resolve_names_to(monkeypatch, "127.0.1.1", "192.0.2.7")
    with pytest.raises(InputError, match="'box' is not: write"):
        check_binding("box", Keys({}))


def test_a_name_that_cannot_be_resolved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_args: object, **_options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(InputError, match="'nowhere' is not an address of this machine"):
        check_binding("nowhere", Keys({}))


def test_loopback_names() -> None:
    assert all(map(is_loopback, ["localhost", "LOCALHOST", "127.0.0.1", "127.255.0.3", "::1"]))
    assert not any(map(is_loopback, ["", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "::2", "0"]))
