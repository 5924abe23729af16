"""`ort-moe explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from ort_moe.choices import USUAL_TARGET
from ort_moe.cli.arguments import AsJson, ModelPath, TargetOption
from ort_moe.cli.console import print_json, progress, show


def explain(
    model: ModelPath,
    layer: Annotated[int | None, typer.Option(metavar="N", help="This site alone, counted from 0.")] = None,
    target: TargetOption = USUAL_TARGET,
    as_json: AsJson = False,
) -> None:
    """Tell of each site why it was or was not fused.

    With a stable code, the node, its other consumers and a way out.
    """
    from ort_moe.inspection.explain import explain as run

    with progress(f"reading {model}"):
        explanation = run(model, target=target)
    if layer is not None:
        try:
            explanation = explanation.layer(layer)
        except IndexError as error:
            raise typer.BadParameter(str(error), param_hint="--layer") from error
    if as_json:
        print_json(explanation.to_dict())
    else:
        show(explanation)
