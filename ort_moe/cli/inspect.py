"""`ort-moe inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ort_moe.cli.arguments import AsJson, ModelPath
from ort_moe.cli.console import print_json, progress, show


def inspect(
    model: ModelPath,
    other: Annotated[Path | None, typer.Argument(metavar="OTHER", help="A second one: show what changed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the MoE view of a model; of two models, what changed.

    Layers, experts and router arithmetic, the experts' weights and the bytes that a token reads of them, and what
    keeps the model out of a CUDA graph.
    """
    from ort_moe.inspection.inspect import Changes
    from ort_moe.inspection.inspect import inspect as run

    with progress(f"reading {model}"):
        result = run(model) if other is None else Changes(run(model), run(other))
    if as_json:
        print_json(result.to_dict())
    else:
        show(result)
