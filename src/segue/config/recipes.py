"""The recipes shipped with the package, and recipe files."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from segue.errors import SettingsError
from segue.kinds import Table, near, parse_toml

DEFAULT_RECIPE = "default"


def recipe_names() -> list[str]:
    """The recipes shipped with the package."""
    return sorted(path.name.removesuffix(".toml") for path in _recipes().iterdir() if path.name.endswith(".toml"))


def read_recipe(recipe: str | Path) -> Table:
    """A shipped recipe by name, or a TOML file, as tables."""
    name = str(recipe)
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise SettingsError(f"The recipe file {name} does not exist.")
        return parse_toml(path.read_bytes(), name)
    if name not in recipe_names():
        raise SettingsError(
            f"There is no recipe {name!r}{near(name, recipe_names())}; "
            f"there are {', '.join(recipe_names())}, or name a FILE.toml."
        )
    return parse_toml((_recipes() / f"{name}.toml").read_bytes(), name)


def _recipes() -> Any:
    return resources.files("segue") / "recipes"
