"""Constants that a graph moves, cuts, casts or joins: read as one array, which is made when the model is written.

Nothing is read from disk before; what comes out as one initializer as it lies is that initializer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ort_moe.files.streamed_tensor import entry_of, let_go
from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.fixed_lengths import cuts
from ort_moe.rewrites.rule import Mismatch, Refusal
from ort_moe.rewrites.values import FLOATS, SMALL, Array, constant, consumers, integer, integers, is_op, label


@dataclass(frozen=True)
class Constant:
    """An array made of initializers; equal ones hold the same numbers.

    Attributes:
        op: How it is made of others, a method of this class or `join`; empty for an initializer.
        of: What it is made of.
        given: Arguments of `op`.
        shape: Lengths of the axes.
        dtype: Type of the elements.
        value: The initializer, where it is one.
    """

    op: str
    of: tuple[Constant, ...]
    given: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: ir.DataType
    value: ir.Value | None = None

    @property
    def values(self) -> tuple[ir.Value, ...]:
        """The initializers, each once."""
        return tuple(dict.fromkeys(self._leaves()))

    def _leaves(self) -> Iterator[ir.Value]:
        if self.value is not None:
            yield self.value
        for each in self.of:
            yield from each._leaves()

    def reshaped(self, shape: Sequence[int]) -> Constant:
        """The same elements in their order."""
        source = self.of[0] if self.op == "reshaped" else self
        return source if source.shape == tuple(shape) else Constant("reshaped", (source,), (), tuple(shape), self.dtype)

    def transposed(self, order: Sequence[int]) -> Constant:
        """Its axes in another order."""
        source, given = (self.of[0], [self.given[axis] for axis in order]) if self.op == "transposed" else (self, order)
        if list(given) == list(range(len(given))):
            return source
        shape = tuple(source.shape[axis] for axis in given)
        return Constant("transposed", (source,), tuple(given), shape, self.dtype)

    def cut(self, axis: int, start: int, stop: int, step: int = 1) -> Constant:
        """Some of the entries of an axis, from 0 <= start to stop <= its length."""
        if (start, stop, step) == (0, self.shape[axis], 1):
            return self
        shape = (*self.shape[:axis], len(range(start, stop, step)), *self.shape[axis + 1 :])
        return Constant("cut", (self,), (axis, start, stop, step), shape, self.dtype)

    def entry(self, place: int) -> Constant:
        """One entry of the first axis, which it has not."""
        return Constant("entry", (self,), (place,), self.shape[1:], self.dtype)

    def taken(self, axis: int, places: Sequence[int]) -> Constant:
        """The entries of an axis at some places."""
        shape = (*self.shape[:axis], len(places), *self.shape[axis + 1 :])
        return Constant("taken", (self,), (axis, *places), shape, self.dtype)

    def cast(self, dtype: ir.DataType) -> Constant:
        """The numbers rounded to another type."""
        return self if dtype == self.dtype else Constant("cast", (self,), (), self.shape, dtype)

    def numbers(self, place: int) -> Array:
        """A copy of one entry of the first axis; what was read for it, or for all of them, is unmapped."""
        numbers = np.array(self._at(place), order="C")
        for value in self.values if place == self.shape[0] - 1 else self._read_for(place):
            let_go(value.const_value)
        return numbers

    def _at(self, place: int) -> Array:
        """One entry of the first axis."""
        if self.value is not None:
            assert self.value.const_value is not None
            return entry_of(self.value.const_value, place)
        if self.op in ("cut", "taken") and self.given[0] == 0:
            return self.of[0]._at(self._picked(place))
        if not self._keeps_first_axis():
            entry: Array = self._whole()[place]
            return entry
        if self.op == "join" and self.given[0] == 0:
            part, own = self._part(place)
            return part._at(own)
        return self._applied([each._at(place) for each in self.of], 1)

    def _whole(self) -> Array:
        """All numbers."""
        if self.value is not None:
            assert self.value.const_value is not None
            return self.value.const_value.numpy()
        if self.op == "entry":
            return self.of[0]._at(self.given[0])
        return self._applied([each._whole() for each in self.of], 0)

    def _applied(self, arrays: Sequence[Array], without: int) -> Array:
        """What `op` makes of arrays, of which so many axes are left out in front."""
        (first, *_), (axis, *given) = arrays, self.given or (0,)
        match self.op:
            case "reshaped":
                return first.reshape(self.shape[without:])
            case "transposed":
                return first.transpose([each - without for each in self.given[without:]])
            case "taken":
                return np.take(first, given, axis=axis - without)
            case "cast":
                return first.astype(self.dtype.numpy())
            case "cut":
                some: Array = first[(slice(None),) * (axis - without) + (slice(*given),)]
                return some
        return np.concatenate(arrays, axis=axis - without)

    def _keeps_first_axis(self) -> bool:
        """Whether each entry of the first axis is made of one such entry of what it is made of."""
        match self.op:
            case "reshaped":
                return self.of[0].shape[:1] == self.shape[:1]
            case "transposed" | "cut" | "taken":
                return (self.given[0] == 0) == (self.op == "transposed")
        return self.op != "entry"

    def _picked(self, place: int) -> int:
        """Of entries of the first axis that are cut or taken, the place of one in what they are of."""
        _, *given = self.given
        return given[place] if self.op == "taken" else given[0] + place * given[2]

    def _part(self, place: int) -> tuple[Constant, int]:
        """Of parts along the first axis, the one that holds an entry, and its place there."""
        for part in self.of:
            if place < part.shape[0]:
                return part, place
            place -= part.shape[0]
        raise IndexError(place)

    def _read_for(self, place: int) -> tuple[ir.Value, ...]:
        """The initializers that are read for one entry of the first axis alone."""
        if self.value is not None or not self._keeps_first_axis():
            return ()
        if self.op != "join":
            return self.of[0]._read_for(place)
        if self.given[0] > 0:
            return tuple(value for each in self.of for value in each._read_for(place))
        part, own = self._part(place)
        return part.values if part.shape[0] == 1 else part._read_for(own)


def join(parts: Sequence[Constant], axis: int) -> Constant:
    """Constants behind one another along an axis.

    Raises:
        Mismatch: They differ in another axis or in type.
    """
    (first, *others) = parts
    if not others:
        return first
    rest = {(part.shape[:axis], part.shape[axis + 1 :], part.dtype) for part in parts}
    if len(rest) != 1:
        raise Mismatch
    whole = _stacked([part.reshaped(part.shape[1:]) for part in parts]) if axis == 0 and _are_single(parts) else None
    if whole is not None:
        return whole
    shape = (*first.shape[:axis], sum(part.shape[axis] for part in parts), *first.shape[axis + 1 :])
    return Constant("join", tuple(parts), (axis,), shape, first.dtype)


def _are_single(parts: Sequence[Constant]) -> bool:
    return all(len(part.shape) > 1 and part.shape[0] == 1 for part in parts)


def _stacked(parts: Sequence[Constant]) -> Constant | None:
    """What these are the entries of, in their order, perhaps all moved alike; None where that is nothing."""
    (first, *others) = parts
    if any((part.op, len(part.of)) != (first.op, 1) for part in parts):
        return None
    if first.op == "entry":
        (source,) = first.of
        places = [part.given[0] for part in parts]
        is_whole = all(part.of == first.of for part in others) and places == list(range(source.shape[0]))
        return source if is_whole else None
    if any((part.given, part.shape, part.dtype) != (first.given, first.shape, first.dtype) for part in others):
        return None
    whole = None if first.op == "cut" else _stacked([part.of[0] for part in parts])
    if whole is None or first.op not in ("reshaped", "transposed", "cast"):
        return None
    if first.op == "transposed":
        return whole.transposed([0, *(axis + 1 for axis in first.given)])
    return whole.cast(first.dtype) if first.op == "cast" else whole.reshaped((len(parts), *first.shape))


def read_constant(value: ir.Value | None, what: str = "weights") -> Constant:
    """The constant of floating-point numbers that a value is, in every run the same.

    Args:
        value: Any value.
        what: What it is of the experts, for the message.

    Raises:
        Refusal: It is computed or fed, or of another type.
        Mismatch: There is none, or it is of integers.
    """
    if value is None:
        raise Mismatch
    node = value.producer()
    if node is None:
        return read_initializer(value, f"the experts' {what}")
    if is_op(node, "Constant") or integers(value) is not None:
        raise Mismatch
    shape = None if value.shape is None or not value.shape.is_static() else tuple(value.shape.numpy())
    moved = None if shape is None or node.domain else _moved(node, value, tuple(map(int, shape)), what)
    return read_initializer(value, f"the experts' {what}") if moved is None else moved


def _moved(node: ir.Node, value: ir.Value, shape: tuple[int, ...], what: str) -> Constant | None:
    """What a node that moves, cuts, casts or joins constants makes; None for any other node."""
    if node.op_type in RESHAPING:
        return read_constant(node.inputs[0], what).reshaped(shape)
    if node.op_type == "Cast" and value.dtype in FLOATS:
        assert value.dtype is not None
        return read_constant(node.inputs[0], what).cast(value.dtype)
    if node.op_type == "Transpose":
        source = read_constant(node.inputs[0], what)
        return source.transposed(node.attributes.get_ints("perm") or list(range(len(source.shape)))[::-1])
    if node.op_type == "Concat":
        return join([read_constant(part, what) for part in node.inputs], integer(node, "axis", 0) % len(shape))
    if node.op_type == "Split":
        return _piece(node, value, read_constant(node.inputs[0], what))
    if node.op_type == "Gather":
        return _gathered(node, read_constant(node.inputs[0], what))
    return _sliced(node, read_constant(node.inputs[0], what)) if node.op_type == "Slice" else None


def _piece(node: ir.Node, value: ir.Value, source: Constant) -> Constant | None:
    axis = integer(node, "axis", 0) % len(source.shape)
    lengths = [None if each.shape is None else each.shape[axis] for each in node.outputs]
    place = node.outputs.index(value)
    if not all(isinstance(length, int) for length in lengths):
        return None
    if axis == 0 and set(lengths) == {1}:
        return source.entry(place).reshaped((1, *source.shape[1:]))
    ends = np.cumsum([0, *lengths]).tolist()
    return source.cut(axis, ends[place], ends[place + 1])


def _gathered(node: ir.Node, source: Constant) -> Constant | None:
    axis, places = integer(node, "axis", 0) % len(source.shape), constant(node.inputs[1], SMALL)
    length = source.shape[axis]
    if (
        places is None
        or places.ndim > 1
        or not places.size
        or not (-length <= places).all()
        or (places >= length).any()
    ):
        return None
    numbers = [int(place) % length for place in places.reshape(-1)]
    if axis == 0 and len(numbers) == 1:
        entry = source.entry(numbers[0])
        return entry if places.ndim == 0 else entry.reshaped((1, *entry.shape))
    taken = source.taken(axis, numbers)
    return taken if places.ndim else taken.reshaped((*source.shape[:axis], *source.shape[axis + 1 :]))


def _sliced(node: ir.Node, source: Constant) -> Constant | None:
    known = cuts(node)
    if known is None or any(step < 1 for *_, step in known):
        return None
    for start, end, axis, step in known:
        first, last, _ = slice(start, end, step).indices(source.shape[axis])
        source = source.cut(axis, first, max(first, last), step)
    return source


def read_initializer(value: ir.Value, what: str) -> Constant:
    """The initializer that a value is.

    Args:
        value: Any value.
        what: What the message calls it.

    Raises:
        Refusal: It is computed or fed.
    """
    made_by = value.producer()
    if made_by is not None:
        raise Refusal(f"{what} '{value.name}' are computed by {label(made_by)}", "expert-weights-computed")
    if value.is_graph_input() and value.is_initializer():
        raise Refusal(f"{what} '{value.name}' are an input with a default", "weights-as-inputs")
    if value.const_value is None:
        raise Refusal(f"{what} '{value.name}' are an input", "expert-weights-computed")
    tensor = value.const_value
    return Constant("", (), (), tuple(int(size) for size in tensor.shape.numpy()), tensor.dtype, value)


def require_unread(values: Iterable[ir.Value], but: Container[ir.Node]) -> None:
    """Refuse to make other constants of initializers that something reads as they are: both would be stored.

    Args:
        values: The initializers.
        but: Nodes that will read them no longer.

    Raises:
        Refusal: Something does.
    """
    for value in values:
        others = [node for node in consumers(value) if node not in but]
        if others or value.is_graph_output():
            told = ", ".join(map(label, others)) or "an output of the model"
            sentence = f"the weights '{value.name}' would have to be copied: they are also read by {told}"
            raise Refusal(sentence, "expert-weights-shared", others)
