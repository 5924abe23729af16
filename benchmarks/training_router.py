"""RouterProbs, RouterScores, AuxLoss and their gradients beside the peers installed and a kernel that moves the same.

    python -m benchmarks.training_router [--json OUT] [--only 512/22]

Times per call in a CUDA graph of many, replayed from a cold cache, every call on its own buffers as far as memory goes,
in us. "Moving" is a kernel that reads and writes the same arrays and computes nothing of use; a gradient of ours that
reads only what the map marks may be faster. The peer is the faster of TransformerEngine and PyTorch's ops: measured
beside ours on the same arrays where it is installed, else as recorded once on an H200 in graphs from a cold cache.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import command, timing
from benchmarks.output import beside_peer
from benchmarks.training_buffers import Buffers
from benchmarks.training_peers import beside
from benchmarks.training_works import PEER, Work, works

_MOVED: dict[tuple[str, int], float] = {}
"""us of what moves the same, by the last word of the op and the bytes: not timed twice."""


def measure(work: Work, copy_gbps: float, *, compiled: bool) -> dict[str, Any]:
    """One row of the results."""
    buffers = Buffers(work)
    launches = max(24, buffers.count)
    ours = timing.graph_time(buffers.launch, launches=launches, repeats=9)
    alike = (work.op.split()[-1], work.given_bytes)
    if alike not in _MOVED:
        _MOVED[alike] = timing.graph_time(buffers.move, launches=launches, repeats=9)
        buffers.launch(0, torch.cuda.current_stream().cuda_stream)  # over what that wrote
    recorded = None if work.peer_us is None else (work.peer_us, PEER)
    measured = beside(buffers, compiled=compiled and work.is_compiled) if work.texture == "random" else []
    return {
        "shape": work.name,
        "tokens": work.tokens,
        "ours_us": round(ours, 2),
        "moving_us": round(_MOVED[alike], 2),
        **beside_peer(ours, recorded, work.moved_bytes, copy_gbps, measured),
    }


COLUMNS = {
    "call": "shape",
    "T": "tokens",
    "ours": "ours_us",
    "moving": "moving_us",
    "peer": "peer_us",
    "ours/peer": "ratio_to_peer",
    "GB/s": "gbps",
    "% of copy": "percent_of_copy",
    "by": "peer",
    "is": "peer_is",
}


def main(argv: list[str] | None = None) -> None:
    options = command.parser(__doc__, ())
    command.add_compiled(options)
    args = options.parse_args(argv)

    def row(work: Work, _: int, copy_gbps: float) -> dict[str, Any]:
        return measure(work, copy_gbps, compiled=args.compiled)

    pairs = [(work, work.tokens) for work in works() if not args.tokens or work.tokens in args.tokens]
    command.run_pairs(args, pairs, row, COLUMNS)


if __name__ == "__main__":
    main()
