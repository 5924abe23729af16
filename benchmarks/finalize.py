"""FinalizeRouting against the peers' recorded times and the copy bandwidth.

    python -m benchmarks.finalize [--json OUT] [--tokens 1 64] [--only 2560/10]

Times per launch in a CUDA graph of many, replayed from a cold cache, every launch on its own buffers as far as memory
goes, in us:
- ours: the launch as behind any other node: its routing data is read once its predecessor is done;
- settled: as behind experts that ran on the same routing data, which may then be read while they still run;
- peer: the best of vLLM and SGLang, as recorded once on an H200 in graphs from a cold cache; not run here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import command, timing
from benchmarks.output import beside_peer
from ort_moe import kernels
from ort_moe.reference.finalize_routing import finalize_routing

TOKENS = (1, 4, 64, 256, 1024, 8192)
EXPERTS = 256
MAX_LAUNCHES = 500
MAX_ROW_BYTES = 6 << 30  # of all buffers of a graph

SGLANG, VLLM = "SGLang", "vLLM"


@dataclass(frozen=True)
class Shape:
    """A row of the table in bfloat16: H/K and the best peer's us by tokens."""

    hidden: int
    k: int
    peer: dict[int, tuple[float, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.hidden}/{self.k} bfloat16"

    def bytes_moved(self, tokens: int) -> int:
        return tokens * ((self.k + 1) * self.hidden * 2 + self.k * 8)


def _peers(name: str, *times: float) -> dict[int, tuple[float, str]]:
    return {tokens: (time, name) for tokens, time in zip(TOKENS, times, strict=True) if not math.isnan(time)}


SHAPES = (
    Shape(2560, 10, _peers(VLLM, 9.45, 9.6, 10.7, 11.9, 18.7, 125)),
    Shape(4096, 8, _peers(VLLM, 8.13, math.nan, 9.2, 10.8, 20.7, 143)),
    Shape(5120, 8),
    Shape(7168, 8, _peers(SGLANG, 6.7, math.nan, 8.1, 11.5, 33.8, 245)),
)


class Buffers:
    """Rows, routing data and outputs of `count` independent calls."""

    def __init__(self, shape: Shape, tokens: int, count: int) -> None:
        self.shape, self.tokens, self.count = shape, tokens, count
        rows = tokens * shape.k
        self.rows = torch.empty(count, rows, shape.hidden, dtype=torch.bfloat16, device="cuda")
        for buffer in self.rows:
            buffer.normal_()
        self.weights = torch.rand(count, tokens, shape.k, device="cuda")
        scores = torch.rand(count, tokens, EXPERTS, device="cuda")
        self.indices = scores.topk(shape.k, dim=-1).indices.to(torch.int32)
        by_expert = self.indices.reshape(count, rows).argsort(dim=-1, stable=True)
        permuted = torch.empty_like(by_expert).scatter_(
            1, by_expert, torch.arange(rows, device="cuda").expand(count, -1)
        )
        permuted = permuted.reshape(count, tokens, shape.k).transpose(1, 2).reshape(count, rows)
        self.permuted = permuted.to(torch.int32).contiguous()
        self.y = torch.empty(count, tokens, shape.hidden, dtype=torch.bfloat16, device="cuda")

    def launch(self, n: int, stream: int, *, settled: bool) -> None:
        n %= self.count
        kernels.finalize_routing(
            tokens=self.tokens,
            hidden=self.shape.hidden,
            k=self.shape.k,
            dtype="bfloat16",
            expert_output=self.rows[n].data_ptr(),
            weights=self.weights[n].data_ptr(),
            indices=self.indices[n].data_ptr(),
            unpermuted_to_permuted=self.permuted[n].data_ptr(),
            y=self.y[n].data_ptr(),
            routing_settled=settled,
            stream=stream,
        )

    def check(self) -> None:
        """Holds call 0's output against the emulation, bit for bit."""
        import ml_dtypes

        rows = self.rows[0].view(torch.uint16).cpu().numpy().view(ml_dtypes.bfloat16)
        weights, indices, permuted = (t[0].cpu().numpy() for t in (self.weights, self.indices, self.permuted))
        got = self.y[0].view(torch.uint16).cpu().numpy().view(ml_dtypes.bfloat16)
        if (got != finalize_routing(rows, weights, indices, permuted)).any():
            raise AssertionError(f"{self.shape.name}, T = {self.tokens}: the output is not the emulation's")


def measure(shape: Shape, tokens: int, copy_gbps: float) -> dict[str, Any]:
    """One row of the results."""
    fitting = MAX_ROW_BYTES // shape.bytes_moved(tokens)
    buffers = Buffers(shape, tokens, max(2, min(MAX_LAUNCHES, fitting)))
    launches = max(16, buffers.count)
    ours, settled = (
        timing.graph_time(lambda n, stream, s=s: buffers.launch(n, stream, settled=s), launches=launches)
        for s in (False, True)
    )
    if tokens <= 4:
        buffers.check()
    return {
        "shape": shape.name,
        "tokens": tokens,
        "ours_us": round(ours, 3),
        "settled_us": round(settled, 3),
        **beside_peer(ours, shape.peer.get(tokens), shape.bytes_moved(tokens), copy_gbps),
    }


COLUMNS = {
    "shape": "shape",
    "T": "tokens",
    "ours": "ours_us",
    "settled": "settled_us",
    "peer": "peer_us",
    "ours/peer": "ratio_to_peer",
    "GB/s": "gbps",
    "% of copy": "percent_of_copy",
}


def main(argv: list[str] | None = None) -> None:
    command.run(command.parser(__doc__, TOKENS).parse_args(argv), SHAPES, measure, COLUMNS)


if __name__ == "__main__":
    main()
