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
from ort_moe.graphs.node_kinds import CONTRIB
from ort_moe.ops import DOMAIN, OPS, Op
from ort_moe.rewrites.values import label


@dataclass(frozen=True)
class _Signature:
    """What a node of an operator has at least: inputs and outputs, and the types of its attributes, if it has them.

    Attributes:
        inputs: Names of those that it needs, by their places.
        outputs: Number of them.
        attributes: Their types.
        required: Names of the attributes that it needs.
    """

    inputs: dict[int, str]
    outputs: int
    attributes: dict[str, int]
    required: tuple[str, ...] = ()


def _kinds(ints: str = "", floats: str = "", strings: str = "") -> dict[str, int]:
    kinds = {ir.AttributeType.INT: ints, ir.AttributeType.FLOAT: floats, ir.AttributeType.STRING: strings}
    return {name: int(kind) for kind, names in kinds.items() for name in names.split()}


_MOE = _kinds(
    "k normalize_routing_weights swiglu_fusion swiglu_limit_after_activation use_sparse_mixer",
    "activation_alpha activation_beta swiglu_limit",
    "activation_type",
)
_QMOE = _MOE | _kinds(
    "accuracy_level block_size expert_weight_bits fc1_expert_weight_bits fc2_expert_weight_bits fc3_expert_weight_bits "
    "weights_prepacked",
    strings="quant_type",
)
_MOE_INPUTS = {0: "input", 1: "router_probs", 2: "fc1_experts_weights"}
_ELEMENTS = {0: "X"}
_MATRICES = {0: "A", 1: "B"}
_CONTRIB = {
    "MoE": _Signature(_MOE_INPUTS | {4: "fc2_experts_weights"}, 1, _MOE),
    "QMoE": _Signature(_MOE_INPUTS | {5: "fc2_experts_weights"}, 1, _QMOE),
    "MatMulNBits": _Signature(
        _MATRICES | {2: "scales"}, 1, _kinds("K N accuracy_level bits block_size"), ("K", "N", "block_size")
    ),
    "FusedMatMul": _Signature(_MATRICES, 1, _kinds("transA transB transBatchA transBatchB", "alpha")),
    "FusedGemm": _Signature(
        _MATRICES,
        1,
        _kinds("transA transB", "activation_alpha activation_beta activation_gamma alpha beta", "activation"),
    ),
    "QuickGelu": _Signature(_ELEMENTS, 1, _kinds(floats="alpha")),
    "Gelu": _Signature(_ELEMENTS, 1, {}),
    "FastGelu": _Signature(_ELEMENTS, 1, {}),
    "BiasGelu": _Signature(_MATRICES, 1, {}),
}
"""Of ONNX Runtime's own operators, those that rules read, as 1.32 has them."""


def check_nodes(model: ir.Model) -> None:
    """Sort the model and hold its nodes against their operators' schemas: ONNX's, ours, and those of contrib ops.

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
        signature = _signature(node.domain, node.op_type, opset)
        wrong = None if signature is None else _wrong(node, signature)
        if wrong:
            raise ModelError(f"the model is not valid: {label(node)} {wrong}")


def _wrong(node: ir.Node, signature: _Signature) -> str:
    for place, name in signature.inputs.items():
        if place >= len(node.inputs) or node.inputs[place] is None:
            return f"lacks its input {place}, '{name}'"
    if len(node.outputs) < signature.outputs:
        return f"has {len(node.outputs)} outputs, expected {signature.outputs} or more"
    for name in signature.required:
        if name not in node.attributes:
            return f"lacks its attribute '{name}'"
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            return f"has the attribute '{name}' of a function, and is in none"
        expected = signature.attributes.get(name, attribute.type)
        if attribute.type != expected:
            return (
                f"has the attribute '{name}' of type {attribute.type.name}, expected {ir.AttributeType(expected).name}"
            )
    return ""


@cache
def _signature(domain: str, op_type: str, opset: int) -> _Signature | None:
    """None for an operator that is not known here."""
    if domain == CONTRIB:
        return _CONTRIB.get(op_type)
    if domain == DOMAIN:
        return _of_ours(OPS[op_type]) if op_type in OPS else None
    return _of_onnx(op_type, opset) if domain == "" else None


def _of_ours(op: Op) -> _Signature:
    return _Signature(
        {place: tensor.name for place, tensor in enumerate(op.inputs) if not tensor.optional},
        sum(not tensor.optional for tensor in op.outputs),
        {attribute.name: int(ir.AttributeType[attribute.kind.upper()]) for attribute in op.attributes},
        tuple(attribute.name for attribute in op.attributes if attribute.only_with is None),
    )


def _of_onnx(op_type: str, opset: int) -> _Signature | None:
    import onnx

    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    attributes: dict[str, Any] = dict(schema.attributes)
    last = len(schema.inputs) - 1  # perhaps of any number
    return _Signature(
        {place: schema.inputs[min(place, last)].name for place in range(schema.min_input)},
        schema.min_output,
        {name: int(attribute.type.value) for name, attribute in attributes.items()},
        tuple(name for name, attribute in attributes.items() if attribute.required),
    )
