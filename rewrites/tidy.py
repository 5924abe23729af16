"""Clean up around one rewrite: what nobody reads any more, identities, and copies of what is there already.

What `canonicalize.clean_up` does for a whole model, for the few nodes that a rule put in, so that the work of a rewrite
does not grow with the model. The order of the nodes is left to `clean_up`.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from ort_moe.rewrites.values import is_op


def tidy(replaced: Iterable[ir.Value], new_nodes: Iterable[ir.Node]) -> None:
    """Clean up after a rewrite, in place.

    Args:
        replaced: The values that the rewrite replaced.
        new_nodes: The nodes that it put in.
    """
    for value in replaced:
        discard(value.producer())
    for node in new_nodes:
        if node.graph is None:
            continue
        if is_op(node, "Identity"):
            if pass_by(node):
                discard(node)
        else:
            _merge_with_twin(node)
            discard(node)


def discard(node: ir.Node | None) -> None:
    """Remove a node of which nobody reads anything, and then those that only it read."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is None or node.graph is None or any(value.uses() or value.is_graph_output() for value in node.outputs):
            continue
        waiting.extend(value.producer() for value in node.inputs if value is not None)
        node.graph.remove(node, safe=True)


def pass_by(identity: ir.Node) -> bool:
    """Hand the readers of an Identity its input; False for one that makes an output of the graph, which stays."""
    source, result = identity.inputs[0], identity.outputs[0]
    if source is None or result.is_graph_output():
        return False
    source.type, source.shape = source.type or result.type, source.shape or result.shape
    result.replace_all_uses_with(source)
    return True


def _merge_with_twin(node: ir.Node) -> None:
    """Let the readers of a node read a node of the graph that computes the same, if there is one."""
    source = next((value for value in node.inputs if value is not None), None)
    if source is None or any(value.is_graph_output() for value in node.outputs):
        return
    for other in source.consumers():
        if other is not node and _computes_the_same(node, other):
            for old, new in zip(node.outputs, other.outputs, strict=True):
                old.replace_all_uses_with(new)
            return


def _computes_the_same(node: ir.Node, other: ir.Node) -> bool:
    return (
        other.graph is node.graph
        and other.op_identifier() == node.op_identifier()
        and len(other.outputs) == len(node.outputs)
        and len(other.inputs) == len(node.inputs)
        and all(a is b for a, b in zip(node.inputs, other.inputs, strict=True))
        and _attributes(node) == _attributes(other)
        and not any(
            attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS, ir.AttributeType.TENSOR)
            for attribute in node.attributes.values()
        )
    )


def _attributes(node: ir.Node) -> dict[str, object]:
    return {name: attribute.value for name, attribute in node.attributes.items()}
