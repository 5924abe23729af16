"""The portable bodies of our nodes, as model-local functions: given to nodes, and dropped where none is left.

There is one overload per configuration; `router_body.py` writes those of routers, `experts/body.py` those of experts.
ONNX Runtime inlines them where the ort_moe library is not registered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_ir as ir

from ort_moe.graphs.node_kinds import is_experts, is_shared_gate_router
from ort_moe.ops import DOMAIN
from ort_moe.rewrites import router_body
from ort_moe.rewrites.experts import body as experts_body
from ort_moe.rewrites.router_node import Router, is_router
from ort_moe.rewrites.values import dim

OLDEST_OPSET = 13
"""Oldest standard operator set in which the bodies can be written (axes of ReduceSum as an input)."""

_OLDEST_IR_VERSION = 10
"""Oldest IR version whose functions have overloads."""


def attach_functions(model: ir.Model) -> int:
    """Give every router and FusedExperts, those in bodies too, its function; the number of functions added.

    But for those whose routing maps are read, which no function makes, and experts in float8 before operator set 19.
    """
    added = 0
    opset = model.graph.opset_imports[""]
    for node in model.graph.all_nodes():
        function: Callable[[], ir.Function]
        if is_router(node):
            router = Router.read(node)
            if router.has_maps:
                continue
            node.overload, function = (
                router_body.overload(router, opset),
                partial(router_body.build_function, router, opset),
            )
        elif is_shared_gate_router(node):
            router = router_body.shared_gate_router(node)
            if router.has_maps or dim(node.inputs[2], 0) is None:
                continue
            node.overload, function = (
                router_body.overload(router, opset),
                partial(router_body.build_shared_gate_function, router, opset),
            )
        elif is_experts(node) and experts_body.has_portable_form(node, opset):
            node.overload, function = (
                experts_body.overload(node, opset),
                partial(experts_body.build_function, node, opset),
            )
        else:
            continue
        if node.op_identifier() not in model.functions:
            model.functions[node.op_identifier()] = function()
            added += 1
    if added:
        model.ir_version = max(model.ir_version, _OLDEST_IR_VERSION)
    return added


def drop_unread_functions(model: ir.Model) -> None:
    """Drop the bodies of our nodes that are gone, and the import of our domain with the last node of it."""
    bodies: tuple[ir.Graph | ir.Function, ...] = (model.graph, *model.functions.values())
    called = {node.op_identifier() for body in bodies for node in body.all_nodes()}
    for key in [key for key in model.functions if key[0] == DOMAIN and key not in called]:
        del model.functions[key]
    if not any(node.domain == DOMAIN for node in model.graph.all_nodes()):
        model.graph.opset_imports.pop(DOMAIN, None)
