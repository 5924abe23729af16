"""The CUDA kernels of the training ops, called by address, return the emulation's bits forward and backward."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ort_moe.kernels import training
from ort_moe.ops import ROUTER_PROBS
from ort_moe.ops.training_config import router_probs_config
from ort_moe.reference.router_probs import bitmap, router_probs
from tests.device_arrays import DeviceArray, poisoned
from tests.op_models import Array, assert_same_bits
from tests.router_cases import DTYPES
from tests.training_cases import (
    ON_DEVICE,
    SCORINGS,
    AuxLossCase,
    TrainingCase,
    aux_loss_cases,
    expected_aux_loss,
    expected_probs,
    expected_probs_grad,
    expected_scores,
    probs_cases,
    run_aux_loss,
    run_probs,
    run_probs_grad,
    run_scores,
    scores_cases,
)

pytestmark = pytest.mark.gpu

REPEATS = 700
SHARES = 4  # of the pairwise cases, so that several processes may take them


def assert_same_gradient(got: Array, expected: Array) -> None:
    """Equal bits, where a zero has any sign."""
    assert_same_bits(got + got.dtype.type(0), expected + expected.dtype.type(0))


def probs_case(k: int, experts: int, tokens: int, scoring: str, **given: object) -> TrainingCase:
    attributes = ROUTER_PROBS.complete({"k": k, **SCORINGS[scoring]})
    return replace(TrainingCase(attributes, tokens, experts), **given)  # type: ignore[arg-type]


def check_probs(case: TrainingCase) -> None:
    got, expected = run_probs(case, ON_DEVICE), expected_probs(case)
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)
    routing_map = router_probs(case.logits, case.selection_bias, **case.attributes).routing_map
    assert_same_gradient(run_probs_grad(case, routing_map, ON_DEVICE), expected_probs_grad(case, routing_map))


def check_scores(case: TrainingCase) -> None:
    scores, routing_map, grad = run_scores(case, ON_DEVICE)
    expected = expected_scores(case)
    assert_same_bits(scores, expected[0])
    assert_same_bits(routing_map, expected[1])
    assert_same_gradient(grad, expected[2])


def check_aux_loss(case: AuxLossCase) -> None:
    for got, expected in zip(run_aux_loss(case, ON_DEVICE), expected_aux_loss(case), strict=True):
        assert_same_gradient(got, expected)


@pytest.mark.parametrize("share", range(SHARES))
def test_probs_and_their_gradients(share: int) -> None:
    for case in probs_cases()[share::SHARES]:
        check_probs(case)


@pytest.mark.parametrize("share", range(SHARES))
def test_scores_and_their_gradients(share: int) -> None:
    for case in scores_cases()[share::SHARES]:
        check_scores(case)


@pytest.mark.parametrize("share", range(SHARES))
def test_losses_and_their_gradients(share: int) -> None:
    for case in aux_loss_cases()[share::SHARES]:
        check_aux_loss(case)


@pytest.mark.parametrize("scoring", ["softmax after", "softmax before", "sigmoid"])
@pytest.mark.parametrize("experts", [8, 60, 64, 130, 256, 512, 1000, 2304])
def test_many_rows_to_a_warp(experts: int, scoring: str) -> None:
    """More rows than the device has warps for, so that loads ahead, outputs behind and their clearing follow."""
    for seed, (k, texture) in enumerate(((4, "normal"), (10, "ties"), (36, "nan"), (22, "sorted"), (130, "normal"))):
        dtype = list(DTYPES)[(seed + experts) % 3]
        case = probs_case(min(k, experts), experts, 4 if experts > 1000 else 9, scoring, onnx_type=dtype, seed=seed)
        logits = np.sort(case.logits, axis=-1) if texture == "sorted" else replace(case, texture=texture).logits
        tall = replace(case, tokens=len(logits) * REPEATS, has_bias=scoring == "sigmoid")
        tall.__dict__["logits"] = np.tile(logits, (REPEATS, 1))  # the cached property
        tall.__dict__["grad"] = np.tile(case.grad, (REPEATS, 1))
        short = replace(case, has_bias=scoring == "sigmoid")
        short.__dict__["logits"] = logits
        for got, expected in zip(run_probs(tall, ON_DEVICE), expected_probs(short), strict=True):
            assert_same_bits(got, np.tile(expected, (REPEATS, 1)))
        routing_map = router_probs(logits, short.selection_bias, **case.attributes).routing_map
        got = run_probs_grad(tall, np.tile(routing_map, (REPEATS, 1)), ON_DEVICE)
        assert_same_gradient(got, np.tile(expected_probs_grad(short, routing_map), (REPEATS, 1)))


def test_a_gradient_takes_any_map() -> None:
    rng = np.random.default_rng(0)
    for scoring in SCORINGS:
        case = probs_case(4, 300, 9, scoring, has_expert_scale=True)
        routing_map = rng.random(case.shape) < np.linspace(0.0, 1.0, case.tokens)[:, None]  # from none to all
        got = run_probs_grad(case, routing_map, ON_DEVICE)
        assert_same_gradient(got, expected_probs_grad(case, routing_map))


@pytest.mark.parametrize("tokens", [0, 1, 65])
@pytest.mark.parametrize("experts", [1, 7, 64, 8192])
def test_all_experts_chosen_and_any_number_of_tokens(tokens: int, experts: int) -> None:
    if experts > 1000:
        tokens = min(tokens, 2)
    case = probs_case(experts, experts, tokens, "softmax before")
    probs, routing_map, indices = run_probs(case, ON_DEVICE)
    assert routing_map.all()
    assert_same_bits(probs, expected_probs(case)[0])
    assert_same_bits(indices, expected_probs(case)[2])
    check_scores(replace(case, attributes={"k": experts, "score": "sigmoid"}))
    check_aux_loss(AuxLossCase(tokens, experts))


def test_maps_and_indices_agree() -> None:
    for k in (5, 200):
        case = probs_case(k, 387, 33, "sigmoid", texture="ties")
        _, bytes_, indices = run_probs(case, ON_DEVICE)
        _, bits, _ = run_probs(replace(case, map_format="bit"), ON_DEVICE)
        np.testing.assert_array_equal(bitmap(bytes_.view(np.bool_)), bits)
        assert (bytes_.sum(-1) == k).all()
        assert np.take_along_axis(bytes_, indices.astype(np.intp), -1).all()


@pytest.mark.parametrize("logit_scale", [1e-6, 1.0, 40.0])
@pytest.mark.parametrize("bias", [0.0, 1e-7, 0.3, 30.0, np.inf])
def test_scores_that_estimates_do_not_tell_apart(logit_scale: float, bias: float) -> None:
    for experts, k, onnx_type in ((256, 8, "float"), (512, 30, "bfloat16"), (100, 4, "float")):
        case = probs_case(k, experts, 16, "sigmoid", has_bias=True, onnx_type=onnx_type)
        values = (case.logits.astype(np.float32) * np.float32(logit_scale)).astype(case.logits.dtype)
        biases = np.random.default_rng(0).normal(size=experts).astype(np.float32) * np.float32(min(bias, 1e30))
        if bias == np.inf:
            biases[::7], biases[3::7] = np.inf, -np.inf
        case.__dict__.update(logits=values, selection_bias=biases)  # the cached properties
        check_probs(case)


def test_every_run_has_the_same_bits() -> None:
    for experts, k in ((512, 22), (2304, 36)):
        case = probs_case(k, experts, 90, "softmax after", texture="ties")
        losses = AuxLossCase(200, experts)
        scores = replace(case, attributes={"k": k, "score": "sigmoid", "normalize": 1, "normalize_eps": 1e-20})
        first = (*run_probs(case, ON_DEVICE), *run_scores(scores, ON_DEVICE), *run_aux_loss(losses, ON_DEVICE))
        for _ in range(20):
            again = (*run_probs(case, ON_DEVICE), *run_scores(scores, ON_DEVICE), *run_aux_loss(losses, ON_DEVICE))
            for one, other in zip(again, first, strict=True):
                assert_same_bits(one, other)


def test_unaligned_rows() -> None:
    """Addresses that no 16-byte access may touch."""
    case = probs_case(6, 64, 5, "softmax after", onnx_type="bfloat16")
    expected = expected_probs(case)
    logits = DeviceArray(np.concatenate([case.logits.reshape(-1)[:1], case.logits.reshape(-1)]))
    probs, routing_map = poisoned((5 * 64 + 1,), case.logits.dtype), poisoned((5 * 64 + 1,), np.uint8)
    training.router_probs(
        router_probs_config(case.attributes),
        **case.sizes,
        logits=logits.address + 2,
        probs=probs.address + 2,
        routing_map=routing_map.address + 1,
    )
    assert_same_bits(probs.read()[1:].reshape(case.shape), expected[0])
    assert_same_bits(routing_map.read()[1:].reshape(case.shape), expected[1])


def digest() -> str:
    """Of what the forward kernels return for choices on both sides of every threshold."""
    result = hashlib.sha256()
    for experts, k in ((60, 4), (512, 10), (512, 100), (2304, 36)):
        for scoring in ("softmax after", "softmax before", "sigmoid"):
            for texture in ("normal", "ties", "nan"):
                for array in run_probs(probs_case(k, experts, 33, scoring, texture=texture), ON_DEVICE):
                    result.update(array.tobytes())
        for array in run_scores(TrainingCase({"k": k, "score": "softmax"}, 33, experts), ON_DEVICE):
            result.update(array.tobytes())
    return result.hexdigest()


def test_both_sides_of_the_threshold_have_the_same_bits() -> None:
    command = [sys.executable, "-c", "from tests.custom_ops.test_training_kernels_cuda import digest; print(digest())"]
    root = Path(__file__).parents[2]
    runs = [
        subprocess.Popen(
            command, env=os.environ | {"ORT_MOE_LISTED_CHOICES": choices}, cwd=root, stdout=subprocess.PIPE, text=True
        )
        for choices in ("0", "20", "128")
    ]
    digests = {run.communicate()[0] for run in runs}
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


def test_more_than_two_billion_logits() -> None:
    experts = 8192
    rows = 2**31 // experts + 2
    tail = probs_case(10, experts, 3, "softmax after", onnx_type="bfloat16", map_format="bit")
    sizes = {"rows": rows, "experts": experts, "dtype": "bfloat16"}
    values = np.zeros((rows, experts), np.uint16)
    values[-3:] = tail.logits.view(np.uint16)
    logits, probs = DeviceArray(values), DeviceArray(values)
    routing_map = poisoned((rows, experts // 8), np.uint8)
    config = router_probs_config(tail.attributes)
    addresses = {"logits": logits.address, "routing_map": routing_map.address}
    training.router_probs(config, **sizes, **addresses, probs=probs.address, map_format="bit")
    expected = expected_probs(tail)
    assert_same_bits(routing_map.read()[-3:], expected[1])
    assert_same_bits(probs.read()[-3:].view(tail.logits.dtype), expected[0])

    values[-3:] = tail.grad.view(np.uint16)
    grad_probs, grad_logits = DeviceArray(values), probs
    training.router_probs_grad(
        config,
        **sizes,
        **addresses,
        grad_probs=grad_probs.address,
        grad_logits=grad_logits.address,
        map_format="bit",
    )
    marks = router_probs(tail.logits, None, **tail.attributes).routing_map
    got = grad_logits.read()[-3:].view(tail.logits.dtype)
    assert_same_gradient(got, expected_probs_grad(tail, marks))


def test_few_of_each_path() -> None:
    """What the memory checkers run."""
    dtypes = list(DTYPES)
    for n, (experts, k) in enumerate(
        ((8, 2), (60, 4), (64, 6), (512, 10), (512, 22), (1024, 36), (2304, 36), (2304, 150))
    ):
        for m, scoring in enumerate(("softmax after", "softmax before", "sigmoid", "sqrtsoftplus")):
            texture = ("normal", "ties", "nan")[(n + m) % 3]
            map_format = training.MAP_FORMATS[(n + m) % 2]
            case = probs_case(k, experts, 3, scoring, texture=texture, onnx_type=dtypes[(n + m) % 3])
            check_probs(replace(case, map_format=map_format, has_bias=m == 2))
        for score in ("softmax", "sigmoid", "sqrtsoftplus"):
            attributes = {"k": k, "score": score, "normalize": n % 2, "normalize_eps": 1e-20}
            check_scores(TrainingCase(attributes, 3, experts, dtypes[n % 3]))
        check_aux_loss(AuxLossCase(5, experts, dtypes[n % 3]))
    check_probs(probs_case(4, 64, 9000, "softmax after"))  # several rows to a warp
