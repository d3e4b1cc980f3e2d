"""RUN.partial, the folder of unfinished training: its settings, its data, the state after each epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from segue import folders
from segue.config.derived import Derived
from segue.config.settings import Settings, settings_toml
from segue.data.dataset import Data
from segue.errors import FolderError
from segue.evaluation.split_log import counts_before
from segue.kinds import Table
from segue.models.build import Builder
from segue.models.items.coded import CodeSettings
from segue.runs.read import SETTINGS, Origin, refuse_added
from segue.training.item_codes import CODES, CODES_ALL, ensure_item_codes
from segue.training.loop import TrainingProgress
from segue.training.train import STATE, TrainingSetup
from segue.training.warm_start import WARM_START, WARM_START_ALL, fill_codes

RECORD = "data.json"
TRAINING_FILES = (STATE, WARM_START, WARM_START_ALL, CODES, CODES_ALL)
"""Files of RUN.partial that the finished run keeps, so that its training can be resumed."""


class PartialRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The facts in data.json, which `--resume` needs beside the settings."""

    recipe: str
    digest: str
    """Of the data folder."""
    origin: Origin | None = None
    all_events: bool = False
    launchers: frozenset[str] = frozenset()
    derived: tuple[Derived, ...] = ()
    """The settings that were derived from the log."""
    candidates: dict[str, Table] = {}
    """The settings that are tried first, by the name of the encoder; empty: there is nothing to choose."""
    spent: float = 0.0
    """Seconds that the encoders took which were not chosen."""


@dataclass(frozen=True, slots=True, eq=False)
class PartialRun:
    """Unfinished training and its folder."""

    folder: Path
    settings: Settings
    record: PartialRecord
    encoder: Builder | None
    replaces: bool = False
    """Whether a finished run exists that the new one replaces."""

    @property
    def setup(self) -> TrainingSetup:
        sections = self.settings
        return TrainingSetup(
            model=sections.model,
            objective=sections.objective,
            train=sections.train,
            evaluate=sections.evaluate,
            encoder=self.encoder,
        )

    def initial_weights(self, name: str) -> Path | None:
        """The file of the initial weights; None if a new model's are used."""
        path = self.folder / name
        return path if path.exists() else None

    def codes(
        self, name: str, data: Data, ends: np.ndarray, progress: Callable[[TrainingProgress], None] | None
    ) -> np.ndarray | None:
        """Item codes by the events before `ends` [U], read from the file `name` or computed and written there."""
        items, train = self.settings.model.items, self.settings.train
        if self.record.origin is not None and isinstance(items, CodeSettings):
            # Known items keep their codes. New items only need their nearest neighbours, which clusters give.
            items = msgspec.structs.replace(items, assignment="clusters")
        path, n_items = self.folder / name, len(data.vocabulary)
        return ensure_item_codes(path, items, train, data.sequences, ends, n_items, progress=progress)

    def all_codes(
        self, data: Data, counts: np.ndarray, progress: Callable[[TrainingProgress], None] | None
    ) -> np.ndarray | None:
        """Item codes by every event. With --from, known items keep the codes of that run; `counts` [V + 1] are those
        of the training part."""
        ends, n_items = np.asarray(data.sequences.offsets)[1:], len(data.vocabulary)
        codes = self.codes(CODES_ALL, data, ends, progress)
        if codes is not None and self.initial_weights(WARM_START) is not None:
            all_counts = counts_before(data.sequences, ends, n_items)
            fill_codes(self.folder, codes, trained=counts > 0, coded=all_counts > 0)
        return codes


def write_record(folder: Path, settings: Settings, record: PartialRecord) -> None:
    """Write the settings and the record, which `--resume` needs."""
    folders.write_whole(folder / SETTINGS, settings_toml(settings).encode())
    folders.write_json(folder / RECORD, record)


def read_record(folder: Path) -> PartialRecord:
    """The record in RUN.partial."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=PartialRecord)
    except (OSError, msgspec.MsgspecError) as error:
        raise FolderError(f"{folder} is damaged ({error}); remove it and train again without --resume.") from error


def record_of_run(run: Path) -> PartialRecord:
    """The record of a finished run whose training is resumed."""
    manifest = folders.read_manifest(run, "run")
    refuse_added(manifest, run, "resumed", "resume")
    origin = msgspec.convert(manifest.get("from"), Origin | None)
    return PartialRecord(
        manifest["recipe"],
        manifest["data"]["digest"],
        origin,
        all_events=bool(manifest["all"]),
        derived=msgspec.convert(manifest.get("derived", ()), tuple[Derived, ...]),
    )
