"""The embeddings of all users of a data folder → a Parquet data set in parts; a killed job resumes part by part.

The finished folder holds

    users/part-00000.parquet …   user, events, time (of the newest event), embedding: users with a known item; with
                                 `since`, only those with new events
    items/part-00000.parquet …   item, embedding: if item embeddings are written
    log/part-00000.parquet …     user, events, newest: the state of the log for all users, for the next `since`
    job.json, manifest.json      the run and the data that it was made from, and the digest of every part

Until it is finished, FOLDER.partial holds the complete parts and job.json. A part is a fixed range of the users, in the
order of their ids; its file in `users` is written last.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import torch
from pyarrow import parquet

from segue import folders
from segue.data.dataset import Data
from segue.errors import FolderError
from segue.models.checkpoint import SETTINGS, WEIGHTS
from segue.recommend.jobs.runner import Arrays, JobContext, JobRunner, LocalRunner
from segue.recommend.recommender import ITEMS, Recommender

PART_USERS = 32_768  # of a part: a kill loses at most their work
PART_ITEMS = 262_144
JOB = "job.json"
USERS, ITEM_PARTS, LOG = "users", "items", "log"
COUNTS = b"segue"  # metadata key of a part's counts


class EmbedReport(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of an embedding job."""

    users: int
    """Users of the data."""
    rows: int
    """Users whose embedding was written."""
    unknown: int
    """Users without an embedding, because the run knows none of their items."""
    unchanged: int
    """Users left out because they have no new events."""
    items: int
    """Item embeddings written."""
    parts: int
    """Files of user embeddings."""
    width: int
    """Features of an embedding."""


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a job; an unfinished one is resumed only with the same."""

    run: str
    data: str
    since: str | None
    """Digest of the manifest of the earlier data set."""
    items: bool
    part_users: int


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

    After a kill, the same call resumes with the missing parts; after the end, it does nothing.

    since: an earlier data set of the same run; users with as many events and the same newest event are left out.
    items: also write item embeddings; the inner product of a user's and an item's embedding is the model's score of the
        item, without item-to-item counts.
    progress: called with the number of users done and of all users.
    runner: computes the embeddings, with the same run and data; None is this process. Only this process writes.
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
    if _job_of(out) == job:
        return msgspec.convert(folders.read_manifest(out, "embeddings")["report"], EmbedReport)
    folders.refuse_existing(out, overwrite=None)
    data.verify()  # everything is read anyway
    with _resumed(out, job) as partial, folders.explained_writing(out):
        counts = _write_users(partial, data, earlier, runner or LocalRunner(recommender, data), progress)
        n_items = _write_items(recommender, partial / ITEM_PARTS) if items else 0
        report = EmbedReport(
            users=data.sequences.n_users,
            rows=sum(part["rows"] for part in counts),
            unknown=sum(part["unknown"] for part in counts),
            unchanged=sum(part["unchanged"] for part in counts),
            items=n_items,
            parts=len(counts),
            width=width,
        )
        origin = {
            "segue": version("segue"),
            "run": {"folder": str(Path(recommender.folder or "").absolute()), "digest": job.run},
            "data": {"folder": str(data.folder.absolute()), "digest": job.data},
        }
        folders.write_manifest(partial, "embeddings", {**origin, "report": report})
        partial.rename(out)
    return report


def run_digest(recommender: Recommender) -> str:
    """One digest of all that embeddings depend on: the model, its weights and the ids of the items."""
    if "files" not in recommender.manifest or recommender.changed:
        raise FolderError("This Recommender differs from its run folder: save it, and open the folder that was saved.")
    parts = [recommender.manifest["files"][name]["sha256"] for name in (SETTINGS, WEIGHTS, ITEMS)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@contextmanager
def _resumed(out: Path, job: _Job) -> Iterator[Path]:
    """OUT.partial of this job, new or left by a killed process, locked for this process."""
    folders.refuse_existing(out, overwrite=None)  # another process may have finished it in the meantime
    partial = folders.partial_of(out)
    with folders.explained_writing(partial):
        partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial):
        if all(path.name.startswith(".") for path in partial.iterdir()):
            folders.write_json(partial / JOB, job)
        if _job_of(partial) != job:
            raise FolderError(
                f"{partial} holds unfinished embeddings of another run, other data or other options; remove it to "
                "start again, or name another folder with --out."
            )
        for unfinished in (*partial.glob(".*"), *partial.glob("*/.*")):  # files that a kill interrupted
            unfinished.unlink()
        yield partial


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Lock the folder against other processes. The system releases the lock when this process ends, however it ends."""
    import fcntl  # not on every system

    with folders.explained_writing(partial):
        handle = os.open(partial, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot lock folders: there, no process is refused
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderError(
                    f"Another `segue embed` is writing {partial}; wait for it, or name another folder with --out."
                ) from None
        if not partial.exists():  # it was renamed after it was opened
            raise FolderError(f"Another `segue embed` has just finished {partial}; run the command again.")
        yield
    finally:
        os.close(handle)


def _job_of(folder: Path) -> _Job | None:
    """The job that the embeddings in a folder belong to; None if it has none."""
    try:
        return msgspec.json.decode((folder / JOB).read_bytes(), type=_Job)
    except (OSError, msgspec.MsgspecError):
        return None


class _Earlier:
    """The state of the log in an earlier data set."""

    def __init__(self, folder: Path, recommender: Recommender) -> None:
        manifest = folders.read_manifest(folder, "embeddings")
        if manifest["run"]["digest"] != run_digest(recommender):
            raise FolderError(
                f"{folder} holds embeddings of another run ({manifest['run']['folder']}), which cannot be compared "
                "with those of this one; leave --since out to embed all users."
            )
        files = sorted(name for name in manifest["files"] if name.startswith(f"{LOG}/"))
        folders.verify_contents(folder, manifest, "embeddings", names=files)
        self.digest = folders.digest(folder / folders.MANIFEST)
        self._log = pl.scan_parquet([folder / name for name in files], glob=False)

    def unchanged(self, now: pl.DataFrame) -> np.ndarray:
        """Which of these users, in the order of their ids, had as many events and the same newest one [n] bool."""
        span = pl.col("user").is_between(pl.lit(now["user"][0]), pl.lit(now["user"][-1]))
        same = self._log.filter(span).collect().with_columns(same=pl.lit(value=True))
        joined = now.join(same, on=now.columns, how="left", maintain_order="left")
        return joined["same"].fill_null(value=False).to_numpy()


def _write_users(
    folder: Path, data: Data, earlier: _Earlier | None, runner: JobRunner, progress: Callable[[int, int], None] | None
) -> list[dict[str, int]]:
    """Write the missing user parts in order; returns the counts of all parts."""
    total = data.sequences.n_users
    with closing(runner.map(embed_range, _missing_parts(folder, data, earlier))) as results:
        for (number, log, changed), result in results:
            known, rows = result["known"], log[result["known"]]
            counts = {"rows": len(known), "unknown": changed - len(known), "unchanged": log.height - changed}
            time = rows["newest"].cast(pl.Datetime("us", "UTC")) if data.manifest["has_time"] else rows["newest"]
            table = rows.select("user", "events", time.alias("time")).to_arrow()
            table = table.append_column("embedding", _fixed_size(result["vectors"]))
            table = table.replace_schema_metadata({COUNTS: msgspec.json.encode(counts)})
            _write_table(table, folder / USERS / _part_name(number))
            if progress is not None:
                progress(number * PART_USERS + log.height, total)
    paths = [folder / USERS / _part_name(number) for number in range(-(-total // PART_USERS))]
    return [msgspec.json.decode(parquet.read_schema(path).metadata[COUNTS], type=dict[str, int]) for path in paths]


def _missing_parts(
    folder: Path, data: Data, earlier: _Earlier | None
) -> Iterator[tuple[tuple[int, pl.DataFrame, int], Arrays]]:
    """The parts without a file in `users`: the number of the part, its log, how many of its users have changed, and the
    chunk of the job. The file in `log` is written first."""
    total = data.sequences.n_users
    for number, begin in enumerate(range(0, total, PART_USERS)):
        name, end = _part_name(number), min(begin + PART_USERS, total)
        if (folder / USERS / name).exists():
            continue
        ids, sequences = data.some_users(begin, end)
        newest = sequences.times[sequences.offsets[1:] - 1]
        log = pl.DataFrame({"user": ids, "events": np.diff(sequences.offsets), "newest": newest})
        if not (folder / LOG / name).exists():
            _write_table(log.to_arrow(), folder / LOG / name)
        changed = np.arange(len(ids)) if earlier is None else np.flatnonzero(~earlier.unchanged(log))
        yield (number, log, len(changed)), {"range": np.array([begin, end]), "changed": changed}


def _part_name(number: int) -> str:
    return f"part-{number:05}.parquet"


def embed_range(context: JobContext, chunk: Arrays) -> Arrays:
    """The embeddings of the users `changed` of a range of the data's users, and which of them have a known item.

    Both `changed` and `known` are counted from the first user of the range.
    """
    recommender, changed = context.recommender, chunk["changed"]
    known, vectors = [np.zeros(0, dtype=np.int64)], [np.zeros((0, recommender.embedding_width), np.float32)]
    events = context.data.some_events(*chunk["range"].tolist())
    for rows, batch in context.histories(events, changed):
        some = batch.lengths > 0
        known.append(changed[rows[some]])
        vectors.append(recommender.embed_batch(batch)[some])
    return {"known": np.concatenate(known), "vectors": np.concatenate(vectors)}


def _write_items(recommender: Recommender, folder: Path) -> int:
    """Write the embedding of every item that can be recommended; returns their number."""
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
    """Rows of a matrix as one column, without a copy."""
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])


def _write_table(table: pa.Table, path: Path) -> None:
    """Write one Parquet file, complete or not at all. Vectors do not repeat, so a dictionary would only cost."""
    with folders.complete_file(path, option="--out") as staging:
        parquet.write_table(table, staging, compression="zstd", use_dictionary=False)
