"""The section of docs/performance.md on every number of tokens, and its plot, from what the sweep recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

from docs.line_plots import Line, Panel, Style, line_plots

HEADER = """\
### Every number of tokens

us per layer, router and experts, by our launchers in a CUDA graph, with the experts' choice drawn evenly, by Zipf's law
(the n-th most popular expert 1 / n as likely as the first), and with one expert as every token's first; "contrib" is
the contrib op in a session with a CUDA graph on even choices. GB/s and its share of a large copy's bandwidth count the
bytes of the experts that the last draw chose, each once, which with few experts may be off by a tenth; TFLOP/s the
products of tokens and their experts; both on even choices. Columns of which nothing was measured in a shape are left
out. Which kernels take a call depends on its format and sizes and not on where the choices fall. Up to 16 tokens were
measured on the day that is told, more of them on the day before, with shares of that day's copy. `python -m
benchmarks.experts --sweep` measures again:

```sh gpu
python -m benchmarks.experts --sweep --only mxfp4 --tokens 1 64 --loads uniform --without-ort
```

![us per layer by the number of tokens](performance_sweep.svg)
"""

HEAD = ("tokens", "even", "Zipf", "one first", "contrib", "even / contrib", "GB/s", "% of copy", "TFLOP/s")

_STYLES = (
    Style("even", "#1f77b4"),
    Style("Zipf", "#2ca02c"),
    Style("one first", "#d62728"),
    Style("contrib, even", "#7f7f7f", "5 3"),
)
_LOADS = {"uniform": "even", "zipf": "Zipf", "one": "one first"}

Rows = Sequence[Mapping[str, Any]]


def by_shape(rows: Rows) -> dict[str, dict[int, dict[str, Mapping[str, Any]]]]:
    """The rows by shape, number of tokens, ascending, and load."""
    result: dict[str, dict[int, dict[str, Mapping[str, Any]]]] = {}
    for row in sorted(rows, key=lambda row: int(row["tokens"])):
        result.setdefault(row["shape"], {}).setdefault(row["tokens"], {})[row["load"]] = row
    order = list(dict.fromkeys(row["shape"] for row in rows))
    return {shape: result[shape] for shape in order}


def table(by_tokens: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and the lines of a shape's table, without columns of which nothing was measured."""
    lines = [_cells(tokens, loads) for tokens, loads in by_tokens.items()]
    measured = [any(column) for column in zip(*lines, strict=True)]
    head, *lines = (tuple(compress(line, measured)) for line in (HEAD, *lines))
    return head, lines


def _cells(tokens: int, loads: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """A line of a shape's table: what was not measured stays empty."""
    even = loads.get("uniform", {})

    def number(row: Mapping[str, Any], key: str, digits: int) -> str:
        return f"{row[key]:.{digits}f}" if key in row else ""

    times = (number(loads.get(load, {}), "layer_us", 2) for load in _LOADS)
    beside = (number(even, key, digits) for key, digits in (("contrib_us", 2), ("ratio_to_contrib", 2)))
    rates = (number(even, key, digits) for key, digits in (("gbps", 0), ("percent_of_copy", 1), ("tflops", 1)))
    return str(tokens), *times, *beside, *rates


def findings(sentences: Sequence[str]) -> str:
    """The numbers of tokens that take longer than the next larger one, in Markdown."""
    if not sentences:
        return "Ours takes at no number of tokens longer than at the next larger one.\n"
    return "Where fewer tokens take longer than more:\n\n" + "".join(f"- {sentence}.\n" for sentence in sentences)


def plot(rows: Rows) -> str:
    """us per layer by tokens, a panel a shape, as SVG."""
    panels = []
    for shape, by_tokens in by_shape(rows).items():
        found: dict[str, list[tuple[float, float]]] = {style.name: [] for style in _STYLES}
        for tokens, loads in by_tokens.items():
            for load, row in loads.items():
                found[_LOADS[load]].append((tokens, row["layer_us"]))
            if "contrib_us" in loads.get("uniform", {}):
                found["contrib, even"].append((tokens, loads["uniform"]["contrib_us"]))
        panels.append(Panel(shape, [Line(name, points) for name, points in found.items() if points]))
    return line_plots(panels, _STYLES, "tokens", "us")
