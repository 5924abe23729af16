"""A layer of FusedExperts at every number of tokens and load of its experts: `python -m benchmarks.experts --sweep`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from benchmarks import timing
from benchmarks.expert_models import Shape
from benchmarks.expert_sessions import AnyTokens, relative_difference
from benchmarks.expert_stack import Experts, Stack

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096)

SLACK = 1.02
"""By what fewer tokens may take longer than the next more: medians differ so much from run to run."""

SESSION_LAYERS = 8
"""Of the contrib op's sessions, which spread a run's overhead over them."""

CHECKED_TOKENS = 4
"""Of a stack that are held against float64."""

_POINT_US = 5e5
"""What the replays of a point take together, unless fewer than the least number of them take longer."""

COLUMNS = {
    "shape": "shape",
    "load": "load",
    "T": "tokens",
    "experts": "experts",
    "layer": "layer_us",
    "contrib": "contrib_us",
    "ours/contrib": "ratio_to_contrib",
    "MB": "mbytes",
    "GB/s": "gbps",
    "% of copy": "percent_of_copy",
    "TFLOP/s": "tflops",
}


def layers_of(tokens: int) -> int:
    """Layers of a stack: many where a few tokens alone would find their experts in the cache."""
    return 8 if tokens <= 64 else 4 if tokens <= 512 else 2


def sweep(
    shapes: Iterable[Shape], loads: Sequence[str], tokens: Sequence[int], copy_gbps: float, *, with_contrib: bool
) -> list[dict[str, Any]]:
    """The rows of all shapes, loads and numbers of tokens, each also printed to stderr as it is measured."""
    rows = []
    for shape in shapes:
        experts = Experts(shape)
        contrib = AnyTokens(experts, SESSION_LAYERS) if with_contrib and shape.contrib else None
        for load in loads:
            for count in tokens:
                row = measure(experts, load, count, copy_gbps)
                if contrib is not None:
                    row |= beside_contrib(experts, load, count, contrib, row["layer_us"])
                print(json.dumps(row), file=sys.stderr)
                rows.append(row)
        del experts, contrib
        torch.cuda.empty_cache()
    return rows


def measure(experts: Experts, load: str, tokens: int, copy_gbps: float) -> dict[str, Any]:
    """One point: router and experts by our launchers, in a CUDA graph of a stack.

    Raises:
        AssertionError: The answer is not float64's.
    """
    layers = layers_of(tokens)
    stack = Stack(experts, tokens, layers, load)
    repeats = _repeats(_once_us(stack) * layers)
    us = timing.graph_time(stack.layer, launches=layers, repeats=repeats, prepare=stack.choose)
    stack.check(CHECKED_TOKENS)
    gbps = stack.bytes_per_layer() / us / 1e3
    flops = experts.shape.flops_per_choice * tokens * experts.shape.k
    return {
        "shape": experts.shape.name,
        "load": load,
        "tokens": tokens,
        "layers": layers,
        "layer_us": round(us, 2),
        "experts": round(stack.chosen(), 1),
        "mbytes": round(stack.bytes_per_layer() / 1e6, 1),
        "gflop": round(flops / 1e9, 2),
        "gbps": round(gbps, 1),
        "percent_of_copy": round(100 * gbps / copy_gbps, 1),
        "tflops": round(flops / us / 1e6, 1),
    }


def beside_contrib(experts: Experts, load: str, tokens: int, session: AnyTokens, ours_us: float) -> dict[str, Any]:
    """The contrib op's time at the same point, by host time of a session with a CUDA graph, and how far answers are."""
    stack = Stack(experts, tokens, session.layers, load)
    run = session.runner(stack)
    run()
    us = timing.session_time(run, nodes=1, repeats=1)
    us = timing.session_time(run, nodes=session.layers, repeats=_repeats(us), prepare=stack.choose)
    theirs = stack.y.clone()
    for n in range(stack.layers):
        stack.layer(n)
    torch.cuda.synchronize()
    return {
        "contrib_us": round(us, 2),
        "ratio_to_contrib": round(ours_us / us, 2),
        "difference_from_contrib": float(f"{relative_difference(stack.y, theirs):.1e}"),
    }


def _once_us(stack: Stack) -> float:
    """us of one layer, roughly: its second launch."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stack.layer(0)
    start.record()
    stack.layer(0)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _repeats(us: float) -> int:
    return max(3, min(15, int(_POINT_US / us)))


def slower_than_more(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for each number of tokens that takes longer than the next larger one."""
    lines: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        lines.setdefault((row["shape"], row["load"]), []).append(row)
    sentences = []
    for (shape, load), line in lines.items():
        line.sort(key=lambda row: row["tokens"])
        for few, more in pairwise(line):
            if few["layer_us"] > SLACK * more["layer_us"]:
                sentences.append(
                    f"{shape}, {load}: T = {few['tokens']} takes {few['layer_us']:.2f} us, "
                    f"T = {more['tokens']} takes {more['layer_us']:.2f}"
                )
    return sentences
