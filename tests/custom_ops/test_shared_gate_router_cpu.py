"""The CPU kernel of SharedGateRouter returns the emulation's bits, and refuses what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ort_moe.ops import FUSED_ROUTER, ROUTING_MAPS
from ort_moe.reference.routing_maps import routing_maps
from tests.op_models import assert_same_bits, op_model, op_session, run_op, run_session
from tests.router_cases import DTYPES, RouterCase
from tests.shared_gate_cases import SharedGateCase, shared_gate_cases

OP = "SharedGateRouter"
MAPS = [tensor.name for tensor in ROUTING_MAPS]
SOFTMAX = {"k": 3, "score": "softmax", "normalize": 1}


def make_case(experts: int, tokens: int, hidden: int, shared: int = 1, **fields: Any) -> SharedGateCase:
    given = fields.pop("given", SOFTMAX)
    onnx_type = fields.pop("onnx_type", "float")
    router = RouterCase(FUSED_ROUTER.complete(given), (tokens, experts), onnx_type, seed=tokens + hidden)
    return SharedGateCase(router, hidden, shared, **fields)


def check(case: SharedGateCase, *, symbolic: bool = False) -> None:
    outputs = ["weights", "indices", *MAPS]
    got = run_op(OP, case.feeds, case.attributes, outputs=outputs, symbolic=symbolic)
    weights, indices = case.emulate()
    assert_same_bits(got["indices"], indices)
    assert_same_bits(got["weights"], weights)
    maps = routing_maps(indices, case.router.experts + case.shared)
    for name, expected in maps._asdict().items():
        np.testing.assert_array_equal(got[name], expected)


@settings(max_examples=100)
@given(shared_gate_cases(), st.booleans())
def test_every_call_has_the_emulations_bits(case: SharedGateCase, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


@pytest.mark.parametrize("onnx_type", DTYPES)
@pytest.mark.parametrize("hidden", [1, 63, 1024, 1025, 4096])
@pytest.mark.parametrize("tokens", [0, 1, 65])
def test_shapes(tokens: int, hidden: int, onnx_type: str) -> None:
    for shared in (1, 2, 8):
        check(make_case(60, tokens, hidden, shared, onnx_type=onnx_type, scale=0.5))


def test_all_experts_chosen() -> None:
    check(make_case(8, 5, 40, 2, given={"k": 8, "score": "sigmoid"}))


@pytest.mark.parametrize("base", [0, 5, 60, 61, 1000])
def test_shared_experts_anywhere(base: int) -> None:
    """Also among the others, and where the maps know no expert."""
    check(make_case(60, 9, 40, 2, base=base))


def test_the_routers_half_is_fused_routers() -> None:
    case = make_case(60, 9, 40, 2)
    got = run_op(OP, case.feeds, case.attributes)
    alone = run_op("FusedRouter", {"logits": case.router.logits}, case.router.attributes)
    for name in ("weights", "indices"):
        assert_same_bits(got[name][:, :3], alone[name])


def test_one_session_serves_any_number_of_tokens() -> None:
    cases = [make_case(60, tokens, 96) for tokens in (3, 0, 700, 1)]
    session = op_session(op_model(OP, cases[0].feeds, cases[0].attributes, symbolic=True))
    for case in cases:
        got = run_session(session, case.feeds)
        assert_same_bits(got["weights"], case.emulate()[0])
        assert_same_bits(got["indices"], case.emulate()[1])


CASE = make_case(8, 5, 16, 2, onnx_type="float16")


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gate_weight": np.zeros((0, 16), np.float16)}, "input 'gate_weight' must have a row for each shared expert"),
        ({"gate_weight": np.zeros((2, 15), np.float16)}, r"input 'gate_weight' must have shape \[\?, (16|\?)\]"),
        ({"gate_weight": np.zeros(16, np.float16)}, r"input 'gate_weight' must have shape \[\?, (16|\?)\], but has \["),
        (
            {"hidden": np.zeros((4, 16), np.float16)},
            r"input 'hidden' must have shape \[(5|\?), 16\], but has \[4, 16\]",
        ),
        ({"hidden": np.zeros((5, 0), np.float16), "gate_weight": np.zeros((1, 0), np.float16)}, "input 'hidden' must"),
        ({"selection_bias": np.zeros(7, np.float32)}, r"input 'selection_bias' must have shape \[(8|\?)\]"),
    ],
)
def test_wrong_shapes_are_refused(changed: dict[str, Any], message: str, symbolic: bool) -> None:
    with pytest.raises(Exception, match=f"SharedGateRouter node 'node': {message}"):
        run_op(OP, CASE.feeds | changed, CASE.attributes, symbolic=symbolic)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": np.zeros((5, 16), np.float32)}, "'hidden' must have type float16 as 'logits' has, but has float"),
        ({"gate_weight": np.zeros((2, 16), np.float32)}, "'gate_weight' must have type float16 as 'logits' has"),
        ({"expert_scale": np.zeros(8, np.float16)}, "'expert_scale' must have type float, but has float16"),
    ],
)
def test_wrong_types_are_refused_when_the_session_is_created(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=f"SharedGateRouter node 'node': input {message}"):
        op_session(op_model(OP, CASE.feeds | changed, CASE.attributes))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"shared_base": -1}, "'shared_base' must be at least 0, but is -1"),
        ({"shared_base": 2**31 - 2}, "'shared_base' must leave the indices of shared experts within int32"),
        ({"shared_scale": "much"}, "'shared_scale' must be a float"),
        ({"score": "soft"}, "'score' must be 'softmax'"),
        ({"k": 9}, "'k' must be at most the number of experts, 8, but is 9"),
    ],
)
def test_wrong_attributes_are_refused(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=f"SharedGateRouter node 'node': attribute {message}"):
        op_session(op_model(OP, CASE.feeds, CASE.attributes | attributes, complete=False))


@pytest.mark.parametrize("name", ["score", "k", "shared_scale", "shared_base"])
def test_a_missing_attribute_is_refused(name: str) -> None:
    attributes = {key: value for key, value in CASE.attributes.items() if key != name}
    with pytest.raises(Exception, match=f"attribute '{name}' must be"):
        op_session(op_model(OP, CASE.feeds, attributes, complete=False))


def test_some_maps_are_refused() -> None:
    with pytest.raises(Exception, match="'permuted_to_expert' must be there, as the other routing maps"):
        op_session(op_model(OP, CASE.feeds, CASE.attributes, outputs=["weights", "indices", *MAPS[:2], MAPS[3]]))
