"""Inline the model-local functions of a router and of its experts: rules work on graphs, where constants are known.

A function does not see them, and may be called with other weights each time. Runtimes inline it anyway. Functions that
hold no router and no contrib node of experts and take no choice stay, and so do the portable bodies of our operators.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import onnx_ir as ir
from onnx_ir.passes import common

from ort_moe.graphs.node_kinds import is_contrib_moe
from ort_moe.graphs.operators import PRODUCTS, RESHAPING
from ort_moe.ops import DOMAIN
from ort_moe.rewrites.names import Names
from ort_moe.rewrites.router_node import is_router
from ort_moe.rewrites.values import is_op, through

_Key = ir.OperatorIdentifier


def inline_functions(model: ir.Model, op_types: Collection[str]) -> int:
    """Inline, in place, the functions that hold a FusedRouter, a contrib node of experts or a node of these types.

    And those that call such; and then those, with all that they call, that are given the indices of a choice.

    Args:
        model: In place.
        op_types: Of the standard operators.

    Returns:
        How many. What has an obstacle stays, and so does what it calls.
    """
    inlined, calls = 0, _calls(model)
    if calls:
        inlined += _inline(model, calls, _holders(model, calls, op_types))
    while (calls := _calls(model)) and (fresh := _inline(model, calls, _takers(model, calls))):
        inlined += fresh
    return inlined


def _inline(model: ir.Model, calls: dict[_Key, set[_Key]], keys: set[_Key]) -> int:
    """Inline these functions, but those that stay; how many."""
    called_by_any = _calls_with_graphs(model) if keys else {}
    wanted = {key for key in keys if _obstacle(model, model.functions[key], called_by_any) is None}
    while called := {other for key in calls.keys() - wanted for other in calls[key] & wanted}:
        wanted -= called  # into a function that stays, which may import other operator sets
    if wanted:
        try:
            common.InlinePass(lambda function: function.identifier() in wanted)(model)
        except ir.passes.PreconditionError:  # functions that call each other in a circle are the runtime's to refuse
            return 0
        _separate_names(model.graph)
    return len(wanted)


def _obstacle(model: ir.Model, function: ir.Function, called: Mapping[_Key, bool]) -> str | None:
    """Why the function cannot be inlined, in a clause; None if it can.

    Args:
        model: Which holds it.
        function: Of the model.
        called: What `_calls_with_graphs` finds in the model: once, for all its functions.
    """
    for domain, version in function.opset_imports.items():
        own = model.graph.opset_imports.get(domain, version)
        if own != version:
            return f"it imports version {version} of the operator set '{domain or 'ai.onnx'}', the model version {own}"
    key = function.identifier()
    if key not in called:
        return "nothing calls it"
    return "it is called with a graph" if called[key] else None


def nodes_in_functions(model: ir.Model) -> Iterator[tuple[str, str, ir.Node]]:
    """The nodes of functions that could not be inlined, each with what it is in, and why, in a clause."""
    called = _calls_with_graphs(model) if model.functions else {}
    for function in model.functions.values():
        if function.domain != DOMAIN:
            why = _obstacle(model, function, called) or "what calls it cannot be inlined"
            for node in function.all_nodes():
                yield f"{function.domain}::{function.name}", why, node


def _calls_with_graphs(model: ir.Model) -> dict[_Key, bool]:
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
        if any(
            is_router(node) or is_contrib_moe(node) or is_op(node, *op_types)
            for node in model.functions[key].all_nodes()
        )
    }
    while fresh := {key for key, called in calls.items() if called & found} - found:
        found |= fresh
    return found


def _takers(model: ir.Model, calls: dict[_Key, set[_Key]]) -> set[_Key]:
    """The functions that a graph gives the indices of a choice to multiply with matrices, and what they call."""
    found: set[_Key] = set()
    for node in model.graph.all_nodes():
        key = node.op_identifier()
        if key in calls and key not in found and any(map(_is_choice, node.inputs)):
            called = {key}
            while fresh := {other for each in called for other in calls[each]} - called:
                called |= fresh
            if any(inner.op_type in PRODUCTS for each in called for inner in model.functions[each].all_nodes()):
                found |= called
    return found


def _is_choice(value: ir.Value | None) -> bool:
    """Whether a value is the indices of a TopK or a FusedRouter, or a view of them."""
    if value is None:
        return False
    made_by = through(value, RESHAPING | {"Cast"}).producer()
    if not is_router(made_by) and not is_op(made_by, "TopK"):
        return False
    assert made_by is not None
    return through(value, RESHAPING | {"Cast"}) is made_by.outputs[1]


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
