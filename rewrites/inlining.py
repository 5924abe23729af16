"""Inline the model-local functions that hold a router: rules work on graphs, where constants and types are known.

A function sees neither, and may be called with other weights each time. Runtimes inline it anyway. Functions that hold
no router, and the portable bodies of our own operators, stay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir
from onnx_ir.passes import common

from ort_moe.ops import DOMAIN
from ort_moe.rewrites.names import Names
from ort_moe.rewrites.router_node import is_router
from ort_moe.rewrites.values import is_op

_Key = ir.OperatorIdentifier


def inline_functions(model: ir.Model, op_types: Collection[str]) -> int:
    """Inline, in place, the functions that hold a FusedRouter or a standard node of these types, or call such.

    Returns:
        How many. What has an `obstacle` stays, and so does what it calls.
    """
    calls = _calls(model)
    if not calls:
        return 0
    called_by_any = calls_with_graphs(model)
    holders = _holders(model, calls, op_types)
    wanted = {key for key in holders if obstacle(model, model.functions[key], called_by_any) is None}
    while called := {other for key in calls.keys() - wanted for other in calls[key] & wanted}:
        wanted -= called  # into a function that stays, which may import other operator sets
    if wanted:
        try:
            common.InlinePass(lambda function: function.identifier() in wanted)(model)
        except ir.passes.PreconditionError:  # functions that call each other in a circle are the runtime's to refuse
            return 0
        _separate_names(model.graph)
    return len(wanted)


def obstacle(model: ir.Model, function: ir.Function, called: Mapping[_Key, bool]) -> str | None:
    """Why the function cannot be inlined, in a clause; None if it can.

    Args:
        model: Which holds it.
        function: Of the model.
        called: What `calls_with_graphs` finds in the model: once, for all its functions.
    """
    for domain, version in function.opset_imports.items():
        own = model.graph.opset_imports.get(domain, version)
        if own != version:
            return f"it imports version {version} of the operator set '{domain or 'ai.onnx'}', the model version {own}"
    key = function.identifier()
    if key not in called:
        return "nothing calls it"
    return "it is called with a graph" if called[key] else None


def calls_with_graphs(model: ir.Model) -> dict[_Key, bool]:
    """For each operator in the model, functions included, whether some node of it has a graph."""
    found: dict[_Key, bool] = {}
    bodies: tuple[ir.Graph | ir.Function, ...] = (model.graph, *model.functions.values())
    for node in (node for graph in bodies for node in graph.all_nodes()):
        kinds = {attribute.type for attribute in node.attributes.values()}
        key = node.op_identifier()
        found[key] = found.get(key, False) or not kinds.isdisjoint((ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS))
    return found


def _calls(model: ir.Model) -> dict[_Key, set[_Key]]:
    """What each function but ours calls among the others."""
    own = {key: function for key, function in model.functions.items() if function.domain != DOMAIN}
    return {key: {node.op_identifier() for node in function.all_nodes()} & own.keys() for key, function in own.items()}


def _holders(model: ir.Model, calls: dict[_Key, set[_Key]], op_types: Collection[str]) -> set[_Key]:
    """The functions that hold such a node, or call one that does."""
    found = {
        key
        for key in calls
        if any(is_router(node) or is_op(node, *op_types) for node in model.functions[key].all_nodes())
    }
    while fresh := {key for key, called in calls.items() if called & found} - found:
        found |= fresh
    return found


def _separate_names(graph: ir.Graph) -> None:
    """Rename the values of bodies that are now called like a value around them."""
    names = Names(graph)

    def visit(inner: ir.Graph, around: frozenset[str]) -> None:
        own = [*inner.inputs, *inner.initializers.values(), *(value for node in inner for value in node.outputs)]
        for value in own:
            if value.name and value.name in around:
                value.name = names.unused(value.name)
        seen = around | {value.name for value in own if value.name}
        for node in inner:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    visit(attribute.as_graph(), seen)
                elif attribute.type == ir.AttributeType.GRAPHS:
                    for body in attribute.as_graphs():
                        visit(body, seen)

    visit(graph, frozenset())
