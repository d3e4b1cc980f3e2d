"""Runs the command line: its output on each stream, its exit code, and the rules of every refusal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import segue.cli


@dataclass(frozen=True, slots=True)
class Said:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder under one, hidden ones too, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in folder.rglob("*")
    }


def assert_refused(result: Said, *words: str, code: int = 1) -> None:
    """A sentence or two with these words, nothing on standard output, no traceback."""
    assert "Traceback" not in result.err, result.err
    assert result.code == code, result
    assert result.out == ""
    if code == 1:
        assert 1 <= len(result.err.splitlines()) <= 2, result.err
        assert result.err.rstrip().endswith((".", "…")), result.err
    missing = [word for word in words if word not in " ".join(result.err.split())]
    assert not missing, f"{missing} not in: {result.err}"


def object_of(result: Said) -> dict[str, Any]:
    """The one JSON object on standard output."""
    assert result.code == 0, result
    assert result.out.endswith("}\n")
    assert result.out.count("\n") == 1
    body = json.loads(result.out)
    assert isinstance(body, dict)
    return body


class CommandLine:
    """Runs `segue` in this process, through the function that the installed command calls."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self.folder = folder
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", "200")  # usage errors come in a box, which should not break their sentences

    def __call__(self, *arguments: object) -> Said:
        self._monkeypatch.setattr("sys.argv", ["segue", *map(str, arguments)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            segue.cli.main()
        out, err = self._capsys.readouterr()
        assert isinstance(exit_info.value.code, int)
        return Said(exit_info.value.code, out, err)

    def does(self, *arguments: object) -> str:
        """The output of a command that must succeed."""
        result = self(*arguments)
        assert result.code == 0, result
        return result.out

    def answers(self, *arguments: object) -> dict[str, Any]:
        """The object that a command prints with --json."""
        return object_of(self(*arguments, "--json"))

    def refuses(self, *arguments: object, says: tuple[str, ...], code: int = 1) -> str:
        """The command is refused with these words and leaves every file and folder as it was."""
        before = tree(self.folder)
        result = self(*arguments)
        assert_refused(result, *says, code=code)
        assert tree(self.folder) == before
        return result.err
