"""FusedExperts in a decode stack, against ONNX Runtime's contrib ops on the same stack in the same run.

    python -m benchmarks.experts [--json OUT] [--tokens 1 4] [--only nvfp4] [--without-ort]

A stack has 8 layers that share one set of experts, and logits that send each layer and each replay elsewhere, beyond
the L2. All times are us per layer:
- FC1, FC2: the kernels alone, FC2 with finalize, by the profiler with plain launches (ORT_MOE_PDL=0);
- experts: both, overlapped, in a CUDA graph of the stack; layer: with FusedRouter before them;
- layer in ORT, contrib: sessions with a CUDA graph that hold the stack as FusedRouter and FusedExperts, and as QMoE or
  MoE; host time of a run divided by the layers, so a run's own overhead of some 15 us is spread over them.
GB/s: the bytes of the experts chosen, each once, by the layer's time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing
from benchmarks.expert_sessions import contrib_runner, our_runner
from benchmarks.expert_stack import Shape, Stack

LAYERS = 8
TOKENS = (1, 2, 4, 8)
SHAPES = (
    Shape(512, 10, 2560, 640, "nvfp4"),
    Shape(128, 8, 2048, 768, "nvfp4"),
    Shape(512, 10, 2560, 640, "nvfp4", "float16"),
    Shape(512, 10, 2560, 640, "dense"),
    Shape(128, 8, 2048, 768, "dense"),
)


def stack_time(stack: Stack, launch: Callable[[int, int], None]) -> float:
    """us per layer of a CUDA graph of the stack."""
    return timing.graph_time(launch, launches=stack.layers, prepare=stack.choose)


def kernel_times(stack: Stack) -> dict[str, float]:
    """Median us of each kernel of a layer by its part, launched one after another."""
    from torch.profiler import ProfilerActivity, profile

    flush = torch.empty(timing.FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for repeat in range(5):
            stack.choose(repeat)
            flush.fill_(repeat)
            for n in range(stack.layers):
                stack.layer(n)
        torch.cuda.synchronize()
    times = defaultdict(list)
    for event in trace.events():
        for part, name in (("route", "FusedRouter"), ("fc1", "GroupedKernel"), ("fc2", "Fc2FinalizeKernel")):
            if name in event.name:
                times[part].append(event.device_time)
    return {part: statistics.median(values) for part, values in times.items()}


def kernel_times_without_overlap(shapes: list[Shape], tokens: list[int]) -> dict[tuple[str, int], dict[str, float]]:
    """kernel_times by shape and tokens, in a process of its own: the switch is read once."""
    code = (
        "import json; from benchmarks.experts import *;"
        f"print(json.dumps([[s.name, t, kernel_times(Stack(s, t, LAYERS))] for s in {shapes!r} for t in {tokens!r}]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"ORT_MOE_PDL": "0"}, capture_output=True, text=True, check=True
    )
    return {(name, count): times for name, count, times in json.loads(run.stdout.splitlines()[-1])}


def measure(shape: Shape, tokens: int, copy_gbps: float, *, with_ort: bool) -> dict[str, Any]:
    """One row of the results."""
    stack = Stack(shape, tokens, LAYERS)
    layer = stack_time(stack, stack.layer)
    stack.check()
    gbps = stack.bytes_per_layer() / layer / 1e3
    row: dict[str, Any] = {
        "shape": shape.name,
        "tokens": tokens,
        "experts_us": round(stack_time(stack, stack.experts), 2),
        "layer_us": round(layer, 2),
        "mbytes": round(stack.bytes_per_layer() / 1e6, 1),
        "gbps": round(gbps, 1),
        "percent_of_copy": round(100 * gbps / copy_gbps, 1),
    }
    if with_ort:
        row["layer_ort_us"] = round(timing.session_time(our_runner(stack), nodes=LAYERS, prepare=stack.choose), 2)
        row["contrib_us"] = round(timing.session_time(contrib_runner(stack), nodes=LAYERS, prepare=stack.choose), 2)
        row["ratio_to_contrib"] = round(row["layer_ort_us"] / row["contrib_us"], 2)
    return row


COLUMNS = {
    "shape": "shape",
    "T": "tokens",
    "FC1": "fc1_us",
    "FC2": "fc2_us",
    "experts": "experts_us",
    "layer": "layer_us",
    "layer in ORT": "layer_ort_us",
    "contrib": "contrib_us",
    "ours/contrib": "ratio_to_contrib",
    "MB": "mbytes",
    "GB/s": "gbps",
    "% of copy": "percent_of_copy",
}


def print_table(rows: list[dict[str, Any]]) -> None:
    lines = [tuple(COLUMNS)] + [tuple(str(row.get(key, "-")) for key in COLUMNS.values()) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the results here")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--without-kernels", action="store_true", help="leave the profiler out")
    parser.add_argument("--without-ort", action="store_true", help="time our launchers alone")
    args = parser.parse_args()
    torch.manual_seed(0)
    copy_gbps = timing.copy_bandwidth()
    shapes = [shape for shape in SHAPES if args.only in shape.name]
    rows = []
    for shape in shapes:
        for tokens in args.tokens:
            rows.append(measure(shape, tokens, copy_gbps, with_ort=not args.without_ort))
            print(json.dumps(rows[-1]), file=sys.stderr)
            torch.cuda.empty_cache()
    if not args.without_kernels:
        kernels = kernel_times_without_overlap(shapes, list(args.tokens))
        for row in rows:
            row |= {f"{part}_us": round(time, 2) for part, time in kernels[row["shape"], row["tokens"]].items()}
    environment = timing.environment() | {"copy_gbps": round(copy_gbps, 1)}
    print(", ".join(f"{key} {value}" for key, value in environment.items()))
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
