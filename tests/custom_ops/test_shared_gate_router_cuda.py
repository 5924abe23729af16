"""SharedGateRouter on CUDA against the emulation, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings

from ort_moe import kernels
from ort_moe.ops import FUSED_ROUTER, ROUTING_MAPS
from ort_moe.ops.router_config import RouterConfig
from ort_moe.reference.routing_maps import routing_maps
from tests.device_arrays import DeviceArray, DeviceMaps, poisoned
from tests.op_models import assert_same_bits, run_op
from tests.router_cases import DTYPES, TEXTURES, RouterCase
from tests.shared_gate_cases import HIDDEN_TEXTURES, SharedGateCase, shared_gate_cases

pytestmark = pytest.mark.gpu

SCORINGS: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {"score": "softmax", "normalize": 1},
    "softmax": {"score": "softmax", "scale": 2.5},
    "sigmoid": {"score": "sigmoid", "normalize": 1, "normalize_eps": 1e-20},
    "sqrtsoftplus": {"score": "sqrtsoftplus", "normalize": 1},
}


def shifted(array: npt.NDArray[Any], elements: int) -> tuple[DeviceArray, int]:
    """The array in device memory behind so many elements, and its address."""
    held = DeviceArray(np.concatenate([np.zeros(elements, array.dtype), array.reshape(-1)]))
    return held, held.address + elements * array.itemsize


def check(case: SharedGateCase, *, with_maps: bool = False, shift: int = 0) -> None:
    """Weights, indices and maps over poison; hidden rows and gates may lie some elements off."""
    router = case.router
    rows, columns = math.prod(router.shape[:-1]), case.columns
    arrays = {n: DeviceArray(a) for n, a in case.feeds.items() if n not in ("hidden", "gate_weight")}
    (_hidden, hidden), (_gates, gate_weight) = shifted(case.hidden, shift), shifted(case.gate_weight, shift)
    weights, indices = poisoned((rows, columns), np.float32), poisoned((rows, columns), np.int32)
    config = RouterConfig.from_attributes(router.attributes)
    experts = router.experts + case.shared
    maps = DeviceMaps.poisoned(rows * columns, experts) if with_maps else None
    size = kernels.shared_gate_router_scratch_bytes(config, rows=rows, experts=router.experts, shared=case.shared)
    scratch = poisoned((max(size, 1),), np.uint8)
    kernels.shared_gate_router(
        config, rows=rows, experts=router.experts, hidden_size=case.hidden_size, shared=case.shared,
        dtype=router.onnx_type, hidden=hidden, gate_weight=gate_weight, weights=weights.address,
        indices=indices.address, shared_base=int(case.attributes["shared_base"]), shared_scale=case.scale,
        maps=maps.addresses if maps else None, scratch=scratch.address,
        **{name: array.address for name, array in arrays.items()},
    )  # fmt: skip
    expected_weights, expected_indices = (array.reshape(rows, columns) for array in case.emulate())
    assert_same_bits(indices.read(), expected_indices)
    assert_same_bits(weights.read(), expected_weights)
    if maps:
        for name, got, expected in zip(
            (tensor.name for tensor in ROUTING_MAPS), maps.read(), routing_maps(expected_indices, experts), strict=True
        ):
            np.testing.assert_array_equal(got, expected, err_msg=name)


def make_case(experts: int, tokens: int, hidden: int, shared: int = 1, **fields: Any) -> SharedGateCase:
    router: dict[str, Any] = {"k": min(experts, 10)} | fields.pop("given", SCORINGS["softmax of the chosen"])
    of_router = {name: fields.pop(name) for name in ("onnx_type", "seed", "has_selection_bias") if name in fields}
    logits = fields.pop("logits", "normal")
    case = RouterCase(FUSED_ROUTER.complete(router), (tokens, experts), texture=logits, **of_router)
    return SharedGateCase(case, hidden, shared, **fields)


@pytest.mark.parametrize("experts", [1, 8, 60, 128, 256, 257, 512, 1000, 2048])
def test_sizes(experts: int) -> None:
    """Every kernel of rows, beside gates of rows that are whole chunks and that are not."""
    n = experts
    for hidden in (1, 7, 8, 100, 1024, 1032, 2880, 4096):
        for onnx_type in DTYPES:
            case = make_case(
                experts, (1, 2, 5, 65)[n % 4], hidden, (1, 2, 3, 8)[n // 4 % 4],
                given=list(SCORINGS.values())[n // 2 % 4], onnx_type=onnx_type, seed=n, scale=(1.0, 0.5)[n % 2],
                has_selection_bias=n % 5 == 0, texture=HIDDEN_TEXTURES[n % 5], logits=TEXTURES[n % len(TEXTURES)],
            )  # fmt: skip
            check(case, with_maps=n % 3 == 0)
            n += 1


@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(shared_gate_cases())
def test_random_calls(case: SharedGateCase) -> None:
    check(case, with_maps=case.router.seed % 2 == 0)


@pytest.mark.parametrize("shared", [1, 2, 4, 5, 8])
def test_many_rows(shared: int) -> None:
    """From 512 warps on, a block takes several rows; from 4096 gates on, a warp several of a row."""
    for experts, hidden, onnx_type in ((60, 64, "float"), (512, 1024, "bfloat16"), (1000, 72, "float16")):
        check(make_case(experts, 1031, hidden, shared, onnx_type=onnx_type, scale=0.5), with_maps=shared == 2)


def test_every_run_has_the_same_bits() -> None:
    case = make_case(512, 65, 1032, 2, onnx_type="bfloat16")
    for _ in range(20):
        check(case, with_maps=True)


@pytest.mark.parametrize("onnx_type", DTYPES)
def test_unaligned_rows(onnx_type: str) -> None:
    """Addresses that no 16-byte access may touch."""
    for shift in (1, 2, 3):
        check(make_case(64, 9, 256, 2, onnx_type=onnx_type), shift=shift)


def test_no_rows() -> None:
    check(make_case(60, 0, 64, 2), with_maps=True)
    check(make_case(2048, 0, 64, 2))


def test_all_experts_chosen() -> None:
    for experts in (8, 32, 60):
        check(make_case(experts, 9, 64, given={"k": experts, "score": "softmax", "normalize": 1}), with_maps=True)


def test_few_of_each_path() -> None:
    """What the memory checkers run."""
    for n, (experts, hidden) in enumerate(((60, 64), (128, 7), (256, 1032), (512, 100), (1000, 1024), (1040, 9))):
        for onnx_type in DTYPES:
            for shared in (1, 8):
                given = list(SCORINGS.values())[n % 3]
                check(make_case(experts, 5, hidden, shared, given=given, onnx_type=onnx_type), with_maps=shared == 8)
    check(make_case(60, 520, 72, 8))


@pytest.mark.parametrize("onnx_type", DTYPES)
def test_session(onnx_type: str) -> None:
    for tokens in (0, 1, 20):
        case = make_case(128, tokens, 320, 2, onnx_type=onnx_type)
        names = ["weights", "indices", *(tensor.name for tensor in ROUTING_MAPS)]
        got = run_op(
            "SharedGateRouter", case.feeds, case.attributes, outputs=names, providers=["CUDAExecutionProvider"]
        )
        weights, indices = case.emulate()
        assert_same_bits(got["weights"], weights)
        assert_same_bits(got["indices"], indices)
        for name, expected in routing_maps(indices, 130)._asdict().items():
            np.testing.assert_array_equal(got[name], expected)
