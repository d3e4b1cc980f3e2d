"""The command line. It speaks with people; `api`, `serve`, `tune` and `demo` do the work, imported when needed."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import msgspec
import typer

from segue.errors import InputError, SegueError
from segue.terminal import Display, MeasureDisplay, PrepareDisplay, TrainDisplay, complain, duration, epoch_of, say

if TYPE_CHECKING:
    from segue.evaluation.report import Report
    from segue.evaluation.window.report import WindowReport
    from segue.tuning import TrainingProgress, TrialRecord, Tuning

app = typer.Typer(
    name="segue",
    help="Turns an event log into live, explained next-item recommendations.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output and nothing else there.")]
Run = Annotated[Path, typer.Argument(help="A run folder made by `segue train`.", show_default=False)]
DataOption = Annotated[
    Path | None, typer.Option("--data", help="The run's data folder, if it has moved.", show_default=False)
]
K = Annotated[int, typer.Option("-k", help="How many items.")]
History = Annotated[
    str | None, typer.Option("--history", help="Ids, oldest first, as one CSV row; or @FILE.", show_default=False)
]
User = Annotated[str | None, typer.Option("--user", help="A user of the log.", show_default=False)]
KeepSeen = Annotated[
    bool | None,
    typer.Option(
        "--keep-seen/--no-keep-seen",
        help="Whether items of the history may be answered.",
        show_default="as the run was measured",
    ),
]
EngineOption = Annotated[
    Literal["local", "spark"],
    typer.Option("--engine", help="Who works: this machine, or a Spark cluster that sees the same folders."),
]
SparkRemote = Annotated[
    str | None,
    typer.Option(
        "--spark-remote",
        help="A Spark Connect server, as sc://host:port.",
        show_default="SPARK_REMOTE, or a local session",
    ),
]


def main() -> NoReturn:
    """Run the command line; what segue refuses is said in a sentence, without a traceback."""
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]  # as logs are read
    try:
        _refuse_other_encodings(sys.argv[1:])
        app()
    except SegueError as error:
        complain(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _refuse_other_encodings(arguments: list[str]) -> None:
    """Ids and names are UTF-8 everywhere; Python carries other bytes along as surrogates, which nothing can write."""
    for argument in arguments:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise InputError(f"The argument {argument!r} is not UTF-8; write ids in UTF-8, and rename such a file.")


def answer(body: Any) -> None:
    """The JSON object of `--json`."""
    say(msgspec.json.encode(body).decode())


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from importlib.metadata import version as installed

        say(f"segue {installed('segue')}")
        raise typer.Exit


@app.command()
def demo(
    no_serve: Annotated[bool, typer.Option("--no-serve", help="End after the answers, without the service.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to keep what is made.", show_default="a temporary folder")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="Where the service listens.")] = 8000,
    json: Json = False,
) -> None:
    """The whole path on the embedded data set: prepare, train, evaluate, answers, then the service."""
    from segue.demo import run_demo

    summary = run_demo(out=out, serve=not no_serve, port=port, quiet=json)
    if json:
        answer(summary)


@app.command()
def prepare(
    files: Annotated[
        list[str],  # not Path, which takes a slash out of s3a://…
        typer.Argument(
            help="Log files: CSV, TSV, JSON lines, Parquet; plain, gzip or zstd. For --engine spark also folders, "
            "addresses such as s3a://… and the name of a table.",
            metavar="FILE...",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The data folder to make.", show_default=False)],
    user: Annotated[
        str | None, typer.Option("--user", help="Column of the user.", show_default="found by name")
    ] = None,
    item: Annotated[
        str | None, typer.Option("--item", help="Column of the item.", show_default="found by name")
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", help="Column of the time.", show_default="found by name")
    ] = None,
    value: Annotated[
        str | None,
        typer.Option("--value", help="Column of a number of the event, such as a rating.", show_default=False),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option("--kind", help="Column of the kind of event, such as click or buy.", show_default=False),
    ] = None,
    items: Annotated[
        list[Path] | None,
        typer.Option(
            "--items",
            help="A catalogue: id, title and any further columns; again for vectors, X.npy with X.ids.txt beside it.",
            show_default=False,
        ),
    ] = None,
    min_user: Annotated[int, typer.Option("--min-user", min=1, help="Events a user needs.")] = 5,
    min_item: Annotated[int, typer.Option("--min-item", min=1, help="Events an item needs.")] = 5,
    split: Annotated[str, typer.Option("--split", help="last, or time:WHEN.")] = "last",
    time_format: Annotated[
        str | None,
        typer.Option(
            "--time-format", help="How times are written, such as %d.%m.%Y %H:%M.", show_default="found by content"
        ),
    ] = None,
    time_zone: Annotated[
        str | None, typer.Option("--time-zone", help="Zone of times without an offset.", show_default="UTC")
    ] = None,
    order: Annotated[
        str | None,
        typer.Option("--order", help="Column that orders events of equal time.", show_default="file and row"),
    ] = None,
    drop_duplicates: Annotated[
        bool, typer.Option("--drop-duplicates", help="Keep one of each set of equal rows.")
    ] = False,
    max_rejected: Annotated[
        str, typer.Option("--max-rejected", help="Share of unusable rows above which nothing is written.")
    ] = "1%",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the data folder if it exists.")] = False,
    engine: EngineOption = "local",
    spark_remote: SparkRemote = None,
    json: Json = False,
) -> None:
    """Turn log files into a data folder."""
    from segue import api

    with PrepareDisplay(quiet=json) as display:
        data = api.prepare(
            files,
            out=out,
            user=user,
            item=item,
            time=time,
            value=value,
            kind=kind,
            items=items,
            min_user=min_user,
            min_item=min_item,
            split=split,
            time_format=time_format,
            time_zone=time_zone,
            order=order,
            drop_duplicates=drop_duplicates,
            max_rejected=max_rejected,
            overwrite=overwrite,
            engine=engine,
            spark_remote=spark_remote,
            progress=display,
        )
    if json:
        answer({"folder": str(out), **data.manifest})
        return
    from segue.data.write.summary import summary_lines

    for line in summary_lines(data.manifest):
        say(line)
    say(f"Made {out}. Next: segue train {out} --out RUN")


@app.command()
def train(
    data: Annotated[Path, typer.Argument(help="A data folder made by `segue prepare`.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="The run folder to make.", show_default=False)],
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="A name of `segue recipes`, or a FILE.toml.", show_default="default")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=value over the recipe; may be repeated.", show_default=False),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option("--from", help="A run to go on from, on a log that has grown.", show_default=False),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after an interruption, or with more epochs.")] = False,
    all_events: Annotated[
        bool, typer.Option("--all", help="Once the epochs are chosen, train on every event, for serving.")
    ] = False,
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Processes of this machine, which share every batch.")
    ] = 1,
    json: Json = False,
) -> None:
    """Train a model on a data folder and measure it."""
    from segue import api
    from segue.runs.read import read_report

    with TrainDisplay(quiet=json) as display, MeasureDisplay(quiet=json) as measured:
        try:
            model = api.train(
                data,
                out=out,
                recipe=recipe,
                overrides=changes or (),
                from_run=from_run,
                resume=resume,
                all_events=all_events,
                processes=processes,
                progress=display,
                measured=measured,
            )
        except KeyboardInterrupt:
            display.stop()
            complain(_way_on(data, out, processes))
            sys.exit(130)
    if json:
        answer({"folder": str(out), **model.manifest, "report": read_report(model)})
        return
    say(_report_table(read_report(model)))
    say(f"Made {out}. Next: segue recommend {out} --history ID,ID,… or segue serve {out}")


def _way_on(data: Path, out: Path, processes: int) -> str:
    """What to do after Ctrl-C."""
    partial = out.parent / f"{out.name}.partial"
    if not partial.exists():
        return "Interrupted before training began; nothing was written."
    again = f"segue train {data} --out {out} --resume" + (f" --processes {processes}" if processes > 1 else "")
    return f"Interrupted; what was learned is in {partial}. Go on with: {again}"


@app.command()
def recipes(json: Json = False) -> None:
    """The recipes shipped with the package: what each is for and what it scored."""
    from segue import api

    known = api.recipes()
    if json:
        answer({"recipes": known})
        return
    for name, about in known.items():
        say(f"{name}\n  {about.summary}\n  {about.paper}" + (f"\n  {about.scored}" if about.scored else ""))


@app.command()
def tune(
    data: Annotated[Path, typer.Argument(help="A data folder made by `segue prepare`.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="The folder for the search.", show_default=False)],
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", help="Where to begin: a name of `segue recipes`, or a FILE.toml.", show_default="as segue train"
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials", min=1, help="Trainings, over every resume.", show_default="20, or as many as --minutes lets"
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="How long to search, this time.", show_default="no limit")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a search, interrupted or not.")] = False,
    json: Json = False,
) -> None:
    """Search for the loss, length, width and so on that suit a data folder; the result is a recipe."""
    from segue.tuning import tune as search
    from segue.tuning import tuning_table

    with Display(quiet=json) as display:
        try:
            tuning = search(
                data,
                out=out,
                recipe=recipe,
                trials=trials,
                minutes=minutes,
                resume=resume,
                progress=lambda trial, step: _show_trial(display, trial, step),
                ended=lambda record, tuning: display.line(_trial_line(record, tuning)),
            )
        except KeyboardInterrupt:
            display.stop()
            complain(_way_on_tuning(data, out, trials, minutes))
            sys.exit(130)
    best = out / "best.toml"
    if json:
        answer({**msgspec.to_builtins(tuning), "best": tuning.best, "best_recipe": str(best)})
        return
    say(tuning_table(tuning))
    say(f"\nMade {best}. Next: segue train {data} --out RUN --recipe {best}")


def _show_trial(display: Display, trial: int, step: TrainingProgress) -> None:
    facts = f"loss {step.loss:.4f}  {step.tokens_per_second:,.0f} tokens/s  {duration(step.seconds_left)} left"
    display.show(f"trial {trial}, {epoch_of(step)}", step.done, step.total, facts)


def _trial_line(record: TrialRecord, tuning: Tuning) -> str:
    """A trial that is over: how it did, and what was new in it."""
    from segue.tuning import changes_text

    score = "no score" if record.score is None else f"ndcg@10 {record.score:.4f}"
    best = " (best)" if record == tuning.best else ""
    ending = "" if record.outcome == "finished" else f", {record.outcome}"
    took = "" if record.seconds is None else f"  {duration(record.seconds)}"
    return f"trial {record.trial:3}  {score}{best}  {record.epochs} epochs{ending}{took}  {changes_text(record)}"


def _way_on_tuning(data: Path, out: Path, trials: int | None, minutes: float | None) -> str:
    """What to do after Ctrl-C."""
    if not out.exists():
        return "Interrupted before the search began; nothing was written."
    bounds = ("" if trials is None else f" --trials {trials}") + ("" if minutes is None else f" --minutes {minutes:g}")
    return f"Interrupted; what was found is in {out}. Go on with: segue tune {data} --out {out}{bounds} --resume"


@app.command()
def evaluate(
    run: Run,
    data: DataOption = None,
    at: Annotated[
        str | None, typer.Option("--at", help="Depths of the list, such as 1,5,10,50.", show_default="the run's")
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(
            "--days",
            help="Ask for everything of so many days after the moment that the data was split at.",
            show_default="the next event",
        ),
    ] = None,
    ages: Annotated[
        str | None,
        typer.Option(
            "--ages", help="Also with histories that end so many days earlier, such as 0,1,3,7,14.", show_default="0"
        ),
    ] = None,
    interest: Annotated[
        str | None,
        typer.Option(
            "--interest",
            help="With --days: a column of the catalogue, such as a category, in which lists are varied or not.",
            metavar="COLUMN",
            show_default="the run's",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure a run and the baselines with one ruler."""
    from segue import api

    depths, old = None if at is None else _depths(at), None if ages is None else _ages(ages)
    with MeasureDisplay(quiet=json) as display:
        report = api.evaluate(run, data=data, at=depths, days=days, ages=old, interest=interest, progress=display)
    if json:
        answer(report)
    else:
        say(_report_table(report))


def _report_table(report: Report | WindowReport) -> str:
    from segue.evaluation.report import Report, table
    from segue.evaluation.window.report import window_table

    return table(report) if isinstance(report, Report) else window_table(report)


def _write_page(page: str, path: Path) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} could not be written: {error.strerror or error}.") from error


def _ages(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--ages takes days with commas between, such as 0,1,3,7,14, got {text!r}.") from None


def _depths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--at takes whole numbers with commas between, such as 1,5,10,50, got {text!r}.") from None


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN...", show_default=False)],
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a self-contained page with plots.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Set runs side by side, with intervals and significance."""
    from segue import api

    comparison = api.compare(runs)
    if html is not None:
        from segue.evaluation.comparison_page import html as page

        _write_page(page(comparison), html)
    if json:
        answer(comparison)
    else:
        from segue.evaluation.compare import comparison_table

        say(comparison_table(comparison))
        if html is not None:
            say(f"Wrote {html}.")


@app.command()
def recommend(
    run: Run,
    history: History = None,
    user: User = None,
    users: Annotated[
        Path | None,
        typer.Option(
            "--users", help="A file with a column of users and perhaps one of times; needs --out.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The folder for the answers to --users, as Parquet.", show_default=False),
    ] = None,
    k: K = 10,
    data: DataOption = None,
    keep_seen: KeepSeen = None,
    exclude: Annotated[
        str | None,
        typer.Option("--exclude", help="Ids that are no answer, as one CSV row; or @FILE.", show_default=False),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option("--only", help="Ids that may be an answer, as one CSV row; or @FILE.", show_default=False),
    ] = None,
    engine: EngineOption = "local",
    spark_remote: SparkRemote = None,
    json: Json = False,
) -> None:
    """The items that come next: one answer, or a batch."""
    if sum(choice is not None for choice in (history, user, users)) != 1:
        raise typer.BadParameter("give exactly one of --history, --user and --users", param_hint="--history")
    if (users is None) != (out is None):
        raise typer.BadParameter("--users and --out belong together", param_hint="--out")
    if users is None and (engine, spark_remote) != ("local", None):
        raise typer.BadParameter("a single answer is made here; Spark is for --users", param_hint="--engine")
    from segue import api

    model = api.Recommender.open(run)
    limits: dict[str, Any] = {
        "keep_seen": keep_seen,
        "exclude": None if exclude is None else read_row(exclude),
        "only": None if only is None else read_row(only),
    }
    if users is not None and out is not None:
        with Display(quiet=json) as display:
            facts = api.recommend_users(
                model,
                users,
                out=out,
                k=k,
                data=data,
                engine=engine,
                spark_remote=spark_remote,
                progress=lambda done: display.show("answering", done, 0, f"{done:,} users"),
                **limits,
            )
        if json:
            answer({"folder": str(out), **msgspec.to_builtins(facts)})
        else:
            say(
                f"Wrote {facts.rows:,} answers for {facts.users:,} users to {out}; {facts.fallback:,} of them were "
                f"answered by popularity, {facts.unknown_users:,} because the log does not know them."
            )
        return
    entries = api.history_of(model, user, data=data) if user is not None else read_row(history or "")
    result = model.recommend(entries, k, **limits)
    if json:
        answer(result)
    else:
        _show(result)


def read_row(text: str) -> list[Any]:
    """Entries from one CSV row, or from @FILE: CSV rows, or a JSON list (whose entries may carry times)."""
    if not text.startswith("@"):
        return _cells(text, "The list of ids")
    path = Path(text[1:])
    try:
        content = path.read_bytes().decode("utf-8-sig")  # not read_text: an id may hold any kind of line end
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text: {error}.") from error
    if content.lstrip().startswith("["):
        try:
            return msgspec.json.decode(content, type=list[Any])
        except msgspec.MsgspecError as error:
            raise InputError(f"{path} looks like JSON but is no list of entries: {error}.") from error
    return _cells(content, str(path))


def _cells(text: str, name: str) -> list[str]:
    """Every cell of every row."""
    try:
        return [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]
    except csv.Error as error:
        raise InputError(f"{name} cannot be read as CSV: {error}.") from error


def _show(result: Any) -> None:
    if result.fallback:
        say("No item of the history is known: these are the most popular ones.")
    if result.unknown:
        say(f"Unknown items, left out: {', '.join(result.unknown)}")
    if result.untimed:
        from segue.recommend.answer import UNTIMED

        say(UNTIMED)
    width = max((len(item.id) for item in result.items), default=0)
    for rank, item in enumerate(result.items, start=1):
        say(f"{rank:3}  {item.id:{width}}  {item.score:9.4f}  {item.title or ''}".rstrip())


@app.command()
def embed(
    run: Run,
    data: Annotated[Path, typer.Option("--data", help="The data folder whose users are embedded.", show_default=False)],
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="The folder to make; after a kill, the same command goes on with it.", show_default=False
        ),
    ],
    since: Annotated[
        Path | None,
        typer.Option(
            "--since", help="An earlier folder of the same run: only users with new events.", show_default=False
        ),
    ] = None,
    items: Annotated[bool, typer.Option("--items", help="Write the items' embeddings too.")] = False,
    engine: EngineOption = "local",
    spark_remote: SparkRemote = None,
    json: Json = False,
) -> None:
    """A vector for everyone in a log, as Parquet; its inner product with an item's is that item's score."""
    from segue import api

    with Display(quiet=json) as display:
        try:
            facts = api.embed(
                run,
                data,
                out=out,
                since=since,
                items=items,
                engine=engine,
                spark_remote=spark_remote,
                progress=lambda done, total: display.show("embedding", done, total, f"{done:,} of {total:,} users"),
            )
        except KeyboardInterrupt:
            display.stop()
            complain(_way_on_embedding(out))
            sys.exit(130)
    if json:
        answer({"folder": str(out), **msgspec.to_builtins(facts)})
        return
    say(
        f"Made {out}: {facts.rows:,} embeddings of {facts.width} features, for {facts.users:,} users; "
        f"{facts.unchanged:,} have no new events, {facts.unknown:,} no item that the run knows."
    )
    if items:
        say(f"Beside them are {facts.items:,} of items.")


def _way_on_embedding(out: Path) -> str:
    """What to do after Ctrl-C."""
    partial = out.parent / f"{out.name}.partial"
    if not partial.exists():
        return "Interrupted before anything was written."
    return f"Interrupted; the parts that are done are in {partial}. The same command goes on with them."


@app.command()
def similar(
    run: Run,
    item: Annotated[str, typer.Argument(help="An item id.", show_default=False)],
    k: K = 10,
    json: Json = False,
) -> None:
    """The items nearest to an item."""
    from segue import api

    result = api.Recommender.open(run).similar(item, k)
    if json:
        answer(result)
    else:
        _show(result)


@app.command()
def explain(
    run: Run,
    history: History = None,
    user: User = None,
    item: Annotated[
        str | None, typer.Option("--item", help="The item to explain.", show_default="the best answer")
    ] = None,
    data: DataOption = None,
    keep_seen: KeepSeen = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a self-contained page that draws it.", show_default=False)
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option("--layer", help="Draw the attention of this layer, by number or name.", show_default=False),
    ] = None,
    head: Annotated[
        int | None, typer.Option("--head", min=1, help="Draw the attention of this head.", show_default=False)
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(
            "--query", help="Show where this entry looks, by its number; ? is the question.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Why an item is answered: what each entry of the history did, and where the model looked."""
    if (history is None) == (user is None):
        raise typer.BadParameter("give exactly one of --history and --user", param_hint="--history")
    if json and (layer, head, query) != (None, None, None):
        raise typer.BadParameter("--json has all of the attention; leave out --layer, --head and --query")
    from segue import api
    from segue.recommend.explain.attention_text import View
    from segue.recommend.explain.text import lines

    model = api.Recommender.open(run)
    entries = api.history_of(model, user, data=data) if user is not None else read_row(history or "")
    explanation = model.explain(entries, item, keep_seen=keep_seen)
    shown = list(lines(explanation, View(layer=layer, head=head, query=query)))
    if html is not None:
        from segue.recommend.explain.page import html as page

        _write_page(page(explanation), html)
    if json:
        answer(explanation)
        return
    for text in shown:
        say(text)
    if html is not None:
        say(f"Wrote {html}.")


@app.command()
def plan(
    run: Run,
    history: History = None,
    user: User = None,
    n: Annotated[int, typer.Option("-n", help="How many items.")] = 5,
    beam: Annotated[
        int | None, typer.Option("--beam", help="How many plans are followed side by side.", show_default="8")
    ] = None,
    data: DataOption = None,
    keep_seen: KeepSeen = None,
    exclude: Annotated[
        str | None,
        typer.Option("--exclude", help="Ids that are no part of it, as one CSV row; or @FILE.", show_default=False),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option("--only", help="Ids that may be part of it, as one CSV row; or @FILE.", show_default=False),
    ] = None,
    repeats: Annotated[bool, typer.Option("--repeats", help="Let an item come twice.")] = False,
    json: Json = False,
) -> None:
    """The next items as one plan: a basket, a playlist, a course."""
    if (history is None) == (user is None):
        raise typer.BadParameter("give exactly one of --history and --user", param_hint="--history")
    from segue import api
    from segue.recommend.answer import BEAM

    model = api.Recommender.open(run)
    entries = api.history_of(model, user, data=data) if user is not None else read_row(history or "")
    result = model.plan(
        entries,
        n,
        beam=BEAM if beam is None else beam,
        exclude=None if exclude is None else read_row(exclude),
        only=None if only is None else read_row(only),
        keep_seen=keep_seen,
        repeats=repeats,
    )
    if json:
        answer(result)
        return
    if result.fallback:
        say("No item of the history is known: these are the most popular ones.")
    if result.unknown:
        say(f"Unknown items, left out: {', '.join(result.unknown)}")
    width = max((len(item.id) for item in result.items), default=0)
    for place, item in enumerate(result.items, start=1):
        say(f"{place:3}  {item.id:{width}}  {item.log_probability:9.4f}  {item.title or ''}".rstrip())
    say(f"The plan's log-probability is {result.score:.4f}.")


@app.command()
def add_items(
    run: Run,
    items: Annotated[
        list[Path],
        typer.Argument(
            help="A catalogue, and arrays of vectors, as `segue prepare` takes them.",
            metavar="FILE...",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The run folder to make.", show_default=False)],
    item: Annotated[
        str | None, typer.Option("--item", help="Column of the item's id.", show_default="found by name")
    ] = None,
    json: Json = False,
) -> None:
    """A run with new items, known by their content; nothing is trained."""
    from segue import api

    made = api.add_items(run, items, out=out, item=item)
    if json:
        answer(made)
        return
    changed = f", {made.changed:,} changed" if made.changed else ""
    say(f"Made {out}: {made.added:,} items added to {run}{changed}; {made.items:,} in all.")
    if made.duplicates:
        say(f"{made.duplicates:,} rows were left out because their id came before.")
    if made.ignored:
        say(f"Columns that the run does not have, left aside: {', '.join(made.ignored)}.")
    say(f"Next: segue recommend {out} --history ID,ID")


@app.command()
def export(
    run: Run,
    onnx: Annotated[Path, typer.Option("--onnx", help="The file to make.", show_default=False)],
    json: Json = False,
) -> None:
    """Write a run as one ONNX file, for answers without torch."""
    from segue import api

    with PrepareDisplay(quiet=json) as display:
        made = api.export(run, onnx=onnx, progress=display)
    if json:
        answer(made)
        return
    say(
        f"Made {onnx}: {made.items:,} items, {made.bytes:,} bytes. Its answers differ from torch's by "
        f"{made.difference:.0e} at most."
    )
    if made.note:
        say(made.note)
    say(f'Next, in Python: from segue.slim import SlimRecommender; SlimRecommender.open("{onnx}").recommend([…])')


@app.command()
def serve(
    runs: Annotated[
        list[Path],
        typer.Argument(help="A run folder, or two to set them side by side.", metavar="RUN...", show_default=False),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", help="A data folder whose histories fill the store, if it is empty.", show_default=False
        ),
    ] = None,
    store: Annotated[
        str,
        typer.Option("--store", help="Where events are kept: a SQLite file, or postgresql://…"),
    ] = "segue.sqlite",
    runs_folder: Annotated[
        Path | None,
        typer.Option("--runs", help="A folder of runs that PUT /model may switch to.", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="The port to listen on.")] = 8000,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes that answer.")] = 1,
    cache_mb: Annotated[
        int,
        typer.Option(
            "--cache-mb",
            min=0,
            help="Megabytes of encoded histories that each worker keeps: a new event is then encoded alone.",
        ),
    ] = 256,
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys",
            help='A TOML file of API keys: read = ["…"], write = […], admin = […]. Also: SEGUE_READ_KEYS and so on.',
            show_default=False,
        ),
    ] = None,
    rate_limit: Annotated[
        float | None,
        typer.Option(
            "--rate-limit",
            help="Requests a second that one client may send; each worker allows its share.",
            show_default="no limit",
        ),
    ] = None,
    origins: Annotated[
        list[str] | None,
        typer.Option("--cors", help="A site whose pages may ask; may be repeated.", show_default="none"),
    ] = None,
    log_level: Annotated[
        str, typer.Option("--log-level", help="debug, info (every request), warning or error; JSON on standard error.")
    ] = "info",
    json: Json = False,
) -> None:
    """Answer over HTTP, live: every event changes the next answer."""
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
        log_level=log_level,  # type: ignore[arg-type]  # refused with a sentence where the logs begin
    )

    def fill() -> None:
        if data is not None:
            with Display(quiet=json) as display:
                filled = fill_histories(
                    store,
                    data,
                    lambda done, events: display.show("filling the store", done, events, f"{done:,} events"),
                )
            complain(filled.message)

    def started(url: str) -> None:
        if json:
            answer({"url": url, "documentation": f"{url}/schema"})
        else:
            kept = f"a {store.partition('://')[0]} database" if "://" in store else store  # no passwords on screens
            say(f"Serving {', '.join(map(str, runs))} at {url} — documentation at {url}/schema — stop with Ctrl-C.")
            say(f"Events are kept in {kept}.")

    serve_runs(settings, port=port, started=started, before=fill)


if __name__ == "__main__":
    main()
