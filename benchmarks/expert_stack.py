"""A stack of MoE layers that share one set of experts, with buffers on the GPU: what benchmarks of experts run on.

Each layer has its own logits, so each reads other experts; together they pass any L2 cache.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch

from benchmarks.expert_loads import draw_logits
from benchmarks.expert_models import ROUTER, Shape, global_scale, pack_along_rows
from benchmarks.timing import TORCH_TYPES
from ort_moe import kernels
from ort_moe.ops.experts_config import ExpertsConfig
from ort_moe.ops.router_config import RouterConfig
from ort_moe.packing.arrays import E2M1

TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2}
"""What the norm of our error may be beside the norm of the answer, of one token too."""

OUTPUT_SCALE = 2.0**-6
"""Of fc2's weights: what a layer adds stays small beside its input, so that a cycle of many layers stays finite."""


class Experts:
    """The weights of one set of experts, random, by the names of expert_models."""

    def __init__(self, shape: Shape, device: str = "cuda") -> None:
        self.shape, self.device = shape, device
        self.config = ExpertsConfig.from_attributes(shape.attributes)
        self.block = self.config.scale_block
        self.weights: dict[str, torch.Tensor] = {}
        for name, rows, depth in shape.layers():
            factor = OUTPUT_SCALE if name == "fc2" else 1.0
            self.weights |= {f"{name}_{part}": value for part, value in self._layer(rows, depth, factor).items()}

    def _layer(self, rows: int, depth: int, factor: float) -> dict[str, torch.Tensor]:
        experts, device = self.shape.experts, self.device
        deviation = factor * 1.5 / math.sqrt(depth)
        dtype = TORCH_TYPES[self.shape.dtype]
        weight_format, block = self.shape.weight_format, self.block
        if weight_format == "dense":
            return {"weights": torch.empty(experts, rows, depth, dtype=dtype, device=device).normal_(0.0, deviation)}
        if weight_format == "fp8":
            weights = torch.empty(experts, rows, depth, dtype=torch.float8_e4m3fn, device=device)
            for expert in weights:  # one by one: float32 takes four times the memory
                expert.copy_(torch.randn(rows, depth, device=device))
            scales = torch.empty(experts, -(-rows // block), -(-depth // block), device=device)
            return {"weights": weights.view(torch.uint8), "scales": scales.uniform_(0.7 * deviation, 1.3 * deviation)}
        if weight_format in ("int4", "int8"):
            width, spread = (depth // 2, 4.6) if weight_format == "int4" else (depth, 74.0)  # of uniform codes
            scales = torch.empty(experts, rows, depth // block, device=device)
            return {
                "weights": torch.randint(0, 256, (experts, rows, width), dtype=torch.uint8, device=device),
                "scales": scales.uniform_(0.7 * deviation / spread, 1.3 * deviation / spread).to(dtype),
            }
        # Experts differ in global scale too, and all products of two scales are exact in half precision.
        scale = factor * global_scale(depth) * 0.5 ** (torch.arange(experts, device=device) % 2)
        first, last = (0x30, 0x40) if weight_format == "nvfp4" else (126, 129)
        return {
            "weights": torch.randint(0, 256, (experts, rows, depth // 2), dtype=torch.uint8, device=device),
            "scales": torch.randint(first, last, (experts, rows, depth // block), dtype=torch.uint8, device=device),
            "global_scale": scale.float(),
        }

    @cached_property
    def for_qmoe(self) -> dict[str, Any]:
        """The bits of QMoE's initializers as NumPy arrays on the host, packed as it takes them without prepacking."""
        declared = self.shape.weights(packed_for="QMoE")
        result = {}
        for name, tensor in self.weights.items():
            if tensor.dtype == torch.bfloat16:
                tensor = tensor.view(torch.uint16)
            if name.endswith("_weights") and self.shape.is_float4:
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
        scales, block = self.weights[f"{name}_scales"][expert], self.block
        match self.shape.weight_format:
            case "int8":
                return (weights.double() - 128) * _spread(scales.double(), block, weights.shape[1])
            case "fp8":
                squares = _spread(_spread(scales.double(), block, weights.shape[1]).T, block, weights.shape[0]).T
                return weights.view(torch.float8_e4m3fn).double() * squares
        codes = torch.stack([weights & 15, weights >> 4], dim=-1).flatten(1).int()
        if self.shape.weight_format == "int4":
            return (codes.double() - 8) * _spread(scales.double(), block, codes.shape[1])
        nvfp4 = self.shape.weight_format == "nvfp4"
        factors = scales.view(torch.float8_e4m3fn).double() if nvfp4 else torch.exp2(scales.double() - 127)
        values = torch.from_numpy(E2M1).double()
        products = values.to(self.device)[codes] * _spread(factors, block, codes.shape[1])
        return products * self.weights[f"{name}_global_scale"][expert].double()


def _spread(scales: torch.Tensor, block: int, width: int) -> torch.Tensor:
    """Scales of blocks along the last dimension, for each of `width` elements; the last block may be cut off."""
    return scales.repeat_interleave(block, dim=-1)[..., :width]


class Stack:
    """`layers` routers and expert layers one after another, each with rows of its own."""

    def __init__(self, experts: Experts, tokens: int, layers: int, load: str = "uniform") -> None:
        """`load`: one of expert_loads.LOADS."""
        shape = experts.shape
        self.shape, self.held, self.tokens, self.layers, self.load = shape, experts, tokens, layers, load
        self.dtype = TORCH_TYPES[shape.dtype]
        self.weights = experts.weights
        self.logits = torch.empty(layers, tokens, shape.experts, dtype=self.dtype, device="cuda")
        self.mix = torch.empty(layers, tokens, shape.k, device="cuda")
        self.indices = torch.empty(layers, tokens, shape.k, dtype=torch.int32, device="cuda")
        self.x = torch.randn(layers, tokens, shape.hidden, device="cuda").to(self.dtype)
        self.y = torch.empty_like(self.x)
        self.router = RouterConfig.from_attributes({"k": shape.k, **ROUTER})
        self.sizes: dict[str, Any] = {
            "tokens": tokens,
            "hidden": shape.hidden,
            "inner": shape.inner,
            "experts": shape.experts,
            "k": shape.k,
            "dtype": shape.dtype,
        }
        size = kernels.fused_experts_scratch_bytes(self.held.config, **self.sizes)
        self.scratch = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
        self.choose()

    def choose(self, seed: int = 0) -> None:
        """Draws other logits: each layer's tokens go elsewhere."""
        draw_logits(self.load, self.logits, seed)

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
            self.held.config,
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

    def chosen(self) -> float:
        """Mean number of the experts chosen in a layer; after a run."""
        return sum(len(torch.unique(indices)) for indices in self.indices) / self.layers

    def bytes_per_layer(self) -> float:
        """Mean bytes of the experts chosen in a layer, each once; after a run."""
        return self.chosen() * self.shape.expert_bytes

    def tensors(self) -> dict[str, torch.Tensor]:
        """Inputs and outputs of a session of the stack, by the names of expert_models."""
        result = dict(self.weights)
        for n in range(self.layers):
            result |= {f"logits{n}": self.logits[n], f"x{n}": self.x[n], f"y{n}": self.y[n]}
        return result

    def check(self, most_tokens: int | None = None) -> None:
        """Holds the last layer against a product in float64 of the dequantised experts chosen; after a run.

        Args:
            most_tokens: Take so many tokens, spread over all of them; None: every one.

        Raises:
            AssertionError: They differ by more than roundings explain.
        """
        last, shape = self.layers - 1, self.shape
        tokens = range(0, self.tokens, -(-self.tokens // (most_tokens or self.tokens)))
        x = self.x[last].double()
        expected = torch.zeros(len(tokens), shape.hidden, dtype=torch.float64, device="cuda")
        for row, token in enumerate(tokens):
            for rank in range(shape.k):
                expert = int(self.indices[last, token, rank])
                fc1 = self.held.dense("fc1", expert) @ x[token]
                gate, up = fc1[0::2], fc1[1::2]
                fc2 = self.held.dense("fc2", expert) @ (gate * torch.sigmoid(gate) * up)
                expected[row] += self.mix[last, token, rank].double() * fc2
        got = self.y[last, tokens.start : tokens.stop : tokens.step]
        error = (got.double() - expected).norm() / expected.norm()
        if not error < TOLERANCE[shape.dtype]:
            raise AssertionError(f"{shape.name}, {self.load}, T = {self.tokens}: relative error {error:.2e}")
