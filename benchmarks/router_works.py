"""What the benchmark of FusedRouter times: the routers, their buffers, and what the best peer was recorded to take."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from benchmarks.peers import SGLANG, SGLANG_TRITON, VLLM
from benchmarks.timing import SPACING, TORCH_TYPES
from ort_moe import kernels
from ort_moe.ops import ROUTING_MAPS, AttributeValue
from ort_moe.ops.router_config import RouterConfig
from ort_moe.reference.fused_router import fused_router
from ort_moe.reference.routing_maps import routing_maps

TOKENS = (1, 4, 64, 1024, 8192)
MAX_LAUNCHES = 500
MAX_LOGIT_BYTES = 1 << 30  # of all buffers of a graph

SOFTMAX: dict[str, AttributeValue] = {"score": "softmax", "normalize": 1}
GROUPED: dict[str, AttributeValue] = {
    "score": "sigmoid",
    "normalize": 1,
    "normalize_eps": 1e-20,
    "scale": 2.5,
    "num_groups": 8,
    "topk_groups": 4,
    "group_score_top": 2,
    "group_fill": 0.0,
}


@dataclass(frozen=True)
class Shape:
    """A router of the table: experts/k, its logits' type, attributes, and the best peer's us by tokens."""

    experts: int
    k: int
    dtype: str
    attributes: dict[str, AttributeValue] = field(default_factory=lambda: SOFTMAX, hash=False)
    peer: dict[int, tuple[float, str]] = field(default_factory=dict, hash=False)
    maps: bool = False

    @property
    def grouped(self) -> bool:
        return "num_groups" in self.attributes

    @property
    def name(self) -> str:
        grouped, maps = " grouped sigmoid + bias" if self.grouped else "", " + maps" if self.maps else ""
        return f"{self.experts}/{self.k} {self.dtype}{grouped}{maps}"

    def bytes_read(self, tokens: int) -> int:
        return tokens * self.experts * TORCH_TYPES[self.dtype].itemsize

    def bytes_written(self, tokens: int) -> int:
        of_maps = tokens * self.k * 12 + (self.experts + 1) * 8 if self.maps else 0
        return tokens * self.k * 8 + of_maps


TRITON = SGLANG_TRITON
PAIR = "best top-k + best map builder"
SHAPES = (
    Shape(8, 2, "bfloat16", peer={1: (1.17, TRITON), 8192: (1.74, SGLANG)}),
    Shape(64, 6, "bfloat16", peer={1: (1.90, TRITON), 8192: (3.80, TRITON)}),
    Shape(128, 8, "bfloat16", peer={1: (2.44, TRITON), 8192: (7.8, TRITON)}),
    Shape(256, 8, "bfloat16", peer={1: (2.38, TRITON), 8192: (12.7, TRITON)}),
    Shape(512, 10, "bfloat16", peer={1: (3.37, TRITON), 8192: (25.2, TRITON)}),
    Shape(512, 10, "float", peer={1: (3.75, TRITON), 8192: (26.1, SGLANG)}),
    Shape(256, 8, "bfloat16", GROUPED, peer={1: (3.26, VLLM), 8192: (18.6, SGLANG)}),
    Shape(128, 8, "bfloat16", maps=True),
    Shape(256, 8, "bfloat16", maps=True),
    Shape(512, 10, "bfloat16", peer={1: (7.1, PAIR), 4: (7.4, PAIR), 64: (8.3, PAIR)}, maps=True),
    Shape(256, 8, "bfloat16", GROUPED, maps=True),
)


class Buffers:
    """Logits and outputs of `count` independent routers, far apart in memory, and the vectors they share."""

    def __init__(self, shape: Shape, tokens: int, count: int) -> None:
        self.shape, self.tokens, self.count = shape, tokens, count
        self.config = RouterConfig.from_attributes({"k": shape.k, **shape.attributes})
        dtype = TORCH_TYPES[shape.dtype]
        self.logits = _spaced(count, tokens * shape.experts, dtype)
        self.logits.copy_(torch.randn(self.logits.shape, device="cuda"))
        self.weights = _spaced(count, tokens * shape.k, torch.float32)
        self.indices = _spaced(count, tokens * shape.k, torch.int32)
        self.bias = torch.randn(shape.experts, device="cuda") * 0.1 if shape.grouped else None
        rows = tokens * shape.k
        sizes = (rows, rows, rows, shape.experts + 1)
        types = [getattr(torch, tensor.types[0]) for tensor in ROUTING_MAPS]
        self.maps = [_spaced(count, *map_) for map_ in zip(sizes, types, strict=True)] if shape.maps else []
        scratch = kernels.router_scratch_bytes(self.config, rows=tokens, experts=shape.experts) if shape.maps else 0
        self.scratch = torch.empty(max(scratch, 1), dtype=torch.uint8, device="cuda")  # launches follow each other

    def launch(self, n: int, stream: int) -> None:
        """Runs our kernel on router n."""
        kernels.fused_router(
            self.config,
            rows=self.tokens,
            experts=self.shape.experts,
            dtype=self.shape.dtype,
            logits=self.logits[n].data_ptr(),
            weights=self.weights[n].data_ptr(),
            indices=self.indices[n].data_ptr(),
            selection_bias=None if self.bias is None else self.bias.data_ptr(),
            maps=kernels.RoutingMaps(*(m[n].data_ptr() for m in self.maps)) if self.maps else None,
            scratch=self.scratch.data_ptr(),
            stream=stream,
        )

    def check(self) -> None:
        """Holds router 0's outputs against the emulation, bit for bit."""
        shape, tokens = self.shape, self.tokens
        logits = self.logits[0, : tokens * shape.experts].float().cpu().numpy().reshape(tokens, shape.experts)
        bias = None if self.bias is None else self.bias.cpu().numpy()
        weights, indices = fused_router(logits, bias, k=shape.k, **shape.attributes)
        got_weights = self.weights[0, : tokens * shape.k].cpu().numpy().reshape(tokens, shape.k)
        got_indices = self.indices[0, : tokens * shape.k].cpu().numpy().reshape(tokens, shape.k)
        if (got_weights != weights).any() or (got_indices != indices).any():
            raise AssertionError(f"{shape.name}, T = {tokens}: the outputs are not the emulation's")
        for got, expected in zip(self.maps, routing_maps(indices, shape.experts), strict=bool(self.maps)):
            if (got[0, : len(expected)].cpu().numpy() != expected).any():
                raise AssertionError(f"{shape.name}, T = {tokens}: the maps are not the reference's")


def _spaced(count: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    step = -(-elements * dtype.itemsize // SPACING) * SPACING // dtype.itemsize
    return torch.zeros(count, step, dtype=dtype, device="cuda")


def router_buffers(shape: Shape, tokens: int) -> Buffers:
    """Of as many launches as a graph has."""
    logit_bytes = max(tokens * shape.experts * TORCH_TYPES[shape.dtype].itemsize, SPACING)
    return Buffers(shape, tokens, max(16, min(MAX_LAUNCHES, MAX_LOGIT_BYTES // logit_bytes)))
