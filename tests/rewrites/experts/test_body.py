"""The portable body of FusedExperts computes what its reference does, in plain ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onnx_ir as ir
import pytest
from hypothesis import given, settings

from ort_moe.rewrites.functions import attach_functions
from tests.experts_cases import FORMATS, ExpertsCase, experts_cases
from tests.op_models import op_model, run_session
from tests.rewrites.blocks import cpu_session

CASE = ExpertsCase(leading=(3,), experts=4, k=2, hidden=16, inner=8)


def portable(case: ExpertsCase) -> ir.Model:
    """The model of the case's one node and its function."""
    model = ir.from_proto(op_model("FusedExperts", case.feeds, case.all_attributes))
    assert attach_functions(model) == 1
    return model


def run(case: ExpertsCase) -> Any:
    return run_session(cpu_session(portable(case), with_library=False), case.feeds)["y"]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(experts_cases(formats=FORMATS))
def test_body_agrees_with_the_reference(case: ExpertsCase) -> None:
    case = replace(case, has_maps=False)
    case.check_each(run(case))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(experts_cases(formats=FORMATS[1:], onnx_types=("float", "float16")))
def test_packed_bodies_agree_with_the_reference(case: ExpertsCase) -> None:
    case = replace(case, has_maps=False)
    case.check_each(run(case))


@pytest.mark.parametrize("weight_format", ["nvfp4", "fp8"])
def test_float8_has_a_body_where_it_is_a_type(weight_format: str) -> None:
    for opset, functions in ((18, 0), (19, 1)):
        case = replace(CASE, hidden=32, inner=32, weight_format=weight_format)
        model = ir.from_proto(op_model("FusedExperts", case.feeds, case.all_attributes))
        model.graph.opset_imports[""] = opset
        assert attach_functions(model) == functions


@pytest.mark.parametrize("weight_format", ["int4", "int8", "mxfp4", "nvfp4"])
def test_packed_weights_are_gathered_before_they_are_widened(weight_format: str) -> None:
    case = replace(CASE, hidden=32, inner=32, weight_format=weight_format)
    (function,) = portable(case).functions.values()
    stacks = {value for value in function.inputs if value.name in ("fc1_weights", "fc2_weights")}
    readers = [node.op_type for node in function for value in node.inputs if value in stacks]
    assert readers == ["Gather", "Gather"]


def test_one_function_for_equal_layers() -> None:
    first, second = portable(CASE), portable(replace(CASE, seed=1))
    assert list(first.functions) == list(second.functions)
    others = (
        replace(CASE, onnx_type="float16"),
        replace(CASE, experts=5),
        replace(CASE, has_bias=True),
        replace(CASE, attributes={"activation": "gelu", "gated": 1}),
    )
    names = {str(list(portable(other).functions)) for other in (CASE, *others)}
    assert len(names) == 1 + len(others)


def test_node_and_function_agree_on_attributes() -> None:
    model = portable(CASE)
    (function,) = model.functions.values()
    (node,) = model.graph
    assert list(function.attributes) == sorted(node.attributes)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(experts_cases(formats=("fp8",), onnx_types=("float", "float16")))
def test_float8_is_handed_out_expert_by_expert(case: ExpertsCase) -> None:
    case = replace(case, has_maps=False)
    case.check_each(run(case))
    (function,) = portable(case).functions.values()
    stacks = {value for value in function.inputs if value.name in ("fc1_weights", "fc2_weights")}
    assert [node.op_type for node in function for value in node.inputs if value in stacks] == ["Scan", "Scan"]


def test_without_a_body() -> None:
    case = replace(CASE, has_maps=True)
    model = ir.from_proto(op_model("FusedExperts", case.feeds, case.all_attributes))
    assert attach_functions(model) == 0
    assert not model.functions


def test_matrices_are_gathered_before_they_are_widened() -> None:
    """ONNX Runtime would fold a cast of all weights into a constant of twice their size."""
    (function,) = portable(replace(CASE, onnx_type="float16")).functions.values()
    stacks = {value for value in function.inputs if value.name in ("fc1_weights", "fc2_weights")}
    readers = [node.op_type for node in function for value in node.inputs if value in stacks]
    assert readers == ["Gather", "Gather"]
