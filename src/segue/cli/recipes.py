"""`segue recipes`: the shipped settings. `segue settings`: every key that settings can have."""

from __future__ import annotations

from typing import Annotated

import typer

from segue.cli.options import Json, print_json
from segue.terminal import print_line

Section = Annotated[
    str | None,
    typer.Argument(
        help="A section (model, objective, train, evaluate, index) or a key, such as model.items.",
        show_default="all sections",
    ),
]


def recipes(json: Json = False) -> None:
    """List the shipped recipes: what each is for and what it scored."""
    from segue import api

    known = api.recipes()
    if json:
        print_json({"recipes": known})
        return
    for name, about in known.items():
        print_line(f"{name}\n  {about.summary}\n  {about.paper}" + (f"\n  {about.scored}" if about.scored else ""))


def settings(section: Section = None, json: Json = False) -> None:
    """Print every key of the settings with its kinds, type, default and meaning, as --set and recipes take them."""
    from segue import api

    keys = api.settings(section)
    if json:
        print_json({"settings": keys})
        return
    for key in keys:
        print_line(key.lines())
