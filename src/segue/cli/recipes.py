"""`segue recipes`: the shipped settings."""

from __future__ import annotations

from segue.cli.options import Json, print_json
from segue.terminal import print_line


def recipes(json: Json = False) -> None:
    """List the shipped recipes: what each is for and what it scored."""
    from segue import api

    known = api.recipes()
    if json:
        print_json({"recipes": known})
        return
    for name, about in known.items():
        print_line(f"{name}\n  {about.summary}\n  {about.paper}" + (f"\n  {about.scored}" if about.scored else ""))
