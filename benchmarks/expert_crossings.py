"""Where FusedExperts' kernels for few tokens should give way to the grouped product: both, beside what a call takes.

    python -m benchmarks.expert_crossings [--json OUT] [--only int4] [--tokens 1 2 3 4]

us per layer, router and experts, by our launchers in a CUDA graph of a stack, as in a sweep (benchmarks.experts), three
times: with what the library takes by itself, and with ORT_MOE_FEW_CHOICES forcing either way. Where the kernels for few
tokens do not fit, forcing them changes nothing, and such points count for nothing. "lost": by how much the way that is
taken lasts longer than the faster one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import timing
from benchmarks.expert_models import Shape
from benchmarks.expert_stack import Experts
from benchmarks.expert_sweep import measure
from benchmarks.output import add_json, publish
from benchmarks.own_process import times_printed_by

SWITCH = "ORT_MOE_FEW_CHOICES"
WAYS = {"layer_us": None, "few_us": "128", "grouped_us": "0"}
"""Values of the switch by what is timed with them; None: not set."""

FORMATS = {
    "nvfp4": ("bfloat16", 0),
    "mxfp4": ("bfloat16", 0),
    "int4": ("float16", 32),
    "int8": ("float16", 128),
    "fp8": ("bfloat16", 128),
    "dense": ("bfloat16", 0),
}
"""Type of the rows and weights that share a scale, by format."""

SIZES = (
    (8, 2, 4096, 1792),
    (8, 2, 4096, 14336),
    (16, 1, 5120, 8192),
    (16, 2, 4096, 6400),
    (32, 4, 2880, 2880),
    (64, 6, 2048, 1408),
    (64, 8, 2048, 1024),
    (128, 8, 2048, 768),
    (160, 6, 5120, 1536),
    (256, 8, 7168, 2048),
    (512, 10, 2560, 640),
)
"""E, K, H and I."""

SHAPES = tuple(
    Shape(*size, weight_format, *FORMATS[weight_format])
    for weight_format in FORMATS
    for size in SIZES
    if all(width % (FORMATS[weight_format][1] or 16) == 0 for width in size[2:])
)

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
LOADS = ("uniform", "zipf")
SAME = 1.01
"""Up to this ratio two runs of one way differ as well."""

MOST_CHOICES = 96
"""Of a point: beyond the most that the kernels for few tokens of any format are taken for, 80."""


COLUMNS = {
    "shape": "shape",
    "load": "load",
    "T": "tokens",
    "choices": "choices",
    "few": "few_us",
    "grouped": "grouped_us",
    "taken": "layer_us",
    "lost, %": "lost_percent",
}


def time_points(shapes: Iterable[Shape], tokens: Sequence[int]) -> dict[str, float]:
    """us per layer of each shape, load and number of tokens, by what this process takes; under the point's name."""
    copy_gbps = timing.copy_bandwidth()
    times = {}
    for shape in shapes:
        experts = Experts(shape)
        for load in LOADS:
            for count in tokens_of(shape, tokens):
                times[name_of(shape, load, count)] = measure(experts, load, count, copy_gbps)["layer_us"]
        del experts
        torch.cuda.empty_cache()
    return times


def tokens_of(shape: Shape, tokens: Iterable[int]) -> list[int]:
    """Those with 1 to MOST_CHOICES choices."""
    return [count for count in tokens if 1 <= count * shape.k <= MOST_CHOICES]


def name_of(shape: Shape, load: str, tokens: int) -> str:
    return f"{shape.name} {load} {tokens}"


def time_way(few_choices: str | None, shapes: Sequence[Shape], tokens: Sequence[int]) -> dict[str, float]:
    """time_points in a process of its own: the switch is read once."""
    code = (
        "import json; from benchmarks.expert_crossings import *\n"
        f"print('TIMES', json.dumps(time_points({list(shapes)!r}, {list(tokens)!r})))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != SWITCH}
    if few_choices is not None:
        environment[SWITCH] = few_choices
    times: dict[str, float]
    (times,) = times_printed_by(code, environment)
    return times


def lost_percent(row: Mapping[str, Any]) -> float | None:
    """How much longer the way that is taken lasts than the faster one; None where forcing changed nothing."""
    ways = sorted((row["few_us"], row["grouped_us"]))
    if ways[1] < SAME * ways[0]:
        return None
    taken = min(ways, key=lambda us: abs(us - row["layer_us"]))  # told by layer_us, and counted by its forced run
    return round(100 * (taken / ways[0] - 1), 1)


def losses(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for each format and load: what is lost in the mean, and where most."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["lost_percent"] is not None:
            groups.setdefault((row["shape"].split()[0], row["load"]), []).append(row)
    sentences = []
    for (weight_format, load), group in groups.items():
        worst = max(group, key=lambda row: row["lost_percent"])
        mean = statistics.mean(row["lost_percent"] for row in group)
        sentences.append(
            f"{weight_format}, {load}: what is taken lasts {mean:.1f} % longer than the faster way in the mean of "
            f"{len(group)} points, at most {worst['lost_percent']:.1f} % ({worst['shape']}, T = {worst['tokens']})"
        )
    return sentences


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_json(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="default: 1 to 24")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    args = parser.parse_args()
    timing.require_gpu()
    shapes = [shape for shape in SHAPES if args.only in shape.name and tokens_of(shape, args.tokens)]
    if not shapes:  # nothing that a record should make room for
        tokens = ", ".join(map(str, args.tokens))
        sys.exit(
            f"no shape whose name contains '{args.only}' has 1 to {MOST_CHOICES} choices at any of {tokens} tokens"
        )
    times = {key: time_way(few_choices, shapes, args.tokens) for key, few_choices in WAYS.items()}
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        for load in LOADS:
            for count in tokens_of(shape, args.tokens):
                row = {"shape": shape.name, "load": load, "tokens": count, "choices": count * shape.k}
                row |= {key: way[name_of(shape, load, count)] for key, way in times.items()}
                rows.append(row | {"lost_percent": lost_percent(row)})
    publish(rows, COLUMNS, timing.environment(), args.json, {"losses": losses(rows)})


if __name__ == "__main__":
    main()
