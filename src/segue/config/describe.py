"""Every key of the settings with its kinds, type, default and docstring, read from the structs."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Struct

from segue.config.settings import Settings
from segue.errors import SettingsError
from segue.kinds import is_section, kind_of, near, variants_of


class KeyDescription(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One key of the settings."""

    name: str
    """The path, such as objective.loss.calibration."""
    type: str
    default: Any
    text: str
    of: tuple[str, ...] = ()
    """The kinds that have the key, such as objective.loss=bce|gbce; empty for a key that is always there."""
    kinds: dict[str, str] = {}
    """The kinds of a choice, each with what it is."""

    def lines(self) -> str:
        """The key as lines for a terminal."""
        default = "required" if self.default is msgspec.UNSET else msgspec.json.encode(self.default).decode()
        owner = f"   with {' and '.join(self.of)}" if self.of else ""
        lines = [f"{self.name} = {default}   ({self.type}){owner}"]
        lines.append(textwrap.indent(textwrap.fill(self.text, 112), "    "))
        for kind, text in self.kinds.items():
            lines.append(textwrap.indent(textwrap.fill(f"{kind}: {text}", 108, subsequent_indent="    "), "      "))
        return "\n".join(lines)


def describe(section: str | None = None) -> list[KeyDescription]:
    """The keys of one section, or of all but `about`."""
    sections = [field for field in msgspec.structs.fields(Settings) if field.name != "about"]
    names = [field.name for field in sections]
    if section is not None and section not in names:
        raise SettingsError(
            f"There is no section {section!r} in the settings{near(section, names)}. Allowed: {', '.join(names)}."
        )
    texts = field_texts(Settings)
    return [
        key
        for field in sections
        if section in (None, field.name)
        for key in _described(field.name, field.type, field.default, texts[field.name])
    ]


def _described(name: str, annotation: Any, default: Any, text: str) -> Iterator[KeyDescription]:
    variants = variants_of(annotation)
    if not is_section(annotation):
        shown = msgspec.UNSET if default is msgspec.NODEFAULT else msgspec.to_builtins(default)
        yield KeyDescription(name=name, type=type_text(annotation), default=shown, text=text)
        return
    if variants:
        kinds = {kind: _summary(struct) for kind, struct in variants.items()}
        chosen = kind_of(default) if isinstance(default, Struct) else next(iter(variants))
        yield KeyDescription(name=name, type="kind", default=chosen, text=text, kinds=kinds)
    structs = variants or {"": annotation}
    owners: dict[bytes, tuple[KeyDescription, list[str]]] = {}  # kinds with the same key, by the key's description
    for kind, struct in structs.items():
        texts = field_texts(struct)
        for field in msgspec.structs.fields(struct):
            for key in _described(f"{name}.{field.name}", field.type, field.default, texts[field.name]):
                owners.setdefault(msgspec.json.encode(key), (key, []))[1].append(kind)
    for key, having in owners.values():
        of = () if len(having) == len(structs) else (f"{name}={'|'.join(having)}",)
        yield msgspec.structs.replace(key, of=(*of, *key.of))


def field_texts(struct: type[Struct]) -> dict[str, str]:
    """The docstrings under the fields of a struct and of those that it extends."""
    texts: dict[str, str] = {}
    for owner in reversed(struct.__mro__):
        if not issubclass(owner, Struct) or owner.__module__.startswith("msgspec"):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return texts


def type_text(annotation: Any) -> str:
    """An annotation as a reader of the manual knows it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(arguments)
    if hasattr(annotation, "__metadata__"):
        meta = annotation.__metadata__[0]
        bounds = [
            f"{sign} {bound:g}"
            for sign, bound in ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt))
            if bound is not None
        ]
        return " ".join([type_text(arguments[0]), " and ".join(bounds)]).strip()
    if origin is tuple:
        return f"list of {type_text(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return "table of " + ", ".join(annotation.__struct_fields__)
    names = {int: "whole number", float: "number", bool: "true | false", str: "text"}
    return names.get(annotation, str(annotation))


def _summary(struct: type[Struct]) -> str:
    return inspect.cleandoc(struct.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
