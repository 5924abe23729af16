"""The CPU kernel of PermuteTokens returns the reference's rows and maps, and refuses what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from ort_moe.ops import DOMAIN, VERSION
from tests.op_models import op_model, op_session, run_op, run_session
from tests.permute_cases import CHOICES, PermuteCase, permute_cases


def check(case: PermuteCase, *, symbolic: bool = False) -> None:
    case.check(run_op("PermuteTokens", case.feeds, case.attributes, symbolic=symbolic))


@settings(max_examples=150)
@given(permute_cases(), st.booleans())
def test_every_call_has_the_references_rows_and_maps(case: PermuteCase, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


@pytest.mark.parametrize("onnx_type", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("hidden", [1, 7, 64, 2560])
@pytest.mark.parametrize("leading", [(0,), (1,), (3, 2), (65,)])
def test_shapes(leading: tuple[int, ...], hidden: int, onnx_type: str) -> None:
    for n, choices in enumerate(CHOICES):
        check(PermuteCase(leading, 4, hidden, (6, 1, 4, 100)[n], onnx_type, choices, seed=hidden))


def test_no_choices_and_no_columns() -> None:
    check(PermuteCase((3,), 0, 8, 4))
    check(PermuteCase((3,), 2, 0, 4))


def test_one_session_serves_any_number_of_tokens() -> None:
    cases = [PermuteCase((tokens,), 8, 96, 16, "float16", "outside", seed=tokens) for tokens in (3, 0, 700, 1)]
    session = op_session(op_model("PermuteTokens", cases[0].feeds, cases[0].attributes, symbolic=True))
    for case in cases:
        case.check(run_session(session, case.feeds))


def test_known_shapes_are_inferred() -> None:
    case = PermuteCase((2, 3), 4, 24, 6, "float16")
    session = op_session(op_model("PermuteTokens", case.feeds, case.attributes))
    shapes = {output.name: output.shape for output in session.get_outputs()}
    assert shapes["permuted_x"] == [24, 24]
    assert [shapes[name] for name in shapes if name.startswith(("permuted_to", "unpermuted"))] == [[24]] * 3
    assert shapes["expert_first_token_offset"] == [7]


CASE = PermuteCase((5,), 2, 16, 4, "float16")


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"indices": np.zeros((4, 2), np.int32)}, r"input 'indices' must have shape \[5, 2\], but has \[4, 2\]"),
        ({"indices": np.zeros((5, 1, 2), np.int32)}, r"input 'indices' must have shape \[(5|\?), (2|\?)\], but has"),
    ],
)
def test_wrong_shapes_are_refused(changed: dict[str, Any], message: str, symbolic: bool) -> None:
    with pytest.raises(Exception, match=f"PermuteTokens node 'node': {message}"):
        run_op("PermuteTokens", CASE.feeds | changed, CASE.attributes, symbolic=symbolic)


@pytest.mark.parametrize(
    ("changed", "attributes", "message"),
    [
        ({"indices": np.zeros((5, 2), np.int64)}, {}, "input 'indices' must have type int32, but has int64"),
        ({}, {"num_experts": 0}, "attribute 'num_experts' must be at least 1 and below 2147483647, but is 0"),
        ({}, {"num_experts": 2**31}, "attribute 'num_experts' must be at least 1 and below 2147483647"),
        ({}, {"num_experts": 4.0}, "attribute 'num_experts' must be an int"),
    ],
)
def test_refused_when_the_session_is_created(changed: dict[str, Any], attributes: dict[str, Any], message: str) -> None:
    model = op_model("PermuteTokens", CASE.feeds | changed, CASE.attributes | attributes)
    with pytest.raises(Exception, match=f"PermuteTokens node 'node': {message}"):
        op_session(model)


def test_a_missing_attribute_is_refused() -> None:
    model = op_model("PermuteTokens", CASE.feeds, {}, complete=False)
    with pytest.raises(Exception, match="PermuteTokens node 'node': attribute 'num_experts'"):
        op_session(model)


def test_a_missing_map_is_refused() -> None:
    """Every output is required: FinalizeRouting needs the maps of these rows."""
    model = op_model("PermuteTokens", CASE.feeds, CASE.attributes)
    del model.graph.node[0].output[-1]
    model.graph.output.pop()
    with pytest.raises(Exception, match="output size 4 not in range"):
        run_session(op_session(model), CASE.feeds)


def test_rows_of_another_type_are_refused() -> None:
    feeds = CASE.feeds | {"x": np.zeros((5, 16), np.float64)}
    with pytest.raises(Exception, match=r"tensor\(double\)"):
        op_session(op_model("PermuteTokens", feeds, CASE.attributes))


def test_finalize_brings_the_rows_back() -> None:
    """With all weight on one choice a model that permutes and finalizes gives x, whatever the leading dimensions."""
    permute = helper.make_node("PermuteTokens", ["x", "indices"], ["rows", "a", "map", "b", "c"], domain=DOMAIN)
    permute.attribute.append(helper.make_attribute("num_experts", 6))
    finalize = helper.make_node("FinalizeRouting", ["rows", "weights", "indices", "map"], ["y"], domain=DOMAIN)
    kinds = {"x": TensorProto.FLOAT, "indices": TensorProto.INT32, "weights": TensorProto.FLOAT}
    inputs = [helper.make_tensor_value_info(name, kind, ["B", "S", None]) for name, kind in kinds.items()]
    graph = helper.make_graph(
        [permute, finalize], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, VERSION)]
    session = op_session(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.standard_normal((2, 9, 33), dtype=np.float32),
        "indices": rng.integers(0, 6, (2, 9, 3), np.int32),
        "weights": rng.permuted(np.tile(np.float32([0, 1, 0]), (2, 9, 1)), axis=-1),
    }
    np.testing.assert_array_equal(run_session(session, feeds)["y"], feeds["x"])
