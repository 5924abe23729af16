"""The CPU kernel of GatherFinalize returns the emulation's bits, and refuses what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ort_moe.reference.gather_finalize import gather_finalize
from tests.gather_finalize_cases import GatherFinalizeCase, gather_finalize_cases
from tests.op_models import assert_same_bits, op_model, op_session, run_op, run_session

OP = "GatherFinalize"


def check(case: GatherFinalizeCase, *, symbolic: bool = False) -> None:
    got = run_op(OP, case.feeds, case.attributes, symbolic=symbolic)["y"]
    assert_same_bits(got, gather_finalize(**case.feeds, **case.attributes))


@settings(max_examples=150)
@given(gather_finalize_cases(), st.booleans())
def test_every_call_has_the_emulations_bits(case: GatherFinalizeCase, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


@pytest.mark.parametrize("onnx_type", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize(("hidden", "padding"), [(1, 0), (255, 1), (256, 0), (257, 7), (2880, 192)])
@pytest.mark.parametrize("tokens", [0, 1, 65])
def test_shapes(tokens: int, hidden: int, padding: int, onnx_type: str) -> None:
    check(GatherFinalizeCase((tokens,), 4, hidden, 6, padding, (2, 3), 40, onnx_type, has_bias=True, has_residual=True))


@pytest.mark.parametrize("onnx_type", ["float", "float16", "bfloat16"])
def test_the_bits_of_a_gather_and_finalize_routing(onnx_type: str) -> None:
    case = GatherFinalizeCase((9,), 4, 80, 16, 8, (4, 8), 9, onnx_type, has_bias=True, has_residual=True)
    permuted, whole = case.permuted
    assert whole
    got = run_op(OP, case.feeds, case.attributes)["y"]
    assert_same_bits(got, run_op("FinalizeRouting", permuted, {})["y"])


def test_one_session_serves_any_number_of_tokens() -> None:
    cases = [GatherFinalizeCase((tokens,), 8, 96, 16, seed=tokens, capacity=500) for tokens in (3, 0, 700, 1)]
    session = op_session(op_model(OP, cases[0].feeds, cases[0].attributes, symbolic=True))
    for case in cases:
        assert_same_bits(run_session(session, case.feeds)["y"], gather_finalize(**case.feeds, **case.attributes))


CASE = GatherFinalizeCase((5,), 2, 16, 4, 8, (1, 2), onnx_type="float16", has_bias=True, has_residual=True)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"expert_output": np.zeros((3, 4, 24), np.float16)},
            r"input 'expert_output' must have shape \[2, \?, \?\], but has \[3, 4, 24\]",
        ),
        ({"expert_output": np.zeros((2, 24), np.float16)}, r"input 'expert_output' must have shape \[2, \?, \?\]"),
        (
            {"expert_output": np.zeros((2, 4, 15), np.float16)},
            "attribute 'hidden_size' must be at most the last dimension of input 'expert_output', 15, but is 16",
        ),
        ({"indices": np.zeros((5, 3), np.int32)}, r"input 'indices' must have shape \[5, 2\], but has \[5, 3\]"),
        ({"unpermuted_to_permuted": np.zeros(9, np.int32)}, r"'unpermuted_to_permuted' must have shape \[10\]"),
        (
            {"expert_first_token_offset": np.zeros(3, np.int64)},
            "attributes 'local_begin' and 'local_count' must name experts below 2, .* but name those below 3",
        ),
        ({"expert_first_token_offset": np.zeros((1, 5), np.int64)}, r"'expert_first_token_offset' must have shape"),
        ({"bias": np.zeros((4, 15), np.float16)}, r"input 'bias' must have shape \[4, 16\], but has \[4, 15\]"),
        ({"residual": np.zeros((4, 16), np.float16)}, r"input 'residual' must have shape \[5, 16\], but has \[4, 16\]"),
    ],
)
def test_wrong_shapes_are_refused(changed: dict[str, Any], message: str, symbolic: bool) -> None:
    with pytest.raises(Exception, match=f"GatherFinalize node 'node': .*{message}"):
        run_op(OP, CASE.feeds | changed, CASE.attributes, symbolic=symbolic)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bias": np.zeros((4, 16), np.float32)}, "'bias' must have type float16 as 'expert_output' has, but has"),
        ({"residual": np.zeros((5, 16), np.float32)}, "'residual' must have type float16 as 'expert_output' has"),
        ({"weights": np.zeros((5, 2), np.float16)}, "'weights' must have type float, but has float16"),
        ({"indices": np.zeros((5, 2), np.int64)}, "'indices' must have type int32, but has int64"),
        ({"expert_first_token_offset": np.zeros(5, np.int32)}, "'expert_first_token_offset' must have type int64"),
    ],
)
def test_wrong_types_are_refused_when_the_session_is_created(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=f"GatherFinalize node 'node': input {message}"):
        op_session(op_model(OP, CASE.feeds | changed, CASE.attributes))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"hidden_size": 0}, "'hidden_size' must be at least 1 and fit into int32, but is 0"),
        ({"local_begin": -1}, "'local_begin' must be at least 0 and fit into int32, but is -1"),
        ({"local_count": 0}, "'local_count' must be at least 1 and fit into int32, but is 0"),
        ({"local_count": 2.0}, "'local_count' must be an int"),
    ],
)
def test_wrong_attributes_are_refused(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=f"GatherFinalize node 'node': attribute {message}"):
        op_session(op_model(OP, CASE.feeds, CASE.attributes | attributes, complete=False))


@pytest.mark.parametrize("name", ["hidden_size", "local_begin", "local_count"])
def test_a_missing_attribute_is_refused(name: str) -> None:
    attributes = {key: value for key, value in CASE.attributes.items() if key != name}
    with pytest.raises(Exception, match=f"attribute '{name}' must be"):
        op_session(op_model(OP, CASE.feeds, attributes, complete=False))
