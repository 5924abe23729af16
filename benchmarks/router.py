"""FusedRouter beside the peers installed, a kernel that moves the same bytes, and standard nodes in ONNX Runtime.

    python -m benchmarks.router [--json OUT] [--tokens 1 64] [--only 512/10] [--maps] [--without-ort]

With --maps the routers build the routing maps too, and the peer is the fastest router of the others and then their
fastest builder of maps.

Times per shape, each in us per router:
- ours: the launcher in a CUDA graph of many launches, replayed from a cold cache, every launch on its own buffers;
- moving: a kernel that reads and writes as many bytes and selects nothing, in the same way;
- ours in ORT, and unfused ORT: sessions with CUDA graphs whose model holds many independent routers on their own
  buffers; host time of a run divided by the routers, so a run's own overhead of some 15 us is spread over them;
  (not timed with maps, which standard nodes have no use for);
- peer: the fastest of vLLM, SGLang's CUDA kernel, SGLang's Triton kernel with PDL, and PyTorch's ops. Those that are
  installed are measured beside ours on the same logits; of the others the best time recorded once on an H200 stands.

Where a file given with --json holds times of ONNX Runtime already, --without-ort leaves them there.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks import command, timing
from benchmarks.moving import moving_time
from benchmarks.output import beside_peer
from benchmarks.router_peers import pairs_beside, routers_beside
from benchmarks.router_sessions import ort_time
from benchmarks.router_works import MAX_LAUNCHES, SHAPES, TOKENS, Buffers, Shape, router_buffers


def our_time(buffers: Buffers) -> float:
    """us per launch in a graph from a cold cache."""
    time = timing.graph_time(buffers.launch, launches=buffers.count)
    if buffers.tokens <= 64:
        buffers.check()
    return time


def measure(shape: Shape, tokens: int, copy_gbps: float, *, with_ort: bool, compiled: bool) -> dict[str, Any]:
    """One row of the results."""
    ours = our_time(router_buffers(shape, tokens))
    measured = (pairs_beside if shape.maps else routers_beside)(shape, tokens, compiled)
    recorded = None if shape.maps and measured else shape.peer.get(tokens)
    read, written = shape.bytes_read(tokens), shape.bytes_written(tokens)
    return {
        "shape": shape.name,
        "tokens": tokens,
        "ours_us": round(ours, 3),
        "moving_us": round(moving_time(read, written, launches=MAX_LAUNCHES), 3),
        "ours_ort_us": round(ort_time(shape, tokens, fused=True), 2) if with_ort else None,
        "unfused_ort_us": round(ort_time(shape, tokens, fused=False), 2) if with_ort and not shape.maps else None,
        **beside_peer(ours, recorded, read + written, copy_gbps, measured),
    }


COLUMNS = {
    "shape": "shape",
    "T": "tokens",
    "ours": "ours_us",
    "moving": "moving_us",
    "ours in ORT": "ours_ort_us",
    "unfused ORT": "unfused_ort_us",
    "peer": "peer_us",
    "ours/peer": "ratio_to_peer",
    "GB/s": "gbps",
    "% of copy": "percent_of_copy",
    "by": "peer",
    "is": "peer_is",
}


def ort_times(path: Path | None) -> tuple[dict[tuple[str, int], dict[str, Any]], dict[str, str]]:
    """The times in ONNX Runtime that a file holds, by shape and tokens, and what the environment is to say of them."""
    if path is None or not path.exists():
        return {}, {}
    document = json.loads(path.read_text(encoding="utf-8"))
    names, on = ("ours_ort_us", "unfused_ort_us"), document["environment"]
    times = {
        (row["shape"], row["tokens"]): {name: row[name] for name in names}
        for row in document["rows"]
        if row["ours_ort_us"] is not None
    }
    when = on.get("in_ort") or f"ONNX Runtime {on.get('onnxruntime')}, {on['date']}"
    return times, {"in_ort": when} if times else {}


def main(argv: list[str] | None = None) -> None:
    parser = command.parser(__doc__, TOKENS)
    command.add_compiled(parser)
    parser.add_argument("--maps", action="store_true", help="time routers that build the routing maps, not the others")
    parser.add_argument("--without-ort", action="store_true", help="open no sessions of ONNX Runtime")
    args = parser.parse_args(argv)
    shapes = [shape for shape in SHAPES if shape.maps == args.maps]
    kept, of_kept = ort_times(args.json) if args.without_ort else ({}, {})

    def row(shape: Shape, tokens: int, copy_gbps: float) -> dict[str, Any]:
        measured = measure(shape, tokens, copy_gbps, with_ort=not args.without_ort, compiled=args.compiled)
        return measured | kept.get((shape.name, tokens), {})

    rows = command.run(args, shapes, row, COLUMNS, of_kept)
    ratios = [row["ratio_to_peer"] for row in rows if row["ratio_to_peer"] is not None]
    if ratios:
        print(f"times in us per router; ours/peer: geometric mean {math.prod(ratios) ** (1 / len(ratios)):.2f}")


if __name__ == "__main__":
    main()
