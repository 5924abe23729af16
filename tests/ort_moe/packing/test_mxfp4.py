"""MXFP4 packing: nearest codes, round trips between the layouts, refusals."""

from __future__ import annotations

from typing import Any, Literal, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ort_moe.packing import mxfp4
from ort_moe.packing.arrays import E2M1
from tests.ort_moe.packing.weights import random_weights


def test_a_weight_is_code_times_a_power_of_two_times_global_scale() -> None:
    """The layout byte by byte: even elements in the low four bits."""
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)
    weights = (codes[0::2] | codes[1::2] << 4).reshape(1, 1, 16)
    layer = mxfp4.Mxfp4(weights, np.full((1, 1, 1), 127 - 3, np.uint8), np.array([0.75], np.float32))
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = np.array([*magnitudes, *(-m for m in magnitudes)] * 2) / 8 * 0.75
    np.testing.assert_array_equal(mxfp4.dequantize(layer, np.float64)[0, 0], expected)


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.sampled_from((1e-30, 1e-3, 1.0, 1e4, 1e38)))
def test_every_weight_goes_to_the_nearest_code(seed: int, spread: float) -> None:
    weights = random_weights((2, 3, 96), seed) * np.float32(spread)
    layer = mxfp4.quantize(weights)
    got = mxfp4.dequantize(layer, np.float64)
    steps = np.exp2(layer.scales.astype(np.float64) - 127)
    nearest = np.abs(weights.reshape(2, 3, -1, 32, 1) - E2M1 * steps[..., None, None]).min(axis=-1)
    np.testing.assert_array_equal(np.abs(got - weights).reshape(2, 3, -1, 32), nearest)
    largest = np.abs(weights).reshape(2, 3, -1, 32).max(axis=-1) / steps
    assert ((largest > 3.5) & (largest <= 7.0)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_is_on_the_grid_comes_back(dtype: Any) -> None:
    weights = mxfp4.dequantize(mxfp4.quantize(random_weights((3, 4, 64)))).astype(dtype)
    np.testing.assert_array_equal(mxfp4.dequantize(mxfp4.quantize(weights)), weights.astype(np.float32))


def test_zeros_outliers_and_equal_weights() -> None:
    weights = random_weights((3, 2, 64))
    weights[1] = 0.0
    weights[2, 0, 32:], weights[2, 1, :32], weights[0, 0, 5] = 0.0, -0.75, 1e6
    got = mxfp4.dequantize(mxfp4.quantize(weights))
    assert not got[1].any()
    assert not got[2, 0, 32:].any()
    np.testing.assert_array_equal(got[2, 1, :32], weights[2, 1, :32])
    assert abs(got[0, 0, 5] - 1e6) < 0.2e6
    assert not np.delete(got[0, 0, :32], 5).any()  # far below the outlier's smallest code
    assert got[0, 0, 32:].any()


def test_scales_at_their_limits() -> None:
    weights = np.zeros((1, 3, 32), np.float32)
    weights[0, 0, 0], weights[0, 1, 0] = np.finfo(np.float32).max, 2.0**-128
    layer = mxfp4.quantize(weights)
    np.testing.assert_array_equal(layer.scales[0, :, 0], [252, 0, 127])
    np.testing.assert_array_equal(mxfp4.dequantize(layer)[0, :2, 0], [2.0**128 * 0.75, 2.0**-128])
    extremes = layer._replace(scales=np.array([[[255], [254], [0]]], np.uint8))
    got = mxfp4.dequantize(extremes, np.float64)[0]
    assert np.isnan(got[0]).all()
    assert got[1, 0] == 0.5 * 2.0**127
    assert not got[2].any()


@pytest.mark.parametrize("shape", [(0, 4, 32), (2, 0, 32), (2, 4, 0)])
def test_layers_of_no_size(shape: tuple[int, int, int]) -> None:
    layer = mxfp4.quantize(np.zeros(shape, np.float32))
    assert mxfp4.dequantize(layer).shape == shape
    assert mxfp4.dequantize(mxfp4.from_qmoe(*mxfp4.to_qmoe(layer, "N"), packed_along="N")).shape == shape


@pytest.mark.parametrize("packed_along", ["K", "N"])
def test_qmoe_layouts_round_trip(packed_along: Literal["K", "N"]) -> None:
    layer = mxfp4.quantize(random_weights((3, 6, 96)))
    qmoe = mxfp4.to_qmoe(layer, packed_along)
    assert qmoe.weights.shape == ((3, 6, 48) if packed_along == "K" else (3, 96, 3))
    assert qmoe.scales.dtype == ml_dtypes.float8_e8m0fnu
    back = mxfp4.from_qmoe(*qmoe, packed_along=packed_along)
    np.testing.assert_array_equal(back.weights, layer.weights)
    np.testing.assert_array_equal(back.scales, layer.scales)
    if packed_along == "N":  # a byte holds rows 2 n and 2 n + 1 of one column
        assert qmoe.weights[1, 9, 2] >> 4 == layer.weights[1, 5, 4] >> 4  # row 5, column 9


def test_blocks_of_a_checkpoint_are_taken_as_they_are() -> None:
    layer = mxfp4.quantize(random_weights((2, 4, 64)))
    taken = mxfp4.from_blocks(layer.weights.reshape(2, 4, 2, 16), layer.scales)
    np.testing.assert_array_equal(mxfp4.dequantize(taken), mxfp4.dequantize(layer))


@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_gate_and_value_become_one_layer(layout: Literal["concat", "interleaved"]) -> None:
    both = mxfp4.quantize(random_weights((2, 6, 32)))
    gate, value = (
        mxfp4.Mxfp4(both.weights[:, r], both.scales[:, r], both.global_scale) for r in (slice(3), slice(3, 6))
    )
    stacked = mxfp4.dequantize(mxfp4.stack_rows([gate, value], layout))
    rows = (slice(3), slice(3, 6)) if layout == "concat" else (slice(0, None, 2), slice(1, None, 2))
    np.testing.assert_array_equal(stacked[:, rows[0]], mxfp4.dequantize(gate))
    np.testing.assert_array_equal(stacked[:, rows[1]], mxfp4.dequantize(value))


LAYER = mxfp4.quantize(random_weights((2, 4, 64)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mxfp4.quantize(np.zeros((4, 32), np.float32)), r"'weights' must have shape \(E, N, D\), but has"),
        (lambda: mxfp4.quantize(np.zeros((1, 4, 48), np.float32), "fc1"), "'fc1' must be a multiple of 32, but is 48"),
        (lambda: mxfp4.quantize(np.full((1, 1, 32), np.inf, np.float32)), "must be finite, but expert 0 is not"),
        (lambda: mxfp4.quantize(LAYER.weights), "'weights' must be float32, float16 or bfloat16, but is uint8"),
        (lambda: mxfp4.dequantize(LAYER, np.float16), "dtype must be float32 or float64, but is float16"),
        (
            lambda: mxfp4.check(LAYER._replace(weights=LAYER.weights[..., :8]), "fc2"),
            r"'fc2' must be uint8 of shape \(E, N, D / 2\) = \(2, 4, 32\) to go with scales of shape \(2, 4, 2\), "
            r"but came as uint8 of shape \(2, 4, 8\)",
        ),
        (
            lambda: mxfp4.check(LAYER._replace(scales=LAYER.scales.view(np.int8))),
            "the scales of 'weights' must be uint8 .* but are int8",
        ),
        (
            lambda: mxfp4.check(LAYER._replace(global_scale=np.ones(3, np.float32))),
            r"global scale of .* \(2,\) to go with scales of",
        ),
        (lambda: mxfp4.from_qmoe(*LAYER, packed_along="N"), r"of a QMoE must be uint8 of shape .* = \(2, 64, 2\)"),
        (lambda: mxfp4.from_qmoe(*LAYER, packed_along=cast(Any, "n")), "packed_along must be 'K' or 'N', but is 'n'"),
        (lambda: mxfp4.to_qmoe(mxfp4.quantize(np.ones((1, 3, 32), np.float32)), "N"), "N must be even, but is 3"),
        (
            lambda: mxfp4.from_blocks(LAYER.weights, LAYER.scales),
            r"the blocks of 'weights' must have shape \(E, N, D / 32, 16\), but have \(2, 4, 32\)",
        ),
        (lambda: mxfp4.stack_rows([LAYER, mxfp4.quantize(np.ones((2, 5, 64), np.float32))]), "must have one shape"),
        (
            lambda: mxfp4.stack_rows([LAYER, LAYER._replace(global_scale=np.array([1, 2], np.float32))]),
            "expert 1 has 1.0 and 2.0: dequantize and quantize each, which makes it 1",
        ),
        (lambda: mxfp4.stack_rows([]), "there must be a layer to be stacked, but there is none"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"mxfp4: .*{message}"):
        call()
