"""`ort-moe optimize`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from ort_moe.choices import Target, Weights
from ort_moe.cli.arguments import TARGET_HELP, Force, check_rules, names
from ort_moe.cli.console import progress, show
from ort_moe.cli.exit_codes import ExitCode
from ort_moe.errors import VerificationError


def optimize(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="An ONNX model, or a model folder of onnxruntime-genai.", show_default=False
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT", help="Where the result goes.", show_default=False)
    ] = None,
    target: Annotated[
        Target | None,
        typer.Option(
            help=f"{TARGET_HELP} Not given: cuda; of a folder, where its genai_config.json has it run.",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        Weights, typer.Option(help="Keep the experts' weights, or pack them; all else keeps its precision.")
    ] = "keep",
    block_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="int4, int8, fp8: weights that share a scale: 16, 32, 64 or 128."),
    ] = None,
    zero_points: Annotated[
        bool, typer.Option("--zero-points", help="int4, int8: with zero points, for lopsided weights.")
    ] = False,
    rules: Annotated[str | None, typer.Option(metavar="A,B", help="Apply these rules alone; +A: A besides.")] = None,
    skip: Annotated[str | None, typer.Option(metavar="A,B", help="Do not apply these rules.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be done, and write nothing.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Tell of each site why it was or was not fused.")] = False,
    verify: Annotated[
        bool, typer.Option(help="Run both models and compare them before the output is put in place.")
    ] = True,
    fail_on_no_match: Annotated[
        bool, typer.Option("--fail-on-no-match", help="Where nothing matches, write nothing and exit with 3.")
    ] = False,
    report: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the report as JSON, too.")] = None,
    external_data: Annotated[
        str, typer.Option(metavar="keep|NAME", help="Keep the weights' files, or gather all weights in one.")
    ] = "keep",
    force: Force = False,
) -> None:
    """Fuse routers and their experts, and hold the answer against the original's."""
    if output is None and not dry_run:
        raise typer.BadParameter("an output is needed, or --dry-run", param_hint="-o")
    if rules is not None and skip is not None:
        raise typer.BadParameter("give either --rules or --skip", param_hint="--skip")
    only, without = names(rules), names(skip) or ()
    check_rules(only, "--rules")
    check_rules(without, "--skip")
    if weights == "keep" and (block_size is not None or zero_points):
        raise typer.BadParameter("nothing is packed without it", param_hint="--weights")
    if weights != "keep":
        if target == "contrib":
            raise typer.BadParameter("contrib nodes keep the weights that they have", param_hint="--weights")
        _check_packing(weights, block_size, zero_points)
    if report is not None:
        _check_report(report, model, output, external_data)

    from ort_moe.optimization.optimize import optimize as run

    try:
        with progress(f"optimising {model}"):
            result = run(
                model,
                None if dry_run else output,
                target=target,
                rules=only,
                skip=without,
                verify=verify,
                require_match=fail_on_no_match,
                external_data=external_data,
                force=force,
                weights=weights,
                block_size=block_size,
                zero_points=zero_points,
            )
    except VerificationError as error:
        if error.verification is not None:
            show(error.verification, on_stderr=True)
        raise
    show(result.in_full if explain else result)
    if report is not None:
        _write_report(report, result.to_dict())
    if fail_on_no_match and not result.matched:
        raise typer.Exit(ExitCode.NOTHING_MATCHED)


def _check_packing(weights: Weights, block_size: int | None, zero_points: bool) -> None:
    from ort_moe.packing.pieces import Packing

    try:
        Packing.of(weights, block_size, zero_points=zero_points)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--weights") from error


def _check_report(path: Path, model: Path, output: Path | None, external_data: str) -> None:
    """Looks whether the report can be written there, before work is put into the model."""
    from ort_moe.errors import OutputError
    from ort_moe.files.side_file import check_side_file

    if model.is_dir():
        for folder in (model, output):
            if folder is not None and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
                raise OutputError(f"cannot write the report {path}: it lies in the folder {folder}")
    check_side_file(path, "report", source=model, begins=b"{")
    if output is not None:
        data = f"{output.name}.data" if external_data == "keep" else external_data
        if _place(path) in (_place(output), _place(output.parent / data)):
            raise OutputError(f"cannot write the report {path}: the model goes there")


def _place(path: Path) -> Path:
    """Where a file is put: in which folder, by whatever name that is given, and under which name."""
    return Path(os.path.realpath(path.parent), path.name)


def _write_report(path: Path, document: dict[str, object]) -> None:
    from ort_moe.files.side_file import write_side_file

    text = json.dumps(document, indent=2) + "\n"
    write_side_file(path, "report", lambda staged: staged.write_text(text, encoding="utf-8"))
