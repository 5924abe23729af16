"""PermuteTokens on CUDA: the reference's rows and maps, in one launch and in several."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings

from ort_moe import kernels
from tests.device_arrays import DeviceArray, DeviceMaps, poisoned
from tests.op_models import Array, op_model, op_session, run_op
from tests.permute_cases import CHOICES, OUTPUTS, PermuteCase, permute_cases
from tests.router_cases import DTYPES

pytestmark = pytest.mark.gpu


def launch(case: PermuteCase, *, shift: int = 0) -> dict[str, Array]:
    """The outputs of the launcher, written over poison; x is `shift` elements off its alignment."""
    tokens, dtype = math.prod(case.leading), DTYPES[case.onnx_type]
    flat = np.concatenate([np.zeros(shift, dtype), case.feeds["x"].reshape(-1)])
    x, indices = DeviceArray(flat), DeviceArray(case.feeds["indices"])
    rows = poisoned((tokens * case.k, case.hidden), dtype)
    maps = DeviceMaps.poisoned(tokens * case.k, case.experts)
    sizes = {"tokens": tokens, "hidden": case.hidden, "k": case.k, "experts": case.experts}
    scratch = poisoned((max(1, kernels.permute_tokens_scratch_bytes(**sizes)),), np.uint8)
    kernels.permute_tokens(
        **sizes,
        dtype=case.onnx_type,
        x=x.address + shift * dtype.itemsize,
        indices=indices.address,
        permuted_x=rows.address,
        maps=maps.addresses,
        scratch=scratch.address,
    )
    return dict(zip(OUTPUTS, (rows.read(), *maps.read()), strict=True))


def check(case: PermuteCase, *, shift: int = 0) -> None:
    case.check(launch(case, shift=shift))


@pytest.mark.parametrize("hidden", [1, 7, 8, 12, 64, 1000, 2560, 2882, 7168])
def test_sizes(hidden: int) -> None:
    n = hidden
    for k in (1, 2, 6, 8, 10, 22, 40):
        for onnx_type in DTYPES:
            tokens = (1, 2, 5, 26, 102, 103, 130, 300)[n % 8] if hidden < 1000 else (1, 3, 2, 30)[n % 4]
            experts = (1, 9, 60, 512, 1000)[n % 5]
            check(PermuteCase((tokens,), k, hidden, experts, onnx_type, CHOICES[n % 4], seed=n))
            n += 1


@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(permute_cases())
def test_random_calls(case: PermuteCase) -> None:
    check(case)


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize(
    ("tokens", "k", "experts"),
    [(4096, 8, 256), (4097, 8, 256), (33000, 1, 512), (70000, 2, 8), (16, 600, 600), (40, 10, 9000), (700, 70, 70)],
)
def test_on_both_sides_of_one_launch(tokens: int, k: int, experts: int, choices: str) -> None:
    for hidden, onnx_type in ((16, "bfloat16"), (5, "float16")):
        check(PermuteCase((tokens,), k, hidden, experts, onnx_type, choices, seed=tokens))


def test_unaligned_rows() -> None:
    """Addresses that no 16-byte access may touch."""
    for tokens in (3, 5000):
        for shift in (1, 2):
            check(PermuteCase((tokens,), 8, 64, 6, "float16"), shift=shift)


def test_too_many_experts_are_refused() -> None:
    with pytest.raises(RuntimeError, match="PermuteTokens: the CUDA launch failed: invalid argument"):
        launch(PermuteCase((3,), 2, 8, 100_000))
    check(PermuteCase((3,), 2, 8, 20_000, choices="outside"))


def test_few_of_each_path() -> None:
    """What the memory checkers run."""
    for n, (tokens, k, experts, hidden) in enumerate(
        ((1, 3, 8, 64), (5, 10, 512, 72), (130, 10, 64, 9), (260, 8, 60, 16), (5000, 7, 16, 8), (33000, 1, 5, 3))
    ):
        for onnx_type in ("float16", "float"):
            check(PermuteCase((tokens,), k, hidden, experts, onnx_type, CHOICES[n % 3]))


@pytest.mark.parametrize("tokens", [0, 1, 20, 5000])
def test_session(tokens: int) -> None:
    for onnx_type in DTYPES:
        case = PermuteCase((tokens, 1), 8, 40, 8, onnx_type, "outside")
        case.check(run_op("PermuteTokens", case.feeds, case.attributes, providers=["CUDAExecutionProvider"]))


@pytest.mark.parametrize("tokens", [1, 64, 5000])
def test_session_with_a_graph(tokens: int) -> None:
    """Fixed buffers and new choices at every run, so that a graph's replays are seen to read them."""
    cases = [PermuteCase((tokens,), 8, 64, 128, "float16", choices, seed=n) for n, choices in enumerate(CHOICES)]
    model = op_model("PermuteTokens", cases[0].feeds, cases[0].attributes)
    session = op_session(model, [("CUDAExecutionProvider", {"enable_cuda_graph": "1"})])  # type: ignore[list-item]
    inputs = {name: DeviceArray(array) for name, array in cases[0].feeds.items()}
    rows = poisoned((tokens * 8, 64), np.float16)
    outputs = dict(zip(OUTPUTS, (rows, *DeviceMaps.poisoned(tokens * 8, 128).arrays), strict=True))
    binding = session.io_binding()
    for bind, arrays in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
        for name, array in arrays.items():
            kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            bind(name, "cuda", 0, kind, array.shape, array.address)
    for case in cases:
        for name, array in case.feeds.items():
            inputs[name].write(array)
        session.run_with_iobinding(binding)
        case.check({name: array.read() for name, array in outputs.items()})
