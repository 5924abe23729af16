"""NVFP4 packing: nearest codes, round trips between the layouts, refusals, and ORT's own QMoE as an outside oracle."""

from __future__ import annotations

from typing import Any, Literal, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ort_moe.packing import nvfp4
from ort_moe.packing.arrays import E2M1
from tests.op_models import assert_same_bits, run_op
from tests.ort_moe.packing.weights import random_weights
from tests.qmoe_models import ANSWERED_TOKENS, ANSWERS, error_beside, nvfp4_answer, nvfp4_case, qmoe_runs, routed


def test_a_weight_is_code_times_scale_times_global_scale() -> None:
    """The layout byte by byte: even elements in the low four bits."""
    codes = np.arange(16, dtype=np.uint8)
    weights = (codes[0::2] | codes[1::2] << 4).reshape(1, 1, 8)
    scales = np.full((1, 1, 1), 1.5, nvfp4.SCALE_DTYPE)
    layer = nvfp4.Nvfp4(weights, scales, np.array([0.25], np.float32))
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = np.array([*magnitudes, *(-m for m in magnitudes)]) * 1.5 * 0.25
    np.testing.assert_array_equal(nvfp4.dequantize(layer, np.float64)[0, 0], expected)


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.sampled_from((1e-30, 1e-3, 1.0, 1e4)))
def test_every_weight_goes_to_the_nearest_code(seed: int, spread: float) -> None:
    weights = random_weights((2, 3, 48), seed) * np.float32(spread)
    layer = nvfp4.quantize(weights)
    got = nvfp4.dequantize(layer, np.float64)
    steps = layer.scales.astype(np.float64) * layer.global_scale.astype(np.float64)[:, None, None]
    nearest = np.abs(weights.reshape(2, 3, -1, 16, 1) - E2M1 * steps[..., None, None]).min(axis=-1)
    error = np.abs(got - weights).reshape(2, 3, -1, 16)
    np.testing.assert_array_less(error, nearest * (1 + 1e-6) + np.spacing(np.abs(weights).max()))
    assert np.linalg.norm(got - weights) < 0.12 * np.linalg.norm(weights.astype(np.float64))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_is_on_the_grid_comes_back(dtype: Any) -> None:
    weights = nvfp4.dequantize(nvfp4.quantize(random_weights((3, 4, 64)))).astype(dtype)
    again = nvfp4.dequantize(nvfp4.quantize(weights))
    tolerance = 0.0 if dtype == np.float32 else 0.07  # rounding the weights may move a scale to its neighbour
    np.testing.assert_allclose(again, weights.astype(np.float32), rtol=tolerance, atol=tolerance * 0.02)


def test_zeros_and_a_zero_expert() -> None:
    weights = random_weights((3, 2, 32))
    weights[1] = 0.0
    weights[2, 0, 16:] = 0.0
    got = nvfp4.dequantize(nvfp4.quantize(weights))
    assert not got[1].any()
    assert not got[2, 0, 16:].any()
    assert got[0].any()


def test_a_block_of_tiny_weights_beside_a_large_one_is_not_lost() -> None:
    """Its scale would round to 0, while the smallest scale above has codes for it."""
    weights = np.zeros((1, 3, 16), np.float32)
    weights[0, 0, 0], weights[0, 1, :2] = 6.0 * 448.0, (2.0**-9, -(2.0**-10))
    np.testing.assert_array_equal(nvfp4.dequantize(nvfp4.quantize(weights)), weights)


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.floats(1e-7, 1e-3))
def test_no_subnormal_scale_cuts_off_the_largest_weight_of_a_block(seed: int, small: float) -> None:
    """Beside a weight so large the scales of all other blocks are subnormal, or nearly so."""
    weights = random_weights((1, 8, 64), seed) * np.float32(small)
    weights[0, 0, 0] = 1.0
    layer = nvfp4.quantize(weights)
    error = np.abs(nvfp4.dequantize(layer, np.float64) - weights).reshape(1, 8, 4, 16)
    steps = layer.scales.astype(np.float64) * layer.global_scale[0].astype(np.float64)
    assert (error <= 1.0001 * steps[..., None]).all()  # half of what lies between 4 and 6


@pytest.mark.parametrize("shape", [(0, 4, 32), (2, 0, 32), (2, 4, 0)])
def test_layers_of_no_size(shape: tuple[int, int, int]) -> None:
    layer = nvfp4.quantize(np.zeros(shape, np.float32))
    assert nvfp4.dequantize(layer).shape == shape
    assert nvfp4.dequantize(nvfp4.from_qmoe(*nvfp4.to_qmoe(layer, "N"), packed_along="N")).shape == shape


@pytest.mark.parametrize("packed_along", ["K", "N"])
def test_qmoe_layouts_round_trip(packed_along: Literal["K", "N"]) -> None:
    layer = nvfp4.quantize(random_weights((3, 6, 48)))
    qmoe = nvfp4.to_qmoe(layer, packed_along)
    assert qmoe.weights.shape == (3, 48, 3)
    back = nvfp4.from_qmoe(*qmoe, packed_along=packed_along)
    np.testing.assert_array_equal(back.weights, layer.weights)
    if packed_along == "N":  # a byte holds rows 2 n and 2 n + 1 of one column
        code = layer.weights[1, 5, 4] >> 4  # row 5, column 9
        assert qmoe.weights[1, 9, 2] >> 4 == code


def test_modelopt_tensors_are_taken_as_they_are() -> None:
    layer = nvfp4.quantize(random_weights((2, 4, 32)))
    stacked = nvfp4.from_modelopt(layer.weights, layer.scales, layer.global_scale)
    np.testing.assert_array_equal(nvfp4.dequantize(stacked), nvfp4.dequantize(layer))
    one = nvfp4.from_modelopt(layer.weights[0], layer.scales[0].view(np.uint8), layer.global_scale[0])
    np.testing.assert_array_equal(nvfp4.dequantize(one)[0], nvfp4.dequantize(layer)[0])


@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_gate_and_value_become_one_layer(layout: Literal["concat", "interleaved"]) -> None:
    both = nvfp4.quantize(random_weights((2, 6, 32)))
    gate, value = (
        nvfp4.Nvfp4(both.weights[:, r], both.scales[:, r], both.global_scale) for r in (slice(3), slice(3, 6))
    )
    stacked = nvfp4.dequantize(nvfp4.stack_rows([gate, value], layout))
    rows = (slice(3), slice(3, 6)) if layout == "concat" else (slice(0, None, 2), slice(1, None, 2))
    np.testing.assert_array_equal(stacked[:, rows[0]], nvfp4.dequantize(gate))
    np.testing.assert_array_equal(stacked[:, rows[1]], nvfp4.dequantize(value))
    with pytest.raises(ValueError, match="one global scale for an expert, but expert 1 has"):
        nvfp4.stack_rows([gate, value._replace(global_scale=gate.global_scale * np.array([1, 2], np.float32))])
    with pytest.raises(ValueError, match="must have one shape"):
        nvfp4.stack_rows([gate, both])


def test_layers_quantized_with_one_largest_can_be_stacked() -> None:
    """As the refusal says, and as if they had been one from the beginning."""
    gate, value = random_weights((2, 3, 32), 0), 3.0 * random_weights((2, 3, 32), 1)
    with pytest.raises(
        ValueError, match=r"expert 0 has [\d.e-]+ and [\d.e-]+: quantize each with `largest`, the largest"
    ):
        nvfp4.stack_rows([nvfp4.quantize(gate), nvfp4.quantize(value)])
    largest = np.maximum(np.abs(gate).max((1, 2)), np.abs(value).max((1, 2)))
    stacked = nvfp4.stack_rows([nvfp4.quantize(layer, largest=largest) for layer in (gate, value)])
    for got, expected in zip(stacked, nvfp4.quantize(np.concatenate([gate, value], axis=1)), strict=True):
        np.testing.assert_array_equal(got, expected)


LAYER = nvfp4.quantize(random_weights((2, 4, 32)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: nvfp4.quantize(np.zeros((4, 32), np.float32)),
            r"'weights' must have shape \(E, N, D\), but has \(4, 32\)",
        ),
        (lambda: nvfp4.quantize(np.zeros((1, 4, 24), np.float32), "fc1"), "'fc1' must be a multiple of 16, but is 24"),
        (lambda: nvfp4.quantize(np.full((1, 1, 16), np.nan, np.float32)), "must be finite, but expert 0 is not"),
        (
            lambda: nvfp4.check(LAYER._replace(weights=LAYER.weights[..., :8])),
            r"'weights' must be uint8 of shape .*\(2, 4, 16\)",
        ),
        (lambda: nvfp4.check(LAYER._replace(weights=LAYER.weights.view(np.int8))), "but came as int8"),
        (
            lambda: nvfp4.check(LAYER._replace(scales=LAYER.scales.view(np.uint8))),
            "scales of 'weights' must be float8_e4m3fn",
        ),
        (
            lambda: nvfp4.check(LAYER._replace(global_scale=np.ones(3, np.float32))),
            r"global scale of .* shape \(E\) = \(2,\) to go with scales of shape \(2, 4, 2\), but came as float32 of",
        ),
        (lambda: nvfp4.from_qmoe(*LAYER, packed_along="K"), r"of a QMoE must be uint8 of shape .* = \(2, 32, 2\)"),
        (
            lambda: nvfp4.from_modelopt(LAYER.weights, LAYER.scales[:1], LAYER.global_scale, "fc2"),
            "'fc2' must be uint8",
        ),
        (
            lambda: nvfp4.from_modelopt(np.zeros((2, 4, 32), np.uint8), LAYER.scales, LAYER.global_scale),
            r"= \(2, 4, 16\) to go with scales of shape \(2, 4, 2\), but came as uint8 of shape \(2, 4, 32\)",
        ),
        (lambda: nvfp4.to_qmoe(nvfp4.quantize(np.ones((1, 3, 16), np.float32)), "N"), "N must be even, but is 3"),
        # Packed weights taken for float ones, and words that differ in a letter: each would give other weights.
        (
            lambda: nvfp4.quantize(LAYER.weights),
            "'weights' must be float32, float16 or bfloat16, but is uint8",
        ),
        (lambda: nvfp4.dequantize(LAYER, np.int32), "dtype must be float32 or float64, but is int32"),
        (lambda: nvfp4.to_qmoe(LAYER, cast(Any, "k")), "packed_along must be 'K' or 'N', but is 'k'"),
        (
            lambda: nvfp4.from_qmoe(*nvfp4.to_qmoe(LAYER, "K"), packed_along=cast(Any, "k")),
            "packed_along must be 'K' or 'N', but is 'k'",
        ),
        (
            lambda: nvfp4.stack_rows([LAYER, LAYER], cast(Any, "Concat")),
            "layout must be 'concat' or 'interleaved', but is 'Concat'",
        ),
        (lambda: nvfp4.stack_rows([]), "there must be a layer to be stacked, but there is none"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"nvfp4: .*{message}"):
        call()


def test_a_largest_that_is_not_is_refused() -> None:
    """It would clip weights in silence, or make NaN of them."""
    weights = np.ones((2, 1, 16), np.float32)
    for each in (np.ones(1), np.ones(3), np.float32(1.0)):
        with pytest.raises(ValueError, match=r"^nvfp4: largest must have shape \(E\) = \(2,\), but has "):
            nvfp4.quantize(weights, largest=cast(Any, each))
    for each, sentence in (
        ([1.0, 1.0], "must be a NumPy array, but came as list"),
        (np.ma.MaskedArray(np.ones(2)), "must be a plain NumPy array, but came as MaskedArray"),
        (np.array(["a", "b"]), "must be of real numbers, but is <U1"),
        (np.array([1j, 1.0]), "must be of real numbers, but is complex128"),
    ):
        with pytest.raises(ValueError, match=rf"^nvfp4: largest {sentence}$"):
            nvfp4.quantize(weights, largest=cast(Any, each))
    for number in (0.5, -1.0, np.inf, np.nan):
        sentence = rf"no less than what occurs in 'fc1', but of expert 1 it is {number}, and 1\.0 occurs$"
        with pytest.raises(ValueError, match=sentence):
            nvfp4.quantize(weights, "fc1", largest=np.array([1.0, number], np.float32))


@pytest.mark.parametrize("tokens", ANSWERED_TOKENS)
def test_onnxruntimes_own_qmoe_agrees(tokens: int) -> None:
    """Layout, scales, activation and weighted sum, by someone else's kernel: as recorded, and as it is here."""
    case = nvfp4_case(tokens)
    got = run_op("FusedExperts", case.feeds | routed(case), case.all_attributes)["y"]
    assert error_beside(got, np.load(ANSWERS)[str(tokens)]) < 1e-6
    if qmoe_runs():
        assert error_beside(got, nvfp4_answer(case)) < 1e-6


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_a_largest_of_any_type_packs_as_the_weights_own(dtype: Any) -> None:
    """In float16 the global scale of small weights would be subnormal, or 0."""
    for deviation in (1.0, 1e-3, 1e-5):
        weights = (deviation * random_weights((3, 4, 32), 1)).astype(np.float16)
        largest = np.abs(weights).max(axis=(1, 2)).astype(dtype)
        for part, expected in zip(nvfp4.quantize(weights, largest=largest), nvfp4.quantize(weights), strict=True):
            assert_same_bits(part, expected)
