"""`segue export`: a complete, checked file, or none and a sentence with the reason."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from command_line import CommandLine
from settings_tables import model_settings
from small_exports import assert_same_answers, recommender_of
from torch import Tensor, nn

from segue import api, export
from segue.counts.counts import Counts
from segue.counts.features import ItemCounts
from segue.counts.neighbours import Neighbours
from segue.errors import FolderError, InputError, SettingsError
from segue.layers.packed import PackedBatch, pack, pad
from segue.models.build import build_model
from segue.models.sequence import SequenceModel
from segue.slim import METADATA, SlimRecommender


def small_model(**changed: Any) -> SequenceModel:
    numbers = {"kind": "sasrec", "width": 8, "depth": 1, "length": 12, "dropout": 0.0, "feed_forward": 2}
    settings = model_settings(**{**numbers, **changed})
    return build_model(settings, 300, generator=torch.Generator().manual_seed(3))


def test_the_command_exports_a_trained_run(line: CommandLine, cycle_run: Path, tmp_path: Path) -> None:
    output = line.does("export", cycle_run, "--onnx", "model.onnx")
    assert "Made model.onnx" in output and "SlimRecommender" in output
    run, slim = api.Recommender.open(cycle_run), SlimRecommender.open(tmp_path / "model.onnx", threads=1)
    ids = slim.facts.ids
    rng = np.random.default_rng(0)
    histories = [rng.choice(ids, length).tolist() for length in range(40)]
    assert_same_answers(slim.recommend_many(histories, 5), run.recommend_many(histories, 5))
    assert (slim.facts.recipe, slim.facts.data) == (run.manifest["recipe"], run.manifest["data"]["digest"])


def test_a_run_with_counts_is_exported_as_one_file(
    line: CommandLine, cycle_data: Path, quick_recipe: Path, tmp_path: Path
) -> None:
    settings = ["counts=fitted", "counts.least_users=1", "train.epochs=1"]
    run = api.train(cycle_data, out=tmp_path / "run", recipe=quick_recipe, overrides=settings)
    assert run.item_counts is not None and run.item_counts.used
    line.does("export", tmp_path / "run", "--onnx", "out/model.onnx")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.onnx"]
    slim = SlimRecommender.open(tmp_path / "out" / "model.onnx", threads=1)
    rng = np.random.default_rng(0)
    histories = [rng.choice([*slim.facts.ids, "nobody"], length).tolist() for length in range(60)]
    answers = run.recommend_many(histories, 5)
    assert_same_answers(slim.recommend_many(histories, 5), answers)
    alone = without_counts(run).recommend_many(histories, 5)
    assert any(answer.ids != other.ids for answer, other in zip(answers, alone, strict=True))


def without_counts(run: api.Recommender) -> api.Recommender:
    """The run without its item-to-item counts."""
    return api.Recommender(run.model, run.index, run.vocabulary, seen=run.seen)


def test_a_run_without_counts_has_no_entry_of_them(line: CommandLine, cycle_run: Path, tmp_path: Path) -> None:
    line.does("export", cycle_run, "--onnx", "model.onnx")
    assert [entry.key for entry in onnx.load_model(tmp_path / "model.onnx").metadata_props] == [METADATA]


def test_the_json_output(line: CommandLine, cycle_run: Path, tmp_path: Path) -> None:
    report = line.answers("export", cycle_run, "--onnx", "deep/er/model.onnx")
    path = tmp_path / "deep" / "er" / "model.onnx"
    assert report["file"] == "deep/er/model.onnx" and report["bytes"] == path.stat().st_size
    assert report["inputs"] == ["items", "lengths"] and report["outputs"] == ["query", "scores"]
    assert report["difference"] <= 1e-5 and report["note"] is None
    assert path.stat().st_mode & 0o777 == 0o644


def test_an_existing_file_is_not_overwritten(line: CommandLine, cycle_run: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("mine")
    says = ("exists already; name another file with --onnx",)
    line.refuses("export", cycle_run, "--onnx", "model.onnx", says=says)


def test_an_unwritable_folder_is_refused(cycle_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match=r"a part of its path is a file\. Choose another folder with --onnx"):
        api.export(cycle_run, onnx=tmp_path / "file" / "model.onnx")


class RunningMean(nn.Module):
    """An external block: each token gets the mean of its user's tokens so far."""

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        return pack(pad(x, batch).cumsum(1), batch) / (batch.position[:, None] + 1)

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        return self.forward(x, batch)[batch.last]


def test_an_external_encoder(tmp_path: Path) -> None:
    model = small_model()
    model.blocks = nn.ModuleList([RunningMean(), model.blocks[0], RunningMean()])
    run = recommender_of(model)
    api.export(run, onnx=tmp_path / "model.onnx")
    slim = SlimRecommender.open(tmp_path / "model.onnx", threads=1)
    histories = [["i3"], [f"i{number}" for number in range(1, 30)], ["i300", "i7", "i300"]]
    assert_same_answers(slim.recommend_many(histories), run.recommend_many(histories))


class Counting(SequenceModel):
    """Adds the number of users, which a trace records as a constant."""

    def query(self, batch: PackedBatch) -> Tensor:
        return super().query(batch) + len(batch.lengths)


class Leaving(SequenceModel):
    """Leaves torch in the forward pass, with a Python number."""

    def query(self, batch: PackedBatch) -> Tensor:
        return super().query(batch) * torch.from_numpy(np.array([float(number) for number in batch.lengths.numpy()]))


class Failing(SequenceModel):
    """Accepts only packed tokens."""

    def query(self, batch: PackedBatch) -> Tensor:
        if type(batch) is not PackedBatch:
            raise NotImplementedError("packed tokens only:\nmore of it")
        return super().query(batch)


class Unknown(SequenceModel):
    """Uses an operation that ONNX lacks."""

    def query(self, batch: PackedBatch) -> Tensor:
        squares: Tensor = torch.linalg.matrix_exp(super().query(batch)[:, :, None] * torch.eye(8))
        return squares[:, 0]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Counting, "the graph's numbers differ from torch's by .* its encoder does something that a trace misses"),
        (Leaving, "cannot be exported: "),
        (Failing, r"no graph can be made of its encoder \(packed tokens only\)\.$"),
        (Unknown, "no graph can be made of its encoder .*matrix_exp"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused(
    kind: type[SequenceModel], sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = small_model()
    model.__class__ = kind
    with pytest.raises(InputError, match=sentence):
        export.export_onnx(recommender_of(model), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_a_full_disk_is_not_reported_as_a_model_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch.onnx.export", refuse)
    with pytest.raises(FolderError, match="The disk is full"):
        export.export_onnx(recommender_of(small_model()), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_run_too_large_for_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MOST_BYTES", 10_000)
    with pytest.raises(InputError, match="an ONNX file 10,000 at most"):
        export.export_onnx(recommender_of(small_model()), tmp_path / "model.onnx")


def test_counts_too_large_for_a_file_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 items of 8 numbers of four bytes, and their ids and counts, fit into 40,000 bytes; 20,000 pairs do not."""
    rng = np.random.default_rng(0)
    offsets, items = np.minimum(np.arange(302) * 100, 20_000), rng.integers(1, 301, 20_000).astype(np.int32)
    pairs = Neighbours(offsets, items, rng.integers(1, 1_000_000, 20_000).astype(np.int32))
    item_counts = Counts(ItemCounts((pairs,) * 3, pairs, np.ones(301, np.int64)), (1.0,) * 7)
    monkeypatch.setattr(export, "MOST_BYTES", 40_000)
    export.export_onnx(recommender_of(small_model()), tmp_path / "alone.onnx")
    with pytest.raises(
        InputError, match=r"Item-to-item counts take [\d,]+ of them: train with a smaller counts\.neigh"
    ):
        export.export_onnx(recommender_of(small_model(), item_counts=item_counts), tmp_path / "model.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["alone.onnx"]


def test_a_missing_onnx_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.export.importlib.util.find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"segue\[onnx\]"):
        export.export_onnx(recommender_of(small_model()), tmp_path / "model.onnx")


def test_a_tied_table_is_stored_once(tmp_path: Path) -> None:
    sizes = []
    for tied in (True, False):
        path = tmp_path / f"{tied}.onnx"
        sizes.append(export.export_onnx(recommender_of(small_model(items__tied=tied)), path).bytes)
    assert sizes[1] - sizes[0] == pytest.approx(301 * 8 * 4, abs=500)


def test_exporting_an_approximate_run_reports_an_exact_file(tmp_path: Path) -> None:
    run = recommender_of(small_model())
    run.manifest["index"] = {"kind": "approximate"}
    assert "scores every item" in (export.export_onnx(run, tmp_path / "model.onnx").note or "")


def test_progress_reports_each_stage(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    export.export_onnx(
        recommender_of(small_model()), tmp_path / "model.onnx", progress=lambda *stage: calls.append(stage)
    )
    assert calls == [(name, done, 3) for done, name in enumerate(export.STAGES)]
