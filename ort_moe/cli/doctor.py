"""`ort-moe doctor`."""

from __future__ import annotations

import typer

from ort_moe.cli.arguments import AsJson
from ort_moe.cli.console import print_json, show
from ort_moe.cli.exit_codes import ExitCode


def doctor(as_json: AsJson = False) -> None:
    """Look whether this installation can run fused models.

    ONNX Runtime and its wheels, CUDA and its driver, our library, and each operator.
    """
    from ort_moe.diagnosis.doctor import diagnose

    diagnosis = diagnose()
    if as_json:
        print_json(diagnosis.to_dict())
    show(diagnosis, on_stderr=as_json)
    if not diagnosis.fit:
        raise typer.Exit(ExitCode.ENVIRONMENT_UNFIT)
