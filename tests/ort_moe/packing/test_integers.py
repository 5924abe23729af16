"""INT4 and INT8 packing: nearest codes, zero points, round trips, refusals, and ORT's own QMoE as an outside oracle."""

from __future__ import annotations

from typing import Any, Literal, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ort_moe.packing import integers
from ort_moe.packing.arrays import pack_nibbles
from tests.experts_cases import ExpertsCase
from tests.ort_moe.packing.weights import random_weights
from tests.qmoe_models import SWIGLU, error_beside_qmoe, qmoe_runs

Format = Literal["int4", "int8"]
FORMATS: tuple[Format, ...] = ("int4", "int8")


def test_an_int4_weight_is_code_minus_zero_point_times_scale() -> None:
    """The layout byte by byte: even elements, and zero points, in the low four bits."""
    codes = np.arange(48, dtype=np.uint8) % 16
    weights = (codes[0::2] | codes[1::2] << 4).reshape(1, 1, 24)
    scales = np.array([[[1.0, 0.5, 0.25]]], np.float32)
    zero_points = np.array([[[0x31, 0x0F]]], np.uint8)  # 1, 3, 15
    expected = np.concatenate([(np.arange(16.0) - z) * s for z, s in ((1, 1.0), (3, 0.5), (15, 0.25))])
    layer = integers.Integers(weights, scales, zero_points, "int4", 16)
    np.testing.assert_array_equal(integers.dequantize(layer, np.float64)[0, 0], expected)
    symmetric = integers.dequantize(layer._replace(zero_points=None), np.float64)[0, 0]
    np.testing.assert_array_equal(symmetric[:16], np.arange(16.0) - 8)


def test_an_int8_weight_is_code_minus_zero_point_times_scale() -> None:
    weights = np.tile(np.array([0, 1, 128, 255], np.uint8), 8).reshape(1, 1, 32)
    layer = integers.Integers(
        weights, np.full((1, 1, 2), 0.5, np.float32), np.array([[[0, 255]]], np.uint8), "int8", 16
    )
    got = integers.dequantize(layer)[0, 0]
    np.testing.assert_array_equal(got[:4], [0.0, 0.5, 64.0, 127.5])
    np.testing.assert_array_equal(got[16:20], [-127.5, -127.0, -63.5, 0.0])
    got = integers.dequantize(layer._replace(zero_points=None))[0, 0]
    np.testing.assert_array_equal(got[:4], [-64.0, -63.5, 0.0, 63.5])


@settings(max_examples=50)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from((1e-30, 1e-3, 1.0, 1e4)),
    st.sampled_from(FORMATS),
    st.sampled_from((16, 32)),
    st.booleans(),
    st.sampled_from((0.0, 1.0)),
)
def test_every_weight_goes_to_the_nearest_code(
    seed: int, spread: float, weight_format: Format, block_size: int, symmetric: bool, offset: float
) -> None:
    weights = (random_weights((2, 3, 96), seed) + np.float32(offset)) * np.float32(spread)
    layer = integers.quantize(weights, weight_format, block_size, symmetric=symmetric)
    error = np.abs(integers.dequantize(layer, np.float64) - weights).reshape(*layer.scales.shape, block_size)
    steps = layer.scales.astype(np.float64)[..., None]
    codes = 16 if weight_format == "int4" else 256
    assert (error <= 0.5001 * steps).all()  # rounding a scale moves the ends of its range
    blocks = weights.astype(np.float64).reshape(error.shape)
    ends = np.max(blocks, axis=-1, initial=0.0), np.min(blocks, axis=-1, initial=0.0)
    ideal = np.maximum(ends[0], -ends[1]) / (codes // 2 - 1) if symmetric else (ends[0] - ends[1]) / (codes - 1)
    np.testing.assert_allclose(steps[..., 0], ideal, rtol=1e-6)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_scales_have_the_type_of_the_weights_and_errors_stay_small(
    dtype: Any, weight_format: Format, symmetric: bool
) -> None:
    weights = random_weights((3, 4, 64)).astype(dtype)
    layer = integers.quantize(weights, weight_format, 32, symmetric=symmetric)
    assert layer.scales.dtype == dtype
    assert (layer.zero_points is None) == symmetric
    exact = weights.astype(np.float64)
    error = np.linalg.norm(integers.dequantize(layer, np.float64) - exact) / np.linalg.norm(exact)
    assert error < (0.11 if weight_format == "int4" else 0.007)
    other = integers.quantize(weights, weight_format, 32, symmetric=symmetric, scale_dtype=np.float16)
    assert other.scales.dtype == np.float16


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_what_is_on_the_grid_comes_back(weight_format: Format, symmetric: bool) -> None:
    weights = integers.dequantize(integers.quantize(random_weights((3, 4, 64)), weight_format, 16, symmetric=symmetric))
    again = integers.dequantize(integers.quantize(weights, weight_format, 16, symmetric=symmetric))
    np.testing.assert_allclose(again, weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_zeros_outliers_and_equal_weights(weight_format: Format, symmetric: bool) -> None:
    weights = random_weights((3, 2, 32))
    weights[1] = 0.0
    weights[2, 0], weights[2, 1], weights[0, 0, 5] = 0.3, -0.7, 1e6
    got = integers.dequantize(integers.quantize(weights, weight_format, 16, symmetric=symmetric))
    assert not got[1].any()
    np.testing.assert_allclose(got[2], weights[2], rtol=1e-6)
    assert got[0, 0, 5] == pytest.approx(1e6)
    assert not np.delete(got[0, 0, :16], 5).any()
    assert got[0, 0, 16:].any()


@pytest.mark.parametrize("symmetric", [False, True])
def test_scales_at_their_limits(symmetric: bool) -> None:
    """Only a block of zeros gets the scale 0, and the range of float32 is no limit of the difference of weights."""
    weights = np.zeros((1, 3, 16), np.float32)
    weights[0, 0, :2], weights[0, 1, 0] = (3e38, -3e38), 2.0**-24
    layer = integers.quantize(weights[:, :1], "int8", 16, symmetric=symmetric)
    np.testing.assert_allclose(integers.dequantize(layer, np.float64), weights[:, :1], rtol=0.01)
    layer = integers.quantize(weights[:, 1:], "int8", 16, symmetric=symmetric, scale_dtype=np.float16)
    np.testing.assert_array_equal(layer.scales[0, :, 0].astype(np.float64), [2.0**-24, 0.0])
    np.testing.assert_array_equal(integers.dequantize(layer), weights[:, 1:])


@settings(max_examples=100)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(((np.float16, 1e-7, 1e-4), (ml_dtypes.bfloat16, 1e-40, 1e-1), (np.float32, 1e-44, 1e-36))),
    st.floats(0.0, 1.0),
    st.sampled_from(FORMATS),
    st.booleans(),
)
def test_no_scale_is_rounded_so_low_that_weights_are_cut_off(
    seed: int, numbers: tuple[Any, float, float], place: float, weight_format: Format, symmetric: bool
) -> None:
    """Of subnormal numbers, the nearest may be a third below the scale that is wanted; bfloat16 has but eight bits."""
    dtype, low, high = numbers
    spread = low ** (1.0 - place) * high**place
    weights = (np.random.default_rng(seed).normal(size=(2, 3, 64)) * spread).astype(dtype)
    layer = integers.quantize(weights, weight_format, 16, symmetric=symmetric)
    exact = weights.astype(np.float64)
    error = np.abs(integers.dequantize(layer, np.float64) - exact).reshape(2, 3, 4, 16)
    assert (error <= 0.5001 * layer.scales.astype(np.float64)[..., None]).all()


def test_the_largest_of_tiny_float16_weights_is_kept() -> None:
    weights = np.linspace(-1.1e-5, 1.1e-5, 16).astype(np.float16).reshape(1, 1, 16)
    layer = integers.quantize(weights, "int8", 16)
    assert layer.scales.astype(np.float64).item() == 2.0 * 2.0**-24  # 1.45 of them are wanted
    np.testing.assert_allclose(
        integers.dequantize(layer)[0, 0, [0, -1]], weights[0, 0, [0, -1]].astype(np.float32), rtol=0.01
    )


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_largest_weights_stay_finite(dtype: Any, weight_format: Format, symmetric: bool) -> None:
    """Though scales are rounded up, and a zero point lies off the middle."""
    largest = float(ml_dtypes.finfo(dtype).max)
    signs = np.array([[1, 1], [-1, -1], [1, -1], [1, -0.1], [0.1, -1]])
    weights = np.tile(largest * signs, (1, 1, 8)).astype(dtype)
    layer = integers.quantize(weights, weight_format, 16, symmetric=symmetric)
    with np.errstate(over="raise"):
        got = integers.dequantize(layer)
    step = layer.scales.astype(np.float64)
    assert (np.abs(got.astype(np.float64) - weights.astype(np.float64)) <= 0.5001 * step).all()


FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)


@settings(max_examples=300)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(FLOATS),
    st.sampled_from(FLOATS),
    st.floats(0.0, 1.0),
    st.sampled_from(FORMATS),
    st.booleans(),
)
def test_both_ends_of_a_block_lie_within_half_a_step_of_a_code(
    seed: int, dtype: Any, scale_dtype: Any, place: float, weight_format: Format, symmetric: bool
) -> None:
    """From subnormal numbers to the largest there are; all between the ends lies as near, as zero points are whole."""
    kind, codes = ml_dtypes.finfo(dtype), 16 if weight_format == "int4" else 256
    largest = min(float(kind.max), float(ml_dtypes.finfo(scale_dtype).max) * (codes // 2 - 2))  # whatever it rounds to
    rng = np.random.default_rng(seed)
    ends = rng.choice([1.0, 0.5, 0.0], (2, 1, 64, 1)) * rng.choice([1.0, rng.uniform()], (2, 1, 64, 1))
    magnitude = float(kind.smallest_subnormal) ** (1.0 - place) * largest**place
    weights = (rng.uniform(-ends[0], ends[1], (1, 64, 16)) * magnitude).astype(dtype)
    weights[:, :, :2] = (np.concatenate([-ends[0], ends[1]], axis=-1) * magnitude).astype(dtype)
    layer = integers.quantize(weights, weight_format, 16, symmetric=symmetric, scale_dtype=scale_dtype)
    with np.errstate(over="raise"):
        integers.dequantize(layer)
    exact, steps = weights.astype(np.float64), layer.scales.astype(np.float64)
    error = np.abs(integers.dequantize(layer, np.float64) - exact)
    assert (error <= (0.5 + 1e-9) * steps).all()
    # No scale is larger for that than by a place of its type; near float32's largest by two and half a step of an end.
    spread = np.max(exact, axis=-1, initial=0.0) - np.min(exact, axis=-1, initial=0.0)
    wanted = np.abs(exact).max(axis=-1) / (codes // 2 - 1) if symmetric else spread / (codes - 1)
    coarse = float(ml_dtypes.finfo(scale_dtype).eps)
    allowed = 1.0 + coarse + (coarse + 1.0 / (codes // 2 - 1) if largest > 1e38 and place > 0.99 else 0.0)
    assert (steps[..., 0] <= allowed * wanted + float(ml_dtypes.finfo(scale_dtype).smallest_subnormal)).all()


@pytest.mark.parametrize(
    ("ends", "scale", "zero_point"),
    [
        ((-0.302734375, 0.6953125), 2.0**-8, 77),  # 77.5 steps and 178: rounded to even, the zero point left out 255
        ((-0.3046875, 0.69140625), 2.0**-8, 78),  # 78 and 177
        ((-0.30078125 - 2.0**-9 * 1.25, 0.69140625 + 2.0**-9 * 1.25), 2.0**-8 + 2.0**-15, 77),  # 77.625 and 177.625
    ],
)
def test_a_scale_makes_room_for_the_rounding_of_the_zero_point(
    ends: tuple[float, float], scale: float, zero_point: int
) -> None:
    weights = np.zeros((1, 1, 128), np.float32)
    weights[0, 0, :2] = ends
    layer = integers.quantize(weights, "int8", 128, symmetric=False, scale_dtype=ml_dtypes.bfloat16)
    assert (layer.scales.astype(np.float64).item(), layer.zero_points) == (scale, zero_point)
    error = np.abs(integers.dequantize(layer, np.float64)[0, 0, :2] - ends)
    assert (error <= 0.5 * scale).all()


@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_both_ends_stay_near_codes_by_float32s_largest(weight_format: Format, scale_dtype: Any) -> None:
    """An outermost code beyond float32 is no code: scales make room for that as well."""
    largest = float(np.finfo(np.float32).max)
    other = np.linspace(0.9, 1.0, 2001, dtype=np.float32)
    for signs in ((1, -1), (-1, 1)):
        weights = np.zeros((1, len(other), 16), np.float32)
        weights[0, :, 0], weights[0, :, 1] = signs[0] * largest, signs[1] * largest * other
        layer = integers.quantize(weights, weight_format, 16, symmetric=False, scale_dtype=scale_dtype)
        with np.errstate(over="raise"):
            integers.dequantize(layer)
        steps = layer.scales.astype(np.float64)
        error = np.abs(integers.dequantize(layer, np.float64) - weights.astype(np.float64))
        assert (error <= (0.5 + 1e-9) * steps).all()
        wanted = largest * (1.0 + other.astype(np.float64)) / (15 if weight_format == "int4" else 255)
        assert (steps[0, :, 0] <= (1.08 if weight_format == "int4" else 1.02) * wanted).all()


@pytest.mark.parametrize("shape", [(0, 4, 32), (2, 0, 32), (2, 4, 0)])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_layers_of_no_size(weight_format: Format, shape: tuple[int, int, int]) -> None:
    layer = integers.quantize(np.zeros(shape, np.float32), weight_format, 16, symmetric=False)
    assert integers.dequantize(layer).shape == shape
    again = integers.from_qmoe(*integers.to_qmoe(layer), weight_format, 16)
    assert integers.dequantize(again).shape == shape


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_scales_of_rows_are_repeated_for_blocks(weight_format: Format, symmetric: bool) -> None:
    layer = integers.quantize(random_weights((2, 5, 128)), weight_format, 128, symmetric=symmetric)
    zeros = layer.zero_points
    if zeros is not None:  # a row has one, in the low bits where two fit
        zeros = zeros[..., 0]
        if weight_format == "int4":
            even = np.concatenate([zeros, np.zeros((2, 1), np.uint8)], axis=1)
            zeros = even[:, 0::2] | even[:, 1::2] << 4
    rows = integers.from_qmoe(layer.weights, layer.scales[..., 0], zeros, weight_format, 32)
    assert rows.scales.shape == (2, 5, 4)
    np.testing.assert_array_equal(integers.dequantize(rows), integers.dequantize(layer))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_gate_and_value_become_one_layer(
    layout: Literal["concat", "interleaved"], weight_format: Format, symmetric: bool
) -> None:
    gate, value = (
        integers.quantize(random_weights((2, 3, 48), seed), weight_format, 16, symmetric=symmetric) for seed in (0, 1)
    )
    stacked = integers.dequantize(integers.stack_rows([gate, value], layout))
    rows = (slice(3), slice(3, 6)) if layout == "concat" else (slice(0, None, 2), slice(1, None, 2))
    np.testing.assert_array_equal(stacked[:, rows[0]], integers.dequantize(gate))
    np.testing.assert_array_equal(stacked[:, rows[1]], integers.dequantize(value))


LAYER = integers.quantize(random_weights((2, 4, 96)), "int4", 32, symmetric=False)
QMOE = integers.to_qmoe(LAYER)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: integers.quantize(np.zeros((4, 32), np.float32), "int4", 16), r"must have shape \(E, N, D\)"),
        (
            lambda: integers.quantize(np.zeros((1, 4, 48), np.float32), "int8", 32),
            "must be a multiple of 32, but is 48",
        ),
        (
            lambda: integers.quantize(np.full((1, 1, 16), np.nan, np.float32), "int4", 16),
            "must be finite, but expert 0",
        ),
        (lambda: integers.quantize(LAYER.weights, "int4", 16), "must be float32, float16 or bfloat16, but is uint8"),
        (
            lambda: integers.quantize(np.ones((1, 1, 16), np.float32), "int4", 8),
            "block_size must be 16, 32, 64 or 128, but is 8",
        ),
        (
            lambda: integers.quantize(np.ones((1, 1, 16), np.float32), cast(Any, "int2"), 16),
            "weight_format must be 'int4' or 'int8', but is 'int2'",
        ),
        (
            lambda: integers.quantize(np.full((1, 1, 16), 1e6, np.float32), "int4", 16, scale_dtype=np.float16),
            "'weights' must have scales that fit into float16, but expert 0 has not",
        ),
        (
            lambda: integers.quantize(np.ones((1, 1, 16), np.float32), "int4", 16, scale_dtype=np.float64),
            "scale_dtype must be float32, float16 or bfloat16, but is float64",
        ),
        (lambda: integers.dequantize(LAYER, np.int32), "dtype must be float32 or float64, but is int32"),
        (
            lambda: integers.check(LAYER._replace(weights=LAYER.weights[..., :8]), "fc1"),
            r"'fc1' must be uint8 of shape \(E, N, D / 2\) = \(2, 4, 48\) to go with scales of shape \(2, 4, 3\), "
            r"but came as uint8 of shape \(2, 4, 8\)",
        ),
        (lambda: integers.check(LAYER._replace(weight_format="int8")), r"\(E, N, D\) = \(2, 4, 96\)"),
        (lambda: integers.check(LAYER._replace(block_size=64)), r"\(E, N, D / 2\) = \(2, 4, 96\)"),
        (
            lambda: integers.check(LAYER._replace(block_size=cast(Any, 32.0))),
            r"block_size must be an integer, but is 32\.0 of type float",
        ),
        (lambda: integers.check(LAYER._replace(scales=LAYER.scales.astype(np.float64))), "scales .* but are float64"),
        (
            lambda: integers.check(LAYER._replace(zero_points=np.zeros((2, 4, 3), np.uint8))),
            r"the zero points of 'weights' must be uint8 .* = \(2, 4, 2\) to go with scales of shape \(2, 4, 3\), "
            r"but came as uint8 of shape \(2, 4, 3\)",
        ),
        (
            lambda: integers.from_qmoe(QMOE[0].reshape(2, 96, 2), QMOE[1], QMOE[2], "int4", 32, "fc2"),
            r"'fc2' must be uint8 of shape \(E, N, D / 2\) = \(2, 4, 48\) .* came as uint8 of shape \(2, 96, 2\)",
        ),
        (
            lambda: integers.from_qmoe(QMOE[0], QMOE[1][..., 0], QMOE[2], "int4", 32),
            r"the zero points of 'weights' must be uint8 of shape \(E, ceil\(N / 2\)\) = \(2, 2\) to go with scales of",
        ),
        (
            lambda: integers.from_qmoe(QMOE[0], QMOE[1][:, :3, 0], None, "int4", 32),
            r"'weights' must have shape \(E, N, D / 2\) to go with scales of shape \(2, 3\), but has \(2, 4, 48\)",
        ),
        (
            lambda: integers.stack_rows([LAYER, LAYER._replace(zero_points=None)]),
            "must have one kind of zero points, but have zero points and no zero points",
        ),
        (
            lambda: integers.stack_rows([LAYER, LAYER._replace(scales=LAYER.scales.astype(np.float16))]),
            "must have one type of scales, but have float32 and float16",
        ),
        (lambda: integers.stack_rows([]), "there must be a layer to be stacked, but there is none"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"(int4|int8|integers): .*{message}"):
        call()


@pytest.mark.skipif(not qmoe_runs(), reason="QMoE runs unpacked weights on the CPU from ONNX Runtime 1.32 on")
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 0])
@pytest.mark.parametrize("has_zero_points", [False, True])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_onnxruntimes_own_qmoe_agrees(weight_format: Format, has_zero_points: bool, block_size: int) -> None:
    """Layout, scales, zero points, activation and weighted sum, by someone else's kernel.

    Behind blocks of 8-bit weights it rounds activations to 8 bits, which costs a hundredth.
    """
    tolerance = 0.02 if weight_format == "int8" and block_size else 1e-6
    bits = 4 if weight_format == "int4" else 8
    case = ExpertsCase(
        (7,),
        4,
        2,
        256,
        128,
        "float",
        weight_format,
        SWIGLU,
        has_bias=True,
        has_zero_points=has_zero_points,
        block_size=block_size or 128,
    )
    layers = {}
    for name, rows, depth in (("fc1", 256, 256), ("fc2", 256, 128)):
        floats = random_weights((4, rows, depth), depth)
        if block_size:
            layer = integers.quantize(floats, weight_format, block_size, symmetric=not has_zero_points)
            qmoe = integers.to_qmoe(layer)
        else:  # a scale for a row
            qmoe = row_wise(floats, weight_format, symmetric=not has_zero_points)
            layer = integers.from_qmoe(*qmoe, weight_format, 128)
        parts = ("weights", "scales", "zero_points")
        layers[name] = {p: value for p, value in zip(parts, qmoe, strict=True) if value is not None}
        case.feeds.update({f"{name}_{p}": getattr(layer, p) for p in layers[name]})
    quantization = {"quant_type": "int", "expert_weight_bits": bits, "weights_prepacked": 0}
    if block_size:
        quantization["block_size"] = block_size
    assert error_beside_qmoe(case, layers, **quantization) < tolerance


def row_wise(weights: Any, weight_format: Format, *, symmetric: bool) -> tuple[Any, Any, Any]:
    """Weights, scales (E, N) and zero points packed along N, as a QMoE without a block size has them."""
    last = 15 if weight_format == "int4" else 255
    ends = weights.max(axis=-1), weights.min(axis=-1)
    scales = np.maximum(ends[0], -ends[1]) / (last // 2) if symmetric else (ends[0] - ends[1]) / last
    zeros = np.full(scales.shape, (last + 1) // 2) if symmetric else np.rint(-ends[1] / scales)
    codes = np.clip(np.rint(weights / scales[..., None]) + zeros[..., None], 0, last).astype(np.uint8)

    def packed(values: Any) -> Any:
        return pack_nibbles(values) if weight_format == "int4" else values

    return packed(codes), scales, None if symmetric else packed(zeros.astype(np.uint8))
