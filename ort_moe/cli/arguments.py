"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ort_moe.choices import Target

ModelPath = Annotated[
    Path, typer.Argument(metavar="MODEL", help="An ONNX model, or a folder with one.", show_default=False)
]
Provider = Literal["cpu", "cuda"]
"""An execution provider."""

TARGET_HELP = (
    "Where the model shall run: what ONNX Runtime itself computes faster there stays. Or contrib: ONNX Runtime's own "
    "MoE and QMoE in place of our nodes."
)
TargetOption = Annotated[Target, typer.Option(help=TARGET_HELP)]
Force = Annotated[
    bool, typer.Option("--force", help="Replace what is there: a model, or a model folder with all that lies in it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and anything else on stderr.")]


def providers_of(name: Provider) -> tuple[str, ...]:
    """As the API and ONNX Runtime call them; behind CUDA, the CPU has what CUDA does not run."""
    from ort_moe.running.session import CPU, CUDA, ON_CPU

    return ON_CPU if name == "cpu" else (CUDA, CPU)


def names(given: str | None) -> tuple[str, ...] | None:
    """`A,B` as ("A", "B"); None where nothing was given."""
    return None if given is None else tuple(name.strip() for name in given.split(",") if name.strip())


def check_rules(given: tuple[str, ...] | None, option: str) -> None:
    """Refuses a rule that is not there.

    Raises:
        typer.BadParameter: Naming the rules that are.
    """
    from ort_moe.rewrites import RULES

    for name in given or ():
        if name.removeprefix("+" if option == "--rules" else "") not in RULES:
            raise typer.BadParameter(f"there is no rule '{name}'; the rules are {', '.join(RULES)}", param_hint=option)
