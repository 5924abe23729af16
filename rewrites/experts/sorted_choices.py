"""Choices in the order of their experts: the sort, where each expert's rows begin, and the way back.

Exporters of `grouped_mm` sort the list of all choices by expert with a TopK of the smallest, take the tokens' rows in
that order, and count the choices of each expert to tell where its rows end. Row i of the sorted order is choice perm[i]
of the list; choice t * K + j of the list is choice j of token t.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.experts.layer import entry, gathered
from ort_moe.rewrites.experts.tokens import chosen, matrix
from ort_moe.rewrites.fixed_lengths import fixed_integers
from ort_moe.rewrites.tabulate import tabulate
from ort_moe.rewrites.values import (
    INDICES,
    constant,
    dim,
    filling,
    integer,
    is_op,
    label,
    operands,
    producer,
    rank,
    scalar,
    through,
    through_casts,
)

_COUNTS = INDICES | {ir.DataType.FLOAT}


@dataclass(frozen=True)
class Sort:
    """A sort of all choices by expert.

    Attributes:
        experts: The sorted experts, one a row.
        perm: The places in the list that they had.
        choices: The choices (..., K) whose list is sorted.
    """

    experts: ir.Value
    perm: ir.Value
    choices: ir.Value

    @classmethod
    def of(cls, perm: ir.Value) -> Sort | None:
        """The sort that makes a permutation: TopK of the smallest of a list, as many as it has."""
        perm = through_casts(perm, INDICES, RESHAPING)
        node = producer(perm, "TopK")
        if node is None or perm is not node.outputs[1] or rank(node.inputs[0]) != 1:
            return None
        if integer(node, "largest", 1) != 0 or integer(node, "sorted", 1) != 1:
            return None
        values, k = operands(node)
        if not _is_length(k, values):
            return None
        return cls(node.outputs[0], perm, chosen(values))

    def takes_tokens(self, value: ir.Value, k: int, width: int) -> ir.Value | None:
        """The tokens' rows (T, D), of which a value holds that of each sorted choice's token."""
        gather = gathered(through(value, RESHAPING))
        if gather is None or not self._is_token(operands(gather)[1], k):
            return None
        x = matrix(operands(gather)[0], width)
        return x if rank(x) == 2 and dim(x, -1) == width and rank(operands(gather)[0]) == 2 else None

    def takes(self, value: ir.Value) -> ir.Value | None:
        """The list of which a value, a list itself, holds that of each sorted choice."""
        node = producer(value, "GatherElements")
        node = gathered(value) if node is None else node
        if node is None or through_casts(operands(node)[1], INDICES, RESHAPING) is not self.perm:
            return None
        source = operands(node)[0]
        return source if rank(source) == 1 else None

    def puts_back(self, value: ir.Value) -> ir.Value | None:
        """The sorted rows, of which a value holds that of each choice in the list's order."""
        gather = gathered(through(value, RESHAPING))
        if gather is None or rank(operands(gather)[0]) != 2:
            return None
        rows, places = operands(gather)
        scatter = producer(through_casts(places, INDICES, RESHAPING), "ScatterND")
        if scatter is None or scatter.attributes.get_string("reduction", "none") != "none":
            return None
        _, indices, numbers = operands(scatter)
        count = producer(numbers, "Range")
        if through_casts(indices, INDICES, RESHAPING) is not self.perm or dim(indices, -1) != 1:
            return None
        if count is None or scalar(count.inputs[0]) != 0.0 or scalar(count.inputs[2]) != 1.0:
            numbers_are = constant(numbers)
            if numbers_are is None or not np.array_equal(numbers_are, np.arange(numbers_are.size)):
                return None
        return rows

    def _is_token(self, value: ir.Value, k: int) -> bool:
        """Whether a value is the places in the list divided by k, rounded down."""
        value = through_casts(value, INDICES, RESHAPING)
        correction = producer(value, "Sub")
        if correction is not None:
            value, less = operands(correction)
            if not self._is_false(less):
                return False
            value = through_casts(value, INDICES, RESHAPING)
        quotient = producer(value, "Div")
        if quotient is not None and scalar(quotient.inputs[1]) == float(k):
            value = through_casts(operands(quotient)[0], INDICES, RESHAPING)
            return value is self.perm
        return k == 1 and value is self.perm

    def _is_false(self, value: ir.Value) -> bool:
        """Whether it is the correction of a division, which is for places below zero: there are none."""
        node = through(value, RESHAPING | {"Cast"}).producer()
        if node is None or not node.inputs:
            return False
        if is_op(node, "And"):
            return any(self._is_false(each) for each in operands(node))
        if is_op(node, "Equal") and scalar(node.inputs[1]) == 1.0:
            return self._is_false(operands(node)[0])
        if is_op(node, "Less") and scalar(node.inputs[1]) == 0.0:
            return through_casts(operands(node)[0], INDICES, RESHAPING) is self.perm
        return False


def _is_length(k: ir.Value, values: ir.Value) -> bool:
    """Whether a number is how many elements a list has."""
    known = fixed_integers(k)
    if known is not None:
        return known == [dim(values, 0)]
    pick = producer(through(k, RESHAPING), "Gather")
    shape = producer(k if pick is None else pick.inputs[0], "Shape")
    return shape is not None and shape.inputs[0] is values


def segment_ends(ranges: list[ir.Node]) -> ir.Value | None:
    """The list from which neighbouring ranges, from 0 on, take their ends; None if they are no such ranges."""
    ends: ir.Value | None = None
    last: ir.Value | None = None
    for place, node in enumerate(ranges):
        start, end, step = operands(node)
        if scalar(step) != 1.0 or (scalar(start) != 0.0 if last is None else start is not last):
            return None
        taken = entry(end, 1)
        if taken is None or taken[1] != place or (ends is not None and taken[0] is not ends):
            return None
        ends, last = taken[0], end
    return ends if ends is not None and dim(ends, 0) == len(ranges) else None


def counts_up(ends: ir.Value, sort: Sort, experts: int) -> bool:
    """Whether these are the places where the rows of each expert end: the sums of how many choices each has."""
    total = producer(through_casts(ends, _COUNTS), "CumSum")
    if total is None or integer(total, "exclusive", 0) or integer(total, "reverse", 0):
        return False
    if scalar(total.inputs[1]) not in (0.0, -1.0):
        return False
    histogram = producer(through_casts(operands(total)[0], _COUNTS), "ScatterElements")
    if histogram is None or histogram.attributes.get_string("reduction", "none") != "add":
        return False
    background, bins, ones = operands(histogram)
    if dim(background, 0) != experts or rank(background) != 1 or filling(background) != 0.0 or filling(ones) != 1.0:
        return False
    table = tabulate(bins, sort.experts, experts)
    return table is not None and np.array_equal(table, np.arange(experts))


def told(sort: Sort) -> str:
    """The sort in a sentence."""
    node = sort.perm.producer()
    return "the sort" if node is None else label(node)
