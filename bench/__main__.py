"""`python -m bench SUBJECT... [--data FOLDER] [more]`: one table a subject; `make bench` calls it.

Each subject is a module with `main(argv)`; options after the subjects go to each of them as they are.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from segue.errors import SegueError

PACKAGES = {
    "data": ("prepare", "scale", "spark"),
    "training": ("epoch", "catalogue", "processes"),
    "recommend": ("recommend", "evaluate", "index", "mixture", "increment", "embed", "codes", "counts"),
    "serving": ("serve", "durability", "replicas"),
    "quality": ("plan", "window", "cold", "strangers"),
}
MODULES = {subject: f"bench.{package}.{subject}" for package, subjects in PACKAGES.items() for subject in subjects}
NEED_DATA = ("epoch", "recommend", "evaluate", "serve", "replicas", "mixture", "cold", "spark", "processes")
MAY_HAVE_DATA = ("window", "codes", "counts", "strangers")
WHERE = (
    "give DATA=folder with an events.tsv.gz of the columns user, item, ts. The figures quoted are for MovieLens-1M, "
    "published at https://grouplens.org/datasets/movielens/1m/"
)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("subjects", nargs="+", choices=list(MODULES))
    parser.add_argument("--data", type=Path, help="folder with events.tsv.gz")
    options, rest = parser.parse_known_args(argv)
    for subject in options.subjects:
        if subject in NEED_DATA and (options.data is None or not (options.data / "events.tsv.gz").is_file()):
            parser.error(f"{subject} needs a log: {WHERE}")
    for subject in options.subjects:
        data = ["--data", str(options.data)] if options.data and subject in (*NEED_DATA, *MAY_HAVE_DATA) else []
        importlib.import_module(MODULES[subject]).main([*data, *rest])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SegueError as error:
        sys.exit(f"bench: {error}")
