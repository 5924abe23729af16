"""Refuse a model whose nodes are not as their operators say, or run in a circle, before any rule reads them.

Rules read operands, outputs and attributes by their place and their type. No runtime loads a model in which these are
missing or others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx_ir as ir

from ort_moe.errors import ModelError
from ort_moe.rewrites.values import label


@dataclass(frozen=True)
class _Signature:
    """What a node of an operator has at least: inputs and outputs, and the types of its attributes, if it has them."""

    inputs: int
    outputs: int
    attributes: dict[str, int]
    required: tuple[str, ...]


def check_nodes(model: ir.Model) -> None:
    """Sort the model and hold its standard nodes against their operators' schemas.

    Args:
        model: Whose standard domain is the empty string.

    Raises:
        ModelError: A node lacks an input, an output or an attribute, or has one of another type; or the graph has a
            cycle.
    """
    graph = model.graph
    try:
        graph.sort()
    except ValueError:
        raise ModelError("the model is not valid: its graph has a cycle") from None
    opset = graph.opset_imports[""]
    for node in graph.all_nodes():
        signature = _signature(node.op_type, opset) if node.domain == "" else None
        wrong = None if signature is None else _wrong(node, signature)
        if wrong:
            raise ModelError(f"the model is not valid: {label(node)} {wrong}")


def _wrong(node: ir.Node, signature: _Signature) -> str:
    present = next((place for place, value in enumerate(node.inputs) if value is None), len(node.inputs))
    if present < signature.inputs:
        return f"lacks its input {present}, expected {signature.inputs} or more"
    if len(node.outputs) < signature.outputs:
        return f"has {len(node.outputs)} outputs, expected {signature.outputs} or more"
    for name in signature.required:
        if name not in node.attributes:
            return f"lacks its attribute '{name}'"
    for name, attribute in node.attributes.items():
        expected = signature.attributes.get(name, attribute.type)
        if attribute.type != expected:
            return (
                f"has the attribute '{name}' of type {attribute.type.name}, expected {ir.AttributeType(expected).name}"
            )
    return ""


@cache
def _signature(op_type: str, opset: int) -> _Signature | None:
    """None for an operator that ONNX does not know."""
    import onnx

    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    attributes: dict[str, Any] = dict(schema.attributes)
    return _Signature(
        schema.min_input,
        schema.min_output,
        {name: int(attribute.type.value) for name, attribute in attributes.items()},
        tuple(name for name, attribute in attributes.items() if attribute.required),
    )
