"""The CPU kernel of FusedExperts meets the float64 reference, and refuses what does not fit."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ort_moe.installation.library import register
from ort_moe.ops import ROUTING_MAPS
from tests.experts_cases import ACTIVATIONS, FORMATS, TOLERANCE, VARIANTS, ExpertsCase, experts_cases
from tests.experts_codes import PACKED, every_code, nan_rows, unchosen_nan
from tests.op_models import assert_same_bits, op_model, op_session, run_op, run_session


def run(case: ExpertsCase, *, symbolic: bool = False) -> Any:
    return run_op("FusedExperts", case.feeds, case.all_attributes, symbolic=symbolic)["y"]


@settings(max_examples=200)
@given(experts_cases(), st.booleans())
def test_every_call_meets_the_reference(case: ExpertsCase, symbolic: bool) -> None:
    case.check_each(run(case, symbolic=symbolic))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("onnx_type", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: f"{a['activation']}{a['gated']}")
def test_activations(activation: dict[str, Any], onnx_type: str, variant: str) -> None:
    fields = {**VARIANTS[variant], "attributes": activation, "has_bias": True, "has_residual": True}
    case = ExpertsCase((9,), 5, 2, 160, 96, onnx_type, **fields)
    case.check(run(case))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_code_is_decoded_to_the_bits_of_its_value(variant: str) -> None:
    case, expected = every_code(variant)
    np.testing.assert_array_equal(run(case), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_outliers_zeros_and_blocks_of_equal_weights(variant: str) -> None:
    case = ExpertsCase((9,), 5, 2, 160, 96, "float", **VARIANTS[variant], outliers=True)
    case.check_each(run(case))


@pytest.mark.parametrize("weight_format", [name for name in FORMATS if name != "dense"])
def test_experts_that_nobody_chose_are_not_read(weight_format: str) -> None:
    case, others, everywhere = unchosen_nan(weight_format)
    assert_same_bits(run_op("FusedExperts", others, case.all_attributes)["y"], run(case))
    assert np.isnan(run_op("FusedExperts", everywhere, case.all_attributes)["y"]).all()


@pytest.mark.parametrize(("weight_format", "block_size"), PACKED)
def test_scales_of_nan_stay_in_their_rows(weight_format: str, block_size: int) -> None:
    for tokens in (1, 40):
        case, soiled, nan = nan_rows(weight_format, tokens, block_size, "float16")
        y = run(case)
        y[:, nan] = np.nan
        assert_same_bits(run_op("FusedExperts", soiled, case.all_attributes)["y"], y)


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_layer_of_real_width(weight_format: str, block_size: int) -> None:
    onnx_type = tuple(TOLERANCE)[FORMATS.index(weight_format) % 3]
    case = ExpertsCase((3,), 3, 2, 2048, 384, onnx_type, weight_format, block_size=block_size)
    case.check(run(case))


@pytest.mark.parametrize("has_maps", [False, True])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_no_tokens(weight_format: str, has_maps: bool) -> None:
    case = ExpertsCase((2, 0), 4, 2, 32, 32, "float16", weight_format, has_maps=has_maps, has_residual=True)
    assert run(case, symbolic=True).shape == (2, 0, 32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_alone_has_the_bits_that_it_has_among_others(variant: str) -> None:
    """The kernel's bits depend on no other row."""
    case = ExpertsCase((37,), 5, 3, 96, 64, "bfloat16", **VARIANTS[variant], has_bias=True)
    session = op_session(op_model("FusedExperts", case.feeds, case.all_attributes, symbolic=True))
    together = run_session(session, case.feeds)["y"]
    for token in (0, 17, 36):
        alone = {name: case.feeds[name][token : token + 1] for name in ("x", "weights", "indices")}
        assert_same_bits(run_session(session, case.feeds | alone)["y"], together[token : token + 1])


def digest() -> str:
    """Of the bits of calls in each format, with few and many tokens to an expert, in rows of several chunks."""
    bits = hashlib.sha256()
    for variant in VARIANTS.values():
        for tokens in (1, 7, 41):
            case = ExpertsCase((tokens,), 2, 1, 1184, 96, "float", **variant, has_bias=True)
            bits.update(run(case).tobytes())
    return bits.hexdigest()


def test_every_instruction_set_gives_the_same_bits() -> None:
    expected = digest()
    code = "from tests.custom_ops.test_fused_experts_cpu import digest; print(digest())"
    for switch in ("ORT_MOE_AVX512", "ORT_MOE_AVX2"):
        other = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {switch: "0"}, capture_output=True, text=True, check=True
        )
        assert other.stdout.strip() == expected, switch


FLUSHED_FIRST = """
import sys, threading
import numpy as np
from tests.custom_ops.test_fused_experts_cpu import subnormal_weights
if sys.argv[1] == "flush":
    thread = threading.Thread(target=subnormal_weights, args=[True])
    thread.start()
    thread.join()
print(subnormal_weights(False).tobytes().hex())
"""


def subnormal_weights(flushes: bool) -> Any:
    """The answer of a session, which may have its threads take subnormal numbers for zero."""
    import onnxruntime

    case = ExpertsCase((1,), 1, 1, 32, 32, "float", "mxfp4", {"activation": "identity", "gated": 0})
    feeds = case.feeds | {
        "x": np.full((1, 32), 2.0**20, np.float32),
        "fc1_scales": np.zeros_like(case.feeds["fc1_scales"]),  # 2^-127
        "fc1_global_scale": np.full(1, 2.0**100, np.float32),
    }
    options = onnxruntime.SessionOptions()
    register(options)
    options.add_session_config_entry("session.set_denormal_as_zero", str(int(flushes)))
    model = op_model("FusedExperts", feeds, case.all_attributes).SerializeToString()
    return run_session(onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]), feeds)["y"]


def test_a_thread_that_flushes_subnormal_numbers_leaves_others_alone() -> None:
    first, alone = (
        subprocess.run([sys.executable, "-c", FLUSHED_FIRST, way], capture_output=True, text=True, check=True).stdout
        for way in ("flush", "alone")
    )
    assert alone.strip()
    assert first == alone


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("onnx_type", ["float", "float16", "bfloat16"])
def test_finalize_routing_of_the_experts_rows_gives_the_same_bits(onnx_type: str, weight_format: str) -> None:
    case = ExpertsCase(
        (11,), 6, 3, 64, 32, onnx_type, weight_format, choices="outside", has_bias=True, has_residual=True
    )
    rows = run(case.expanded())
    assert_same_bits(run_op("FinalizeRouting", case.finalized(rows), {})["y"], run(case))


def test_maps_that_do_not_fit_the_indices_do_no_harm() -> None:
    case = ExpertsCase((6,), 4, 2, 16, 16, has_maps=True)
    expected = run(case)
    wrong = {t.name: np.full_like(case.feeds[t.name], 2**31 - 1) for t in ROUTING_MAPS}
    assert_same_bits(run_op("FusedExperts", case.feeds | wrong, case.all_attributes)["y"], expected)


def test_nan_and_infinity_stay_in_their_token() -> None:
    case = ExpertsCase((4,), 3, 2, 32, 16, "float16", attributes={"activation": "relu", "gated": 1, "limit": 2.0})
    x = case.feeds["x"].copy()
    x[1, 3], x[2, 5] = np.nan, np.inf
    y = run_op("FusedExperts", case.feeds | {"x": x}, case.all_attributes)["y"]
    assert np.isnan(y[1]).all()
    assert_same_bits(y[[0, 3]], run(case)[[0, 3]])


def refused(case: ExpertsCase, changed: dict[str, Any], attributes: dict[str, Any], symbolic: bool) -> None:
    feeds = {name: array for name, array in (case.feeds | changed).items() if array is not None}
    run_op("FusedExperts", feeds, case.all_attributes | attributes, symbolic=symbolic)


DENSE = ExpertsCase((5,), 4, 2, 32, 16, "float16", has_bias=True, has_residual=True, has_maps=True)
NVFP4 = ExpertsCase((5,), 4, 2, 32, 16, "float16", "nvfp4", has_bias=True)
MXFP4 = ExpertsCase((5,), 4, 2, 64, 32, "float16", "mxfp4")
INT4 = ExpertsCase((5,), 4, 2, 48, 16, "float16", "int4", has_zero_points=True)
INT8 = ExpertsCase((5,), 4, 2, 64, 32, "float16", "int8", has_zero_points=True, block_size=32)
FP8 = ExpertsCase((5,), 4, 2, 20, 10, "float16", "fp8")


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    ("case", "changed", "message"),
    [
        (DENSE, {"weights": np.zeros((5, 3), np.float32)}, r"'indices' must have shape \[5, 3\], but has \[5, 2\]"),
        (DENSE, {"residual": np.zeros((5, 31), np.float16)}, r"'residual' must have shape \[5, 32\]"),
        (DENSE, {"fc1_weights": np.zeros((4, 32), np.float16)}, r"'fc1_weights' must have rank 3, but has shape \["),
        (
            DENSE,
            {"fc1_weights": np.zeros((4, 33, 32), np.float16)},
            r"'fc1_weights' must have an even second dimension",
        ),
        (DENSE, {"fc1_weights": np.zeros((4, 32, 31), np.float16)}, r"'fc1_weights' must have shape \[4, 32, 32\]"),
        (DENSE, {"fc2_weights": np.zeros((4, 16, 32), np.float16)}, r"'fc2_weights' must have shape \[4, 32, 16\]"),
        (DENSE, {"fc2_weights": np.zeros((3, 32, 16), np.float16)}, r"'fc2_weights' must have shape \[4, 32, 16\]"),
        (
            DENSE,  # the layers differ: the maps, which fit one of them, are not to blame
            {"fc1_weights": np.zeros((3, 32, 32), np.float16), "fc1_bias": None},
            r"'fc2_weights' must have shape \[3, 32, 16\], but has \[4, 32, 16\]",
        ),
        (DENSE, {"fc1_bias": np.zeros((4, 16), np.float16)}, r"'fc1_bias' must have shape \[4, 32\]"),
        (DENSE, {"permuted_to_expert": np.zeros(9, np.int32)}, r"'permuted_to_expert' must have shape \[10\]"),
        (
            DENSE,
            {"expert_first_token_offset": np.zeros(4, np.int64)},
            r"'expert_first_token_offset' must have shape \[5\]",
        ),
        (NVFP4, {"fc1_weights": np.zeros((4, 32, 32), np.uint8)}, r"'fc1_weights' must have shape \[4, 32, 16\]"),
        (NVFP4, {"fc2_weights": np.zeros((4, 16, 16), np.uint8)}, r"'fc2_weights' must have shape \[4, 32, 8\]"),
        (
            NVFP4,
            {"fc1_scales": np.zeros((4, 32, 1), ml_dtypes.float8_e4m3fn)},
            r"'fc1_scales' must have shape \[4, 32, 2\], but has \[4, 32, 1\]",
        ),
        (NVFP4, {"fc2_global_scale": np.ones(3, np.float32)}, r"'fc2_global_scale' must have shape \[4\]"),
        (MXFP4, {"fc1_weights": np.zeros((4, 64, 64), np.uint8)}, r"'fc1_weights' must have shape \[4, 64, 32\]"),
        (MXFP4, {"fc1_scales": np.zeros((4, 64, 4), np.uint8)}, r"'fc1_scales' must have shape \[4, 64, 2\]"),
        (MXFP4, {"fc1_global_scale": np.ones(1, np.float32)}, r"'fc1_global_scale' must have shape \[4\]"),
        (INT4, {"fc1_weights": np.zeros((4, 32, 48), np.uint8)}, r"'fc1_weights' must have shape \[4, 32, 24\]"),
        (INT4, {"fc1_scales": np.zeros((4, 32, 2), np.float16)}, r"'fc1_scales' must have shape \[4, 32, 3\]"),
        (
            INT4,  # one a byte
            {"fc1_zero_points": np.zeros((4, 32, 3), np.uint8)},
            r"'fc1_zero_points' must have shape \[4, 32, 2\], but has \[4, 32, 3\]",
        ),
        (INT8, {"fc2_weights": np.zeros((4, 64, 16), np.uint8)}, r"'fc2_weights' must have shape \[4, 64, 32\]"),
        (INT8, {"fc1_zero_points": np.zeros((4, 64, 1), np.uint8)}, r"'fc1_zero_points' must have shape \[4, 64, 2\]"),
        (
            FP8,
            {"fc2_weights": np.zeros((4, 10, 20), ml_dtypes.float8_e4m3fn)},
            r"'fc2_weights' must have shape \[4, 20, 10\], but has \[4, 10, 20\]",
        ),
        (FP8, {"fc1_scales": np.zeros((4, 1, 2), np.float32)}, r"'fc1_scales' must have shape \[4, 2, 2\]"),
        (FP8, {"fc2_scales": np.zeros((4, 1, 2), np.float32)}, r"'fc2_scales' must have shape \[4, 2, 1\]"),
    ],
)
def test_wrong_shapes_are_refused(case: ExpertsCase, changed: dict[str, Any], message: str, symbolic: bool) -> None:
    with pytest.raises(Exception, match=f"FusedExperts node 'node': input {message}"):
        refused(case, changed, {}, symbolic)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("weight_format", ["dense", "nvfp4"])
@pytest.mark.parametrize(
    ("size", "what"),
    [
        ("experts", "the first dimension of input 'fc1_weights', E,"),
        ("hidden", "the last dimension of input 'x', H,"),
        ("inner", "half the second dimension of input 'fc1_weights', I,"),
        ("k", "the last dimension of input 'weights', K,"),
    ],
)
def test_sizes_of_nothing_are_refused(size: str, what: str, weight_format: str, symbolic: bool) -> None:
    sizes = {"experts": 4, "k": 2, "hidden": 32, "inner": 16}
    attributes = {**ACTIVATIONS[0], "weight_format": weight_format}
    feeds = empty_feeds(**(sizes | {size: 0}), packed=weight_format == "nvfp4")
    with pytest.raises(Exception, match=f"FusedExperts node 'node': {what} must be at least 1, but is 0"):
        run_op("FusedExperts", feeds, attributes, symbolic=symbolic)


def empty_feeds(*, experts: int, k: int, hidden: int, inner: int, packed: bool) -> dict[str, Any]:
    """Inputs of 5 tokens and gated experts, of zeros."""
    feeds: dict[str, Any] = {"x": np.zeros((5, hidden), np.float16), "weights": np.zeros((5, k), np.float32)}
    feeds["indices"] = np.zeros((5, k), np.int32)
    for layer, rows, depth in (("fc1", 2 * inner, hidden), ("fc2", hidden, inner)):
        feeds[f"{layer}_weights"] = np.zeros((experts, rows, depth), np.float16)
        if packed:
            feeds[f"{layer}_weights"] = np.zeros((experts, rows, depth // 2), np.uint8)
            feeds[f"{layer}_scales"] = np.zeros((experts, rows, depth // 16), ml_dtypes.float8_e4m3fn)
    return feeds


@pytest.mark.parametrize("symbolic", [False, True])
def test_sizes_that_the_format_cannot_hold_are_refused(symbolic: bool) -> None:
    narrow = {"x": np.zeros((5, 24), np.float16)}
    with pytest.raises(
        Exception, match=r"last dimension of input 'x', H, must be a multiple of 16 .* nvfp4, but is 24"
    ):
        refused(NVFP4, narrow, {}, symbolic)
    for case, divisor, named in (
        (MXFP4, 32, "mxfp4"),
        (INT4, 16, "int4 and block_size = 16"),
        (INT8, 32, "int8 and block_size = 32"),
    ):
        with pytest.raises(
            Exception, match=f"H, must be a multiple of {divisor} with weight_format = {named}, but is 24"
        ):
            refused(case, narrow, {}, symbolic)
    thin = {"fc1_weights": np.zeros((4, 48, 16), np.uint8)}
    with pytest.raises(Exception, match=r"half the second dimension of input 'fc1_weights', I, must be .* but is 24"):
        refused(NVFP4, thin, {}, symbolic)


@pytest.mark.parametrize(
    ("case", "changed", "message"),
    [
        (
            DENSE,
            {"fc1_weights": DENSE.feeds["fc1_weights"].astype(np.float32)},
            "'fc1_weights' must have type float16 as",
        ),
        (
            DENSE,
            {"fc2_bias": DENSE.feeds["fc2_bias"].astype(np.float32)},
            "'fc2_bias' must have type float16 as 'x' has",
        ),
        (DENSE, {"residual": np.zeros((5, 32), np.float32)}, "'residual' must have type float16 as 'x' has"),
        (
            DENSE,
            {"weights": DENSE.feeds["weights"].astype(np.float16)},
            "'weights' must have type float, but has float16",
        ),
        (DENSE, {"fc1_scales": NVFP4.feeds["fc1_scales"]}, "'fc1_scales' must be left out with weight_format = dense"),
        (DENSE, {"fc2_zero_points": np.zeros(1, np.uint8)}, "'fc2_zero_points' must be left out with weight_format"),
        (DENSE, {"permuted_to_expert": None}, "'permuted_to_expert' must be there, as the other routing maps are"),
        (NVFP4, {"fc1_weights": DENSE.feeds["fc1_weights"]}, "'fc1_weights' must have type uint8 .*, but has float16"),
        (NVFP4, {"fc2_scales": None}, "'fc2_scales' must be given with weight_format = nvfp4, but is left out"),
        (
            NVFP4,
            {"fc1_scales": np.zeros((4, 32, 2), np.uint8)},
            "'fc1_scales' must have type float8e4m3fn with weight_format = nvfp4, but has uint8",
        ),
        (
            NVFP4,
            {"fc1_zero_points": np.zeros((4, 32, 2), np.uint8)},
            "'fc1_zero_points' must be left out with weight_format = nvfp4, but is given",
        ),
        (
            MXFP4,
            {"fc1_scales": np.zeros((4, 64, 2), ml_dtypes.float8_e4m3fn)},
            "'fc1_scales' must have type uint8 with weight_format = mxfp4, but has float8e4m3fn",
        ),
        (MXFP4, {"fc2_scales": None}, "'fc2_scales' must be given with weight_format = mxfp4, but is left out"),
        (
            INT4,
            {"fc1_scales": INT4.feeds["fc1_scales"].astype(np.float32)},
            "'fc1_scales' must have type float16 as 'x' has",
        ),
        (
            INT8,
            {"fc1_global_scale": np.ones(4, np.float32)},
            "'fc1_global_scale' must be left out with weight_format = int8 and block_size = 32, but is given",
        ),
        (
            FP8,
            {"fc1_weights": FP8.feeds["fc1_weights"].view(np.uint8)},
            "'fc1_weights' must have type float8e4m3fn with weight_format = fp8 .*, but has uint8",
        ),
        (
            FP8,
            {"fc2_scales": FP8.feeds["fc2_scales"].astype(np.float16)},
            "'fc2_scales' must have type float with weight_format = fp8 .*, but has float16",
        ),
        (
            FP8,
            {"fc1_zero_points": np.zeros((4, 1, 2), np.uint8)},
            "'fc1_zero_points' must be left out with weight_format = fp8 and block_size = 16, but is given",
        ),
    ],
)
def test_a_session_refuses_wrong_inputs(case: ExpertsCase, changed: dict[str, Any], message: str) -> None:
    feeds = {name: array for name, array in (case.feeds | changed).items() if array is not None}
    with pytest.raises(Exception, match=f"FusedExperts node 'node': input {message}"):
        op_session(op_model("FusedExperts", feeds, case.all_attributes))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"weight_format": "int3"}, "'weight_format' must be 'dense', .* or 'fp8', but is 'int3'"),
        ({"weight_format": "fp8"}, "'block_size' must be 16, 32, 64 or 128 with weight_format = fp8, but is 0"),
        ({"block_size": 16}, "'block_size' must be 0 with weight_format = dense, but is 16"),
        ({"block_size": 48}, "'block_size' must be 0, 16, 32, 64 or 128, but is 48"),
        ({"activation": "swish"}, "'activation' must be 'silu', .* or 'identity', but is 'swish'"),
        ({"activation": "relu", "alpha": 2.0}, "'alpha' must be 1 unless activation = silu, but is 2"),
        ({"gated": 0, "beta": 1.0}, "'beta' must be 0 with gated = 0, but is 1"),
        ({"gated": 0, "limit": 7.0}, "'limit' must be 0 with gated = 0, but is 7"),
        ({"limit": -1.0}, "'limit' must be finite and at least 0, but is -1"),
        ({"alpha": float("nan")}, "'alpha' must be finite, but is NaN"),
    ],
)
def test_a_session_refuses_wrong_attributes(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=f"FusedExperts node 'node': attribute {message}"):
        op_session(op_model("FusedExperts", DENSE.feeds, DENSE.all_attributes | attributes))


def test_a_session_refuses_missing_attributes() -> None:
    with pytest.raises(Exception, match="attribute 'gate_layout' must be a string, but is missing"):
        op_session(op_model("FusedExperts", DENSE.feeds, DENSE.all_attributes, complete=False))
