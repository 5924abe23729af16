"""FusedExperts in decode stacks and cycles, against ONNX Runtime's contrib ops on the same layers in the same run.

    python -m benchmarks.experts [--json OUT] [--tokens 1 4] [--only nvfp4] [--without-kernels] [--without-ort]
    python -m benchmarks.experts --cycle [--json OUT] [--tokens 1 4] [--only 512/10] [--layers 48]
    python -m benchmarks.experts --sweep [--json OUT] [--tokens 1 4096] [--only int4] [--loads zipf] [--without-ort]

A stack has 8 layers that share one set of experts, and logits that send each layer and each replay elsewhere, beyond
the L2. All times are us per layer:
- route, maps, FC1, FC2: the kernels alone, FC2 with finalize, by the profiler with plain launches (ORT_MOE_PDL=0);
  the contrib op's by the profiler, too, by their names, in the JSON;
- experts: both, overlapped, in a CUDA graph of the stack; layer: with FusedRouter before them;
- layer in ORT, contrib: sessions with a CUDA graph that hold the stack as FusedRouter and FusedExperts, and as QMoE or
  MoE; host time of a run divided by the layers, so a run's own overhead of some 15 us is spread over them.
GB/s: the bytes of the experts chosen, each once, by the layer's time.

A cycle (--cycle) is a decode step: 48 layers one after another, each with the MatMul of its router, with experts shared
as above; ms per cycle, host time of a run of a session with a CUDA graph.

A sweep (--sweep) times a layer by our launchers at every number of tokens from 1 to 4096, with choices that are even,
by Zipf's law, or first of all one expert, beside the contrib op in sessions; and says where more tokens take less time.

The last layer is held against float64, and the answers of both sessions against each other. Memory for
512/10/2560/640 nvfp4: 1.4 GB on the host and on the device, and 1.7 GB more for each QMoE node: 83 GB for a cycle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import timing
from benchmarks.expert_loads import LOADS
from benchmarks.expert_models import Shape
from benchmarks.expert_sessions import Cycle, cycle_runner, relative_difference, stack_runner
from benchmarks.expert_stack import Experts, Stack
from benchmarks.expert_sweep import COLUMNS as SWEEP_COLUMNS
from benchmarks.expert_sweep import TOKENS as SWEEP_TOKENS
from benchmarks.expert_sweep import slower_than_more, sweep
from benchmarks.kernel_names import together
from benchmarks.output import add_json, publish
from benchmarks.own_process import times_printed_by

LAYERS = 8
CYCLE_LAYERS = 48
TOKENS = (1, 2, 4, 8)
CYCLE_TOKENS = (1, 4)
SHAPES = (
    Shape(512, 10, 2560, 640, "nvfp4"),
    Shape(128, 8, 2048, 768, "nvfp4"),
    Shape(512, 10, 2560, 640, "nvfp4", "float16"),
    Shape(512, 10, 2560, 640, "int4", "float16", 32),
    Shape(128, 8, 2048, 768, "int4", "float16", 32),
    Shape(8, 2, 4096, 14336, "int4", "float16", 32),
    Shape(32, 4, 2880, 2880, "mxfp4"),
    Shape(128, 8, 2048, 768, "mxfp4"),
    Shape(512, 10, 2560, 640, "dense"),
    Shape(128, 8, 2048, 768, "dense"),
    Shape(8, 2, 4096, 14336, "dense"),
    Shape(128, 8, 2048, 768, "int8", "float16", 128),
    Shape(128, 8, 2048, 768, "fp8", "bfloat16", 128),
    Shape(8, 2, 4096, 14336, "nvfp4"),
    Shape(8, 2, 4096, 14336, "mxfp4"),
    Shape(8, 2, 4096, 14336, "int8", "float16", 128),
    Shape(16, 1, 5120, 8192, "nvfp4"),
    Shape(16, 1, 5120, 8192, "mxfp4"),
    Shape(16, 1, 5120, 8192, "int4", "float16", 32),
    Shape(16, 1, 5120, 8192, "int8", "float16", 128),
    Shape(16, 1, 5120, 8192, "dense"),
)
CYCLE_SHAPES = (Shape(512, 10, 2560, 640, "nvfp4"), Shape(128, 8, 2048, 768, "nvfp4"))

MAP_KERNELS = ("ListMaps", "CountedMaps", "CountChoices", "SumCounts", "DealRows")
"""Names of the kernels that build routing maps, which many choices need between the router and FC1."""

ROW_KERNELS = ("ConvertRows", "PrepareTokens")
"""Names of the kernels that ready rows for the product behind them."""

STACK_TOLERANCE = {"float16": 4e-3, "bfloat16": 2e-2}
"""Of ours beside the contrib op's answer, whose roundings differ: it sums in the rows' type here and there."""

CYCLE_TOLERANCE = 0.1
"""Of what a cycle adds to its input: rows that differ in the last place go to another expert now and then."""


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
    layers: list[list[Any]] = []
    for event in sorted(trace.events(), key=lambda event: event.time_range.start):
        if "FusedRouter" in event.name:
            layers.append([])
        if "ort_moe" in event.name:
            layers[-1].append(event)
    return {part: statistics.median(times[part] for times in map(_parts, layers)) for part in _parts(layers[0])}


def _parts(kernels: list[Any]) -> dict[str, float]:
    """us of a layer's parts from the profiler's events, in order of their start."""
    route, *rest = kernels
    maps = [event for event in rest if any(word in event.name for word in MAP_KERNELS)]
    products = [event for event in rest if event not in maps]
    ahead = [any(word in event.name for word in ROW_KERNELS) for event in products].index(False)  # of FC1's product
    parts = {"route": [route], "maps": maps, "fc1": products[: ahead + 1], "fc2": products[ahead + 1 :]}
    return {part: sum(event.device_time for event in events) for part, events in parts.items()}


def kernel_times_without_overlap(shapes: list[Shape], tokens: list[int]) -> dict[tuple[str, int], dict[str, float]]:
    """kernel_times by shape and tokens, in a process of its own: the switch is read once."""
    code = (
        "import json; from benchmarks.experts import *\n"
        f"for shape in {shapes!r}:\n"
        "    experts = Experts(shape)\n"
        f"    for t in {tokens!r}:\n"
        "        print('TIMES', json.dumps([shape.name, t, kernel_times(Stack(experts, t, LAYERS))]))\n"
    )
    printed = times_printed_by(code, os.environ | {"ORT_MOE_PDL": "0"})
    return {(name, count): times for name, count, times in printed}


def contrib_kernel_times(stack: Stack) -> dict[str, float]:
    """us of the contrib op's kernels in a layer by their names, the longest first: the mean over runs of a session.

    The session has no CUDA graph, and its layers' experts are beyond the L2 in each run.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    run, runs = stack_runner(stack, contrib=True, graph=False), 5
    for _ in range(2):  # in which kernels are chosen
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(runs):
            run()
        torch.cuda.synchronize()
    kernels = [event for event in trace.events() if event.device_type == DeviceType.CUDA]
    times = together(((event.name, event.device_time) for event in kernels), runs * stack.layers)
    return {name: round(us, 2) for name, us in times.items()}


def measure(
    experts: Experts,
    tokens: int,
    copy_gbps: float,
    *,
    with_ort: bool,
    with_kernels: bool = True,
    layers: int = LAYERS,
) -> dict[str, Any]:
    """One row of a stack's results.

    Raises:
        AssertionError: Our answer is not float64's.
    """
    stack = Stack(experts, tokens, layers)
    layer = stack_time(stack, stack.layer)
    stack.check()
    gbps = stack.bytes_per_layer() / layer / 1e3
    row: dict[str, Any] = {
        "shape": stack.shape.name,
        "tokens": tokens,
        "experts_us": round(stack_time(stack, stack.experts), 2),
        "layer_us": round(layer, 2),
        "mbytes": round(stack.bytes_per_layer() / 1e6, 1),
        "gbps": round(gbps, 1),
        "percent_of_copy": round(100 * gbps / copy_gbps, 1),
    }
    if with_ort:
        times, answers = {}, {}
        for contrib in (False, True) if experts.shape.contrib else (False,):
            run = stack_runner(stack, contrib=contrib)
            times[contrib] = timing.session_time(run, nodes=layers, prepare=stack.choose)
            stack.choose()
            stack.y.fill_(torch.nan)
            torch.cuda.synchronize()
            run()
            answers[contrib] = stack.y.clone()
            del run  # and QMoE's copies of the experts
            if contrib and with_kernels:
                row["contrib_kernels_us"] = contrib_kernel_times(stack)
        row["layer_ort_us"] = round(times[False], 2)
        if True in times:
            row["contrib_us"] = round(times[True], 2)
            row["ratio_to_contrib"] = round(times[False] / times[True], 2)
            row["difference_from_contrib"] = float(f"{relative_difference(answers[False], answers[True]):.1e}")
    return row


def measure_cycle(experts: Experts, tokens: int, *, layers: int) -> dict[str, Any]:
    """One row of the cycles' results."""
    cycle = Cycle(experts, tokens, layers)
    times, answers = {}, {}
    for contrib in (False, True):
        run = cycle_runner(cycle, contrib=contrib)
        times[contrib] = timing.session_time(run, nodes=1, prepare=cycle.choose) / 1e3
        cycle.choose()
        cycle.y.fill_(torch.nan)
        torch.cuda.synchronize()
        run()
        answers[contrib] = cycle.y.clone()
        del run
    difference = relative_difference(answers[False], answers[True], origin=cycle.x)
    return {
        "shape": experts.shape.name,
        "tokens": tokens,
        "layers": layers,
        "cycle_ms": round(times[False], 3),
        "contrib_ms": round(times[True], 3),
        "ratio_to_contrib": round(times[False] / times[True], 2),
        "difference_from_contrib": float(f"{difference:.1e}"),
    }


def disagreements(rows: list[dict[str, Any]]) -> list[str]:
    """A sentence for each row whose two answers are further apart than their roundings explain."""
    result = []
    for row in rows:
        difference = row.get("difference_from_contrib", 0.0)
        tolerance = CYCLE_TOLERANCE if "cycle_ms" in row else STACK_TOLERANCE[row["shape"].split()[1]]
        if not difference <= tolerance:  # NaN too
            result.append(
                f"{row['shape']}, T = {row['tokens']}: the contrib op's answer differs by {difference} of its norm"
            )
    return result


COLUMNS = {
    "shape": "shape",
    "T": "tokens",
    "route": "route_us",
    "maps": "maps_us",
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
CYCLE_COLUMNS = {
    "shape": "shape",
    "T": "tokens",
    "layers": "layers",
    "ours, ms": "cycle_ms",
    "contrib, ms": "contrib_ms",
    "ours/contrib": "ratio_to_contrib",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_json(parser)
    parser.add_argument("--tokens", type=int, nargs="+", help="default: 1 2 4 8, cycles: 1 4, sweeps: 1 to 4096")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--cycle", action="store_true", help="time cycles, not stacks")
    kind.add_argument("--sweep", action="store_true", help="time a layer at every number of tokens")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS, help="of a sweep; default: all")
    parser.add_argument("--layers", type=int, default=CYCLE_LAYERS, help="of a cycle")
    parser.add_argument("--without-kernels", action="store_true", help="leave the profiler out")
    parser.add_argument("--without-ort", action="store_true", help="time our launchers alone")
    args = parser.parse_args()
    timing.require_gpu()
    torch.manual_seed(0)
    copy_gbps = timing.copy_bandwidth()
    shapes = [shape for shape in (CYCLE_SHAPES if args.cycle else SHAPES) if args.only in shape.name]
    if not shapes:  # nothing that a record should make room for
        sys.exit(f"no shape's name contains '{args.only}'")
    if args.sweep:
        _sweep(args, shapes, copy_gbps)
        return
    tokens = list(args.tokens or (CYCLE_TOKENS if args.cycle else TOKENS))
    rows = []
    for shape in shapes:
        experts = Experts(shape)
        for count in tokens:
            if args.cycle:
                rows.append(measure_cycle(experts, count, layers=args.layers))
            else:
                ways = {"with_ort": not args.without_ort, "with_kernels": not args.without_kernels}
                rows.append(measure(experts, count, copy_gbps, **ways))
            print(json.dumps(rows[-1]), file=sys.stderr)
        del experts
        torch.cuda.empty_cache()
    if not args.without_kernels and not args.cycle:
        kernels = kernel_times_without_overlap(shapes, tokens)
        for row in rows:
            row |= {f"{part}_us": round(time, 2) for part, time in kernels[row["shape"], row["tokens"]].items()}
    environment = timing.environment() | {"copy_gbps": round(copy_gbps, 1)}
    publish(rows, CYCLE_COLUMNS if args.cycle else COLUMNS, environment, args.json)
    if wrong := disagreements(rows):
        sys.exit("\n".join(wrong))


def _sweep(args: argparse.Namespace, shapes: list[Shape], copy_gbps: float) -> None:
    rows = sweep(shapes, args.loads, args.tokens or SWEEP_TOKENS, copy_gbps, with_contrib=not args.without_ort)
    environment = timing.environment() | {"copy_gbps": round(copy_gbps, 1)}
    publish(rows, SWEEP_COLUMNS, environment, args.json, {"slower_than_more_tokens": slower_than_more(rows)})
    if wrong := disagreements(rows):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
