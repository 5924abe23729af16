"""The sum over a token's choices or over all experts, and the type that it leaves in."""

from __future__ import annotations

import onnx_ir as ir

from ort_moe.graphs.operators import PRODUCTS, RESHAPING
from ort_moe.rewrites.rule import Mismatch, Refusal
from ort_moe.rewrites.values import FLOATS, axes, consumers, dim, integer, is_op, label, rank, through

_MOST_STEPS = 8
"""Values looked at between the sum and the product: a weighing and a bias are between them."""


def choice_sum(node: ir.Node) -> tuple[ir.Value, int, int]:
    """What a sum over choices adds up, K, and H: ReduceSum over the middle axis of (T, K, H).

    Raises:
        Mismatch: It is no such sum.
    """
    return _sum_over(node, 1)


def expert_sum(node: ir.Node) -> tuple[ir.Value, int, int]:
    """What a sum over all experts adds up, E, and H: ReduceSum over the first axis of (E, T, H).

    Raises:
        Mismatch: It is no such sum.
    """
    return _sum_over(node, 0)


def _sum_over(node: ir.Node, axis: int) -> tuple[ir.Value, int, int]:
    terms, over = node.inputs[0], axes(node)
    if terms is None or over is None or len(over) != 1 or rank(terms) != 3 or integer(node, "keepdims", 1):
        raise Mismatch
    count, hidden = dim(terms, axis), dim(terms, 2)
    if over[0] not in (axis, axis - 3) or count is None or hidden is None or node.outputs[0].dtype not in FLOATS:
        raise Mismatch
    return terms, count, hidden


def experts_type(terms: ir.Value) -> ir.DataType:
    """The type in which the experts compute what is summed: that of the matrix product behind it.

    Raises:
        Mismatch: There is none.
    """
    queue = [terms]
    for value in queue:
        node = through(value, RESHAPING | {"Cast"}).producer()
        if node is not None and node.op_type in PRODUCTS | {"Concat"} and node.outputs[0].dtype in FLOATS:
            dtype = node.outputs[0].dtype
            assert dtype is not None
            return dtype
        if is_op(node, "Mul", "Add") and node is not None and len(queue) < _MOST_STEPS:
            queue += [each for each in node.inputs if each is not None]
    raise Mismatch


def rounded_sum(total: ir.Value, dtype: ir.DataType) -> ir.Value:
    """The sum in the experts' type: itself, or the one value that it is cast to.

    Raises:
        Refusal: It is read in float32, which FusedExperts would have rounded.
    """
    if total.dtype == dtype:
        return total
    users = list(consumers(total))
    if len(users) == 1 and not total.is_graph_output() and is_op(users[0], "Cast"):
        rounded = users[0].outputs[0]
        if rounded.dtype == dtype:
            return rounded
    readers = ", ".join(label(user) for user in users) or "an output of the model"
    raise Refusal(f"the sum '{total.name}' is {total.dtype}, not the experts' {dtype}, for {readers}", "experts-form")
