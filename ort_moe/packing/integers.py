"""INT4 and INT8: unsigned codes with a scale, and optionally a zero point, for 16 to 128 neighbours.

A weight is `(code - zero_point) * scale`. FusedExperts takes, for E experts, N rows, D elements along the reduction and
b of them to a block:

    weights      uint8 (E, N, D * bits / 8)           int4: two codes a byte along D, the even element in the low bits
    scales       of the type of x (E, N, D / b)
    zero_points  uint8 (E, N, ceil(D / b * bits / 8)) packed like the weights; left out, they are 8 or 128
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ort_moe.choices import BLOCK_SIZES
from ort_moe.packing import arrays, checks

_Format = Literal["int4", "int8"]
_LARGEST = float(np.finfo(np.float32).max)


class Integers(NamedTuple):
    """One layer of all experts as FusedExperts takes it.

    Attributes:
        weights: (E, N, D * bits / 8) uint8.
        scales: (E, N, D / block_size) float32, float16 or bfloat16.
        zero_points: (E, N, ceil(D / block_size * bits / 8)) uint8, or None: half the number of codes.
        weight_format: `int4` or `int8`; shapes do not tell them apart.
        block_size: 16, 32, 64 or 128.
    """

    weights: npt.NDArray[np.uint8]
    scales: npt.NDArray[Any]
    zero_points: npt.NDArray[np.uint8] | None
    weight_format: _Format
    block_size: int


def quantize(
    weights: npt.NDArray[Any],
    weight_format: _Format,
    block_size: int,
    *,
    symmetric: bool = True,
    scale_dtype: npt.DTypeLike | None = None,
    name: str = "weights",
) -> Integers:
    """Quantizes float weights to the nearest codes, an expert at a time.

    Symmetric: the scale takes the largest magnitude of a block to 7 or 127. Otherwise scale and zero point spread the
    codes from the least weight of a block, or 0, to its largest, or 0, so that 0 has a code. Both ends lie within half
    a step of codes that are finite in float32: a scale is rounded up where the nearest one of its type would cut them
    off; only that of a block of zeros is 0.

    Args:
        weights: (E, N, D) float32, float16 or bfloat16, finite; D is a multiple of `block_size`.
        weight_format: `int4` or `int8`.
        block_size: 16, 32, 64 or 128.
        symmetric: Without zero points.
        scale_dtype: Type of the scales, which is that of x; None: that of the weights.
        name: What errors call them.

    Raises:
        ValueError: They have another type or shape, are not finite, or need scales beyond the range of `scale_dtype`;
            or an argument is none of its choices.
    """
    _check_arguments(weight_format, block_size)
    experts, rows, depth = checks.check_floats(weight_format, name, weights)
    chosen = weights.dtype if scale_dtype is None else scale_dtype
    dtype = checks.dtype_of(weight_format, "scale_dtype", chosen, checks.FLOATS)
    checks.check_depth(weight_format, name, depth, block_size)
    bits, count = _bits(weight_format), depth // block_size
    last = 2**bits - 1
    packed = np.empty((experts, rows, depth * bits // 8), np.uint8)
    scales = np.empty((experts, rows, count), dtype)
    zero_points = None if symmetric else np.empty((experts, rows, -(-count * bits // 8)), np.uint8)
    for expert in range(experts):
        blocks = weights[expert].astype(np.float64).reshape(rows, count, block_size)
        checks.check_finite(weight_format, name, expert, blocks)
        below, above = np.abs(blocks.min(axis=-1, initial=0.0)), blocks.max(axis=-1, initial=0.0)
        ends = (np.maximum(below, above), np.zeros_like(above)) if symmetric else (below, above)
        scales[expert] = _scales(*ends, last // 2 if symmetric else last, dtype)
        steps = scales[expert].astype(np.float64)
        if not np.isfinite(steps).all():
            raise ValueError(
                f"{weight_format}: '{name}' must have scales that fit into {dtype}, but expert {expert} has not"
            )
        divisors = np.where(steps > 0.0, steps, 1.0)
        if symmetric:
            zeros = np.full_like(below, (last + 1) // 2)
        else:  # the lower of two that are as near to the least weight, where the largest needs all codes above it
            zeros = np.minimum(np.rint(below / divisors), last - _reach(above, steps))
        finite = np.floor(_LARGEST / divisors)
        lowest, highest = np.maximum(zeros - finite, 0), np.minimum(zeros + finite, last)
        codes = np.rint(blocks / divisors[..., None]) + zeros[..., None]
        codes = np.clip(codes, lowest[..., None], highest[..., None])
        packed[expert] = _pack(weight_format, codes.astype(np.uint8).reshape(rows, depth))
        if zero_points is not None:
            zero_points[expert] = _pack(weight_format, zeros.astype(np.uint8))
    return Integers(packed, scales, zero_points, weight_format, block_size)


def dequantize(layer: Integers, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """The float weights of a layer, (E, N, D).

    Args:
        layer: The layer.
        dtype: float64, where the products are exact, or float32, where they are rounded once.

    Raises:
        ValueError: The parts of the layer do not fit together, or `dtype` is neither.
    """
    check(layer)
    checks.check_product(layer.weight_format, dtype)
    experts, rows, count = layer.scales.shape
    depth = count * layer.block_size
    result = np.empty((experts, rows, depth), dtype)
    for expert in range(experts):
        codes = _unpack(layer.weight_format, layer.weights[expert]).astype(np.int32)
        zeros: Any = 2 ** (_bits(layer.weight_format) - 1)
        if layer.zero_points is not None:
            zeros = _unpack(layer.weight_format, layer.zero_points[expert])[:, :count, None].astype(np.int32)
        steps = codes.reshape(rows, count, layer.block_size) - zeros
        result[expert] = (steps.astype(dtype) * layer.scales[expert].astype(dtype)[..., None]).reshape(rows, depth)
    return result


def from_qmoe(
    weights: npt.NDArray[np.uint8],
    scales: npt.NDArray[Any],
    zero_points: npt.NDArray[np.uint8] | None,
    weight_format: _Format,
    block_size: int,
    name: str = "weights",
) -> Integers:
    """Takes the initializers of a com.microsoft::QMoE with quant_type int and weights_prepacked 0: the same format.

    Without a block size of its own, a QMoE has a scale and a zero point for a row, which are repeated for each block.
    Its prepacked layouts are those of an execution provider and are not taken.

    Args:
        weights: `fc*_experts_weights`, uint8 (E, N, D * bits / 8).
        scales: `fc*_scales`, float32, float16 or bfloat16, (E, N, D / block_size) or (E, N).
        zero_points: `fc*_zero_points`, uint8 (E, N, ceil(D / block_size * bits / 8)), or with scales (E, N) packed
            along N, (E, ceil(N * bits / 8)); None where there are none.
        weight_format: `int4` or `int8`, by the node's `expert_weight_bits`.
        block_size: Of the result; the node's, where it has one.
        name: What errors call the weights.

    Raises:
        ValueError: They have other types or shapes, or an argument is none of its choices.
    """
    _check_arguments(weight_format, block_size)
    checks.check_array(weight_format, f"the scales of '{name}'", scales)
    if scales.ndim == 2:
        checks.check_array(weight_format, f"'{name}'", weights)
        if weights.ndim != 3 or weights.shape[:2] != scales.shape:
            raise ValueError(
                f"{weight_format}: '{name}' must have shape (E, N, {_width(weight_format)}) to go with scales of shape "
                f"{scales.shape}, but has {weights.shape}"
            )
        experts, rows, width = weights.shape
        depth = width * 8 // _bits(weight_format)
        checks.check_depth(weight_format, name, depth, block_size)
        count = depth // block_size
        if zero_points is not None:
            packed_rows = -(-rows * _bits(weight_format) // 8)
            checks.check_part(
                weight_format,
                f"the zero points of '{name}'",
                zero_points,
                np.uint8,
                (experts, packed_rows),
                "(E, N)" if weight_format == "int8" else "(E, ceil(N / 2))",
                f"scales of shape {scales.shape}",
            )
            zeros = _unpack(weight_format, zero_points)[:, :rows, None]
            zero_points = _pack(weight_format, np.repeat(zeros, count, axis=-1))
        scales = np.repeat(scales[..., None], count, axis=-1)
    layer = Integers(weights, scales, zero_points, weight_format, block_size)
    check(layer, name)
    return layer


def to_qmoe(
    layer: Integers,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any], npt.NDArray[np.uint8] | None]:
    """Weights, scales and zero points of a com.microsoft::QMoE with weights_prepacked 0 and the layer's block size.

    Raises:
        ValueError: The parts of the layer do not fit together.
    """
    check(layer)
    return layer.weights, layer.scales, layer.zero_points


def stack_rows(layers: Sequence[Integers], layout: checks.Layout = "concat") -> Integers:
    """Makes one fc1 of a gate and a value projection; experts keep their number.

    Args:
        layers: Of the same E, N, D, format, block size and type of scales, with or without zero points.
        layout: All rows of the first, then those of the next; or a row of each in turn.

    Raises:
        ValueError: There are none, or `layout` is neither; or they differ in one of these.
    """
    checks.check_layers("integers", layers, Integers)
    for layer in layers:
        check(layer)
    weight_format = layers[0].weight_format
    checks.check_stackable(weight_format, [layer.weights.shape for layer in layers], layout)
    first = layers[0]
    for layer in layers:
        for what, one, other in (
            ("format", first.weight_format, layer.weight_format),
            ("block size", first.block_size, layer.block_size),
            ("type of scales", first.scales.dtype, layer.scales.dtype),
            ("kind of zero points", _has_zero_points(first), _has_zero_points(layer)),
        ):
            if one != other:
                raise ValueError(
                    f"{weight_format}: layers to be stacked must have one {what}, but have {one} and {other}"
                )
    zero_points = [layer.zero_points for layer in layers if layer.zero_points is not None]
    return first._replace(
        weights=arrays.stack_rows([layer.weights for layer in layers], layout),
        scales=arrays.stack_rows([layer.scales for layer in layers], layout),
        zero_points=arrays.stack_rows(zero_points, layout) if zero_points else None,
    )


def check(layer: Integers, name: str = "weights") -> None:
    """Checks the types and shapes of a layer.

    Raises:
        ValueError: It is a layer of another format, or one is not what FusedExperts takes; the sentence names it.
    """
    checks.check_kind("integers", layer, Integers)
    weight_format, scales = layer.weight_format, layer.scales
    _check_arguments(weight_format, layer.block_size)
    checks.check_array(weight_format, f"the scales of '{name}'", scales)
    if scales.dtype not in checks.FLOATS or scales.ndim != 3:
        raise ValueError(
            f"{weight_format}: the scales of '{name}' must be {checks.alternatives(checks.FLOATS)} of shape "
            f"(E, N, D / {layer.block_size}), but are {scales.dtype} of shape {scales.shape}"
        )
    bits = _bits(weight_format)
    experts, rows, count = scales.shape
    expected = (experts, rows, count * layer.block_size * bits // 8)
    letters, beside = f"(E, N, {_width(weight_format)})", f"scales of shape {scales.shape}"
    checks.check_part(weight_format, f"'{name}'", layer.weights, np.uint8, expected, letters, beside)
    if layer.zero_points is not None:
        expected = (experts, rows, -(-count * bits // 8))
        what, letters = f"the zero points of '{name}'", f"(E, N, ceil(D / {layer.block_size} * {bits} / 8))"
        checks.check_part(weight_format, what, layer.zero_points, np.uint8, expected, letters, beside)


def _scales(
    below: npt.NDArray[np.float64], above: npt.NDArray[np.float64], most: int, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """The scales nearest to those that spread all codes over a block, of those that keep both of its ends.

    Args:
        below: How far below 0 the least weight of a block lies.
        above: How far above 0 the largest does; 0 for symmetric codes.
        most: Codes beside that of 0, on both of its sides.
        dtype: What the scales are to be.
    """
    with np.errstate(over="ignore"):
        scales = ((below + above) / most).astype(dtype)
    lost = ~_keep_ends(below, above, most, scales)
    if lost.any():
        scales[lost] = _scales_nearby(below[lost], above[lost], most, scales[lost])
    return scales


def _scales_nearby(
    below: npt.NDArray[np.float64], above: npt.NDArray[np.float64], most: int, scales: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Scales that keep both ends, instead of the nearest, which do not.

    Without a limit to float32 the next larger one does: it is no less than the scale that was wanted. An outermost code
    beyond float32 comes back into it with a scale that is a little smaller, where codes suffice for that, or else with
    one so large that the end goes half a step down.
    """
    farther = np.maximum(below, above)
    reach = _reach(farther, scales)
    smaller = np.minimum(_LARGEST / np.maximum(reach, 1.0), scales.astype(np.float64)).astype(scales.dtype)
    too_far = reach * smaller.astype(np.float64) > _LARGEST
    smaller = np.where(too_far, arrays.neighbours(smaller, -1), smaller)
    scales = np.where(_keep_ends(below, above, most, smaller), smaller, scales)
    while not (kept := _keep_ends(below, above, most, scales)).all():
        reach, steps = _reach(farther, scales), scales.astype(np.float64)
        half_down = np.where(reach * steps > _LARGEST, farther / (reach - 0.5), 0.0)
        larger = np.maximum(half_down, arrays.neighbours(scales, 1).astype(np.float64)).astype(scales.dtype)
        scales = np.where(kept, scales, larger)
    return scales


def _keep_ends(
    below: npt.NDArray[np.float64], above: npt.NDArray[np.float64], most: int, scales: npt.NDArray[Any]
) -> npt.NDArray[np.bool_]:
    """Whether both ends of a block lie within half a step of codes that there are, and that are finite in float32."""
    lower, upper, steps = _reach(below, scales), _reach(above, scales), scales.astype(np.float64)
    finite = np.maximum(lower, upper) <= np.floor(_LARGEST / np.where(steps > 0.0, steps, 1.0))
    kept: npt.NDArray[np.bool_] = (lower + upper <= most) & finite & ((steps > 0.0) | (below + above == 0.0))
    return kept


def _reach(end: npt.NDArray[np.float64], scales: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """How many codes from that of 0 the nearest to an end of a block is; of two as near, the nearer to 0."""
    steps = scales.astype(np.float64)
    codes: npt.NDArray[np.float64] = np.ceil(end / np.where(steps > 0.0, steps, 1.0) - 0.5)
    return codes


def _check_arguments(weight_format: str, block_size: int) -> None:
    checks.check_word("integers", "weight_format", weight_format, _Format)
    checks.check_block_size(weight_format, block_size, BLOCK_SIZES)


def _bits(weight_format: _Format) -> int:
    return 4 if weight_format == "int4" else 8


def _width(weight_format: _Format) -> str:
    return "D / 2" if weight_format == "int4" else "D"


def _has_zero_points(layer: Integers) -> str:
    return "no zero points" if layer.zero_points is None else "zero points"


def _pack(weight_format: _Format, codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return arrays.pack_nibbles(codes) if weight_format == "int4" else codes


def _unpack(weight_format: _Format, packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return arrays.unpack_nibbles(packed) if weight_format == "int4" else packed
