"""FinalizeRouting on CUDA against the emulation, bit for bit; and that it waits for the router before it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from ort_moe import kernels
from ort_moe.ops import FUSED_ROUTER
from ort_moe.ops.router_config import RouterConfig
from ort_moe.reference.finalize_routing import finalize_routing
from ort_moe.reference.routing_maps import routing_maps
from tests.device_arrays import DeviceArray, DeviceMaps, poisoned
from tests.finalize_cases import CHOICES, FinalizeCase, finalize_cases
from tests.op_models import assert_same_bits, run_op
from tests.router_cases import DTYPES, RouterCase

pytestmark = pytest.mark.gpu


def launch(case: FinalizeCase, *, routing_settled: bool = False, in_place: bool = False) -> Any:
    """y of the launcher, written over poison or over the residual."""
    arrays = {name: DeviceArray(array) for name, array in case.feeds.items()}
    y = arrays["residual"] if in_place else poisoned((*case.leading, case.hidden), DTYPES[case.onnx_type])
    kernels.finalize_routing(
        tokens=math.prod(case.leading),
        hidden=case.hidden,
        k=case.k,
        dtype=case.onnx_type,
        experts=case.experts,
        y=y.address,
        routing_settled=routing_settled,
        **{name: array.address for name, array in arrays.items()},
    )
    return y.read()


def check(case: FinalizeCase, **how: bool) -> None:
    assert_same_bits(launch(case, **how), finalize_routing(**case.feeds))


@pytest.mark.parametrize("hidden", [1, 7, 8, 12, 64, 1000, 2560, 2880, 4096, 5120, 7168])
def test_sizes(hidden: int) -> None:
    n = hidden
    for k in (1, 2, 3, 4, 6, 8, 10, 12, 16, 22, 24, 25, 40):
        for onnx_type in DTYPES:
            tokens = (1, 3, 2, 5)[n % 4] if hidden > 1000 else (1, 3, 33, 70)[n % 4]
            case = FinalizeCase(
                (tokens,), k, hidden, 9, onnx_type, CHOICES[n % len(CHOICES)], special=n % 2 == 1,
                has_bias=n // 2 % 3 == 0, has_residual=n // 3 % 2 == 0, seed=n,
            )  # fmt: skip
            check(case, routing_settled=n % 5 == 0, in_place=case.has_residual and n % 7 == 0)
            n += 1


@settings(max_examples=200, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(finalize_cases())
def test_random_calls(case: FinalizeCase) -> None:
    check(case)


def test_many_tokens() -> None:
    """More than a grid has rows."""
    check(FinalizeCase((66000,), 2, 16, 4, "bfloat16", has_residual=True))
    check(FinalizeCase((700,), 8, 1024, 60, "float16", "outside", has_bias=True))


def test_unaligned_rows() -> None:
    """Addresses that no 16-byte access may touch."""
    case = FinalizeCase((3,), 4, 64, 6, "float16")
    feeds = case.feeds
    rows = DeviceArray(np.concatenate([np.zeros(1, np.float16), feeds["expert_output"].reshape(-1)]))
    arrays = {name: DeviceArray(array) for name, array in feeds.items() if name != "expert_output"}
    y = poisoned((3, 64), np.float16)
    kernels.finalize_routing(
        tokens=3, hidden=64, k=4, dtype="float16", expert_output=rows.address + 2, y=y.address,
        **{name: array.address for name, array in arrays.items()},
    )  # fmt: skip
    assert_same_bits(y.read(), finalize_routing(**feeds))


def test_few_of_each_path() -> None:
    """What the memory checkers run."""
    for n, (hidden, k) in enumerate(((7, 3), (64, 2), (72, 8), (256, 10), (520, 22))):
        for onnx_type in DTYPES:
            for bias in (False, True):
                check(
                    FinalizeCase((5,), k, hidden, 9, onnx_type, CHOICES[n % 5], has_bias=bias, has_residual=n % 2 == 0)
                )


@pytest.mark.parametrize("onnx_type", DTYPES)
def test_session(onnx_type: str) -> None:
    for tokens in (0, 1, 20):
        case = FinalizeCase((tokens, 1), 6, 320, 8, onnx_type, "outside", has_bias=True, has_residual=True)
        got = run_op("FinalizeRouting", case.feeds, {}, providers=["CUDAExecutionProvider"])["y"]
        assert_same_bits(got, finalize_routing(**case.feeds))


# --- Behind a router that is still running ---


class SlowChain:
    """A router that takes some microseconds after it has let its successor start, and a finalize behind it.

    Half of the router's logits are equal and the best, so that its fast selection gives way to a round per choice.
    """

    TOKENS, EXPERTS, K, HIDDEN = 8, 1024, 32, 64

    def __init__(self, launches: int) -> None:
        rng = np.random.default_rng(0)
        config = {"k": self.K, "score": "softmax", "normalize": 1}
        self.config = RouterConfig.from_attributes(FUSED_ROUTER.complete(config))
        self.rows = rng.normal(0.0, 1.0, (self.TOKENS * self.K, self.HIDDEN)).astype(np.float32)
        self.logits = [rng.permuted(np.arange(self.EXPERTS * self.TOKENS) % 2).reshape(self.TOKENS, -1) for _ in "ab"]
        self.logits = [logits.astype(np.float32) for logits in self.logits]
        self.expected = list(self._expect())
        self.device_rows = DeviceArray(self.rows)
        self.device_logits = [DeviceArray(logits) for logits in self.logits]
        self.weights, self.other_weights = (poisoned((self.TOKENS, self.K), np.float32) for _ in range(2))
        self.indices, self.other_indices = (poisoned((self.TOKENS, self.K), np.int32) for _ in range(2))
        self.maps = DeviceMaps.poisoned(self.TOKENS * self.K, self.EXPERTS)
        self.y = [poisoned((self.TOKENS, self.HIDDEN), np.float32) for _ in range(launches)]

    def _expect(self) -> Iterator[Any]:
        for logits in self.logits:
            case = RouterCase(FUSED_ROUTER.complete({"k": self.K, "score": "softmax", "normalize": 1}), logits.shape)
            case.__dict__["logits"] = logits
            weights, indices = case.emulate()
            permuted = routing_maps(indices, self.EXPERTS).unpermuted_to_permuted
            yield finalize_routing(self.rows, weights, indices, permuted)

    def _route(self, which: int, weights: DeviceArray, indices: DeviceArray, *, with_maps: bool) -> None:
        kernels.fused_router(
            self.config, rows=self.TOKENS, experts=self.EXPERTS, dtype="float",
            logits=self.device_logits[which].address, weights=weights.address, indices=indices.address,
            maps=self.maps.addresses if with_maps else None,
        )  # fmt: skip

    def run(self, *, routing_settled: bool, kernel_between: bool) -> list[bool]:
        """Whether each finalize of alternating routers gave what its own router said."""
        for n, y in enumerate(self.y):
            self._route(n % 2, self.weights, self.indices, with_maps=True)
            if kernel_between:
                self._route(n % 2, self.other_weights, self.other_indices, with_maps=False)
            kernels.finalize_routing(
                tokens=self.TOKENS, hidden=self.HIDDEN, k=self.K, dtype="float",
                expert_output=self.device_rows.address, weights=self.weights.address, indices=self.indices.address,
                unpermuted_to_permuted=self.maps.addresses.unpermuted_to_permuted, y=y.address,
                routing_settled=routing_settled,
            )  # fmt: skip
        return [np.array_equal(y.read(), self.expected[n % 2]) for n, y in enumerate(self.y)]


def test_no_stale_routing_is_read() -> None:
    chain = SlowChain(launches=60)
    assert not np.array_equal(*chain.expected)
    assert all(chain.run(routing_settled=False, kernel_between=False))
    assert all(chain.run(routing_settled=True, kernel_between=True))


def test_the_chain_would_show_stale_routing() -> None:
    """Where kernels overlap, a false promise that the routing is settled is seen."""
    if not overlaps():
        pytest.skip("this device, or ORT_MOE_PDL=0, keeps kernels apart")
    assert not all(SlowChain(launches=60).run(routing_settled=True, kernel_between=False))


def overlaps() -> bool:
    """Whether programmatic dependent launch is there and on."""
    import os
    import subprocess

    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    capability = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return float(capability) >= 9.0 and os.environ.get("ORT_MOE_PDL") != "0"
