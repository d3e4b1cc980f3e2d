"""`segue add-items`: a run folder with new items, as whole as the one it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import CommandLine, tree
from planted_logs import cycle_log

import segue
from segue.api import add_items, prepare, train
from segue.errors import FolderError
from segue.recommend.recommender import Recommender

CATALOGUE = "item,title,kind\n" + "".join(f"i{number:02},Thing {number},k{number % 3}\n" for number in range(12))


@pytest.fixture(name="run", scope="module")
def run_by_category(tmp_path_factory: pytest.TempPathFactory, quick_recipe: Path) -> Path:
    """A run on the cycle log whose items are known by their kind, which is certain after every item."""
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "log.csv").write_text(cycle_log())
    (folder / "items.csv").write_text(CATALOGUE)
    data = prepare(folder / "log.csv", items=folder / "items.csv", out=folder / "data")
    train(data, out=folder / "run", recipe=quick_recipe, overrides=["model.category=kind", "train.epochs=12"])
    return folder / "run"


def test_the_new_run_answers_is_served_and_can_be_added_to_again(line: CommandLine, run: Path) -> None:
    before = tree(run)
    (line.folder / "new.csv").write_text("item,title,kind,colour\nfresh,Fresh thing,k1,red\nraw,,k2,blue\nraw,,k0,\n")
    said = line.does("add-items", run, "new.csv", "--out", "run2")
    assert "Made run2: 2 items added" in said and "14 in all" in said
    assert "1 rows were left out" in said and "colour" in said
    assert tree(run) == before
    facts = json.loads((line.folder / "run2" / "manifest.json").read_text())
    assert (facts["items"], facts["added"]) == (14, {"items": 2, "run": "run"})
    # after k0 comes k1: the new item is as good as the old ones of its kind, and comes after them
    answer = line.answers("recommend", "run2", "--history", "i05,i06", "-k", 5)
    assert [item["id"] for item in answer["items"]] == ["i01", "i04", "i07", "i10", "fresh"]
    assert answer["items"][4]["title"] == "Fresh thing"
    assert line.answers("explain", "run2", "--history", "i05,i06", "--item", "fresh")["rank"] == 5
    (line.folder / "newer.csv").write_text("item,title,kind\nfresh,Renamed,k2\nlast,Last,k1\n")
    made = line.answers("add-items", "run2", "newer.csv", "--out", "run3")
    assert made == {"run": "run3", "added": 1, "changed": 1, "duplicates": 0, "items": 15, "ignored": []}
    third = segue.load(line.folder / "run3")
    assert isinstance(third, Recommender)
    assert third.manifest["added"] == {"items": 3, "run": "run"}
    assert third.recommend(["i05", "i06"], k=5).ids[4] == "last"
    assert third.recommend(["i06", "i07"], k=6).ids[4:] == ["fresh", "raw"], "what was added again has its place still"


def test_what_cannot_be_added_leaves_nothing_behind(line: CommandLine, run: Path, cycle_run: Path) -> None:
    (line.folder / "new.csv").write_text("item,title,kind\ni03,Known,k1\n")
    line.refuses("add-items", run, "new.csv", "--out", "run2", says=("'i03'", "already"))
    (line.folder / "new.csv").write_text("item,title,kind\nfresh,Fresh,unheard\n")
    line.refuses("add-items", run, "new.csv", "--out", "run2", says=("'fresh'", "'unheard'"))
    line.refuses("add-items", cycle_run, "new.csv", "--out", "run2", says=("by their ids alone", "model.items"))
    line.refuses("add-items", run, "nowhere.csv", "--out", "run2", says=("nowhere.csv",))
    (line.folder / "new.csv").write_text("item,title,kind\nfresh,Fresh,k1\n")
    line.refuses("add-items", run, "new.csv", "--out", run, says=("exists",))
    assert sorted(path.name for path in line.folder.iterdir()) == ["new.csv"]


def test_a_run_with_new_items_is_measured_and_trained_as_the_one_before(run: Path, tmp_path: Path) -> None:
    """Its data do not have them."""
    new = tmp_path / "new.csv"
    new.write_text("item,kind\nfresh,k1\n")
    add_items(run, new, out=tmp_path / "run2")
    with pytest.raises(FolderError, match="measure the run that they were added to, run"):
        segue.evaluate(tmp_path / "run2")
    with pytest.raises(FolderError, match="resume the run"):
        train(run.parent / "data", out=tmp_path / "run2", resume=True, overrides=["train.epochs=4"])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("run2")] == ["run2"]
