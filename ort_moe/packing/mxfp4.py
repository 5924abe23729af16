"""MXFP4: 4-bit weights with a power of two for 32 neighbours, and optionally a float32 scale for an expert.

A weight is `e2m1 * 2^(scale - 127) * global_scale`. FusedExperts takes, for E experts, N rows and D elements along the
reduction:

    weights       uint8 (E, N, D / 2)   two e2m1 codes a byte along D, the even element in the low four bits
    scales        uint8 (E, N, D / 32)  e8m0, the biased exponent; 255 is NaN
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

BLOCK = 32
"""Weights along D that share a scale."""

_BIAS = 127
_NAN = 255
_LARGEST = 6.0 * 2.0**125  # of the weights that are finite in float32


class Mxfp4(NamedTuple):
    """One layer of all experts as FusedExperts takes it.

    Attributes:
        weights: (E, N, D / 2) uint8.
        scales: (E, N, D / 32) uint8.
        global_scale: (E) float32.
    """

    weights: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]
    global_scale: npt.NDArray[np.float32]


def quantize(weights: npt.NDArray[Any], name: str = "weights") -> Mxfp4:
    """Quantizes float weights to the nearest codes, an expert at a time.

    The scale of a block is the least power of two that takes its largest weight to 7 at most, which is as far from 6 as
    weights below it may be from their codes. The OCP specification's, by the largest weight's exponent alone, lets it
    come close to 8. Global scales are 1.

    Args:
        weights: (E, N, D) float32, float16 or bfloat16, finite; D is a multiple of 32.
        name: What errors call them.

    Raises:
        ValueError: They have another type or shape, or are not finite.
    """
    experts, rows, depth = checks.check_floats("mxfp4", name, weights)
    checks.check_depth("mxfp4", name, depth, BLOCK)
    packed = np.empty((experts, rows, depth // 2), np.uint8)
    scales = np.empty((experts, rows, depth // BLOCK), np.uint8)
    for expert in range(experts):
        blocks = weights[expert].astype(np.float64).reshape(rows, depth // BLOCK, BLOCK)
        checks.check_finite("mxfp4", name, expert, blocks)
        blocks = np.clip(blocks, -_LARGEST, _LARGEST)
        largest = np.abs(blocks).max(axis=-1, initial=0.0)
        fraction, exponent = np.frexp(largest / arrays.E2M1_END)  # fraction in [1/2, 1), or 0
        exponent = np.where(fraction == 0.5, exponent - 1, exponent)
        exponent = np.where(fraction == 0.0, 0, np.maximum(exponent, -_BIAS))
        scales[expert] = (exponent + _BIAS).astype(np.uint8)
        codes = arrays.nearest_e2m1(np.ldexp(blocks, -exponent[..., None]).astype(np.float32))
        packed[expert] = arrays.pack_nibbles(codes.reshape(rows, depth))
    return Mxfp4(packed, scales, np.ones(experts, np.float32))


def dequantize(layer: Mxfp4, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """The float weights of a layer, (E, N, D).

    Args:
        layer: The layer.
        dtype: float64, where the products are exact, or float32, where the last is rounded once and what is beyond its
            range is infinite.

    Raises:
        ValueError: The parts of the layer do not fit together, or `dtype` is neither.
    """
    checks.check_product("mxfp4", dtype)
    check(layer)
    experts, rows, half = layer.weights.shape
    result = np.empty((experts, rows, 2 * half), dtype)
    for expert in range(experts):
        codes = arrays.E2M1.astype(dtype)[arrays.unpack_nibbles(layer.weights[expert])]
        exponents = layer.scales[expert].astype(np.int32)[..., None]
        with np.errstate(over="ignore"):
            scaled = np.ldexp(codes.reshape(rows, 2 * half // BLOCK, BLOCK), exponents - _BIAS)
            scaled = np.where(exponents == _NAN, np.nan, scaled)
            result[expert] = scaled.reshape(rows, 2 * half) * layer.global_scale[expert].astype(dtype)
    return result


def from_blocks(
    blocks: npt.NDArray[np.uint8],
    scales: npt.NDArray[Any],
    name: str = "weights",
) -> Mxfp4:
    """Takes what gpt-oss' checkpoints store for the experts of a layer: the same bytes, a block in a row of its own.

    Args:
        blocks: `*_blocks`, uint8 (E, N, D / 32, 16).
        scales: `*_scales`, e8m0 as uint8 or float8_e8m0fnu, (E, N, D / 32).
        name: What errors call the weights.

    Raises:
        ValueError: They have other types or shapes.
    """
    checks.check_array("mxfp4", f"the blocks of '{name}'", blocks)
    if blocks.ndim != 4 or blocks.shape[-1] != BLOCK // 2:
        raise ValueError(
            f"mxfp4: the blocks of '{name}' must have shape (E, N, D / 32, {BLOCK // 2}), but have {blocks.shape}"
        )
    experts, rows, count, _ = blocks.shape
    packed = blocks.reshape(experts, rows, count * BLOCK // 2)
    layer = Mxfp4(packed, _e8m0_bits(scales, name), np.ones(experts, np.float32))
    check(layer, name)
    return layer


def from_qmoe(
    weights: npt.NDArray[np.uint8],
    scales: npt.NDArray[Any],
    global_scale: npt.NDArray[np.float32],
    packed_along: checks.PackedAlong,
    name: str = "weights",
) -> Mxfp4:
    """Takes the initializers of a com.microsoft::QMoE with quant_type fp4.

    Args:
        weights: `fc*_experts_weights`, uint8: packed along K, which is D here, (E, N, D / 2), or bytes of two
            neighbours along N, (E, D, N / 2).
        scales: `fc*_scales`, float8_e8m0fnu or its bits as uint8, (E, N, D / 32).
        global_scale: `fc*_global_scale`, float32 (E).
        packed_along: Along which axis two weights share a byte; shapes alone do not tell where N = D.
        name: What errors call the weights.

    Raises:
        ValueError: They have other types or shapes, or `packed_along` is neither.
    """
    checks.check_word("mxfp4", "packed_along", packed_along, checks.PackedAlong)
    bits = _e8m0_bits(scales, name)
    shape = checks.check_block_scales("mxfp4", name, bits, np.uint8, BLOCK)
    if packed_along == "N":
        checks.check_declared("mxfp4", name, weights, shape, BLOCK)
        weights = arrays.packed_along_the_other_axis(weights)
    layer = Mxfp4(weights, bits, global_scale)
    check(layer, name)
    return layer


def to_qmoe(layer: Mxfp4, packed_along: checks.PackedAlong) -> Mxfp4:
    """The initializers of a com.microsoft::QMoE, scales as float8_e8m0fnu: the inverse of `from_qmoe`.

    Raises:
        ValueError: The parts of the layer do not fit together, N is odd, or `packed_along` is neither.
    """
    checks.check_word("mxfp4", "packed_along", packed_along, checks.PackedAlong)
    check(layer)
    layer = layer._replace(scales=layer.scales.view(ml_dtypes.float8_e8m0fnu))
    if packed_along == "K":
        return layer
    checks.check_pairs_of_rows("mxfp4", layer.weights.shape[1])
    return layer._replace(weights=arrays.packed_along_the_other_axis(layer.weights))


def stack_rows(layers: Sequence[Mxfp4], layout: checks.Layout = "concat") -> Mxfp4:
    """Makes one fc1 of a gate and a value projection; experts keep their number.

    Args:
        layers: Of the same E, N and D.
        layout: All rows of the first, then those of the next; or a row of each in turn.

    Raises:
        ValueError: There are none, or `layout` is neither; or shapes or global scales differ.
    """
    checks.check_layers("mxfp4", layers, Mxfp4)
    for layer in layers:
        check(layer)
    remedy = "dequantize and quantize each, which makes it 1"
    return Mxfp4(*arrays.stack_e2m1("mxfp4", layers, layout, remedy))


def check(layer: Mxfp4, name: str = "weights") -> None:
    """Checks the types and shapes of a layer.

    Raises:
        ValueError: It is a layer of another format, or one is not what FusedExperts takes; the sentence names it.
    """
    checks.check_kind("mxfp4", layer, Mxfp4)
    checks.check_e2m1_layer("mxfp4", name, layer, np.uint8, BLOCK)


def _e8m0_bits(scales: npt.NDArray[Any], name: str) -> npt.NDArray[np.uint8]:
    checks.check_array("mxfp4", f"the scales of '{name}'", scales)
    return scales.view(np.uint8) if scales.dtype == ml_dtypes.float8_e8m0fnu else scales
