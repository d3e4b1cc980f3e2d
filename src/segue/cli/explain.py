"""`segue explain`: a run, a history and an item → the reasons."""

from __future__ import annotations

from typing import Annotated

import typer

from segue.cli.options import (
    History,
    Html,
    Json,
    KeepSeen,
    MovedData,
    Run,
    User,
    print_result,
    read_history,
    refuse_two_histories,
    write_page,
)


def explain(
    run: Run,
    history: History = None,
    user: User = None,
    item: Annotated[
        str | None, typer.Option(help="The item to explain.", show_default="the best recommendation")
    ] = None,
    data: MovedData = None,
    keep_seen: KeepSeen = None,
    html: Html = None,
    layer: Annotated[str | None, typer.Option(help="Draw the attention of this layer, by number or name.")] = None,
    head: Annotated[int | None, typer.Option(help="Draw the attention of this head.", min=1)] = None,
    query: Annotated[
        str | None, typer.Option(help="Show what this entry attends to, by its number; ? is the query.")
    ] = None,
    json: Json = False,
) -> None:
    """Explain a recommendation: what each entry contributed, what counts add, and the attention weights."""
    refuse_two_histories(history, user)
    if json and (layer, head, query) != (None, None, None):
        raise typer.BadParameter("--json has all of the attention; leave out --layer, --head and --query")
    from segue import api
    from segue.recommend.explain.page import html as explanation_page
    from segue.recommend.explain.text import View, lines

    model = api.Recommender.open(run)
    explanation = model.explain(read_history(model, history, user, data), item, keep_seen=keep_seen)
    shown = "\n".join(lines(explanation, View(layer=layer, head=head, query=query)))
    if html is not None:
        write_page(explanation_page(explanation), html)
    print_result(explanation, shown, f"Wrote {html}." if html is not None else "", json=json)
