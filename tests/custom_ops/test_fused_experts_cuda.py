"""FusedExperts on CUDA against float64 and against itself, bit for bit; by the launcher and through ORT."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.experts_cases import ACTIVATIONS, FORMATS, TOLERANCE, VARIANTS, ExpertsCase, bit_cases, experts_cases
from tests.experts_codes import PACKED, every_code, nan_rows, unchosen_nan
from tests.experts_launcher import GUARD, POISON, Launcher, device_bytes, launch
from tests.op_models import assert_same_bits, element_type, op_model, op_session, run_op
from tests.qmoe_models import ANSWERED_TOKENS, ANSWERS, error_beside, nvfp4_case, routed
from tests.router_cases import DTYPES

pytestmark = pytest.mark.gpu

HALVES = ("float16", "bfloat16")

WAYS = ((1, 5), (9, 20), (9, 4), (70, 4))
"""Tokens and experts of two choices a token for each of the kernels: one token, few, few rows of an expert, many."""

# --- Against float64 ---


@st.composite
def fast_cases(draw: st.DrawFn) -> ExpertsCase:
    """Calls that take the tensor cores."""
    case = draw(experts_cases(HALVES))
    block = case.config.scale_block if case.weight_format in ("int4", "int8") else 1
    widths = (32, 64, 96, 320, 640) if case.weight_format == "dense" else (64, 128, 192, 320, 576, 640)
    sizes = st.sampled_from([width for width in widths if width % block == 0])
    leading = draw(st.sampled_from((case.leading, (40,), (70,))))
    # Without global scales weights are large, and squares leave float16's range.
    has_global_scale = case.has_global_scale or case.onnx_type == "float16"
    return dataclasses.replace(
        case, leading=leading, hidden=draw(sizes), inner=draw(sizes), has_global_scale=has_global_scale
    )


@settings(max_examples=300, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(fast_cases())
def test_every_call_on_tensor_cores(case: ExpertsCase) -> None:
    case.check_each(launch(case))


@settings(max_examples=600, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(experts_cases())
def test_every_call(case: ExpertsCase) -> None:
    case.check_each(launch(case))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("onnx_type", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: f"{a['activation']}{a['gated']}")
def test_activations(activation: dict[str, Any], onnx_type: str, variant: str) -> None:
    for tokens, experts in WAYS:
        fields = {**VARIANTS[variant], "attributes": activation, "has_bias": True}
        case = ExpertsCase((tokens,), experts, 2, 320, 192, onnx_type, **fields)
        case.check(launch(case))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_code_is_decoded_to_the_bits_of_its_value(variant: str) -> None:
    case, expected = every_code(variant)
    np.testing.assert_array_equal(launch(case), expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("onnx_type", DTYPES)
def test_outliers_zeros_and_blocks_of_equal_weights(onnx_type: str, variant: str) -> None:
    for tokens, experts in WAYS:
        case = ExpertsCase((tokens,), experts, 2, 320, 192, onnx_type, **VARIANTS[variant], outliers=True)
        case.check_each(launch(case))


@pytest.mark.parametrize("has_zero_points", [False, True])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("weight_format", ["int4", "int8", "fp8"])
def test_block_sizes(weight_format: str, block_size: int, has_zero_points: bool) -> None:
    """Odd numbers of blocks, whose zero points end in half a byte; for fp8 also blocks that are cut off."""
    rest = 0 if weight_format != "fp8" else 11
    for onnx_type in DTYPES:
        for tokens, experts in WAYS:
            case = ExpertsCase(
                (tokens,), experts, 2, 3 * block_size + rest, block_size + rest, onnx_type, weight_format,
                has_zero_points=has_zero_points, block_size=block_size,
            )  # fmt: skip
            case.check_each(launch(case))


@pytest.mark.parametrize("has_zero_points", [False, True])
@pytest.mark.parametrize(
    ("weight_format", "block_size"),
    [("nvfp4", 0), ("mxfp4", 0), *((name, size) for name in ("int4", "int8", "fp8") for size in (32, 64, 128))],
)
@pytest.mark.parametrize("onnx_type", HALVES)
def test_few_rows_of_each_expert(onnx_type: str, weight_format: str, block_size: int, has_zero_points: bool) -> None:
    """Tiles of every height, more tokens of an expert than one takes, and depths that end anywhere in a stage."""
    depths = (320, 192) if block_size < 128 else (384, 128)
    for n, (tokens, choices) in enumerate(
        ((25, "random"), (60, "one_expert"), (110, "outside"), (120, "random"), (40, "none"))
    ):
        hidden, inner = depths if n % 2 == 0 else depths[::-1]
        attributes = {**ACTIVATIONS[(0, 1, 2, 9, 5)[n]], "weight_on": ("output", "input")[n % 2]}
        case = ExpertsCase(
            (tokens,), 20 if n < 4 else 26, 2, hidden, inner, onnx_type, weight_format, attributes, choices=choices,
            has_bias=n % 2 == 1, has_residual=n == 0, has_zero_points=has_zero_points, block_size=block_size, seed=n,
        )  # fmt: skip
        case.check_each(launch(case))


@pytest.mark.parametrize("has_zero_points", [False, True])
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("onnx_type", HALVES)
def test_many_rows_of_each_expert(onnx_type: str, weight_format: str, has_zero_points: bool) -> None:
    """The highest tiles of tokens, full and cut off, and the lower ones; weight rows that end within a tile."""
    calls = ((600, "random", 0), (400, "one_expert", 3), (190, "random", 1), (150, "outside", 10), (60, "random", 2))
    for n, (tokens, choices, activation) in enumerate(calls):
        attributes = {**ACTIVATIONS[activation], "weight_on": ("input", "output")[n % 2]}
        hidden, inner = (320, 192) if n % 2 == 0 else (192, 320)
        case = ExpertsCase(
            (tokens,), 2, 2, hidden, inner, onnx_type, weight_format, attributes, choices=choices, has_bias=n < 3,
            has_residual=n == 1, has_zero_points=has_zero_points, block_size=(32, 64)[n % 2], seed=n,
        )  # fmt: skip
        case.check_each(launch(case))


@pytest.mark.parametrize("weight_format", [name for name in FORMATS if name != "dense"])
@pytest.mark.parametrize("onnx_type", DTYPES)
def test_experts_that_nobody_chose_are_not_read(onnx_type: str, weight_format: str) -> None:
    for experts, size in ((16, 64), (4, 64), (4, 32)):
        case, others, everywhere = unchosen_nan(weight_format, onnx_type, experts=experts, size=size)
        expected = launch(case)
        case.feeds.update(others)
        assert_same_bits(launch(case), expected)
        case.feeds.update(everywhere)
        assert np.isnan(launch(case).astype(np.float32)).all()


@pytest.mark.parametrize(("weight_format", "block_size"), PACKED)
@pytest.mark.parametrize("onnx_type", DTYPES)
def test_scales_of_nan_stay_in_their_rows(onnx_type: str, weight_format: str, block_size: int) -> None:
    for tokens, k in ((1, 1), (2, 1), (1, 2), (4, 2), (40, 2), (400, 2)):
        case, soiled, nan = nan_rows(weight_format, tokens, block_size, onnx_type, k=k)
        clean = launch(case)
        case.feeds.update(soiled)
        assert_same_bits(launch(case), np.where(nan, np.array(np.nan, clean.dtype), clean))


@pytest.mark.parametrize("onnx_type", HALVES)
@pytest.mark.parametrize(("weight_format", "hidden"), [("dense", 640), ("nvfp4", 2048)])
def test_more_experts_than_the_kernels_for_hopper_take(weight_format: str, hidden: int, onnx_type: str) -> None:
    """Then those of older devices take over, of which a token alone has the same bits. Every eighth expert is alike."""
    alike, experts = 8, 4104
    for tokens, choices, activation in ((24, "one_expert", 0), (40, "outside", 3), (1100, "random", 1)):
        few = ExpertsCase(
            (tokens,), alike, 8, hidden, 64, onnx_type, weight_format, ACTIVATIONS[activation], choices=choices,
            has_bias=True,
        )  # fmt: skip
        case = dataclasses.replace(few, experts=experts)
        indices = few.feeds["indices"]
        others = alike * np.random.default_rng(0).integers(0, experts // alike, indices.shape, np.int32)
        case.__dict__["feeds"] = {
            name: np.resize(array, (experts, *array.shape[1:])) if name.startswith("fc") else array
            for name, array in few.feeds.items()
        } | {"indices": np.where((indices >= 0) & (indices < alike), indices + others, -1)}
        few.check_each(launch(case))
        _check_parts(case, ((0, 1), (5, 3)))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("onnx_type", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 64, 65, 200, 700])
def test_tokens(tokens: int, onnx_type: str, weight_format: str) -> None:
    """Few and many, maps given and built; all tokens on one expert, experts without tokens, ids outside."""
    for n, choices in enumerate(("random", "one_expert", "outside", "none")):
        case = ExpertsCase(
            (tokens,), 20, 2, 192, 64, onnx_type, weight_format, choices=choices, has_maps=n % 2 == tokens % 2,
            has_residual=True, seed=tokens,
        )  # fmt: skip
        case.check_each(launch(case))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(
    ("tokens", "k"),
    [
        *((1, 1), (1, 2), (2, 1), (1, 31), (1, 32), (1, 33), (1, 64), (3, 11)),
        *((4, 16), (8, 8), (2, 60), (5, 10), (6, 10), (7, 8), (10, 8), (11, 8)),
    ],
)
def test_few_tokens_whose_choices_fill_a_warp_and_more(tokens: int, k: int, weight_format: str) -> None:
    """One token's choices are items of their own, others' meet in items; of many of both some name no expert."""
    for seed, choices in enumerate(("random", "one_expert", "outside")):
        case = ExpertsCase(
            (tokens,), 64, k, 128, 320, HALVES[seed % 2], weight_format, choices=choices, block_size=32, seed=seed
        )
        case.check_each(launch(case))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("indices", [[[-1]], [[-1, 5]], [[5, -1]], [[-1, 64]], [[-1], [5]], [[5], [64]]], ids=str)
def test_one_choice_or_two_of_which_some_name_no_expert(indices: list[list[int]], weight_format: str) -> None:
    for onnx_type in HALVES:
        leading, k = (len(indices),), len(indices[0])
        case = ExpertsCase(leading, 64, k, 128, 320, onnx_type, weight_format, block_size=32, has_residual=True)
        case.feeds["indices"][:] = indices
        case.check_each(launch(case))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("inner", [64, 128, 192, 256, 320, 384])
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (1, 2), (1, 3), (2, 1), (4, 3)])
def test_reductions_of_a_few_steps(tokens: int, k: int, inner: int, weight_format: str) -> None:
    """Steps by themselves and with another, whole and not; one expert, two, and an odd number of them."""
    case = ExpertsCase(
        (tokens,),
        13,
        k,
        192,
        inner,
        "bfloat16",
        weight_format,
        choices="outside",
        has_bias=True,
        block_size=32,
        seed=19,
    )
    chosen = case.feeds["indices"][(case.feeds["indices"] >= 0) & (case.feeds["indices"] < case.experts)]
    counts = np.bincount(chosen, minlength=case.experts)
    if k == 3:
        assert (np.count_nonzero(counts) % 2, counts.max()) == (1, min(tokens, 2))
    case.check_each(launch(case))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("onnx_type", DTYPES)
@pytest.mark.parametrize(("hidden", "inner"), [(2560, 640), (2048, 768), (2880, 704), (7168, 256)])
def test_layers_of_real_width(hidden: int, inner: int, onnx_type: str, weight_format: str) -> None:
    case = ExpertsCase((3,), 8, 2, hidden, inner, onnx_type, weight_format, block_size=64)
    case.check(launch(case))
    _check_parts(case, ((1, 1),))


@pytest.mark.parametrize("onnx_type", DTYPES)
@pytest.mark.parametrize("tokens", ANSWERED_TOKENS)
def test_onnxruntimes_own_qmoe_agrees(tokens: int, onnx_type: str) -> None:
    """What its CPU kernel answered, recorded: an oracle from outside."""
    answered = nvfp4_case(tokens)
    case = dataclasses.replace(answered, onnx_type=onnx_type)
    case.__dict__["feeds"] = answered.feeds | routed(answered)
    for name in ("x", "fc1_bias", "fc2_bias"):
        case.feeds[name] = case.feeds[name].astype(DTYPES[onnx_type])
    assert error_beside(launch(case).astype(np.float64), np.load(ANSWERS)[str(tokens)]) < TOLERANCE[onnx_type]


def test_no_tokens() -> None:
    for weight_format in FORMATS:
        case = ExpertsCase((2, 0), 4, 2, 64, 32, "float16", weight_format, has_residual=True, block_size=32)
        assert launch(case).shape == (2, 0, 64)
        y = run_op("FusedExperts", case.feeds, case.all_attributes, symbolic=True, providers=["CUDAExecutionProvider"])[
            "y"
        ]
        assert y.shape == (2, 0, 64)


def test_special_values_stay_in_their_row() -> None:
    """NaN and infinities in one token leave the others' bits alone, few of them and many."""
    for weight_format in FORMATS:
        for tokens, experts in ((5, 10), (5, 3), (100, 3)):
            case = ExpertsCase((tokens,), experts, 2, 192, 64, "bfloat16", weight_format)
            clean = launch(case)
            case.feeds["x"][2, 7], case.feeds["x"][3, 8] = np.nan, np.inf
            soiled = launch(case)
            assert np.isnan(soiled[2].astype(np.float32)).all()
            assert_same_bits(np.delete(soiled, [2, 3], axis=0), np.delete(clean, [2, 3], axis=0))


def test_extreme_scales() -> None:
    """The largest, the smallest and a NaN scale, exact in both half types."""
    for onnx_type in HALVES:
        case = ExpertsCase((2,), 2, 1, 128, 64, onnx_type, "nvfp4", {"activation": "identity", "gated": 0})
        scales = case.feeds["fc1_scales"].view(np.uint8)
        scales[:] = np.random.default_rng(0).choice(np.array([0x7E, 0x01, 0x07, 0x08, 0xB8], np.uint8), scales.shape)
        case.feeds["x"][:] = (case.feeds["x"].astype(np.float32) / 256).astype(case.feeds["x"].dtype)
        case.check(launch(case))
        scales[:] = 0x7F
        assert np.isnan(launch(case).astype(np.float32)).all()


@pytest.mark.parametrize(("onnx_type", "largest"), [("float16", 240.0), ("bfloat16", 1e30), ("float", 1e30)])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("int")])
def test_scales_of_integers_at_their_limits(variant: str, onnx_type: str, largest: float) -> None:
    """Subnormal ones, 0, negative ones and large ones, with which the weights themselves stay in the type of x."""
    attributes: dict[str, Any] = {"activation": "identity", "gated": 0}
    for tokens in (2, 70):
        case = ExpertsCase((tokens,), 2, 1, 128, 64, onnx_type, **VARIANTS[variant], attributes=attributes)
        scales = case.feeds["fc1_scales"]
        smallest = 2.0**-24 if onnx_type == "float16" else 2.0**-133
        values = np.array([0.0, smallest, 3 * smallest, -0.25, largest], np.float32).astype(scales.dtype)
        case.feeds["fc1_scales"] = np.random.default_rng(0).choice(values, scales.shape)
        case.feeds["x"] = (case.feeds["x"].astype(np.float32) / 4096).astype(case.feeds["x"].dtype)
        case.check_each(launch(case))


def test_addresses_off_their_alignment() -> None:
    for weight_format in FORMATS:
        case = ExpertsCase((3,), 8, 2, 64, 64, "float16", weight_format)
        case.check(Launcher(case, shift=2)())


# --- The same bits ---


def test_runs_repeat() -> None:
    for case in bit_cases():
        launcher = Launcher(case)
        first = launcher().copy()
        for _ in range(20):
            assert_same_bits(launcher(), first)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("onnx_type", DTYPES)
def test_a_token_alone_has_the_bits_that_it_has_among_others(onnx_type: str, weight_format: str) -> None:
    """Among few slots, few rows of an expert and many, whose products run over the reduction in another order."""
    one_choice = (6, 1, ((0, 1), (2, 2), (3, 2), (3, 3)))
    few = (4, 2, ((0, 1), (2, 2), (1, 3)))
    sparse = (24, 8, ((0, 17), (5, 19)))
    many = (200, 8, ((0, 50), (7, 64), (100, 90)))
    for tokens, k, parts in (one_choice, few, sparse, many):
        case = ExpertsCase((tokens,), 16, k, 640, 1152, onnx_type, weight_format, block_size=32, has_bias=True)
        _check_parts(dataclasses.replace(case, has_residual=True), parts)
    # As many as the kernels for few tokens take: LimitsOfFew in fused_experts.cu, by 8 choices a token.
    tokens = {"nvfp4": 7, "mxfp4": 9, "int4": 10, "int8": 10, "fp8": 5, "dense": 8}[weight_format]
    case = ExpertsCase((tokens,), 64, 8, 640, 192, onnx_type, weight_format, block_size=32, has_bias=True)
    _check_parts(case, ((0, 1), (2, 3)))


def _check_parts(case: ExpertsCase, parts: Iterable[tuple[int, int]]) -> None:
    """Tokens first to first + count by themselves have the bits that they have in the whole call."""
    together = launch(case)
    for first, count in parts:
        alone = dataclasses.replace(case, leading=(count,))
        alone.__dict__["feeds"] = {
            name: array[first : first + count] if name in ("x", "weights", "indices", "residual") else array
            for name, array in case.feeds.items()
        }
        assert_same_bits(launch(alone), together[first : first + count])


def test_given_maps_and_own_maps() -> None:
    for case in bit_cases():
        assert_same_bits(launch(dataclasses.replace(case, has_maps=True)), launch(case))


@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("onnx_type", DTYPES)
def test_nothing_is_written_behind_the_scratch(onnx_type: str, weight_on: str) -> None:
    for weight_format in FORMATS:
        for tokens in (1, 4, 9, 70, 300):
            attributes = {**ACTIVATIONS[0], "weight_on": weight_on}
            launcher = Launcher(ExpertsCase((tokens,), 8, 2, 64, 192, onnx_type, weight_format, attributes))
            launcher()
            assert (launcher.scratch.numpy()[-GUARD:] == 0xFF).all()


def test_finalize_routing_of_the_experts_rows_gives_the_same_bits() -> None:
    """FC2 with finalize in it, and FC2 and finalize apart."""
    for case in bit_cases():
        together = launch(case)
        rows = launch(case.expanded())
        finalized = run_op("FinalizeRouting", case.finalized(rows), {}, providers=["CUDAExecutionProvider"])["y"]
        assert_same_bits(finalized, together)


# --- Through ONNX Runtime ---


def _name(case: ExpertsCase) -> str:
    zero_points = "-zero_points" if case.has_zero_points else ""
    return f"{case.onnx_type}-{case.weight_format}{zero_points}-{case.leading[0]}"


@pytest.mark.parametrize("case", list(bit_cases()), ids=_name)
def test_sessions_and_graph_replays_give_the_launchers_bits(case: ExpertsCase) -> None:
    """Fixed buffers and new choices at every run, so that a graph's replays are seen to read them."""
    for graph in ("0", "1"):
        model = op_model("FusedExperts", case.feeds, case.all_attributes)
        session = op_session(model, [("CUDAExecutionProvider", {"enable_cuda_graph": graph})])  # type: ignore[list-item]
        launcher = Launcher(case)
        binding = session.io_binding()
        for name, array in case.feeds.items():
            address = launcher.values[name].data_ptr()
            binding.bind_input(name, "cuda", 0, element_type(array.dtype), array.shape, address)
        y = device_bytes(np.full(case.feeds["x"].nbytes, POISON, np.uint8))
        kind, shape = element_type(case.feeds["x"].dtype), case.feeds["x"].shape
        binding.bind_output("y", "cuda", 0, kind, shape, y.data_ptr())
        for seed in range(3):
            indices = np.random.default_rng(seed).integers(-1, case.experts + 1, case.feeds["indices"].shape, np.int32)
            data = indices.reshape(-1).view(np.uint8)
            launcher.values["indices"].update_inplace(np.pad(data, (0, max(0, 256 - data.size))))
            session.run_with_iobinding(binding)
            got = y.numpy()[: case.feeds["x"].nbytes].view(case.feeds["x"].dtype).reshape(shape)
            assert_same_bits(got, launcher())
