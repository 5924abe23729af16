"""The arithmetic around a choice of experts: what may be spelt in another way, and where a growth rule may end.

How far a router reaches is told by its operands: behind the choice, up to where something is mixed in that is neither a
constant nor made from the choice; before it, up to the matrix product that made the logits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.values import constant, integer, is_op

ARITHMETIC = RESHAPING | {
    "Abs", "Add", "Cast", "Clip", "Div", "Equal", "Exp", "Expand", "GatherElements", "GatherND", "Greater", "Less",
    "Log", "LogSoftmax", "Max", "Min", "Mul", "Neg", "Not", "Pow", "Reciprocal", "ReduceL1", "ReduceLogSumExp",
    "ReduceMax", "ReduceMean", "ReduceSum", "Relu", "ScatterElements", "Sigmoid", "Slice", "Softmax", "Softplus",
    "Sqrt", "Sub", "Tanh", "Tile", "TopK", "Transpose", "Where",
}  # fmt: skip
"""Ops of which routers are made, however they are spelt."""

_MIXES = frozenset({"Add", "Div", "Max", "Min", "Mul", "Pow", "Sub"})
"""Ops whose operands tell whether they are still the router's."""
_MOVES_INDICES = RESHAPING | {"Cast", "Slice"}
_MOST_READERS = 32
"""Readers of a value among which only gathers and casts are looked at: so many are the experts, one by one."""
_MOST_NODES = 128
"""Nodes looked at on either side of a choice; the largest router seen has 30."""


def around(topk: ir.Node) -> tuple[list[ir.Node], list[ir.Node]]:
    """The nodes before and behind the choice of a TopK, nearest first, all of one graph."""
    after, _ = _behind(topk)
    before = _leading_to([topk, *after])
    return [node for node in before if node not in after], list(after)


def vicinity(router: ir.Node) -> list[ir.Node]:
    """A FusedRouter and what is behind it, with the first nodes that mix in something else, nearest first."""
    after, ends = _behind(router)
    return [router, *after, *ends]


def _behind(choice: ir.Node) -> tuple[dict[ir.Node, None], dict[ir.Node, None]]:
    """The nodes made from the weights and the indices alone, and those that read them beside other values."""
    weights, indices = choice.outputs[:2]
    after: dict[ir.Node, None] = {}
    ends: dict[ir.Node, None] = {}
    own: set[ir.Value | None] = set()
    queue = deque([weights, *_gathered(indices, after, ends)])
    while queue and len(after) < _MOST_NODES:
        value = queue.popleft()
        if value in own:
            continue
        own.add(value)
        for node in _readers(value):
            if node.graph is not choice.graph or node in after:
                continue
            mixes = any(operand not in own and constant(operand) is None for operand in node.inputs)
            if not is_op(node, *ARITHMETIC) or (is_op(node, *_MIXES) and mixes):
                ends[node] = None  # until the other operand is found to be made from the choice, too
            else:
                ends.pop(node, None)
                after[node] = None
                queue.extend(node.outputs)
    return after, ends


def _gathered(indices: ir.Value, after: dict[ir.Node, None], ends: dict[ir.Node, None]) -> list[ir.Value]:
    """What the indices, moved and cast, gather from rows over the experts; fills in the nodes on the way."""
    gathered: list[ir.Value] = []
    queue = deque([indices])
    while queue and len(after) < _MOST_NODES:
        for node in _readers(queue.popleft()):
            if node.graph is not indices.graph or node in after:
                continue
            if is_op(node, *_MOVES_INDICES):
                after[node] = None
                queue.extend(node.outputs)
            elif is_op(node, "GatherElements") or (is_op(node, "GatherND") and integer(node, "batch_dims", 0) > 0):
                after[node] = None
                gathered.extend(node.outputs)
            else:
                ends[node] = None
    return gathered


def _readers(value: ir.Value) -> Iterable[ir.Node]:
    readers = value.consumers()
    if len(readers) <= _MOST_READERS:
        return readers
    return [node for node in readers if is_op(node, "GatherElements", "Cast")]


def _leading_to(nodes: Iterable[ir.Node]) -> dict[ir.Node, None]:
    found = dict.fromkeys(nodes)
    queue, most = deque(found), len(found) + _MOST_NODES
    while queue and len(found) < most:
        node = queue.popleft()
        for producer in (value.producer() for value in node.inputs if value is not None):
            if producer is None or producer in found or producer.graph is not node.graph:
                continue
            if is_op(producer, *ARITHMETIC):
                found[producer] = None
                queue.append(producer)
    return found
