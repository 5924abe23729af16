"""The section of docs/performance.md on whole models, from what `benchmarks.end_to_end` recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from docs.markdown_table import markdown_table

PLOT = "performance_end_to_end.png"

HEADER = f"""\
## From file to answer

Layers of Qwen3-30B-A3B one after another, each an MoE block as exported from PyTorch (router's product, router and
experts in the form `batched_mm`) with a residual, without attention; as exported, as `--target contrib` makes it, and
as ours. Each is a file that is loaded and run in a process of its own by what `ort-moe bench` is: medians of host time,
on other rows in every run ([how](bench.md)). GB/s are the bytes of the chosen experts' weights by that time. Memory is
what the process had at most, and what the GPU had less of it free.

```sh gpu
python -m benchmarks.end_to_end --layers 1 --tokens 1 --steps 5
```

measures again in short; without these options everything is run.

![ms, load time and memory of each model]({PLOT})
"""

HEAD = ("model", "tokens", "ms", "CUDA graph", "times faster", "GB/s", "load, s", "host, GiB", "GPU, GiB")


def table(document: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and the lines; load time and memory stand in the first line of a model."""
    lines = []
    for variant in document["variants"]:
        whole = [_number(variant["load_seconds"]), *(_gibibytes(variant[f"{of}_bytes"]) for of in ("host", "device"))]
        for n, timing in enumerate(variant["timings"]):
            numbers = (_number(timing[key]) for key in ("step_ms", "graph_ms", "times_faster", "expert_gbps"))
            tokens = "fixed" if timing["tokens"] is None else str(timing["tokens"])
            lines.append((variant["name"], tokens, *numbers, *(whole if n == 0 else [""] * len(whole))))
    return HEAD, lines


def findings(document: Mapping[str, Any]) -> str:
    """What was not measured, and why, in Markdown; empty where everything was."""
    told = [f"{variant['name']}: {variant['why']}" for variant in document["variants"] if variant["why"]]
    for variant in document["variants"]:
        for timing in variant["timings"]:
            where = f"{variant['name']}, tokens {timing['tokens']}"
            if timing["why"]:
                told.append(f"{where}: {timing['why']}")
            elif timing["why_no_graph"]:
                told.append(f"{where}, no CUDA graph: {timing['why_no_graph']}")
    return "".join(f"- {line}\n" for line in told)


def section(document: Mapping[str, Any]) -> Sequence[str]:
    """The parts of the section, of what was recorded."""
    found = document["environment"]
    driver = f", driver {found['driver']}" if "driver" in found else ""
    where = f"{document['device']}{driver}, ONNX Runtime {document['onnxruntime']}, {found['date']}."
    told = findings(document)
    return [HEADER, f"{document['source']}; {where}\n", markdown_table(*table(document)), *([told] if told else [])]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _gibibytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.1f}"
