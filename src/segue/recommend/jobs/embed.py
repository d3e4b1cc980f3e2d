"""Everyone's embedding: a data folder → a Parquet data set in parts, from which a killed run goes on.

The finished folder holds

    users/part-00000.parquet …   user, events, time (of the newest event), embedding: those who have one, and with
                                 `since` of them those with new events
    items/part-00000.parquet …   item, embedding: where items were asked for
    log/part-00000.parquet …     user, events, newest: what the log had of everyone, for the next night's `since`
    job.json, manifest.json      the run and the data they came from, and the digest of every part

and is not there before. Until then FOLDER.partial holds the parts that are done, each whole, and what they belong to.
A part is a fixed range of the users, who are in the order of their ids; its file in `users` comes last.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import torch
from pyarrow import parquet

from segue import folders
from segue.data.dataset import Data
from segue.errors import FolderError
from segue.models.checkpoint import DESCRIPTION, WEIGHTS
from segue.recommend.jobs.runner import Arrays, JobContext, JobRunner, LocalRunner
from segue.recommend.recommender import ITEMS, Recommender

PART_USERS = 32_768  # a part's users: a kill costs at most their work
PART_ITEMS = 262_144
JOB = "job.json"
USERS, CATALOGUE, LOG = "users", "items", "log"
COUNTS = b"segue"  # where a part's file keeps its counts


class EmbedReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    users: int
    """Users of the data."""
    rows: int
    """Those with an embedding written."""
    unknown: int
    """Those without one, as they have no item that the run knows."""
    unchanged: int
    """Those left out, as they have no events that are new."""
    items: int
    """Item embeddings written."""
    parts: int
    """Files of user embeddings."""
    width: int
    """Features of an embedding."""


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    """What decides every byte of the data set; unfinished work only goes on with the same."""

    run: str
    data: str
    since: str | None
    """Digest of the earlier data set's manifest."""
    items: bool
    part_users: int


class _Counts(msgspec.Struct, frozen=True, kw_only=True):
    """A part's users."""

    rows: int
    unknown: int
    unchanged: int


def embed_users(
    recommender: Recommender,
    data: Data,
    out: Path | str,
    *,
    since: Path | str | None = None,
    items: bool = False,
    progress: Callable[[int, int], None] | None = None,
    runner: JobRunner | None = None,
) -> EmbedReport:
    """Write the embedding of every user of `data` who has a known item; `out` becomes a Parquet data set.

    Called again after a kill it goes on with the parts that are missing; called again after the end it does nothing.

    since: an earlier data set of the same run; users of whom it knew as many events and the same newest are left out.
    items: write the items' embeddings too; the inner product of a user's and an item's is the item's score.
    progress: told how many users are done, and of how many.
    runner: who embeds, with the same run and data; without them, this process. Only this process writes.
    """
    out, width = Path(out).absolute(), recommender.embedding_width
    earlier = None if since is None else _Earlier(Path(since), recommender)
    job = _Job(
        run=run_digest(recommender),
        data=data.digest,
        since=None if earlier is None else earlier.digest,
        items=items,
        part_users=PART_USERS,
    )
    done = _finished(out, job)
    if done is not None:
        return done
    data.verify()  # everything is read anyway
    with _taken_up(out, job) as partial, folders.explained_writing(out):
        counts = _Writer(partial, data, earlier, runner or LocalRunner(recommender, data)).users(progress)
        written = _write_items(recommender, partial / CATALOGUE) if items else 0
        report = EmbedReport(
            users=data.sequences.n_users,
            rows=sum(each.rows for each in counts),
            unknown=sum(each.unknown for each in counts),
            unchanged=sum(each.unchanged for each in counts),
            items=written,
            parts=len(counts),
            width=width,
        )
        folders.write_manifest(partial, "embeddings", {**_origin(recommender, data, job), "report": report})
        partial.rename(out)
    return report


def run_digest(recommender: Recommender) -> str:
    """One digest for all that embeddings depend on: the model, its weights and the ids of the items."""
    if "files" not in recommender.manifest or recommender.changed:
        raise FolderError("This Recommender is not as it is in a run folder: save it, and open what was saved.")
    parts = [recommender.manifest["files"][name]["sha256"] for name in (DESCRIPTION, WEIGHTS, ITEMS)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _origin(recommender: Recommender, data: Data, job: _Job) -> dict[str, Any]:
    assert recommender.folder is not None
    return {
        "segue": version("segue"),
        "run": {"folder": str(recommender.folder.absolute()), "digest": job.run},
        "data": {"folder": str(data.folder.absolute()), "digest": job.data},
    }


def _finished(out: Path, job: _Job) -> EmbedReport | None:
    """What a finished data set says of itself, if it is what is wanted; else whatever is in the way is refused."""
    if _belonging(out) == job:
        return msgspec.convert(folders.read_manifest(out, "embeddings")["report"], EmbedReport)
    folders.refuse_existing(out, overwrite=None)
    return None


@contextmanager
def _taken_up(out: Path, job: _Job) -> Iterator[Path]:
    """OUT.partial with what it belongs to, new or left by a run that was killed, for this process alone."""
    folders.refuse_existing(out, overwrite=None)  # another process may have finished it meanwhile
    partial = folders.partial_of(out)
    with folders.explained_writing(partial):
        partial.mkdir(parents=True, exist_ok=True)
    with _held(partial):
        if all(path.name.startswith(".") for path in partial.iterdir()):
            folders.write_json(partial / JOB, job)
        if _belonging(partial) != job:
            raise FolderError(
                f"{partial} holds unfinished embeddings of another run, other data or other options; remove it to "
                "begin anew, or name another folder with --out."
            )
        for left in (*partial.glob(".*"), *partial.glob("*/.*")):  # what was being written when it was killed
            left.unlink()
        yield partial


@contextmanager
def _held(partial: Path) -> Iterator[None]:
    """Nobody else writes into the folder meanwhile. The system lets go of it when a process ends, however it ends."""
    import fcntl  # not everywhere, and only needed here

    with folders.explained_writing(partial):
        handle = os.open(partial, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems lock no folders: there nobody is refused
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderError(
                    f"Another `segue embed` is writing {partial}; wait for it, or name another folder with --out."
                ) from None
        if not partial.exists():  # it had its name until a moment ago
            raise FolderError(f"Another `segue embed` has just finished {partial}; run the command again.")
        yield
    finally:
        os.close(handle)


def _belonging(folder: Path) -> _Job | None:
    """What the embeddings in a folder are of, None where it has none."""
    try:
        return msgspec.json.decode((folder / JOB).read_bytes(), type=_Job)
    except (OSError, msgspec.MsgspecError):
        return None


class _Earlier:
    """What an earlier data set knew of everyone."""

    def __init__(self, folder: Path, recommender: Recommender) -> None:
        manifest = folders.read_manifest(folder, "embeddings")
        if manifest["run"]["digest"] != run_digest(recommender):
            raise FolderError(
                f"{folder} holds embeddings of another run ({manifest['run']['folder']}), which mean nothing beside "
                "those of this one; leave --since out, and everyone is embedded."
            )
        files = sorted(name for name in manifest["files"] if name.startswith(f"{LOG}/"))
        folders.verify_contents(folder, manifest, "embeddings", names=files)
        self.digest = folders.digest(folder / folders.MANIFEST)
        self._log = pl.scan_parquet([folder / name for name in files], glob=False)

    def unchanged(self, now: pl.DataFrame) -> np.ndarray:
        """Which of these users, in the order of their ids, it knew with as many events and the same newest one [n]."""
        span = pl.col("user").is_between(pl.lit(now["user"][0]), pl.lit(now["user"][-1]))
        same = self._log.filter(span).collect().with_columns(same=pl.lit(value=True))
        found = now.join(same, on=now.columns, how="left", maintain_order="left")
        return found["same"].fill_null(value=False).to_numpy()


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Some users, one after another."""

    name: str
    end: int
    log: pl.DataFrame  # [n] user, events, newest
    asked: np.ndarray  # [≤ n] int64: places in it of those who are embedded


class _Writer:
    """Writes the parts that are missing."""

    def __init__(self, folder: Path, data: Data, earlier: _Earlier | None, runner: JobRunner) -> None:
        self.folder = folder
        self.data = data
        self.earlier = earlier
        self.runner = runner

    def users(self, progress: Callable[[int, int], None] | None) -> list[_Counts]:
        """One part after another."""
        total = self.data.sequences.n_users
        with closing(self.runner.answers(embed_part, self._missing(total))) as answers:
            for part, answer in answers:
                self._write(part, answer["known"], answer["vectors"])
                if progress is not None:
                    progress(part.end, total)
        return [_counts(self.folder / USERS / _part_name(number)) for number in range(-(-total // PART_USERS))]

    def _missing(self, total: int) -> Iterator[tuple[_Part, Arrays]]:
        """The parts that are not there, and the question about each."""
        for number, begin in enumerate(range(0, total, PART_USERS)):
            name, end = _part_name(number), min(begin + PART_USERS, total)
            if not (self.folder / USERS / name).exists():
                part = self._looked_at(name, begin, end)
                yield part, {"span": np.array([begin, end]), "asked": part.asked}

    def _looked_at(self, name: str, begin: int, end: int) -> _Part:
        """A part, of which what the log has is written."""
        ids, sequences = self.data.some_users(begin, end)
        newest = sequences.times[sequences.offsets[1:] - 1]
        log = pl.DataFrame({"user": ids, "events": np.diff(sequences.offsets), "newest": newest})
        if not (self.folder / LOG / name).exists():
            _write_table(log.to_arrow(), self.folder / LOG / name)
        unchanged = np.zeros(len(ids), dtype=bool) if self.earlier is None else self.earlier.unchanged(log)
        return _Part(name=name, end=end, log=log, asked=np.flatnonzero(~unchanged))

    def _write(self, part: _Part, known: np.ndarray, vectors: np.ndarray) -> None:
        """Those asked about who have a known item, and their embeddings."""
        counts = _Counts(
            rows=len(known), unknown=len(part.asked) - len(known), unchanged=part.log.height - len(part.asked)
        )
        rows = part.log[known]
        time = rows["newest"].cast(pl.Datetime("us", "UTC")) if self.data.manifest["has_time"] else rows["newest"]
        table = rows.select("user", "events", time.alias("time")).to_arrow()
        table = table.append_column("embedding", _fixed_size(vectors))
        table = table.replace_schema_metadata({COUNTS: msgspec.json.encode(counts)})
        _write_table(table, self.folder / USERS / part.name)


def _part_name(number: int) -> str:
    return f"part-{number:05}.parquet"


def embed_part(worker: JobContext, part: Arrays) -> Arrays:
    """The users span[0] … span[1] - 1 of the data, and which of them are asked about → those of these who have a known
    item, as places in the span, and their embeddings."""
    recommender, asked = worker.recommender, part["asked"]
    known, vectors = [np.zeros(0, dtype=np.int64)], [np.zeros((0, recommender.embedding_width), np.float32)]
    events = worker.data.some_events(*part["span"].tolist())
    for rows, batch in worker.histories.within(events).of(asked):
        some = batch.lengths > 0
        known.append(asked[rows[some]])
        vectors.append(recommender.embed_batch(batch)[some])
    return {"known": np.concatenate(known), "vectors": np.concatenate(vectors)}


def _write_items(recommender: Recommender, folder: Path) -> int:
    """The vectors that questions are compared with, of every item that may be answered."""
    numbers = np.flatnonzero(recommender.answerable)
    for number, begin in enumerate(range(0, len(numbers), PART_ITEMS)):
        path, some = folder / _part_name(number), numbers[begin : begin + PART_ITEMS]
        if path.exists():
            continue
        with torch.inference_mode():
            vectors = recommender.model.item_vectors(torch.from_numpy(some)).float().numpy()
        table = recommender.vocabulary.table[some - 1].select(item="id").to_arrow()
        _write_table(table.append_column("embedding", _fixed_size(vectors)), path)
    return len(numbers)


def _fixed_size(vectors: np.ndarray) -> pa.Array:
    """Rows of a matrix as one column; they are not copied."""
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])


def _write_table(table: pa.Table, path: Path) -> None:
    """One Parquet file, whole or absent. Vectors have no repetitions that a dictionary would save."""
    with folders.complete_file(path, option="--out") as beside:
        parquet.write_table(table, beside, compression="zstd", use_dictionary=False)


def _counts(path: Path) -> _Counts:
    return msgspec.json.decode(parquet.read_schema(path).metadata[COUNTS], type=_Counts)
