"""Routing maps on CUDA: the router's own, those of its launcher apart, and the reference's are the same integers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import HealthCheck, given, settings

from ort_moe import kernels
from ort_moe.ops import FUSED_ROUTER, ROUTING_MAPS
from ort_moe.ops.router_config import RouterConfig
from ort_moe.reference.routing_maps import RoutingMaps, routing_maps
from tests.device_arrays import DeviceArray, DeviceMaps, poisoned
from tests.op_models import assert_same_bits, op_model, op_session
from tests.router_cases import DTYPES, RouterCase, router_cases

pytestmark = pytest.mark.gpu

EXPERTS = (8, 60, 64, 128, 160, 256, 384, 512, 896)
CHOSEN = (1, 2, 4, 6, 8, 10, 22)
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 33, 64, 257)
ROUTER_TEXTURES = ("normal", "ties", "nan", "constant", "infinities")


def scratch_of(size: int) -> DeviceArray:
    return poisoned((max(size, 1),), np.uint8)


def route(case: RouterCase, *, with_maps: bool = True) -> tuple[Any, Any, RoutingMaps | None]:
    """Weights, indices and maps of one call of the router's launcher, written over poison."""
    rows = math.prod(case.shape[:-1])
    config = RouterConfig.from_attributes(case.attributes)
    weights, indices = (poisoned((*case.shape[:-1], case.k), dtype) for dtype in (np.float32, np.int32))
    maps = DeviceMaps.poisoned(rows * case.k, case.experts)
    scratch = scratch_of(kernels.router_scratch_bytes(config, rows=rows, experts=case.experts))
    inputs = {"logits": case.logits, "selection_bias": case.selection_bias, "expert_scale": case.expert_scale}
    arrays = {name: DeviceArray(array) for name, array in inputs.items() if array is not None}
    kernels.fused_router(
        config,
        rows=rows,
        experts=case.experts,
        dtype=case.onnx_type,
        weights=weights.address,
        indices=indices.address,
        maps=maps.addresses if with_maps else None,
        scratch=scratch.address,
        **{name: array.address for name, array in arrays.items()},
    )
    return weights.read(), indices.read(), maps.read() if with_maps else None


def maps_of(indices: npt.NDArray[np.int32], experts: int) -> RoutingMaps:
    """The maps of the launcher that takes any choices, written over poison."""
    tokens, k = math.prod(indices.shape[:-1]), indices.shape[-1]
    maps = DeviceMaps.poisoned(tokens * k, experts)
    scratch = scratch_of(kernels.routing_maps_scratch_bytes(tokens=tokens, k=k, experts=experts))
    choices = DeviceArray(indices)
    kernels.routing_maps(choices.address, maps.addresses, tokens=tokens, k=k, experts=experts, scratch=scratch.address)
    return maps.read()


def assert_same_maps(got: RoutingMaps, expected: RoutingMaps) -> None:
    for name, g, e in zip(RoutingMaps._fields, got, expected, strict=True):
        try:
            assert_same_bits(g, e)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def check(case: RouterCase) -> None:
    """The router with maps against the emulation, the router without, and the other launcher."""
    weights, indices, maps = route(case)
    expected = case.emulate()
    assert_same_bits(indices, expected[1])
    assert_same_bits(weights, expected[0])
    assert maps is not None
    assert_same_maps(maps, routing_maps(indices, case.experts))
    assert_same_maps(maps_of(indices, case.experts), maps)
    alone = route(case, with_maps=False)
    assert_same_bits(alone[0], weights)
    assert_same_bits(alone[1], indices)


def softmax_case(experts: int, tokens: int, k: int, *, normalize: int = 1, **fields: Any) -> RouterCase:
    attributes = FUSED_ROUTER.complete({"k": k, "score": "softmax", "normalize": normalize})
    return RouterCase(attributes, (tokens, experts), **fields)


# --- The router's own maps ---


@pytest.mark.parametrize("normalize", [0, 1])
@pytest.mark.parametrize("experts", EXPERTS)
def test_softmax_routers(experts: int, normalize: int) -> None:
    """Every kind of logits for each k and type, each number of tokens for each k."""
    n = experts + 5 * normalize
    for k in (k for k in CHOSEN if k <= experts):
        for onnx_type in DTYPES:
            case = softmax_case(experts, 0, k, normalize=normalize, onnx_type=onnx_type)
            check(case)
            for texture in ROUTER_TEXTURES:
                check(replace(case, shape=(TOKENS[n % len(TOKENS)], experts), texture=texture, seed=n))
                n += 1


@pytest.mark.parametrize("tokens", [9, 16, 17, 32, 65, 100, 102, 103, 128, 700, 1024])
def test_every_number_of_tokens(tokens: int) -> None:
    """On both sides of where another block, or another way, begins."""
    for experts, k in ((4, 1), (8, 8), (128, 1), (512, 10), (896, 1), (1024, 8)):
        check(softmax_case(experts, tokens, k, onnx_type="bfloat16", texture="ties", seed=tokens))


@pytest.mark.parametrize("rest", ROUTER_TEXTURES)
def test_rows_that_a_warp_takes_in_turn(rest: str) -> None:
    """Of other logits each: what a lane held of one row is nothing to the next, however many compete there."""
    for experts, k, tokens, score in (
        (1024, 22, 46, "softmax"),
        (640, 22, 40, "softmax"),
        (512, 22, 45, "sigmoid"),
        (64, 8, 100, "softmax"),
        (60, 4, 128, "softmax"),
        (64, 6, 128, "sigmoid"),
    ):
        for seed in range(3):
            attributes = FUSED_ROUTER.complete({"k": k, "score": score, "normalize": 1})
            case = RouterCase(attributes, (tokens, experts), seed=seed)
            case.logits[tokens // 2 :] = replace(case, texture=rest, seed=seed + 1).logits[tokens // 2 :]
            check(case)


@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(router_cases(max_tokens=20))
def test_random_configurations(case: RouterCase) -> None:
    check(case)


def test_few_of_each_path() -> None:
    """What the memory checkers run."""
    for tokens, experts, k in (
        (1, 8, 2),
        (70, 8, 2),
        (1, 512, 10),
        (1, 1024, 22),
        (5, 512, 10),
        (20, 256, 8),
        (64, 128, 6),
        (3, 2048, 4),
    ):
        check(softmax_case(experts, tokens, k, texture="ties"))
    for tokens in (300, 6000):
        check(softmax_case(64, tokens, 6, texture="ties"))
    given = {"k": 4, "score": "sigmoid", "num_groups": 8, "topk_groups": 2, "group_score_top": 2}
    check(RouterCase(FUSED_ROUTER.complete(given), (12, 256), has_selection_bias=True))


# --- Choices from elsewhere ---


@pytest.mark.parametrize("experts", [1, 7, 64, 512, 1000, 5000, 8000])
@pytest.mark.parametrize("kind", ["random", "outside", "one", "none"])
def test_any_choices(kind: str, experts: int) -> None:
    rng = np.random.default_rng(experts)
    few = ((0, 3), (1, 1), (1, 10), (4, 12), (5, 10), (13, 8), (128, 8))
    for tokens, k in (*few, (129, 8), (33, 64), (3000, 10), (3300, 10)):
        low, high = {"random": (0, experts), "outside": (-3, experts + 4), "one": (experts - 1, experts)}.get(
            kind, (experts, experts + 9)
        )
        indices = rng.integers(low, high, (tokens, k), np.int32)
        if kind == "outside" and tokens:
            indices[0, 0], indices[-1, -1] = np.iinfo(np.int32).min, np.iinfo(np.int32).max
        assert_same_maps(maps_of(indices, experts), routing_maps(indices, experts))


def test_choices_that_no_16_byte_load_may_touch() -> None:
    for tokens, k in ((1, 10), (5, 10), (65, 8), (700, 10), (3300, 10)):
        indices = np.random.default_rng(tokens).integers(-1, 65, (tokens, k), np.int32)
        choices = DeviceArray(np.concatenate([indices[:1, :1].reshape(-1), indices.reshape(-1)]))
        maps = DeviceMaps.poisoned(tokens * k, 64)
        scratch = scratch_of(kernels.routing_maps_scratch_bytes(tokens=tokens, k=k, experts=64))
        kernels.routing_maps(
            choices.address + 4, maps.addresses, tokens=tokens, k=k, experts=64, scratch=scratch.address
        )
        assert_same_maps(maps.read(), routing_maps(indices, 64))


def test_many_choices() -> None:
    """More tiles than one, several rounds to each."""
    indices = np.random.default_rng(0).integers(-1, 513, (70000, 10), np.int32)
    assert_same_maps(maps_of(indices, 512), routing_maps(indices, 512))


# --- Through ONNX Runtime ---

OUTPUTS = ["weights", "indices", *(tensor.name for tensor in ROUTING_MAPS)]


@pytest.mark.parametrize("tokens", [0, 1, 4, 64, 300])
def test_session_with_a_graph(tokens: int) -> None:
    """Fixed buffers and new logits at every run, so that a graph's replays are seen to read them."""
    case = softmax_case(512, tokens, 10, onnx_type="bfloat16")
    model = op_model("FusedRouter", {"logits": case.logits}, case.attributes, outputs=OUTPUTS)
    graph = "1" if tokens else "0"
    session = op_session(model, [("CUDAExecutionProvider", {"enable_cuda_graph": graph})])  # type: ignore[list-item]
    logits, rows = DeviceArray(case.logits), tokens * case.k
    outputs = {
        "weights": poisoned((tokens, case.k), np.float32),
        "indices": poisoned((tokens, case.k), np.int32),
        **dict(zip(OUTPUTS[2:], DeviceMaps.poisoned(rows, 512).arrays, strict=True)),
    }
    binding = session.io_binding()
    binding.bind_input("logits", "cuda", 0, onnx.TensorProto.BFLOAT16, case.shape, logits.address)
    for name, array in outputs.items():
        binding.bind_output(
            name, "cuda", 0, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, array.address
        )
    for seed, texture in enumerate(("normal", "ties", "nan", "wide")):
        fresh = softmax_case(512, tokens, 10, onnx_type="bfloat16", texture=texture, seed=seed)
        if tokens:
            logits.write(fresh.logits)
        session.run_with_iobinding(binding)
        weights, indices = fresh.emulate()
        got = {name: array.read() for name, array in outputs.items()}
        assert_same_bits(got["weights"], weights)
        assert_same_bits(got["indices"], indices)
        assert_same_maps(RoutingMaps(*(got[name] for name in OUTPUTS[2:])), routing_maps(indices, 512))
