"""Options that several commands share, and the functions that read and print for them."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from segue.errors import InputError
from segue.folders import explained_writing
from segue.terminal import print_line

if TYPE_CHECKING:
    from segue.recommend.recommender import Recommender

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else.")]
Run = Annotated[Path, typer.Argument(help="A run folder made by `segue train`.")]
DataFolder = Annotated[Path, typer.Argument(help="A data folder made by `segue prepare`.")]
MovedData = Annotated[Path | None, typer.Option("--data", help="The run's data folder, if it has moved.")]
History = Annotated[str | None, typer.Option("--history", help="Item ids, oldest first, as one CSV row; or @FILE.")]
User = Annotated[str | None, typer.Option("--user", help="A user of the log.")]
KeepSeen = Annotated[
    bool | None,
    typer.Option(
        "--keep-seen/--no-keep-seen",
        help="Whether items of the history may be recommended.",
        show_default="as the run was measured",
    ),
]
Exclude = Annotated[
    str | None, typer.Option("--exclude", help="Item ids never to recommend, as one CSV row; or @FILE.")
]
Only = Annotated[str | None, typer.Option("--only", help="The only item ids to recommend, as one CSV row; or @FILE.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a self-contained page with plots.")]
Engine = Annotated[
    Literal["local", "spark"],
    typer.Option("--engine", help="Work on this machine, or on a Spark cluster that sees the same folders."),
]
SparkRemote = Annotated[
    str | None,
    typer.Option(
        "--spark-remote",
        help="A Spark Connect server, as sc://host:port.",
        show_default="SPARK_REMOTE, or a local session",
    ),
]


def print_result(body: Any, *lines: str, json: bool) -> None:
    """Print the JSON object of `--json`, or the lines that are not empty."""
    for line in (msgspec.json.encode(body).decode(),) if json else filter(None, lines):
        print_line(line)


def write_page(page: str, path: Path) -> None:
    """Write the page of `--html`."""
    with explained_writing(path, option="--html"):
        path.write_text(page, encoding="utf-8")


def read_history(model: Recommender, history: str | None, user: str | None, data: Path | None) -> list[Any]:
    """The history of `--history`, or that of `--user` in the log."""
    from segue.api import history_of

    return history_of(model, user, data=data) if user is not None else read_row(history or "")


def refuse_two_histories(history: str | None, user: str | None) -> None:
    if (history is None) == (user is None):
        raise typer.BadParameter("give exactly one of --history and --user", param_hint="--history")


def read_ids(text: str | None) -> list[Any] | None:
    """The ids of an option that may be left out."""
    return None if text is None else read_row(text)


def read_row(text: str) -> list[Any]:
    """Entries from one CSV row, or from @FILE: CSV rows, or a JSON list (whose entries may have times)."""
    if not text.startswith("@"):
        return _cells(text, "The list of ids")
    path = Path(text[1:])
    try:
        content = path.read_bytes().decode("utf-8-sig")  # not read_text: an id may hold any line end
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text: {error}.") from error
    if content.lstrip().startswith("["):
        try:
            return msgspec.json.decode(content, type=list[Any])
        except msgspec.MsgspecError as error:
            raise InputError(f"{path} looks like JSON but is not a list of entries: {error}.") from error
    return _cells(content, str(path))


def _cells(text: str, name: str) -> list[str]:
    """Every cell of every row."""
    try:
        return [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]
    except csv.Error as error:
        raise InputError(f"{name} cannot be read as CSV: {error}.") from error
