"""The experts' matrices gathered for each choice of each token, and multiplied with it one by one.

Gather(W1, ids) @ x -> activation -> Gather(W2, ids) @ . -> * weights -> sum over the choices -> FusedExperts(x, ...)

How transformers' `batched_mm` leaves all exporters. Each token's row is repeated for each of its choices, or spread by
the product; choices are rows in a row, or an axis of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.rewrites.experts.activation import plain, read_activation
from ort_moe.rewrites.experts.block import ExpertsBlock
from ort_moe.rewrites.experts.finalize import choice_sum, experts_type, rounded_sum
from ort_moe.rewrites.experts.layer import Layer, Stack, gathered, read_bias, read_stack, through_transposes
from ort_moe.rewrites.experts.tokens import (
    chosen,
    matrix,
    mixing,
    named,
    repeated,
    require_as_many,
    require_range,
)
from ort_moe.rewrites.rule import Mismatch, Refusal, RuleInfo
from ort_moe.rewrites.values import RESHAPING, dim, is_op, label, operands, producer, rank, through

RULE = RuleInfo(
    "experts-batched-mm",
    "sum_k(w_k * (Gather(W2, ids)_k @ act(Gather(W1, ids)_k @ x))) -> FusedExperts(x, w, ids, W1, W2)",
    "Where the weights are constants and the experts are those that the router chooses among. Weights that lie the "
    "other way round in the file are transposed once.",
)

ROOT = "ReduceSum"


@dataclass(frozen=True)
class _Product:
    """One layer of the gathered matrices."""

    layer: Layer
    ids: ir.Value
    rows: ir.Value
    spread: bool
    """Whether a token's row meets the matrices of all its choices."""


def products(node: ir.Node) -> bool:
    """Whether a node multiplies with gathered matrices: what tells of experts that are not fused."""
    return is_op(node, "MatMul") and any(_gather_of(value) is not None for value in node.inputs)


def read(node: ir.Node) -> ExpertsBlock:
    """Reads the experts that end in this sum.

    Raises:
        Mismatch: None do.
        Refusal: They are nothing that FusedExperts computes.
    """
    terms, k, hidden = choice_sum(node)
    dtype = experts_type(terms)
    rows, weights = _weighted(plain(terms, dtype))
    second = _read_layer(rows, dtype)
    if second is None:
        raise Mismatch
    inner = second.layer.weights.depth
    if second.spread and k != 1:
        raise Refusal(f"{label(second.layer.product)} multiplies each token's row with all its experts", "experts-form")
    if second.layer.weights.rows != hidden:
        raise Refusal(f"the experts return {second.layer.weights.rows} elements, summed are {hidden}", "experts-form")
    first, attributes = _first_layer(second, dtype, inner)
    x, on_input = _tokens(first, k, dtype, is_weighed=weights is not None)
    column = weights if weights is not None else on_input
    if column is None:
        raise Refusal("the experts' results are weighed nowhere", "experts-form")
    ids, mix = chosen(first.ids), mixing(column, dtype)
    if chosen(second.ids) is not ids:
        raise Refusal("the two layers take other experts", "experts-form")
    _require_choices(ids, mix, k)
    require_range(ids, first.layer.weights.experts)
    if rank(column) != 2 or k == 1:
        require_as_many(mix, ids, "the weights")
    if k == 1:  # a single row would be spread over all others
        require_as_many(x, ids, "the rows")
    attributes["weight_on"] = "output" if weights is not None else "input"
    return ExpertsBlock(rounded_sum(node.outputs[0], dtype), x, mix, ids, first.layer, second.layer, attributes)


def _require_choices(ids: ir.Value, mix: ir.Value, k: int) -> None:
    for value, what in ((ids, "chosen"), (mix, "weighed")):
        if dim(value, -1) != k:
            told = "an unknown number" if dim(value, -1) is None else dim(value, -1)
            raise Refusal(
                f"{k} results are summed for each token, {what} are {told} in {named(value)}", "experts-mismatch"
            )


def _first_layer(second: _Product, dtype: ir.DataType, inner: int) -> tuple[_Product, dict[str, str | int | float]]:
    """The first layer, and the attributes of what stands between."""
    activation = read_activation(second.rows, dtype, 2 * inner)
    first = _read_layer(activation.rows, dtype)
    if first is None:
        raise Refusal(f"{named(activation.rows)} is no product with the chosen experts' weights", "experts-form")
    rows = first.layer.weights.rows
    expected = 2 * inner if activation.attributes["gated"] else inner
    if rows != expected or first.layer.weights.experts != second.layer.weights.experts:
        raise Refusal(f"the first layer makes {rows} elements, {expected} are expected", "experts-form")
    return first, dict(activation.attributes)


def _weighted(terms: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """The experts' results and the column of their weights; None where they are not weighed here."""
    node = producer(terms, "Mul")
    if node is None:
        return terms, None
    left, right = operands(node)
    for rows, column in ((left, right), (right, left)):
        if rank(rows) is not None and rank(rows) == rank(column) and dim(column, -1) == 1:
            return rows, column
    raise Mismatch


def _read_layer(rows: ir.Value, dtype: ir.DataType) -> _Product | None:
    """The layer that makes these rows, with its bias; None where no product with gathered matrices does."""
    rows = plain(rows, dtype)
    add = producer(rows, "Add")
    if add is None:
        return _read_product(rows, None)
    left, right = operands(add)
    for product, bias in ((left, right), (right, left)):
        gather = gathered(through(bias, RESHAPING))
        if gather is None or rank(product) != rank(bias):
            continue
        found = _read_product(plain(product, dtype), gather)
        if found is not None:
            return found
    return None


def _read_product(value: ir.Value, bias: ir.Node | None) -> _Product | None:
    matmul = producer(value, "MatMul")
    if matmul is None:
        return None
    for place in (0, 1):
        gather = _gather_of(matmul.inputs[place])
        if gather is None:
            continue
        matrices, rows = operands(matmul)[place], operands(matmul)[1 - place]
        known = rank(matrices)
        # Of the matrices (D, N) a row from the left, of (N, D) a column from the right.
        vector = dim(rows, -2 if place == 1 else -1)
        if vector != 1 or known is None or rank(rows) != known or known not in (3, 4):
            raise Refusal(f"{label(matmul)} multiplies more than a row of each choice", "experts-form")
        _, swapped = through_transposes(matrices)
        stack = read_stack(gather.inputs[0], transposed=swapped != (place == 1))
        spread = known == 4 and dim(rows, 1) == 1
        layer = Layer(stack, None if bias is None else _bias(bias, gather, stack), matmul)
        return _Product(layer, operands(gather)[1], rows, spread)
    return None


def _bias(node: ir.Node, gather: ir.Node, stack: Stack) -> Stack:
    bias = read_bias(node.inputs[0])
    ids, others = operands(node)[1], operands(gather)[1]
    if chosen(ids) is not chosen(others) or (bias.experts, bias.rows) != (stack.experts, stack.rows):
        raise Refusal(f"{label(node)} takes other biases than those of the chosen experts", "experts-form")
    return bias


def _gather_of(value: ir.Value | None) -> ir.Node | None:
    """The node that gathers whole matrices, perhaps transposed behind it."""
    value, _ = through_transposes(value)
    node = gathered(value)
    if node is None or rank(node.inputs[0]) != 3 or rank(value) not in (3, 4):
        return None
    return node


def _tokens(first: _Product, k: int, dtype: ir.DataType, *, is_weighed: bool) -> tuple[ir.Value, ir.Value | None]:
    """The tokens' rows, and the column that weighs them before the first layer, if they are not weighed behind."""
    width = first.layer.weights.depth
    if first.spread:
        return matrix(first.rows, width), None
    node = None if is_weighed else producer(plain(first.rows, dtype), "Mul")
    for rows, column in [(first.rows, None)] if node is None else [operands(node), operands(node)[::-1]]:
        if column is not None and (rank(rows) != rank(column) or dim(column, -1) != 1):
            continue
        x = repeated(rows, k, width)
        if x is not None and dim(x, -1) == width:
            return x, column
    raise Refusal(f"{named(through(first.rows, RESHAPING))} does not repeat each token's row {k} times", "experts-form")
