"""All choices sorted by expert, and each expert's rows multiplied with its matrix.

sum_k(Unsort(w * Concat_e(act(Concat_e(x[e's rows] @ W1_e))[e's rows] @ W2_e))) -> FusedExperts(x, ...)

How transformers' `grouped_mm` leaves its own exporter: unrolled over the experts, with ranges whose lengths depend on
the data, so that no CUDA graph can be captured of it.
"""

from __future__ import annotations

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.experts.block import ExpertsBlock
from ort_moe.rewrites.experts.layer import Stack, gathered, joined, read_bias
from ort_moe.rewrites.experts.linear import Linear, read_linear
from ort_moe.rewrites.experts.sorted_choices import Sort, counts_up, segment_ends, told
from ort_moe.rewrites.experts.sums import choice_sum, experts_type, rounded_sum
from ort_moe.rewrites.experts.tokens import named, plain, require_as_many, require_choices, require_range
from ort_moe.rewrites.experts.two_layers import Product, TwoLayers, read_two_layers, weighted
from ort_moe.rewrites.rule import Mismatch, Refusal, RuleInfo
from ort_moe.rewrites.values import INDICES, integer, is_op, operands, producer, rank, through, through_casts

RULE = RuleInfo(
    "experts-grouped-mm",
    "sum_k(Unsort(w * Concat_e(act(Concat_e(x_e @ W1_e))_e @ W2_e))) -> FusedExperts(x, w, ids, W1, W2)",
    "Where the choices are sorted by expert, and counted to tell the rows of each.",
)

ROOT = "ReduceSum"


def read(node: ir.Node) -> ExpertsBlock:
    """Reads the experts that end in this sum.

    Raises:
        Mismatch: None do.
        Refusal: They are nothing that FusedExperts computes.
    """
    terms, k, hidden = choice_sum(node)
    sort = _sort_behind(terms)
    if sort is None:
        raise Mismatch
    dtype = experts_type(operands(_gather(terms))[0])
    rows = sort.puts_back(plain(terms, dtype))
    if rows is None:
        raise Refusal(f"{named(terms)} does not undo {told(sort)}", "experts-form")
    rows, column = weighted(plain(rows, dtype))
    if column is None:
        raise Refusal("the experts' results are weighed nowhere", "experts-form")

    def read_bias_rows(value: ir.Value, product: Product) -> Stack | None:
        """Rows gathered for each sorted expert."""
        gather = gathered(through(value, RESHAPING)) if rank(value) == 2 else None
        ids = None if gather is None else through_casts(operands(gather)[1], INDICES, RESHAPING)
        return None if gather is None or ids is not sort.experts else read_bias(gather.inputs[0], product.weights.rows)

    layers = read_two_layers(rows, dtype, hidden, _read_product, read_bias_rows)
    experts = layers.first.weights.experts
    _require_segments(layers, sort, experts)
    x = sort.takes_tokens(layers.first.rows, k, layers.first.weights.depth)
    if x is None:
        raise Refusal(
            f"{named(layers.first.rows)} are not the tokens' rows in the order of {told(sort)}", "experts-form"
        )
    weights = sort.takes(plain(column, dtype))
    if weights is None or rank(column) != 2:
        raise Refusal(f"the weights in {named(column)} are not in the order of {told(sort)}", "experts-form")
    mix = plain(weights, dtype)
    require_choices(sort.choices, mix, k)
    require_range(sort.choices, experts)
    require_as_many(mix, sort.choices, "the weights")
    require_as_many(x, sort.choices, "the rows")
    attributes = {**layers.attributes, "weight_on": "output"}
    return ExpertsBlock(rounded_sum(node.outputs[0], dtype), x, mix, sort.choices, layers.fc1, layers.fc2, attributes)


def _gather(terms: ir.Value) -> ir.Node:
    """The node that puts rows back in the order of the tokens."""
    node = gathered(through(terms, RESHAPING | {"Cast"}))
    if node is None:
        raise Mismatch
    return node


def _sort_behind(terms: ir.Value) -> Sort | None:
    """The sort that the gather in front of a sum undoes."""
    places = through_casts(operands(_gather(terms))[1], INDICES, RESHAPING)
    scatter = producer(places, "ScatterND")
    return None if scatter is None else Sort.of(operands(scatter)[1])


def _read_product(value: ir.Value) -> Product | None:
    """Concat over the experts of a linear layer of Gather(rows, Range)."""
    concat = producer(value, "Concat")
    if concat is None or integer(concat, "axis", 0) not in (0, -2) or rank(value) != 2:
        return None
    layers: list[Linear] = []
    rows: ir.Value | None = None
    for part in operands(concat):
        layer = read_linear(part)
        gather = None if layer is None else gathered(layer.rows)
        if layer is None or gather is None or rank(gather.inputs[0]) != 2:
            return None
        if producer(gather.inputs[1], "Range") is None or rows not in (None, gather.inputs[0]):
            return None
        layers.append(layer)
        rows = gather.inputs[0]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if rows is None or len(biases) not in (0, len(layers)):
        return None
    bias = joined(biases, 0) if biases else None
    return Product(joined([layer.weights for layer in layers], 0), concat, rows, bias=bias)


def _require_segments(layers: TwoLayers, sort: Sort, experts: int) -> None:
    """Refuse segments of rows that are not each expert's own.

    Raises:
        Refusal: They are others.
    """
    for product in layers.products:
        ranges = []
        for part in operands(product.node):
            layer = part.producer()
            gather = None if layer is None else operands(layer)[0].producer()
            source = None if gather is None else operands(gather)[1].producer()
            if source is not None and is_op(source, "Range"):
                ranges.append(source)
        ends = segment_ends(ranges) if len(ranges) == experts else None
        if ends is None or not counts_up(ends, sort, experts):
            sentence = f"the rows that {named(product.node.outputs[0])} joins are not those of each expert"
            raise Refusal(sentence, "experts-form")
