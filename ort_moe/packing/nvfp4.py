"""NVFP4: 4-bit weights with a float8 scale for 16 neighbours and a float32 scale for an expert.

A weight is `e2m1 * scale * global_scale`. FusedExperts takes, for E experts, N rows and D elements along the reduction:

    weights       uint8 (E, N, D / 2)           two e2m1 codes a byte along D, the even element in the low four bits
    scales        float8_e4m3fn (E, N, D / 16)  one for 16 neighbours along D
    global_scale  float32 (E)

The codes: ort_moe/packing/arrays.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ort_moe.packing import arrays, checks

BLOCK = 16
"""Weights along D that share a scale."""

SCALE_DTYPE: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)
"""What the scales of blocks are."""


class Nvfp4(NamedTuple):
    """One layer of all experts as FusedExperts takes it.

    Attributes:
        weights: (E, N, D / 2) uint8.
        scales: (E, N, D / 16) float8_e4m3fn.
        global_scale: (E) float32.
    """

    weights: npt.NDArray[np.uint8]
    scales: npt.NDArray[Any]
    global_scale: npt.NDArray[np.float32]


def quantize(
    weights: npt.NDArray[Any], name: str = "weights", *, largest: npt.NDArray[np.float32] | None = None
) -> Nvfp4:
    """Quantizes float weights to the nearest codes, an expert at a time.

    The global scale of an expert maps its largest weight to the largest product of code and scale, 6 * 448; the scale
    of a block then maps the block's largest weight to 6. Both as in NVIDIA's recipe for weights, but for scales that
    would take it beyond 7: where a block is that small beside its expert's largest weight, they are rounded up, and
    only a block of zeros gets the scale 0.

    Args:
        weights: (E, N, D) float32, float16 or bfloat16, finite; D is a multiple of 16.
        name: What errors call them.
        largest: (E) the largest magnitude of all of an expert's weights, where these are some of its rows; None: these
            are all.

    Raises:
        ValueError: They have another type or shape, or are not finite; or `largest` has, or is less than theirs.
    """
    experts, rows, depth = checks.check_floats("nvfp4", name, weights)
    checks.check_depth("nvfp4", name, depth, BLOCK)
    if largest is not None:
        checks.check_array("nvfp4", "largest", largest)
        if largest.dtype not in checks.FLOATS and largest.dtype.kind not in "fiu":
            raise ValueError(f"nvfp4: largest must be of real numbers, but is {largest.dtype}")
        if largest.shape != (experts,):
            raise ValueError(f"nvfp4: largest must have shape (E) = {(experts,)}, but has {largest.shape}")
    packed = np.empty((experts, rows, depth // 2), np.uint8)
    scales = np.empty((experts, rows, depth // BLOCK), SCALE_DTYPE)
    global_scale = np.ones(experts, np.float32)
    for expert in range(experts):
        blocks = weights[expert].astype(np.float32).reshape(rows, depth // BLOCK, BLOCK)
        checks.check_finite("nvfp4", name, expert, blocks)
        block_max = np.abs(blocks).max(axis=-1, initial=0.0)
        peak = block_max.max(initial=0.0)
        if largest is not None:
            if not peak <= largest[expert] < np.inf:
                raise ValueError(
                    f"nvfp4: largest must be finite and no less than what occurs in '{name}', but of expert {expert} "
                    f"it is {largest[expert]}, and {peak} occurs"
                )
            peak = np.float32(min(largest[expert], np.finfo(np.float32).max))  # whatever type it came in
        if peak > 0.0:
            # An expert of tiny weights: the scale is kept normal, so that dividing by it stays accurate.
            global_scale[expert] = np.maximum(peak / (arrays.E2M1_MAX * arrays.E4M3_MAX), np.finfo(np.float32).tiny)
        wanted = np.minimum(block_max / arrays.E2M1_MAX / global_scale[expert], arrays.E4M3_MAX)
        scales[expert] = arrays.rounded_scales(wanted, block_max / arrays.E2M1_END / global_scale[expert], SCALE_DTYPE)
        steps = scales[expert].astype(np.float32) * global_scale[expert]
        with np.errstate(divide="ignore", invalid="ignore"):
            codes = np.where(steps[..., None] > 0.0, blocks / steps[..., None], np.float32(0.0))
        packed[expert] = arrays.pack_nibbles(arrays.nearest_e2m1(codes).reshape(rows, depth))
    return Nvfp4(packed, scales, global_scale)


def dequantize(layer: Nvfp4, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """The float weights of a layer, (E, N, D).

    Args:
        layer: The layer.
        dtype: float64, where the products are exact, or float32, where the last is rounded once.

    Raises:
        ValueError: The parts of the layer do not fit together, or `dtype` is neither.
    """
    checks.check_product("nvfp4", dtype)
    check(layer)
    experts, rows, half = layer.weights.shape
    result = np.empty((experts, rows, 2 * half), dtype)
    for expert in range(experts):
        codes = arrays.E2M1.astype(dtype)[arrays.unpack_nibbles(layer.weights[expert])]
        scaled = codes.reshape(rows, 2 * half // BLOCK, BLOCK) * layer.scales[expert].astype(dtype)[..., None]
        result[expert] = scaled.reshape(rows, 2 * half) * layer.global_scale[expert].astype(dtype)
    return result


def from_modelopt(
    weights: npt.NDArray[np.uint8],
    scales: npt.NDArray[Any],
    global_scale: npt.NDArray[np.float32],
    name: str = "weights",
) -> Nvfp4:
    """Takes what NVIDIA's ModelOpt stores for a linear layer of each expert: the format is the same.

    Args:
        weights: `weight`, uint8 (N, D / 2) of one expert, or (E, N, D / 2).
        scales: `weight_scale`, float8_e4m3fn or its bits as uint8, (N, D / 16) or (E, N, D / 16).
        global_scale: `weight_scale_2`, float32: one number, or (E).
        name: What errors call the weights.

    Raises:
        ValueError: They have other types or shapes.
    """
    checks.check_array("nvfp4", f"'{name}'", weights)
    checks.check_array("nvfp4", f"the scales of '{name}'", scales)
    checks.check_array("nvfp4", f"the global scale of '{name}'", global_scale)
    stacked = weights[None] if weights.ndim == 2 else weights
    if scales.dtype == np.uint8:
        scales = scales.view(SCALE_DTYPE)
    scales = scales[None] if scales.ndim == 2 else scales
    scale = np.asarray(global_scale)
    if scale.size == 1:
        scale = np.full(len(stacked) if stacked.ndim else 1, scale.reshape(()), scale.dtype)
    layer = Nvfp4(stacked, scales, scale)
    check(layer, name)
    return layer


def from_qmoe(
    weights: npt.NDArray[np.uint8],
    scales: npt.NDArray[Any],
    global_scale: npt.NDArray[np.float32],
    packed_along: checks.PackedAlong,
    name: str = "weights",
) -> Nvfp4:
    """Takes the initializers of a com.microsoft::QMoE with quant_type nvfp4.

    There the weights have the declared shape (E, D, N / 2). With `weights_prepacked = 1` their bytes are those of
    (E, N, D / 2), packed along K, which is D here; otherwise a byte holds two neighbours along N.

    Args:
        weights: `fc*_experts_weights`, uint8 (E, D, N / 2).
        scales: `fc*_scales`, float8_e4m3fn (E, N, D / 16).
        global_scale: `fc*_global_scale`, float32 (E).
        packed_along: K with weights_prepacked = 1, else N.
        name: What errors call the weights.

    Raises:
        ValueError: They have other types or shapes, or `packed_along` is neither.
    """
    checks.check_word("nvfp4", "packed_along", packed_along, checks.PackedAlong)
    experts, rows, blocks = shape = checks.check_block_scales("nvfp4", name, scales, SCALE_DTYPE, BLOCK)
    checks.check_declared("nvfp4", name, weights, shape, BLOCK)
    if packed_along == "K":
        packed = weights.reshape(experts, rows, blocks * BLOCK // 2)
    else:
        packed = arrays.packed_along_the_other_axis(weights)
    layer = Nvfp4(packed, scales, global_scale)
    check(layer, name)
    return layer


def to_qmoe(layer: Nvfp4, packed_along: checks.PackedAlong) -> Nvfp4:
    """The initializers of a com.microsoft::QMoE: the inverse of `from_qmoe`.

    Raises:
        ValueError: The parts of the layer do not fit together, N is odd, or `packed_along` is neither.
    """
    checks.check_word("nvfp4", "packed_along", packed_along, checks.PackedAlong)
    check(layer)
    experts, rows, half = layer.weights.shape
    checks.check_pairs_of_rows("nvfp4", rows)
    if packed_along == "K":
        return layer._replace(weights=layer.weights.reshape(experts, 2 * half, rows // 2))
    return layer._replace(weights=arrays.packed_along_the_other_axis(layer.weights))


def stack_rows(layers: Sequence[Nvfp4], layout: checks.Layout = "concat") -> Nvfp4:
    """Makes one fc1 of a gate and a value projection; experts keep their number.

    Args:
        layers: Of the same E, N and D.
        layout: All rows of the first, then those of the next; or a row of each in turn.

    Raises:
        ValueError: There are none, or `layout` is neither; or shapes or global scales differ. Scales that differ would
            have to be rounded anew.
    """
    checks.check_layers("nvfp4", layers, Nvfp4)
    for layer in layers:
        check(layer)
    remedy = "quantize each with `largest`, the largest magnitude of all of them for each expert"
    return Nvfp4(*arrays.stack_e2m1("nvfp4", layers, layout, remedy))


def check(layer: Nvfp4, name: str = "weights") -> None:
    """Checks the types and shapes of a layer.

    Raises:
        ValueError: It is a layer of another format, or one is not what FusedExperts takes; the sentence names it.
    """
    checks.check_kind("nvfp4", layer, Nvfp4)
    checks.check_e2m1_layer("nvfp4", name, layer, SCALE_DTYPE, BLOCK)
