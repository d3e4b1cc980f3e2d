"""`segue export`: a run → one ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segue.cli.options import Json, Run, print_result
from segue.terminal import Display


def export(run: Run, onnx: Annotated[Path, typer.Option(help="The file to make.")], json: Json = False) -> None:
    """Write a run as one ONNX file, for recommendations without torch."""
    from segue import api

    with Display(quiet=json) as display:
        report = api.export(run, onnx=onnx, progress=display.stage)
    print_result(
        report,
        f"Made {onnx}: {report.items:,} items, {report.bytes:,} bytes. Its scores differ from torch's by "
        f"{report.difference:.0e} at most.",
        report.note or "",
        f'Next, in Python: from segue.slim import SlimRecommender; SlimRecommender.open("{onnx}").recommend([…])',
        json=json,
    )
