"""FP8: float8 weights with a float32 scale for a square block of a layer.

A weight is `float8 * scale`. FusedExperts takes, for E experts, N rows, D elements along the reduction and blocks of b
rows and b elements, the last ones of which may be smaller:

    weights  float8_e4m3fn (E, N, D)
    scales   float32 (E, ceil(N / b), ceil(D / b))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ort_moe.choices import BLOCK_SIZES
from ort_moe.packing import arrays, checks

WEIGHT_DTYPE: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)
"""What the weights are."""


class Fp8(NamedTuple):
    """One layer of all experts as FusedExperts takes it.

    Attributes:
        weights: (E, N, D) float8_e4m3fn.
        scales: (E, ceil(N / block_size), ceil(D / block_size)) float32.
        block_size: 16, 32, 64 or 128; shapes do not always tell.
    """

    weights: npt.NDArray[Any]
    scales: npt.NDArray[np.float32]
    block_size: int


def quantize(weights: npt.NDArray[Any], block_size: int = 128, name: str = "weights") -> Fp8:
    """Quantizes float weights to the nearest float8, an expert at a time.

    The scale of a block takes its largest magnitude to 448, the largest float8; that of a block of zeros is 1.

    Args:
        weights: (E, N, D) float32, float16 or bfloat16, finite.
        block_size: 16, 32, 64 or 128.
        name: What errors call them.

    Raises:
        ValueError: They have another type or shape, or are not finite; or `block_size` is none of these.
    """
    checks.check_block_size("fp8", block_size, BLOCK_SIZES)
    experts, rows, depth = checks.check_floats("fp8", name, weights)
    packed = np.empty((experts, rows, depth), WEIGHT_DTYPE)
    scales = np.ones((experts, -(-rows // block_size), -(-depth // block_size)), np.float32)
    for expert in range(experts):
        matrix = weights[expert].astype(np.float32)
        checks.check_finite("fp8", name, expert, matrix)
        if not matrix.size:
            continue
        starts = (np.arange(0, size, block_size) for size in matrix.shape)
        largest = np.abs(matrix)
        for axis, first in enumerate(starts):
            largest = np.maximum.reduceat(largest, first, axis=axis)
        # Tiny weights: the scale is kept normal, so that dividing by it stays accurate.
        wanted = np.maximum(largest / np.float32(arrays.E4M3_MAX), np.finfo(np.float32).tiny)
        scales[expert] = np.where(largest > 0.0, wanted, np.float32(1.0))
        steps = _spread(scales[expert], matrix.shape, block_size)
        packed[expert] = np.clip(matrix / steps, -arrays.E4M3_MAX, arrays.E4M3_MAX).astype(WEIGHT_DTYPE)
    return Fp8(packed, scales, block_size)


def dequantize(layer: Fp8, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """The float weights of a layer, (E, N, D).

    Args:
        layer: The layer.
        dtype: float64, where the products are exact, or float32, where they are rounded once.

    Raises:
        ValueError: The parts of the layer do not fit together, or `dtype` is neither.
    """
    checks.check_product("fp8", dtype)
    check(layer)
    result = np.empty(layer.weights.shape, dtype)
    for expert, matrix in enumerate(layer.weights):
        steps = _spread(layer.scales[expert].astype(dtype), matrix.shape, layer.block_size)
        result[expert] = matrix.astype(dtype) * steps
    return result


def from_checkpoint(
    weights: npt.NDArray[Any],
    scales: npt.NDArray[Any],
    block_size: int = 128,
    name: str = "weights",
) -> Fp8:
    """Takes what block-scaled checkpoints, as DeepSeek's, store for a linear layer of each expert: the same format.

    Args:
        weights: `weight`, float8_e4m3fn or its bits as uint8, (N, D) of one expert, or (E, N, D).
        scales: `weight_scale_inv`, which multiplies: float32, float16 or bfloat16, (ceil(N / block_size),
            ceil(D / block_size)) of one expert, or (E, ...); or one number for an expert, (E), or for all, (), which is
            repeated for each block.
        block_size: `weight_block_size`, one number for both axes: 16, 32, 64 or 128.
        name: What errors call the weights.

    Raises:
        ValueError: They have other types or shapes.
    """
    checks.check_block_size("fp8", block_size, BLOCK_SIZES)
    checks.check_array("fp8", f"'{name}'", weights)
    checks.check_array("fp8", f"the scales of '{name}'", scales)
    stacked = weights[None] if weights.ndim == 2 else weights
    if stacked.dtype == np.uint8:
        stacked = stacked.view(WEIGHT_DTYPE)
    scales = scales[None] if scales.ndim == 2 else scales
    if scales.ndim < 2 and stacked.ndim == 3 and scales.size in (1, len(stacked)):
        experts, rows, depth = stacked.shape
        blocks = (experts, -(-rows // block_size), -(-depth // block_size))
        scales = np.broadcast_to(scales.reshape(-1, 1, 1), blocks)
    layer = Fp8(stacked, scales.astype(np.float32) if scales.dtype in checks.FLOATS else scales, block_size)
    check(layer, name)
    return layer


def from_qmoe(weights: npt.NDArray[Any], scales: npt.NDArray[Any], block_size: int, name: str = "weights") -> Fp8:
    """Takes the initializers of a com.microsoft::QMoE with quant_type fp8 and a block size: the format is the same.

    Args:
        weights: `fc*_experts_weights`, float8_e4m3fn (E, N, D).
        scales: `fc*_scales`, float32, float16 or bfloat16 (E, ceil(N / block_size), ceil(D / block_size)).
        block_size: The node's.
        name: What errors call the weights.

    Raises:
        ValueError: They have other types or shapes.
    """
    checks.check_array("fp8", f"the scales of '{name}'", scales)
    layer = Fp8(weights, scales.astype(np.float32) if scales.dtype in checks.FLOATS else scales, block_size)
    check(layer, name)
    return layer


def to_qmoe(layer: Fp8) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Weights and scales of a com.microsoft::QMoE with the layer's block size: the inverse of `from_qmoe`.

    Raises:
        ValueError: The parts of the layer do not fit together.
    """
    check(layer)
    return layer.weights, layer.scales


def stack_rows(layers: Sequence[Fp8], layout: checks.Layout = "concat") -> Fp8:
    """Makes one fc1 of a gate and a value projection; experts keep their number.

    Args:
        layers: Of the same E, N, D and block size.
        layout: All rows of the first, then those of the next. Rows in turn would put different scales into a block.

    Raises:
        ValueError: There are none, or they differ; `layout` is not concat; or N is no multiple of the block size, so
            that a block would hold rows of two layers.
    """
    checks.check_layers("fp8", layers, Fp8)
    for layer in layers:
        check(layer)
    checks.check_stackable("fp8", [layer.weights.shape for layer in layers], layout)
    if layout != "concat":
        raise ValueError("fp8: layout must be 'concat', because rows of one block share a scale, but is 'interleaved'")
    first = layers[0]
    for layer in layers:
        if layer.block_size != first.block_size:
            raise ValueError(
                f"fp8: layers to be stacked must have one block size, but have {first.block_size} and "
                f"{layer.block_size}"
            )
    rows = first.weights.shape[1]
    if len(layers) > 1 and rows % first.block_size:
        raise ValueError(f"fp8: N of layers to be stacked must be a multiple of {first.block_size}, but is {rows}")
    return Fp8(
        arrays.stack_rows([layer.weights for layer in layers], layout),
        arrays.stack_rows([layer.scales for layer in layers], layout),
        first.block_size,
    )


def check(layer: Fp8, name: str = "weights") -> None:
    """Checks the types and shapes of a layer.

    Raises:
        ValueError: It is a layer of another format, or one is not what FusedExperts takes; the sentence names it.
    """
    checks.check_kind("fp8", layer, Fp8)
    checks.check_block_size("fp8", layer.block_size, BLOCK_SIZES)
    weights, b = layer.weights, layer.block_size
    checks.check_array("fp8", f"'{name}'", weights)
    if weights.dtype != WEIGHT_DTYPE or weights.ndim != 3:
        raise ValueError(
            f"fp8: '{name}' must be {WEIGHT_DTYPE} of shape (E, N, D), but is {weights.dtype} of shape {weights.shape}"
        )
    experts, rows, depth = weights.shape
    expected, letters = (experts, -(-rows // b), -(-depth // b)), f"(E, ceil(N / {b}), ceil(D / {b}))"
    beside = f"weights of shape {weights.shape}"
    checks.check_part("fp8", f"the scales of '{name}'", layer.scales, np.float32, expected, letters, beside)


def _spread(scales: npt.NDArray[Any], shape: tuple[int, ...], block_size: int) -> npt.NDArray[Any]:
    """The scale of each weight of an expert, (N, D)."""
    rows, depth = shape
    return np.repeat(np.repeat(scales, block_size, axis=0)[:rows], block_size, axis=1)[:, :depth]
