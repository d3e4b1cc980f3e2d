"""`segue recipes`: the shipped settings. `segue settings`: every key that settings can have."""

from __future__ import annotations

from typing import Annotated

import typer

from segue.cli.options import Json, print_result

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
    texts = {name: (name, about.summary, about.paper, about.scored) for name, about in known.items()}
    print_result({"recipes": known}, *("\n  ".join(filter(None, text)) for text in texts.values()), json=json)


def settings(section: Section = None, json: Json = False) -> None:
    """Print every key of the settings with its kinds, type, default and meaning, as --set and recipes take them."""
    from segue import api

    keys = api.settings(section)
    print_result({"settings": keys}, *(key.lines() for key in keys), json=json)
