"""Nodes that are not as their operators say are told in one sentence, before any rule reads them."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest

from ort_moe.errors import ModelError
from ort_moe.rewrites import rewrite
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
        (_no_input, "Softmax 'softmax_1' lacks its input 0, expected 1 or more"),
        (_empty_input, "TopK 'topk_2' lacks its input 1, expected 2 or more"),
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
