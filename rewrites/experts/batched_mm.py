"""The experts' matrices gathered for each choice of each token, and multiplied with it one by one.

Gather(W1, ids) @ x -> activation -> Gather(W2, ids) @ . -> * weights -> sum over the choices -> FusedExperts(x, ...)

How transformers' `batched_mm` leaves all exporters. Each token's row is repeated for each of its choices, or spread by
the product; choices are rows in a row, or an axis of their own.
"""

from __future__ import annotations

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.experts.block import ExpertsBlock
from ort_moe.rewrites.experts.layer import Stack, gathered, read_bias, read_stack, through_transposes
from ort_moe.rewrites.experts.sums import choice_sum, experts_type, rounded_sum
from ort_moe.rewrites.experts.tokens import (
    chosen,
    matrix,
    named,
    plain,
    repeated,
    require_as_many,
    require_choices,
    require_range,
)
from ort_moe.rewrites.experts.two_layers import Product, read_two_layers, weighted
from ort_moe.rewrites.rule import Refusal, RuleInfo
from ort_moe.rewrites.values import dim, label, may_spread, operands, producer, rank, through

RULE = RuleInfo(
    "experts-batched-mm",
    "sum_k(w_k * (Gather(W2, ids)_k @ act(Gather(W1, ids)_k @ x))) -> FusedExperts(x, w, ids, W1, W2)",
    "Where the weights are constants and the experts are those that the router chooses among. Weights that lie the "
    "other way round in the file are transposed once.",
)

ROOT = "ReduceSum"


def read(node: ir.Node) -> ExpertsBlock:
    """Reads the experts that end in this sum.

    Raises:
        Mismatch: None do.
        Refusal: They are nothing that FusedExperts computes.
    """
    terms, k, hidden = choice_sum(node)
    dtype = experts_type(terms)
    rows, weights = weighted(plain(terms, dtype))
    layers = read_two_layers(rows, dtype, hidden, _read_product, _read_bias)
    if layers.second.spread and k != 1:
        sentence = f"{label(layers.second.node)} multiplies one row of each token with all its experts"
        raise Refusal(sentence, "experts-form")
    if layers.first.spread and dim(layers.first.node.outputs[0], 1) != k:
        raise Refusal(f"{label(layers.first.node)} multiplies each row with other than {k} matrices", "experts-form")
    x, on_input = _tokens(layers.first, k, dtype, is_weighed=weights is not None)
    column = weights if weights is not None else on_input
    if column is None:
        raise Refusal("the experts' results are weighed nowhere", "experts-form")
    ids, mix = _choices(layers.first), plain(column, dtype)
    if any(_choices(product) is not ids for product in layers.products):
        raise Refusal("the two layers take other experts", "experts-form")
    require_choices(ids, mix, k)
    require_range(ids, layers.first.weights.experts)
    if rank(column) != 2 or k == 1:
        require_as_many(mix, ids, "the weights")
    if k == 1 or layers.first.spread:  # a single row would be spread over all others
        require_as_many(x, ids, "the rows")
    attributes = {**layers.attributes, "weight_on": "output" if weights is not None else "input"}
    return ExpertsBlock(rounded_sum(node.outputs[0], dtype), x, mix, ids, layers.fc1, layers.fc2, attributes)


def _choices(product: Product) -> ir.Value:
    """The choices whose matrices are gathered."""
    assert product.ids is not None
    return chosen(product.ids)


def _read_product(value: ir.Value) -> Product | None:
    """Matrices gathered for each choice, times a row of each."""
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
        if vector != 1 or known is None or rank(rows) != known:
            raise Refusal(f"{label(matmul)} multiplies more than a row of each choice", "experts-form")
        _, swapped = through_transposes(matrices)
        stack = read_stack(gather.inputs[0], transposed=swapped != (place == 1))
        return Product(stack, matmul, rows, operands(gather)[1], spread=known == 4 and dim(rows, 1) == 1)
    return None


def _read_bias(value: ir.Value, product: Product) -> Stack | None:
    """Rows gathered for the same choices."""
    gather = gathered(through(value, RESHAPING))
    if dim(value, -1) != product.weights.rows or rank(value) not in (2, 3):
        return None
    if gather is None or chosen(operands(gather)[1]) is not _choices(product):
        return None
    return read_bias(gather.inputs[0], product.weights.rows)


def _gather_of(value: ir.Value | None) -> ir.Node | None:
    """The node that gathers whole matrices, perhaps transposed behind it."""
    value, _ = through_transposes(value)
    node = gathered(value)
    if node is None or rank(node.inputs[0]) != 3 or rank(value) not in (3, 4):
        return None
    return node


def _tokens(first: Product, k: int, dtype: ir.DataType, *, is_weighed: bool) -> tuple[ir.Value, ir.Value | None]:
    """The tokens' rows, and the column that weighs them before the first layer, if they are not weighed behind."""
    width = first.weights.depth
    if first.spread:
        return matrix(first.rows, width), None
    node = None if is_weighed else producer(plain(first.rows, dtype), "Mul")
    for rows, column in [(first.rows, None)] if node is None else [operands(node), operands(node)[::-1]]:
        if column is not None and (dim(column, -1) != 1 or may_spread(rows, column, (rank(rows) or 0) - 1)):
            continue
        x = repeated(rows, k, width)
        if x is not None and dim(x, -1) == width:
            return x, column
    raise Refusal(f"{named(through(first.rows, RESHAPING))} does not repeat each token's row {k} times", "experts-form")
