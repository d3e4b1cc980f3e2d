"""`segue recommend`, `segue similar` and `segue plan`: a run and a history → items."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from segue.cli.options import (
    Engine,
    Exclude,
    History,
    Json,
    KeepSeen,
    MovedData,
    Only,
    Run,
    SparkRemote,
    User,
    print_result,
    read_history,
    read_ids,
    refuse_two_histories,
)
from segue.terminal import Display

if TYPE_CHECKING:
    from segue.recommend.answer import Plan, Recommendation

K = Annotated[int, typer.Option("-k", help="How many items.")]


def recommend(
    run: Run,
    history: History = None,
    user: User = None,
    users: Annotated[
        Path | None, typer.Option(help="A file with a column of users and perhaps one of times; needs --out.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the recommendations for --users, as Parquet.")] = None,
    k: K = 10,
    data: MovedData = None,
    keep_seen: KeepSeen = None,
    exclude: Exclude = None,
    only: Only = None,
    engine: Engine = "local",
    spark_remote: SparkRemote = None,
    json: Json = False,
) -> None:
    """Recommend the next items, for one history or for many users."""
    if sum(choice is not None for choice in (history, user, users)) != 1:
        raise typer.BadParameter("give exactly one of --history, --user and --users", param_hint="--history")
    if (users is None) != (out is None):
        raise typer.BadParameter("--users and --out belong together", param_hint="--out")
    if users is None and (engine, spark_remote) != ("local", None):
        raise typer.BadParameter("Spark is only for --users", param_hint="--engine")
    from segue import api

    model = api.Recommender.open(run)
    excluded, allowed = read_ids(exclude), read_ids(only)
    if users is None or out is None:
        entries = read_history(model, history, user, data)
        _print_answer(model.recommend(entries, k, exclude=excluded, only=allowed, keep_seen=keep_seen), json=json)
        return
    with Display(quiet=json) as display:
        report = api.recommend_users(
            model,
            users,
            out=out,
            k=k,
            data=data,
            exclude=excluded,
            only=allowed,
            keep_seen=keep_seen,
            engine=engine,
            spark_remote=spark_remote,
            progress=lambda done: display.show("recommending", done, 0, f"{done:,} users"),
        )
    print_result(
        {"folder": str(out), **msgspec.to_builtins(report)},
        f"Wrote {report.rows:,} recommendations for {report.users:,} users to {out}. {report.fallback:,} users got the "
        f"most popular items, {report.unknown_users:,} of them because the log does not have them.",
        json=json,
    )


def similar(run: Run, item: Annotated[str, typer.Argument(help="An item id.")], k: K = 10, json: Json = False) -> None:
    """List the items nearest to an item."""
    from segue import api

    _print_answer(api.Recommender.open(run).similar(item, k), json=json)


def _print_answer(answer: Recommendation, *, json: bool) -> None:
    from segue.recommend.answer import UNTIMED

    rows = [(item.id, item.score, item.title) for item in answer.items]
    print_result(answer, *_lines(answer, UNTIMED if answer.untimed else "", rows), json=json)


def _lines(answer: Recommendation | Plan, note: str, rows: list[tuple[str, float, str | None]]) -> Iterator[str]:
    """Yield the notes on an answer, then a line for each item."""
    if answer.fallback:
        yield "No item of the history is known: these are the most popular ones."
    if answer.unknown:
        yield f"Unknown items, left out: {', '.join(answer.unknown)}"
    yield note
    width = max((len(identifier) for identifier, _, _ in rows), default=0)
    for rank, (identifier, score, title) in enumerate(rows, start=1):
        yield f"{rank:3}  {identifier:{width}}  {score:9.4f}  {title or ''}".rstrip()


def plan(
    run: Run,
    history: History = None,
    user: User = None,
    n: Annotated[int, typer.Option("-n", help="How many items.")] = 5,
    beam: Annotated[int | None, typer.Option(help="Width of the beam search.", show_default="8")] = None,
    data: MovedData = None,
    keep_seen: KeepSeen = None,
    exclude: Exclude = None,
    only: Only = None,
    repeats: Annotated[bool, typer.Option("--repeats", help="Let an item come twice.")] = False,
    json: Json = False,
) -> None:
    """Recommend the next items as one plan: a basket, a playlist, a course."""
    refuse_two_histories(history, user)
    from segue import api
    from segue.recommend.answer import BEAM

    model = api.Recommender.open(run)
    answer = model.plan(
        read_history(model, history, user, data),
        n,
        beam=BEAM if beam is None else beam,
        exclude=read_ids(exclude),
        only=read_ids(only),
        keep_seen=keep_seen,
        repeats=repeats,
    )
    rows = [(item.id, item.log_probability, item.title) for item in answer.items]
    score = f"The plan's log-probability is {answer.score:.4f}."
    print_result(answer, *_lines(answer, "", rows), score, json=json)
