"""The whole path, shown: a shop's raw log → prepare → train → measured against the baselines → answers → a service."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from segue import api
from segue.data.write.summary import summary_lines
from segue.demo import planted, shop
from segue.errors import InputError
from segue.evaluation.report import table
from segue.folders import refuse_existing
from segue.recommend.recommender import Recommender
from segue.runs.read import read_report
from segue.serving.http.server import fill_histories
from segue.serving.http.server import serve as serve_runs
from segue.serving.settings import ServiceSettings
from segue.terminal import MeasureDisplay, PrepareDisplay, TrainDisplay

# Half of the customers have at most 45 purchases, so a shorter window than the recipe's; and epochs for three minutes.
SETTINGS = ("model.length=100", "train.epochs=16", "train.patience=3")
CUSTOMERS = 3
SHOWN = 5  # purchases and recommendations shown of a customer
LOT = 11  # the seed of the lot that draws the customers


def run_demo(
    *,
    out: Path | None = None,
    serve: bool = True,
    port: int = 8000,
    quiet: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Walk the path and give what was found. What is made stays in `out`, or else in a folder removed at the end."""
    console = console or Console(highlight=False, quiet=quiet)
    with _folder(out) as folder:
        raw, source, waited = _fetched(folder, console)
        began = time.perf_counter()
        cleaned = _cleaned(raw, folder, console)
        data = _prepared(cleaned, folder, console, quiet=quiet)
        model = _trained(data, folder, console, quiet=quiet)
        report = read_report(model)
        _heading(console, "Measured against simpler ways")
        console.print(table(report), markup=False, soft_wrap=True)
        customers = _customers(data, model, console)
        seconds = time.perf_counter() - began
        download = f", and getting the log {waited:.0f} s" if waited >= 1 else ""
        console.print(f"All of this took {seconds:.0f} s{download}.")
        if out is not None:
            console.print(
                f"It is kept in {out}: `segue recommend {out / 'run'} --history …` answers too.", markup=False
            )
        if serve:
            _serve(folder, console, port=port)
    return {
        "source": source,
        "rows": cleaned.rows,
        "kept": cleaned.kept,
        "removed": cleaned.removed,
        "counts": data.manifest["counts"],
        "report": report,
        "customers": customers,
        "seconds": round(seconds, 1),
        "folder": None if out is None else str(out),
    }


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """`out`, newly made; or a temporary one."""
    if out is not None:
        refuse_existing(out, overwrite=False)
        try:
            out.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"{out} cannot be made ({error.strerror}); name another folder with --out.") from error
        yield out
        return
    folder = Path(tempfile.mkdtemp(prefix="segue-demo-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _heading(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")


def _fetched(folder: Path, console: Console) -> tuple[Path, str, float]:
    """The raw log of the real shop or of the planted one, what it is, and the seconds it took to get."""
    _heading(console, "A shop's log")
    began = time.perf_counter()
    try:
        raw, source = shop.fetch(cache=shop.cache_folder()), shop.CREDIT
        console.print(f"{source}.", soft_wrap=True)
    except InputError as error:
        raw, source = folder / "planted.csv", "planted"
        planted.write_planted_shop(raw)
        console.print(
            f"{error}\nThe real shop's log is not at hand, so a made-up shop stands in, whose customers follow planted "
            "habits: what follows shows how segue works, and says nothing about real shops.",
            markup=False,
            soft_wrap=True,
        )
    return raw, source, time.perf_counter() - began


def _cleaned(raw: Path, folder: Path, console: Console) -> shop.Cleaned:
    """What a shop would leave out, counted."""
    cleaned = shop.clean(raw, out=folder)
    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(justify="right")
    rows.add_column()
    rows.add_row(f"{cleaned.rows:,}", "rows in the log")
    for reason, count in cleaned.removed.items():
        rows.add_row(f"−{count:,}", reason)
    rows.add_row(f"{cleaned.kept:,}", "purchases kept")
    console.print(rows)
    return cleaned


def _prepared(cleaned: shop.Cleaned, folder: Path, console: Console, *, quiet: bool) -> api.Data:
    """`segue prepare`, and what it found."""
    _heading(console, "Prepared")
    with PrepareDisplay(quiet=quiet) as display:
        data = api.prepare(
            cleaned.events,
            out=folder / "data",
            user="customer",
            item="item",
            time="time",
            value="quantity",
            items=cleaned.items,
            progress=display,
        )
    for line in summary_lines(data.manifest):
        console.print(line, markup=False, soft_wrap=True)
    console.print(
        f"{data.manifest['repeat_share']:.1%} of the last purchases are products that the customer had bought before: "
        "this is a log of repeat purchases, so what was bought stays among the answers. The items of an invoice have "
        "one time; their order is that of the till.",
        soft_wrap=True,
    )
    return data


def _trained(data: api.Data, folder: Path, console: Console, *, quiet: bool) -> Recommender:
    """`segue train`, with a bar."""
    _heading(console, "Training")
    console.print(f"The recipe default with {', '.join(SETTINGS)}.")
    with TrainDisplay(quiet=quiet) as training, MeasureDisplay(quiet=quiet) as measuring:
        model = api.train(data, out=folder / "run", overrides=SETTINGS, progress=training, measured=measuring)
    chosen = model.manifest["training"]
    console.print(f"{chosen['epochs']} epochs; on validation epoch {chosen['best_epoch']} was the best, and is kept.")
    return model


def _customers(data: api.Data, model: Recommender, console: Console) -> list[dict[str, Any]]:
    """A few customers: what they bought, what is recommended, what they bought next."""
    _heading(console, f"{CUSTOMERS} customers, drawn by lot")
    offsets, found = np.asarray(data.sequences.offsets), []
    for user in np.random.default_rng(LOT).choice(data.sequences.n_users, CUSTOMERS, replace=False):
        numbers = np.asarray(data.sequences.items[offsets[user] : offsets[user + 1]], dtype=np.int64)
        ids, titles = data.vocabulary.ids(numbers), data.vocabulary.titles(numbers)
        names = [title or identifier for identifier, title in zip(ids, titles, strict=True)]
        answer = model.recommend(ids[:-1], k=SHOWN)
        before = set(ids[:-1])
        answers = [(one.title or one.id) + (" (again)" if one.id in before else "") for one in answer.items]
        customer = data.users.ids(np.array([user]))[0]
        _show_customer(console, customer, names[:-1], answers)
        hit = "which is among them" if ids[-1] in answer.ids else "which is not among them"
        console.print(f"What came next was {names[-1]}, {hit}.\n", markup=False, soft_wrap=True)
        found.append({"customer": customer, "bought": names[:-1][-SHOWN:], "recommended": answers, "next": names[-1]})
    return found


def _show_customer(console: Console, customer: str, bought: list[str], answers: list[str]) -> None:
    shown = bought[-SHOWN:]
    side = Table(box=None, pad_edge=False, title=f"Customer {customer}", title_justify="left")
    side.add_column(f"bought (the last {len(shown)} of {len(bought)})")
    side.add_column("recommended")
    for index in range(max(len(shown), len(answers))):
        side.add_row(*(Text(column[index] if index < len(column) else "") for column in (shown, answers)))
    console.print(side)


def _serve(folder: Path, console: Console, *, port: int) -> None:
    """The service with its page, until interrupted; it knows the customers of the log."""
    _heading(console, "Live")
    store = str(folder / "events.sqlite")
    console.print(fill_histories(store, folder / "data").message, markup=False, soft_wrap=True)

    def started(address: str) -> None:
        console.print(
            f"[bold]{address}[/bold] is the page: build a history, see what comes next and why. {address}/schema "
            "describes the service. Ctrl-C ends the demo.",
            soft_wrap=True,
        )
        if console.is_terminal and _has_a_screen():
            webbrowser.open(address)

    serve_runs(ServiceSettings(runs=(folder / "run",), store=store, log_level="warning"), port=port, started=started)


def _has_a_screen() -> bool:
    """Whether a browser would open in a window, and not in the middle of this terminal."""
    return sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ))
