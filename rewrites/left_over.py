"""The router arithmetic that is left around a FusedRouter, and what rules say against absorbing it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import onnx_ir as ir
from onnxscript.rewriter import RewriteRule

from ort_moe.graphs.operators import PRODUCTS, RESHAPING
from ort_moe.reasons import REASONS
from ort_moe.rewrites.finding import Finding
from ort_moe.rewrites.router_node import Router
from ort_moe.rewrites.rule import RefusalLog, Told
from ort_moe.rewrites.tabulate import tabulate
from ort_moe.rewrites.values import (
    FLOATS,
    constant,
    consumers,
    dim,
    filling,
    integer,
    is_last_axis,
    is_op,
    label,
    producer,
    rank,
    through,
)

_BEFORE = (
    "Softmax", "LogSoftmax", "Sigmoid", "Softplus", "Sqrt", "Tanh", "Exp", "Log", "Where", "Add", "Sub", "Mul", "Div",
    "Clip", "Min", "Max", "Pow", "Relu",
)  # fmt: skip
_AFTER = (
    "ReduceSum", "ReduceL1", "ReduceMax", "Div", "Sub", "Softmax", "LogSoftmax", "Sigmoid", "Softplus", "Sqrt", "Exp",
    "Clip", "Min", "Max", "Pow", "Where", "Add", "Mul", "ScatterElements",
)  # fmt: skip
_NORMALISERS = ("ReduceSum", "ReduceL1", "ReduceLogSumExp", "Softmax", "LogSoftmax")
_MOVES = RESHAPING | {"Cast", "Transpose"}
_MOST_STEPS = 16
"""Values looked at behind the weights for a sum of them and others."""


def left_over(
    model: ir.Model, router: Router, rules: Callable[[str], Iterable[RewriteRule]], seeding: RefusalLog
) -> Iterator[Finding]:
    """What of the router still stands before or behind the node.

    Args:
        model: After the fixed point.
        router: Of the model.
        rules: Which rules a node type may end; asked for what they refuse.
        seeding: What the seeds refused, by the node they ended in.
    """
    node, weights, indices = router.node, router.weights, router.indices
    before = producer(through(router.logits, _MOVES | {"Slice"}), *_BEFORE)
    if before is not None and not _is_linear_step(before):
        told = [*seeding.told(node), *_told(model, node, rules)]
        further = [label(node) for node in _arithmetic_before(before)]
        detail = f"{label(before)} stands before the choice" + (f", behind {', '.join(further)}" if further else "")
        yield _finding("left-over-before", before, told, detail, ())
    copies = _cast_copies(weights)
    users = [user for value in copies for user in consumers(value)]
    arithmetic = [user for user in users if is_op(user, *_AFTER) and not _combines_experts(user, copies, indices)]
    if len({user for user in users if not is_op(user, "Cast")}) > 1:
        arithmetic = [user for user in arithmetic if not _takes_some_experts(user, router)]
    if arithmetic:
        others = tuple(label(user) for user in users if user is not arithmetic[0] and not is_op(user, "Cast"))
        told = [each for user in arithmetic for each in _told(model, user, rules)]
        detail = f"{label(arithmetic[0])} still works on the weights"
        yield _finding("left-over-after", arithmetic[0], told, detail, others)
    for copy in copies:
        yield from _shared_normaliser(copy)
    for user in _gathers_of_chosen(indices, router.experts):
        shared = list(_shared_normaliser(user.outputs[0]))
        detail = f"{label(user)} gathers values of the chosen experts"
        yield from shared or [_finding("left-over-after", user, _told(model, user, rules), detail, ())]


def _gathers_of_chosen(indices: ir.Value, experts: int | None) -> Iterator[ir.Node]:
    """The nodes that gather computed numbers by the indices, or by places that are made of them."""
    for value in _cast_copies(indices, RESHAPING):
        for user in consumers(value):
            if is_op(user, "GatherElements") and user.inputs[0] is not value:
                yield user
            for gather in consumers(user.outputs[0]) if is_op(user, "Concat", "Add") else ():
                data = gather.inputs[0]
                if data is None or data is user.outputs[0] or constant(data) is not None or data.is_initializer():
                    continue
                by_coordinates = is_op(user, "Concat") and is_op(gather, "GatherND") and dim(data, -1) == experts
                by_place = is_op(user, "Add") and is_op(gather, "Gather") and 1 in (rank(data), dim(data, -1))
                if (by_coordinates or by_place) and data.dtype in FLOATS:
                    yield gather


def _shared_normaliser(weights: ir.Value) -> Iterator[Finding]:
    """Where the weights are joined with others and then divided by the sum of all."""
    for concat in consumers(weights):
        if not is_op(concat, "Concat") or not is_last_axis(integer(concat, "axis", 0), concat.outputs[0]):
            continue
        queue = [concat.outputs[0]]
        for value in queue:
            if len(queue) > _MOST_STEPS:
                break
            users = list(consumers(value))
            total = next((user for user in users if is_op(user, *_NORMALISERS)), None)
            if total is not None:
                detail = f"{label(concat)} joins the weights with others, and {label(total)} is over all of them"
                yield Finding(REASONS["shared-normaliser"], concat.name or "", detail)
                return
            queue.extend(user.outputs[0] for user in users if is_op(user, "Cast", *_BEFORE))


def _arithmetic_before(node: ir.Node, most: int = 5) -> list[ir.Node]:
    """The router arithmetic in front of this node, nearest first, along the first operand that is computed."""
    found: list[ir.Node] = []
    while len(found) < most:
        operands = [value for value in node.inputs if value is not None and constant(value) is None]
        before = producer(through(operands[0], _MOVES), *_BEFORE) if operands else None
        if before is None or _is_linear_step(before):
            break
        found.append(before)
        node = before
    return found


def _finding(slug: str, node: ir.Node, told: list[Told], detail: str, others: tuple[str, ...]) -> Finding:
    readers = tuple(dict.fromkeys(reader for each in told for reader in each.readers))
    # What another reader prevents is the nearest to fusion; what other rules say of the same node is of less interest.
    clauses = "; ".join(dict.fromkeys(each.sentence for each in told if each.readers or not readers))
    if clauses:
        detail = f"{detail} ({clauses})"
    if not readers:
        return Finding(REASONS[slug], node.name or "", detail, others)
    remedy = f"Export without what else reads it: {', '.join(readers)}."
    return Finding(REASONS["read-by-others"], node.name or "", detail, readers, remedy)


def _cast_copies(value: ir.Value, moves: Collection[str] = ()) -> list[ir.Value]:
    """The value, what it is cast to, parts of these, and what the ops in `moves` make of them."""
    copies = [value]
    for copy in copies:
        users = (user for user in consumers(copy) if user.inputs[0] is copy)
        copies.extend(user.outputs[0] for user in users if is_op(user, "Cast", "Slice", *moves))
    return copies


def _is_linear_step(node: ir.Node) -> bool:
    """Whether it is part of the linear layer before the router: a constant bias or factor, such as a temperature."""
    while is_op(node, "Add", "Sub", "Mul", "Div"):
        constants = [constant(value) is not None for value in node.inputs]
        if not any(constants) or (node.op_type == "Div" and not constants[1]):
            return False
        other = node.inputs[constants.index(True) - 1]
        before = None if other is None else through(other, _MOVES | {"Slice"}).producer()
        if before is None or before.op_type in PRODUCTS:
            return before is not None
        node = before
    return False


def _combines_experts(node: ir.Node, copies: list[ir.Value], indices: ir.Value) -> bool:
    """Whether a product or a scatter mixes the weights into activations: the expert layer's work, not the router's."""
    if is_op(node, "ScatterElements"):
        return len(node.inputs) > 2 and node.inputs[2] in copies and filling(node.inputs[0]) == 0.0
    if not is_op(node, "Mul"):
        return False
    others = [value for value in node.inputs if value is not None and value not in copies]
    if not others or constant(others[0]) is not None:
        return False
    gather = producer(through(others[0], {"Cast"}), "Gather", "GatherND", "GatherElements")
    return gather is None or through(gather.inputs[-1] or indices, _MOVES) is not indices


def _takes_some_experts(node: ir.Node, router: Router) -> bool:
    """Whether it keeps the weights of some experts, told by the indices: where other nodes take those of the others."""
    operands = node.inputs[:1] if node.op_type == "Where" else node.inputs if node.op_type == "Mul" else ()
    return any(tabulate(value, router.indices, router.experts) is not None for value in operands)


def _told(model: ir.Model, node: ir.Node, rules: Callable[[str], Iterable[RewriteRule]]) -> list[Told]:
    """What the rules that end in this node say against it."""
    collected = RefusalLog()
    assert node.graph is not None
    for rule in rules(node.op_type):
        rule.match(model, node.graph, node, check_nodes_are_removable=False, tracer=collected)
    return collected.told(node)


def between(router: Router) -> str:
    """What stands next to a router that absorbed nothing."""
    before = through(router.logits, _MOVES).producer()
    behind = [label(user) for value in _cast_copies(router.weights) for user in consumers(value)]
    source = "an input of the graph" if before is None else label(before)
    read = f"its weights go to {', '.join(behind[:3])}" if behind else "its weights are not read"
    return f"its input is from {source}, {read}"
