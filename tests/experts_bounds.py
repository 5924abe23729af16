"""How far roundings may take FusedExperts from its float64 reference, element by element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ort_moe.ops.experts_config import ExpertsConfig
from ort_moe.reference.fused_experts import ExpertLayer, activate, dense_weights

Float64Array = npt.NDArray[np.float64]

UNIT: Mapping[str, float] = {"float": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half a unit in the last place of 1, by ONNX name."""

SMALLEST: Mapping[str, float] = {"float": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
"""Half the smallest number above 0."""

ROUNDED_FORMATS = ("int4", "int8", "fp8")
"""Formats whose weights a kernel may round to the type of x, before the product."""

SUM = 2.0**-18
"""Of a float32 sum in any order and of any float32 function, beside the sum of magnitudes."""


def error_bounds(config: ExpertsConfig, feeds: Mapping[str, Any], onnx_type: str) -> Float64Array:
    """What the roundings of a call add up to at worst, (..., H).

    Errors of fc1 go through the activation and then, without signs, through fc2: some ten times what they are where
    roundings average out, but far less than the result.

    Args:
        config: The op's attributes.
        feeds: The inputs by name.
        onnx_type: Type of x.
    """
    (w1, b1), (w2, b2) = (_layer(config, feeds, name) for name in ("fc1", "fc2"))
    shape = feeds["x"].shape
    x = feeds["x"].astype(np.float64).reshape(-1, shape[-1])
    k = feeds["weights"].shape[-1]
    weights, indices = feeds["weights"].astype(np.float64).reshape(-1, k), feeds["indices"].reshape(-1, k)

    def rounded(value: Float64Array, error: Float64Array) -> Float64Array:
        """The error once the value is rounded to the type of x."""
        return error + UNIT[onnx_type] * (np.abs(value) + error) + SMALLEST[onnx_type]

    product = SUM + (UNIT[onnx_type] if config.weight_format in ROUNDED_FORMATS else 0.0)
    total, bounds = np.zeros_like(x), np.zeros_like(x)
    for expert in range(len(w1)):
        tokens, choices = np.nonzero(indices == expert)
        rows, mix = x[tokens], weights[tokens, choices, None]
        before, after = (mix, np.ones_like(mix)) if config.weight_on == "input" else (np.ones_like(mix), mix)
        fc1 = rows @ w1[expert].T * before + b1[expert]
        error = product * (np.abs(rows) @ np.abs(w1[expert]).T * np.abs(before)) + SUM * np.abs(b1[expert])
        a, error = _activated(config, fc1, rounded(fc1, error))
        error = rounded(a, error)
        fc2 = a @ w2[expert].T + b2[expert]
        error = (error + product * (np.abs(a) + error)) @ np.abs(w2[expert]).T + SUM * np.abs(b2[expert])
        np.add.at(bounds, tokens, np.abs(after) * (rounded(fc2, error) + SUM * np.abs(fc2)))
        np.add.at(total, tokens, after * fc2)
    if "residual" in feeds:
        residual = feeds["residual"].astype(np.float64).reshape(x.shape)
        total, bounds = total + residual, bounds + SUM * np.abs(residual)
    return rounded(total, bounds).reshape(shape)


def _activated(config: ExpertsConfig, fc1: Float64Array, error: Float64Array) -> tuple[Float64Array, Float64Array]:
    """The activation and its error: gate and value may both be off, to the same side or not."""
    a = activate(config, fc1)
    gates = np.ones(fc1.shape[-1])  # 1 for a gate, else -1
    if config.gated:
        gates = np.tile([1.0, -1.0], len(gates) // 2)
        if config.gate_layout == "concat":
            gates = -np.sort(-gates)
    ends = [activate(config, fc1 + side * error) for side in (1.0, -1.0, gates, -gates)]
    return a, np.max([np.abs(end - a) for end in ends], axis=0) + SUM * np.abs(a)


def _layer(config: ExpertsConfig, feeds: Mapping[str, Any], name: str) -> tuple[Float64Array, Float64Array]:
    """The weights that a layer stands for, (E, N, D), and its bias, (E, N)."""
    layer = ExpertLayer(**{part: feeds.get(f"{name}_{part}") for part in ExpertLayer._fields})
    weights = dense_weights(config, layer)
    return weights, np.zeros(weights.shape[:2]) if layer.bias is None else layer.bias.astype(np.float64)
