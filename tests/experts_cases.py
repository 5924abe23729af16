"""Calls of FusedExperts: one source for the CPU and CUDA tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ort_moe.ops import FUSED_EXPERTS, ROUTING_MAPS, AttributeValue
from ort_moe.ops.experts_config import ExpertsConfig
from ort_moe.packing import fp8, integers, mxfp4, nvfp4
from ort_moe.reference.fused_experts import ExpertLayer, fused_experts
from ort_moe.reference.routing_maps import routing_maps
from tests.experts_bounds import ROUNDED_FORMATS, error_bounds
from tests.finalize_cases import random_indices
from tests.router_cases import DTYPES

TOLERANCE: Mapping[str, float] = {"float": 1e-6, "float16": 1e-3, "bfloat16": 5e-3}
"""What the norm of the error may be beside the norm of the result, by the type of x."""

ROUNDED_TOLERANCE: Mapping[str, float] = {**TOLERANCE, "bfloat16": 6e-3}
"""The same where a kernel may round weights to the type of x."""

ACTIVATIONS: tuple[dict[str, AttributeValue], ...] = (
    {"activation": "silu", "gated": 1},
    {"activation": "silu", "gated": 1, "alpha": 1.702, "beta": 1.0, "limit": 0.75, "gate_layout": "interleaved"},
    {"activation": "silu", "gated": 0, "alpha": 1.5},
    {"activation": "gelu", "gated": 1},
    {"activation": "gelu", "gated": 0},
    {"activation": "gelu_tanh", "gated": 1, "gate_layout": "interleaved"},
    {"activation": "gelu_tanh", "gated": 0},
    {"activation": "relu", "gated": 1, "limit": 0.5},
    {"activation": "relu", "gated": 0},
    {"activation": "relu2", "gated": 0},
    {"activation": "identity", "gated": 1, "beta": 0.5},
    {"activation": "identity", "gated": 0},
)
"""Activations of the op, each with the attributes that go with it."""


FORMATS = FUSED_EXPERTS.attribute("weight_format").choices
"""Every format of weights."""


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    **{str(name): {"weight_format": name} for name in FORMATS},
    "int4_zero_points": {"weight_format": "int4", "has_zero_points": True, "block_size": 32},
    "int8_zero_points": {"weight_format": "int8", "has_zero_points": True, "block_size": 32},
}
"""Fields of an ExpertsCase: every format, and those with zero points; by name. Sizes are multiples of 32."""


@dataclass(frozen=True)
class ExpertsCase:
    """One call, named by what it is drawn from so that a failure prints short and can be repeated.

    Attributes:
        leading: The leading dimensions.
        experts: E.
        k: K.
        hidden: H.
        inner: I.
        onnx_type: Type of x by its ONNX name.
        weight_format: One of FORMATS.
        attributes: The other attributes.
        choices: One of finalize_cases.CHOICES but `any_map`.
        has_maps: Whether the maps are given.
        has_bias: Whether both layers have a bias.
        has_residual: Whether there is a residual.
        has_global_scale: nvfp4, mxfp4: whether the global scales are given.
        has_zero_points: int4, int8: whether there are zero points.
        block_size: int4, int8, fp8: the attribute.
        outliers: Whether weights have outliers and zeros, and blocks of zeros and of equal weights.
        seed: Seed of all random values.
    """

    leading: tuple[int, ...]
    experts: int
    k: int
    hidden: int
    inner: int
    onnx_type: str = "float"
    weight_format: str = "dense"
    attributes: dict[str, AttributeValue] = field(default_factory=lambda: dict(ACTIVATIONS[0]))
    choices: str = "random"
    has_maps: bool = False
    has_bias: bool = False
    has_residual: bool = False
    has_global_scale: bool = True
    has_zero_points: bool = False
    block_size: int = 16
    outliers: bool = False
    seed: int = 0

    @property
    def all_attributes(self) -> dict[str, AttributeValue]:
        block_size = self.block_size if self.weight_format in ("int4", "int8", "fp8") else 0
        return {**self.attributes, "weight_format": self.weight_format, "block_size": block_size}

    @property
    def config(self) -> ExpertsConfig:
        """The attributes as one value."""
        return ExpertsConfig.from_attributes(self.all_attributes)

    @cached_property
    def feeds(self) -> dict[str, Any]:
        """The inputs by name."""
        rng = np.random.default_rng(self.seed)
        indices = random_indices(self.choices, self.leading, self.k, self.experts, rng)
        feeds: dict[str, Any] = {
            "x": self._values(rng, (*self.leading, self.hidden)),
            "weights": rng.uniform(0.1, 1.0, (*self.leading, self.k)).astype(np.float32),
            "indices": indices,
        }
        if self.has_maps:
            maps = routing_maps(indices, self.experts)
            feeds |= {tensor.name: value for tensor, value in zip(ROUTING_MAPS, maps, strict=True)}
        fc1_rows = self.inner * (2 if self.attributes["gated"] else 1)
        for layer, rows, depth in (("fc1", fc1_rows, self.hidden), ("fc2", self.hidden, self.inner)):
            feeds |= {f"{layer}_{part}": value for part, value in self._layer(rng, rows, depth).items()}
        if self.has_residual:
            feeds["residual"] = self._values(rng, (*self.leading, self.hidden))
        return feeds

    def expanded(self) -> ExpertsCase:
        """The call of one row for each choice, in permuted order: the rows of the experts, before they are mixed."""
        feeds = self.feeds
        tokens = int(np.prod(self.leading, dtype=np.int64))
        maps = routing_maps(feeds["indices"], self.experts)
        alone = replace(self, leading=(tokens * self.k,), k=1, has_maps=False, has_residual=False)
        alone.feeds["x"] = feeds["x"].reshape(tokens, self.hidden)[maps.permuted_to_unpermuted % tokens]
        alone.feeds["weights"] = np.ones((tokens * self.k, 1), np.float32)
        if self.config.weight_on == "input":
            by_choice = feeds["weights"].reshape(tokens, self.k).T.reshape(-1, 1)
            alone.feeds["weights"] = by_choice[maps.permuted_to_unpermuted]
        alone.feeds["indices"] = maps.permuted_to_expert[:, None]
        alone.feeds.update({name: array for name, array in feeds.items() if name.startswith("fc")})
        return alone

    def finalized(self, rows: npt.NDArray[Any]) -> dict[str, Any]:
        """The inputs of the FinalizeRouting that takes the rows of `expanded` to this call's result."""
        feeds = {name: self.feeds[name] for name in ("weights", "indices", "residual") if name in self.feeds}
        maps = routing_maps(feeds["indices"], self.experts)
        if self.config.weight_on == "input":
            feeds["weights"] = np.ones_like(feeds["weights"])
        return feeds | {"expert_output": rows, "unpermuted_to_permuted": maps.unpermuted_to_permuted}

    def reference(self) -> npt.NDArray[np.float64]:
        """The result in float64, (..., H)."""
        feeds = self.feeds
        fc1, fc2 = (
            ExpertLayer(**{part: feeds.get(f"{layer}_{part}") for part in ExpertLayer._fields})
            for layer in ("fc1", "fc2")
        )
        return fused_experts(
            feeds["x"], feeds["weights"], feeds["indices"], fc1, fc2, feeds.get("residual"), **self.all_attributes
        )

    def check(self, y: npt.NDArray[Any]) -> None:
        """Holds a result against the reference by its norm: sums long enough that roundings average out."""
        expected = self._expected(y)
        error, scale = np.linalg.norm(y.astype(np.float64) - expected), np.linalg.norm(expected)
        tolerance = ROUNDED_TOLERANCE if self.weight_format in ROUNDED_FORMATS else TOLERANCE
        assert error <= tolerance[self.onnx_type] * scale, f"relative error {error / max(scale, 1e-300):.2e}"

    def check_each(self, y: npt.NDArray[Any]) -> None:
        """Holds a result of any size against the reference, each element within what its roundings may add up to."""
        expected = self._expected(y)
        bounds = error_bounds(self.config, self.feeds, self.onnx_type)
        inside = np.abs(y.astype(np.float64) - expected) <= bounds  # not so for NaN
        if not inside.all():
            where = tuple(int(axis[0]) for axis in np.nonzero(~inside))
            wanted = f"expected {expected[where]} within {bounds[where]:.1e}"
            raise AssertionError(f"{int((~inside).sum())} of {y.size} differ, first at {where}: {y[where]}, {wanted}")

    def _expected(self, y: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """The reference, which `y` has the shape of."""
        assert y.dtype == DTYPES[self.onnx_type]
        expected = self.reference()
        assert y.shape == expected.shape
        return expected

    def _layer(self, rng: np.random.Generator, rows: int, depth: int) -> dict[str, Any]:
        weights = rng.normal(0.0, depth**-0.5, (self.experts, rows, depth))
        if self.outliers:
            weights[:, ::3, ::37] *= 50.0
            weights[:, 1::3, : depth // 2] = 0.0
            weights[:, 2::3, : depth // 2] = depth**-0.5
            weights[:, 2::5] *= -1.0
            weights[-1] = 0.0
        layer = self._packed(rng, weights)
        if self.has_bias:
            layer["bias"] = self._values(rng, (self.experts, rows))
        return layer

    def _packed(self, rng: np.random.Generator, weights: npt.NDArray[np.float64]) -> dict[str, Any]:
        """The inputs of a layer in its format, without the bias."""
        floats = weights.astype(np.float32)
        layer: dict[str, Any]
        match self.weight_format:
            case "dense":
                return {"weights": weights.astype(DTYPES[self.onnx_type])}
            case "nvfp4":
                layer = nvfp4.quantize(floats)._asdict()
                if not self.has_global_scale:
                    layer["scales"] = (layer["scales"].astype(np.float32) / 448.0).astype(nvfp4.SCALE_DTYPE)
            case "mxfp4":
                layer = mxfp4.quantize(floats)._asdict()
                layer["global_scale"] = rng.uniform(0.5, 2.0, self.experts).astype(np.float32)
            case "fp8":
                packed = fp8.quantize(floats, self.block_size)
                return {"weights": packed.weights, "scales": packed.scales}
            case "int4" | "int8" as weight_format:
                layer = integers.quantize(
                    floats,
                    weight_format,
                    self.block_size,
                    symmetric=not self.has_zero_points,
                    scale_dtype=DTYPES[self.onnx_type],
                )._asdict()
                parts = ("weights", "scales", "zero_points") if self.has_zero_points else ("weights", "scales")
                return {part: layer[part] for part in parts}
        if not self.has_global_scale:
            del layer["global_scale"]
        return layer

    def _values(self, rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return rng.normal(0.0, 1.0, shape).astype(DTYPES[self.onnx_type])


@st.composite
def experts_cases(
    draw: st.DrawFn, onnx_types: tuple[str, ...] = tuple(DTYPES), formats: tuple[AttributeValue, ...] = FORMATS
) -> ExpertsCase:
    """Calls over the op's whole range, small."""
    weight_format = str(draw(st.sampled_from(formats)))
    block_size = draw(st.sampled_from((16, 32, 64, 128)))
    block = {"dense": 1, "nvfp4": 16, "mxfp4": 32, "fp8": 1}.get(weight_format, block_size)
    sizes = (block, 2 * block, 3 * block, 5 * block) if block > 1 else (1, 3, 16, 33, 64, 140)
    experts = draw(st.sampled_from((1, 3, 7, 8, 24)))
    return ExpertsCase(
        leading=draw(st.sampled_from(((), (0,), (2, 0), (1,), (2, 3))) | st.integers(1, 20).map(lambda t: (t,))),
        experts=experts,
        k=draw(st.sampled_from((1, 2, experts, 10))),
        hidden=draw(st.sampled_from(sizes)),
        inner=draw(st.sampled_from(sizes)),
        onnx_type=draw(st.sampled_from(onnx_types)),
        weight_format=weight_format,
        attributes={**draw(st.sampled_from(ACTIVATIONS)), "weight_on": draw(st.sampled_from(("output", "input")))},
        choices=draw(st.sampled_from(("random", "one_expert", "outside", "none"))),
        has_maps=draw(st.booleans()),
        has_bias=draw(st.booleans()),
        has_residual=draw(st.booleans()),
        has_global_scale=draw(st.booleans()),
        has_zero_points=draw(st.booleans()),
        block_size=block_size,
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def bit_cases() -> Iterator[ExpertsCase]:
    """Calls of every type and variant, of few tokens and of many: what is to have the same bits in two ways."""
    for onnx_type in DTYPES:
        for fields in VARIANTS.values():
            for tokens in (1, 4, 12, 200):
                experts = 40 if tokens < 200 else 16  # few tokens of each, or many
                yield ExpertsCase(
                    (tokens,), experts, 8, 256, 192, onnx_type, **fields, has_bias=True, has_residual=True, seed=tokens
                )
