"""Every token through every expert, with weights of 0 for those that it has not chosen.

sum_e(S_e * (W2_e @ act(W1_e @ x))), S = Scatter(0, ids, w) -> FusedExperts(x, w, ids, ...)

How Llama 4 leaves exporters: its weights multiply the rows before the first layer, so that an expert that is not chosen
sees a row of zeros. It returns zeros only if no bias is added; where the weights multiply what experts return, biases
are no matter. Experts are the first axis throughout: row e * T + t is token t at expert e.
"""

from __future__ import annotations

from collections import deque

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.printing.wording import counted
from ort_moe.rewrites.experts.block import ExpertsBlock
from ort_moe.rewrites.experts.layer import Stack, read_bias, read_stack
from ort_moe.rewrites.experts.sums import expert_sum, experts_type, rounded_sum
from ort_moe.rewrites.experts.tokens import (
    chosen,
    matrix,
    named,
    plain,
    require_as_many,
    require_choices,
    require_range,
)
from ort_moe.rewrites.experts.two_layers import Product, TwoLayers, read_two_layers, weighted
from ort_moe.rewrites.fixed_lengths import repeats
from ort_moe.rewrites.rule import Mismatch, Refusal, RuleInfo
from ort_moe.rewrites.values import dim, filling, integer, is_last_axis, is_op, label, operands, producer, rank, through

RULE = RuleInfo(
    "experts-dense",
    "sum_e(Scatter(0, ids, w)_e * (W2_e @ act(W1_e @ x))) -> FusedExperts(x, w, ids, W1, W2)",
    "Where all experts are computed for every token, and those that it has not chosen weigh nothing.",
)

ROOT = "ReduceSum"

_MOST_VALUES = 96
"""Values looked at before a sum for what weighs its terms; between them are two dozen."""


def read(node: ir.Node) -> ExpertsBlock:
    """Reads the experts that end in this sum.

    Raises:
        Mismatch: None do.
        Refusal: They are nothing that FusedExperts computes.
    """
    terms, experts, hidden = expert_sum(node)
    if not _is_routed(terms, experts):
        raise Mismatch  # shared experts, all of which count
    dtype = experts_type(terms)
    rows, column = weighted(plain(terms, dtype))
    layers = read_two_layers(rows, dtype, hidden, _read_product, _read_bias)
    if layers.first.weights.experts != experts:
        raise Refusal(
            f"the sum is over {counted(experts, 'expert')}, {layers.first.weights.experts} computed", "experts-form"
        )
    if rank(layers.first.rows) == 3 and dim(layers.first.rows, 0) is None:
        raise Refusal(f"the first axis of {named(layers.first.rows)} is not known", "experts-form")
    _require_in_place(layers)
    tokens, spread, on_output = layers.first.rows, layers.first.spread, column is not None
    if column is None:
        tokens, column = weighted(plain(layers.first.rows, dtype))
        if column is None:
            raise Refusal("the experts' results are weighed nowhere", "experts-form")
        spread = rank(tokens) == 3 and dim(tokens, 0) == 1 and dim(column, 0) == experts
        _require_no_bias(layers)
    x = _token_rows(tokens, experts, layers.first.weights.depth, spread=spread)
    ids, mix = _scattered(plain(column, dtype), dtype, experts)
    k = dim(ids, -1)
    if k is None:
        raise Refusal(f"the number of choices in {named(ids)} is not fixed", "experts-form")
    require_choices(ids, mix, k)
    require_range(ids, experts, distinct=True)
    require_as_many(mix, ids, "the weights")
    require_as_many(x, ids, "the rows")
    attributes = {**layers.attributes, "weight_on": "output" if on_output else "input"}
    return ExpertsBlock(rounded_sum(node.outputs[0], dtype), x, mix, ids, layers.fc1, layers.fc2, attributes)


def _is_routed(terms: ir.Value, experts: int) -> bool:
    """Whether rows over the experts, into which something is scattered, take part in what is summed."""
    queue, seen = deque([terms]), {terms}
    while queue and len(seen) <= _MOST_VALUES:
        node = queue.popleft().producer()
        if node is None:
            continue
        if is_op(node, "ScatterElements") and dim(node.outputs[0], -1) == experts:
            return True
        fresh = [each for each in operands(node) if each not in seen]
        seen.update(fresh)
        queue += fresh
    return False


def _read_product(value: ir.Value) -> Product | None:
    """MatMul of (E, T, D), or of (T, D) or (1, T, D) for all, with a constant (E, D, N)."""
    matmul = producer(value, "MatMul")
    if matmul is None or rank(matmul.inputs[1]) != 3 or rank(matmul.inputs[0]) not in (2, 3):
        return None
    rows, matrices = operands(matmul)
    stack = read_stack(matrices, transposed=True)
    if rank(rows) == 3 and dim(rows, 0) not in (1, stack.experts, None):
        return None
    return Product(stack, matmul, rows, spread=rank(rows) == 2 or dim(rows, 0) == 1)


def _read_bias(value: ir.Value, product: Product) -> Stack | None:
    """A constant (E, 1, N)."""
    if rank(value) != 3 or dim(value, 1) != 1 or dim(value, 0) != product.weights.experts:
        return None
    return read_bias(value, product.weights.rows)


def _require_no_bias(layers: TwoLayers) -> None:
    for layer in (layers.fc1, layers.fc2):
        if layer.bias is not None:
            sentence = f"experts that are not chosen add their bias '{layer.bias.data.values[0].name}'"
            raise Refusal(sentence, "experts-form")


def _token_rows(value: ir.Value, experts: int, width: int, *, spread: bool) -> ir.Value:
    """The tokens' rows (T, D), of which all together are repeated for each expert, or that what reads them spreads."""
    found = repeats(through(value, RESHAPING))
    if found is not None and found[1] == [experts, *[1] * (len(found[1]) - 1)]:
        source = found[0]
        again = repeats(source)
        if again is not None and all(times == 1 for times in again[1]):
            source = again[0]  # an Expand to what is there already
        x = matrix(source, width) if rank(source) == 2 or dim(source, 0) == 1 else source
    else:
        x = matrix(value, width) if spread else value
    if rank(x) != 2 or dim(x, -1) != width or (x is value and not spread):
        raise Refusal(
            f"{named(value)} does not repeat the tokens' rows for {counted(experts, 'expert')}", "experts-form"
        )
    return x


def _require_in_place(layers: TwoLayers) -> None:
    """Refuse views between the layers where the first axis is not seen to be the experts'.

    Raises:
        Refusal: There are some.
    """
    if dim(layers.second.rows, 0) == layers.second.weights.experts:
        return
    queue, seen = [layers.second.rows], {layers.second.rows}
    while queue:
        node = queue.pop().producer()
        if node is None or any(node is product.node for product in layers.products):
            continue
        if is_op(node, *RESHAPING):
            raise Refusal(f"{label(node)} stands between the layers", "experts-form")
        fresh = [each for each in operands(node) if each not in seen]
        seen.update(fresh)
        queue += fresh


def _scattered(column: ir.Value, dtype: ir.DataType, experts: int) -> tuple[ir.Value, ir.Value]:
    """The choices and weights (..., K) that are scattered into rows over all experts, of which this is a column."""
    transpose = producer(column, "Transpose")
    rows = None if transpose is None else plain(operands(transpose)[0], dtype)
    is_turned = transpose is not None and list(transpose.attributes.get_ints("perm") or ()) == [1, 0]
    scatter = producer(rows, "ScatterElements")
    if rows is None or scatter is None or not is_turned or dim(rows, -1) != experts or rank(rows) != 2:
        raise Refusal(f"the weights in {named(column)} are not scattered to the chosen of all experts", "experts-form")
    background, ids, weights = operands(scatter)
    along = is_last_axis(integer(scatter, "axis", 0), rows)
    if not along or filling(background) != 0.0 or scatter.attributes.get_string("reduction", "none") != "none":
        raise Refusal(f"{named(rows)} holds more than the weights of the chosen", "experts-form")
    require_as_many(scatter.outputs[0], ids, "the rows over all experts")
    return chosen(ids), plain(weights, dtype)
