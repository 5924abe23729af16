"""A stack of MoE layers that share one set of experts, with buffers on the GPU: what benchmarks of experts run on.

Each layer has its own logits, so each reads other experts; together they pass any L2 cache.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch

from benchmarks.expert_models import ROUTER, SWIGLU, Shape, global_scale, pack_along_rows
from ort_moe import kernels
from ort_moe.experts_config import ExpertsConfig
from ort_moe.router_config import RouterConfig

TORCH_TYPES = {"float": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

OUTPUT_SCALE = 2.0**-6
"""Of fc2's weights: what a layer adds stays small beside its input, so that a cycle of many layers stays finite."""


class Experts:
    """The weights of one set of experts, random, by the names of expert_models."""

    def __init__(self, shape: Shape, device: str = "cuda") -> None:
        self.shape, self.device = shape, device
        self.weights: dict[str, torch.Tensor] = {}
        for name, rows, depth in shape.layers():
            factor = OUTPUT_SCALE if name == "fc2" else 1.0
            self.weights |= {f"{name}_{part}": value for part, value in self._layer(rows, depth, factor).items()}

    def _layer(self, rows: int, depth: int, factor: float) -> dict[str, torch.Tensor]:
        experts, device = self.shape.experts, self.device
        if self.shape.weight_format == "dense":
            weights = torch.empty(experts, rows, depth, dtype=TORCH_TYPES[self.shape.dtype], device=device)
            return {"weights": weights.normal_(0.0, factor * 1.5 / math.sqrt(depth))}
        # Experts differ in global scale too, and all products of two scales are exact in half precision.
        scale = factor * global_scale(depth) * 0.5 ** (torch.arange(experts, device=device) % 2)
        return {
            "weights": torch.randint(0, 256, (experts, rows, depth // 2), dtype=torch.uint8, device=device),
            "scales": torch.randint(0x30, 0x40, (experts, rows, depth // 16), dtype=torch.uint8, device=device),
            "global_scale": scale.float(),
        }

    @cached_property
    def for_qmoe(self) -> dict[str, Any]:
        """The bits of QMoE's initializers as NumPy arrays on the host, packed as it takes them without prepacking."""
        declared = self.shape.weights(packed_for="QMoE")
        result = {}
        for name, tensor in self.weights.items():
            if name.endswith("_weights"):
                packed = torch.empty(declared[name][1], dtype=torch.uint8, device=self.device)
                pack_along_rows(tensor, packed)
                tensor = packed
            result[name] = tensor.cpu().numpy()
        return result

    def dense(self, name: str, expert: int) -> torch.Tensor:
        """The weights of one expert's fc1 or fc2 in float64, (N, D)."""
        weights = self.weights[f"{name}_weights"][expert]
        if self.shape.weight_format == "dense":
            return weights.double()
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
        codes = torch.stack([weights & 15, weights >> 4], dim=-1).flatten(1).int()
        scales = self.weights[f"{name}_scales"][expert].view(torch.float8_e4m3fn).double()
        products = values.to(self.device)[codes] * scales.repeat_interleave(16, dim=1)
        return products * self.weights[f"{name}_global_scale"][expert].double()


class Stack:
    """`layers` routers and expert layers one after another, each with rows of its own."""

    def __init__(self, experts: Experts, tokens: int, layers: int) -> None:
        shape = experts.shape
        self.shape, self.held, self.tokens, self.layers = shape, experts, tokens, layers
        self.dtype = TORCH_TYPES[shape.dtype]
        self.weights = experts.weights
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

    def tensors(self) -> dict[str, torch.Tensor]:
        """Inputs and outputs of a session of the stack, by the names of expert_models."""
        result = dict(self.weights)
        for n in range(self.layers):
            result |= {f"logits{n}": self.logits[n], f"x{n}": self.x[n], f"y{n}": self.y[n]}
        return result

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
                fc1 = self.held.dense("fc1", expert) @ x[token]
                gate, up = fc1[0::2], fc1[1::2]
                fc2 = self.held.dense("fc2", expert) @ (gate * torch.sigmoid(gate) * up)
                expected[token] += self.mix[last, token, rank].double() * fc2
        error = (self.y[last].double() - expected).norm() / expected.norm()
        if not error < 5e-3:
            raise AssertionError(f"{shape.name}, T = {self.tokens}: relative error {error:.2e}")
