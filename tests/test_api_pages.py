"""The pages of docs/api_pages.py: every public name is there and documented, without a warning."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pdoc
import pytest
from api_pages import MODULES, documented, listed, public_names, write_pages

import segue
from segue import errors, testing


@pytest.fixture(scope="module")
def modules() -> dict[str, pdoc.doc.Module]:
    return documented()


def test_every_public_name_has_a_docstring(modules: dict[str, pdoc.doc.Module]) -> None:
    names = [one for module in modules.values() for one in public_names(module)]
    assert len(names) > 60, "fewer public names than expected"
    documented = (pdoc.doc.Function, pdoc.doc.Class)
    undocumented = [one.fullname for one in names if isinstance(one, documented) and not one.docstring.strip()]
    assert undocumented == []
    assert all(module.docstring.strip() for module in modules.values())


def test_a_function_shadows_the_package_of_the_same_name(modules: dict[str, pdoc.doc.Module]) -> None:
    verbs = {one.name: one for one in modules["segue"].own_members}
    assert set(verbs) == set(segue.__all__)
    assert all(isinstance(verbs[name], pdoc.doc.Function) for name in ("train", "evaluate", "load"))


def test_the_pages_name_every_public_name(tmp_path: Path) -> None:
    index = write_pages(tmp_path)
    pages = {name: (tmp_path / f"{name.replace('.', '/')}.html").read_text(encoding="utf-8") for name in MODULES}
    assert "segue.html" in index.read_text(encoding="utf-8")
    sections = {name: set(re.findall(r' id="([\w.]+)"', page)) for name, page in pages.items()}
    kinds = {name for name, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, Exception)}
    assert sections["segue"] >= {*segue.__all__, "Recommender.recommend_many"}
    assert sections["segue.testing"] >= set(testing.__all__)
    assert sections["segue.errors"] >= kinds and len(kinds) == 6
    assert sections["segue.serving.embedded"] >= {"application"}
    links = re.findall(r'href="([\w./]+\.html)', pages["segue"])
    assert {"segue/testing.html", "segue/errors.html", "segue/serving/embedded.html"} <= set(links)
    assert all((tmp_path / link).is_file() for link in links)


def test_lines_about_parameters_are_a_list() -> None:
    text = listed("Does it.\n\none: this,\n    and more. With a colon: it stays.\ntwo, three: those.")
    assert text == ("Does it.\n\n\n- **one**: this,\n    and more. With a colon: it stays.\n\n- **two, three**: those.")
