"""Settings by kind: TOML tables and `--set` values ↔ msgspec structs.

A choice is a union of `Kind` structs. Each variant has only its own keys and names itself with `tag=`. In a table the
key `kind` names the variant; a plain string stands for the variant with its defaults.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from segue.errors import SettingsError

KIND = "kind"
Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
PositiveNumber = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Rate = Annotated[float, Meta(ge=0, lt=1)]
"""A dropout rate, or another share that must leave something."""
Share = Annotated[float, Meta(ge=0, le=1)]
ProperShare = Annotated[float, Meta(gt=0, lt=1)]

Table = dict[str, Any]
S = TypeVar("S")


class Kind(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field=KIND):
    """One variant of a choice."""


def kind_of(variant: Struct | type[Struct]) -> str:
    """The name of a variant."""
    tag = variant.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def variants_of(annotation: Any) -> dict[str, type[Kind]]:
    """The variants of a choice by name; empty if the annotation is no choice."""
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    if not all(isinstance(member, type) and issubclass(member, Kind) for member in members):
        return {}
    return {kind_of(member): member for member in members}


def is_section(annotation: Any) -> bool:
    """Whether values of this type are tables: a choice or a plain struct."""
    return bool(variants_of(annotation)) or (isinstance(annotation, type) and issubclass(annotation, Struct))


def decode(table: Any, annotation: type[S], *, path: str = "", default: Struct | None = None) -> S:
    """Build the struct that a table describes. Every unknown name and every impossible value is refused; `path` names
    the table in messages, and `default` gives the variant of a choice if the table names none."""
    full = expand(table, annotation, path=path, default=default)
    try:
        settings = msgspec.convert(full, annotation)
    except msgspec.ValidationError as error:
        raise _refusal(error, full, annotation, path) from error
    _refuse_infinite(settings, path)
    return settings


def expand(value: Any, annotation: Any, *, path: str, default: Struct | None = None) -> Any:
    """Write every choice in a table as a table with its kind, and check all kinds and keys."""
    if not is_section(annotation):
        return value
    struct, table = _chosen(value, annotation, path, default)
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    full = {KIND: kind_of(struct)} if variants_of(annotation) else {}
    for key, inner in table.items():
        if key == KIND and variants_of(annotation):
            continue
        _refuse_unknown_key(key, struct, path)
        full[key] = expand(inner, fields[key].type, path=_join(path, key), default=_default(fields[key]))
    return full


def override(value: Any, annotation: Any, keys: list[str], new: Any, *, path: str = "", default: Any = None) -> Table:
    """Set one key of a table. A new kind starts from its own defaults; the same kind keeps the keys that are set."""
    if value is None:
        value = msgspec.to_builtins(default)
    struct, table = _chosen(value, annotation, path, default)
    table = {KIND: kind_of(struct), **table} if variants_of(annotation) else dict(table)
    key, *rest = keys
    if key == KIND and not rest and variants_of(annotation):
        return table if new == kind_of(struct) else expand(new, annotation, path=path)
    _refuse_unknown_key(key, struct, path)
    field = next(field for field in msgspec.structs.fields(struct) if field.name == key)
    here = _join(path, key)
    if rest and not is_section(field.type):
        raise SettingsError(f"{here} is a single value and has no key {'.'.join(rest)!r}: set {here} itself.")
    if variants_of(field.type) and not rest and isinstance(new, str):
        rest = [KIND]
    if not rest and isinstance(new, dict) and is_section(field.type):
        if not path:
            raise SettingsError(
                f"--set takes one key of {here} at a time, got the table {new!r}: set {here}.KEY=value."
            )
        current, _ = _chosen(table.get(key, msgspec.to_builtins(_default(field))), field.type, here, _default(field))
        new = {KIND: kind_of(current), **new} if variants_of(field.type) else new
    if rest:
        new = override(table.get(key), field.type, rest, new, path=here, default=_default(field))
    return {**table, key: new}


def _chosen(value: Any, annotation: Any, path: str, default: Struct | None) -> tuple[type[Struct], Table]:
    """The struct that a value names, and the value as a table."""
    variants = variants_of(annotation)
    if isinstance(value, str) and variants:
        value = {KIND: value}
    if not isinstance(value, dict):
        what = f"a kind ({', '.join(variants)}) or a table" if variants else "a table of keys"
        raise SettingsError(f"{path or 'The settings'} must be {what}, got {value!r}.")
    if not variants:
        return annotation, value
    if KIND not in value and default is None and len(variants) > 1:
        raise SettingsError(f"{path} needs the key {KIND!r}. Allowed: {', '.join(variants)}.")
    kind = value.get(KIND, kind_of(default) if default is not None else next(iter(variants)))
    if not isinstance(kind, str) or kind not in variants:
        raise SettingsError(f"{path} has no kind {kind!r}{near(str(kind), variants)}. Allowed: {', '.join(variants)}.")
    return variants[kind], value


def _refuse_unknown_key(key: str, struct: type[Struct], path: str) -> None:
    allowed = list(struct.__struct_fields__)
    if key in allowed:
        return
    whose = f"{path} = {kind_of(struct)!r}" if issubclass(struct, Kind) else f"[{path}]" if path else "the settings"
    keys = f"Allowed: {', '.join(allowed)}." if allowed else "It has no keys."
    what = "key" if path else "section"
    raise SettingsError(f"There is no {what} {key!r} in {whose}{near(key, allowed)}. {keys}")


def near(name: str, allowed: Any) -> str:
    """A hint at the allowed name that is most like a wrong one."""
    matches = difflib.get_close_matches(name, list(allowed), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _refusal(error: msgspec.ValidationError, table: Any, annotation: Any, path: str) -> SettingsError:
    """A validation error as a sentence with the key, what was expected and what came."""
    what, _, inside = str(error).partition(" - at `$")
    names = inside.rstrip("`").lstrip(".")
    value = table
    for name in names.split(".") if names else []:
        if isinstance(value, dict) and is_section(annotation):
            struct = variants_of(annotation).get(value.get(KIND, ""), annotation)
            annotation = next((one.type for one in msgspec.structs.fields(struct) if one.name == name), None)
        value = value.get(name, msgspec.UNSET) if isinstance(value, dict) else msgspec.UNSET
    came = "" if value is msgspec.UNSET or isinstance(value, dict) else f", got {value!r}"
    key = _join(path, names) if names else path
    if what.startswith("Object missing required field"):
        return SettingsError(f"{key} needs the key {what.rpartition(' ')[2].strip('`')!r}.")
    if get_origin(annotation) is Literal:
        return SettingsError(f"{key} has no value {value!r}. Allowed: {', '.join(map(str, get_args(annotation)))}.")
    expected = re.sub(r", got `\w+`$", "", what).replace("`", "")
    return SettingsError(f"{key}: {expected[0].lower()}{expected[1:]}{came}.")


def _refuse_infinite(settings: Any, path: str) -> None:
    for key, value in _numbers(settings, path):
        if not math.isfinite(value):
            raise SettingsError(f"{key}: expected a finite number, got {value}.")


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, Struct):
        for name in value.__struct_fields__:
            yield from _numbers(getattr(value, name), _join(path, name))
    elif isinstance(value, tuple):
        for inner in value:
            yield from _numbers(inner, path)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def parse_toml(content: bytes, name: str) -> Table:
    """The tables of a TOML file; `name` is its name in messages."""
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{name} is not TOML: {error}.") from error


def to_toml(sections: dict[str, Table]) -> str:
    """Sections as TOML, every key written out, so that a run shows all settings it was made with."""
    lines: list[str] = []
    for section, table in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in _short(table).items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    """JSON writes strings, numbers, booleans and lists as TOML does, but not tables."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml_value(inner)}" for key, inner in _short(value).items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return msgspec.json.encode(value).decode()


def _short(table: Table) -> Table:
    """The table with plain strings for the kinds that have no keys."""
    return {
        key: value[KIND] if isinstance(value, dict) and list(value) == [KIND] else value for key, value in table.items()
    }
