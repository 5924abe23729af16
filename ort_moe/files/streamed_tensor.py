"""A tensor that is made when it is written, one entry of its first axis after the other: never whole in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

Array = np.ndarray[Any, np.dtype[Any]]


class StreamedTensor(ir.LazyTensor):
    """A tensor of entries that are computed one by one; whoever asks for all of it gets a copy.

    Args:
        entry: Makes the entry of that number, of `dtype`.
        dtype: Element type, of whole bytes.
        shape: Shape; its first length is the number of entries.
        name: Name.
    """

    __slots__ = ("_entry",)

    def __init__(self, entry: Callable[[int], Array], dtype: ir.DataType, shape: ir.Shape, name: str) -> None:
        def whole() -> ir.TensorProtocol:
            return ir.Tensor(np.stack([entry(i) for i in range(shape.numpy()[0])]), dtype=dtype, shape=shape, name=name)

        super().__init__(whole, dtype=dtype, shape=shape, name=name)
        self._entry = entry

    def entry(self, number: int) -> Array:
        """One entry of the first axis."""
        return self._entry(number)

    def tofile(self, file: Any) -> None:
        """Writes the entries in their order, little-endian."""
        for number in range(self.shape.numpy()[0]):
            array = np.ascontiguousarray(self._entry(number))
            file.write(array.view(np.dtype(f"<u{array.dtype.itemsize}")).tobytes())


def entry_of(tensor: ir.TensorProtocol, number: int) -> Array:
    """One entry of the first axis of any tensor, without making or reading the others."""
    return tensor.entry(number) if isinstance(tensor, StreamedTensor) else tensor.numpy()[number]


def let_go(tensor: ir.TensorProtocol | None) -> None:
    """Unmaps what was read of a tensor in external data; it is mapped again where it is read again."""
    if isinstance(tensor, ir.ExternalTensor):
        with contextlib.suppress(BufferError):  # where somebody still holds an array of it
            tensor.release()
