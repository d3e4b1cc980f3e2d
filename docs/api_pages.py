"""The docstrings of what is public → pages: `python docs/api_pages.py FOLDER`."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pdoc

MODULES = ("segue", "segue.errors", "segue.testing", "segue.testing.laws", "segue.serving.embedded", "segue.slim")
"""The modules that other programs import: the public functions, the errors, the laws of models, the service to embed,
and answers without torch."""


def documented() -> dict[str, pdoc.doc.Module]:
    """Each module as pdoc sees it. The first leads to the others."""
    pages = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            getattr(module, public)  # loaded on first use: pdoc sees only what is loaded
        pages[name] = pdoc.doc.Module(module)
        pages[name].submodules = []
        for one in public_names(pages[name]):
            if isinstance(one, pdoc.doc.Class) and not issubclass(one.obj, Exception):
                adopt_inherited(one)
            one.docstring = listed(one.docstring)
    first, *others = pages.values()
    first.submodules = others
    return pages


def adopt_inherited(one: pdoc.doc.Class) -> None:
    """Show what a class inherits from segue's other classes as its own: their modules have no page."""
    bases = [base for base in one.inherited_members if base[0].startswith("segue.")]
    one.own_members = [*(member for base in bases for member in one.inherited_members[base]), *one.own_members]
    one.inherited_members = {base: own for base, own in one.inherited_members.items() if base not in bases}


def public_names(module: pdoc.doc.Module) -> Iterator[pdoc.doc.Doc[Any]]:
    """Its public functions and classes, and theirs."""
    waiting: list[pdoc.doc.Doc[Any]] = list(module.own_members)
    while waiting:
        one = waiting.pop()
        if not one.name.startswith("_"):
            yield one
            waiting += one.own_members if isinstance(one, pdoc.doc.Class) else []


def listed(docstring: str) -> str:
    """A docstring whose lines about parameters, `name: what it is`, are a list."""
    return re.sub(r"^(\w+(?:, \w+)*): ", r"\n- **\1**: ", docstring, flags=re.MULTILINE)


def write_pages(folder: Path) -> Path:
    """A page a module; gives the one that leads to them."""
    pdoc.render.configure(docformat="markdown", show_source=False, search=False)
    modules = documented()
    for name, module in modules.items():
        page = folder / f"{name.replace('.', '/')}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(pdoc.render.html_module(module, modules), encoding="utf-8")
    index = folder / "index.html"
    index.write_text(pdoc.render.html_index(modules), encoding="utf-8")
    return index


if __name__ == "__main__":
    sys.stdout.write(f"{write_pages(Path(sys.argv[1]))}\n")
