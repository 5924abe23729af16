"""`ort-moe bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ort_moe.cli.arguments import AsJson, Provider, names, providers_of
from ort_moe.cli.console import print_json, progress, show
from ort_moe.cli.exit_codes import ExitCode


def bench(
    model: Annotated[
        Path, typer.Argument(metavar="IN", help="The original, or a folder with one model.", show_default=False)
    ],
    optimized: Annotated[
        Path | None, typer.Argument(metavar="OPT", help="The optimised model; else it is made here, for a while.")
    ] = None,
    provider: Annotated[
        Provider | None, typer.Option(help="Where the models run; else on CUDA where it is there.", show_default=False)
    ] = None,
    tokens: Annotated[str, typer.Option(metavar="N,M", help="Tokens of a run; a time for each.")] = "1,64",
    past: Annotated[
        int, typer.Option(metavar="N", min=0, help="Tokens that went before, where the inputs hold a past.")
    ] = 0,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of which the median is told.")] = 50,
    weights: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Formats for the experts' weights, as optimize has them; a model for each."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the random inputs.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="OUT.png", help="Draw the times and the memory, too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what fusing a model gains.

    The model as it is, with ONNX Runtime's contrib nodes, and with ours, each in a process of its own: time to load,
    time of a run, with a CUDA graph where one can be captured, expert weights read per second, and memory.
    """
    numbers = _tokens(tokens)
    formats = names(weights) or ("keep",)
    _check_formats(formats, optimized)
    if plot is not None:
        from ort_moe.benchmarking.plot import check_plot

        if plot.suffix.lower() != ".png":
            raise typer.BadParameter(f"a PNG is drawn, and '{plot.name}' does not end in .png", param_hint="--plot")
        check_plot(plot, source=model)

    from ort_moe.benchmarking import bench as run

    with progress(f"measuring {model}"):
        benchmark = run(
            model,
            optimized,
            providers=None if provider is None else providers_of(provider),
            tokens=numbers,
            past=past,
            steps=steps,
            weights=formats,
            seed=seed,
        )
    if as_json:
        print_json(benchmark.to_dict())
    show(benchmark, on_stderr=as_json)
    if plot is not None and benchmark.measured:
        from ort_moe.benchmarking.plot import write_plot

        write_plot(benchmark, plot)
    if benchmark.failed or not benchmark.measured:
        raise typer.Exit(ExitCode.ERROR)


def _tokens(given: str) -> tuple[int, ...]:
    parts = names(given) or ()
    if not parts or not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"numbers above 0 are expected, as in 1,64, but '{given}' came", param_hint="--tokens")
    return tuple(int(part) for part in parts)


def _check_formats(formats: tuple[str, ...], optimized: Path | None) -> None:
    from ort_moe.choices import WEIGHTS, check_choice

    if optimized is not None and formats != ("keep",):
        raise typer.BadParameter("weights are packed where the model is made, and OPT is made", param_hint="--weights")
    for name in formats:
        try:
            check_choice("the format", name, WEIGHTS)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--weights") from error
