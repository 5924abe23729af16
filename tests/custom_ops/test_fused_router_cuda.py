"""FusedRouter on CUDA against the emulation and the CPU kernel, bit for bit; by the launcher and through ORT."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import HealthCheck, given, settings

from ort_moe import kernels
from ort_moe.ops import FUSED_ROUTER
from ort_moe.ops.router_config import RouterConfig
from ort_moe.reference.fused_router import fused_router
from tests.device_arrays import DeviceArray, poisoned
from tests.op_models import op_session
from tests.router_cases import DTYPES, TEXTURES, RouterCase, router_cases
from tests.router_models import case_model, run_router

pytestmark = pytest.mark.gpu

Routed = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]

EXPERTS = (1, 3, 8, 33, 60, 64, 100, 128, 160, 256, 384, 512, 1000, 1024, 2048, 4096)
CHOSEN = (1, 2, 4, 6, 8, 10, 16, 17, 32, 33, 64)
TOKENS = (1, 2, 3, 33)

SCORINGS: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {"score": "softmax", "normalize": 1},
    "softmax": {"score": "softmax"},
    "softmax, divided": {"score": "softmax", "normalize": 1, "normalize_eps": 1e-20, "scale": 2.5},
    "softmax after top-k": {"score": "softmax", "score_after_topk": 1},
    "sigmoid": {"score": "sigmoid", "normalize": 1, "normalize_eps": 1e-20},
    "sigmoid after top-k": {"score": "sigmoid", "score_after_topk": 1, "bias_on": "logits"},
    "sqrtsoftplus": {"score": "sqrtsoftplus", "normalize": 1, "normalize_min": 1e-12},
    "none": {"score": "none", "normalize": 1, "normalize_min": -math.inf},
    "softcap": {"score": "softmax", "normalize": 1, "softcap": 30.0},
}


def launch(case: RouterCase, rows: int | None = None) -> Routed:
    """Weights and indices of the CUDA launcher, written over a poison; of so many rows, which repeat the case's."""
    given = case.logits if rows is None else case.logits[np.arange(rows) % len(case.logits)]
    rows = math.prod(given.shape[:-1])
    shape = (*given.shape[:-1], case.k)
    weights, indices = poisoned(shape, np.float32), poisoned(shape, np.int32)
    vectors = [None if v is None else DeviceArray(v) for v in (case.selection_bias, case.expert_scale)]
    logits = DeviceArray(given)
    kernels.fused_router(
        RouterConfig.from_attributes(case.attributes),
        rows=rows,
        experts=case.experts,
        dtype=case.onnx_type,
        logits=logits.address,
        weights=weights.address,
        indices=indices.address,
        selection_bias=None if vectors[0] is None else vectors[0].address,
        expert_scale=None if vectors[1] is None else vectors[1].address,
    )
    return weights.read(), indices.read()


def assert_same(case: RouterCase, got: Routed, want: Routed) -> None:
    """The same experts and the same bits; NaNs equal each other."""
    for name, g, w in (("indices", got[1], want[1]), ("weights", got[0], want[0])):
        assert g.shape == w.shape
        same = g.view(np.int32) == w.view(np.int32)
        if name == "weights":
            same |= np.isnan(g) & np.isnan(w)
        if not same.all():
            first = tuple(np.argwhere(~same)[0])
            raise AssertionError(f"{case}: {name}{list(map(int, first))} = {g[first]!r}, expected {w[first]!r}")


def check_launcher(case: RouterCase) -> None:
    assert_same(case, launch(case), case.emulate())


def make_case(experts: int, tokens: int, given: dict[str, Any], **fields: Any) -> RouterCase:
    return RouterCase(FUSED_ROUTER.complete(given), (tokens, experts), **fields)


# --- The launcher ---


@pytest.mark.parametrize("experts", EXPERTS)
def test_sizes_types_and_scores(experts: int) -> None:
    scorings = list(SCORINGS.values())
    textures = ("normal", "ties", "close", "wide")
    n = 0
    for k in sorted({*(k for k in CHOSEN if k <= experts), experts}):
        for onnx_type in DTYPES:
            scoring = scorings[(n + n // 9) % len(scorings)]  # each with each type
            fields = {"has_selection_bias": n % 5 == 4 and scoring["score"] != "none", "has_expert_scale": n % 7 == 6}
            case = make_case(
                experts,
                TOKENS[n % 4],
                {"k": k} | scoring,
                onnx_type=onnx_type,
                texture=textures[n // 9 % 4],
                seed=n,
                **fields,
            )
            check_launcher(case)
            n += 1


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("experts", [8, 128, 512])
def test_many_rows(experts: int, scoring: str) -> None:
    """From 512 rows on, a block takes several."""
    for tokens in (257, 513, 1031):
        check_launcher(make_case(experts, tokens, {"k": min(experts, 6)} | SCORINGS[scoring], onnx_type="bfloat16"))


def type_of(n: int) -> str:
    """Of the n-th of a test's cases, whose scorings, of which there are nine, come in turn."""
    return list(DTYPES)[(n + n // len(SCORINGS)) % len(DTYPES)]


def packed_case(experts: int, rows: int, k: int, seed: int = 0, **fields: Any) -> RouterCase:
    """A softmax of the chosen, whose half-precision logits and experts make one key each."""
    spelling = {"normalize": 1} if seed % 2 == 0 else {"score_after_topk": 1}
    given = {"k": k, "score": "softmax", **spelling, "scale": (1.0, 2.5, -1.0)[seed % 3]}
    return make_case(experts, rows, given, seed=seed, has_expert_scale=seed % 4 > 1, **fields)


@pytest.mark.parametrize("texture", TEXTURES)
@pytest.mark.parametrize("onnx_type", ["float16", "bfloat16"])
def test_packed_keys(onnx_type: str, texture: str) -> None:
    for experts in (16, 32, 40, 64, 72, 128, 136, 256, 264, 512):
        for n, k in enumerate((1, 2, 7, 8, 9, 16)):
            if k <= experts:
                case = packed_case(experts, (1, 5, 67)[n % 3], k, onnx_type=onnx_type, texture=texture, seed=n)
                check_launcher(case)
    for n, experts in enumerate((16, 40, 64)):  # many rows of few experts take fewer lanes each
        check_launcher(packed_case(experts, 2051, (1, 6, 8)[n], n, onnx_type=onnx_type, texture=texture))


def sigmoid_cases(texture: str) -> list[RouterCase]:
    """Routers whose sigmoids are estimated, most of them, and beside those some whose are not."""
    groups = {"num_groups": 8, "topk_groups": 4, "group_score_top": 2, "group_fill": 0.0}
    many_groups = {"num_groups": 16, "topk_groups": 9, "group_score_top": 2, "group_fill": 0.0}
    two_groups = {"num_groups": 2, "topk_groups": 1, "group_score_top": 1, "group_fill": -math.inf}
    sigmoid: dict[str, Any] = {"score": "sigmoid", "normalize": 1, "normalize_eps": 1e-20, "scale": 2.5}
    routers: list[tuple[int, int, dict[str, Any]]] = [
        (256, 8, groups), (256, 8, many_groups), (256, 6, two_groups), (192, 5, {"normalize": 0}), (144, 1, {}),
        (256, 16, {}), (384, 8, {}), (512, 10, {}), (512, 16, {}), (128, 8, {}), (512, 8, groups),
    ]  # fmt: skip
    return [
        make_case(
            experts, 37, {"k": k} | sigmoid | given, onnx_type=type_of(n), texture=texture, seed=n,
            has_selection_bias=n % 4 != 3, has_expert_scale=n % 2 == 1,
        )
        for n, (experts, k, given) in enumerate(routers)
    ]  # fmt: skip


@pytest.mark.parametrize("texture", TEXTURES)
def test_estimated_sigmoids(texture: str) -> None:
    """Rows one to a warp and, where there are thousands, several."""
    for n, case in enumerate(sigmoid_cases(texture)):
        check_launcher(case)
        repeated = np.arange(8501 + n % 2) % len(case.logits)
        weights, indices = case.emulate()
        assert_same(case, launch(case, len(repeated)), (weights[repeated], indices[repeated]))


@pytest.mark.parametrize("texture", TEXTURES)
def test_textures(texture: str) -> None:
    n = 0
    for experts, k in ((8, 2), (60, 4), (256, 8), (512, 10), (1024, 16), (160, 33), (2048, 8), (1000, 24)):
        for scoring in SCORINGS.values():
            onnx_type = type_of(n)
            bias = n % 2 == 1
            case = make_case(
                experts, 3, {"k": k} | scoring, onnx_type=onnx_type, texture=texture, seed=n, has_selection_bias=bias
            )
            check_launcher(case)
            n += 1


@pytest.mark.parametrize("fill", [-math.inf, 0.0])
@pytest.mark.parametrize(
    ("experts", "groups"),
    [(8, 4), (16, 8), (60, 5), (64, 2), (100, 10), (256, 8), (512, 8), (1024, 4), (1000, 8), (2304, 36)],
)
def test_groups(experts: int, groups: int, fill: float) -> None:
    size = experts // groups
    n = 0
    for top in sorted({1, 2, 3, size} & set(range(1, size + 1))):
        for kept in sorted({1, max(groups // 2, 1)}):
            for weights_from in ("scores", "selection"):
                for k in sorted({1, min(8, kept * size), min(20, kept * size)}):
                    given = {
                        "k": k, "score": ("sigmoid", "softmax", "none")[n % 3], "normalize": n % 2,
                        "num_groups": groups, "topk_groups": kept, "group_score_top": top, "group_fill": fill,
                        "weights_from": weights_from,
                    }  # fmt: skip
                    case = make_case(
                        experts, 3, given, onnx_type=list(DTYPES)[(n + n // 3) % 3],
                        texture=TEXTURES[n % len(TEXTURES)], seed=n, has_selection_bias=weights_from == "scores",
                    )  # fmt: skip
                    check_launcher(case)
                    n += 1


@pytest.mark.parametrize("experts", [2, 8, 16, 64, 600, 2048])
def test_sparse_mixer(experts: int) -> None:
    for n, texture in enumerate(TEXTURES):
        for threshold in (0.0, 0.02, 10.0):
            given = {"k": 2, "score": "sparse_mixer", "mixer_threshold": threshold, "normalize": n % 2}
            check_launcher(make_case(experts, 5, given, onnx_type=list(DTYPES)[n % 3], texture=texture, seed=n))


@settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(router_cases())
def test_random_configurations(case: RouterCase) -> None:
    check_launcher(case)


def test_few_of_each_path() -> None:
    """One case of each kernel and scoring: what the memory checkers run."""
    for experts, k in ((8, 2), (7, 3), (64, 6), (512, 10), (1024, 16), (2048, 40), (700, 700)):
        for n, scoring in enumerate(SCORINGS.values()):
            check_launcher(
                make_case(experts, 3, {"k": k} | scoring, onnx_type=type_of(n + experts), texture="ties", seed=n)
            )
    for experts, groups in ((256, 8), (60, 5), (2304, 36)):
        given = {"k": 4, "score": "sigmoid", "num_groups": groups, "topk_groups": 2, "group_score_top": 3}
        check_launcher(make_case(experts, 3, given | {"group_fill": 0.0}, has_selection_bias=True))
    given = {"k": 2, "score": "sparse_mixer", "mixer_threshold": 0.1}
    for experts in (16, 1500):
        check_launcher(make_case(experts, 3, given))
    for experts, rows, k in ((40, 35, 3), (40, 2051, 3), (128, 35, 8), (256, 35, 8), (512, 35, 10)):
        for texture in ("ties", "nan", "constant"):
            check_launcher(packed_case(experts, rows, k, onnx_type="bfloat16", texture=texture))
    for texture in ("normal", "ties", "nan"):
        for case in sigmoid_cases(texture)[:8]:
            check_launcher(case)


def test_unaligned_rows() -> None:
    """Logits that no 16-byte load may touch."""
    case = make_case(64, 3, {"k": 6, "score": "softmax", "normalize": 1}, onnx_type="bfloat16")
    shifted = DeviceArray(np.concatenate([case.logits.reshape(-1)[:1], case.logits.reshape(-1)]))
    weights, indices = poisoned((3, 6), np.float32), poisoned((3, 6), np.int32)
    kernels.fused_router(
        RouterConfig.from_attributes(case.attributes), rows=3, experts=64, dtype="bfloat16",
        logits=shifted.address + 2, weights=weights.address, indices=indices.address,
    )  # fmt: skip
    assert_same(case, (weights.read(), indices.read()), case.emulate())


def test_more_than_two_billion_logits() -> None:
    """Rows of packed keys and of the other kernel, the last of them beyond what 32 bits count."""
    for experts, k in ((512, 10), (4096, 8)):
        rows = 2**31 // experts + 2
        tail = packed_case(experts, 3, k, onnx_type="bfloat16")
        logits = np.zeros((rows, experts), np.uint16)
        logits[-3:] = tail.logits.view(np.uint16)
        everything = DeviceArray(logits)
        weights, indices = poisoned((rows, k), np.float32), poisoned((rows, k), np.int32)
        kernels.fused_router(
            RouterConfig.from_attributes(tail.attributes), rows=rows, experts=experts, dtype="bfloat16",
            logits=everything.address, weights=weights.address, indices=indices.address,
        )  # fmt: skip
        assert_same(tail, (weights.read()[-3:], indices.read()[-3:]), tail.emulate())


def test_refuses_what_does_not_fit() -> None:
    logits = DeviceArray(np.zeros(1 << 16, np.float32)).address
    buffers = {"logits": logits, "weights": logits, "indices": logits, "dtype": "float", "rows": 1}
    config = RouterConfig.from_attributes({"k": 64, "score": "softmax"})
    with pytest.raises(RuntimeError, match="65536 experts need more shared memory than a block of this device has"):
        kernels.fused_router(config, experts=1 << 16, **buffers)
    with pytest.raises(RuntimeError, match="'k' must be at most the number of experts, 8, but is 64"):
        kernels.fused_router(config, experts=8, **buffers)


# --- Through ONNX Runtime ---

ORT_CASES = [
    make_case(8, 1, {"k": 2, "score": "softmax", "normalize": 1}, onnx_type="float16"),
    make_case(64, 4, {"k": 6, "score": "softmax"}, onnx_type="bfloat16"),
    make_case(512, 1, {"k": 10, "score": "softmax", "normalize": 1}, onnx_type="bfloat16"),
    make_case(512, 33, {"k": 10, "score": "softmax", "normalize": 1}),
    make_case(
        256, 2,
        {"k": 8, "score": "sigmoid", "normalize": 1, "normalize_eps": 1e-20, "scale": 2.5, "num_groups": 8,
         "topk_groups": 4, "group_score_top": 2, "group_fill": 0.0},
        has_selection_bias=True, has_expert_scale=True,
    ),
    make_case(2048, 3, {"k": 40, "score": "sqrtsoftplus"}, onnx_type="float16"),
]  # fmt: skip
ORT_IDS = [f"{case.experts}-{case.k}-{case.onnx_type}" for case in ORT_CASES]


def cuda_session(case: RouterCase, *, graph: bool) -> Any:
    session = op_session(
        case_model(case),
        [("CUDAExecutionProvider", {"enable_cuda_graph": "1" if graph else "0"})],  # type: ignore[list-item]
    )
    assert session.get_providers()[0] == "CUDAExecutionProvider"
    return session


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("case", ORT_CASES, ids=ORT_IDS)
def test_session_agrees_with_cpu_and_emulation(case: RouterCase, graph: bool) -> None:
    """Fixed buffers and new logits at every run, so that a graph's replays are seen to read them."""
    session = cuda_session(case, graph=graph)
    cpu_session = op_session(case_model(case))
    logits = DeviceArray(case.logits)
    shape = (*case.shape[:-1], case.k)
    outputs = {"weights": poisoned(shape, np.float32), "indices": poisoned(shape, np.int32)}
    binding = session.io_binding()
    tensor_type = onnx.TensorProto.DataType
    binding.bind_input("logits", "cuda", 0, tensor_type.Value(case.onnx_type.upper()), case.shape, logits.address)
    for name, element_type in (("weights", tensor_type.FLOAT), ("indices", tensor_type.INT32)):
        binding.bind_output(name, "cuda", 0, element_type, shape, outputs[name].address)
    for seed, texture in enumerate(("normal", "ties", "nan", "wide")):
        fresh = make_case(
            case.experts, case.shape[0], case.attributes, onnx_type=case.onnx_type, texture=texture, seed=seed
        ).logits
        logits.write(fresh)
        session.run_with_iobinding(binding)
        got = outputs["weights"].read(), outputs["indices"].read()
        assert_same(case, got, fused_router(fresh, case.selection_bias, case.expert_scale, **case.attributes))
        assert_same(case, got, run_router(cpu_session, fresh))


def test_session_without_tokens() -> None:
    case = make_case(64, 0, {"k": 6, "score": "softmax"})
    weights, indices = run_router(cuda_session(case, graph=False), case.logits)
    assert weights.shape == indices.shape == (0, 6)
