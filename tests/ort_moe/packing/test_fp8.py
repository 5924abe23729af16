"""FP8 packing: nearest values, blocks that the sizes do not fill, refusals."""

from __future__ import annotations

from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ort_moe.choices import BLOCK_SIZES
from ort_moe.packing import fp8
from tests.ort_moe.packing.weights import random_weights

VALUES = np.arange(256, dtype=np.uint8).view(fp8.WEIGHT_DTYPE).astype(np.float64)


def test_a_weight_is_float8_times_the_scale_of_its_block() -> None:
    weights = np.full((1, 18, 33), 1.5, fp8.WEIGHT_DTYPE)
    scales = np.arange(1, 7, dtype=np.float32).reshape(1, 2, 3)
    got = fp8.dequantize(fp8.Fp8(weights, scales, 16), np.float64)[0]
    expected = 1.5 * np.repeat(np.repeat(scales[0], 16, axis=0)[:18], 16, axis=1)[:, :33]
    np.testing.assert_array_equal(got, expected)
    assert (got[17, 32], got[0, 15], got[15, 16]) == (9.0, 1.5, 3.0)


@settings(max_examples=25)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from((1e-30, 1e-3, 1.0, 1e4, 1e38)),
    st.sampled_from(BLOCK_SIZES),
    st.sampled_from(((2, 3, 5), (1, 17, 48), (3, 40, 33))),
)
def test_every_weight_goes_to_the_nearest_value(
    seed: int, spread: float, block_size: int, shape: tuple[int, int, int]
) -> None:
    weights = random_weights(shape, seed) * np.float32(spread)
    layer = fp8.quantize(weights, block_size)
    got = fp8.dequantize(layer, np.float64)
    _, rows, depth = shape
    steps = np.repeat(np.repeat(layer.scales.astype(np.float64), block_size, axis=1), block_size, axis=2)
    finite = VALUES[np.isfinite(VALUES)]
    nearest = np.abs(weights[..., None] - finite * steps[:, :rows, :depth, None]).min(axis=-1)
    np.testing.assert_array_less(np.abs(got - weights), nearest * (1 + 1e-6) + np.spacing(np.abs(weights).max()))
    assert np.linalg.norm(got / spread - weights / spread) < 0.04 * np.linalg.norm(weights.astype(np.float64) / spread)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_is_on_the_grid_comes_back(dtype: Any) -> None:
    weights = fp8.dequantize(fp8.quantize(random_weights((3, 20, 40)), 16)).astype(dtype)
    again = fp8.dequantize(fp8.quantize(weights, 16))
    # Beside float32, rounding the largest weight of a block moves its scale, and the grid with it.
    np.testing.assert_allclose(again, weights.astype(np.float32), rtol=1e-6 if dtype == np.float32 else 0.07, atol=1e-4)


def test_zeros_outliers_and_equal_weights() -> None:
    weights = random_weights((3, 32, 32))
    weights[1] = 0.0
    weights[2, :16, 16:], weights[2, 16:, :16], weights[0, 0, 5] = 0.0, -0.3, 1e6
    layer = fp8.quantize(weights, 16)
    got = fp8.dequantize(layer)
    assert not got[1].any()
    assert (layer.scales[1] == 1.0).all()
    assert not got[2, :16, 16:].any()
    np.testing.assert_allclose(got[2, 16:, :16], -0.3, rtol=1e-6)
    assert got[0, 0, 5] == pytest.approx(1e6)
    np.testing.assert_allclose(got[0, 16:], weights[0, 16:], rtol=0.07, atol=1e-3)  # the outlier is another block's


def test_scales_at_their_limits() -> None:
    weights = np.zeros((1, 1, 32), np.float32)
    weights[0, 0, 0], weights[0, 0, 16:18] = np.finfo(np.float32).max, (2.0**-126, 2.0**-140)
    layer = fp8.quantize(weights, 16)
    assert layer.scales[0, 0, 1] == np.finfo(np.float32).tiny
    np.testing.assert_allclose(fp8.dequantize(layer, np.float64)[0, 0, [0, 16]], weights[0, 0, [0, 16]], rtol=1e-6)
    assert np.isfinite(layer.weights.astype(np.float32)).all()


@pytest.mark.parametrize("shape", [(0, 4, 32), (2, 0, 32), (2, 4, 0)])
def test_layers_of_no_size(shape: tuple[int, int, int]) -> None:
    assert fp8.dequantize(fp8.from_qmoe(*fp8.to_qmoe(fp8.quantize(np.zeros(shape, np.float32))), 128)).shape == shape


def test_tensors_of_a_checkpoint_are_taken_as_they_are() -> None:
    layer = fp8.quantize(random_weights((2, 140, 130)))
    assert layer.scales.shape == (2, 2, 2)
    for scales in (layer.scales, layer.scales.astype(ml_dtypes.bfloat16)):
        stacked = fp8.from_checkpoint(layer.weights, scales)
        np.testing.assert_array_equal(stacked.scales, scales.astype(np.float32))
        one = fp8.from_checkpoint(layer.weights[0].view(np.uint8), scales[0])
        np.testing.assert_array_equal(fp8.dequantize(one)[0], fp8.dequantize(stacked)[0])


@pytest.mark.parametrize("scales", [np.float32(0.5), np.full(1, 0.5, np.float32), np.array([0.5, 0.25], np.float32)])
def test_scales_of_experts_are_repeated_for_blocks(scales: Any) -> None:
    weights = random_weights((2, 40, 20)).astype(fp8.WEIGHT_DTYPE)
    layer = fp8.from_checkpoint(weights, np.asarray(scales), 32)
    assert layer.scales.shape == (2, 2, 1)
    expected = weights.astype(np.float32) * np.broadcast_to(scales, 2)[:, None, None]
    np.testing.assert_array_equal(fp8.dequantize(layer), expected)


def test_gate_and_value_become_one_layer() -> None:
    gate, value = (fp8.quantize(random_weights((2, 32, 20), seed), 16) for seed in (0, 1))
    stacked = fp8.dequantize(fp8.stack_rows([gate, value]))
    np.testing.assert_array_equal(stacked[:, :32], fp8.dequantize(gate))
    np.testing.assert_array_equal(stacked[:, 32:], fp8.dequantize(value))


LAYER = fp8.quantize(random_weights((2, 20, 40)), 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fp8.quantize(np.zeros((4, 32), np.float32)),
            r"'weights' must have shape \(E, N, D\), but has \(4, 32\)",
        ),
        (lambda: fp8.quantize(np.zeros((1, 4, 4), np.float32), 24), "block_size must be 16, 32, 64 or 128, but is 24"),
        (lambda: fp8.quantize(np.full((1, 1, 3), np.nan, np.float32), 16, "fc1"), "'fc1' must be finite, but expert 0"),
        (lambda: fp8.quantize(LAYER.weights), "'weights' must be float32, float16 or bfloat16, but is float8_e4m3fn"),
        (lambda: fp8.dequantize(LAYER, np.int32), "dtype must be float32 or float64, but is int32"),
        (
            lambda: fp8.check(LAYER._replace(weights=LAYER.weights.view(np.uint8)), "fc2"),
            r"'fc2' must be float8_e4m3fn of shape \(E, N, D\), but is uint8",
        ),
        (
            lambda: fp8.check(LAYER._replace(block_size=32)),
            r"the scales of 'weights' must be float32 .* = \(2, 1, 2\) to go with weights of shape \(2, 20, 40\), "
            r"but came as float32 of shape \(2, 2, 3\)",
        ),
        (lambda: fp8.from_qmoe(LAYER.weights, LAYER.scales.astype(np.float64), 16), "but came as float64"),
        (
            lambda: fp8.quantize(np.zeros((1, 4, 4), np.float32), cast(Any, 16.0)),
            r"block_size must be an integer, but is 16\.0 of type float",
        ),
        (lambda: fp8.from_checkpoint(LAYER.weights, LAYER.scales, 0), "block_size must be 16, .* but is 0"),
        (
            lambda: fp8.from_checkpoint(LAYER.weights, np.ones(20, np.float32), 16),
            r"the scales of 'weights' must be float32 of shape .* but came as float32 of shape \(20,\)",
        ),
        (
            lambda: fp8.from_checkpoint(LAYER.weights.view(ml_dtypes.float8_e5m2), LAYER.scales, 16),
            "'weights' must be float8_e4m3fn .* but is float8_e5m2",
        ),
        (lambda: fp8.stack_rows([LAYER, LAYER], "interleaved"), "layout must be 'concat', because rows of one block"),
        (lambda: fp8.stack_rows([LAYER, LAYER]), "N of layers to be stacked must be a multiple of 16, but is 20"),
        (lambda: fp8.stack_rows([LAYER, LAYER], cast(Any, "rows")), "must be 'concat' or 'interleaved', but is 'rows'"),
        (
            lambda: fp8.stack_rows([fp8.quantize(np.ones((1, 128, 8), np.float32), b) for b in (64, 128)]),
            "must have one block size, but have 64 and 128",
        ),
        (lambda: fp8.stack_rows([]), "there must be a layer to be stacked, but there is none"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"fp8: .*{message}"):
        call()
