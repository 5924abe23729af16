"""One expert after the other on all tokens, each weighed by what a comparison with its number leaves of the weights.

sum_e(Sum_k(w_k * (ids_k == e)) * (W2_e @ act(W1_e @ x))) -> FusedExperts(x, w, ids, ...)

How model builders write experts for runtimes without an operator for them: E small layers with matrices of their own.
They become one constant, which is written when the model is. A loop that leaves experts out is another model and stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.rewrites.experts.block import ExpertsBlock
from ort_moe.rewrites.experts.dispatched import one_of_two_axes, require_tokens, scattered, shape_readers
from ort_moe.rewrites.experts.single import Term, chosen_by, read_terms
from ort_moe.rewrites.experts.tokens import named, plain, require_as_many
from ort_moe.rewrites.experts.two_layers import weighted
from ort_moe.rewrites.rule import Mismatch, Refusal, RuleInfo
from ort_moe.rewrites.values import (
    constant,
    consumers,
    filling,
    integer,
    is_last_axis,
    is_op,
    may_spread,
    operands,
    producer,
    rank,
    reduces_last_axis,
    scalar,
    through,
)

SCATTERS = ("ScatterElements", "ScatterND")
"""What puts the rows of some tokens among those of all."""

RULE = RuleInfo(
    "experts-unrolled",
    "sum_e(ReduceSum(w * (ids == e)) * (W2_e @ act(W1_e @ x))) -> FusedExperts(x, w, ids, W1, W2)",
    "Where each expert that may be chosen runs on all tokens, with matrices of its own.",
)

ROOT = "Add"


def read(node: ir.Node) -> ExpertsBlock:
    """Reads the experts whose sum ends here.

    Raises:
        Mismatch: None do, or the sum goes on.
        Refusal: They are nothing that FusedExperts computes.
    """
    last = next((term for value in operands(node)[::-1] if (term := _term(value)) is not None), None)
    if last is None or _goes_on(node, chosen_by(last.ids)):
        raise Mismatch
    terms, base = _terms(node, chosen_by(last.ids))
    block = read_terms(terms, node.outputs[0], base if filling(base) != 0.0 else None)
    if any(producer(value, *SCATTERS) is not None for value in operands(node)):
        if base is None:
            raise Mismatch
        require_tokens(base, block.x)
    return block


def _terms(node: ir.Node, ids: ir.Value) -> tuple[list[Term], ir.Value | None]:
    """What the sum adds up for a choice, and what it begins with."""
    base: ir.Value | None = None
    known: dict[ir.Value, Term | None] = {}

    def term_of(value: ir.Value) -> Term | None:
        if value not in known:
            known[value] = _term(value, ids)
        return known[value]

    found, queue = [], list(operands(node))
    while queue:
        value = queue.pop()
        term = term_of(value)
        if term is not None:
            found.append(term)
        elif (before := producer(value, "Add")) is not None and any(map(term_of, operands(before))):
            users = list(consumers(value))
            if len(users) - len(shape_readers(users)) > 1 or value.is_graph_output():
                raise Refusal(f"the sum {named(value)} of some experts is also read by others", "read-by-others")
            queue += operands(before)
        elif base is None or filling(base) == 0.0:
            base = value
        elif filling(value) != 0.0:
            raise Mismatch
    return found, base


def _goes_on(node: ir.Node, ids: ir.Value) -> bool:
    """Whether another expert of the same choice is added to this sum."""
    result = node.outputs[0]
    others = (
        value for user in consumers(result) if is_op(user, "Add") for value in operands(user) if value is not result
    )
    return any(_term(value, ids) for value in others)


def _term(value: ir.Value, choice: ir.Value | None = None) -> Term | None:
    """rows * share, if that makes the value, for this choice or any; or rows put among zeros."""
    if producer(value, *SCATTERS) is not None:
        return scattered(value, choice)
    if producer(value, "Mul") is None:
        return None
    rows, column = weighted(value)
    if column is None or rows.dtype is None:
        return None
    share = _of_table(column, rows.dtype) or _of_comparison(column, rows.dtype)
    if share is None or choice not in (None, chosen_by(share.ids)):
        return None
    return Term(share.expert, rows, share.ids, share.weights, _all_tokens, share.is_once)


@dataclass(frozen=True)
class _Share:
    """What an expert's results are multiplied with."""

    expert: int
    ids: ir.Value
    weights: ir.Value
    is_once: bool = False


def _of_comparison(column: ir.Value, dtype: ir.DataType) -> _Share | None:
    """ReduceSum(w * (ids == e))."""
    total = producer(plain(column, dtype), "ReduceSum")
    if total is None or not (reduces_last_axis(total, keepdims=True) or reduces_last_axis(total, keepdims=False)):
        return None
    share = plain(operands(total)[0], dtype).producer()
    if share is None or not is_op(share, "Mul", "Where"):
        return None
    if share.op_type == "Where":
        test, weights, other = operands(share)
        pairs = [(test, weights)] if filling(other) == 0.0 else []
    else:
        left, right = operands(share)
        pairs = [(left, right), (right, left)]
    for mask, weights in pairs:
        equal = producer(through(mask, {"Cast", "Identity"}), "Equal")
        if equal is None or may_spread(mask, weights):
            continue
        for ids, number in (operands(equal), operands(equal)[::-1]):
            expert = scalar(number)
            if expert is None or not expert.is_integer() or constant(ids) is not None:
                continue
            if rank(number) in (0, 1):
                return _Share(int(expert), ids, weights)
    return None


def _of_table(column: ir.Value, dtype: ir.DataType) -> _Share | None:
    """Column e of Scatter(0, ids, w), or row e of it turned."""
    value = plain(column, dtype)
    node = producer(value, "Slice", "Gather", "Split")
    if node is None or node.inputs[0] is None or rank(node.inputs[0]) != 2:
        return None
    source = plain(node.inputs[0], dtype)
    place = one_of_two_axes(node, value)
    along = 1
    if (turned := producer(source, "Transpose")) is not None:
        source, along = plain(operands(turned)[0], dtype), 0
    scatter = producer(source, "ScatterElements")
    if scatter is None or place is None or place[1] != along or rank(source) != 2:
        return None
    background, ids, weights = operands(scatter)
    is_alone = filling(background) == 0.0 and scatter.attributes.get_string("reduction", "none") == "none"
    if not is_alone or not is_last_axis(integer(scatter, "axis", 0), source):
        return None
    require_as_many(scatter.outputs[0], ids, "the rows over all experts")
    return _Share(place[0], ids, weights, is_once=True)


def _all_tokens(rows: ir.Value, width: int) -> ir.Value:
    del width
    return through(rows, {"Identity"})
