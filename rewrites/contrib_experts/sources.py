"""Constants of a contrib node, as they lie or made of others one expert after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ort_moe.files.streamed_tensor import StreamedTensor, entry_of, let_go
from ort_moe.rewrites.experts.constants import read_initializer, require_unread
from ort_moe.rewrites.names import Names
from ort_moe.rewrites.rule import Refusal
from ort_moe.rewrites.values import Array


@dataclass(frozen=True)
class Source:
    """A tensor with an entry for each expert.

    Attributes:
        dtype: Element type.
        shape: (E, ...).
        entry: The numbers of one expert, in `dtype`.
        values: The initializers that it is made of.
        as_it_lies: Whether it is the one initializer, perhaps under another type of as many bits or another shape.
    """

    dtype: ir.DataType
    shape: tuple[int, ...]
    entry: Callable[[int], Array]
    values: tuple[ir.Value, ...]
    as_it_lies: bool = False

    def released_entry(self, expert: int) -> Array:
        """The numbers of one expert; behind the last one, what was read of the initializers is unmapped."""
        numbers = np.array(self.entry(expert))
        if expert == self.shape[0] - 1:
            for value in self.values:
                let_go(value.const_value)
        return numbers

    @property
    def base(self) -> str:
        """Name of what it is made of."""
        return self.values[0].name or "weights"


def constant_source(value: ir.Value | None, what: str) -> Source:
    """The initializer that a value is.

    Args:
        value: An input of the node.
        what: What errors call it.

    Raises:
        Refusal: It is computed or fed, or has no entry for each expert.
    """
    assert value is not None
    initializer = read_initializer(value, what)
    tensor = value.const_value
    assert tensor is not None
    if not initializer.shape:
        raise Refusal(f"{what} '{value.name}' have no entry for each expert", "contrib-form")
    return Source(tensor.dtype, initializer.shape, lambda expert: entry_of(tensor, expert), (value,), as_it_lies=True)


def viewed(source: Source, dtype: ir.DataType, shape: tuple[int, ...]) -> Source:
    """The same bytes as another type of as many bits, or in another shape."""

    def entry(expert: int) -> Array:
        return np.ascontiguousarray(source.entry(expert)).view(dtype.numpy()).reshape(shape[1:])

    return Source(dtype, shape, entry, source.values, source.as_it_lies)


def cast(source: Source, dtype: ir.DataType) -> Source:
    """The numbers in a wider type."""
    if source.dtype == dtype:
        return source
    return Source(dtype, source.shape, lambda expert: source.entry(expert).astype(dtype.numpy()), source.values)


def rows_joined(first: Source, second: Source) -> Source:
    """The rows of the first, then those of the second, of each expert."""

    def entry(expert: int) -> Array:
        parts = [source.entry(expert) for source in (first, second)]
        # ml_dtypes' arrays go through their bits: not every NumPy routine takes them.
        bits = [part.view(f"u{part.dtype.itemsize}") for part in parts]
        return np.concatenate(bits).view(parts[0].dtype)

    experts, rows, *rest = first.shape
    shape = (experts, rows + second.shape[1], *rest)
    return Source(first.dtype, shape, entry, (*first.values, *second.values))


def interleaved(source: Source) -> Source:
    """The rows of each expert's first half and those of its second in turn."""

    def entry(expert: int) -> Array:
        numbers = source.entry(expert)
        rows = len(numbers)
        return numbers[np.arange(rows).reshape(2, rows // 2).T.reshape(-1)]

    return Source(source.dtype, source.shape, entry, source.values)


def require_unshared(sources: Sequence[Source], node: ir.Node) -> None:
    """Refuse where an initializer would have to be stored a second time.

    Raises:
        Refusal: Something else reads one that a source is made of anew, or views as another type or in another shape.
    """
    require_unread([value for source in sources if not _is_initializer(source) for value in source.values], [node])


def _is_initializer(source: Source) -> bool:
    """Whether it needs no tensor of its own."""
    tensor = source.values[0].const_value
    assert tensor is not None
    return source.as_it_lies and tensor.dtype == source.dtype and tuple(tensor.shape.numpy()) == source.shape


def register(graph: ir.Graph, source: Source, suffix: str, names: Names) -> ir.Value:
    """The value that a fused node reads: the initializer itself, or a new one that is made when it is written."""
    (first, *_) = source.values
    assert first.const_value is not None
    if _is_initializer(source):
        return first
    name = names.unused(f"{source.base}_{suffix}")
    shape, tensor = ir.Shape(source.shape), first.const_value
    if source.as_it_lies and isinstance(tensor, ir.ExternalTensor):
        view: ir.TensorProtocol = ir.ExternalTensor(
            tensor.location,
            tensor.offset,
            tensor.length,
            source.dtype,
            shape=shape,
            name=name,
            base_dir=tensor.base_dir,
        )
    else:
        view = StreamedTensor(source.released_entry, source.dtype, shape, name)
    value = ir.Value(name=name, const_value=view, type=ir.TensorType(source.dtype), shape=shape)
    graph.register_initializer(value)
    return value
