"""Models of one com.microsoft::MoE or QMoE, ONNX Runtime's own ops of experts, and dense ones that compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ort_moe.choices import BLOCK_SIZES
from ort_moe.packing import fp8, integers, mxfp4, nvfp4
from tests.op_models import element_type
from tests.qmoe_models import qmoe_runs

BESIDE_ORT = pytest.mark.skipif(
    not qmoe_runs(),
    reason="before ONNX Runtime 1.32 the CPU's contrib kernels lack inputs, round float16 away or stop at no tokens",
)
"""Of tests that hold nodes against ONNX Runtime's own kernels."""

MOE_INPUTS = ("x", "logits", "fc1_weights", "fc1_bias", "fc2_weights", "fc2_bias", "fc3_weights", "fc3_bias")
QMOE_INPUTS = (
    "x", "logits", "fc1_weights", "fc1_scales", "fc1_bias", "fc2_weights", "fc2_scales", "fc2_bias", "fc3_weights",
    "fc3_scales", "fc3_bias", "fc1_zero_points", "fc2_zero_points", "fc3_zero_points", "router_weights",
    "fc1_global_scale", "fc2_global_scale",
)  # fmt: skip

EXPERTS, K, HIDDEN, INNER, TOKENS = 6, 2, 32, 64, 5
"""Sizes of blocks of 32 and pairs of rows; H and I differ, so that shapes tell layouts."""


@dataclass(frozen=True)
class ContribCase:
    """One contrib node with random weights.

    Attributes:
        activation: `activation_type`.
        fusion: `swiglu_fusion`; None: not given.
        separate: Whether an fc3 makes the value.
        weight_format: `dense`, or one of `ort_moe.packing`.
        layout: Of the format: `blocks`, `rows` (a scale for each row), `K`, `N` or `experts` (a scale for each expert).
        zero_points: int4, int8: whether there are any.
        prepacked: `weights_prepacked`; None: not given.
        dtype: Of x.
        k: K.
        normalize: `normalize_routing_weights`.
        bias: Whether all layers have a bias.
        rank: Of x.
        router_weights: Whether the node has them.
        attributes: Further or other attributes.
        opset: Of the standard operators.
    """

    activation: str = "swiglu"
    fusion: int | None = 1
    separate: bool = False
    weight_format: str = "dense"
    layout: str = "blocks"
    zero_points: bool = False
    prepacked: int | None = 0
    dtype: str = "float32"
    k: int = K
    normalize: int = 1
    bias: bool = False
    rank: int = 2
    router_weights: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 20

    @property
    def numpy_type(self) -> Any:
        return ml_dtypes.bfloat16 if self.dtype == "bfloat16" else np.dtype(self.dtype)

    @property
    def fused(self) -> bool:
        """Whether fc1 makes gate and value."""
        return self.activation in ("swiglu", "geglu") and not self.separate

    def layers(self) -> dict[str, tuple[int, int]]:
        """N and D of each layer."""
        rows = 2 * INNER if self.fused else INNER
        return {"fc1": (rows, HIDDEN), "fc2": (HIDDEN, INNER)} | ({"fc3": (INNER, HIDDEN)} if self.separate else {})

    def feeds(self, tokens: int = TOKENS) -> dict[str, Any]:
        """Random rows, logits, and weights of the router."""
        rng = np.random.default_rng(tokens)
        feeds = {
            "x": rng.normal(size=(tokens, HIDDEN)).astype(self.numpy_type),
            "logits": rng.normal(0.0, 2.0, (tokens, EXPERTS)).astype(self.numpy_type),
        }
        if self.router_weights:
            feeds["router_weights"] = rng.uniform(0.1, 1.0, (tokens, EXPERTS)).astype(self.numpy_type)
        if self.rank == 3:
            feeds["x"] = feeds["x"][None]
        return feeds

    def constants(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The node's constants by its inputs, and the float weights and biases that they stand for."""
        rng = np.random.default_rng(7)
        stored: dict[str, Any] = {}
        floats: dict[str, Any] = {}
        for layer, (rows, depth) in self.layers().items():
            weights = (rng.normal(size=(EXPERTS, rows, depth)) * 0.2).astype(self.numpy_type)
            parts, floats[f"{layer}_weights"] = self._packed(weights)
            stored |= {f"{layer}_{part}": value for part, value in parts.items()}
            if self.bias:
                bias = rng.normal(size=(EXPERTS, rows)).astype(self.numpy_type)
                stored[f"{layer}_bias"] = floats[f"{layer}_bias"] = bias
        if self.separate and "fc1_global_scale" in stored:
            del stored["fc3_global_scale"]  # QMoE has none
        return stored, floats

    def _packed(self, weights: Any) -> tuple[dict[str, Any], Any]:
        match self.weight_format:
            case "int4" | "int8":
                return self._integers(weights)
            case "nvfp4":
                layer = nvfp4.quantize(weights)
                packed: Any = nvfp4.to_qmoe(layer, "K" if self.layout == "K" else "N")
                return packed._asdict(), nvfp4.dequantize(layer)
            case "mxfp4":
                blocks = mxfp4.quantize(weights)
                packed = mxfp4.to_qmoe(blocks, "K" if self.layout == "K" else "N")
                return packed._asdict(), mxfp4.dequantize(blocks)
            case "fp8" if self.layout == "experts":
                scale = (np.abs(weights.astype(np.float32)).max(axis=(1, 2)) / 448.0).astype(np.float32)
                codes = (weights.astype(np.float32) / scale[:, None, None]).astype(fp8.WEIGHT_DTYPE)
                return {"weights": codes, "global_scale": scale}, codes.astype(np.float32) * scale[:, None, None]
            case "fp8":
                squares = fp8.quantize(weights, 32)
                return {"weights": squares.weights, "scales": squares.scales}, fp8.dequantize(squares)
        return {"weights": weights}, weights

    def _integers(self, weights: Any) -> tuple[dict[str, Any], Any]:
        bits = 4 if self.weight_format == "int4" else 8
        block = weights.shape[-1] if self.layout == "rows" else 32
        layer = integers.quantize(
            weights,
            "int4" if bits == 4 else "int8",
            block if block in BLOCK_SIZES else 32,
            symmetric=not self.zero_points,
            scale_dtype=self.numpy_type,
        )
        if self.layout == "rows":
            # One scale, and one zero point, for a row: those of its first block count for all.
            scales = np.repeat(layer.scales[..., :1], layer.scales.shape[-1], axis=-1)
            zeros = layer.zero_points
            if zeros is not None:
                codes = integers._unpack(layer.weight_format, zeros)[..., :1]
                of_rows = integers._pack(layer.weight_format, codes[..., 0])
                zeros = integers._pack(layer.weight_format, np.repeat(codes, scales.shape[-1], axis=-1))
                parts = {"zero_points": of_rows}
            else:
                parts = {}
            layer = layer._replace(scales=scales, zero_points=zeros)
            return {"weights": layer.weights, "scales": scales[..., 0], **parts}, integers.dequantize(layer)
        stored = {"weights": layer.weights, "scales": layer.scales}
        if layer.zero_points is not None:
            stored["zero_points"] = layer.zero_points
        return stored, integers.dequantize(layer)

    def node_attributes(self) -> dict[str, Any]:
        """All attributes of the node."""
        attributes: dict[str, Any] = {"k": self.k, "activation_type": self.activation}
        attributes["normalize_routing_weights"] = self.normalize
        if self.fusion is not None:
            attributes["swiglu_fusion"] = self.fusion
        if self.weight_format != "dense":
            kinds = {"int4": "int", "int8": "int", "mxfp4": "fp4"}
            attributes["quant_type"] = kinds.get(self.weight_format, self.weight_format)
            attributes["expert_weight_bits"] = 8 if self.weight_format in ("int8", "fp8") else 4
            if self.layout not in ("rows", "experts"):
                attributes["block_size"] = 16 if self.weight_format == "nvfp4" else 32
            prepacked = {"K": 1, "N": 0}.get(self.layout) if self.weight_format == "nvfp4" else self.prepacked
            if prepacked is not None:
                attributes["weights_prepacked"] = prepacked
        return {**attributes, **self.attributes}

    def model(self) -> onnx.ModelProto:
        """The node alone, with open numbers of tokens."""
        return contrib_model(self, self.constants()[0])

    def dense(self) -> onnx.ModelProto:
        """A MoE in float32 that ONNX Runtime's CPU kernel runs, of the float weights that this case's stand for."""
        stored = {name: np.asarray(value, np.float32) for name, value in self.constants()[1].items()}
        case = replace(self, weight_format="dense", dtype="float32", fusion=None)
        attributes: dict[str, Any] = {"activation_type": self.activation}
        if self.separate:
            for part in ("weights", "bias"):
                if f"fc1_{part}" in stored:
                    gate, value = stored[f"fc1_{part}"], stored.pop(f"fc3_{part}")
                    stored[f"fc1_{part}"] = np.stack([gate, value], 2).reshape(EXPERTS, -1, *gate.shape[2:])
        elif self.fused and self.fusion == 2:
            for part in ("weights", "bias"):
                if f"fc1_{part}" in stored:
                    gate, value = np.split(stored[f"fc1_{part}"], 2, axis=1)
                    stored[f"fc1_{part}"] = np.stack([gate, value], 2).reshape(EXPERTS, -1, *gate.shape[2:])
        if self.separate or self.fused:
            attributes = {"activation_type": "swiglu", "swiglu_fusion": 1}
        return contrib_model(replace(case, attributes={**self.attributes, **attributes}, separate=False), stored)


def contrib_model(case: ContribCase, stored: Mapping[str, Any]) -> onnx.ModelProto:
    """The node with these constants."""
    feeds = case.feeds()
    dense = case.weight_format == "dense"
    inputs = [name if name in feeds or name in stored else "" for name in (MOE_INPUTS if dense else QMOE_INPUTS)]
    while not inputs[-1]:
        inputs.pop()
    node = helper.make_node(
        "MoE" if dense else "QMoE", inputs, ["y"], "moe", domain="com.microsoft", **case.node_attributes()
    )
    constants = [
        helper.make_tensor(name, _element_type(value.dtype), value.shape, value.tobytes(), raw=True)
        for name, value in stored.items()
    ]
    axes = {"x": ["batch", "tokens"] if case.rank == 3 else ["tokens"], "logits": ["rows"], "router_weights": ["rows"]}
    graph = helper.make_graph(
        [node],
        "contrib",
        [
            helper.make_tensor_value_info(name, _element_type(value.dtype), [*axes[name], value.shape[-1]])
            for name, value in feeds.items()
        ],
        [helper.make_tensor_value_info("y", _element_type(feeds["x"].dtype), [*axes["x"], HIDDEN])],
        constants,
    )
    opsets = [helper.make_opsetid("", case.opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _element_type(dtype: np.dtype[Any]) -> int:
    return TensorProto.FLOAT8E8M0 if dtype == ml_dtypes.float8_e8m0fnu else element_type(dtype)
