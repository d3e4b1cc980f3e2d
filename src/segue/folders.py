"""Data, run and embedding folders. Each is written under a temporary name and renamed, so it appears complete or not.

`manifest.json` holds the kind of folder, its format number, the size and SHA-256 of every other file, and facts of its
kind. No file in a folder holds code: they are JSON, TOML, npy, Parquet and safetensors.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from segue.errors import FolderError

Kind = Literal["data", "run", "embeddings"]

FORMATS: dict[Kind, int] = {"data": 2, "run": 2, "embeddings": 1}
MAKERS: dict[Kind, str] = {"data": "segue prepare", "run": "segue train", "embeddings": "segue embed"}
NAMES: dict[Kind, str] = {"data": "a data folder", "run": "a run folder", "embeddings": "a folder of embeddings"}
MANIFEST = "manifest.json"


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Replaced = Kind | Literal[False] | None
"""The kind of folder that may be replaced; False without --overwrite, None if the command has no such option."""


def refuse_existing(path: Path, *, overwrite: Replaced) -> None:
    """Raise FolderError if `path` exists and may not be replaced; called before any other work."""
    with explained_writing(path):
        if not (path.exists() or path.is_symlink()):
            return
        if not path.is_dir():
            raise FolderError(f"{path} is a file, and --out needs a new folder; name another.")
        if not overwrite:
            hint = "" if overwrite is None else ", or add --overwrite to replace it"
            raise FolderError(f"{path} exists already; name another folder with --out{hint}.")
        if any(path.iterdir()) and (kind := _manifest_kind(path)) != overwrite:
            other = NAMES[kind] if kind else f"not a segue folder (it has no {MANIFEST} of segue)"
            raise FolderError(f"{path} is {other}, so --overwrite does not replace it; name another.")


@contextlib.contextmanager
def complete_folder(path: Path, *, overwrite: Replaced = None) -> Iterator[Path]:
    """Yield a staging folder beside `path`; on success it is renamed to `path`, on an error it is removed."""
    path = Path(path).absolute()
    refuse_existing(path, overwrite=overwrite)
    with explained_writing(path), contextlib.ExitStack() as stack:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        stack.callback(shutil.rmtree, staging, ignore_errors=True)
        staging.chmod(0o755)
        yield staging
        _replace(staging, path)


@contextlib.contextmanager
def complete_file(path: Path, *, option: str) -> Iterator[Path]:
    """Yield a staging file beside `path`; on success it is renamed to `path`, on an error it is removed.

    An existing file is refused; `option` names the path on the command line.
    """
    path = Path(path).absolute()
    with explained_writing(path, option=option), contextlib.ExitStack() as stack:
        if path.exists() or path.is_symlink():
            raise FolderError(f"{path} exists already; name another file with {option}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        staging = Path(name)
        stack.callback(staging.unlink, missing_ok=True)
        staging.chmod(0o644)
        yield staging
        staging.rename(path)


@contextlib.contextmanager
def explained_writing(path: Path, *, option: str = "--out") -> Iterator[None]:
    """Turn the operating system's errors while writing `path`, which `option` names, into FolderErrors."""
    try:
        yield
    except OSError as error:
        raise _explained(error, path, option) from error
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))  # how polars and safetensors wrap it
        if number is None:
            raise
        raise _explained(OSError(int(number[1]), os.strerror(int(number[1]))), path, option) from error


def _replace(staging: Path, path: Path) -> None:
    """Rename staging to path; an existing folder is moved aside first and removed last."""
    if not path.exists():
        staging.rename(path)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    path.rename(aside / path.name)
    try:
        staging.rename(path)
    except BaseException:
        (aside / path.name).rename(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _explained(error: OSError, path: Path, option: str) -> FolderError:
    """An error of the operating system as a FolderError."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FolderError(f"The disk is full: {path} could not be written. Free some space and try again.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return FolderError(f"No permission to write {path}. Choose a folder you may write to with {option}.")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return FolderError(
            f"{path} cannot be created: a part of its path is a file. Choose another folder with {option}."
        )
    return FolderError(f"{path} could not be written: {error.strerror or error}.")


def partial_of(folder: Path) -> Path:
    """The folder of unfinished work, FOLDER.partial."""
    return folder.parent / f"{folder.name}.partial"


def write_json(path: Path, body: Any) -> None:
    """Write indented JSON with a final newline, atomically."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n")


def write_whole(path: Path, content: bytes) -> None:
    """Write or replace a file atomically."""
    temporary = path.with_name(f".{path.name}.writing")
    with explained_writing(path):
        temporary.write_bytes(content)
        temporary.replace(path)


def write_manifest(folder: Path, kind: Kind, body: dict[str, Any]) -> None:
    """Write the manifest of every file now in `folder`; call this last."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    write_json(folder / MANIFEST, {"kind": kind, "format": FORMATS[kind], **body, "files": files})


def kind_of(folder: Path) -> Kind:
    """`data` if that is the kind in the manifest, otherwise `run`, which `read_manifest` then checks."""
    return "data" if _manifest_kind(folder) == "data" else "run"


def _manifest_kind(folder: Path) -> Kind | None:
    """The kind in the manifest, None if there is no readable manifest of segue."""
    try:
        name = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=dict[str, Any]).get("kind")
    except (OSError, msgspec.MsgspecError):
        return None
    return next((kind for kind in FORMATS if kind == name), None)


def read_manifest(folder: Path, kind: Kind) -> dict[str, Any]:
    """The manifest of a folder of this kind; every file in it must exist and have its size."""
    folder = Path(folder)
    path = folder / MANIFEST
    try:
        if not folder.exists():
            raise FolderError(f"{folder} does not exist; expected {NAMES[kind]} made by `{MAKERS[kind]}`.")
        if not path.is_file():
            raise FolderError(
                f"{folder} is not {NAMES[kind]} (it has no {MANIFEST}); give one made by `{MAKERS[kind]}`."
            )
        manifest = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise FolderError(f"{folder} cannot be read ({error.strerror}); check its permissions.") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FolderError(f"{path} is damaged ({error}); make the folder again with `{MAKERS[kind]}`.") from error
    actual, number = manifest.get("kind"), manifest.get("format")
    if actual != kind:
        what = NAMES[actual] if actual in FORMATS else "not a segue folder"
        raise FolderError(f"{folder} is {what}, expected {NAMES[kind]} made by `{MAKERS[kind]}`.")
    if number != FORMATS[kind]:
        raise FolderError(
            f"{folder} has {kind} format {number}, this segue reads format {FORMATS[kind]}; "
            f"make it again with `{MAKERS[kind]}`."
        )
    if not isinstance(manifest.get("files"), dict):
        raise FolderError(f"{path} is damaged: it lists no files; make the folder again with `{MAKERS[kind]}`.")
    _check_sizes(folder, manifest, kind)
    return manifest


def _check_sizes(folder: Path, manifest: dict[str, Any], kind: Kind) -> None:
    for name, facts in manifest["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != facts["bytes"]:
            state = "is missing" if size is None else f"has {size} bytes instead of {facts['bytes']}"
            raise FolderError(f"{path} {state}: the folder is damaged; make it again with `{MAKERS[kind]}`.")


def verify_contents(
    folder: Path, manifest: dict[str, Any], kind: Kind, *, names: Collection[str] | None = None
) -> None:
    """Raise FolderError if a file, or one of `names`, does not have the SHA-256 in the manifest."""
    for name, facts in manifest["files"].items():
        if (names is None or name in names) and digest(folder / name) != facts["sha256"]:
            raise FolderError(
                f"{folder / name} is damaged: its SHA-256 is not the one in {MANIFEST}; "
                f"make the folder again with `{MAKERS[kind]}`."
            )
