"""The portable body of a FusedExperts: a model-local function of standard operators, one overload per configuration.

ONNX Runtime inlines it where the ort_moe library is not registered. The chosen experts' matrices are gathered first and
widened after that, so that no constant is folded to many times its size; then come the steps of the op's contract one
by one, in float32 with the roundings that it promises. Only the order of sums is the runtime's.
"""

from __future__ import annotations

import hashlib
import json

import onnx_ir as ir

from ort_moe.graphs.node_kinds import experts_inputs
from ort_moe.ops import DOMAIN, FUSED_EXPERTS, ROUTING_MAPS, VERSION, AttributeValue
from ort_moe.ops.experts_config import ExpertsConfig
from ort_moe.rewrites.experts.body_float8 import Float8Body
from ort_moe.rewrites.experts.body_steps import Body
from ort_moe.rewrites.experts.body_weights import is_portable, stored_sizes
from ort_moe.rewrites.values import dim

_MAPS = {tensor.name for tensor in ROUTING_MAPS}
"""The inputs that no body takes."""


def has_portable_form(node: ir.Node, opset: int) -> bool:
    """Whether standard operators of this version stand for the node: weights they gather, and maps built inside."""
    given = experts_inputs(node)
    known = given["x"].dtype is not None and dim(given["fc1_weights"], 0) is not None and _sizes(node) is not None
    return is_portable(_attributes(node).get("weight_format"), opset) and not _MAPS & set(given) and known


def overload(node: ir.Node, opset: int) -> str:
    """A name that tells the configuration: readable in front, unique by its digest."""
    attributes = _attributes(node)
    given = experts_inputs(node)
    description = {
        "attributes": {name: str(value) for name, value in sorted(attributes.items())},
        "inputs": [value is not None for value in node.inputs],
        "experts": str(dim(given["fc1_weights"], 0)),
        "sizes": None if attributes["weight_format"] == "dense" else _sizes(node),
        "type": str(given["x"].dtype),
        "opset": opset,
        "version": VERSION,
    }
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:8]
    return f"{'gated_' if attributes['gated'] else ''}{attributes['activation']}_{digest}"


def build_function(node: ir.Node, opset: int) -> ir.Function:
    """The function for a node's configuration, written in the model's standard operator set.

    Args:
        node: A FusedExperts that `has_portable_form`.
        opset: 13 or newer.
    """
    attributes = _attributes(node)
    given = experts_inputs(node)
    dtype, experts = given["x"].dtype, dim(given["fc1_weights"], 0)
    assert dtype is not None
    assert experts is not None
    inputs = [ir.Value(name=tensor.name) for tensor, _ in zip(FUSED_EXPERTS.inputs, node.inputs, strict=False)]
    named = {value.name or "": value for value in inputs if value.name in given}
    sizes = _sizes(node)
    assert sizes is not None
    form = Float8Body if attributes["weight_format"] == "fp8" else Body
    body = form(ExpertsConfig.from_attributes(attributes), dtype, experts, sizes)
    y = body.write(named)
    y.name = FUSED_EXPERTS.outputs[0].name
    graph = ir.Graph(inputs, [y], nodes=body.tape.nodes, opset_imports={"": opset})
    declared = [ir.Attr(name, ir.AttributeType.UNDEFINED, None) for name in sorted(attributes)]
    return ir.Function(DOMAIN, FUSED_EXPERTS.name, overload(node, opset), graph=graph, attributes=declared)


def _attributes(node: ir.Node) -> dict[str, AttributeValue]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def _sizes(node: ir.Node) -> dict[str, tuple[int, int]] | None:
    """N and the last length of the weights of each layer; dense ones need none."""
    given = experts_inputs(node)
    found = {layer: stored_sizes(given, layer) for layer in ("fc1", "fc2")}
    if _attributes(node).get("weight_format") == "dense":
        return dict.fromkeys(found, (0, 0))
    sizes = {layer: size for layer, size in found.items() if size is not None}
    return sizes if len(sizes) == len(found) else None
