"""Pieces that the formats share: four-bit codes in bytes, e2m1 values, scales, and rows of several layers in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ort_moe.packing import checks

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)
"""The value of each e2m1 code: sign in the highest bit; 0 .. 7 mean 0, 0.5, 1, 1.5, 2, 3, 4, 6."""

E2M1_MAX = 6.0
"""The largest of them."""

E2M1_END = 7.0
"""As far from that as a smaller number may be from its code."""

E4M3_MAX = 448.0
"""The largest value of float8_e4m3fn."""


def nearest_e2m1(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.uint8]:
    """e2m1 codes, ties to even; beyond 6 the largest."""
    clipped = np.clip(values, -E2M1_MAX, E2M1_MAX)
    codes: npt.NDArray[np.uint8] = clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & np.uint8(0x0F)
    return codes


def rounded_scales(
    wanted: npt.NDArray[np.floating[Any]], least: npt.NDArray[np.floating[Any]], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """The nearest scales in `dtype`, or the next larger ones where these are less than `least`.

    Among subnormal numbers the nearest may be a third below the one wanted, or 0, which would cut off the largest
    weights of a block.

    Args:
        wanted: Scales that take the largest weight of a block to the outermost code; 0 for a block of zeros.
        least: Those that take it half a step beyond, so that it still rounds to that code.
        dtype: What the scales are to be.
    """
    with np.errstate(over="ignore"):
        scales = wanted.astype(dtype)
    return np.where(scales.astype(np.float64) < least, neighbours(scales, 1), scales)


def neighbours(numbers: npt.NDArray[Any], places: int) -> npt.NDArray[Any]:
    """For each number, none of which is negative, the one of its type so many places above it, or below."""
    bits: npt.NDArray[Any] = numbers.view(f"i{numbers.dtype.itemsize}")
    moved: npt.NDArray[Any] = (bits + bits.dtype.type(places)).view(numbers.dtype)
    return moved


def pack_nibbles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Pairs along the last axis to bytes, the even one in the low bits; an odd one out is followed by a 0."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], 1), np.uint8)], axis=-1)
    packed: npt.NDArray[np.uint8] = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    return packed


def unpack_nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Bytes to pairs along the last axis: the inverse of `pack_nibbles` for even lengths."""
    pairs = np.stack([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def packed_along_the_other_axis(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes (E, A, B / 2) that are packed along B to (E, B, A / 2), an expert at a time."""
    experts, rows, half = packed.shape
    result = np.empty((experts, 2 * half, rows // 2), np.uint8)
    for expert in range(experts):
        result[expert] = pack_nibbles(unpack_nibbles(packed[expert]).T)
    return result


def stack_rows(arrays: Sequence[npt.NDArray[Any]], layout: checks.Layout) -> npt.NDArray[Any]:
    """Layers (E, N, W) of one shape and type to one of (E, number of layers * N, W)."""
    experts, rows, width = arrays[0].shape
    # ml_dtypes' arrays go through their bits: not every NumPy routine takes them.
    bits = [array.view(np.dtype(f"u{array.dtype.itemsize}")) for array in arrays]
    stacked = np.stack(bits, 1 if layout == "concat" else 2).reshape(experts, len(arrays) * rows, width)
    return stacked.view(arrays[0].dtype)


def stack_e2m1(
    weight_format: str,
    layers: Sequence[tuple[npt.NDArray[np.uint8], npt.NDArray[Any], npt.NDArray[np.float32]]],
    layout: checks.Layout,
    remedy: str,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Layers of one shape and global scale, each weights, scales and global scale, to one.

    Args:
        weight_format: The format, for the error.
        layers: Checked each; one at least.
        layout: How rows follow each other.
        remedy: What to do where global scales differ, a clause.

    Raises:
        ValueError: `layout` is neither, or shapes or global scales differ.
    """
    checks.check_stackable(weight_format, [weights.shape for weights, _, _ in layers], layout)
    checks.check_one_global_scale(weight_format, [global_scale for _, _, global_scale in layers], remedy)
    weights, scales = (stack_rows([layer[part] for layer in layers], layout) for part in range(2))
    return weights, scales, layers[0][2]
