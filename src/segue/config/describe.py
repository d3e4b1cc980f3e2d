"""Every key of the settings with its kinds, type, default and docstring, read from the structs."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from segue.config.settings import SECTIONS, Settings, refuse_unknown_section
from segue.errors import SettingsError
from segue.kinds import is_section, kind_of, near, type_text, variants_of


class KeyDescription(Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    """The path of the key, such as objective.loss.calibration."""
    type: str
    default: Any
    """The default; UNSET if a value is required."""
    required: bool = False
    text: str
    of: tuple[str, ...] = ()
    """The kinds that have the key, such as objective.loss=bce|gbce or model!=bert4rec; empty if it is always there."""
    kinds: dict[str, str] = {}
    """The kinds of a choice, each with what it is."""
    others: tuple[KeyDescription, ...] = ()
    """The key as other kinds have it, if its type, default or meaning differs."""

    def lines(self, heading: str = "", shown: Collection[str] = ()) -> str:
        """The key as lines for a terminal; `shown` are kinds that were explained before."""
        default = "required" if self.required else msgspec.json.encode(self.default).decode()
        owner = f"   with {' and '.join(self.of)}" if self.of else ""
        kind = " | ".join(self.kinds) if shown else self.type
        lines = [f"{heading or self.name} = {default}   ({kind}){owner}"]
        lines.append(textwrap.indent(textwrap.fill(self.text, 112), "    "))
        for name, text in self.kinds.items():
            if name not in shown:
                lines.append(textwrap.indent(textwrap.fill(f"{name}: {text}", 108, subsequent_indent="    "), "      "))
        lines += [other.lines(" " * len(self.name), self.kinds) for other in self.others]
        return "\n".join(lines)


def describe(part: str | None = None) -> list[KeyDescription]:
    """The keys of a section or of one key, such as model.items; by default of all sections but `about`."""
    texts, keys = field_texts(Settings), dict[str, KeyDescription]()
    for field in msgspec.structs.fields(Settings):
        if field.name not in SECTIONS:
            continue
        for key in _described(field.name, field.type, field.default, texts[field.name]):
            first = keys.get(key.name)
            keys[key.name] = key if first is None else msgspec.structs.replace(first, others=(*first.others, key))
    if part is None:
        return list(keys.values())
    matches = [key for name, key in keys.items() if f"{name}.".startswith(f"{part}.")]
    if not matches:
        section = part.partition(".")[0]
        refuse_unknown_section(section)
        raise SettingsError(
            f"There is no key {part!r} in the settings{near(part, keys)}; `segue settings {section}` lists all keys of "
            f"{section}."
        )
    return matches


def _described(name: str, annotation: Any, default: Any, text: str) -> Iterator[KeyDescription]:
    """A key and the keys below it, once for each group of kinds that have the same."""
    if not is_section(annotation):
        required = default is msgspec.NODEFAULT
        shown = msgspec.UNSET if required else msgspec.to_builtins(default)
        yield KeyDescription(name=name, type=type_text(annotation), default=shown, required=required, text=text)
        return
    variants = variants_of(annotation)
    if variants:
        documents = {kind: inspect.cleandoc(struct.__doc__ or "") for kind, struct in variants.items()}
        kinds = {kind: document.partition("\n\n")[0].replace("\n", " ") for kind, document in documents.items()}
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
        lacking = [kind for kind in structs if kind not in having]
        of = f"{name}={'|'.join(having)}" if len(having) <= len(lacking) else f"{name}!={'|'.join(lacking)}"
        yield msgspec.structs.replace(key, of=(of, *key.of) if lacking else key.of)


@cache
def field_texts(struct: type[Struct]) -> dict[str, str]:
    """The docstrings under the fields of a struct and of those that it extends."""
    texts: dict[str, str] = {}
    for base in reversed(struct.__bases__):
        texts |= field_texts(base) if issubclass(base, Struct) and not base.__module__.startswith("msgspec") else {}
    body = ast.parse(textwrap.dedent(inspect.getsource(struct))).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return texts
