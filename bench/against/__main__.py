"""`python -m bench.against SUBJECT --against COMMIT`: this version and another, measured alternately in one run.

`make bench SUBJECT=epoch|serve|prepare AGAINST=COMMIT` calls it. The other version is checked out in .against/ and has
an environment of its own, installed by its own Makefile; each is called through its own command line.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench.against.alternate import ROUNDS, alternate, rows
from bench.against.subjects import SUBJECTS, add_options
from bench.against.version import other_version, this_version
from bench.tables import publish
from segue.errors import SegueError


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("subject", choices=list(SUBJECTS))
    parser.add_argument("--against", required=True, metavar="COMMIT", help="AGAINST=: anything that names a commit")
    parser.add_argument("--data", type=Path, help="DATA=: folder with events.tsv.gz, for epoch and serve")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="measurements of each version")
    add_options(parser)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as name:
        subject = SUBJECTS[options.subject](options, Path(name))
        versions = (this_version(), other_version(options.against))
        for version in versions:
            subject.begin(version)
        results = alternate(versions, subject.measure, rounds=options.rounds)
    title = f"{options.subject}: this version against {versions[1].name}, medians of {options.rounds} alternated rounds"
    note = "ratio: this version divided by the other; below 1, this one needs less."
    publish(f"against-{options.subject}", title=title, rows=rows(results), notes=[note], body=results)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SegueError as error:
        sys.exit(f"bench: {error}")
