"""The command line, one file a command. It reads arguments and prints; other packages are imported when needed."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from segue.cli import add_items, demo, embed, evaluate, explain, export, prepare, recipes, recommend, serve, train, tune
from segue.errors import InputError, SegueError
from segue.terminal import print_error, print_line

app = typer.Typer(
    name="segue",
    help="Turn an event log into live, explained next-item recommendations.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    demo.demo,
    prepare.prepare,
    train.train,
    recipes.recipes,
    recipes.settings,
    tune.tune,
    evaluate.evaluate,
    evaluate.compare,
    recommend.recommend,
    embed.embed,
    recommend.similar,
    explain.explain,
    recommend.plan,
    add_items.add_items,
    export.export,
    serve.serve,
):
    app.command()(command)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from importlib.metadata import version as installed

        print_line(f"segue {installed('segue')}")
        raise typer.Exit


def main() -> NoReturn:
    """Run the command line. A SegueError is printed as its message, without a traceback."""
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    try:
        _refuse_other_encodings(sys.argv[1:])
        app(prog_name="segue")
    except SegueError as error:
        print_error(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _refuse_other_encodings(arguments: list[str]) -> None:
    """Refuse arguments that are not UTF-8: Python turns their bytes into surrogates, which cannot be written."""
    for argument in arguments:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise InputError(f"The argument {argument!r} is not UTF-8; write ids in UTF-8, and rename such a file.")
