"""A benchmark as a picture: times at each number of tokens, load times and memory, as bars."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ort_moe.benchmarking.result import Benchmark, Timing
from ort_moe.errors import EnvironmentUnfitError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PLAIN, _GRAPH = "#7f7f7f", "#1f77b4"


class _Bars(NamedTuple):
    """Bars of one colour in a panel, one for each variant; None: there is none."""

    label: str
    color: str
    values: Sequence[float | None]


def check_plot(path: str | os.PathLike[str], *, source: str | os.PathLike[str]) -> None:
    """Looks whether a plot can be drawn, and written there, before anything is measured for it.

    Raises:
        EnvironmentUnfitError: matplotlib is not there.
        OutputError: It cannot be written there.
    """
    from ort_moe.files.side_file import check_side_file

    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise EnvironmentUnfitError(f"plots need matplotlib, install ort-moe[plot]: {error}") from None
    check_side_file(Path(path), "plot", source=source, begins=b"\x89PNG\r\n\x1a\n")


def write_plot(benchmark: Benchmark, path: str | os.PathLike[str], *, model: str | None = None) -> None:
    """Draws the benchmark as a PNG.

    Args:
        benchmark: What was measured.
        path: The file.
        model: What the title calls the model as given; None: the name of its file.

    Raises:
        EnvironmentUnfitError: matplotlib is not there.
        OutputError: It cannot be written there.
    """
    check_plot(path, source=benchmark.source)
    from matplotlib.figure import Figure

    from ort_moe.files.side_file import write_side_file

    shown = [variant for variant in benchmark.variants if variant.measured]
    names = [variant.name for variant in shown]
    panels = _panels(benchmark)
    figure = Figure(figsize=(4.2 * len(panels), 1.4 + 0.55 * len(names)), layout="constrained")
    title = f"{model or Path(benchmark.source).name} on {benchmark.device}, ONNX Runtime {benchmark.onnxruntime}"
    figure.suptitle(title, fontsize=10)
    for axes, (title, bars) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, title, bars, names)
    write_side_file(Path(path), "plot", partial(figure.savefig, format="png", dpi=120))


def _panels(benchmark: Benchmark) -> list[tuple[str, list[_Bars]]]:
    """Title and bars of each panel."""
    shown = [variant for variant in benchmark.variants if variant.measured]
    panels = []
    for number in dict.fromkeys(timing.tokens for each in shown for timing in each.timings):
        found = [next((t for t in each.timings if t.tokens == number), Timing(number)) for each in shown]
        bars = [_Bars("node by node", _PLAIN, [timing.step_ms for timing in found])]
        bars += [_Bars("CUDA graph", _GRAPH, [timing.graph_ms for timing in found])]
        title = "fixed inputs" if number is None else f"{number} token{'' if number == 1 else 's'}"
        panels.append((f"{title}: ms", bars))
    panels.append(("load: s", [_Bars("load", _PLAIN, [each.load_seconds for each in shown])]))
    host = _Bars("host", _PLAIN, [_gibibytes(each.host_bytes) for each in shown])
    device = _Bars("GPU", _GRAPH, [_gibibytes(each.device_bytes) for each in shown])
    return [*panels, ("memory: GiB", [host, device])]


def _gibibytes(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 2**30


def _draw(axes: Axes, title: str, bars: Sequence[_Bars], names: Sequence[str]) -> None:
    drawn = [each for each in bars if any(value is not None for value in each.values)]
    height = 0.8 / max(1, len(drawn))
    for n, each in enumerate(drawn):
        places = [row + (n - (len(drawn) - 1) / 2) * height for row in range(len(names))]
        container = axes.barh(places, [value or 0.0 for value in each.values], height, color=each.color)
        axes.bar_label(container, ["-" if v is None else f"{v:.3g}" for v in each.values], padding=3, fontsize=8)
        container.set_label(each.label)
    axes.set_title(title, fontsize=10)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(drawn) > 1:
        axes.legend(fontsize=8)
