"""Router with maps, experts and finalize behind each other on one CUDA stream: same bits in a graph, with every switch,
and behind kernels that keep the router waiting.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from ort_moe import kernels
from ort_moe.ops import FUSED_ROUTER
from ort_moe.ops.experts_config import ExpertsConfig
from ort_moe.ops.router_config import RouterConfig
from tests.chain_models import Array, Chain
from tests.custom_ops.test_routing_maps_cuda import route, softmax_case
from tests.device_arrays import DeviceArray, DeviceMaps, poisoned
from tests.experts_cases import ExpertsCase, bit_cases
from tests.experts_launcher import launch
from tests.finalize_cases import FinalizeCase
from tests.op_models import assert_same_bits, element_type, op_model, op_session, run_op, run_session
from tests.router_cases import DTYPES

pytestmark = pytest.mark.gpu

SWITCHES = ("ORT_MOE_PDL", "ORT_MOE_FC1_PDL", "ORT_MOE_FUSED_ROUTE")


# --- Sessions ---


def chains() -> Iterator[Chain]:
    for onnx_type in DTYPES:
        for weight_format in ("dense", "nvfp4"):
            for tokens in (1, 4, 40):
                yield Chain(ExpertsCase((tokens,), 24, 6, 128, 64, onnx_type, weight_format, has_bias=True))
    for weight_format in ("dense", "nvfp4"):  # of real width, whose reductions several warps share
        for tokens in (1, 4):
            yield Chain(ExpertsCase((tokens,), 12, 3, 2560, 640, "bfloat16", weight_format))


def run_chain(chain: Chain, *, graph: bool, runs: int = 3) -> list[dict[str, Array]]:
    """All outputs of some runs of one session on fixed buffers, with other inputs in each."""
    model = chain.model()
    session = op_session(model, [("CUDAExecutionProvider", {"enable_cuda_graph": "1" if graph else "0"})])  # type: ignore[list-item]
    arrays = {name: DeviceArray(value) for name, value in (chain.constants | chain.inputs(0)).items()}
    x0 = arrays["x0"]
    outputs = {name: poisoned(x0.shape, x0.dtype) for name in chain.outputs()}
    binding = session.io_binding()
    for bind, bound in ((binding.bind_input, arrays), (binding.bind_output, outputs)):
        for name, array in bound.items():
            bind(name, "cuda", 0, element_type(np.dtype(array.dtype)), array.shape, array.address)
    results = []
    for seed in range(runs):
        for name, value in chain.inputs(seed).items():
            arrays[name].write(value)
        session.run_with_iobinding(binding)
        results.append({name: array.read().copy() for name, array in outputs.items()})
    return results


def chain_name(chain: Chain) -> str:
    return f"{chain.case.leading[0]}-{chain.case.onnx_type}-{chain.case.weight_format}-{chain.case.hidden}"


@pytest.mark.parametrize("chain", list(chains()), ids=chain_name)
def test_a_graphs_replays_have_the_bits_of_plain_runs(chain: Chain) -> None:
    plain, replayed = run_chain(chain, graph=False), run_chain(chain, graph=True)
    for one, other in zip(plain, replayed, strict=True):
        for name in one:
            assert_same_bits(other[name], one[name])


@pytest.mark.parametrize("chain", list(chains()), ids=chain_name)
def test_cpu_and_cuda_route_and_finalize_alike(chain: Chain) -> None:
    """z0 follows from the inputs by ops whose bits are promised; the experts' are close."""
    (cuda,) = run_chain(chain, graph=False, runs=1)
    cpu = run_session(op_session(chain.model()), chain.constants | chain.inputs(0))
    assert_same_bits(cuda["z0"], cpu["z0"])
    got, expected = cuda["x1"].astype(np.float64), cpu["x1"].astype(np.float64)
    assert np.linalg.norm(got - expected) < 1e-2 * np.linalg.norm(expected)


# --- With the switches ---


def digests() -> dict[str, str]:
    """Of the outputs of many calls, by what they are."""

    def of(arrays: Iterable[Array]) -> str:
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()

    result = {}
    for chain in chains():
        outputs = run_chain(chain, graph=True)
        result[f"chain {chain.case}"] = of(array for each in outputs for array in each.values())
    for case in bit_cases():
        result[f"experts {case}"] = of([launch(case)])
    for tokens, experts, k in ((1, 512, 10), (4, 512, 10), (33, 128, 8), (64, 256, 8), (257, 60, 4)):
        router = softmax_case(experts, tokens, k, onnx_type="bfloat16", texture="ties")
        weights, indices, maps = route(router)
        assert maps is not None
        result[f"maps {router}"] = of([weights, indices, *maps])
    for weight_format in ("dense", "nvfp4"):
        result[f"late router, {weight_format}"] = of(DelayedChain(2, weight_format).run(launches=4, poison=True))
    return result


def test_switches_change_no_bit() -> None:
    """Each switch off, and all: they are read once, so each setting runs in a process of its own."""
    script = f"import json; from {__name__} import digests; print(json.dumps(digests()))"
    if "torch" in sys.modules:  # whose CUDA libraries ONNX Runtime then finds
        script = f"import torch; {script}"
    settings = [*((switch,) for switch in SWITCHES), SWITCHES]
    others = [
        subprocess.Popen(
            [sys.executable, "-c", script], env=os.environ | dict.fromkeys(off, "0"), stdout=subprocess.PIPE, text=True
        )
        for off in settings
    ]
    try:
        expected = digests()  # while they run
        for off, other in zip(settings, others, strict=True):
            output, _ = other.communicate()
            assert other.returncode == 0
            got = json.loads(output.splitlines()[-1])
            assert {name: got[name] for name in expected if got[name] != expected[name]} == {}, f"{off} off"
    finally:
        for other in others:
            other.kill()
            other.wait()


# --- Behind a router that is late ---


class Delay:
    """A launch that keeps the stream busy for some hundred microseconds, so that what follows is queued behind it."""

    TOKENS, K, HIDDEN = 20000, 64, 512

    def __init__(self) -> None:
        self.rows = DeviceArray(np.zeros((16, self.HIDDEN), np.float16))
        self.weights = DeviceArray(np.zeros((self.TOKENS, self.K), np.float32))
        self.indices = DeviceArray(np.zeros((self.TOKENS, self.K), np.int32))
        self.permuted = DeviceArray(np.arange(self.TOKENS * self.K, dtype=np.int32) % 16)
        self.y = poisoned((self.TOKENS, self.HIDDEN), np.float16)

    def launch(self) -> None:
        kernels.finalize_routing(
            tokens=self.TOKENS, hidden=self.HIDDEN, k=self.K, dtype="float16", expert_output=self.rows.address,
            weights=self.weights.address, indices=self.indices.address, unpermuted_to_permuted=self.permuted.address,
            y=self.y.address,
        )  # fmt: skip


class DelayedChain:
    """A router that is late, and experts that take its choices and maps.

    The router waits for a long kernel before it, and then takes some microseconds after it has let its successor start:
    half of its logits are equal and the best, so that its fast selection gives way to a round per choice. Its outputs
    hold poison, or what the router before it wrote.
    """

    EXPERTS, K, HIDDEN, INNER = 1024, 32, 64, 64

    def __init__(self, tokens: int, weight_format: str, onnx_type: str = "float16") -> None:
        rng = np.random.default_rng(0)
        self.tokens, self.onnx_type = tokens, onnx_type
        self.case = ExpertsCase((tokens,), self.EXPERTS, self.K, self.HIDDEN, self.INNER, onnx_type, weight_format)
        self.router = RouterConfig.from_attributes(
            FUSED_ROUTER.complete({"k": self.K, "score": "softmax", "normalize": 1})
        )
        self.experts = ExpertsConfig.from_attributes(self.case.all_attributes)
        self.logits = []
        for _ in range(2):
            values = rng.permuted(np.arange(self.EXPERTS * tokens) % 2).reshape(tokens, -1)
            self.logits.append(DeviceArray(values.astype(np.float32)))
        self.values = {name: DeviceArray(array) for name, array in self.case.feeds.items()}
        self.weights = poisoned((tokens, self.K), np.float32)
        self.indices = poisoned((tokens, self.K), np.int32)
        self.maps = DeviceMaps.poisoned(tokens * self.K, self.EXPERTS)
        self.sizes: dict[str, Any] = {
            "tokens": tokens, "hidden": self.HIDDEN, "inner": self.INNER, "experts": self.EXPERTS, "k": self.K,
            "dtype": onnx_type,
        }  # fmt: skip
        size = kernels.fused_experts_scratch_bytes(self.experts, **self.sizes)
        self.scratch = poisoned((max(size, 256),), np.uint8)
        size = kernels.router_scratch_bytes(self.router, rows=tokens, experts=self.EXPERTS)
        self.router_scratch = poisoned((max(size, 256),), np.uint8)
        self.delay = Delay()

    def route(self, which: int) -> None:
        kernels.fused_router(
            self.router, rows=self.tokens, experts=self.EXPERTS, dtype="float", logits=self.logits[which].address,
            weights=self.weights.address, indices=self.indices.address, maps=self.maps.addresses,
            scratch=self.router_scratch.address,
        )  # fmt: skip

    def run_experts(self, y: DeviceArray, *, with_maps: bool) -> None:
        fc1, fc2 = (
            kernels.ExpertLayer(
                **{
                    part: self.values[f"{layer}_{part}"].address
                    for part in ("weights", "scales", "global_scale")
                    if f"{layer}_{part}" in self.values
                }
            )
            for layer in ("fc1", "fc2")
        )
        kernels.fused_experts(
            self.experts, **self.sizes, x=self.values["x"].address, weights=self.weights.address,
            indices=self.indices.address, fc1=fc1, fc2=fc2, maps=self.maps.addresses if with_maps else None,
            y=y.address, scratch=self.scratch.address,
        )  # fmt: skip

    def poison(self) -> None:
        for array in (self.weights, self.indices, *self.maps.arrays):
            array.write(poisoned_like(array))

    def run(self, *, launches: int, poison: bool, with_maps: bool = True) -> list[Array]:
        """y of each of `launches` chains of alternating routers, one after the other without a pause.

        With poison each finds poison in the routing data, and a pause in which it was written.
        """
        ys = [poisoned((self.tokens, self.HIDDEN), DTYPES[self.onnx_type]) for _ in range(launches)]
        for n, y in enumerate(ys):
            if poison:
                self.poison()
            self.delay.launch()
            self.route(n % 2)
            self.run_experts(y, with_maps=with_maps)
        return [y.read().copy() for y in ys]

    def expected(self, which: int) -> Array:
        """y with the host's wait between router and experts."""
        y = poisoned((self.tokens, self.HIDDEN), DTYPES[self.onnx_type])
        self.poison()
        self.route(which)
        self.indices.read()
        self.run_experts(y, with_maps=True)
        return y.read().copy()


def poisoned_like(array: DeviceArray) -> Array:
    size = int(np.prod(array.shape)) * np.dtype(array.dtype).itemsize
    return np.full(size, 0xC2, np.uint8).view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize("weight_format", ["dense", "nvfp4"])
@pytest.mark.parametrize(("tokens", "onnx_type"), [(1, "float16"), (4, "float16"), (32, "float16"), (4, "float")])
def test_experts_read_no_stale_routing(tokens: int, onnx_type: str, weight_format: str) -> None:
    """Few and many choices, with the router's maps and without."""
    chain = DelayedChain(tokens, weight_format, onnx_type)
    expected = [chain.expected(which) for which in range(2)]
    assert not np.array_equal(*expected)
    for with_maps in (False, True):
        for poison, launches in ((True, 6), (False, 40)):
            for n, y in enumerate(chain.run(launches=launches, poison=poison, with_maps=with_maps)):
                assert_same_bits(y, expected[n % 2])


def test_sessions_behind_each_other_read_no_stale_routing() -> None:
    """The same within a graph: many layers, each of whose routers is slow, against one layer at a time."""
    case = ExpertsCase((2,), 1024, 32, 64, 64, "float16", "nvfp4")
    chain = Chain(case, layers=12)
    logits = np.random.default_rng(3).permuted(np.arange(2 * 1024) % 2).reshape(2, 1024).astype(np.float16)
    slow = {f"logits{n}": np.roll(logits, n, axis=1) for n in range(chain.layers)}
    chain.__dict__["inputs"] = lambda seed: Chain.inputs(chain, seed) | slow
    (replayed,) = run_chain(chain, graph=True, runs=1)
    one = Chain(case, layers=1)
    session = op_session(one.model(), ["CUDAExecutionProvider"])
    x = chain.inputs(0)["x0"]
    for n in range(chain.layers):
        got = run_session(session, one.constants | {"x0": x, "logits0": slow[f"logits{n}"]})
        assert_same_bits(replayed[f"z{n}"], got["z0"])
        assert_same_bits(replayed[f"x{n + 1}"], got["x1"])
        x = got["x1"]


# --- Refusals on this provider ---

DENSE = ExpertsCase((5,), 4, 2, 32, 16, "float16", has_bias=True, has_residual=True, has_maps=True)
NVFP4 = ExpertsCase((5,), 4, 2, 32, 16, "float16", "nvfp4", has_bias=True)


@pytest.mark.parametrize(
    ("case", "changed", "message"),
    [
        (NVFP4, {"fc1_weights": np.zeros((4, 32, 32), np.uint8)}, r"'fc1_weights' must have shape \[4, 32, 16\]"),
        (NVFP4, {"fc1_weights": DENSE.feeds["fc1_weights"]}, "'fc1_weights' must have type uint8"),
        (NVFP4, {"fc2_scales": None}, "'fc2_scales' must be given with weight_format = nvfp4, but is left out"),
        (NVFP4, {"x": np.zeros((5, 24), np.float16)}, "'x', H, must be a multiple of 16"),
        (NVFP4, {"fc1_weights": np.zeros((4, 48, 16), np.uint8)}, "'fc1_weights', I, must be"),
        (DENSE, {"fc1_weights": np.zeros((4, 0, 32), np.float16)}, "'fc1_weights', I, must be at least 1, but is 0"),
        (DENSE, {"fc2_bias": DENSE.feeds["fc2_bias"].astype(np.float32)}, "'fc2_bias' must have type float16"),
        (DENSE, {"permuted_to_expert": None}, "'permuted_to_expert' must be there, as the other routing maps are"),
    ],
)
def test_experts_refuse_what_does_not_fit(case: ExpertsCase, changed: dict[str, Any], message: str) -> None:
    feeds = {name: array for name, array in (case.feeds | changed).items() if array is not None}
    with pytest.raises(Exception, match=f"FusedExperts node 'node': .*{message}"):
        run_op("FusedExperts", feeds, case.all_attributes, symbolic=True, providers=["CUDAExecutionProvider"])


def test_a_session_survives_a_refused_run() -> None:
    for case in (DENSE, NVFP4):
        session = op_session(
            op_model("FusedExperts", case.feeds, case.all_attributes, symbolic=True), ["CUDAExecutionProvider"]
        )
        before = run_session(session, case.feeds)["y"]
        with pytest.raises(Exception, match="'indices' must have shape"):
            run_session(session, case.feeds | {"weights": np.zeros((5, 3), np.float32)})
        assert_same_bits(run_session(session, case.feeds)["y"], before)


def test_scratch_that_cannot_be_had_is_an_error() -> None:
    """Inputs and result fit into what the provider may take, the experts' rows do not; smaller runs still do."""
    case = ExpertsCase((3000,), 4, 8, 512, 256, "float16")
    limited = {"gpu_mem_limit": str(24 << 20), "arena_extend_strategy": "kSameAsRequested"}
    model = op_model("FusedExperts", case.feeds, case.all_attributes, symbolic=True)
    session = op_session(model, [("CUDAExecutionProvider", limited)])  # type: ignore[list-item]
    session.disable_fallback()  # to the CPU, where memory is enough
    with pytest.raises(Exception, match=r"(?s)FusedExperts node 'node': .*memory"):
        run_session(session, case.feeds)
    few = dataclasses.replace(case, leading=(2,))
    few.feeds.update({name: array for name, array in case.feeds.items() if name.startswith("fc")})
    few.check(run_session(session, few.feeds)["y"])


def test_finalize_refuses_what_does_not_fit() -> None:
    case = FinalizeCase((5,), 2, 16, 4, "float16", has_bias=True)
    for changed, message in (
        ({"expert_output": np.zeros((9, 16), np.float16)}, r"'expert_output' must have shape \[10, 16\]"),
        ({"bias": np.zeros((4, 16), np.float32)}, "'bias' must have type float16"),
    ):
        with pytest.raises(Exception, match=f"FinalizeRouting node 'node': input {message}"):
            run_op("FinalizeRouting", case.feeds | changed, {}, providers=["CUDAExecutionProvider"])


def test_indices_out_of_range_contribute_nothing() -> None:
    """Few choices and many, the largest and the smallest integers among them: nothing outside the weights is read."""
    for weight_format in ("dense", "nvfp4"):
        for onnx_type in DTYPES:
            for tokens in (1, 40, 80):
                case = ExpertsCase((tokens,), 4, 2, 64, 64, onnx_type, weight_format, has_residual=True)
                case.feeds["indices"][:, 1] = np.resize([-1, 4, 2**31 - 1, -(2**31)], tokens)
                got = run_op("FusedExperts", case.feeds, case.all_attributes, providers=["CUDAExecutionProvider"])["y"]
                case.check(got)
                case.feeds["indices"][:] = -(2**31)
                got = run_op("FusedExperts", case.feeds, case.all_attributes, providers=["CUDAExecutionProvider"])["y"]
                assert_same_bits(got, case.feeds["residual"])
