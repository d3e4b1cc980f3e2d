"""A commit → a checkout of it beside this one, with an environment of its own, and the command that runs its segue."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from segue.errors import InputError

ROOT = Path(__file__).parents[2]
FOLDER = ".against"  # ignored by git; `make clean` removes it
OF_MAKE = (
    "MAKEFLAGS",
    "MFLAGS",
    "MAKELEVEL",
    "MAKEOVERRIDES",
)  # the other's make has its own variables

Run = Callable[[Sequence[str], Path], str]
"""Runs a command in a folder and returns what it prints; a failure is raised as an InputError."""


@dataclass(frozen=True, slots=True)
class Version:
    """A checkout and its Python. Its modules may have other names: only its command line is called."""

    name: str
    folder: Path
    python: Path

    def segue(self, *arguments: object) -> list[str]:
        """The command `segue ARGUMENTS` of this version."""
        source = f"PYTHONPATH={self.folder / 'src'}"
        return ["env", source, str(self.python), "-m", "segue", *map(str, arguments)]


def this_version() -> Version:
    return Version("this", ROOT, Path(sys.executable))


def other_version(commit: str, *, root: Path = ROOT, run: Run | None = None) -> Version:
    """Check the commit out in .against/ and install it by its own Makefile and constraints; both happen once."""
    run = run or run_command
    name = run(["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"], root).strip()[:12]
    folder = root / FOLDER / name
    if not folder.is_dir():
        run(["git", "worktree", "prune"], root)  # a folder that was removed by hand is still registered
        run(["git", "worktree", "add", "--detach", str(folder), name], root)
    run(["make", "setup"], folder)
    return Version(name, folder, folder / ".venv" / "bin" / "python")


def run_command(command: Sequence[str], folder: Path) -> str:
    print(f"{' '.join(command)} …", file=sys.stderr, flush=True)
    environment = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    process = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        raise InputError(
            f"`{' '.join(command)}` in {folder} ended with exit code {process.returncode}; it was expected to succeed. "
            "Correct what it printed above, or name another commit: make bench SUBJECT=… AGAINST=COMMIT."
        )
    return process.stdout
