"""The two layers of the experts: which constants they are, and how they lie in the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.experts.constants import Constant, join, read_constant
from ort_moe.rewrites.fixed_lengths import fixed_integers
from ort_moe.rewrites.rule import Mismatch, Refusal
from ort_moe.rewrites.values import FLOATS, constant, dim, integer, operands, producer, rank, scalar, through


@dataclass(frozen=True)
class Stack:
    """A matrix, or a row, for each expert.

    Attributes:
        data: The numbers, (E, N, D) or (E, N); or codes of them, bytes along D.
        bits: Of a code; 0 where there are none.
        block_size: Codes along D that share a scale.
        scales: (E, N, D / block_size), of codes.
        zero_points: Bytes along D / block_size, of codes that have some.
    """

    data: Constant
    bits: int = 0
    block_size: int = 0
    scales: Constant | None = None
    zero_points: Constant | None = None

    @property
    def experts(self) -> int:
        """E."""
        return self.data.shape[0]

    @property
    def rows(self) -> int:
        """N."""
        return self.data.shape[1]

    @property
    def depth(self) -> int:
        """D."""
        return self.data.shape[-1] * 8 // self.bits if self.bits else self.data.shape[-1]

    @property
    def dtype(self) -> ir.DataType:
        """Of the numbers."""
        return self.data.dtype if self.scales is None else self.scales.dtype

    @property
    def form(self) -> tuple[str, int]:
        """`weight_format` and `block_size` as FusedExperts calls them."""
        return (f"int{self.bits}" if self.bits else "dense", self.block_size)

    @property
    def parts(self) -> dict[str, Constant]:
        """The constants by the inputs of FusedExperts that take them."""
        parts = {"weights": self.data, "scales": self.scales, "zero_points": self.zero_points}
        return {name: part for name, part in parts.items() if part is not None}

    def followed_by(self, other: Stack) -> Stack:
        """With the rows of another of the same form behind its own."""
        return joined([self, other], 1)

    def with_halves_swapped(self, layout: str) -> Stack:
        """With the second half of its rows, or the odd ones, before the first, or the even ones."""
        half = self.rows // 2
        firsts, seconds = (
            ((0, half, 1), (half, self.rows, 1)) if layout == "concat" else ((0, self.rows, 2), (1, self.rows, 2))
        )
        return joined([self._cut(*seconds), self._cut(*firsts)], 1)

    def _cut(self, start: int, stop: int, step: int) -> Stack:
        data, scales, zeros = (
            None if part is None else part.cut(1, start, stop, step)
            for part in (self.data, self.scales, self.zero_points)
        )
        assert data is not None
        return Stack(data, self.bits, self.block_size, scales, zeros)


def joined(stacks: Sequence[Stack], axis: int) -> Stack:
    """Stacks behind one another: of experts along axis 0, of rows along axis 1.

    Raises:
        Mismatch: They are not of one form.
    """
    (first, *_) = stacks
    if any((stack.form, stack.parts.keys()) != (first.form, first.parts.keys()) for stack in stacks):
        raise Mismatch
    parts = {name: join([stack.parts[name] for stack in stacks], axis) for name in first.parts}
    return Stack(parts["weights"], first.bits, first.block_size, parts.get("scales"), parts.get("zero_points"))


@dataclass(frozen=True)
class Layer:
    """One layer of all experts.

    Attributes:
        weights: Matrices.
        bias: Rows (E, N), or None.
        products: The nodes, or the last of the nodes, that multiply.
    """

    weights: Stack
    bias: Stack | None
    products: tuple[ir.Node, ...]


def read_stack(value: ir.Value | None, *, transposed: bool) -> Stack:
    """The stack of matrices that a value is.

    Args:
        value: (E, ., .), of which each matrix is one expert's.
        transposed: Whether the graph uses the matrices of the value as (D, N).

    Raises:
        Refusal: It is no constant of floating-point matrices.
        Mismatch: It is nothing like it.
    """
    data = _floats(value)
    if len(data.shape) != 3:
        raise Mismatch
    return Stack(data.transposed((0, 2, 1)) if transposed else data)


def read_bias(value: ir.Value | None, rows: int) -> Stack:
    """The stack of rows that a value is.

    Args:
        value: (E, N), or with axes of length 1 between.
        rows: N.

    Raises:
        Refusal: It is no constant of such rows.
    """
    data = _floats(value, "biases")
    if len(data.shape) < 2 or data.shape[-1] != rows or any(length != 1 for length in data.shape[1:-1]):
        name = "" if value is None else value.name
        sentence = f"the experts' biases '{name}' are {list(data.shape)}, expected are rows of {rows} for each expert"
        raise Refusal(sentence, "experts-form")
    return Stack(data.reshaped((data.shape[0], rows)))


def read_matrices(values: Sequence[ir.Value | None], *, transposed: bool) -> Stack:
    """The stack of one constant matrix (., .) for each expert.

    Args:
        values: In the experts' order.
        transposed: Whether the graph uses them as (D, N).

    Raises:
        Refusal: They are no constants of floating-point numbers.
        Mismatch: They are no matrices of one shape.
    """
    found = [_floats(value) for value in values]
    if any(len(each.shape) != 2 for each in found):
        raise Mismatch
    data = join([each.reshaped((1, *each.shape)) for each in found], 0)
    return Stack(data.transposed((0, 2, 1)) if transposed else data)


def read_vectors(values: Sequence[ir.Value | None]) -> Stack:
    """The stack of one constant bias (N), or (1, N), for each expert.

    Raises:
        Refusal: They are no constants of floating-point numbers.
        Mismatch: They are no vectors.
    """
    found = [_floats(value, "biases") for value in values]
    if any(not each.shape or any(length != 1 for length in each.shape[:-1]) for each in found):
        raise Mismatch
    return Stack(join([each.reshaped((1, each.shape[-1])) for each in found], 0))


def _floats(value: ir.Value | None, what: str = "weights") -> Constant:
    data = read_constant(value, what)
    if data.dtype not in FLOATS:
        sentence = f"the experts' {what} '{'' if value is None else value.name}' are {data.dtype}"
        raise Refusal(f"{sentence}, expected float32, float16 or bfloat16", "experts-form")
    return data


def through_transposes(value: ir.Value | None) -> tuple[ir.Value | None, bool]:
    """The value before transposes of its last two axes, and whether they are swapped."""
    swapped = False
    while (node := producer(value, "Transpose")) is not None:
        perm, known = list(node.attributes.get_ints("perm") or ()), rank(node.inputs[0])
        if known is None or known < 2 or perm != [*range(known - 2), known - 1, known - 2]:
            break
        value, swapped = node.inputs[0], not swapped
    return value, swapped


def gathered(value: ir.Value | None) -> ir.Node | None:
    """The node that takes whole entries of the first axis of its data by indices, if one makes the value."""
    node = producer(value, "Gather", "GatherND")
    if node is None or integer(node, "axis", 0) != 0 or integer(node, "batch_dims", 0) != 0:
        return None
    if node.op_type == "GatherND":
        places = node.inputs[1]
        if places is None or places.shape is None or not places.shape.rank() or places.shape[-1] != 1:
            return None
    return node


def entry(value: ir.Value, whole: int) -> tuple[ir.Value, int] | None:
    """What a value is an entry of, along the first axis, and the entry's place; None where nothing tells.

    Args:
        value: A view of what a Split or a Gather makes.
        whole: Rank of what they take it from.
    """
    value = through(value, RESHAPING)
    node = producer(value, "Split", "Gather")
    if node is None or rank(node.inputs[0]) != whole or integer(node, "axis", 0) not in (0, -whole):
        return None
    source = operands(node)[0]
    if node.op_type == "Gather":
        place = scalar(node.inputs[1])
        return None if place is None or place < 0 else (source, int(place))
    if dim(source, 0) != len(node.outputs) or not _are_ones(node.inputs[1] if len(node.inputs) > 1 else None):
        return None
    return source, node.outputs.index(value)


def _are_ones(sizes: ir.Value | None) -> bool:
    """Whether a Split of as many outputs as entries makes one of each: the sizes are left out, or all 1."""
    if sizes is None:
        return True
    array = constant(sizes)  # of any number of experts; what is computed is followed for few
    known = fixed_integers(sizes) if array is None else array.tolist()
    return known is not None and set(known) == {1}
