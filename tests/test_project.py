"""Rules for the whole project: directions of imports, public names, forbidden imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import segue

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "segue"

# A package imports only from the lines above its own; packages on one line never import each other.
DIRECTION = [
    {"errors"},
    {"kinds"},
    {"folders"},
    {"data"},
    {"counts"},
    {"layers"},
    {"models"},
    {"process_group"},
    {"objective", "evaluation", "index"},
    {"training", "recommend"},
    {"slim"},
    {"export"},
    {"config"},
    {"runs"},
    {"api", "serving", "tuning", "testing"},
    {"terminal"},
    {"demo"},
    {"cli"},
]
LEVEL = {package: level for level, packages in enumerate(DIRECTION) for package in packages}
WINDOW = "segue"  # the package itself, `__init__.py` and `__main__.py`: it exports the public names
PUBLIC = {"prepare", "train", "load", "evaluate", "compare", "embed", "add_items", "Recommender", "Data", "Report"}


@dataclass(frozen=True)
class Import:
    """One imported module, in a file of a package."""

    file: str
    package: str
    module: str

    @property
    def target(self) -> str | None:
        """The package that it imports from, None outside segue."""
        parts = self.module.split(".")
        if parts[0] != "segue" or parts[1:] == ["__version__"]:
            return None
        return parts[1] if len(parts) > 1 and parts[1] in LEVEL else WINDOW


def imports_of(source: str, *, file: str) -> list[Import]:
    """Every import in a file, also those inside functions and under TYPE_CHECKING."""
    first = Path(file).parts[0].removesuffix(".py")
    package = WINDOW if first in ("__init__", "__main__") else first
    path = ["segue", *Path(file).parts[:-1]]
    modules: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [name.name for name in node.names if name.name != "segue"]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "segue":
            modules.append(f"segue.{node.attr}")  # what a plain `import segue` is used for
        elif isinstance(node, ast.ImportFrom):
            before = path[: len(path) + 1 - node.level] if node.level else []
            module = ".".join([*before, *([node.module] if node.module else [])])
            # `from segue import data` imports from data, not from the window
            modules += [f"{module}.{name.name}" for name in node.names] if module == "segue" else [module]
    return [Import(file=file, package=package, module=module) for module in modules]


def faults(imports: list[Import]) -> list[str]:
    """The imports that break a rule, each as a sentence."""
    return [
        f"{each.file}: {each.package} must not import {each.module}"
        for each in imports
        if _against_direction(each) or _forbidden_here(each)
    ]


def _against_direction(each: Import) -> bool:
    if each.target is None or each.package == WINDOW or each.target == each.package:
        return False
    return each.target == WINDOW or LEVEL[each.target] >= LEVEL[each.package]


def _forbidden_here(each: Import) -> bool:
    outside = each.module.split(".")[0]
    return (
        (each.package in ("errors", "folders", "data", "counts") and outside == "torch")
        or (each.package != "serving" and outside in ("litestar", "uvicorn", "starlette"))
        or (each.package == "serving" and each.target in ("training", "objective"))
        or each.target == "testing" != each.package  # for tests only
        or outside in ("pytest", "_pytest", "hypothesis")
        or (
            each.package == "cli"
            and each.target in ("layers", "models", "process_group", "objective", "index", "training")
        )
    )


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def test_imports_keep_the_direction(sources: dict[str, str]) -> None:
    imports = [each for file, source in sources.items() for each in imports_of(source, file=file)]
    packages = {Path(file).parts[0].removesuffix(".py") for file in sources} - {"__init__", "__main__"}
    assert packages == set(LEVEL)
    assert len(sources) >= 60, "the loop above looked at fewer files than the package has"
    assert faults(imports) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("data/batch.py", "import torch"),
        ("data/batch.py", "def late():\n    from torch import nn"),
        ("data/batch.py", "from segue.layers.packed import tensors"),
        ("evaluation/ranks.py", "from segue.index import exact"),
        ("training/loop.py", "from segue.recommend.recommender import Recommender"),
        ("models/build.py", "from ..training import loop"),
        ("models/build.py", "from .. import config"),
        ("api.py", "from segue import serving"),
        ("api.py", "from segue import Recommender"),
        ("api.py", "import segue\nsegue.prepare('log.csv')"),
        ("cli/serve.py", "import litestar"),
        ("cli/train.py", "from segue.training.loop import fit"),
        ("serving/http/app.py", "from segue.training.loop import fit"),
        ("demo/tour.py", "from segue.testing import check_encoder"),
        ("testing/laws.py", "from segue.api import train"),
        ("testing/laws.py", "import pytest"),
    ],
)
def test_a_wrong_import_is_reported(file: str, source: str) -> None:
    assert len(faults(imports_of(source, file=file))) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("layers/packed.py", "import torch\nfrom segue.data.batch import Batch"),
        ("data/split.py", "from .sequences import Sequences\nfrom segue.errors import InputError"),
        ("demo/tour.py", "from segue import api, serving"),
        ("testing/learning.py", "from segue.training.optimiser import optimiser\nfrom segue.testing.cases import Case"),
        ("serving/http/app.py", "import litestar"),
        ("api.py", "import segue\nprint(segue.__version__)"),
        ("__init__.py", "from segue.api import prepare"),
    ],
)
def test_a_right_import_passes(file: str, source: str) -> None:
    assert faults(imports_of(source, file=file)) == []


def dangers(tree: ast.AST) -> Iterator[str]:
    """Calls and imports that could run foreign code when a folder is opened."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [name.name for name in node.names] + [getattr(node, "module", None) or ""]
            yield from (
                name for name in names if re.match(r"(c?pickle|dill|cloudpickle|joblib|shelve|marshal)\b", name)
            )
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function in ("eval", "exec") or re.fullmatch(r"torch\.(load|save)", function):
                yield function
            yield from (
                "allow_pickle"
                for keyword in node.keywords
                if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"
            )


def test_no_pickle_anywhere(sources: dict[str, str]) -> None:
    calls = {file: list(dangers(ast.parse(source))) for file, source in sources.items()}
    assert not any(calls.values()), calls


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from pickle import loads", "torch.load(p)", "np.load(p, allow_pickle=True)", "eval('1')"],
)
def test_a_pickle_is_reported(source: str) -> None:
    assert list(dangers(ast.parse(source)))


def test_the_public_surface() -> None:
    assert set(segue.__all__) == PUBLIC
    assert len(segue.__all__) == len(PUBLIC)
    for name in PUBLIC:
        assert (getattr(segue, name).__doc__ or "").strip(), f"segue.{name} has no documentation"


HELP = """
import sys
from segue.cli import main
sys.argv = ["segue", "--help"]
try:
    main()
except SystemExit as left:
    assert not left.code, left.code
"""


@pytest.mark.parametrize("code", ["import segue", "import segue.data, segue.errors", "import segue.slim", HELP])
def test_torch_is_not_imported_before_it_is_needed(code: str) -> None:
    """It costs over a second, and neither `import segue` nor `segue --help` should."""
    code += "\nimport sys\nsys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stderr


def test_every_dependency_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [
        *project["dependencies"],
        *(line for lines in project["optional-dependencies"].values() for line in lines),
    ]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {_plain(line.split("==")[0]): line.split("==")[1] for line in lines if line and not line.startswith("#")}
    assert len(requirements) >= 20 and pins["torch"] == "2.13.0"
    for requirement in map(Requirement, requirements):
        assert requirement.specifier.contains(pins[_plain(requirement.name)]), requirement


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def python_files() -> list[Path]:
    return [path for package in ("src", "tests", "bench", "docs") for path in sorted((ROOT / package).rglob("*.py"))]


def test_no_folder_has_more_than_sixteen_files_side_by_side() -> None:
    files = Counter(str(path.parent.relative_to(ROOT)) for path in python_files())
    assert {folder: number for folder, number in files.items() if number > 16} == {}


def test_no_source_file_is_longer_than_four_hundred_lines() -> None:
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in python_files()}
    assert {file: number for file, number in lines.items() if number > 400 and not file.startswith("tests/")} == {}


def test_no_function_but_a_command_has_more_than_ten_parameters() -> None:
    long = []
    for path in PACKAGE.rglob("*.py"):
        if "cli" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len([name for name in names if name not in {"self", "cls"}]) > 10:
                    long.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert long == []
