"""`segue add-items`: a complete run folder with new items."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import CommandLine, tree
from planted_logs import title

import segue
from segue.api import add_items, train
from segue.errors import FolderError
from segue.recommend.recommender import Recommender

HISTORY = ["i05", "i06"]


def test_the_new_run_answers_explains_and_takes_further_items(line: CommandLine, content_run: Path) -> None:
    before = tree(content_run)
    recommender = segue.load(content_run)
    assert isinstance(recommender, Recommender)
    best, second = recommender.recommend(HISTORY, k=2).ids
    new_rows = f"fresh,{title(int(best[1:]))},k1,red\nraw,{title(int(second[1:]))},k2,blue\nraw,,k0,\n"
    (line.folder / "new.csv").write_text(f"item,title,kind,colour\n{new_rows}")
    output = line.does("add-items", content_run, "new.csv", "--out", "run2")
    assert "Made run2: 2 items added" in output and "14 in all" in output
    assert "1 rows repeat an id and were left out" in output and "colour" in output
    assert tree(content_run) == before
    facts = json.loads((line.folder / "run2" / "manifest.json").read_text())
    assert (facts["items"], facts["added"]) == (14, {"items": 2, "run": "run"})
    answer = line.answers("recommend", "run2", "--history", ",".join(HISTORY), "-k", 4)
    assert [{item["id"] for item in answer["items"][begin : begin + 2]} for begin in (0, 2)] == [
        {best, "fresh"},
        {second, "raw"},
    ]
    assert line.answers("explain", "run2", "--history", ",".join(HISTORY), "--item", "fresh")["rank"] in (1, 2)
    (line.folder / "newer.csv").write_text(f"item,title\nfresh,{title(3)}\nlast,{title(int(best[1:]))}\n")
    result = line.answers("add-items", "run2", "newer.csv", "--out", "run3")
    assert result == {"run": "run3", "added": 1, "changed": 1, "duplicates": 0, "items": 15, "ignored": []}
    third = segue.load(line.folder / "run3")
    assert isinstance(third, Recommender)
    assert third.manifest["added"] == {"items": 3, "run": "run"}
    assert set(third.recommend(HISTORY, k=2).ids) == {best, "last"}
    assert third.similar("fresh", k=1).ids == ["i03"], "an item added twice has its last content"
    assert third.vocabulary.table["id"].to_list()[12:] == ["fresh", "raw", "last"]


def test_refused_items_leave_no_folder(line: CommandLine, content_run: Path, cycle_run: Path) -> None:
    (line.folder / "new.csv").write_text("item,title,kind\ni03,Known,k1\n")
    line.refuses("add-items", content_run, "new.csv", "--out", "run2", says=("'i03'", "already"))
    (line.folder / "new.csv").write_text("item,title,kind\nfresh,???,k1\n")
    line.refuses("add-items", content_run, "new.csv", "--out", "run2", says=("'fresh'", "'title'"))
    line.refuses("add-items", cycle_run, "new.csv", "--out", "run2", says=("by their ids alone", "model.items"))
    line.refuses("add-items", content_run, "nowhere.csv", "--out", "run2", says=("nowhere.csv",))
    (line.folder / "new.csv").write_text(f"item,title,kind\nfresh,{title(1)},k1\n")
    line.refuses("add-items", content_run, "new.csv", "--out", content_run, says=("exists",))
    assert sorted(path.name for path in line.folder.iterdir()) == ["new.csv"]


def test_a_run_with_added_items_is_not_evaluated_or_resumed(content_run: Path, tmp_path: Path) -> None:
    """The data folder does not have the new items."""
    new_items = tmp_path / "new.csv"
    new_items.write_text(f"item,title\nfresh,{title(1)}\n")
    add_items(content_run, new_items, out=tmp_path / "run2")
    with pytest.raises(FolderError, match="measure the run that they were added to, run"):
        segue.evaluate(tmp_path / "run2")
    with pytest.raises(FolderError, match="resume the run"):
        train(content_run.parent / "data", out=tmp_path / "run2", resume=True, overrides=["train.epochs=4"])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("run2")] == ["run2"]
