"""The verbs of `ort-moe` in one place."""

from __future__ import annotations

from typing import Annotated

import typer

from ort_moe.cli.bench import bench
from ort_moe.cli.doctor import doctor
from ort_moe.cli.explain import explain
from ort_moe.cli.export import export
from ort_moe.cli.inspect import inspect
from ort_moe.cli.optimize import optimize
from ort_moe.cli.tables import ops, rules
from ort_moe.cli.verify import verify

app = typer.Typer(
    name="ort-moe",
    help="Fast Mixture-of-Experts models in ONNX Runtime.",
    epilog="Exit codes: 0 done, 1 error, 2 usage, 3 nothing matched (with --fail-on-no-match), "
    "4 verification failed (nothing is put in place), 5 environment unfit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich would take a third of its time
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"ort-moe {version('ort-moe')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for verb in (export, optimize, inspect, explain, verify, bench, doctor, ops, rules):
    app.command()(verb)
