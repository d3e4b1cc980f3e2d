"""Settings by kind: TOML tables and `--set` values ↔ msgspec structs.

A choice is a union of `Kind` structs. Each variant has only its own keys and names itself with `tag=`. In a table the
key `kind` names the variant; a plain string stands for the variant with its defaults.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import tomllib
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from segue.errors import SettingsError

KIND = "kind"
MAX_SHOWN = 100  # characters of a value in a message
Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
PositiveNumber = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Rate = Annotated[float, Meta(ge=0, lt=1)]
"""A share below 1, such as a dropout rate."""
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


@functools.cache
def variants_of(annotation: Any) -> dict[str, type[Kind]]:
    """The variants of a choice by name; empty if the annotation is no choice."""
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    if not all(isinstance(member, type) and issubclass(member, Kind) for member in members):
        return {}
    return {kind_of(member): member for member in members}


def is_section(annotation: Any) -> bool:
    """Whether values of this type are tables: a choice or a plain struct."""
    return bool(variants_of(annotation)) or (isinstance(annotation, type) and issubclass(annotation, Struct))


@functools.cache
def fields_of(struct: type[Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """The fields of a struct by name; msgspec evaluates their annotations anew at each call."""
    return {field.name: field for field in msgspec.structs.fields(struct)}


@dataclass(frozen=True, slots=True)
class _Key:
    """A key of the settings: its type, its path in messages and its default."""

    type: Any
    path: str
    default: Any = None
    owner: str = ""
    """The choice that the key belongs to, such as model = 'hstu'."""

    def variant(self, value: Any) -> tuple[type[Struct], Table]:
        """The struct of the kind that a value names, and the value as a table."""
        variants = variants_of(self.type)
        if isinstance(value, str) and variants:
            value = {KIND: value}
        if not isinstance(value, dict):
            what = f"a kind ({', '.join(variants)}) or a table" if variants else "a table of keys"
            raise SettingsError(f"{self.path or 'The settings'} must be {what}, got {_shown(value)}.")
        if not variants:
            return self.type, value
        allowed = f"Allowed: {', '.join(variants)}."
        if KIND not in value and self.default is None and len(variants) > 1:
            raise SettingsError(f"{self.path} needs the key {KIND!r}. {allowed}")
        kind = value.get(KIND, kind_of(self.default) if self.default is not None else next(iter(variants)))
        if not isinstance(kind, str) or kind not in variants:
            owner = f" with {self.owner}" if self.owner else ""
            hint = near(str(kind), variants)
            raise SettingsError(f"{self.path} has no kind {_shown(kind)}{owner}{hint}. {allowed}")
        return variants[kind], {KIND: kind, **value}

    def inner(self, struct: type[Struct], name: str) -> _Key:
        """The key `name` of a struct; an unknown name is refused."""
        fields = fields_of(struct)
        owner = f"{self.path} = {kind_of(struct)!r}" if issubclass(struct, Kind) else ""
        if name not in fields:
            whose = owner or (f"[{self.path}]" if self.path else "the settings")
            keys = f"Allowed: {', '.join(fields)}." if fields else "It has no keys."
            what = "key" if self.path else "section"
            raise SettingsError(f"There is no {what} {name!r} in {whose}{near(name, fields)}. {keys}")
        field = fields[name]
        default = None if field.default is msgspec.NODEFAULT else field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        return _Key(field.type, f"{self.path}.{name}" if self.path else name, default, owner)

    def element(self, index: int) -> _Key:
        """An element of a list."""
        return _Key(get_args(_bare(self.type))[0], f"{self.path}[{index}]")


def decode(table: Any, annotation: type[S], *, path: str = "", default: Struct | None = None) -> S:
    """The struct that a table describes; unknown names and invalid values are refused. `path` names the table in
    messages; `default` is the variant of a choice if the table names none."""
    key = _Key(annotation, path, default)
    full = _expanded(table, key)
    try:
        settings = msgspec.convert(full, annotation)
    except msgspec.ValidationError as error:
        raise _refusal(error, full, key) from error
    _refuse_infinite(settings, path)
    return settings


def _expanded(value: Any, key: _Key) -> Any:
    """The value with every choice as a table with its kind; all kinds and keys are checked."""
    if get_origin(_bare(key.type)) is tuple and isinstance(value, list | tuple):
        return [_expanded(inner, key.element(index)) for index, inner in enumerate(value)]
    if not is_section(key.type):
        return value
    struct, table = key.variant(value)
    names = [name for name in table if name != KIND or not issubclass(struct, Kind)]
    kind = {KIND: table[KIND]} if issubclass(struct, Kind) else {}
    return kind | {name: _expanded(table[name], key.inner(struct, name)) for name in names}


def override(value: Any, annotation: Any, keys: list[str], new: Any, *, path: str = "", default: Any = None) -> Table:
    """Set one key of a table. A new kind starts from its own defaults; the same kind keeps the keys that are set."""
    table: Table = _overridden(value, _Key(annotation, path, default), keys, new)
    return table


def _overridden(value: Any, key: _Key, keys: list[str], new: Any) -> Any:
    if not is_section(key.type):
        if keys:
            name = ".".join(keys)
            raise SettingsError(f"{key.path} is a single value and has no key {name!r}: set {key.path} itself.")
        return new
    struct, table = key.variant(msgspec.to_builtins(key.default) if value is None else value)
    is_kind = issubclass(struct, Kind)
    if keys and (keys != [KIND] or not is_kind):
        name, *rest = keys
        return {**table, name: _overridden(table.get(name), key.inner(struct, name), rest, new)}
    if is_kind and isinstance(new, str):
        return table if new == table[KIND] else _expanded(new, key)
    return {KIND: table[KIND], **new} if is_kind and isinstance(new, dict) else new


def near(name: str, allowed: Any) -> str:
    """A hint with the allowed name closest to a wrong one, empty if none is close."""
    matches = difflib.get_close_matches(name, list(allowed), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _refusal(error: msgspec.ValidationError, value: Any, key: _Key) -> SettingsError:
    """The SettingsError of a validation error, with the key, what was expected and what came."""
    what, _, path = str(error).partition(" - at `$")
    for name in re.findall(r"\w+", path):
        if isinstance(value, dict):
            key = key.inner(key.variant(value)[0], name)
            value = value[name]
        else:
            key = key.element(int(name))
            value = value[int(name)]
    if what.startswith("Object missing required field"):
        return SettingsError(f"{key.path} needs the key {what.rpartition(' ')[2].strip('`')!r}.")
    if get_origin(key.type) is Literal:
        allowed = ", ".join(map(str, get_args(key.type)))
        return SettingsError(f"{key.path} has no value {_shown(value)}. Allowed: {allowed}.")
    expected = type_text(key.type) if key.type is bool else f"a {type_text(key.type)}"
    return SettingsError(f"{key.path}: expected {expected}, got {_shown(value)}.")


def _shown(value: Any) -> str:
    """A value for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def _bare(annotation: Any) -> Any:
    """An annotation without its bounds."""
    return get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation


def type_text(annotation: Any, *, plural: str = "") -> str:
    """A type in the words of the manual and of messages, such as `whole number >= 1`; `plural` is "s" in lists."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(arguments)
    if hasattr(annotation, "__metadata__"):
        meta, text = annotation.__metadata__[0], type_text(arguments[0], plural=plural)
        if meta.min_length is not None and arguments[0] is str:
            return f"{text} of at least {meta.min_length} character"
        if meta.min_length is not None:
            return text.replace("list of", f"list of {meta.min_length} or more", 1)
        signs = {">=": meta.ge, ">": meta.gt, "<=": meta.le, "<": meta.lt}
        bounds = [f"{sign} {bound}" for sign, bound in signs.items() if bound is not None]
        return f"{text} {' and '.join(bounds)}"
    if origin is tuple:
        return f"list{plural} of {type_text(arguments[0], plural='s')}"
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(one) for one in arguments if one is not types.NoneType)
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return f"table{plural} of {', '.join(annotation.__struct_fields__)}"
    names = {int: f"whole number{plural}", float: f"number{plural}", bool: "true | false", str: f"text{plural}"}
    return names.get(annotation, str(annotation))


def _refuse_infinite(value: Any, path: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{path}: expected a finite number, got {value}.")
    if isinstance(value, tuple):
        for inner in value:
            _refuse_infinite(inner, path)
    if isinstance(value, Struct):
        for name in value.__struct_fields__:
            _refuse_infinite(getattr(value, name), f"{path}.{name}" if path else name)


def parse_toml(content: bytes, name: str) -> Table:
    """The tables of a TOML file; `name` is its name in messages."""
    try:
        return tomllib.loads(content.decode())
    except ValueError as error:  # also a number of more digits than Python reads
        raise SettingsError(f"{name} is not TOML: {str(error).partition(';')[0]}.") from error


def to_toml(sections: dict[str, Table]) -> str:
    """Sections as TOML, every key written out, so that a run folder shows all of its settings."""
    lines: list[str] = []
    for section, table in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in _short(table).items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    """A value as TOML, which equals JSON but for tables."""
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
