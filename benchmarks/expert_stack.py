"""A stack of MoE layers that share one set of experts, with buffers on the GPU: what benchmarks of experts run on.

Each layer has its own logits, so each reads other experts; together they pass any L2 cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ort_moe import kernels
from ort_moe.experts_config import ExpertsConfig
from ort_moe.router_config import RouterConfig

TORCH_TYPES = {"float": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

SWIGLU = {"activation": "silu", "gated": 1, "gate_layout": "interleaved"}
ROUTER = {"score": "softmax", "normalize": 1}


@dataclass(frozen=True)
class Shape:
    """A layer: E experts, K chosen, H hidden, I inner, the weights' format and the rows' type."""

    experts: int
    k: int
    hidden: int
    inner: int
    weight_format: str
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.weight_format} {self.dtype} {self.experts}/{self.k}/{self.hidden}/{self.inner}"

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights and scales."""
        weights = 3 * self.hidden * self.inner
        if self.weight_format == "nvfp4":
            return weights // 2 + weights // 16
        return weights * TORCH_TYPES[self.dtype].itemsize

    def layers(self) -> tuple[tuple[str, int, int], ...]:
        """Name, N and D of fc1 and fc2."""
        return ("fc1", 2 * self.inner, self.hidden), ("fc2", self.hidden, self.inner)


class Stack:
    """`layers` routers and expert layers one after another, each with rows of its own."""

    def __init__(self, shape: Shape, tokens: int, layers: int) -> None:
        self.shape, self.tokens, self.layers = shape, tokens, layers
        self.dtype = TORCH_TYPES[shape.dtype]
        self.weights: dict[str, torch.Tensor] = {}
        for name, rows, depth in shape.layers():
            self.weights |= {f"{name}_{part}": value for part, value in self._weights(rows, depth).items()}
        self.logits = torch.empty(layers, tokens, shape.experts, dtype=self.dtype, device="cuda")
        self.mix = torch.empty(layers, tokens, shape.k, device="cuda")
        self.indices = torch.empty(layers, tokens, shape.k, dtype=torch.int32, device="cuda")
        self.x = torch.randn(layers, tokens, shape.hidden, device="cuda").to(self.dtype)
        self.y = torch.empty_like(self.x)
        self.router = RouterConfig.from_attributes({"k": shape.k, **ROUTER})
        self.config = ExpertsConfig.from_attributes({"weight_format": shape.weight_format, **SWIGLU})
        self.sizes: dict[str, Any] = {
            "tokens": tokens,
            "hidden": shape.hidden,
            "inner": shape.inner,
            "experts": shape.experts,
            "k": shape.k,
            "dtype": shape.dtype,
        }
        size = kernels.fused_experts_scratch_bytes(self.config, **self.sizes)
        self.scratch = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
        self.choose()

    def _weights(self, rows: int, depth: int) -> dict[str, torch.Tensor]:
        experts = self.shape.experts
        if self.shape.weight_format == "dense":
            weights = torch.empty(experts, rows, depth, dtype=self.dtype, device="cuda")
            return {"weights": weights.normal_(0.0, 1.5 / math.sqrt(depth))}
        weights = torch.randint(0, 256, (experts, rows, depth // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(0x30, 0x40, (experts, rows, depth // 16), dtype=torch.uint8, device="cuda")  # 0.5 .. 1.9
        return {
            "weights": weights,
            "scales": scales,
            "global_scale": torch.full((experts,), 0.5 / math.sqrt(depth), device="cuda"),
        }

    def choose(self, seed: int = 0) -> None:
        """Draws other logits: each layer's tokens go elsewhere."""
        self.logits.copy_(torch.randn(self.logits.shape, generator=torch.Generator().manual_seed(seed)))

    def route(self, n: int, stream: int = 0) -> None:
        """Launches layer n's router."""
        kernels.fused_router(
            self.router,
            rows=self.tokens,
            experts=self.shape.experts,
            dtype=self.shape.dtype,
            logits=self.logits[n].data_ptr(),
            weights=self.mix[n].data_ptr(),
            indices=self.indices[n].data_ptr(),
            stream=stream,
        )

    def experts(self, n: int, stream: int = 0) -> None:
        """Launches layer n's experts."""
        fc1, fc2 = (
            kernels.ExpertLayer(
                **{
                    part: self.weights[f"{name}_{part}"].data_ptr()
                    for part in ("weights", "scales", "global_scale")
                    if f"{name}_{part}" in self.weights
                }
            )
            for name, *_ in self.shape.layers()
        )
        kernels.fused_experts(
            self.config,
            **self.sizes,
            x=self.x[n].data_ptr(),
            weights=self.mix[n].data_ptr(),
            indices=self.indices[n].data_ptr(),
            fc1=fc1,
            fc2=fc2,
            y=self.y[n].data_ptr(),
            scratch=self.scratch.data_ptr(),
            stream=stream,
        )

    def layer(self, n: int, stream: int = 0) -> None:
        """Launches layer n: router and experts."""
        self.route(n, stream)
        self.experts(n, stream)

    def bytes_per_layer(self) -> float:
        """Mean bytes of the experts chosen in a layer, each once; after a run."""
        chosen = [len(torch.unique(indices)) for indices in self.indices]
        return sum(chosen) / len(chosen) * self.shape.expert_bytes

    def check(self) -> None:
        """Holds the last layer against a product in float64 of the dequantised experts chosen; after a run."""
        last, shape = self.layers - 1, self.shape
        x, expected = (
            self.x[last].double(),
            torch.zeros(self.tokens, shape.hidden, dtype=torch.float64, device="cuda"),
        )
        for token in range(self.tokens):
            for rank in range(shape.k):
                expert = int(self.indices[last, token, rank])
                fc1 = self._dense("fc1", expert) @ x[token]
                gate, up = fc1[0::2], fc1[1::2]
                fc2 = self._dense("fc2", expert) @ (gate * torch.sigmoid(gate) * up)
                expected[token] += self.mix[last, token, rank].double() * fc2
        error = (self.y[last].double() - expected).norm() / expected.norm()
        if not error < 5e-3:
            raise AssertionError(f"{shape.name}, T = {self.tokens}: relative error {error:.2e}")

    def _dense(self, name: str, expert: int) -> torch.Tensor:
        weights = self.weights[f"{name}_weights"][expert]
        if self.shape.weight_format == "dense":
            return weights.double()
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
        codes = torch.stack([weights & 15, weights >> 4], dim=-1).flatten(1).int()
        scales = self.weights[f"{name}_scales"][expert].view(torch.float8_e4m3fn).double()
        dense = values.cuda()[codes] * scales.repeat_interleave(16, dim=1)
        return dense * self.weights[f"{name}_global_scale"][expert].double()
