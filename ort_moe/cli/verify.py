"""`ort-moe verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ort_moe.cli.arguments import AsJson, Provider, providers_of
from ort_moe.cli.console import print_json, progress, show
from ort_moe.cli.exit_codes import ExitCode


def verify(
    reference: Annotated[
        Path, typer.Argument(metavar="REF", help="The original, or a folder with one model.", show_default=False)
    ],
    optimized: Annotated[
        Path, typer.Argument(metavar="OPT", help="The optimised model, likewise.", show_default=False)
    ],
    provider: Annotated[Provider, typer.Option(help="Where the models are run end to end.")] = "cpu",
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the random inputs.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare two models on random inputs.

    Each router and each layer of experts on the original's own values, then end to end at several shapes, and twice for
    the same bits.
    """
    from ort_moe.verification import verify as run

    with progress(f"verifying {optimized}"):
        verification = run(reference, optimized, providers=providers_of(provider), seed=seed)
    if as_json:
        print_json(verification.to_dict())
    show(verification, on_stderr=as_json)
    if not verification.passed:
        raise typer.Exit(ExitCode.VERIFICATION_FAILED)
