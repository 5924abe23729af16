"""FusedExperts in float64: the model that its weights stand for, without any rounding in between.

Kernels meet it within a tolerance: the order of their sums is their own. What follows the experts, the weighted sum of
their rounded rows, has promised bits: ort_moe/reference/finalize_routing.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ort_moe.ops import AttributeValue
from ort_moe.ops.experts_config import ExpertsConfig
from ort_moe.packing import fp8, integers, mxfp4, nvfp4
from ort_moe.reference.dtypes import check_activation, check_array

Float64Array = npt.NDArray[np.float64]

_OP = "FusedExperts"
_erf = np.frompyfunc(math.erf, 1, 1)


class ExpertLayer(NamedTuple):
    """One of the two layers for all experts, N rows with D elements along the reduction.

    Attributes:
        weights: dense: (E, N, D) of the type of x; nvfp4, mxfp4, int4: uint8 (E, N, D / 2); int8: uint8 (E, N, D); fp8:
            float8_e4m3fn (E, N, D).
        scales: nvfp4: float8_e4m3fn (E, N, D / 16); mxfp4: uint8 (E, N, D / 32); int4, int8: of the type of x
            (E, N, D / block_size); fp8: float32 (E, ceil(N / block_size), ceil(D / block_size)).
        global_scale: nvfp4, mxfp4: (E) float32; None counts as 1.
        zero_points: int4: uint8 (E, N, ceil(D / block_size / 2)); int8: uint8 (E, N, D / block_size); None counts as 8
            or 128.
        bias: (E, N) of the type of x.
    """

    weights: npt.NDArray[Any]
    scales: npt.NDArray[Any] | None = None
    global_scale: npt.NDArray[np.float32] | None = None
    zero_points: npt.NDArray[np.uint8] | None = None
    bias: npt.NDArray[Any] | None = None


def fused_experts(
    x: npt.NDArray[Any],
    weights: npt.NDArray[np.float32],
    indices: npt.NDArray[np.int32],
    fc1: ExpertLayer,
    fc2: ExpertLayer,
    residual: npt.NDArray[Any] | None = None,
    **attributes: AttributeValue,
) -> Float64Array:
    """Computes FusedExperts in float64, a token at a time.

    Args:
        x: (..., H) float32, float16 or bfloat16.
        weights: (..., K) float32.
        indices: (..., K) int32; those outside [0, E) contribute nothing.
        fc1: N = 2 I or I rows, D = H.
        fc2: N = H rows, D = I.
        residual: (..., H) of the type of x.
        **attributes: The op's attributes under their names in the op table; those left out are neutral.

    Returns:
        (..., H).

    Raises:
        ValueError: An argument is not what the op takes.
    """
    config = ExpertsConfig.from_attributes(attributes)
    _check(config, x, weights, indices, fc1, fc2, residual)
    first, second = dense_weights(config, fc1), dense_weights(config, fc2)
    *leading, hidden = x.shape
    tokens, k = int(np.prod(leading, dtype=np.int64)), weights.shape[-1]
    y = np.zeros((tokens, hidden), np.float64)
    rows = x.astype(np.float64).reshape(tokens, hidden)
    mixing, chosen = weights.astype(np.float64).reshape(tokens, k), indices.reshape(tokens, k)
    with np.errstate(all="ignore"):
        for token in range(tokens):
            for weight, expert in zip(mixing[token], chosen[token], strict=True):
                if not 0 <= expert < len(first):
                    continue
                on_input = config.weight_on == "input"
                hidden_row = first[expert] @ rows[token] * (weight if on_input else 1.0) + _bias(fc1, expert)
                output = second[expert] @ activate(config, hidden_row) + _bias(fc2, expert)
                y[token] += output * (1.0 if on_input else weight)
    if residual is not None:
        y += residual.astype(np.float64).reshape(tokens, hidden)
    return y.reshape(x.shape)


def activate(config: ExpertsConfig, fc1: Float64Array) -> Float64Array:
    """The activation of rows of fc1: (..., N) to (..., I)."""
    if not config.gated:
        return _activation(config, fc1)
    if config.gate_layout == "interleaved":
        gate, value = fc1[..., 0::2], fc1[..., 1::2]
    else:
        gate, value = np.split(fc1, 2, axis=-1)
    if config.limit > 0.0:
        gate, value = np.minimum(gate, config.limit), np.clip(value, -config.limit, config.limit)
    return _activation(config, gate) * (value + config.beta)


def _activation(config: ExpertsConfig, x: Float64Array) -> Float64Array:
    match config.activation:
        case "silu":
            return x * np.exp(-np.logaddexp(0.0, -config.alpha * x))
        case "gelu":
            return np.asarray(0.5 * x * (1.0 + np.asarray(_erf(x / math.sqrt(2.0)), np.float64)))
        case "gelu_tanh":
            return np.asarray(0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))))
        case "relu":
            return np.maximum(x, 0.0)
        case "relu2":
            return np.maximum(x, 0.0) ** 2
    return x


def _bias(layer: ExpertLayer, expert: int) -> Float64Array | float:
    return 0.0 if layer.bias is None else layer.bias[expert].astype(np.float64)


def dense_weights(config: ExpertsConfig, layer: ExpertLayer) -> Float64Array:
    """The weights that a layer stands for, (E, N, D)."""
    weights, scales = layer.weights, layer.scales
    if config.weight_format == "dense":
        return weights.astype(np.float64)
    assert scales is not None  # checked
    global_scale = np.ones(len(weights), np.float32) if layer.global_scale is None else layer.global_scale
    match config.weight_format:
        case "nvfp4":
            return nvfp4.dequantize(nvfp4.Nvfp4(weights, scales, global_scale), np.float64)
        case "mxfp4":
            return mxfp4.dequantize(mxfp4.Mxfp4(weights, scales, global_scale), np.float64)
        case "fp8":
            return fp8.dequantize(fp8.Fp8(weights, scales, config.block_size), np.float64)
        case "int4" | "int8" as weight_format:
            packed = integers.Integers(weights, scales, layer.zero_points, weight_format, config.block_size)
            return integers.dequantize(packed, np.float64)
    raise AssertionError(config.weight_format)


def _check(
    config: ExpertsConfig,
    x: npt.NDArray[Any],
    weights: npt.NDArray[np.float32],
    indices: npt.NDArray[np.int32],
    fc1: ExpertLayer,
    fc2: ExpertLayer,
    residual: npt.NDArray[Any] | None,
) -> None:
    dtype = check_activation(_OP, "x", x)
    for name, array in (("x", x), ("weights", weights)):
        if array.ndim < 1:
            raise ValueError(f"{_OP}: input '{name}' must have rank 1 or more, but is a scalar")
    *leading, hidden = x.shape
    chosen = (*leading, weights.shape[-1])
    check_array(_OP, "weights", weights, np.float32, chosen)
    check_array(_OP, "indices", indices, np.int32, chosen)
    if residual is not None:
        check_array(_OP, "residual", residual, dtype, x.shape)
    if fc1.weights.ndim != 3:
        raise ValueError(f"{_OP}: input 'fc1_weights' must have rank 3, but has shape {fc1.weights.shape}")
    experts, rows, _ = fc1.weights.shape
    if config.gated and rows % 2:
        raise ValueError(
            f"{_OP}: input 'fc1_weights' must have an even second dimension with gated = 1, but has shape "
            f"{fc1.weights.shape}"
        )
    inner = rows // config.fc1_rows(1)
    for name, size in (("E", experts), ("H", hidden), ("I", inner), ("K", weights.shape[-1])):
        if size < 1:
            raise ValueError(f"{_OP}: {name} must be at least 1, but is {size}")
    _check_layer(config, "fc1", fc1, dtype, (experts, rows, hidden))
    _check_layer(config, "fc2", fc2, dtype, (experts, hidden, inner))


def _check_layer(
    config: ExpertsConfig, name: str, layer: ExpertLayer, dtype: np.dtype[Any], shape: tuple[int, int, int]
) -> None:
    experts, rows, depth = shape
    if layer.bias is not None:
        check_array(_OP, f"{name}_bias", layer.bias, dtype, (experts, rows))
    for part, value, takes in (
        ("scales", layer.scales, config.weight_format != "dense"),
        ("global_scale", layer.global_scale, config.weight_format in ("nvfp4", "mxfp4")),
        ("zero_points", layer.zero_points, config.weight_format in ("int4", "int8")),
    ):
        if value is not None and not takes:
            raise ValueError(f"{_OP}: input '{name}_{part}' must be left out {config.with_format}")
        if value is None and part == "scales" and takes:
            raise ValueError(f"{_OP}: input '{name}_scales' must be given {config.with_format}")
    if depth % config.depth_multiple:
        size = "H" if name == "fc1" else "I"
        raise ValueError(
            f"{_OP}: {size} must be a multiple of {config.depth_multiple} {config.with_format}, but is {depth}"
        )
    width = depth // 2 if config.nibbles else depth
    check_array(_OP, f"{name}_weights", layer.weights, _weights_dtype(config, dtype), (experts, rows, width))
    blocks = (experts, rows, depth // config.scale_block)
    if config.weight_format == "fp8":
        blocks = (experts, -(-rows // config.block_size), -(-depth // config.block_size))
    if layer.scales is not None:
        check_array(_OP, f"{name}_scales", layer.scales, _scales_dtype(config, dtype), blocks)
    if layer.global_scale is not None:
        check_array(_OP, f"{name}_global_scale", layer.global_scale, np.float32, (experts,))
    if layer.zero_points is not None:
        width = -(-blocks[2] // 2) if config.weight_format == "int4" else blocks[2]
        check_array(_OP, f"{name}_zero_points", layer.zero_points, np.uint8, (experts, rows, width))


def _weights_dtype(config: ExpertsConfig, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """For x of `dtype`."""
    if config.weight_format == "dense":
        return dtype
    return fp8.WEIGHT_DTYPE if config.weight_format == "fp8" else np.dtype(np.uint8)


def _scales_dtype(config: ExpertsConfig, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """For x of `dtype`."""
    match config.weight_format:
        case "nvfp4":
            return nvfp4.SCALE_DTYPE
        case "mxfp4":
            return np.dtype(np.uint8)
        case "fp8":
            return np.dtype(np.float32)
    return dtype
