"""PermuteTokens against the peer's recorded times and the copy bandwidth.

    python -m benchmarks.permute [--json OUT] [--tokens 1 64] [--only 2560/10]

Times per call in a CUDA graph of many, replayed from a cold cache, every call on its own buffers as far as memory goes,
in us: rows and maps. The peer is vLLM's permute, as recorded once on an H200 in graphs from a cold cache; not run here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import command, timing
from benchmarks.output import beside_peer
from ort_moe import kernels
from ort_moe.ops import ROUTING_MAPS
from ort_moe.reference.permute_tokens import permute_tokens

TOKENS = (1, 4, 64, 256, 1024, 8192)
MAX_LAUNCHES = 500
MAX_ROW_BYTES = 6 << 30  # of all buffers of a graph
MAX_CHECKED_ROWS = 1 << 14


@dataclass(frozen=True)
class Shape:
    """A row of the table in bfloat16: E/K/H and the peer's us by tokens."""

    experts: int
    k: int
    hidden: int
    peer: dict[int, tuple[float, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.experts}/{self.k}/{self.hidden} bfloat16"

    def bytes_moved(self, tokens: int) -> int:
        return tokens * ((self.k + 1) * self.hidden * 2 + self.k * 16) + self.experts * 8


def _vllm(*times: float) -> dict[int, tuple[float, str]]:
    return {tokens: (time, "vLLM") for tokens, time in zip((1, 1024, 8192), times, strict=True)}


SHAPES = (
    Shape(512, 10, 2560, _vllm(7.4, 58, 231)),
    Shape(128, 8, 7168, _vllm(8.1, 73.5, 457)),
    Shape(256, 8, 4096),
)


class Buffers:
    """Inputs, outputs and scratch of `count` independent calls."""

    def __init__(self, shape: Shape, tokens: int, count: int) -> None:
        self.shape, self.tokens, self.count = shape, tokens, count
        rows = tokens * shape.k
        self.sizes = {"tokens": tokens, "hidden": shape.hidden, "k": shape.k, "experts": shape.experts}
        self.x = torch.empty(count, tokens, shape.hidden, dtype=torch.bfloat16, device="cuda").normal_()
        scores = (torch.rand(tokens, shape.experts, device="cuda") for _ in range(count))
        self.indices = torch.stack([s.topk(shape.k, dim=-1).indices.to(torch.int32) for s in scores])
        self.permuted = torch.empty(count, rows, shape.hidden, dtype=torch.bfloat16, device="cuda")
        self.maps = [torch.empty(count, rows, dtype=torch.int32, device="cuda") for _ in range(3)]
        self.maps.append(torch.empty(count, shape.experts + 1, dtype=torch.int64, device="cuda"))
        self.scratch = torch.empty(
            max(1, kernels.permute_tokens_scratch_bytes(**self.sizes)), dtype=torch.uint8, device="cuda"
        )

    def launch(self, n: int, stream: int) -> None:
        n %= self.count
        kernels.permute_tokens(
            **self.sizes,
            dtype="bfloat16",
            x=self.x[n].data_ptr(),
            indices=self.indices[n].data_ptr(),
            permuted_x=self.permuted[n].data_ptr(),
            maps=kernels.RoutingMaps(*(array[n].data_ptr() for array in self.maps)),
            scratch=self.scratch.data_ptr(),
            stream=stream,
        )

    def check(self) -> None:
        """Holds call 0's outputs against the reference, bit for bit."""
        import ml_dtypes

        x = self.x[0].view(torch.uint16).cpu().numpy().view(ml_dtypes.bfloat16)
        rows, maps = permute_tokens(x, self.indices[0].cpu().numpy(), num_experts=self.shape.experts)
        got = self.permuted[0].view(torch.uint16).cpu().numpy().view(ml_dtypes.bfloat16)
        wrong = [] if (got == rows).all() else ["permuted_x"]
        for tensor, expected, array in zip(ROUTING_MAPS, maps, self.maps, strict=True):
            if (array[0].cpu().numpy() != expected).any():
                wrong.append(tensor.name)
        if wrong:
            raise AssertionError(f"{self.shape.name}, T = {self.tokens}: not the reference's: {', '.join(wrong)}")


def measure(shape: Shape, tokens: int, copy_gbps: float) -> dict[str, Any]:
    """One row of the results."""
    fitting = MAX_ROW_BYTES // shape.bytes_moved(tokens)
    buffers = Buffers(shape, tokens, max(2, min(MAX_LAUNCHES, fitting)))
    ours = timing.graph_time(buffers.launch, launches=max(16, buffers.count))
    if tokens * shape.k <= MAX_CHECKED_ROWS:
        buffers.check()
    return {
        "shape": shape.name,
        "tokens": tokens,
        "ours_us": round(ours, 3),
        **beside_peer(ours, shape.peer.get(tokens), shape.bytes_moved(tokens), copy_gbps),
    }


COLUMNS = {
    "shape": "shape",
    "T": "tokens",
    "ours": "ours_us",
    "peer": "peer_us",
    "ours/peer": "ratio_to_peer",
    "GB/s": "gbps",
    "% of copy": "percent_of_copy",
}


def main(argv: list[str] | None = None) -> None:
    command.run(command.parser(__doc__, TOKENS).parse_args(argv), SHAPES, measure, COLUMNS)


if __name__ == "__main__":
    main()
