"""`segue serve`: runs → a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segue.cli.options import Json, print_result
from segue.terminal import Display, print_error


def serve(
    runs: Annotated[list[Path], typer.Argument(help="A run folder, or two to compare them live.", metavar="RUN...")],
    data: Annotated[Path | None, typer.Option(help="A data folder whose histories fill an empty store.")] = None,
    store: Annotated[str, typer.Option(help="The store of events: a SQLite file, or postgresql://…")] = "segue.sqlite",
    runs_folder: Annotated[
        Path | None, typer.Option("--runs", help="A folder of runs that PUT /model may switch to.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8000,
    workers: Annotated[int, typer.Option(help="Worker processes.", min=1)] = 1,
    cache_mb: Annotated[
        int,
        typer.Option(
            help="Megabytes of the KV cache of each worker: with it, only a user's new events are encoded.", min=0
        ),
    ] = 256,
    keys: Annotated[
        Path | None,
        typer.Option(
            help='A TOML file of API keys: read = ["…"], write = […], admin = […]. Also: SEGUE_READ_KEYS and so on.'
        ),
    ] = None,
    rate_limit: Annotated[
        float | None,
        typer.Option(help="Requests a second of one client; each worker allows its share.", show_default="no limit"),
    ] = None,
    origins: Annotated[
        list[str] | None,
        typer.Option("--cors", help="A site whose pages may send requests. Repeatable.", show_default="none"),
    ] = None,
    log_level: Annotated[
        str, typer.Option(help="debug, info (every request), warning or error; JSON on standard error.")
    ] = "info",
    json: Json = False,
) -> None:
    """Recommend over HTTP, live: every event changes the next answer."""
    from segue.evaluation.report import stored_verdict
    from segue.serving.http.server import fill_histories
    from segue.serving.http.server import serve as serve_runs
    from segue.serving.settings import ServiceSettings

    settings = ServiceSettings(
        runs=tuple(runs),
        runs_folder=runs_folder,
        store=store,
        host=host,
        workers=workers,
        cache_mb=cache_mb,
        keys=keys,
        rate_limit=rate_limit,
        origins=tuple(origins or ()),
        log_level=log_level,  # type: ignore[arg-type]  # refused with a message when logging is set up
    )

    def fill() -> None:
        if data is not None:
            with Display(quiet=json) as display:
                report = fill_histories(
                    store,
                    data,
                    lambda done, events: display.show("filling the store", done, events, f"{done:,} events"),
                )
            print_error(report.message)

    def started(url: str) -> None:
        database = f"a {store.partition('://')[0]} database" if "://" in store else store  # no passwords on screens
        verdicts = {str(run): verdict for run in runs if (verdict := stored_verdict(run)) is not None}
        print_result(
            {"url": url, "documentation": f"{url}/schema", "verdicts": verdicts},
            f"Serving {', '.join(map(str, runs))} at {url} — documentation at {url}/schema — stop with Ctrl-C.",
            *(f"{run}: {verdict.sentences[0]}" for run, verdict in verdicts.items()),
            f"Events are kept in {database}.",
            json=json,
        )

    serve_runs(settings, port=port, started=started, before=fill)
