"""The arithmetic around a router's TopK: what may be respelt, and on which side of the choice it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import onnx_ir as ir

from ort_moe.rewrites.values import RESHAPING, is_op

ARITHMETIC = RESHAPING | {
    "Abs", "Add", "Cast", "Clip", "Div", "Equal", "Exp", "Expand", "GatherElements", "GatherND", "Greater", "Less",
    "Log", "LogSoftmax", "Max", "Min", "Mul", "Neg", "Not", "Pow", "Reciprocal", "ReduceL1", "ReduceLogSumExp",
    "ReduceMax", "ReduceMean", "ReduceSum", "Relu", "ScatterElements", "Sigmoid", "Softmax", "Softplus", "Sqrt",
    "Sub", "Tanh", "Tile", "TopK", "Transpose", "Where",
}  # fmt: skip
"""Ops of which routers are made, however they are spelt."""

_MOST_NODES = 128
"""Nodes looked at on either side of a choice; the largest router seen has 30."""


def around(topk: ir.Node) -> tuple[dict[ir.Node, None], dict[ir.Node, None]]:
    """The nodes before and behind the choice, nearest first, all of one graph."""
    after = _closure(_users(topk), _users)
    before = _closure([topk, *after], _producers)
    return {node: None for node in before if node not in after}, after


def _closure(start: Iterable[ir.Node], step: Callable[[ir.Node], Iterable[ir.Node]]) -> dict[ir.Node, None]:
    found = {node: None for node in start if is_op(node, *ARITHMETIC)}
    queue = deque(found)
    while queue and len(found) < _MOST_NODES:
        for node in step(queue.popleft()):
            if node not in found and is_op(node, *ARITHMETIC):
                found[node] = None
                queue.append(node)
    return found


def _users(node: ir.Node) -> Iterable[ir.Node]:
    return (user for value in node.outputs for user in value.consumers() if user.graph is node.graph)


def _producers(node: ir.Node) -> Iterable[ir.Node]:
    producers = (value.producer() for value in node.inputs if value is not None)
    return (producer for producer in producers if producer is not None and producer.graph is node.graph)
