"""The demo: a shop's raw log → prepare → train → a report with baselines → recommendations → a service."""

from __future__ import annotations

import os
import shutil
import sys
import time
import webbrowser
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
from segue.evaluation.verdict import counts_sentence
from segue.folders import explained_writing, refuse_existing
from segue.recommend.recommender import Recommender
from segue.runs.read import read_report
from segue.serving.http.server import fill_histories
from segue.serving.http.server import serve as serve_runs
from segue.serving.settings import ServiceSettings
from segue.terminal import Display

SETTINGS = ("train.minutes=1.5",)  # as by `segue train --minutes 1.5`
CUSTOMERS = 3
SHOWN = 5  # purchases and recommendations shown of a customer
SEED = 11  # of the random customers


def run_demo(
    *,
    out: Path | None = None,
    serve: bool = True,
    port: int = 8000,
    quiet: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run the demo and return its results. All folders are in `out`, by default one in the cache that the next demo
    replaces."""
    console = console or Console(highlight=False, quiet=quiet)
    folder = _folder(out)
    raw, source, waited = _fetch(folder, console)
    began = time.perf_counter()
    cleaned = _clean(raw, folder, console)
    data = _prepare(cleaned, folder, console, quiet=quiet)
    model = _train(data, folder, console, quiet=quiet)
    report = read_report(model)
    _heading(console, "Measured beside the baselines")
    for text in filter(None, (table(report), counts_sentence(model.manifest))):
        console.print(text, markup=False, soft_wrap=True)
    customers = _show_customers(data, model, console)
    seconds = time.perf_counter() - began
    download = f", and the download {waited:.0f} s" if waited >= 1 else ""
    console.print(f"All of this took {seconds:.0f} s{download}.")
    console.print(f"It is kept in {folder}: try `segue recommend {folder / 'run'} --history …`.", markup=False)
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
        "folder": str(folder),
    }


def _folder(out: Path | None) -> Path:
    """Create `out`, or the demo's folder in the cache anew."""
    if out is None:
        out = shop.cache_folder() / "demo"
        with explained_writing(out):
            shutil.rmtree(out, ignore_errors=True)
    refuse_existing(out, overwrite=False)
    with explained_writing(out):
        out.mkdir(parents=True)
    return out


def _heading(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")


def _fetch(folder: Path, console: Console) -> tuple[Path, str, float]:
    """The raw log of the real shop or of the synthetic one, its source, and the seconds that it took to get."""
    _heading(console, "A shop's log")
    began = time.perf_counter()
    try:
        raw, source = shop.fetch(cache=shop.cache_folder()), shop.CREDIT
        console.print(f"{source}.", soft_wrap=True)
    except InputError as error:
        raw, source = folder / "planted.csv", "planted"
        planted.write_planted_shop(raw)
        console.print(
            f"{error}\nThe real shop's log is not available, so a synthetic shop with known habits is used instead: it "
            "shows how segue works, and says nothing about real shops.",
            markup=False,
            soft_wrap=True,
        )
    return raw, source, time.perf_counter() - began


def _clean(raw: Path, folder: Path, console: Console) -> shop.CleanLog:
    """Clean the log, and show what was removed."""
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


def _prepare(cleaned: shop.CleanLog, folder: Path, console: Console, *, quiet: bool) -> api.Data:
    """Run `segue prepare`, and show its summary."""
    _heading(console, "Prepared")
    with Display(quiet=quiet) as display:
        data = api.prepare(
            cleaned.events,
            out=folder / "data",
            user="customer",
            item="item",
            time="time",
            value="quantity",
            items=cleaned.items,
            progress=display.stage,
        )
    for line in summary_lines(data.manifest):
        console.print(line, markup=False, soft_wrap=True)
    console.print(
        f"{data.manifest['repeat_share']:.1%} of the last purchases are products that the customer had bought before: "
        "this is a log of repeat purchases, so items of the history may be recommended. The items of an invoice have "
        "the same time and stay in its order.",
        soft_wrap=True,
    )
    return data


def _train(data: api.Data, folder: Path, console: Console, *, quiet: bool) -> Recommender:
    """Run `segue train`, with a progress bar."""
    _heading(console, "Training")
    console.print(f"The recipe default with {', '.join(SETTINGS)}.")
    with Display(quiet=quiet) as display:
        model = api.train(data, out=folder / "run", overrides=SETTINGS, progress=display.step)
    chosen = model.manifest["training"]
    console.print(f"{chosen['epochs']} epochs; epoch {chosen['best_epoch']} was the best on validation and is kept.")
    return model


def _show_customers(data: api.Data, model: Recommender, console: Console) -> list[dict[str, Any]]:
    """Show a few customers: their purchases, the recommendations, and the next purchase."""
    _heading(console, f"{CUSTOMERS} random customers")
    offsets, facts = np.asarray(data.sequences.offsets), []
    for user in np.random.default_rng(SEED).choice(data.sequences.n_users, CUSTOMERS, replace=False):
        numbers = np.asarray(data.sequences.items[offsets[user] : offsets[user + 1]], dtype=np.int64)
        ids, titles = data.vocabulary.ids(numbers), data.vocabulary.titles(numbers)
        names = [title or identifier for identifier, title in zip(ids, titles, strict=True)]
        answer = model.recommend(ids[:-1], k=SHOWN)
        before = set(ids[:-1])
        answers = [(one.title or one.id) + (" (again)" if one.id in before else "") for one in answer.items]
        customer = data.users.ids(np.array([user]))[0]
        _show_customer(console, customer, names[:-1], answers)
        hit = "which is among them" if ids[-1] in answer.ids else "which is not among them"
        console.print(f"The next purchase was {names[-1]}, {hit}.\n", markup=False, soft_wrap=True)
        facts.append({"customer": customer, "bought": names[:-1][-SHOWN:], "recommended": answers, "next": names[-1]})
    return facts


def _show_customer(console: Console, customer: str, purchases: list[str], answers: list[str]) -> None:
    shown = purchases[-SHOWN:]
    side = Table(box=None, pad_edge=False, title=f"Customer {customer}", title_justify="left")
    side.add_column(f"bought (the last {len(shown)} of {len(purchases)})")
    side.add_column("recommended")
    for index in range(max(len(shown), len(answers))):
        side.add_row(*(Text(column[index] if index < len(column) else "") for column in (shown, answers)))
    console.print(side)


def _serve(folder: Path, console: Console, *, port: int) -> None:
    """Serve the run and its page until interrupted; the store has the customers of the log."""
    _heading(console, "Live")
    store = str(folder / "events.sqlite")
    console.print(fill_histories(store, folder / "data").message, markup=False, soft_wrap=True)

    def started(address: str) -> None:
        console.print(
            f"[bold]{address}[/bold] is the page: build a history, see the recommendations and why. {address}/schema "
            "describes the API. Ctrl-C ends the demo.",
            soft_wrap=True,
        )
        if console.is_terminal and _has_a_screen():
            webbrowser.open(address)

    serve_runs(ServiceSettings(runs=(folder / "run",), store=store, log_level="warning"), port=port, started=started)


def _has_a_screen() -> bool:
    """Whether a browser would open in a window instead of this terminal."""
    return sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ))
