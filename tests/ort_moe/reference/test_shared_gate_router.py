"""SharedGateRouter's emulation: against FusedRouter and float64, the order of its sum, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ort_moe.ops import FUSED_ROUTER
from ort_moe.reference.float_math import ordered_dot, sigmoid
from ort_moe.reference.shared_gate_router import shared_gate_router
from tests.op_models import assert_same_bits
from tests.router_cases import RouterCase
from tests.shared_gate_cases import SharedGateCase

SOFTMAX = FUSED_ROUTER.complete({"k": 3, "score": "softmax", "normalize": 1})


@pytest.mark.parametrize("onnx_type", ["float", "float16", "bfloat16"])
def test_a_router_and_gates(onnx_type: str) -> None:
    case = SharedGateCase(RouterCase(SOFTMAX, (2, 3, 16), onnx_type), 100, 2, 0.5, 40)
    weights, indices = case.emulate()
    routed, chosen = case.router.emulate()
    assert_same_bits(weights[..., :3], routed)
    assert_same_bits(indices[..., :3], chosen)
    dots = case.hidden.astype(np.float64) @ case.gate_weight.astype(np.float64).T
    np.testing.assert_allclose(weights[..., 3:], 0.5 / (1.0 + np.exp(-dots)), rtol=1e-5)
    assert (indices[..., 3:] == [40, 41]).all()


def test_the_order_of_the_sum() -> None:
    """Each element into the partial sum of its eight, by a fused step; then the butterfly."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(0.0, 1.0, 1500).astype(np.float32) for _ in range(2))
    partial = np.zeros(128, np.float32)
    for e in range(1500):
        p = e // 8 % 128
        exact = np.longdouble(a[e]) * np.longdouble(b[e]) + np.longdouble(partial[p])
        partial[p] = np.float32(exact)
    for stride in (64, 32, 16, 8, 4, 2, 1):
        partial = np.array([partial[p] + partial[p ^ stride] for p in range(128)], np.float32)
    assert ordered_dot(a, b) == partial[0]


def test_nan_stays_in_its_half() -> None:
    case = SharedGateCase(RouterCase(SOFTMAX, (4, 16), "float"), 32)
    feeds = {name: array.copy() for name, array in case.feeds.items()}
    feeds["hidden"][1, 5] = np.nan
    feeds["logits"][2, 7] = np.nan
    weights, _ = shared_gate_router(**feeds, **case.attributes)
    assert np.isnan(weights).tolist() == [[False] * 4, [False] * 3 + [True], [True] * 3 + [False], [False] * 4]


def test_far_gates() -> None:
    hidden = np.array([[-1e4], [-80.0], [0.0], [1e4], [np.inf], [-np.inf]], np.float32)
    weights, _ = shared_gate_router(
        np.zeros((6, 2), np.float32), hidden, np.ones((1, 1), np.float32), k=1, score="softmax", shared_base=2
    )
    assert_same_bits(weights[:, 1], sigmoid(hidden[:, 0]))
    assert weights[0, 1] == 0.0 < weights[1, 1] < weights[2, 1] == 0.5 < weights[3, 1] == weights[4, 1] == 1.0
    assert weights[5, 1] == 0.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": np.zeros((5, 8), np.float64)}, "'logits' must be float32, float16 or bfloat16"),
        ({"hidden": np.zeros((5, 12), np.float16)}, r"'hidden' must be float32 of shape \(5, 12\), but is float16"),
        ({"hidden": np.zeros((4, 12), np.float32)}, r"'hidden' must be float32 of shape \(5, 12\)"),
        ({"gate_weight": np.zeros((2, 11), np.float32)}, r"'gate_weight' must be float32 of shape \(2, 12\)"),
        ({"gate_weight": np.zeros((0, 12), np.float32)}, "a row for each shared expert, 1 or more"),
        ({"shared_base": -1}, "'shared_base' must be at least 0, but is -1"),
        ({"shared_bias": 1}, "no attribute 'shared_bias'"),
        ({"score": "soft"}, "'score' must be 'softmax', .* but is 'soft'"),
        ({"k": 9}, "'k' must be at most the number of experts, 8, but is 9"),
    ],
)
def test_refusals(changed: dict[str, Any], message: str) -> None:
    case = SharedGateCase(RouterCase(FUSED_ROUTER.complete({"k": 2, "score": "softmax"}), (5, 8), "float"), 12, 2)
    with pytest.raises(ValueError, match=f"SharedGateRouter: .*{message}"):
        shared_gate_router(**(case.feeds | case.attributes | changed))


@pytest.mark.parametrize("name", ["score", "shared_base"])
def test_what_must_be_chosen_is_asked_for(name: str) -> None:
    case = SharedGateCase(RouterCase(SOFTMAX, (2, 8), "float"), 8)
    attributes = {key: value for key, value in case.attributes.items() if key != name}
    with pytest.raises(ValueError, match=f"SharedGateRouter: attribute '{name}' must be given"):
        shared_gate_router(**case.feeds, **attributes)
