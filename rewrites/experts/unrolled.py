"""One expert after the other on all tokens, each weighed by what a comparison with its number leaves of the weights.

sum_e(Sum_k(w_k * (ids_k == e)) * (W2_e @ act(W1_e @ x))) -> FusedExperts(x, w, ids, ...)

How model builders write experts for runtimes without an operator for them: E small layers with matrices of their own.
They become one constant, which is written when the model is. A loop that leaves experts out is another model and stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.rewrites.experts.block import ExpertsBlock
from ort_moe.rewrites.experts.layer import Layer, Stack, joined, read_vectors
from ort_moe.rewrites.experts.linear import read_linear
from ort_moe.rewrites.experts.sums import experts_type
from ort_moe.rewrites.experts.tokens import named, plain, require_as_many, require_choices, require_range
from ort_moe.rewrites.experts.two_layers import Product, read_two_layers, weighted
from ort_moe.rewrites.rule import Mismatch, Refusal, RuleInfo
from ort_moe.rewrites.values import (
    INDICES,
    RESHAPING,
    constant,
    consumers,
    dim,
    filling,
    is_op,
    may_spread,
    operands,
    producer,
    rank,
    reduces_last_axis,
    scalar,
    through,
    through_casts,
)

RULE = RuleInfo(
    "experts-unrolled",
    "sum_e(ReduceSum(w * (ids == e)) * (W2_e @ act(W1_e @ x))) -> FusedExperts(x, w, ids, W1, W2)",
    "Where each expert that may be chosen runs on all tokens, with matrices of its own.",
)

ROOT = "Add"


@dataclass(frozen=True)
class _Term:
    """What one expert adds."""

    expert: int
    rows: ir.Value
    ids: ir.Value
    weights: ir.Value


def read(node: ir.Node) -> ExpertsBlock:
    """Reads the experts whose sum ends here.

    Raises:
        Mismatch: None do, or the sum goes on.
        Refusal: They are nothing that FusedExperts computes.
    """
    last = next((term for value in operands(node)[::-1] if (term := _term(value)) is not None), None)
    if last is None or _goes_on(node, _chosen(last.ids)):
        raise Mismatch
    ids = _chosen(last.ids)
    found, residual = _terms(node, ids)
    terms = sorted(found, key=lambda term: term.expert)
    first = terms[0]
    if [term.expert for term in terms] != list(range(len(terms))) or len(terms) < 2:
        raise Refusal(f"{named(node.outputs[0])} adds up other experts than each of some once", "experts-form")
    dtype = experts_type(first.rows)
    layers = [read_two_layers(term.rows, dtype, _width(term.rows), _read_product, _read_bias) for term in terms]
    mix = plain(first.weights, dtype)
    for term in terms:
        if plain(term.weights, dtype) is not mix:
            raise Refusal(f"{named(term.rows)} is weighed by others than the first expert", "experts-form")
    x = through(layers[0].first.rows, {"Identity"})
    for each in layers:
        if through(each.first.rows, {"Identity"}) is not x or each.attributes != layers[0].attributes:
            raise Refusal(f"{named(each.first.node.outputs[0])} is of another form than the first", "experts-form")
    k = dim(ids, -1)
    if k is None:
        raise Refusal(f"the number of choices in {named(ids)} is not fixed", "experts-form")
    require_choices(ids, mix, k)
    if any(dim(view, -1) != k for term in terms for view in (term.ids, term.weights)):
        raise Refusal(f"{named(first.rows)} is not weighed by all {k} choices of a token at once", "experts-form")
    require_range(ids, len(terms))
    require_as_many(mix, ids, "the weights")
    require_as_many(x, ids, "the rows")
    y = node.outputs[0]
    if y.dtype != dtype:
        raise Refusal(f"the sum {named(y)} is {y.dtype}, not the experts' {dtype}", "experts-form")
    if residual is not None and (residual.dtype != dtype or may_spread(residual, y)):
        raise Refusal(f"{named(residual)}, to which the experts are added, is of another type or shape", "experts-form")
    if residual is not None:
        require_as_many(residual, x, "the rows to which the experts are added,")
    fc1, fc2 = _joined([each.fc1 for each in layers]), _joined([each.fc2 for each in layers])
    attributes = {**layers[0].attributes, "weight_on": "output"}
    return ExpertsBlock(y, x, mix, ids, fc1, fc2, attributes, residual)


def _terms(node: ir.Node, ids: ir.Value) -> tuple[list[_Term], ir.Value | None]:
    """What the sum adds up for a choice, and what it begins with, if not with zeros."""
    residual: ir.Value | None = None
    known: dict[ir.Value, _Term | None] = {}

    def term_of(value: ir.Value) -> _Term | None:
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
            if len(list(consumers(value))) > 1 or value.is_graph_output():
                raise Refusal(f"the sum {named(value)} of some experts is also read by others", "read-by-others")
            queue += operands(before)
        elif filling(value) != 0.0:
            if residual is not None:
                raise Mismatch
            residual = value
    return found, residual


def _goes_on(node: ir.Node, ids: ir.Value) -> bool:
    """Whether another expert of the same choice is added to this sum."""
    result = node.outputs[0]
    others = (
        value for user in consumers(result) if is_op(user, "Add") for value in operands(user) if value is not result
    )
    return any(_term(value, ids) for value in others)


def _term(value: ir.Value, choice: ir.Value | None = None) -> _Term | None:
    """rows * ReduceSum(w * (ids == e)), if that makes the value, for this choice or any."""
    if producer(value, "Mul") is None:
        return None
    rows, column = weighted(value)
    total = None if column is None or rows.dtype is None else producer(plain(column, rows.dtype), "ReduceSum")
    if (
        total is None
        or rows.dtype is None
        or not (reduces_last_axis(total, keepdims=True) or reduces_last_axis(total, keepdims=False))
    ):
        return None
    share = plain(operands(total)[0], rows.dtype).producer()
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
            if choice in (None, _chosen(ids)) and rank(number) in (0, 1):
                return _Term(int(expert), rows, ids, weights)
    return None


def _chosen(ids: ir.Value) -> ir.Value:
    """The choices (..., K) that indices are a view of, which float32 holds as they are."""
    return through_casts(ids, {*INDICES, ir.DataType.FLOAT}, RESHAPING)


def _width(rows: ir.Value) -> int:
    width = dim(rows, -1)
    if width is None:
        raise Mismatch
    return width


def _read_product(value: ir.Value) -> Product | None:
    """A linear layer of rows with one constant matrix."""
    linear = read_linear(value)
    return None if linear is None else Product(linear.weights, linear.node, linear.rows, bias=linear.bias)


def _read_bias(value: ir.Value, product: Product) -> Stack | None:
    """A constant vector, or one row."""
    del product
    return read_vectors([value]) if rank(value) == 1 or dim(value, 0) == 1 else None


def _joined(layers: Sequence[Layer]) -> Layer:
    """The layers of single experts as one of all."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if biases and len(biases) != len(layers):
        raise Refusal("some experts have a bias, and others none", "experts-form")
    products = tuple(product for layer in layers for product in layer.products)
    return Layer(_stacked([layer.weights for layer in layers]), _stacked(biases) if biases else None, products)


def _stacked(stacks: Sequence[Stack]) -> Stack:
    (first, *others) = stacks
    for stack in others:
        told = [[each.form, *(part.shape[1:] for part in each.parts.values())] for each in (stack, first)]
        if told[0] != told[1]:
            sentence = f"'{stack.data.values[0].name}' makes weights {told[0]}, those of the first expert are {told[1]}"
            raise Refusal(sentence, "experts-form")
    return joined(stacks, 0)
