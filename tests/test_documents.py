"""README and docs: every command with a recipe or a setting is decoded and its model built; every link is a file."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import segue
from segue.api import Data
from segue.config.recipes import read_recipe
from segue.config.settings import make_settings
from segue.models.build import build_model
from segue.models.items.coded import CodeSettings
from segue.models.items.tables import DataFacts
from segue.models.sequence import SequenceModel

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
N_ITEMS = 24
CODE = re.compile(r"^```\w*\n(.*?)^```|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
NOT_A_COMMAND = re.compile(r"…|\.toml|--recipe R\b")  # an abbreviation, a user's own file, a placeholder


@dataclass(frozen=True, slots=True)
class Command:
    """`--recipe RECIPE --set …` of a document; a `--set` without a recipe changes the default one."""

    document: str
    recipe: str
    overrides: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.document, self.recipe, *self.overrides))


def commands(document: Path) -> list[Command]:
    lines = [line for block, inline in CODE.findall(document.read_text()) for line in (block or inline).splitlines()]
    result = []
    for line in lines:
        if not re.search(r"--(recipe|set)\s+\S", line) or NOT_A_COMMAND.search(line):
            continue
        pairs = list(pairwise(shlex.split(line, comments=True)))
        recipes, overrides = ([value for name, value in pairs if name == option] for option in ("--recipe", "--set"))
        if recipes or overrides:
            result.append(Command(document.name, (recipes or ["default"])[0], tuple(overrides)))
    return result


COUNTS = {"content.md": 4, "large-catalogues.md": 2, "recipes.md": 13, "results.md": 49, "serving.md": 1}
COMMANDS = {str(command): command for document in DOCUMENTS for command in commands(document)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """A log with kinds and values, and a catalogue with titles, brands and pictures."""
    folder = tmp_path_factory.mktemp("documents")
    rng = np.random.default_rng(1)
    ids = [f"i{item}" for item in range(N_ITEMS)]
    items = pl.DataFrame({"id": ids, "title": [f"cup {name}" for name in ids], "brand": ["a", "b"] * (N_ITEMS // 2)})
    pictures = pl.Series("pictures", rng.normal(size=(N_ITEMS, 4)).astype(np.float32).tolist())
    items.with_columns(pictures).write_parquet(folder / "items.parquet")
    events = pl.DataFrame(
        {
            "user": np.repeat(np.arange(20), N_ITEMS).astype(str),
            "item": np.concatenate([rng.permutation(ids) for _ in range(20)]),
            "time": np.arange(20 * N_ITEMS) * 3600 + 1_700_000_000,
            "value": rng.integers(1, 6, 20 * N_ITEMS),
            "kind": rng.choice(["view", "buy"], 20 * N_ITEMS),
        }
    )
    return segue.prepare(events, out=folder / "data", items=folder / "items.parquet", value="value", kind="kind")


def build(command: Command, data: Data) -> SequenceModel:
    settings = make_settings(read_recipe(command.recipe), command.overrides).model
    parts = settings.items.parts if isinstance(settings.items, CodeSettings) else 0
    codes = np.zeros((N_ITEMS + 1, parts), dtype=np.uint8)
    facts = settings.items.facts(data.vocabulary, DataFacts(kinds=tuple(data.kinds), codes=codes))
    return build_model(settings, N_ITEMS, generator=torch.Generator().manual_seed(1), facts=facts)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_is_valid_and_builds_a_model(name: str, data: Data) -> None:
    assert sum(weights.numel() for weights in build(COMMANDS[name], data).parameters()) > 0


def test_the_number_of_commands_is_as_expected() -> None:
    """Detect a change of the documents, or of the pattern above, that loses commands."""
    counts = {document.name: len(commands(document)) for document in DOCUMENTS}
    assert {name: count for name, count in counts.items() if count} == COUNTS


def test_the_readme_is_short_and_links_to_every_page() -> None:
    readme = DOCUMENTS[0].read_bytes()
    assert len(readme) <= 7_000
    links = set(re.findall(r"\]\((docs/[\w.-]+)\)", readme.decode()))
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".ipynb")}
    assert links == pages and len(pages) > 12


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert re.match(r"https?://", link) or (document.parent / link).exists(), link
