"""Nodes that are not as their operators say are told in one sentence, before any rule reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from ort_moe.errors import ModelError
from ort_moe.inspection.explain import explain
from ort_moe.inspection.inspect import inspect
from ort_moe.optimization.optimize import optimize
from ort_moe.rewrites import rewrite
from ort_moe.rewrites.signatures import _CONTRIB
from tests.contrib_models import BESIDE_ORT, ContribCase
from tests.rewrites.blocks import block

ROUTER = """
    scores = Softmax <axis = -1> (logits)
    weights, wide = TopK (scores, k)
    ids = Cast <to = 7> (wide)"""


def _no_input(model: ir.Model) -> None:
    _node(model, "Softmax").resize_inputs(0)


def _empty_input(model: ir.Model) -> None:
    _node(model, "TopK").replace_input_with(1, None)


def _no_indices(model: ir.Model) -> None:
    topk = _node(model, "TopK")
    topk.outputs[1].replace_all_uses_with(topk.inputs[1])
    topk.resize_outputs(1)


def _other_type(model: ir.Model) -> None:
    _node(model, "Softmax").attributes.add(ir.AttrString("axis", "last"))


def _no_attribute(model: ir.Model) -> None:
    del _node(model, "Cast").attributes["to"]


def _cycle(model: ir.Model) -> None:
    softmax, topk = _node(model, "Softmax"), _node(model, "TopK")
    softmax.replace_input_with(0, topk.outputs[0])


def _node(model: ir.Model, op_type: str) -> ir.Node:
    return next(node for node in model.graph if node.op_type == op_type)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (_no_input, "Softmax 'softmax_1' lacks its input 0, 'input'"),
        (_empty_input, "TopK 'topk_2' lacks its input 1, 'K'"),
        (_no_indices, "TopK 'topk_2' has 1 outputs, expected 2 or more"),
        (_other_type, "Softmax 'softmax_1' has the attribute 'axis' of type STRING, expected INT"),
        (_no_attribute, "Cast 'cast_3' lacks its attribute 'to'"),
        (_cycle, "its graph has a cycle"),
    ],
)
def test_a_node_that_is_not_as_its_operator_says(edit: Callable[[ir.Model], None], sentence: str) -> None:
    model = block(ROUTER)
    edit(model)
    with pytest.raises(ModelError, match=f"the model is not valid: {sentence}"):
        rewrite(model)


def test_an_attribute_of_no_function() -> None:
    model = block(ROUTER)
    _node(model, "Softmax").attributes.add(ir.RefAttr("axis", "axis", ir.AttributeType.INT))
    with pytest.raises(ModelError, match="has the attribute 'axis' of a function, and is in none"):
        rewrite(model)


def _without(place: int) -> Callable[[ir.Node], None]:
    return lambda node: node.replace_input_with(place, None)


def _cut(node: ir.Node) -> None:
    node.resize_inputs(3)


def _given(attribute: ir.Attr) -> Callable[[ir.Node], None]:
    return lambda node: node.attributes.add(attribute)


@pytest.mark.parametrize(
    ("weight_format", "edit", "sentence"),
    [
        ("dense", _without(0), "MoE 'moe' lacks its input 0, 'input'"),
        ("dense", _without(1), "MoE 'moe' lacks its input 1, 'router_probs'"),
        ("dense", _without(2), "MoE 'moe' lacks its input 2, 'fc1_experts_weights'"),
        ("dense", _without(4), "MoE 'moe' lacks its input 4, 'fc2_experts_weights'"),
        ("dense", _cut, "MoE 'moe' lacks its input 4, 'fc2_experts_weights'"),
        ("int4", _without(5), "QMoE 'moe' lacks its input 5, 'fc2_experts_weights'"),
        ("dense", _given(ir.AttrFloat32("k", 2.0)), "MoE 'moe' has the attribute 'k' of type FLOAT, expected INT"),
        (
            "dense",
            _given(ir.AttrInt64("activation_type", 3)),
            "MoE 'moe' has the attribute 'activation_type' of type INT, expected STRING",
        ),
        (
            "dense",
            _given(ir.AttrInt64("swiglu_limit", 7)),
            "MoE 'moe' has the attribute 'swiglu_limit' of type INT, expected FLOAT",
        ),
        ("int4", _given(ir.AttrInt64("quant_type", 4)), "QMoE 'moe' has the attribute 'quant_type' of type INT"),
    ],
)
def test_contrib_nodes(weight_format: str, edit: Callable[[ir.Node], None], sentence: str, tmp_path: Path) -> None:
    model = ir.from_proto(ContribCase(weight_format=weight_format).model())
    (node,) = [node for node in model.graph if node.domain == "com.microsoft"]
    node.name = "moe"
    edit(node)
    ir.save(model, tmp_path / "model.onnx")
    for read in (optimize, inspect, explain):
        with pytest.raises(ModelError, match=f"the model is not valid: {sentence}"):
            read(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (_without(0), "FusedRouter 'router' lacks its input 0, 'logits'"),
        (_given(ir.AttrFloat32("k", 2.0)), "FusedRouter 'router' has the attribute 'k' of type FLOAT, expected INT"),
        (lambda node: node.attributes.pop("normalize"), "FusedRouter 'router' lacks its attribute 'normalize'"),
    ],
)
def test_our_nodes(edit: Callable[[ir.Node], Any], sentence: str) -> None:
    model = block(ROUTER)
    rewrite(model)
    node = _node(model, "FusedRouter")
    node.name = "router"
    edit(node)
    with pytest.raises(ModelError, match=f"the model is not valid: {sentence}"):
        rewrite(model)


@BESIDE_ORT
def test_contrib_signatures_are_those_of_the_runtime() -> None:
    from onnxruntime.capi import onnxruntime_pybind11_state as runtime

    schemas = {s.name: s for s in runtime.get_all_operator_schema() if s.domain == "com.microsoft"}
    for op_type, signature in _CONTRIB.items():
        schema = schemas[op_type]
        single = {place: each.name for place, each in enumerate(schema.inputs) if each.option.name == "Single"}
        assert signature.inputs == single, op_type
        kinds = {name: ir.AttributeType[each.type.name] for name, each in schema.attributes.items()}
        kinds.pop("weight_prepacked", None)  # of MatMulNBits, which no rule reads
        assert signature.attributes == kinds, op_type
        assert set(signature.required) == {name for name, each in schema.attributes.items() if each.required}, op_type
